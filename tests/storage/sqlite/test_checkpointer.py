"""The checkpointer copies the write-ahead log into the file without blocking commits."""

import asyncio
import logging
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from deadlines import WAIT_S
from oncelog.core.values import Request
from oncelog.storage.sqlite import store as sqlite_store
from oncelog.storage.sqlite.store import CHECKPOINT_RECORDS, SqliteStore
from oncelog.storage.sqlite.writer import Writer
from oncelog.testing.contract.writes import event
from storage.sqlite.writers import open_sqlite


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "CHECKPOINT_PAUSE_S", 0)


def batch(first: int, count: int) -> list[Request]:
    return [Request(tuple(event(number) for number in range(first, first + count)))]


def records_in_file(path: Path) -> int:
    """Return the number of records in the file itself, without its write-ahead log."""
    alone = path.with_suffix(".alone")
    # Runs in another process, because closing the file in this process would drop SQLite's locks.
    subprocess.run(["/bin/cp", path, alone], check=True)  # noqa: S603
    with closing(sqlite3.connect(alone)) as connection:
        return int(connection.execute("SELECT count(*) FROM oncelog_records").fetchone()[0])


def is_checkpointing(store: SqliteStore) -> bool:
    return store._checkpoint_task is not None and not store._checkpoint_task.done()


async def wait_for_checkpoint(store: SqliteStore) -> None:
    if store._checkpoint_task is not None:
        await asyncio.wait([store._checkpoint_task])


async def test_checkpoint_starts_after_a_number_of_records(store: SqliteStore, tmp_path: Path) -> None:
    await store.commit(batch(1, CHECKPOINT_RECORDS - 1))
    assert not is_checkpointing(store)
    assert records_in_file(tmp_path / "log.db") == 0
    await store.commit(batch(CHECKPOINT_RECORDS, 1))
    await wait_for_checkpoint(store)
    assert records_in_file(tmp_path / "log.db") == CHECKPOINT_RECORDS
    await store.commit(batch(CHECKPOINT_RECORDS + 1, 1))
    assert not is_checkpointing(store)


async def test_commits_continue_during_a_checkpoint(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    moved = SqliteStore._checkpoint

    def wait_in_checkpoint(store: SqliteStore) -> None:
        begun.set()
        may_end.wait(WAIT_S)
        moved(store)

    monkeypatch.setattr(SqliteStore, "_checkpoint", wait_in_checkpoint)
    try:
        await store.commit(batch(1, CHECKPOINT_RECORDS))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        await store.commit(batch(CHECKPOINT_RECORDS + 1, 10))
        may_end.set()
        await wait_for_checkpoint(store)
        assert records_in_file(tmp_path / "log.db") == CHECKPOINT_RECORDS + 10
    finally:
        may_end.set()


async def test_scrub_waits_for_a_running_checkpoint(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()
    scrub = Writer.scrub

    def wait_in_checkpoint(_: SqliteStore) -> None:
        begun.set()
        may_end.wait(WAIT_S)
        order.append("moved")

    def record_scrub(session: Writer) -> bool:
        order.append("scrubbed")
        return scrub(session)

    monkeypatch.setattr(SqliteStore, "_checkpoint", wait_in_checkpoint)
    monkeypatch.setattr(Writer, "scrub", record_scrub)
    try:
        await store.commit(batch(1, CHECKPOINT_RECORDS))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        scrubbing = asyncio.ensure_future(store.scrub())
        await asyncio.sleep(0)
        await store.find_keys([])  # Returns only after the writer thread has run an earlier call.
        assert order == []
        may_end.set()
        assert await scrubbing
        assert order == ["moved", "scrubbed"]
    finally:
        may_end.set()


async def test_failed_checkpoint_is_logged_and_retried(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_checkpoint(_: SqliteStore, use: str = "reader") -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched, caplog.at_level(logging.DEBUG, logger="oncelog.sqlite"):
        patched.setattr(SqliteStore, "_reader_connection", fail_checkpoint)
        await store.commit(batch(1, CHECKPOINT_RECORDS))
        await wait_for_checkpoint(store)
    assert "the checkpoint failed" in caplog.text
    assert "disk I/O error" in caplog.text
    await store.commit(batch(CHECKPOINT_RECORDS + 1, CHECKPOINT_RECORDS))
    await wait_for_checkpoint(store)
    assert records_in_file(tmp_path / "log.db") == 2 * CHECKPOINT_RECORDS


async def test_store_can_be_closed_during_a_checkpoint(tmp_path: Path) -> None:
    store = await open_sqlite(tmp_path / "log.db")
    await store.commit(batch(1, CHECKPOINT_RECORDS))
    moving = store._checkpoint_task
    assert moving is not None
    await store.close()
    assert moving.done()
    await store.open()
    try:
        await store.commit(batch(CHECKPOINT_RECORDS + 1, CHECKPOINT_RECORDS))
        await wait_for_checkpoint(store)  # a second checkpoint, because the first never started
        assert records_in_file(tmp_path / "log.db") == 2 * CHECKPOINT_RECORDS
    finally:
        await store.close()
    store = await open_sqlite(tmp_path / "log.db")
    try:
        heads = await store.heads()
        assert heads[0].position == 2 * CHECKPOINT_RECORDS
    finally:
        await store.close()


def test_sqlite_does_not_restart_the_wal_during_a_read(tmp_path: Path) -> None:
    """`SqliteStore._checkpoint` relies on this while frames remain to be checkpointed."""
    with open_three_connections(tmp_path / "x.db") as (writer, reader, mover):
        log = fill_write_ahead_log(writer)
        read(reader)
        assert mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone() == (0, log, log)
        writer.execute("INSERT INTO t VALUES (zeroblob(20000))")
        assert mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1] > log
        reader.execute("ROLLBACK")
        mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        writer.execute("INSERT INTO t VALUES (zeroblob(20000))")
        assert mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1] < log


def test_sqlite_reader_blocks_the_checkpoint_after_a_wal_restart(tmp_path: Path) -> None:
    """The reader blocks it even if there was nothing to checkpoint when the read began."""
    with open_three_connections(tmp_path / "x.db") as (writer, reader, mover):
        log = fill_write_ahead_log(writer)
        assert mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone() == (0, log, log)
        read(reader)
        writer.execute("INSERT INTO t VALUES (zeroblob(20000))")
        _, begun_anew, moved = mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert begun_anew < log
        assert moved == 0


@contextmanager
def open_three_connections(path: Path) -> Iterator[list[sqlite3.Connection]]:
    """Open connections of a writer, a reader and a checkpointer."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(sqlite3.connect(path, isolation_level=None))) for _ in range(3)]


def fill_write_ahead_log(writer: sqlite3.Connection) -> int:
    """Fill the write-ahead log and return its number of pages."""
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("PRAGMA wal_autocheckpoint = 0")
    writer.execute("CREATE TABLE t (b BLOB)")
    for _ in range(30):
        writer.execute("INSERT INTO t VALUES (zeroblob(20000))")
    path = writer.execute("PRAGMA database_list").fetchone()[2]
    return (Path(f"{path}-wal").stat().st_size - 32) // (4096 + 24)


def read(reader: sqlite3.Connection) -> None:
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM t").fetchone()
