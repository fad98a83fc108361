"""A log in a PostgreSQL database, for any number of gateways."""

from oncelog.stores.postgres.connecting import Timeouts
from oncelog.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore", "Timeouts"]
