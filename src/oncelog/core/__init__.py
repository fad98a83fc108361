"""Pure decisions: equality and identity of writes, and verdicts. No I/O, clock or randomness."""
