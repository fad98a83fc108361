"""The ledger as its wire has it: the protocol in its file, and what is compiled from it (`make stubs`)."""
