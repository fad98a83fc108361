"""Pure decisions: what is equal, the identity of a write, and its verdict. No I/O, no clock, no randomness."""
