"""SQLite: the log in a file, without a server."""

from oncelog.storage.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
