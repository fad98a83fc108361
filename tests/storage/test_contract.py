"""Every store passes the store contract."""

from pathlib import Path
from typing import ClassVar

from databases import address_of
from oncelog.core.values import Settings
from oncelog.storage.clock import Clock
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.database_file import MemoryDriver
from oncelog.storage.store import Draw, Store
from oncelog.testing.contract import StoreContract
from storage.memory_store import MemoryStore


class TestMemoryStore(StoreContract):
    is_durable: ClassVar[bool] = False

    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:  # noqa: ARG002
        return MemoryStore(settings, clock=clock, draw=draw)


class TestSqliteStoreInMemory(StoreContract):
    is_durable: ClassVar[bool] = False

    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:  # noqa: ARG002
        return SqliteStore(":memory:", settings, clock=clock, draw=draw, driver=MemoryDriver())


class TestSqliteStore(StoreContract):
    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:
        return SqliteStore(tmp_path / "log.db", settings, clock=clock, draw=draw)


class TestSqliteStoreWithSmallSegments(StoreContract):
    """A store whose key index seals and merges constantly."""

    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:
        return SqliteStore(tmp_path / "log.db", settings, clock=clock, draw=draw, seal_keys=8)


class TestPostgresStore(StoreContract):
    def make_store(self, tmp_path: Path, clock: Clock, settings: Settings | None, draw: Draw) -> Store:
        return PostgresStore(address_of(tmp_path), settings, clock=clock, draw=draw, keep_clock_ms=0)
