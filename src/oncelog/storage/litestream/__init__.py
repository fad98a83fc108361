"""Continuous backups of a log in a file, by Litestream (docs/decisions/0059)."""
