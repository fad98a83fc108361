"""The ledger door: gRPC, and the same over HTTP and JSON. docs/ledger.md."""
