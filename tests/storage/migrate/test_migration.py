"""A log that moves from a file into a database keeps every hash, key, lease, cursor and timestamp."""

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oncelog
from cli.sample_log import HOUR_MS, NOTES, START_MS, SetClock, batches, full_event, make_log, note, open_store
from cli.server_process import oncelog as run_command
from core.item_builders import key
from databases import POSTGRES, address_of, query
from oncelog.core.policy import BUILT_IN_POLICIES
from oncelog.core.values import Claim, Item, Replayed, Settings, Verdict
from oncelog.errors import CorruptError, MovedError, StoreError
from oncelog.idempotency.share import share
from oncelog.storage.address import redact_address
from oncelog.storage.backups import restore
from oncelog.storage.migrate import migration
from oncelog.storage.migrate.migration import check_migration, migrate_log
from oncelog.storage.migrate.source import MigrationSource
from oncelog.storage.migrate.target import MigrationTarget
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store
from oncelog.storage.verify.findings import StepProgress
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driver import StoreDriver
from storage.memory_store import MemoryStore
from storage.migrate.migration_checks import (
    LATER_MS,
    assert_moved,
    can_be_opened,
    ignore_progress,
    move_and_kill,
    move_with_copy,
    open_copy_and_database,
    open_driver,
    open_writer,
    read_database_rows,
    read_file_rows,
    submit_items,
    use_small_slices,
)
from storage.sqlite.writers import QuickDriver, are_known, are_new, commit, erase, session_on
from storage.test_agreement import Replayer, TimedHistory, check_invariants, read_store, timed_histories


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slices(monkeypatch)


def retry_all() -> list[list[Item]]:
    """Return retries of all writes of the sample log, and some new writes."""
    again = batches(8)
    again.append([full_event(900_000, ["orders"]), note(900_001, "notes/1")])
    again.append(
        [Claim(policy=BUILT_IN_POLICIES[3], scope="campaign/1", key=key(9_999), fingerprint=b"", holder="other")]
    )
    return again


# --- the move --------------------------------------------------------------------------------------------


def test_moved_log_has_the_same_rows(log: Path, database: str) -> None:
    outcome = move_with_copy(log, database)
    assert outcome.is_new
    assert_moved(log, database)
    found = read_file_rows(log)
    assert all(found[name] for name in ("records", "clients", "entities", "leases", "members", "consumers", "rates"))
    assert any(row[-1] is None for row in found["records"])
    assert outcome.records == len(found["records"])
    with open_copy_and_database(log, database) as (_, one, other):
        assert read_store(other) == read_store(one)
        assert other.store.epoch == one.store.epoch


def test_moved_log_reaches_the_same_verdicts_as_the_file(log: Path, database: str) -> None:
    """The verdicts cover retries, leases, client sequences, rates and expired keys."""
    move_with_copy(log, database)
    with open_copy_and_database(log, database) as (clock, one, other):
        for items in retry_all():
            clock.now_ms += HOUR_MS // 4
            assert submit_items(other, items) == submit_items(one, items)
        assert read_store(other) == read_store(one)


def test_moved_log_forgets_keys_at_the_same_time(tmp_path: Path, database: str) -> None:
    path = tmp_path / "log.db"
    clock = SetClock()
    with open_driver(lambda _: open_store(path, clock)) as log:
        log.run(log.store.declare([NOTES]))
        first = log(note(1, "notes/1"))
    assert isinstance(first, oncelog.Committed)
    move_with_copy(path, database)
    with open_copy_and_database(path, database) as (its_clock, one, other):
        verdicts: list[Verdict] = []
        for ms in (HOUR_MS - 1, HOUR_MS, HOUR_MS + 1):
            its_clock.now_ms = START_MS + ms
            for item in (note(ms, "notes/1"), note(1, "notes/1")):  # the first write advances the log time of the lane
                verdicts.append(other(item))
                assert verdicts[-1] == one(item)
    retries = verdicts[1::2]
    assert [type(retry) for retry in retries] == [Replayed, oncelog.Committed, Replayed]
    assert isinstance(retries[0], Replayed)
    assert retries[0].receipt == first.receipt


def test_moved_log_gives_the_same_proofs_and_lookups(log: Path, database: str) -> None:
    move_with_copy(log, database)
    policies = {policy.name: policy for policy in (*BUILT_IN_POLICIES, NOTES)}
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


def test_empty_log_can_be_moved(tmp_path: Path, database: str) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8):
        pass
    assert move_with_copy(path, database).records == 0
    assert_moved(path, database)


def test_slices_are_bounded_by_bytes(tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.storage.migrate.source.SLICE_BYTES", 100)
    path = tmp_path / "log.db"
    make_log(path, rounds=2)
    migrate_log(str(path), database, ignore_progress)
    assert_moved(path, database)


def test_move_reports_progress(log: Path, database: str) -> None:
    reports: list[StepProgress] = []
    records = migrate_log(str(log), database, reports.append).records
    steps = list(dict.fromkeys(one.step for one in reports))
    assert steps[:2] == ["structure", "copying"]
    assert steps[-2:] == ["side state", "comparing"]
    done = [one.done for one in reports if one.step == "copying"]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, records)


# --- concurrent writes -----------------------------------------------------------------------------------


def test_writes_and_erasures_during_a_move_are_copied(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.db"
    take, numbers = MigrationTarget.save_slice, iter(range(100, 130))
    with open_writer(path) as session:
        assert are_new(commit(session, *range(1, 60)))
        assert erase(session, 0, [2]) == 1

        async def save_and_write(target: MigrationTarget, part: Any) -> None:
            await take(target, part)
            for number in numbers:
                assert are_new(commit(session, number))
                if number % 3 == 0:
                    erase(session, 0, [1 + number % 7])
                    erase(session, 1, [1])
                if number % 10 == 9:
                    break

        monkeypatch.setattr(MigrationTarget, "save_slice", save_and_write)
        migrate_log(str(path), database, ignore_progress)
        assert next(numbers, None) is None
        with pytest.raises(MovedError):
            commit(session, 1000)
    assert_moved(path, database)
    assert len(read_file_rows(path)["records"]) == 59 + 30


def test_bodies_erased_during_a_move_are_erased_in_the_database(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = MigrationTarget.replace_side_state
    with open_writer(log) as session:
        positions = range(1, 40)

        async def erase_before(target: MigrationTarget, source: MigrationSource, state: Any) -> None:
            await replace(target, source, state)
            if positions:
                source.unlock()
                erase(session, 0, list(positions))
                raise StoreError("enough for now")

        monkeypatch.setattr(MigrationTarget, "replace_side_state", erase_before)
        with pytest.raises(StoreError, match="enough"):
            migrate_log(str(log), database, ignore_progress)
        monkeypatch.setattr(MigrationTarget, "replace_side_state", replace)
        bodies = query(database, "SELECT count(body) FROM oncelog_records WHERE lane = 0 AND position < 40")
        migrate_log(str(log), database, ignore_progress)
    assert_moved(log, database)
    assert bodies != [(0,)]
    assert query(database, "SELECT count(body) FROM oncelog_records WHERE lane = 0 AND position < 40") == [(0,)]


# --- refused moves ---------------------------------------------------------------------------------------


def test_database_with_another_log_is_refused_and_not_changed(log: Path, database: str) -> None:
    with open_driver(lambda clock: PostgresStore(database, clock=clock)) as other:
        other(full_event(1, ["orders"]))
    before = read_database_rows(database)
    for refused in (check_migration, lambda path, address: migrate_log(path, address, ignore_progress)):
        with pytest.raises(StoreError, match="contains another log"):
            refused(str(log), database)
    assert read_database_rows(database) == before
    assert can_be_opened(SqliteStore(log))


def test_database_with_an_unfinished_move_of_another_log_is_refused(log: Path, database: str, tmp_path: Path) -> None:
    another = tmp_path / "another.db"
    make_log(another, rounds=2)
    move_and_kill(another, database, "target.save_slice.after", 2)
    with pytest.raises(StoreError, match="contains part of another log"):
        migrate_log(str(log), database, ignore_progress)
    migrate_log(str(another), database, ignore_progress)
    assert_moved(another, database)


def test_move_is_not_continued_from_a_file_with_another_history(log: Path, database: str) -> None:
    copy = log.with_name("copy.db")
    shutil.copy(log, copy)
    with open_writer(copy) as session:
        commit(session, *range(6000, 6040))
    move_and_kill(copy, database, "target.replace_side_state.after")
    with open_writer(log) as session:
        commit(session, *range(7000, 7080))
    with pytest.raises(StoreError, match="a different history there"):
        migrate_log(str(log), database, ignore_progress)
    assert can_be_opened(SqliteStore(log))


def test_log_that_was_moved_to_another_database_is_refused(log: Path, database: str) -> None:
    """The refusal applies even if an earlier move into the database had almost finished."""
    move_and_kill(log, database, "source.save_marker.before")
    elsewhere = address_of(log / "elsewhere")
    migrate_log(str(log), elsewhere, ignore_progress)
    for address in (database, address_of(log / "empty")):
        with pytest.raises(MovedError, match="so it cannot be moved to"):
            migrate_log(str(log), address, ignore_progress)
    assert not can_be_opened(PostgresStore(database))
    assert query(address_of(log / "empty"), "SELECT to_regclass('oncelog_log')") == [(None,)]
    assert_moved(log, elsewhere)


def test_second_concurrent_move_is_refused(log: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.storage.migrate.target.LOCK_TIMEOUT_MS", 50)
    begin = MigrationTarget.begin

    async def begin_while_moving(target: MigrationTarget, *arguments: Any) -> None:
        await begin(target, *arguments)
        with pytest.raises(StoreError, match=r"another `oncelog move` into .* is in progress"):
            await migration._migrate_log(str(log), database, ignore_progress)

    monkeypatch.setattr(MigrationTarget, "begin", begin_while_moving)
    migrate_log(str(log), database, ignore_progress)
    assert_moved(log, database)


def test_only_one_of_two_moves_to_different_databases_finishes(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, elsewhere = MigrationSource.lock, address_of(log / "elsewhere")

    def overtake(source: MigrationSource) -> None:
        done = run_command("move", str(log), elsewhere)
        assert done.returncode == 0, done.stderr
        lock(source)

    monkeypatch.setattr(MigrationSource, "lock", overtake)
    with pytest.raises(MovedError, match="so it cannot be moved to"):
        migrate_log(str(log), database, ignore_progress)
    assert not can_be_opened(PostgresStore(database))
    assert_moved(log, elsewhere)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM oncelog_records WHERE place & 281474976710655 = 9", "lane 0, position 9: the record is missing"),
        ("UPDATE oncelog_lanes SET position = position + 1 WHERE lane = 0", "lane 0"),
        ("DELETE FROM oncelog_blocks WHERE lane = 0 AND height = 3", "a block below height"),
        ("DELETE FROM oncelog_partition_records WHERE position = 3", "records of partitions"),
    ],
)
def test_damaged_log_is_refused(log: Path, database: str, statement: str, says: str) -> None:
    with closing(sqlite3.connect(log)) as connection:
        connection.execute(statement)
        connection.commit()
    with pytest.raises(CorruptError, match=says):
        migrate_log(str(log), database, ignore_progress)
    assert can_be_opened(SqliteStore(log))
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)] or not can_be_opened(
        PostgresStore(database)
    )


def test_difference_at_the_final_comparison_is_reported(
    log: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = MigrationTarget.replace_side_state

    async def spoil(target: MigrationTarget, source: MigrationSource, state: Any) -> None:
        await replace(target, source, state)
        await target._connection.execute("UPDATE oncelog_lanes SET fence = fence + 1 WHERE lane = 1")

    monkeypatch.setattr(MigrationTarget, "replace_side_state", spoil)
    with pytest.raises(CorruptError, match="lane 1 differs after the copy"):
        migrate_log(str(log), database, ignore_progress)
    assert can_be_opened(SqliteStore(log))
    monkeypatch.setattr(MigrationTarget, "replace_side_state", replace)
    migrate_log(str(log), database, ignore_progress)
    assert_moved(log, database)


def test_file_replaced_during_a_move_is_not_marked(log: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = MigrationSource.make_durable

    def replace_file(source: MigrationSource) -> None:
        settle(source)
        copy = log.with_name("copy.db")
        shutil.copy(log, copy)
        copy.replace(log)

    monkeypatch.setattr(MigrationSource, "make_durable", replace_file)
    with pytest.raises(StoreError, match="removed or replaced"):
        migrate_log(str(log), database, ignore_progress)
    assert not can_be_opened(PostgresStore(database))


# --- the file after a move -------------------------------------------------------------------------------


def test_open_log_refuses_writes_after_a_move(log: Path, database: str) -> None:
    with oncelog.open_blocking(log) as mine, closing(sqlite3.connect(log, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        done = oncelog.once(share(connection), key=str, name="done", result=int)(lambda number: number)
        assert done(1) == 1
        migrate_log(str(log), database, ignore_progress)
        for write in (
            lambda: mine.submit(full_event(880_000, ["orders"])),
            lambda: mine.submit(
                full_event(2, ["orders"])
            ),  # Known writes are refused too, because the database now has the answers.
            lambda: mine.erase(partition="orders"),
            lambda: mine.submit(note(1, "new")),  # The policy of this write has not been declared in this process yet.
            mine.confirm_clock,
            lambda: done(1),
            lambda: done(2),
            lambda: share(connection),
            lambda: oncelog.open_blocking(log).__enter__(),
        ):
            with pytest.raises(MovedError) as raised:
                write()
            assert raised.value.target == redact_address(database)
            assert str(log) in str(raised.value)
        assert len(mine.read().records) == mine.heads()[0].position
    assert_moved(log, database)


def test_password_is_not_written_into_the_file(log: Path, database: str) -> None:
    address = database.replace("postgres@", "postgres:tiger-lily@")
    migrate_log(str(log), address, ignore_progress)
    assert b"tiger-lily" not in log.read_bytes()
    with pytest.raises(MovedError) as raised:
        oncelog.open_blocking(log).__enter__()
    assert "tiger-lily" not in str(raised.value)


def test_restored_copy_of_a_moved_file_is_a_separate_log(log: Path, database: str) -> None:
    migrate_log(str(log), database, ignore_progress)
    copy = log.with_name("restored.db")
    restore(str(log), str(copy), ignore_progress)
    with open_writer(copy) as session:
        assert are_new(commit(session, 1))
        assert are_known(commit(session, 1))
        assert session.metadata.epoch != query(database, "SELECT epoch FROM oncelog_log")[0][0]
    with pytest.raises(StoreError, match="contains another log"):
        migrate_log(str(copy), database, ignore_progress)


# --- generated histories ---------------------------------------------------------------------------------


class Mover:
    """Creates a store in a file, and after the move a store in the database."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.db"
        self.address = address_of(self.path)
        self.is_moved = False

    def __call__(self, clock: ManualClock, its: Settings | None) -> Store:
        if self.is_moved:
            return PostgresStore(self.address, its, clock=clock, draw=bytes, keep_clock_ms=0)
        return SqliteStore(self.path, its, clock=clock, draw=bytes, driver=QuickDriver(), seal_keys=4)

    def move(self, log: StoreDriver) -> None:
        log.run(log.store.close())
        migrate_log(str(self.path), self.address, ignore_progress)
        self.is_moved = True
        log.store = self(log.clock, None)
        log.run(log.store.open())


def replay(timed_history: TimedHistory, at: int) -> None:
    """Replay a history on a store in memory and on a log that is moved before one of the batches."""
    with tempfile.TemporaryDirectory() as directory:
        mover = Mover(Path(directory))
        memory = StoreDriver(
            lambda clock, its: MemoryStore(its, clock=clock, draw=bytes), timed_history.settings, False
        )
        durable = StoreDriver(mover, timed_history.settings, is_durable=True)
        one, other = Replayer(memory), Replayer(durable)
        try:
            for number, (step, moment) in enumerate(zip(timed_history.steps, timed_history.moments, strict=True)):
                if number == at:
                    mover.move(durable)
                assert other.apply(step, moment) == one.apply(step, moment), f"batch {number}"
            if not mover.is_moved:
                mover.move(durable)
            assert read_store(durable) == read_store(memory)
            assert check_invariants(other, timed_history) == []
        finally:
            memory.close()
            durable.close()


@pytest.mark.stores(POSTGRES)
@settings(max_examples=settings().max_examples // 5)
@given(st.one_of(timed_histories(*BUILT_IN_POLICIES), timed_histories()), st.integers(0, 12))
def test_generated_histories_continue_in_the_database(timed_history: TimedHistory, at: int) -> None:
    replay(timed_history, at)
