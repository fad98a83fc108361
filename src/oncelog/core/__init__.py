"""Pure decisions about writes: their identity, their equality and their verdicts. No I/O, no clock, no randomness."""
