"""The pure heart: what is equal, who a write is, and what becomes of it. No I/O, no clock, no randomness."""
