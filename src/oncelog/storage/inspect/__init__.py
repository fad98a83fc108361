"""Read-only access to a log for commands, whatever database it is stored in."""
