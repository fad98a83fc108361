"""Version 1: `ledger.proto`."""
