"""Rules that `plan` applies to a batch, one module for each kind of state."""
