"""Read-only access to a log for commands, whichever database stores it."""
