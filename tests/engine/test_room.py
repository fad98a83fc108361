"""No new writes where there is no room for them, or an operator says so; and everything else goes on."""

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
from core.writes import committed, event, key, message, refused, replayed, result, transaction
from databases import BOTH_STORES, POSTGRES, log_at
from doors.serving import run, until
from engine.watched import WatchedLog
from oncelog.core.policy import RUNS
from oncelog.core.values import Applied, Claim, Granted, Mode, Reason, Refused, SetCursor, SetMember, Verdict
from oncelog.engine.log import Log, open_log
from oncelog.engine.room import FULL_AGAIN_BYTES, RETRY_AFTER_MS, Guard, Room, Why
from oncelog.errors import BusyError, DiskFullError, SettingsError, StoreUnavailableError
from oncelog.stores.memory import MemoryStore
from oncelog.stores.sqlite import SqliteStore
from oncelog.stores.sqlite.files import SqliteDriver
from oncelog.testing.disk import Disk, DiskDriver, Fault

QUICK: dict[str, Any] = {"look_ms": 1, "store_look_ms": 1}


def held_back(verdict: Verdict) -> str:
    """What a write is told that must have been held back."""
    found = refused(verdict, Reason.READ_ONLY)
    assert found.retry_after_ms == RETRY_AFTER_MS
    return found.message


class Disks(MemoryStore):
    """A store whose disk is as full as a test says."""

    free: int | None = None
    size: int | None = None
    looks = 0

    def free_bytes(self) -> int | None:
        self.looks += 1
        return self.free

    async def size_bytes(self) -> int | None:
        return self.size


# --- what is held back, and what is not ------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("CO-15", "CO-18", "CO-30")
def test_new_writes_are_held_back_and_all_else_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_log(log_at(tmp_path / "log.db"), limits=oncelog.Limits(cache_entries_max=0)) as log:
            first = committed(await log.submit(event(1, partitions=("a",))))
            await log.submit(SetMember("chat/1", "user:ann"))
            committed(await log.submit(message(1)))
            claim = Claim(policy=RUNS, scope="campaign/1", key=key(1), fingerprint=b"", holder="ann")
            granted = await log.submit(claim)
            assert isinstance(granted, Granted)
            log.set_read_only()
            assert log.read_only == "an operator has set it so"
            assert held_back(await log.submit(event(2, partitions=("a",)))) == (
                "no new writes are taken for now: an operator has set it so; try again later"
            )
            held_back(await log.submit(message(2)))
            held_back(await log.submit(transaction(1, 1)))
            held_back(await log.submit(replace(claim, key=key(2))))
            assert replayed(await log.submit(event(1, partitions=("a",)))).receipt == first
            refused(await log.submit(event(1, "other", partitions=("a",))), Reason.IDENTITY_REUSED)
            replayed(await log.submit(message(1)))
            one, two = await log.submit_many([event(1, partitions=("a",)), event(3)])
            assert replayed(one).receipt == first
            held_back(two)
            verdicts = await log.submit_many([event(4), event(5)], Mode.ALL)
            held_back(verdicts[0])
            assert refused(verdicts[1], Reason.NOT_PROCESSED).index == 0
            # What ends something, or frees something.
            assert await log.submit(SetCursor("reader", 1)) == Applied(changed=True)
            committed(await log.submit(result(1, holder="ann", fence=granted.fence)))
            assert [record.position for record in (await log.read(partition="a")).records] == [1]
            assert await log.erase(partition="a") == 1
            log.set_read_only(False)
            assert not log.read_only
            committed(await log.submit(event(2, partitions=("a",))))

    run(main())


@BOTH_STORES
def test_work_that_is_done_once_is_put_off_and_what_was_done_is_told(tmp_path: Path) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        calls = []

        @oncelog.once(log, key=str, name="work")
        def work(number: int) -> int:
            calls.append(number)
            return number

        assert work(1) == 1
        log.set_read_only(True)
        with pytest.raises(BusyError, match="no new writes are taken for now"):
            work(2)
        assert work(1) == 1
        log.set_read_only(False)
        assert work(2) == 2
        assert calls == [1, 2]


def test_what_waits_for_the_same_write_is_told_the_same() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.set_read_only()
            told = await asyncio.gather(*[log.submit(event(1)) for _ in range(3)])
            assert [held_back(verdict) for verdict in told] == [held_back(told[0])] * 3
            assert len(log.store.batches) == 1

    run(main())


# --- how full a disk may be ----------------------------------------------------------------------------


def test_below_the_limit_nothing_new_is_taken_until_there_is_a_tenth_more(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = Disks()
        store.free = 1000
        async with Log(store, room=Room(free_bytes_min=1000, look_ms=3_600_000)) as log:
            committed(await log.submit(event(1)))
            for free in (999, 1, 1000, 1099):
                store.free = free
                assert "less than 1000 bytes of the disk are free" in held_back(await log.submit(event(2)))
            replayed(await log.submit(event(1)))
            assert log.guard.reasons == {Why.FREE}
            store.free = 1100
            committed(await log.submit(event(2)))
            store.free = None
            committed(await log.submit(event(3)))

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [record.message for record in caplog.records if record.name == "oncelog.engine"] == [
        "no new writes are taken: less than 1000 bytes of the disk are free",
        "new writes are taken again; this is over: less than 1000 bytes of the disk are free",
    ]


def test_it_is_noticed_by_the_clock_where_nobody_writes() -> None:
    async def main() -> None:
        store = Disks()
        store.free, store.size = 10, 5
        async with Log(store, room=Room(free_bytes_min=10, store_bytes_max=10, **QUICK)) as log:
            assert log.guard.reasons == set()
            store.size = 11
            await until(lambda: log.guard.reasons == {Why.SIZE})
            store.free = 9
            await until(lambda: log.guard.reasons == {Why.SIZE, Why.FREE})
            assert log.read_only == "the store has more than 10 bytes; less than 10 bytes of the disk are free"
            store.size = 10
            await until(lambda: log.guard.store_bytes == 10)
            assert Why.SIZE in log.guard.reasons, "not before it is a tenth less"
            store.free, store.size = 11, 9
            await until(lambda: not log.read_only)

    run(main())


def test_limits_can_be_changed_while_it_runs() -> None:
    async def main() -> None:
        store = Disks()
        store.free = 10
        async with Log(store) as log:
            assert log.guard.room is None
            log.guard.use(Room(free_bytes_min=20, **QUICK))
            await until(lambda: bool(log.read_only))
            log.guard.use(Room(free_bytes_min=5, **QUICK))
            committed(await log.submit(event(1)))
            log.guard.use(None)
            store.free = 0
            committed(await log.submit(event(2)))

    run(main())


@pytest.mark.parametrize("limit", ["free_bytes_min", "store_bytes_max"])
def test_a_limit_that_is_taken_away_holds_nothing_back_any_more(limit: str) -> None:
    """Neither at once nor by a look that had begun before."""

    async def main() -> None:
        store = Disks()
        store.free, store.size = 10, 1000
        async with Log(store, room=Room(**{"free_bytes_min": 0, limit: 20}, **QUICK)) as log:
            assert log.read_only
            log.guard.use(Room(free_bytes_min=0, **QUICK))
            await until(lambda: not log.read_only)
            looked = store.looks
            await until(lambda: store.looks > looked + 5)
            assert not log.read_only
            committed(await log.submit(event(1)))

    run(main())


@pytest.mark.parametrize(
    ("given", "free_again", "store_again"),
    [
        (Room(free_bytes_min=100, store_bytes_max=100), 110, 90),
        (Room(free_bytes_min=100, free_again_bytes_min=500, store_bytes_max=100, store_again_bytes_max=1), 500, 1),
        (Room(free_bytes_min=100, free_again_bytes_min=5, store_bytes_max=100, store_again_bytes_max=500), 100, 100),
    ],
)
def test_when_they_are_taken_again(given: Room, free_again: int, store_again: int) -> None:
    assert (given.free_again_bytes, given.store_again_bytes) == (free_again, store_again)


@pytest.mark.parametrize("wrong", [{"free_bytes_min": -1}, {"look_ms": 0}, {"store_bytes_max": "1"}])
def test_what_can_be_no_limit_is_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Room(**wrong)


@BOTH_STORES
def test_a_real_store_says_how_large_it_is(tmp_path: Path, store_kind: str) -> None:
    async def main() -> None:
        async with open_log(log_at(tmp_path / "log.db"), room=Room(store_bytes_max=1000)) as log:
            assert "more than 1000 bytes" in held_back(await log.submit(event(1)))
            assert (log.guard.store_bytes or 0) > 1000
            assert (log.guard.free_bytes is None) == (store_kind == POSTGRES)
            log.guard.use(Room(store_bytes_max=2**50))
            committed(await log.submit(event(1)))

    run(main())


class SmallDriver(SqliteDriver):
    """A real file on a disk that has so many bytes, and nothing else on it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def free_bytes(self, path: str) -> int | None:
        return self.size - self.file_bytes(path) - self.file_bytes(f"{path}-wal")

    @staticmethod
    def file_bytes(path: str) -> int:
        return Path(path).stat().st_size if Path(path).exists() else 0


def test_what_must_still_be_moved_into_the_file_is_not_free(tmp_path: Path) -> None:
    """A start has to move it before anything else, and must find room for it."""

    async def main() -> None:
        path, driver = str(tmp_path / "log.db"), SmallDriver(6_000_000)
        log = Log(SqliteStore(path, driver=driver), room=Room(free_bytes_min=1_000_000, look_ms=3_600_000))
        async with log:
            for number in range(1, 1000):
                if isinstance(await log.submit(event(number, body=b"x" * 20_000)), Refused):
                    break
            beside = driver.file_bytes(f"{path}-wal")
            assert log.guard.reasons == {Why.FREE}
            assert beside > 2_000_000
            free = driver.free_bytes(path)
            assert free is not None
            assert log.guard.free_bytes == free - beside
            assert free > beside, "it could not be moved"

    run(main())


def test_what_lies_beside_the_file_holds_nothing_back_for_long(tmp_path: Path) -> None:
    """Nobody commits any more and moves it; so the one who looks does, until the file itself leaves too little."""

    async def main() -> None:
        path, driver = str(tmp_path / "log.db"), SmallDriver(6_000_000)
        room = Room(free_bytes_min=1_000_000, free_again_bytes_min=1_500_000, **QUICK)
        async with Log(SqliteStore(path, driver=driver), room=room) as log:
            was_held_back, number = 0, 0
            while driver.file_bytes(path) < 3_000_000:
                number += 1
                if isinstance(await log.submit(event(number, body=b"x" * 20_000)), Refused):
                    was_held_back += 1
                    await until(lambda: not log.read_only)
            assert was_held_back
            driver.size = driver.file_bytes(path) + 900_000
            held_back(await log.submit(event(1000)))
            await until(lambda: not driver.file_bytes(f"{path}-wal"))
            assert log.guard.reasons == {Why.FREE}

    run(main())


@pytest.mark.parametrize("error", [DiskFullError("no room to move anything"), RuntimeError("locking protocol")])
def test_room_that_cannot_be_made_is_looked_for_again(error: Exception) -> None:
    async def main() -> None:
        store = Unmovable()
        store.error = error
        store.free = 9
        async with Log(store, room=Room(free_bytes_min=10, **QUICK)) as log:
            await until(lambda: store.tried > 2)
            assert log.guard.reasons == {Why.FREE}
            store.free = 11
            await until(lambda: not log.read_only)

    run(main())


class Unmovable(Disks):
    tried = 0
    error = Exception()

    async def scrub(self) -> bool:
        self.tried += 1
        raise self.error


# --- a disk that is full -------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_left_alone_until_something_can_be_written() -> None:
    """The write that found it full is told that its outcome is not known; the next that nothing was written."""

    async def main() -> None:
        with Disk() as disk:
            store = SqliteStore("log.db", driver=DiskDriver(disk))
            async with Log(store, room=Room(look_ms=1)) as log:
                first = committed(await log.submit(event(1, body=b"x" * 9000)))
                disk.fail_at(1, Fault.FULL, sticky=True)
                with pytest.raises(DiskFullError):
                    await log.submit(event(2, body=b"x" * 9000))
                assert "the disk is full" in held_back(await log.submit(event(3, body=b"x" * 9000)))
                assert replayed(await log.submit(event(1, body=b"x" * 9000))).receipt == first
                assert len((await log.read()).records) == 1
                assert log.guard.reasons == {Why.FULL}
                disk.repair()
                await until(lambda: not log.read_only)
                committed(await log.submit(event(2, body=b"x" * 9000)))
                committed(await log.submit(event(3, body=b"x" * 9000)))

    run(main())


def test_a_log_that_is_not_told_to_look_says_what_the_disk_says() -> None:
    async def main() -> None:
        with Disk() as disk:
            async with Log(SqliteStore("log.db", driver=DiskDriver(disk))) as log:
                disk.fail_at(1, Fault.FULL, sticky=True)
                for _ in range(2):
                    with pytest.raises(DiskFullError):
                        await log.submit(event(1, body=b"x" * 9000))
                disk.repair()
                committed(await log.submit(event(1, body=b"x" * 9000)))

    run(main())


@pytest.mark.stores(POSTGRES)
def test_a_database_without_room_takes_nothing_new_until_it_has_some(tmp_path: Path) -> None:
    """The server's own error (53100), made by triggers: for what is committed, and for what is tried."""
    address = log_at(tmp_path / "log.db")

    async def main() -> None:
        async with open_log(address, room=Room(look_ms=1)) as log:
            first = committed(await log.submit(event(1)))
            await execute(address, FULL)
            with pytest.raises(DiskFullError, match="no room"):
                await log.submit(event(2))
            held_back(await log.submit(event(2)))
            assert replayed(await log.submit(event(1))).receipt == first
            await execute(address, "DROP TRIGGER full_records ON oncelog_records")
            held_back(await log.submit(event(2)))
            await execute(address, "DROP TRIGGER full_state ON oncelog_state")
            await until(lambda: not log.read_only)
            committed(await log.submit(event(2)))

    run(main())


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


def test_a_disk_that_is_full_again_and_again_is_tried_less_often() -> None:
    """What is tried is small, and may fit where nothing else does."""

    async def main() -> None:
        store = Tried()
        guard = Guard(store, Room(look_ms=1))
        await guard.start()
        pauses = []
        for _ in range(5):
            guard.failed(DiskFullError("no room"))
            pauses.append(guard._pause_ms)
            await until(lambda: not guard.reasons)
        await guard.stop()
        assert pauses == [1, 2, 4, 8, 16]
        assert store.tried == 5
        guard.failed(StoreUnavailableError("something else"))
        assert not guard.reasons

    run(main())


def test_a_disk_that_was_full_is_full_while_almost_nothing_is_free() -> None:
    async def main() -> None:
        store = Tried()
        store.free = FULL_AGAIN_BYTES - 1
        guard = Guard(store, Room(look_ms=1))
        await guard.start()
        guard.failed(DiskFullError("no room"))
        await until(lambda: store.tried > 2)
        assert guard.reasons == {Why.FULL}
        store.free = FULL_AGAIN_BYTES
        await until(lambda: not guard.reasons)
        await guard.stop()

    run(main())


def test_a_full_disk_is_tried_by_moving_all_that_was_committed(tmp_path: Path) -> None:
    """A start does the same: where it would fail nothing new is to be taken, and what it frees is free without it."""

    async def main() -> None:
        path, driver = tmp_path / "log.db", SmallDriver(100_000_000)
        async with Log(SqliteStore(path, driver=driver), room=Room(look_ms=1)) as log:
            for number in range(1, 20):
                committed(await log.submit(event(number, body=b"x" * 20_000)))
            assert driver.file_bytes(f"{path}-wal") > 400_000
            log.guard.failed(DiskFullError("no room"))
            await until(lambda: not log.read_only)
            assert driver.file_bytes(str(path)) > 400_000
            assert driver.file_bytes(f"{path}-wal") < 20_000

    run(main())


class Tried(Disks):
    tried = 0

    async def probe(self) -> None:
        self.tried += 1


def test_what_a_long_reader_kept_beside_the_file_holds_nothing_back_when_he_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        room = Room(store_bytes_max=3_000_000, **QUICK)
        async with Log(SqliteStore(tmp_path / "log.db"), room=room) as log:
            committed(await log.submit(event(1)))
            with closing(sqlite3.connect(tmp_path / "log.db", isolation_level=None)) as reader:
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM oncelog_records").fetchone()
                for number in range(2, 1000):
                    if isinstance(await log.submit(event(number)), Refused):
                        break
                assert "the store has more than 3000000 bytes" in log.read_only
            await until(lambda: not log.read_only)
            committed(await log.submit(event(1000)))

    run(main())
