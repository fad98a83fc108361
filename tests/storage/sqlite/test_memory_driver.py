"""Logs in SQLite's memory use one connection, which stays open as long as the driver exists."""

import sqlite3

import pytest

from oncelog.core.values import Committed, Replayed, Request
from oncelog.errors import StoreUnavailableError
from oncelog.storage.sqlite.database_file import MemoryDriver
from oncelog.storage.sqlite.store import SqliteStore
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import event


async def test_log_in_memory_keeps_its_records_while_it_is_closed() -> None:
    store = SqliteStore(":memory:", clock=ManualClock(), driver=MemoryDriver())
    for outcome in (Committed, Replayed):
        await store.open()
        (verdicts,) = (await store.commit([Request((event(1),))])).verdicts
        assert [type(verdict) for verdict in verdicts] == [outcome]
        await store.close()


async def test_log_in_memory_keeps_its_records_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(":memory:", clock=ManualClock(), driver=MemoryDriver())
    await store.open()
    await store.commit([Request((event(1),))])
    with monkeypatch.context() as patched:
        patched.setattr(SqliteStore, "_prepare", lambda *_: None)
        connection = store._file_writer.connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreUnavailableError):
            await store.commit([Request(tuple(event(number) for number in range(2, 500)))])
        connection.execute("PRAGMA max_page_count = 4294967294")
    (verdicts,) = (await store.commit([Request((event(1), event(2)))])).verdicts
    assert [type(verdict) for verdict in verdicts] == [Replayed, Committed]
    await store.close()


def test_drivers_have_separate_databases() -> None:
    drivers = [MemoryDriver(), MemoryDriver()]
    drivers[0].connect(":memory:").execute("CREATE TABLE t (a)")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        drivers[1].connect(":memory:").execute("SELECT * FROM t")
