"""Failures of the environment: forks, removed files, damaged tables, and readers that block an erasure."""

import asyncio
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import oncelog
from core.item_builders import delta
from databases import BOTH_STORES, log_at
from oncelog import ClosedError, CorruptError, Cursor, OncelogError, StoreUnavailableError
from oncelog.core.merge import Op
from oncelog.engine import answer_cache, eraser
from oncelog.engine.limits import Limits
from oncelog.engine.tailer import Tailer
from oncelog.storage.store import Page, Query
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.writes import event, key
from storage.memory_store import MemoryStore


@BOTH_STORES
def test_blocking_log_is_closed_in_a_forked_child(tmp_path: Path) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        assert_committed(log.submit(event(1)))
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(300)  # Kills a child that hangs, so that the exit status differs.
            status = 1
            try:
                log.submit(event(2))
            except ClosedError:
                log.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert assert_committed(log.submit(event(2))).position == 2


@BOTH_STORES
@pytest.mark.rule("DE-13")
@pytest.mark.parametrize("age_ms", [-1, 2**63, 1.5, True, "1"])
def test_tombstone_age_out_of_range_is_refused_before_anything_is_compacted(tmp_path: Path, age_ms: Any) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        assert_committed(log.submit(delta(1, op=Op.DELETE, scope="gateway/1")))
        with pytest.raises(ValueError, match=rf"tombstone_age_ms must be .* from 0 to {2**63 - 1}, not {age_ms!r}"):
            log.compact("gateway/1", keep=0, tombstone_age_ms=age_ms)
        (record,) = log.read(stream="gateway/1").records
        assert not record.erased
        assert log.compact("gateway/1", keep=0, tombstone_age_ms=0).dropped == 1


@pytest.mark.rule("CO-11", "CO-16")
def test_write_to_a_removed_or_replaced_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with oncelog.open_blocking(path) as log:
        assert_committed(log.submit(event(1)))
        for name in tmp_path.iterdir():
            name.unlink()
        with pytest.raises(StoreUnavailableError, match="removed or replaced"):
            log.submit(event(2))
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE mine (id)")
        with pytest.raises(StoreUnavailableError, match="removed or replaced"):
            log.submit(event(2))


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM oncelog_state",
        "DROP TABLE oncelog_lanes",
        "DROP TABLE oncelog_policies",
        "UPDATE oncelog_policies SET declaration = '{}'",
        "UPDATE oncelog_records SET partitions = '{'",
        "UPDATE oncelog_records SET actor = CAST(x'ff' AS TEXT)",
    ],
)
def test_damaged_table_raises_corrupt_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.db"
    with oncelog.open_blocking(path) as log:
        assert_committed(log.submit(event(1)))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(damage)
    with pytest.raises(CorruptError, match=r"log\.db"), oncelog.open_blocking(path) as log:
        log.read()


@pytest.mark.rule("CO-41")
def test_erasure_blocked_by_a_reader_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    monkeypatch.setattr(eraser, "SCRUB_ATTEMPTS", 2)
    monkeypatch.setattr(eraser, "SCRUB_PAUSE_S", 0)
    monkeypatch.setattr(
        answer_cache, "ERASURES_POLL_MS", 3_600_000
    )  # Ends the reads of the log, which would block the second erasure.

    def is_on_disk() -> bool:
        return any(b"very secret" in name.read_bytes() for name in tmp_path.iterdir())

    with oncelog.open_blocking(path) as log:
        assert_committed(log.submit(event(1, body=b"very secret", partitions=("p",))))
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM oncelog_records").fetchone()
            with pytest.raises(StoreUnavailableError, match="erase it again"):
                log.erase(partition="p")
            assert_committed(log.submit(event(2)))  # writes do not wait for the reader
            assert is_on_disk()
        assert log.erase(partition="p") == 0
        assert not is_on_disk()


@pytest.mark.rule("EV-13")
async def test_subscription_receives_no_record_from_before_its_start() -> None:
    store = MemoryStore()
    await store.open()
    for number in (1, 2, 3):
        await store.commit([oncelog.Request((event(number),))])
    tailer = Tailer(store, 0, 0, Limits())
    first = tailer.subscribe(frozenset(), None)
    reading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inner = store.read

    async def slow_read(query: Query) -> Page:
        page = await inner(query)
        await reading
        return page

    store.read = slow_read  # type: ignore[method-assign]
    tailer.wake(3)
    await asyncio.sleep(0)
    first.close()
    tailer.position = 3  # as `Tailers.subscribe` does for a lane without subscriptions
    second = tailer.subscribe(frozenset(), None)
    reading.set_result(None)
    await store.commit([oncelog.Request((event(4),))])
    tailer.wake(4)
    while tailer.position < 4:
        await asyncio.sleep(0)
        tailer.wake(4)
    assert [record.position for record in await second.next()] == [4]


@BOTH_STORES
@pytest.mark.rule("CO-40")
def test_cursor_of_another_order_is_refused(tmp_path: Path) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        log.submit_many([event(number) for number in (1, 2, 3)])
        page = log.read(limit=2)
        assert [record.position for record in log.read(after=str(page.cursor)).records] == [3]
        with pytest.raises(ValueError, match="the cursor belongs to"):
            log.read(stream="chat/1", after=page.cursor)
        with pytest.raises(ValueError, match="the cursor belongs to"):
            log.read(lane=1, after=Cursor(1, log.epoch, "stream/chat/1"))
        for wrong in (-1, 1.5, None, b"x"):
            with pytest.raises((ValueError, TypeError)):
                log.read(after=wrong)  # type: ignore[arg-type]
        for lane in (-1, 99, 2**63):
            with pytest.raises(ValueError, match="lane must be from 0 to 16"):
                log.read(lane=lane)
        with pytest.raises(OncelogError):
            log.read(stream="\ud800")
        assert log.lookup(str(oncelog.event("0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10", {"type": "t"}, ["p"]).key.hex()))
        assert log.lookup(key(1)).record is not None
        with pytest.raises(ValueError, match="at most 64"):
            log.read(partitions=[f"p{number}" for number in range(65)])
        assert len(log.read(partitions=["p"] * 65).records) == len(log.read(partition="p").records)
