"""A log in a PostgreSQL database, shared by any number of servers."""

from oncelog.storage.postgres.connection import Timeouts
from oncelog.storage.postgres.store import PostgresStore

__all__ = ["PostgresStore", "Timeouts"]
