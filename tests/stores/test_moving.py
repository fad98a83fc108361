"""A log that was moved from a file into a database is the same log: to the last hash, key, lease, cursor and second."""

import asyncio
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from asyncpg.protocol.protocol import Protocol
from hypothesis import given, settings
from hypothesis import strategies as st

import oncelog
from cli.sample import HOUR_MS, NOTES, START_MS, SetClock, batches, full_event, make_log, note, opened
from core.writes import key
from databases import address_of, query
from oncelog.core.policy import BUILT_IN, EVENTS
from oncelog.core.values import Claim, Item, Replayed, Request, Settings, Verdict
from oncelog.errors import CorruptError, MovedError, StoreError, StoreUnavailableError
from oncelog.idempotency.sharing import share
from oncelog.stores.address import shown
from oncelog.stores.memory import MemoryStore
from oncelog.stores.moving import demand_possible, move, mover
from oncelog.stores.moving.source import Source
from oncelog.stores.moving.target import Target
from oncelog.stores.moving.values import Outcome
from oncelog.stores.postgres import PostgresStore
from oncelog.stores.protocol import Store
from oncelog.stores.side_state import TABLES
from oncelog.stores.sqlite import SqliteStore
from oncelog.stores.sqlite.copying import restore
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.moved import moved
from oncelog.stores.sqlite.session import Session
from oncelog.stores.sqlite.verifying import verify_file
from oncelog.stores.verifying.findings import Passed, Progress
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driven import DrivenStore
from oncelog.testing.postgres_proxy import Fate, Held, PostgresProxy
from stores.move_worker import small_slices
from stores.sessions import ORDERS, QuickDriver, are_known, are_new, commit, session_on
from stores.test_agreement import Tale, Teller, found_wrong, tales, told_by

WORKER = Path(__file__).with_name("move_worker.py")
PLACE = ("place >> 48", "place & 281474976710655")
RECORD = (
    "sequence, log_time_ms, height, client_sequence, policy, scope, client, key, fingerprint, actor, partitions, salt, "
    "body_hash, body"
)
LATER_MS = START_MS + 400 * HOUR_MS


def silent(_: Progress) -> None:
    """Nobody looks on."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with something of everything, closed."""
    path = tmp_path / "log.db"
    make_log(path, rounds=8)
    return path


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.stores.moving.source.SLICE_ROWS", 7)
    monkeypatch.setattr(mover, "SLICE_ROWS", 7)


# --- what is compared ------------------------------------------------------------------------------------


def selects(*, is_file: bool) -> dict[str, str]:
    """What gives all rows of each table that both have, the same in both."""
    place = ", ".join(PLACE) if is_file else "lane, position"
    log = "epoch, lanes, eviction_interval, index_secret, created_ms"
    head = "lane, position, log_time_ms, eviction_time_ms, fence, revision, height, block_hash"
    block = "lane, height, first_position, count, log_time_ms, previous, root"
    written = "" if is_file else "WHERE revision > 0"
    found = {
        "log": f"SELECT {log} FROM oncelog_log",  # noqa: S608
        "state": "SELECT erasures, tenants FROM oncelog_state",
        "clock": (
            "SELECT clock_boot, clock_elapsed_ms, clock_time_ms FROM oncelog_state WHERE clock_boot != ''"
            if is_file
            else "SELECT boot, elapsed_ms, time_ms FROM oncelog_clocks"
        ),
        "policies": "SELECT name, declaration FROM oncelog_policies",
        "heads": f"SELECT {head} FROM oncelog_lanes {written}",  # noqa: S608
        "records": f"SELECT {place}, {RECORD} FROM oncelog_records",  # noqa: S608
        "blocks": f"SELECT {block} FROM oncelog_blocks",  # noqa: S608
        "partitions": "SELECT lane, partition, position FROM oncelog_partition_records",
    }
    for table in TABLES:
        columns = ", ".join(("lane", *table.keys, *table.values))
        found[table.name] = f"SELECT {columns} FROM oncelog_{table.name}"  # noqa: S608
    return found


def rows_of_file(path: Path) -> dict[str, set[Any]]:
    with closing(sqlite3.connect(path)) as connection:
        return {name: set(connection.execute(select)) for name, select in selects(is_file=True).items()}


def rows_of_database(address: str) -> dict[str, set[Any]]:
    return {name: set(query(address, select)) for name, select in selects(is_file=False).items()}


@contextmanager
def writing_to(path: Path) -> Iterator[Session]:
    """As another process does."""
    with session_on(path, 8) as session:
        session.declare([EVENTS, ORDERS])
        yield session


@contextmanager
def driven(make: Any, clock: Any = None) -> Iterator[DrivenStore]:
    log = DrivenStore(lambda its, _: make(clock or its), Settings(), is_durable=True)
    try:
        yield log
    finally:
        log.close()


@contextmanager
def twins(path: Path, address: str) -> Iterator[tuple[SetClock, DrivenStore, DrivenStore]]:
    """A copy of the file from before it was moved, and what it was moved to, on one clock."""
    clock = SetClock(LATER_MS)
    copy = path.with_name("twin.db")

    def in_file(_: Any) -> Store:
        return SqliteStore(copy, clock=clock, draw=bytes)

    def in_database(_: Any) -> Store:
        return PostgresStore(address, clock=clock, draw=bytes, keep_clock_ms=0)

    with driven(in_file) as one, driven(in_database) as other:
        yield clock, one, other


def moved_with_twin(path: Path, address: str) -> Outcome:
    shutil.copy(path, path.with_name("twin.db"))
    return move(str(path), address, silent)


def demand_alike(path: Path, address: str) -> None:
    """The rows are the same, and so is all that readers are told."""
    assert rows_of_database(address) == rows_of_file(path)
    assert query(address, "SELECT move FROM oncelog_state") == [(None,)]
    with looking_at(str(path)) as (connection, _):
        mark = moved(connection)
    assert mark is not None
    assert mark.target == shown(address)
    *_, last = verify_file(path)
    assert isinstance(last, Passed), last


def everything_again() -> list[list[Item]]:
    """All writes of the sample once more, with some that are new."""
    again = batches(8)
    again.append([full_event(900_000, ["orders"]), note(900_001, "notes/1")])
    again.append([Claim(policy=BUILT_IN[3], scope="campaign/1", key=key(9_999), fingerprint=b"", holder="other")])
    return again


def told(log: DrivenStore, items: list[Item]) -> list[Verdict]:
    return [one for verdicts in log.batch(*(Request((item,)) for item in items)).verdicts for one in verdicts]


# --- the move --------------------------------------------------------------------------------------------


def test_a_moved_log_is_the_same_to_the_last_row(log: Path, database: str) -> None:
    outcome = moved_with_twin(log, database)
    assert outcome.is_new
    demand_alike(log, database)
    found = rows_of_file(log)
    assert all(found[name] for name in ("records", "clients", "entities", "leases", "members", "consumers", "rates"))
    assert any(row[-1] is None for row in found["records"])
    assert outcome.records == len(found["records"])
    with twins(log, database) as (_, one, other):
        assert told_by(other) == told_by(one)
        assert other.store.epoch == one.store.epoch


def test_it_goes_on_as_the_file_would_have(log: Path, database: str) -> None:
    """Retries, leases, numbers of clients, rates and what has expired: two that are told the same answer the same."""
    moved_with_twin(log, database)
    with twins(log, database) as (clock, one, other):
        for items in everything_again():
            clock.now_ms += HOUR_MS // 4
            assert told(other, items) == told(one, items)
        assert told_by(other) == told_by(one)


def test_a_key_is_forgotten_at_the_same_moment(tmp_path: Path, database: str) -> None:
    path = tmp_path / "log.db"
    clock = SetClock()
    with driven(lambda _: opened(path, clock)) as log:
        log.run(log.store.declare([NOTES]))
        first = log(note(1, "notes/1"))
    assert isinstance(first, oncelog.Committed)
    moved_with_twin(path, database)
    with twins(path, database) as (its_clock, one, other):
        verdicts: list[Verdict] = []
        for ms in (HOUR_MS - 1, HOUR_MS, HOUR_MS + 1):
            its_clock.now_ms = START_MS + ms
            for item in (note(ms, "notes/1"), note(1, "notes/1")):  # the first one moves the time of the lane
                verdicts.append(other(item))
                assert verdicts[-1] == one(item)
    retries = verdicts[1::2]
    assert [type(retry) for retry in retries] == [Replayed, oncelog.Committed, Replayed]
    assert isinstance(retries[0], Replayed)
    assert retries[0].receipt == first.receipt


def test_both_prove_and_find_the_same(log: Path, database: str) -> None:
    moved_with_twin(log, database)
    policies = {policy.name: policy for policy in (*BUILT_IN, NOTES)}
    clock, copy = SetClock(LATER_MS), log.with_name("twin.db")
    with oncelog.open_blocking(copy, clock=clock) as one, oncelog.open_blocking(database, clock=clock) as other:
        assert other.heads() == one.heads()
        assert other.consumers() == one.consumers()
        for record in (record for lane in one.heads() for record in one.read(lane=lane, limit=1000).records):
            assert other.prove(record.receipt) == one.prove(record.receipt)
            if record.key:
                client = record.client if record.client_sequence else ""
                asked: dict[str, Any] = {"policy": policies[record.policy], "scope": record.scope, "client": client}
                assert other.lookup(record.key, **asked) == one.lookup(record.key, **asked)


def test_an_empty_log_is_moved_too(tmp_path: Path, database: str) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8):
        pass
    assert moved_with_twin(path, database).records == 0
    demand_alike(path, database)


def test_long_bodies_make_short_slices(tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.stores.moving.source.SLICE_BYTES", 100)
    path = tmp_path / "log.db"
    make_log(path, rounds=2)
    move(str(path), database, silent)
    demand_alike(path, database)


def test_progress_is_told(log: Path, database: str) -> None:
    reports: list[Progress] = []
    records = move(str(log), database, reports.append).records
    steps = list(dict.fromkeys(one.step for one in reports))
    assert steps[:2] == ["structure", "copying"]
    assert steps[-2:] == ["side state", "comparing"]
    done = [one.done for one in reports if one.step == "copying"]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, records)


# --- while others write ----------------------------------------------------------------------------------


def test_what_is_written_and_erased_meanwhile_comes_too(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.db"
    take, numbers = Target.take, iter(range(100, 130))
    with writing_to(path) as session:
        assert are_new(commit(session, *range(1, 60)))
        assert session.erase(0, [2]) == 1

        async def taken(target: Target, part: Any) -> None:
            await take(target, part)
            for number in numbers:
                assert are_new(commit(session, number))
                if number % 3 == 0:
                    session.erase(0, [1 + number % 7])
                    session.erase(1, [1])
                if number % 10 == 9:
                    break

        monkeypatch.setattr(Target, "take", taken)
        move(str(path), database, silent)
        assert next(numbers, None) is None
        with pytest.raises(MovedError):
            commit(session, 1000)
    demand_alike(path, database)
    assert len(rows_of_file(path)["records"]) == 59 + 30


def test_no_body_that_was_erased_meanwhile_is_left(log: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Target.replace
    with writing_to(log) as session:
        positions = range(1, 40)

        async def erased_before(target: Target, source: Source, state: Any) -> None:
            await replace(target, source, state)
            if positions:
                source.unlock()
                session.erase(0, list(positions))
                raise StoreError("enough for now")

        monkeypatch.setattr(Target, "replace", erased_before)
        with pytest.raises(StoreError, match="enough"):
            move(str(log), database, silent)
        monkeypatch.setattr(Target, "replace", replace)
        bodies = query(database, "SELECT count(body) FROM oncelog_records WHERE lane = 0 AND position < 40")
        move(str(log), database, silent)
    demand_alike(log, database)
    assert bodies != [(0,)]
    assert query(database, "SELECT count(body) FROM oncelog_records WHERE lane = 0 AND position < 40") == [(0,)]


# --- killed ----------------------------------------------------------------------------------------------


def killed(path: Path, address: str, point: str, number: int = 1) -> None:
    done = run_worker(path, address, point, str(number))
    assert done.returncode == -signal.SIGKILL, done.stderr


def run_worker(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, WORKER, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603


def can_be_opened(store: Store) -> bool:
    async def run() -> None:
        await store.open()
        await store.close()

    try:
        asyncio.run(run())
    except StoreError as error:
        assert isinstance(error, MovedError) or "has not ended: run `oncelog move` again" in str(error)  # noqa: PT017
        return False
    return True


BEFORE_THE_MARK = [
    ("target.begin.after", 1),
    ("source.settle.after", 1),
    ("target.take.before", 1),
    ("target.take.after", 1),
    ("target._copy.before", 5),
    ("target._copy.after", 12),
    ("target.take.after", 4),
    ("source.lock.after", 1),
    ("target.replace.before", 1),
    ("source.side_state.before", 4),
    ("target.replace.after", 1),
    ("target.counts.before", 1),
    ("source.mark.before", 1),
]


@pytest.mark.parametrize(("point", "number"), BEFORE_THE_MARK)
def test_whoever_is_killed_on_the_way_goes_on(log: Path, database: str, point: str, number: int) -> None:
    killed(log, database, point, number)
    assert not can_be_opened(PostgresStore(database))
    with writing_to(log) as session:  # it is still the log, and changes
        assert are_new(commit(session, *range(5000, 5020)))
        session.erase(0, [1, 3])
    before = query(database, "SELECT count(*) FROM oncelog_records")
    killed(log, database, "target.take.after", 1)
    assert query(database, "SELECT count(*) FROM oncelog_records") > before
    moved_with_twin(log, database)
    demand_alike(log, database)
    with twins(log, database) as (_, one, other):
        assert told_by(other) == told_by(one)


def test_a_move_that_never_began_leaves_nothing(log: Path, database: str) -> None:
    killed(log, database, "target.begin.before")
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)]


def test_what_the_database_lost_after_the_mark_is_copied_again(log: Path, database: str) -> None:
    """As when a standby takes its place that was behind."""
    killed(log, database, "source.mark.after")
    query(database, "DELETE FROM oncelog_records WHERE lane = 0 AND position > 10")
    query(database, "DELETE FROM oncelog_partition_records WHERE lane = 0 AND position > 10")
    query(database, "DELETE FROM oncelog_blocks WHERE lane = 0 AND first_position > 10")
    query(database, "DELETE FROM oncelog_leases")
    assert move(str(log), database, silent).is_new
    demand_alike(log, database)


@pytest.mark.parametrize("point", ["source.mark.after", "target.end.before"])
def test_whoever_is_killed_before_the_database_is_open_leaves_a_log_that_nobody_writes_to(
    log: Path, database: str, point: str
) -> None:
    killed(log, database, point)
    assert not can_be_opened(PostgresStore(database))
    assert not can_be_opened(SqliteStore(log))
    assert move(str(log), database, silent).is_new
    demand_alike(log, database)
    assert can_be_opened(PostgresStore(database))


def test_after_the_end_there_is_nothing_left_to_do(log: Path, database: str) -> None:
    killed(log, database, "target.end.after")
    for _ in range(2):
        demand_possible(str(log), database)
        assert not move(str(log), database, silent).is_new
    demand_alike(log, database)
    with driven(lambda clock: PostgresStore(database, clock=clock)) as other:  # also when it has gone on
        assert isinstance(other(full_event(777_777, ["orders"])), oncelog.Committed)
    assert not move(str(log), database, silent).is_new


def test_a_copy_from_before_is_marked_only_if_it_is_whole(log: Path, database: str) -> None:
    moved_with_twin(log, database)
    copy = log.with_name("twin.db")
    assert move(str(copy), database, silent).is_new  # it knows nothing, and is the same
    with pytest.raises(MovedError):
        move(str(copy), address_of(log / "other"), silent)
    demand_alike(copy, database)
    another = log.with_name("another.db")
    shutil.copy(log, another)
    with closing(sqlite3.connect(another)) as connection:
        connection.execute("UPDATE oncelog_state SET moved = NULL")
        connection.commit()
    with writing_to(another) as session:
        commit(session, 9000)
    with pytest.raises(StoreError, match="one of the two has gone on"):
        move(str(another), database, silent)
    assert can_be_opened(SqliteStore(another))


# --- cut off ---------------------------------------------------------------------------------------------

WITHOUT_LIMIT = 3_600_000
WAIT_S = 30
"""Nothing takes that long."""


def limit(
    monkeypatch: pytest.MonkeyPatch,
    *,
    call_ms: int = WITHOUT_LIMIT,
    locked_ms: int = WITHOUT_LIMIT,
    record_us: int = 0,
) -> None:
    monkeypatch.setattr("oncelog.stores.moving.target.CALL_MS", call_ms)
    monkeypatch.setattr("oncelog.stores.moving.target.LOCKED_CALL_MS", locked_ms)
    monkeypatch.setattr("oncelog.stores.moving.target.RECORD_US", record_us)


def is_locked(path: Path) -> bool:
    with closing(sqlite3.connect(path, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


async def ends(moving: "asyncio.Task[Outcome]", says: str) -> None:
    """With an error in our words, soon, and by itself."""
    await asyncio.wait([moving], timeout=WAIT_S)
    assert moving.done()
    with pytest.raises(StoreUnavailableError, match=says):
        await moving


def goes_on(path: Path, address: str) -> None:
    """The file is the log still, and the next run comes to the end."""
    assert not is_locked(path)
    assert not can_be_opened(PostgresStore(address))
    with writing_to(path) as session:
        assert are_new(commit(session, *range(5000, 5020)))
    assert move(str(path), address, silent).is_new
    demand_alike(path, address)


@pytest.mark.parametrize(
    ("statement", "is_query"),
    [("BEGIN", False), ("DELETE FROM oncelog_leases", False), ("COPY", True), ("COMMIT", True), ("COMMIT", False)],
)
def test_who_gets_no_answer_while_the_file_is_locked_lets_it_go(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, statement: str, is_query: bool
) -> None:
    limit(monkeypatch, locked_ms=1_000)
    replace = Target.replace

    async def main() -> None:
        async with PostgresProxy(database) as proxy:

            async def stalled(target: Target, *arguments: Any) -> None:
                held = proxy.hold(statement, is_query=is_query)
                replacing = asyncio.create_task(replace(target, *arguments))
                await held.reached()
                assert is_locked(log)
                await replacing

            monkeypatch.setattr(Target, "replace", stalled)
            await ends(asyncio.create_task(mover._move(str(log), proxy.address, silent)), "no answer within 1 s")
            assert not is_locked(log)

    asyncio.run(main())
    monkeypatch.undo()
    goes_on(log, database)


@pytest.mark.parametrize("method", ["reached", "erasures", "heads", "counts"])
def test_who_hears_nothing_more_while_the_file_is_locked_lets_it_go(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    limit(monkeypatch, locked_ms=1_000)
    original = getattr(Target, method)
    stalls = 0

    async def main() -> None:
        async with PostgresProxy(database) as proxy:

            async def stalled(target: Target, *arguments: Any) -> Any:
                nonlocal stalls
                if is_locked(log):
                    proxy.stall_all()
                    stalls += 1
                return await original(target, *arguments)

            monkeypatch.setattr(Target, method, stalled)
            await ends(asyncio.create_task(mover._move(str(log), proxy.address, silent)), "no answer within 1 s")

    asyncio.run(main())
    assert stalls == 1
    monkeypatch.undo()
    goes_on(log, database)


@pytest.mark.parametrize("statement", ["BEGIN", "SET LOCAL", "COPY", "COMMIT"])
def test_who_is_cancelled_lets_the_session_go_and_asks_the_server_for_nothing(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    take = Target.take

    async def main() -> None:
        async with PostgresProxy(database) as proxy:
            taking: asyncio.Future[Held] = asyncio.get_running_loop().create_future()

            async def stalled(target: Target, part: Any) -> None:
                taking.set_result(proxy.hold_after(statement, 1) if statement == "COPY" else proxy.hold(statement))
                await take(target, part)

            monkeypatch.setattr(Target, "take", stalled)
            moving = asyncio.create_task(mover._move(str(log), proxy.address, silent))
            await (await taking).reached()
            accepted = proxy.accepted_count
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            connection = await asyncpg.connect(proxy.address)  # whoever came before it has been accepted before it
            await connection.close()
            assert proxy.accepted_count == accepted + 1

    asyncio.run(main())
    monkeypatch.undo()
    goes_on(log, database)


def test_what_looks_at_every_record_may_take_longer(log: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records = len(rows_of_file(log)["records"])
    limit(monkeypatch, locked_ms=1_000, record_us=500_000 // records)
    counts = Target.counts

    async def main() -> None:
        async with PostgresProxy(database) as proxy:

            async def stalled(target: Target, number: int) -> dict[str, int]:
                assert number == records
                proxy.stall_all()
                return await counts(target, number)

            monkeypatch.setattr(Target, "counts", stalled)
            await ends(asyncio.create_task(mover._move(str(log), proxy.address, silent)), "no answer within 1.5 s")

    asyncio.run(main())
    monkeypatch.undo()
    goes_on(log, database)


@pytest.mark.parametrize("fate", [Fate.STALLED, Fate.CUT_BEFORE, Fate.CUT_AT_ANSWER])
def test_who_is_cut_off_while_the_file_is_in_use_goes_on_later(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch, fate: Fate
) -> None:
    limit(monkeypatch, call_ms=2_000)
    take = Target.take

    async def main() -> None:
        async with PostgresProxy(database) as proxy:

            async def cut(target: Target, part: Any) -> None:
                proxy.fates.append(fate)
                await take(target, part)

            monkeypatch.setattr(Target, "take", cut)
            says = "no answer within 2 s" if fate is Fate.STALLED else "connection"
            await ends(asyncio.create_task(mover._move(str(log), proxy.address, silent)), says)
            assert proxy.done[fate] == 1

    asyncio.run(main())
    monkeypatch.undo()
    goes_on(log, database)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "stalled"])
def test_a_long_copy_ends_with_its_session(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_cut: bool
) -> None:
    """When asyncpg waits for a socket that takes no more: it would wait for ever."""
    gc.collect()  # what tests before this one left is not this one's
    caplog.clear()
    path, pause = tmp_path / "log.db", Protocol.pause_writing
    with writing_to(path) as session:
        assert are_new(commit(session, 1, 2, 3))
        for number in range(900_000, 900_016):
            long = oncelog.event(UUID(int=number), {"type": "long", "text": "x" * 900_000}, ["a"])
            assert are_new(session.commit([Request((long,))], None).verdicts[0])
    limit(monkeypatch, call_ms=WITHOUT_LIMIT if is_cut else 2_000)
    monkeypatch.setattr("oncelog.stores.moving.source.SLICE_ROWS", 100)

    async def main() -> None:
        async with PostgresProxy(database) as proxy:
            held, is_paused = proxy.hold("COPY", is_query=True), asyncio.Event()

            def paused(protocol: Any) -> None:
                pause(protocol)
                is_paused.set()

            monkeypatch.setattr(Protocol, "pause_writing", paused)
            moving = asyncio.create_task(mover._move(str(path), proxy.address, silent))
            async with asyncio.timeout(WAIT_S):
                await held.reached()
                await is_paused.wait()
            if is_cut:
                proxy.cut_all()
            await ends(moving, "lost in the middle of COPY" if is_cut else "no answer within 2 s")
            assert proxy.cancel_requests == 0

    asyncio.run(main())
    gc.collect()
    assert caplog.records == []
    monkeypatch.undo()
    goes_on(path, database)


# --- what is refused -------------------------------------------------------------------------------------


def test_another_log_is_left_as_it_is(log: Path, database: str, tmp_path: Path) -> None:
    with driven(lambda clock: PostgresStore(database, clock=clock)) as other:
        other(full_event(1, ["orders"]))
    before = rows_of_database(database)
    for refused in (demand_possible, lambda path, address: move(path, address, silent)):
        with pytest.raises(StoreError, match="has another log in it"):
            refused(str(log), database)
    assert rows_of_database(database) == before
    assert can_be_opened(SqliteStore(log))


def test_a_move_of_another_log_is_left_as_it_is(log: Path, database: str, tmp_path: Path) -> None:
    another = tmp_path / "another.db"
    make_log(another, rounds=2)
    killed(another, database, "target.take.after", 2)
    with pytest.raises(StoreError, match="begun to be filled from another log"):
        move(str(log), database, silent)
    move(str(another), database, silent)
    demand_alike(another, database)


def test_a_copy_that_went_on_alone_does_not_go_on_with_the_move(log: Path, database: str) -> None:
    copy = log.with_name("copy.db")
    shutil.copy(log, copy)
    with writing_to(copy) as session:
        commit(session, *range(6000, 6040))
    killed(copy, database, "target.replace.after")
    with writing_to(log) as session:
        commit(session, *range(7000, 7080))
    with pytest.raises(StoreError, match="another history there"):
        move(str(log), database, silent)
    assert can_be_opened(SqliteStore(log))


def test_a_log_that_was_moved_elsewhere_is_not_moved_here(log: Path, database: str) -> None:
    """Not even into a database in which an earlier move had come nearly to its end."""
    killed(log, database, "source.mark.before")
    elsewhere = address_of(log / "elsewhere")
    move(str(log), elsewhere, silent)
    for address in (database, address_of(log / "empty")):
        with pytest.raises(MovedError, match="so it is not moved to"):
            move(str(log), address, silent)
    assert not can_be_opened(PostgresStore(database))
    assert query(address_of(log / "empty"), "SELECT to_regclass('oncelog_log')") == [(None,)]
    demand_alike(log, elsewhere)


def test_two_movers_do_not_meet(log: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.stores.moving.target.PATIENCE_MS", 50)
    begin = Target.begin

    async def begun(target: Target, *arguments: Any) -> None:
        await begin(target, *arguments)
        with pytest.raises(StoreError, match=r"another `oncelog move` into .* is under way"):
            await mover._move(str(log), database, silent)

    monkeypatch.setattr(Target, "begin", begun)
    move(str(log), database, silent)
    demand_alike(log, database)


def test_of_two_moves_to_two_databases_one_comes_to_its_end(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, elsewhere = Source.lock, address_of(log / "elsewhere")

    def overtaken(source: Source) -> None:
        assert run_worker(log, elsewhere).returncode == 0
        lock(source)

    monkeypatch.setattr(Source, "lock", overtaken)
    with pytest.raises(MovedError, match="so it is not moved to"):
        move(str(log), database, silent)
    assert not can_be_opened(PostgresStore(database))
    demand_alike(log, elsewhere)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM oncelog_records WHERE place & 281474976710655 = 9", "lane 0, position 9: the record is missing"),
        ("UPDATE oncelog_lanes SET position = position + 1 WHERE lane = 0", "lane 0"),
        ("DELETE FROM oncelog_blocks WHERE lane = 0 AND height = 3", "a block below height"),
        ("DELETE FROM oncelog_partition_records WHERE position = 3", "records of partitions"),
    ],
)
def test_a_damaged_log_is_not_moved(log: Path, database: str, statement: str, says: str) -> None:
    with closing(sqlite3.connect(log)) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(CorruptError, match=says):
        move(str(log), database, silent)
    assert can_be_opened(SqliteStore(log))
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)] or not can_be_opened(
        PostgresStore(database)
    )


def test_what_differs_at_the_end_is_told(log: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Target.replace

    async def spoilt(target: Target, source: Source, state: Any) -> None:
        await replace(target, source, state)
        await target._connection.execute("UPDATE oncelog_lanes SET fence = fence + 1 WHERE lane = 1")

    monkeypatch.setattr(Target, "replace", spoilt)
    with pytest.raises(CorruptError, match="lane 1 is not what was moved"):
        move(str(log), database, silent)
    assert can_be_opened(SqliteStore(log))
    monkeypatch.setattr(Target, "replace", replace)
    move(str(log), database, silent)
    demand_alike(log, database)


def test_a_file_that_is_replaced_meanwhile_is_not_marked(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Source.settle

    def replaced(source: Source) -> None:
        settle(source)
        copy = log.with_name("copy.db")
        shutil.copy(log, copy)
        copy.replace(log)

    monkeypatch.setattr(Source, "settle", replaced)
    with pytest.raises(StoreError, match="removed or replaced"):
        move(str(log), database, silent)
    assert not can_be_opened(PostgresStore(database))


# --- the file afterwards ---------------------------------------------------------------------------------


def test_an_open_log_notices_with_its_next_write(log: Path, database: str) -> None:
    with oncelog.open_blocking(log) as mine, closing(sqlite3.connect(log, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        done = oncelog.once(share(connection), key=str, name="done", result=int)(lambda number: number)
        assert done(1) == 1
        move(str(log), database, silent)
        for write in (
            lambda: mine.submit(full_event(880_000, ["orders"])),
            lambda: mine.submit(full_event(2, ["orders"])),  # a known one too: the answer is elsewhere by now
            lambda: mine.erase(partition="orders"),
            lambda: mine.submit(note(1, "new")),  # a policy that this process has not declared yet
            mine.confirm_clock,
            lambda: done(1),
            lambda: done(2),
            lambda: share(connection),
            lambda: oncelog.open_blocking(log).__enter__(),
        ):
            with pytest.raises(MovedError) as raised:
                write()
            assert raised.value.target == shown(database)
            assert str(log) in str(raised.value)
        assert len(mine.read().records) == mine.heads()[0].position
    demand_alike(log, database)


def test_a_password_is_not_written_into_the_file(log: Path, database: str) -> None:
    address = database.replace("postgres@", "postgres:tiger-lily@")
    move(str(log), address, silent)
    assert b"tiger-lily" not in log.read_bytes()
    with pytest.raises(MovedError) as raised:
        oncelog.open_blocking(log).__enter__()
    assert "tiger-lily" not in str(raised.value)


def test_a_restored_copy_is_a_log_of_its_own(log: Path, database: str) -> None:
    move(str(log), database, silent)
    copy = log.with_name("restored.db")
    restore(str(log), str(copy), silent)
    with writing_to(copy) as session:
        assert are_new(commit(session, 1))
        assert are_known(commit(session, 1))
        assert session.file.epoch != query(database, "SELECT epoch FROM oncelog_log")[0][0]
    with pytest.raises(StoreError, match="has another log in it"):
        move(str(copy), database, silent)


# --- generated histories ---------------------------------------------------------------------------------


class Mover:
    """Makes a store in a file first, and then one in the database that the file was moved to."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.db"
        self.address = address_of(self.path)
        self.is_moved = False

    def __call__(self, clock: ManualClock, its: Settings | None) -> Store:
        if self.is_moved:
            return PostgresStore(self.address, its, clock=clock, draw=bytes, keep_clock_ms=0)
        return SqliteStore(self.path, its, clock=clock, draw=bytes, driver=QuickDriver(), seal_keys=4)

    def move(self, log: DrivenStore) -> None:
        log.run(log.store.close())
        move(str(self.path), self.address, silent)
        self.is_moved = True
        log.store = self(log.clock, None)
        log.run(log.store.open())


def retell(tale: Tale, at: int) -> None:
    """A log in memory is told all of it, and one that is moved on the way."""
    with tempfile.TemporaryDirectory() as directory:
        mover = Mover(Path(directory))
        memory = DrivenStore(lambda clock, its: MemoryStore(its, clock=clock, draw=bytes), tale.settings, False)
        durable = DrivenStore(mover, tale.settings, is_durable=True)
        one, other = Teller(memory), Teller(durable)
        try:
            for number, (step, moment) in enumerate(zip(tale.steps, tale.moments, strict=True)):
                if number == at:
                    mover.move(durable)
                assert other.tell(step, moment) == one.tell(step, moment), f"batch {number}"
            if not mover.is_moved:
                mover.move(durable)
            assert told_by(durable) == told_by(memory)
            assert found_wrong(other, tale) == []
        finally:
            memory.close()
            durable.close()


@settings(max_examples=max(10, settings().max_examples // 5))
@given(st.one_of(tales(*BUILT_IN), tales()), st.integers(0, 12))
def test_generated_histories_go_on_where_they_were_moved_to(tale: Tale, at: int) -> None:
    small_slices()
    retell(tale, at)
