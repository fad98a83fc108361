"""Prepared batches: the event loop decides and writes them, and the writer thread makes them durable."""

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deadlines import WAIT_S
from oncelog.core.values import Committed, Request
from oncelog.storage.sqlite import store as sqlite_store
from oncelog.storage.sqlite.store import SqliteStore
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import BatchResult, BatchTraces
from oncelog.testing.contract.writes import event
from storage.sqlite.writers import open_sqlite


def batch(*numbers: int) -> list[Request]:
    return [Request((event(number),)) for number in numbers]


class WriterCalls:
    """Records the methods of the writer's session and the thread that calls each of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, bool]] = []
        """Method names, each with a flag that is true if the method ran on the event loop's thread."""
        for name in ("prepare", "finish", "commit"):
            monkeypatch.setattr(Writer, name, self._recording(name, getattr(Writer, name)))

    def _recording(self, name: str, done: Any) -> Any:
        def record(session: Writer, *arguments: Any) -> Any:
            result = done(session, *arguments)
            is_here = threading.current_thread() is threading.main_thread()
            self.seen.append((name if result is not None or name == "finish" else f"no {name}", is_here))
            return result

        return record


@pytest.fixture(autouse=True)
def patient_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a slow machine from being treated as a slow disk."""
    monkeypatch.setattr(sqlite_store, "LOOP_WAIT_S_MAX", WAIT_S)


@pytest.fixture
def writer_calls(monkeypatch: pytest.MonkeyPatch) -> WriterCalls:
    return WriterCalls(monkeypatch)


def are_committed(decided: BatchResult) -> int:
    return sum(isinstance(verdict, Committed) for verdicts in decided.verdicts for verdict in verdicts)


def read_positions(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM oncelog_records").fetchone()
    return int(count)


async def test_batch_is_written_on_the_loop_and_made_durable_by_the_writer_thread(
    store: SqliteStore, writer_calls: WriterCalls
) -> None:
    assert are_committed(await store.commit(batch(1, 2))) == 2
    assert writer_calls.seen == [("prepare", True), ("finish", False)]
    # A replay changes nothing and needs no commit.
    assert are_committed(await store.commit(batch(1, 2))) == 0
    assert writer_calls.seen[2:] == [("prepare", True)]


async def test_loop_does_not_wait_for_the_lock_of_another_process(
    store: SqliteStore, tmp_path: Path, writer_calls: WriterCalls
) -> None:
    path = tmp_path / "log.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(store.commit(batch(1)))
        for _ in range(3):
            await asyncio.sleep(0)  # the loop is not blocked; otherwise the test would hang
        assert writer_calls.seen == [("no prepare", True)]
        assert not waiting.done()
        other.execute("ROLLBACK")
        assert are_committed(await waiting) == 1
    assert writer_calls.seen == [("no prepare", True), ("commit", False)]


async def test_commits_wait_for_running_work_of_the_writer_thread(
    store: SqliteStore, writer_calls: WriterCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def scrub(_: Writer) -> bool:
        held.set()
        return go_on.wait(WAIT_S)

    monkeypatch.setattr(Writer, "scrub", scrub)
    scrubbing = asyncio.ensure_future(store.scrub())
    await asyncio.to_thread(held.wait, WAIT_S)
    waiting = asyncio.ensure_future(store.commit(batch(1)))
    await asyncio.sleep(0)
    assert writer_calls.seen == []
    # A cancelled caller does not make the thread idle.
    scrubbing.cancel()
    await asyncio.wait([scrubbing])
    second = asyncio.ensure_future(store.commit(batch(2)))
    await asyncio.sleep(0)
    assert writer_calls.seen == []
    go_on.set()
    await asyncio.gather(waiting, second)
    assert writer_calls.seen == [("commit", False)] * 2


async def test_cancelled_commit_leaves_no_transaction_open(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, finish = threading.Event(), Writer.finish

    def wait_in_writer(session: Writer) -> None:
        go_on.wait(WAIT_S)
        finish(session)

    monkeypatch.setattr(Writer, "finish", wait_in_writer)
    path = tmp_path / "log.db"
    going = asyncio.ensure_future(store.commit(batch(1)))
    await asyncio.sleep(0)
    going.cancel()
    await asyncio.wait([going])
    assert going.cancelled()
    go_on.set()
    assert are_committed(await store.commit(batch(1, 2))) == 1
    assert read_positions(path) == 2


async def test_failed_commit_raises_and_the_next_commit_succeeds(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.db"
    await store.commit(batch(1))
    with monkeypatch.context() as patched:

        def fail_batch(*_: Any) -> None:
            raise ZeroDivisionError

        patched.setattr("oncelog.storage.sqlite.transaction.StoreTransaction._save", fail_batch)
        with pytest.raises(ZeroDivisionError):
            await store.commit(batch(2))
    assert are_committed(await store.commit(batch(1, 2, 3))) == 2
    assert read_positions(path) == 3


@pytest.mark.parametrize("by", ["items", "bytes"])
async def test_large_batches_are_committed_by_the_writer_thread(
    store: SqliteStore, writer_calls: WriterCalls, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(sqlite_store, f"PREPARED_{by.upper()}_MAX", 2)
    assert are_committed(await store.commit(batch(1, 2, 3))) == 3
    assert writer_calls.seen == [("commit", False)]


@pytest.mark.parametrize(("written", "is_prepared"), [(0, True), (50, True), (1001, False)])
async def test_many_changes_of_another_process_are_read_by_the_writer_thread(
    store: SqliteStore, tmp_path: Path, writer_calls: WriterCalls, written: int, is_prepared: bool
) -> None:
    other = await open_sqlite(tmp_path / "log.db")
    await store.commit(batch(1))
    if written:
        assert are_committed(await other.commit(batch(*range(2, written + 2)))) == written
    writer_calls.seen.clear()
    assert are_committed(await store.commit(batch(1, 2, written + 2))) == 1
    expected = [("prepare", True), ("finish", False)] if is_prepared else [("no prepare", True), ("commit", False)]
    assert writer_calls.seen == expected
    await store.commit(batch(written + 3))
    assert writer_calls.seen[2:] == [("prepare", True), ("finish", False)]
    await other.close()


async def test_stopped_writer_thread_leaves_no_transaction_open(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the thread has been stopped")

    with monkeypatch.context() as patched:
        patched.setattr(store._writer_thread, "submit", refuse)
        with pytest.raises(RuntimeError):
            await store.commit(batch(1))
    assert are_committed(await store.commit(batch(1))) == 1


async def test_validation_runs_in_the_writer_thread(store: SqliteStore, writer_calls: WriterCalls) -> None:
    assert are_committed(await store.commit(batch(1), lambda _: None)) == 1
    assert writer_calls.seen == [("commit", False)]


async def test_slow_disk_moves_commits_to_the_writer_thread_for_a_while(
    store: SqliteStore, writer_calls: WriterCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(sqlite_store, "LOOP_WAIT_S_MAX", 0.1)
    monkeypatch.setattr("oncelog.storage.sqlite.store.time.monotonic", lambda: now_s[0])
    prepare = Writer.prepare

    def commit_slowly(
        session: Writer, asked: Sequence[Request], traces: BatchTraces | None = None
    ) -> BatchResult | None:
        now_s[0] += 0.2
        return prepare(session, asked, traces)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "prepare", commit_slowly)
        await store.commit(batch(1))
    await store.commit(batch(2))
    assert writer_calls.seen[2:] == [("commit", False)]
    now_s[0] += 6
    await store.commit(batch(3))
    assert writer_calls.seen[3:] == [("prepare", True), ("finish", False)]
