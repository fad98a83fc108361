"""The key index: every committed key is found, whoever committed it, whoever sealed it, and whatever failed."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from oncelog.core.values import KeyIdentity, SequenceIdentity, key_identity
from oncelog.errors import CorruptError, DiskFullError
from oncelog.stores.key_hash import HASH_MAX, SECRET_BYTES, hash_of, hashes_of
from oncelog.stores.side_state import TABLES
from oncelog.stores.sqlite import SqliteStore, filters, index, jobs, runs, sweeping, writing
from oncelog.stores.sqlite.filters import Filter
from oncelog.stores.sqlite.index import KeyIndex
from oncelog.stores.sqlite.runs import keys_of
from oncelog.stores.sqlite.session import Session
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.tables import DELETE, LOAD
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driven import DrivenStore
from stores.sessions import (
    SETTINGS,
    FailingDriver,
    QuickConnection,
    QuickDriver,
    are_known,
    are_new,
    commit,
    session_on,
    write,
)

Identity = KeyIdentity | SequenceIdentity
EVENTS_HASH = 8299911729424881382
SEQUENCE_HASH = 2189155921296615790


def test_a_hash_does_not_depend_on_what_is_hashed_before_it() -> None:
    """Hashes stand in files: these are of a log that was made by an earlier version."""
    secret = bytes(range(SECRET_BYTES))
    identities: list[Identity] = [
        ("events", "", "", b"k" * 16),
        ("events", "", "", b"l" * 16),
        ("ledger", "acme", "till", b"k" * 16),
        ("ledger", "acme", "till", 7),
        ("ledger", "acme", "tills", 7),
        ("ledger", "acm", "etill", b"k" * 16),
        ("events", "", "", b"k" * 15 + b"m"),
    ]
    each = {one: hash_of(secret, one) for one in identities}
    assert len(set(each.values())) == len(identities)
    assert each["events", "", "", b"k" * 16] == EVENTS_HASH
    assert each["ledger", "acme", "till", 7] == SEQUENCE_HASH
    for turn in range(len(identities)):
        assert hashes_of(secret, identities[turn:] + identities[:turn]) == each


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments, of which four are merged: so there are several levels, runs and merges, also of few keys."""
    monkeypatch.setattr(index, "FAN_OUT", 4)
    monkeypatch.setattr(jobs, "CLEARED_RUNS", 2)
    monkeypatch.setattr(runs, "RUN_KEYS", 5)


@contextmanager
def rows_of(path: Path) -> Iterator[sqlite3.Connection]:
    """A look at the tables from beside."""
    connection = sqlite3.connect(path)
    try:
        yield connection
    finally:
        connection.close()


def check_segments(path: Path) -> None:
    """Every key of a sealed record is in one segment, there are few segments, and none has a key without a record."""
    with rows_of(path) as connection:
        done = {
            segment: cursor
            for sources, cursor in connection.execute("SELECT sources, cursor FROM oncelog_key_jobs")
            for segment in json.loads(sources)
        }
        sealed = Counter(
            pair
            for segment, packed in connection.execute("SELECT segment, keys FROM oncelog_key_runs")
            for pair in zip(*keys_of(packed), strict=True)
            if pair[0] > done.get(segment, -1)
        )
        assert set(sealed.values()) <= {1}
        orphans = (
            "SELECT count(*) FROM oncelog_key_runs WHERE segment NOT IN (SELECT segment FROM oncelog_key_segments)"
        )
        assert connection.execute(orphans).fetchone() == (0,)
        records = """SELECT place FROM oncelog_records JOIN oncelog_lanes
            ON lane = place >> 48 AND (place & 281474976710655) <= {}"""
        places = [place for _, place in sealed]
        assert {place for (place,) in connection.execute(records.format("sealed_position"))} <= set(places)
        beyond = {place for (place,) in connection.execute(records.format("max(sealed_position, sealing_position)"))}
        assert set(places) <= beyond
        assert len(places) == len(set(places))  # each of them has one key
        levels = dict(connection.execute("SELECT level, count(*) FROM oncelog_key_segments GROUP BY level").fetchall())
        # Four that are being merged, about as many that wait, and one that is being filled.
        assert max(levels.values(), default=0) <= 2 * index.FAN_OUT + 2


def check_all_known(session: Session, upto: int) -> None:
    remembered = session.remembered([key_identity(write(number)) for number in range(upto)])
    places = {(it.receipt.lane, it.receipt.position) for it in remembered if it is not None}
    assert len(places) == upto
    assert session.remembered([key_identity(write(upto + number)) for number in range(50)]) == [None] * 50


# --- finding -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-14")
def test_two_processes_that_take_turns_find_every_key_and_so_does_a_third(tmp_path: Path) -> None:
    random = Random(5)
    path = tmp_path / "log.db"
    with session_on(path, 16) as first, session_on(path, 16) as second:
        done = 0
        while done < 4000:
            session = random.choice((first, second))
            count = random.choice((1, 1, 2, 5, 20, 60))
            assert are_new(commit(session, *random.sample(range(done, done + count), count)))
            done += count
            assert are_known(commit(session, *[random.randrange(done) for _ in range(5)]))
            if random.random() < 0.02:
                check_segments(path)
        check_segments(path)
        with session_on(path, 16) as third:
            for session in (first, second, third):
                check_all_known(session, done)
        assert max(segment.level for segment in first.index.segments) >= 2


@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("committed_before", [0, 1, 40])
def test_what_another_process_committed_and_sealed_in_the_meantime_is_known(
    tmp_path: Path, committed_before: int
) -> None:
    """It was never among the keys that this process had in memory, so its filter must be told."""
    path = tmp_path / "log.db"
    with session_on(path, 8) as idle, session_on(path, 8) as busy:
        for number in range(committed_before):
            commit(idle, number)
        for number in range(committed_before, committed_before + 300):
            assert are_new(commit(busy, number))
        assert busy.index.sealed_keys > 250
        assert are_known(commit(idle, *range(committed_before + 300)))
        check_segments(path)


@pytest.mark.rule("CO-14")
def test_sealing_that_one_process_began_is_gone_on_with_by_others(tmp_path: Path) -> None:
    """Slices of 18 keys from segments of 150: every segment is written by several processes."""
    path = tmp_path / "log.db"
    with ExitStack() as stack:
        sessions = [stack.enter_context(session_on(path, 150)) for _ in range(3)]
        for number in range(1200):
            if number % 100 == 99:
                sessions[number % 3].close()
                sessions[number % 3] = stack.enter_context(session_on(path, 150))
            assert are_new(commit(sessions[number % 3], number))
            assert are_known(commit(sessions[(number + 1) % 3], number // 2))
        check_segments(path)
        for session in sessions:
            check_all_known(session, 1200)


@pytest.mark.rule("CO-14")
@pytest.mark.parametrize(
    ("hashes", "seal_keys"),
    [
        ([0], 1),
        ([0, 1, HASH_MAX], 1),
        ([5, HASH_MAX // 2, HASH_MAX // 2 + 1, HASH_MAX - 1], 2),
        # So many that they are sealed in several slices: other keys of the same hash come in between.
        ([number * (HASH_MAX // 99) for number in range(100)], 70),
    ],
)
def test_keys_of_one_hash_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: list[int], seal_keys: int
) -> None:
    def hashes_of(_: KeyIndex, identities: Iterable[Identity]) -> dict[Identity, int]:
        return {one: hashes[crc32(repr(one).encode()) % len(hashes)] for one in identities}

    monkeypatch.setattr(KeyIndex, "hashes_of", hashes_of)
    path = tmp_path / "log.db"
    count = 150 + 2 * len(hashes)
    with session_on(path, seal_keys) as first, session_on(path, seal_keys) as second:
        for number in range(0, count, 5):
            session = (first, second)[number % 2]
            assert are_new(commit(session, *range(number, number + 5)))
            assert are_known(commit(session, *range(number + 5)))
        check_segments(path)
        with session_on(path, seal_keys) as third:
            for session in (first, second, third):
                check_all_known(session, number + 5)


# --- failing -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-10", "CO-16")
@pytest.mark.parametrize("is_run_first", [False, True])
def test_an_error_at_any_statement_loses_no_key_and_the_work_goes_on(
    tmp_path: Path, is_run_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of two keys: nearly every commit seals, and soon merges on several levels."""
    monkeypatch.setattr(sweeping, "SWEEP_COMMITS", 1)  # every attempt has the same statements
    path = tmp_path / "log.db"
    driver = FailingDriver()
    failures = 0
    with session_on(path, 2, driver) as session, session_on(path, 2) as other:
        for number in range(0, 90, 3):
            batch = (number, number + 1, number + 2)
            statement = 0
            while True:
                statement += 1
                driver.arm(statement, is_run_first=is_run_first)
                try:
                    verdicts = commit(session, *batch)
                except sqlite3.OperationalError:
                    failures += 1
                    if statement % 7 == 0:
                        check_known_or_not_at_all(path, number, batch)
                    if statement % 5 == 0:
                        assert are_known(commit(other, *range(number)) if number else [])
                    continue
                driver.disarm()
                break
            # A COMMIT that failed after it had been done: the retry is told what became of it.
            assert are_known(verdicts) if is_run_first else are_new(verdicts)
            check_segments(path)
        with session_on(path, 2) as later:
            for one in (session, other, later):
                check_all_known(one, 90)
    assert failures > 300


@pytest.mark.rule("CO-10", "CO-16")
def test_an_error_that_is_not_sqlites_leaves_nothing_prepared_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the index had staged must not be confirmed by the next commit that changes nothing."""

    def fail(*_: object) -> None:
        raise MemoryError

    path = tmp_path / "log.db"
    with session_on(path, 8) as session, session_on(path, 8) as other:
        assert are_new(commit(session, 1))
        with monkeypatch.context() as patched:
            patched.setattr(KeyIndex, "maintain", fail)
            with pytest.raises(MemoryError):
                commit(session, 2)
        assert are_known(commit(session, 1))
        assert are_new(commit(other, 3))
        assert are_known(commit(session, 3))
        assert are_new(commit(session, 2))


def check_known_or_not_at_all(path: Path, number: int, batch: tuple[int, ...]) -> None:
    with session_on(path, 2) as fresh:
        remembered = fresh.remembered([key_identity(write(known)) for known in range(number)])
        assert all(it is not None for it in remembered)
        assert len({it is None for it in fresh.remembered([key_identity(write(known)) for known in batch])}) == 1
    check_segments(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("key_segments SET keys = 1 << 60", "a segment with 1152921504606846976 keys, of 60 records"),
        ("key_segments SET keys = -1", "a segment with -1 keys"),
        ("key_jobs SET keys = 1 << 60", "a segment with 1152921504606846976 keys"),
        ("key_jobs SET sources = '[1,'", "work on '[1,', which are no segments"),
        ("key_jobs SET sources = '7'", "work on '7', which are no segments"),
    ],
)
def test_an_index_that_cannot_be_is_called_corrupt(tmp_path: Path, change: str, message: str) -> None:
    """Before memory is made for so many keys: there an allocation that fails ends the process."""
    path = tmp_path / "log.db"
    with session_on(path, 8) as session:
        for number in range(60):
            commit(session, number)
    with rows_of(path) as connection:
        assert connection.execute(f"UPDATE oncelog_{change}").rowcount > 0
        connection.commit()
    with pytest.raises(CorruptError, match=re.escape(message)), session_on(path, 8) as session:
        commit(session, 1)


# --- the filter ----------------------------------------------------------------------------------------------


def test_a_filter_that_is_filled_beside_the_commits_knows_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8) as session:
        for start in range(0, 300, 10):
            commit(session, *range(start, start + 10))
    monkeypatch.setattr(writing, "FILL_AT_ONCE_KEYS", 0)
    with session_on(path, 8) as other:

        def make(clock: ManualClock, _: object) -> SqliteStore:
            return SqliteStore(path, clock=clock, seal_keys=8)

        log = DrivenStore(make, SETTINGS, is_durable=True)
        store = log.store
        assert isinstance(store, SqliteStore)
        assert not has_filter(store)
        for number in range(300, 400):
            commit(other, number)  # sealed, while the filter is being filled
        assert store._filling is not None
        for number in range(400, 440):
            log(write(number))
        log.run(wait_for(store))
        assert has_filter(store)
        verdicts = log.together(*[write(number) for number in range(440)])
        assert are_known(verdicts)
        log.close()


def has_filter(store: SqliteStore) -> bool:
    return store._session.index.has_filter


async def wait_for(store: SqliteStore) -> None:
    assert store._filling is not None
    await store._filling


def test_a_filter_grows_by_layers_and_never_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "FILTER_KEYS_MIN", 100)
    random = Random(1)
    hashes = [random.randrange(HASH_MAX) for _ in range(5000)]
    sealed = Filter()
    for start in range(0, 5000, 37):
        sealed.update(hashes[start : start + 37])
    assert len(sealed._layers) > 1
    assert sealed.among(hashes) == hashes
    assert len(sealed.among(random.randrange(HASH_MAX) for _ in range(5000))) < 150
    few = Filter()
    few.update(hashes[:50])
    assert few.among(hashes[:50]) == hashes[:50]
    assert len(few.among(hashes[50:])) < 400
    assert sealed.memory_bytes < 50_000


def test_a_key_that_is_new_does_not_look_at_the_segments(tmp_path: Path) -> None:
    statements: list[str] = []
    with session_on(tmp_path / "log.db", 8) as session:
        for start in range(0, 400, 10):
            commit(session, *range(start, start + 10))
        session.connection.set_trace_callback(statements.append)
        for number in range(400, 500):
            assert are_new(commit(session, number))
    looks = sum("FROM json_each" in statement and "oncelog_key_runs" in statement for statement in statements)
    assert looks <= 5  # one key in 200 looks known to a layer of a filter


def looks_for(session: Session, *numbers: int) -> int:
    """How many segments are looked at for keys that are known."""
    statements: list[str] = []
    session.connection.set_trace_callback(statements.append)
    assert are_known(commit(session, *numbers))
    session.connection.set_trace_callback(None)
    return sum("FROM json_each" in statement and "oncelog_key_runs" in statement for statement in statements)


def test_a_key_that_is_known_is_looked_for_where_it_may_be(tmp_path: Path) -> None:
    """Also by who has found the segments there; by who has not made all of them, everywhere else too."""
    path = tmp_path / "log.db"
    with session_on(path, 40) as session:
        for number in range(1500):
            commit(session, number)
        segments = len(session.index.segments)
        assert segments > 3
        assert sum(looks_for(session, number) for number in range(100)) < 150
        with session_on(path, 40) as later:
            assert are_known(commit(later, 0))
            # One is being merged, of which it has not seen the beginning.
            assert sum(looks_for(later, number) for number in range(100)) < 190
            for number in range(1500, 2500):
                commit(session if number % 2 else later, number)
            assert max(looks_for(later, number) for number in range(0, 2500, 9)) > 1
            check_all_known(later, 2500)


# --- cost ----------------------------------------------------------------------------------------------------

GROWING = re.compile(r"oncelog_(records|key_runs|partition_records|stream_records|rows)\b")
LOOKS_AT_ALL = re.compile(r"(all|missing|extra)_\w+")
"""Statements that are meant to: they verify a log."""
SORTS_A_FEW = {"briefs_at", "records_at"}
"""A page."""


def plan_of(connection: sqlite3.Connection, statement: str) -> list[str]:
    names = re.findall(r":(\w+)", statement)
    parameters = dict.fromkeys(names, 1) if names else (1,) * statement.count("?")
    rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
    return [detail for *_, detail in rows]


@pytest.mark.rule("DE-5")
def test_no_statement_looks_through_a_table_that_grows(tmp_path: Path) -> None:
    with session_on(tmp_path / "log.db", 8) as session:
        commit(session, *range(100))
        statements = {name: statement for name, statement in SQL.items() if GROWING.search(statement)}
        looked_at = {name: plan_of(session.connection, it) for name, it in statements.items()}
        side_state = {table.name: plan_of(session.connection, LOAD[table.name]) for table in TABLES}
        side_state |= {f"delete {table.name}": plan_of(session.connection, DELETE[table.name]) for table in TABLES}
    assert len(statements) >= 15
    for name, steps in (looked_at | side_state).items():
        if LOOKS_AT_ALL.fullmatch(name):
            continue
        # A subquery has a limit of its own, and what it looks through is among the steps too.
        scans = [step for step in steps if re.match(r"SCAN (?!\(subquery)", step) and "VIRTUAL TABLE" not in step]
        assert scans == [], name
        sorts = [step for step in steps if "TEMP B-TREE" in step]
        assert sorts == [] or name in SORTS_A_FEW, name


def test_the_work_on_segments_is_in_proportion_to_what_a_commit_adds(tmp_path: Path) -> None:
    """No commit pays for a large merge: the rows that one commit writes stay within a few slices."""
    with session_on(tmp_path / "log.db", 64) as session:
        most = 0
        for number in range(2000):
            before = session.connection.total_changes
            commit(session, number)
            most = max(most, session.connection.total_changes - before)
    assert most < 60  # with whole merges in one commit more than 400


def test_what_has_been_merged_is_cleared_before_long(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    left = 0
    with session_on(path, 64) as session, rows_of(path) as connection:
        for number in range(1500):
            commit(session, number)
            for sources, cursor in connection.execute("SELECT sources, cursor FROM oncelog_key_jobs").fetchall():
                for source in json.loads(sources):
                    below = "SELECT count(*) FROM oncelog_key_runs WHERE segment = ? AND last <= ?"
                    left = max(left, connection.execute(below, (source, cursor)).fetchone()[0])
    # A slice more than it should be, and hashes are not spread quite evenly; a source has 13 runs and more.
    assert 0 < left <= 3 * jobs.CLEARED_RUNS


def test_processes_that_commit_once_and_end_do_their_part(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for number in range(300):
        with session_on(path, 40) as session:
            assert are_new(commit(session, number))
            assert session.index.hot_keys < 2 * 40


def test_a_checkpoint_that_finds_no_room_costs_the_index_nothing(tmp_path: Path) -> None:
    class Full(QuickConnection):
        def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
            if is_full and "wal_checkpoint" in statement:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            return super().execute(statement, *arguments)

    class FullDriver(QuickDriver):
        def connect(self, path: str) -> sqlite3.Connection:
            return sqlite3.connect(path, factory=Full, isolation_level=None, check_same_thread=False)

    is_full = False
    with session_on(tmp_path / "log.db", 16, FullDriver()) as session:
        assert are_new(commit(session, *range(10)))
        before = session.index
        is_full = True
        with pytest.raises(DiskFullError):
            session.scrub()
        assert session.index is before
        assert are_known(commit(session, *range(10)))
