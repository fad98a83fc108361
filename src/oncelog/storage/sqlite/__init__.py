"""SQLite store: a log in one file, without a server."""

from oncelog.storage.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
