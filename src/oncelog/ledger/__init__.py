"""The gRPC protocol of the ledger: the `.proto` file, the modules compiled from it (`make stubs`), and a codec."""
