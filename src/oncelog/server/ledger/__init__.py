"""The Ledger API over gRPC, and over HTTP with JSON. See docs/reference/ledger.md."""
