"""The Ledger API: gRPC, and the same over HTTP and JSON. docs/ledger.md."""
