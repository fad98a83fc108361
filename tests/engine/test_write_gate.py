"""Disk limits and the read-only switch refuse new writes; everything else continues."""

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

import oncelog
from core.item_builders import (
    assert_committed,
    assert_refused,
    assert_replayed,
    event,
    key,
    message,
    result,
    transaction,
)
from databases import BOTH_STORES, POSTGRES, log_at
from deadlines import until
from engine.observable_store import WatchedLog
from oncelog.core.policy import RUNS
from oncelog.core.rules.audit import READ_ONLY_OFF
from oncelog.core.values import Applied, Claim, Granted, Mode, Reason, Refused, SetCursor, SetMember, Verdict
from oncelog.engine.audit import AuditFilter
from oncelog.engine.log import Log, open_log
from oncelog.engine.write_gate import PROBE_FREE_BYTES_MIN, RETRY_AFTER_MS, DiskLimits, ReadOnlyReason, WriteGate
from oncelog.errors import BusyError, DiskFullError, SettingsError, StoreUnavailableError
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.database_file import SqliteDriver
from oncelog.testing.disk import Disk, DiskDriver, Fault
from storage.memory_store import MemoryStore

QUICK: dict[str, Any] = {"look_ms": 1, "store_look_ms": 1}


def get_read_only_message(verdict: Verdict) -> str:
    """Assert that the verdict is a read-only refusal and return its message."""
    found = assert_refused(verdict, Reason.READ_ONLY)
    assert found.retry_after_ms == RETRY_AFTER_MS
    return found.message


class SizedStore(MemoryStore):
    """A store for which the test sets the free space and the size."""

    free: int | None = None
    size: int | None = None
    looks = 0

    def free_bytes(self) -> int | None:
        self.looks += 1
        return self.free

    async def size_bytes(self) -> int | None:
        return self.size


# --- read-only log ---------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("CO-15", "CO-18", "CO-30")
async def test_read_only_log_refuses_new_writes_and_serves_everything_else(tmp_path: Path) -> None:
    async with open_log(log_at(tmp_path / "log.db"), limits=oncelog.Limits(cache_entries_max=0)) as log:
        first = assert_committed(await log.submit(event(1, partitions=("a",))))
        await log.submit(SetMember("chat/1", "user:ann"))
        assert_committed(await log.submit(message(1)))
        claim = Claim(policy=RUNS, scope="campaign/1", key=key(1), fingerprint=b"", holder="ann")
        granted = await log.submit(claim)
        assert isinstance(granted, Granted)
        log.set_read_only()
        assert log.read_only == "an operator has made the log read-only"
        assert get_read_only_message(await log.submit(event(2, partitions=("a",)))) == (
            "new writes are refused for now: an operator has made the log read-only; try again later"
        )
        get_read_only_message(await log.submit(message(2)))
        get_read_only_message(await log.submit(transaction(1, 1)))
        get_read_only_message(await log.submit(replace(claim, key=key(2))))
        assert assert_replayed(await log.submit(event(1, partitions=("a",)))).receipt == first
        assert_refused(await log.submit(event(1, "other", partitions=("a",))), Reason.IDENTITY_REUSED)
        assert_replayed(await log.submit(message(1)))
        one, two = await log.submit_many([event(1, partitions=("a",)), event(3)])
        assert assert_replayed(one).receipt == first
        get_read_only_message(two)
        verdicts = await log.submit_many([event(4), event(5)], Mode.ALL)
        get_read_only_message(verdicts[0])
        assert assert_refused(verdicts[1], Reason.NOT_PROCESSED).index == 0
        # Writes that complete work or free space are accepted.
        assert await log.submit(SetCursor("reader", 1)) == Applied(changed=True)
        assert_committed(await log.submit(result(1, holder="ann", fence=granted.fence)))
        assert [record.position for record in (await log.read(partition="a")).records] == [1]
        assert await log.erase(partition="a") == 1
        log.set_read_only(False)
        assert not log.read_only
        assert_committed(await log.submit(event(2, partitions=("a",))))


@BOTH_STORES
def test_once_on_a_read_only_log_returns_stored_results_and_refuses_new_work(tmp_path: Path) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        calls = []

        @oncelog.once(log, key=str, name="work")
        def work(number: int) -> int:
            calls.append(number)
            return number

        assert work(1) == 1
        log.set_read_only(True)
        with pytest.raises(BusyError, match="new writes are refused for now"):
            work(2)
        assert work(1) == 1
        log.set_read_only(False)
        assert work(2) == 2
        assert calls == [1, 2]


async def test_equal_writes_on_a_read_only_log_get_the_same_refusal(log: WatchedLog) -> None:
    log.set_read_only()
    told = await asyncio.gather(*[log.submit(event(1)) for _ in range(3)])
    assert [get_read_only_message(verdict) for verdict in told] == [get_read_only_message(told[0])] * 3
    assert len(log.store.batches) == 1


# --- disk limits ---------------------------------------------------------------------------------------


async def test_low_disk_space_refuses_new_writes_until_a_tenth_more_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        store = SizedStore()
        store.free = 1000
        async with Log(store, room=DiskLimits(free_bytes_min=1000, look_ms=3_600_000)) as log:
            assert_committed(await log.submit(event(1)))
            for free in (999, 1, 1000, 1099):
                store.free = free
                assert "less than 1000 bytes are free on the disk" in get_read_only_message(await log.submit(event(2)))
            assert_replayed(await log.submit(event(1)))
            assert log.write_gate.reasons == {ReadOnlyReason.FREE}
            store.free = 1100
            assert_committed(await log.submit(event(2)))
            store.free = None
            assert_committed(await log.submit(event(3)))
    assert [record.message for record in caplog.records if record.name == "oncelog.engine"] == [
        "new writes are refused: less than 1000 bytes are free on the disk",
        "new writes are accepted again; this reason no longer applies: less than 1000 bytes are free on the disk",
    ]


async def test_disk_limits_are_polled_without_writes() -> None:
    store = SizedStore()
    store.free, store.size = 10, 5
    async with Log(store, room=DiskLimits(free_bytes_min=10, store_bytes_max=10, **QUICK)) as log:
        assert log.write_gate.reasons == set()
        store.size = 11
        await until(lambda: log.write_gate.reasons == {ReadOnlyReason.SIZE})
        store.free = 9
        await until(lambda: log.write_gate.reasons == {ReadOnlyReason.SIZE, ReadOnlyReason.FREE})
        assert log.read_only == "the store is larger than 10 bytes; less than 10 bytes are free on the disk"
        store.size = 10
        await until(lambda: log.write_gate.store_bytes == 10)
        assert ReadOnlyReason.SIZE in log.write_gate.reasons, "the size must first fall by a tenth"
        store.free, store.size = 11, 9
        await until(lambda: not log.read_only)


async def test_disk_limits_can_be_changed_at_runtime() -> None:
    store = SizedStore()
    store.free = 10
    async with Log(store) as log:
        assert log.write_gate.disk_limits is None
        log.write_gate.set_limits(DiskLimits(free_bytes_min=20, **QUICK))
        await until(lambda: bool(log.read_only))
        log.write_gate.set_limits(DiskLimits(free_bytes_min=5, **QUICK))
        assert_committed(await log.submit(event(1)))
        log.write_gate.set_limits(None)
        store.free = 0
        assert_committed(await log.submit(event(2)))


@pytest.mark.parametrize("limit", ["free_bytes_min", "store_bytes_max"])
async def test_removed_disk_limit_no_longer_refuses_writes(limit: str) -> None:
    """No write is refused immediately, and none is refused by a poll that had already started."""
    store = SizedStore()
    store.free, store.size = 10, 1000
    async with Log(store, room=DiskLimits(**{"free_bytes_min": 0, limit: 20}, **QUICK)) as log:
        assert log.read_only
        log.write_gate.set_limits(DiskLimits(free_bytes_min=0, **QUICK))
        await until(lambda: not log.read_only)
        looked = store.looks
        await until(lambda: store.looks > looked + 5)
        assert not log.read_only
        assert_committed(await log.submit(event(1)))


@pytest.mark.parametrize(
    ("given", "free_again", "store_again"),
    [
        (DiskLimits(free_bytes_min=100, store_bytes_max=100), 110, 90),
        (
            DiskLimits(free_bytes_min=100, free_again_bytes_min=500, store_bytes_max=100, store_again_bytes_max=1),
            500,
            1,
        ),
        (
            DiskLimits(free_bytes_min=100, free_again_bytes_min=5, store_bytes_max=100, store_again_bytes_max=500),
            100,
            100,
        ),
    ],
)
def test_writes_resume_at_thresholds_beyond_the_disk_limits(
    given: DiskLimits, free_again: int, store_again: int
) -> None:
    assert (given.free_again_bytes, given.store_again_bytes) == (free_again, store_again)


@pytest.mark.parametrize("wrong", [{"free_bytes_min": -1}, {"look_ms": 0}, {"store_bytes_max": "1"}])
def test_invalid_disk_limit_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        DiskLimits(**wrong)


@BOTH_STORES
async def test_stores_report_their_size(tmp_path: Path, store_kind: str) -> None:
    async with open_log(log_at(tmp_path / "log.db"), room=DiskLimits(store_bytes_max=1000)) as log:
        assert "larger than 1000 bytes" in get_read_only_message(await log.submit(event(1)))
        assert (log.write_gate.store_bytes or 0) > 1000
        assert (log.write_gate.free_bytes is None) == (store_kind == POSTGRES)
        log.write_gate.set_limits(DiskLimits(store_bytes_max=2**50))
        assert_committed(await log.submit(event(1)))


class SmallDriver(SqliteDriver):
    """Writes real files on a simulated disk of a given size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def get_free_bytes(self, path: str) -> int | None:
        return self.size - self.file_bytes(path) - self.file_bytes(f"{path}-wal")

    @staticmethod
    def file_bytes(path: str) -> int:
        return Path(path).stat().st_size if Path(path).exists() else 0


async def test_write_ahead_log_counts_as_used_disk_space(tmp_path: Path) -> None:
    """Opening the log first checkpoints the write-ahead log, which needs space."""
    path, driver = str(tmp_path / "log.db"), SmallDriver(6_000_000)
    log = Log(SqliteStore(path, driver=driver), room=DiskLimits(free_bytes_min=1_000_000, look_ms=3_600_000))
    async with log:
        for number in range(1, 1000):
            if isinstance(await log.submit(event(number, body=b"x" * 20_000)), Refused):
                break
        beside = driver.file_bytes(f"{path}-wal")
        assert log.write_gate.reasons == {ReadOnlyReason.FREE}
        assert beside > 2_000_000
        free = driver.get_free_bytes(path)
        assert free is not None
        assert log.write_gate.free_bytes == free - beside
        assert free > beside, "the write-ahead log does not fit into the file"


async def test_guard_checkpoints_the_write_ahead_log_to_free_space(tmp_path: Path) -> None:
    """Commits no longer trigger checkpoints, so the guard runs them until the file itself leaves too little space."""
    path, driver = str(tmp_path / "log.db"), SmallDriver(6_000_000)
    room = DiskLimits(free_bytes_min=1_000_000, free_again_bytes_min=1_500_000, **QUICK)
    async with Log(SqliteStore(path, driver=driver), room=room) as log:
        number = 0
        while driver.file_bytes(path) < 3_000_000:
            number += 1
            if isinstance(await log.submit(event(number, body=b"x" * 20_000)), Refused):
                await until(lambda: not log.read_only)
        await until(lambda: not log._act_queue.waiting)
        # On a slow machine the guard frees space between two submissions, and no submission is refused.
        assert (await log.audit(wanted=AuditFilter(act=READ_ONLY_OFF))).entries
        driver.size = driver.file_bytes(path) + 900_000
        get_read_only_message(await log.submit(event(1000)))
        await until(lambda: not driver.file_bytes(f"{path}-wal"))
        assert log.write_gate.reasons == {ReadOnlyReason.FREE}


@pytest.mark.parametrize("error", [DiskFullError("no room to move anything"), RuntimeError("locking protocol")])
async def test_failed_checkpoint_of_the_guard_is_retried(error: Exception) -> None:
    store = UncheckpointableStore()
    store.error = error
    store.free = 9
    async with Log(store, room=DiskLimits(free_bytes_min=10, **QUICK)) as log:
        await until(lambda: store.tried > 2)
        assert log.write_gate.reasons == {ReadOnlyReason.FREE}
        store.free = 11
        await until(lambda: not log.read_only)


class UncheckpointableStore(SizedStore):
    tried = 0
    error = Exception()

    async def scrub(self) -> bool:
        self.tried += 1
        raise self.error


# --- full disk -----------------------------------------------------------------------------------------


async def test_full_disk_refuses_new_writes_until_a_probe_succeeds() -> None:
    """The first write on a full disk raises an error with unknown outcome; the next one is refused."""
    with Disk() as disk:
        store = SqliteStore("log.db", driver=DiskDriver(disk))
        async with Log(store, room=DiskLimits(look_ms=1)) as log:
            first = assert_committed(await log.submit(event(1, body=b"x" * 9000)))
            disk.fail_at(1, Fault.FULL, sticky=True)
            with pytest.raises(DiskFullError):
                await log.submit(event(2, body=b"x" * 9000))
            assert "the disk is full" in get_read_only_message(await log.submit(event(3, body=b"x" * 9000)))
            assert assert_replayed(await log.submit(event(1, body=b"x" * 9000))).receipt == first
            assert len((await log.read()).records) == 1
            assert log.write_gate.reasons == {ReadOnlyReason.FULL}
            disk.repair()
            await until(lambda: not log.read_only)
            assert_committed(await log.submit(event(2, body=b"x" * 9000)))
            assert_committed(await log.submit(event(3, body=b"x" * 9000)))


async def test_log_without_disk_limits_raises_disk_full_for_each_write() -> None:
    with Disk() as disk:
        async with Log(SqliteStore("log.db", driver=DiskDriver(disk))) as log:
            disk.fail_at(1, Fault.FULL, sticky=True)
            for _ in range(2):
                with pytest.raises(DiskFullError):
                    await log.submit(event(1, body=b"x" * 9000))
            disk.repair()
            assert_committed(await log.submit(event(1, body=b"x" * 9000)))


@pytest.mark.stores(POSTGRES)
async def test_full_database_refuses_new_writes_until_a_probe_succeeds(tmp_path: Path) -> None:
    """Triggers raise the server error 53100 for commits and probes."""
    address = log_at(tmp_path / "log.db")
    async with open_log(address, room=DiskLimits(look_ms=1)) as log:
        first = assert_committed(await log.submit(event(1)))
        await execute(address, FULL)
        with pytest.raises(DiskFullError, match="no room"):
            await log.submit(event(2))
        get_read_only_message(await log.submit(event(2)))
        assert assert_replayed(await log.submit(event(1))).receipt == first
        await execute(address, "DROP TRIGGER full_records ON oncelog_records")
        get_read_only_message(await log.submit(event(2)))
        await execute(address, "DROP TRIGGER full_state ON oncelog_state")
        await until(lambda: not log.read_only)
        assert_committed(await log.submit(event(2)))


async def execute(address: str, statements: str) -> None:
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(statements)
    finally:
        await connection.close()


FULL = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'there is no room' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER full_records BEFORE INSERT ON oncelog_records EXECUTE FUNCTION full_disk();
CREATE TRIGGER full_state BEFORE UPDATE ON oncelog_state EXECUTE FUNCTION full_disk();
"""


async def test_probes_of_a_repeatedly_full_disk_back_off() -> None:
    """A probe is small and can succeed where larger writes fail."""
    store = ProbeCountingStore()
    guard = WriteGate(store, DiskLimits(look_ms=1))
    await guard.start()
    pauses = []
    for _ in range(5):
        guard.notify_failure(DiskFullError("no room"))
        pauses.append(guard._pause_ms)
        await until(lambda: not guard.reasons)
    await guard.stop()
    assert pauses == [1, 2, 4, 8, 16]
    assert store.tried == 5
    guard.notify_failure(StoreUnavailableError("something else"))
    assert not guard.reasons


async def test_full_disk_stays_full_while_almost_nothing_is_free() -> None:
    store = ProbeCountingStore()
    store.free = PROBE_FREE_BYTES_MIN - 1
    guard = WriteGate(store, DiskLimits(look_ms=1))
    await guard.start()
    guard.notify_failure(DiskFullError("no room"))
    await until(lambda: store.tried > 2)
    assert guard.reasons == {ReadOnlyReason.FULL}
    store.free = PROBE_FREE_BYTES_MIN
    await until(lambda: not guard.reasons)
    await guard.stop()


async def test_probe_of_a_full_disk_checkpoints_the_write_ahead_log(tmp_path: Path) -> None:
    """Opening the log also runs a checkpoint, so new writes are refused if that would fail."""
    path, driver = tmp_path / "log.db", SmallDriver(100_000_000)
    async with Log(SqliteStore(path, driver=driver), room=DiskLimits(look_ms=1)) as log:
        for number in range(1, 20):
            assert_committed(await log.submit(event(number, body=b"x" * 20_000)))
        assert driver.file_bytes(f"{path}-wal") > 400_000
        log.write_gate.notify_failure(DiskFullError("no room"))
        await until(lambda: not log.read_only)
        assert driver.file_bytes(str(path)) > 400_000
        assert driver.file_bytes(f"{path}-wal") < 60_000, "the audit records of read-only on and off"


class ProbeCountingStore(SizedStore):
    tried = 0

    async def probe(self) -> None:
        self.tried += 1


async def test_size_limit_recovers_after_a_long_reader_releases_the_write_ahead_log(tmp_path: Path) -> None:
    room = DiskLimits(store_bytes_max=3_000_000, **QUICK)
    async with Log(SqliteStore(tmp_path / "log.db"), room=room) as log:
        assert_committed(await log.submit(event(1)))
        with closing(sqlite3.connect(tmp_path / "log.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM oncelog_records").fetchone()
            number = 2
            while not isinstance(await log.submit(event(number)), Refused):
                number += 1
            assert "the store is larger than 3000000 bytes" in log.read_only
        await until(lambda: not log.read_only)
        assert_committed(await log.submit(event(number)))
