"""A log in a PostgreSQL database, for any number of gateways."""

from oncelog.storage.postgres.connection import Timeouts
from oncelog.storage.postgres.store import PostgresStore

__all__ = ["PostgresStore", "Timeouts"]
