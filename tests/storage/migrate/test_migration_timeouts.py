"""A move whose session hangs or is lost stops, releases the file, and can be continued.

The limits are far above the time that a slow machine needs. When a session hangs, the test advances the event loop's
time.
"""

import asyncio
import gc
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from asyncpg.protocol.protocol import Protocol

import oncelog
from deadlines import until
from engine.observable_store import LoopClock
from oncelog.core.values import Request
from oncelog.errors import StoreUnavailableError
from oncelog.storage.migrate import migration
from oncelog.storage.migrate.migration import MigrationOutcome, migrate_log
from oncelog.storage.migrate.target import MigrationTarget
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.queries.records import count_erasures, load_heads
from oncelog.testing.postgres_proxy import CommitFault, HeldMessage, PostgresProxy
from storage.migrate.migration_checks import (
    assert_moved,
    can_be_opened,
    ignore_progress,
    open_writer,
    read_file_rows,
    use_small_slices,
)
from storage.sqlite.writers import are_new, commit

LIMIT_S = 1000
UNLIMITED_MS = 3_600_000


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slices(monkeypatch)


def limit(
    monkeypatch: pytest.MonkeyPatch,
    *,
    call_ms: int = UNLIMITED_MS,
    locked_ms: int = UNLIMITED_MS,
    record_us: int = 0,
) -> None:
    monkeypatch.setattr("oncelog.storage.migrate.target.CALL_TIMEOUT_MS", call_ms)
    monkeypatch.setattr("oncelog.storage.migrate.target.LOCKED_CALL_TIMEOUT_MS", locked_ms)
    monkeypatch.setattr("oncelog.storage.migrate.target.RECORD_EXTRA_US", record_us)


def is_locked(path: Path) -> bool:
    with closing(sqlite3.connect(path, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


def moving_to(address: str, log: Path) -> "asyncio.Task[MigrationOutcome]":
    return asyncio.create_task(migration._migrate_log(str(log), address, ignore_progress))


async def assert_move_can_continue(path: Path, address: str) -> None:
    """Assert that the file is still the log and that the next move finishes."""

    def continue_it() -> None:
        assert not is_locked(path)
        assert not can_be_opened(PostgresStore(address))
        with open_writer(path) as session:
            assert are_new(commit(session, *range(5000, 5020)))
        assert migrate_log(str(path), address, ignore_progress).is_new
        assert_moved(path, address)

    await asyncio.to_thread(continue_it)  # runs in a thread because it starts event loops


@pytest.mark.parametrize(
    ("statement", "is_query"),
    [("BEGIN", False), ("DELETE FROM oncelog_leases", False), ("COPY", True), ("COMMIT", True), ("COMMIT", False)],
)
async def test_held_statement_releases_the_file_lock_after_the_limit(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock, statement: str, is_query: bool
) -> None:
    limit(monkeypatch, locked_ms=LIMIT_S * 1000)
    replace = MigrationTarget.replace_side_state
    held: asyncio.Future[HeldMessage] = asyncio.get_running_loop().create_future()
    async with PostgresProxy(database) as proxy:

        async def hold_session(target: MigrationTarget, *arguments: Any) -> None:
            held.set_result(proxy.hold(statement, is_query=is_query))
            await replace(target, *arguments)

        monkeypatch.setattr(MigrationTarget, "replace_side_state", hold_session)
        moving = moving_to(proxy.address, log)
        await (await held).wait_reached()
        assert is_locked(log)
        await loop_clock.advance_until(moving.done, LIMIT_S)
        with pytest.raises(StoreUnavailableError, match=f"no response within {LIMIT_S} s"):
            await moving
        assert not is_locked(log)
    monkeypatch.undo()
    await assert_move_can_continue(log, database)


@pytest.mark.parametrize(
    ("method", "query"),
    [("load_progress", None), ("run_query", count_erasures), ("run_query", load_heads), ("count_rows", None)],
)
async def test_stalled_session_releases_the_file_lock_after_the_limit(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock, method: str, query: Any
) -> None:
    limit(monkeypatch, locked_ms=LIMIT_S * 1000)
    original = getattr(MigrationTarget, method)
    stalled = asyncio.Event()
    async with PostgresProxy(database) as proxy:

        async def stall(target: MigrationTarget, *arguments: Any) -> Any:
            if is_locked(log) and (query is None or arguments[0] is query):
                assert not stalled.is_set()
                proxy.stall_all()
                stalled.set()
            return await original(target, *arguments)

        monkeypatch.setattr(MigrationTarget, method, stall)
        moving = moving_to(proxy.address, log)
        await stalled.wait()
        await loop_clock.advance_until(moving.done, LIMIT_S)
        with pytest.raises(StoreUnavailableError, match=f"no response within {LIMIT_S} s"):
            await moving
    monkeypatch.undo()
    await assert_move_can_continue(log, database)


@pytest.mark.parametrize("statement", ["BEGIN", "SET LOCAL", "COPY", "COMMIT"])
async def test_cancelled_move_drops_its_session_without_a_cancel_request(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    take = MigrationTarget.save_slice
    async with PostgresProxy(database) as proxy:
        taking: asyncio.Future[HeldMessage] = asyncio.get_running_loop().create_future()

        async def hold_slice(target: MigrationTarget, part: Any) -> None:
            taking.set_result(proxy.hold_after(statement, 1) if statement == "COPY" else proxy.hold(statement))
            await take(target, part)

        monkeypatch.setattr(MigrationTarget, "save_slice", hold_slice)
        moving = moving_to(proxy.address, log)
        await (await taking).wait_reached()
        accepted = proxy.accepted_count
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        connection = await asyncpg.connect(proxy.address)  # Earlier connections are accepted before this one.
        await connection.close()
        assert proxy.accepted_count == accepted + 1
    monkeypatch.undo()
    await assert_move_can_continue(log, database)


async def test_limit_grows_with_the_number_of_records(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock
) -> None:
    records = len(read_file_rows(log)["records"])
    limit(monkeypatch, locked_ms=LIMIT_S * 1000, record_us=500_000_000 // records)
    counts = MigrationTarget.count_rows
    stalled = asyncio.Event()
    async with PostgresProxy(database) as proxy:

        async def stall(target: MigrationTarget, number: int) -> dict[str, int]:
            assert number == records
            proxy.stall_all()
            stalled.set()
            return await counts(target, number)

        monkeypatch.setattr(MigrationTarget, "count_rows", stall)
        moving = moving_to(proxy.address, log)
        await stalled.wait()
        await loop_clock.advance_until(moving.done, LIMIT_S)
        with pytest.raises(StoreUnavailableError, match=f"no response within {LIMIT_S + 500} s"):
            await moving
    monkeypatch.undo()
    await assert_move_can_continue(log, database)


@pytest.mark.parametrize("fate", [CommitFault.STALLED, CommitFault.CUT_BEFORE, CommitFault.CUT_AT_ANSWER])
async def test_move_can_be_continued_after_a_lost_commit(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock, fate: CommitFault
) -> None:
    limit(monkeypatch, call_ms=LIMIT_S * 1000)
    take = MigrationTarget.save_slice
    async with PostgresProxy(database) as proxy:

        async def cut_session(target: MigrationTarget, part: Any) -> None:
            proxy.commit_faults.append(fate)
            await take(target, part)

        monkeypatch.setattr(MigrationTarget, "save_slice", cut_session)
        moving = moving_to(proxy.address, log)
        if fate is CommitFault.STALLED:
            await until(lambda: proxy.done[fate] == 1)
            await loop_clock.advance_until(moving.done, LIMIT_S)
        says = f"no response within {LIMIT_S} s" if fate is CommitFault.STALLED else "connection"
        with pytest.raises(StoreUnavailableError, match=says):
            await moving
        assert proxy.done[fate] == 1
    monkeypatch.undo()
    await assert_move_can_continue(log, database)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "stalled"])
async def test_blocked_copy_ends_with_its_session(
    tmp_path: Path,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loop_clock: LoopClock,
    is_cut: bool,
) -> None:
    """asyncpg alone would wait forever for a socket that accepts no further bytes."""
    gc.collect()  # ignores errors logged by earlier tests
    caplog.clear()
    path, pause = tmp_path / "log.db", Protocol.pause_writing
    with open_writer(path) as session:
        assert are_new(commit(session, 1, 2, 3))
        for number in range(900_000, 900_016):
            long = oncelog.event(UUID(int=number), {"type": "long", "text": "x" * 900_000}, ["a"])
            assert are_new(session.commit([Request((long,))], None).verdicts[0])
    limit(monkeypatch, call_ms=LIMIT_S * 1000)
    monkeypatch.setattr("oncelog.storage.migrate.source.SLICE_ROWS", 100)
    async with PostgresProxy(database) as proxy:
        held, is_paused = proxy.hold("COPY", is_query=True), asyncio.Event()

        def record_pause(protocol: Any) -> None:
            pause(protocol)
            is_paused.set()

        monkeypatch.setattr(Protocol, "pause_writing", record_pause)
        moving = moving_to(proxy.address, path)
        await held.wait_reached()
        await is_paused.wait()
        if is_cut:
            proxy.cut_all()
        else:
            await loop_clock.advance_until(moving.done, LIMIT_S)
        says = "lost during COPY" if is_cut else f"no response within {LIMIT_S} s"
        with pytest.raises(StoreUnavailableError, match=says):
            await moving
        assert proxy.cancel_requests == 0
    gc.collect()
    assert caplog.records == []
    monkeypatch.undo()
    await assert_move_can_continue(path, database)
