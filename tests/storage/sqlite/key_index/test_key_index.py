"""The key index finds every committed key, in every process and after every failure."""

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

from bench.memory import compute_deep_size
from oncelog.core.values import KeyIdentity, SequenceIdentity, key_identity
from oncelog.errors import CorruptError, DiskFullError
from oncelog.storage.key_hash import HASH_MAX, SECRET_BYTES, hash_identities, hash_identity
from oncelog.storage.side_state import TABLES
from oncelog.storage.sqlite import SqliteStore, transaction
from oncelog.storage.sqlite.key_index import filters, index, key_run, segments
from oncelog.storage.sqlite.key_index.filters import LayeredBloomFilter
from oncelog.storage.sqlite.key_index.index import KeyIndex
from oncelog.storage.sqlite.key_index.key_run import unpack_run
from oncelog.storage.sqlite.side_state_tables import DELETE_SQL, LOAD_SQL
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.writer import Writer
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driver import StoreDriver
from storage.sqlite.writers import (
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


def test_key_hash_is_stable_and_independent_of_earlier_hashes() -> None:
    """Hashes are stored in files. An earlier version computed these values."""
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
    each = {one: hash_identity(secret, one) for one in identities}
    assert len(set(each.values())) == len(identities)
    assert each["events", "", "", b"k" * 16] == EVENTS_HASH
    assert each["ledger", "acme", "till", 7] == SEQUENCE_HASH
    for turn in range(len(identities)):
        assert hash_identities(secret, identities[turn:] + identities[:turn]) == each


@pytest.fixture(autouse=True)
def use_small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small segments, so that a few keys need several levels, runs and merges."""
    monkeypatch.setattr(index, "FAN_OUT", 4)
    monkeypatch.setattr(segments, "CLEAR_RUNS", 2)
    monkeypatch.setattr(key_run, "RUN_KEYS", 5)


@contextmanager
def open_tables(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a separate connection to the tables."""
    connection = sqlite3.connect(path)
    try:
        yield connection
    finally:
        connection.close()


def check_segments(path: Path) -> None:
    """Assert that each key of a sealed record is in one segment, keys have records, and few segments exist."""
    with open_tables(path) as connection:
        done = {
            segment: cursor
            for sources, cursor in connection.execute("SELECT sources, cursor FROM oncelog_key_jobs")
            for segment in json.loads(sources)
        }
        sealed = Counter(
            pair
            for segment, packed in connection.execute("SELECT segment, keys FROM oncelog_key_runs")
            for pair in zip(*unpack_run(packed), strict=True)
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
        assert len(places) == len(set(places))  # one key per record
        levels = dict(connection.execute("SELECT level, count(*) FROM oncelog_key_segments GROUP BY level").fetchall())
        # Four segments are being merged, about as many wait, and one is being filled.
        assert max(levels.values(), default=0) <= 2 * index.FAN_OUT + 2


def check_all_known(session: Writer, upto: int) -> None:
    remembered = session.find_keys([key_identity(write(number)) for number in range(upto)])
    places = {(it.receipt.lane, it.receipt.position) for it in remembered if it is not None}
    assert len(places) == upto
    assert session.find_keys([key_identity(write(upto + number)) for number in range(50)]) == [None] * 50


# --- lookups -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-14")
def test_three_processes_find_every_key_that_two_of_them_write_in_turns(tmp_path: Path) -> None:
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
def test_keys_sealed_by_another_process_are_found(tmp_path: Path, committed_before: int) -> None:
    """The keys were never in the memtable of this process, so its filter must be updated."""
    path = tmp_path / "log.db"
    with session_on(path, 8) as idle, session_on(path, 8) as busy:
        for number in range(committed_before):
            commit(idle, number)
        for number in range(committed_before, committed_before + 300):
            assert are_new(commit(busy, number))
        assert busy.index.segment_keys > 250
        assert are_known(commit(idle, *range(committed_before + 300)))
        check_segments(path)


@pytest.mark.rule("CO-14")
def test_sealing_is_continued_by_other_processes(tmp_path: Path) -> None:
    """With slices of 18 keys and segments of 150, several processes write every segment."""
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
        # Sealed in several slices, interleaved with other keys of the same hash.
        ([number * (HASH_MAX // 99) for number in range(100)], 70),
    ],
)
def test_keys_with_equal_hashes_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: list[int], seal_keys: int
) -> None:
    def hashes_of(_: KeyIndex, identities: Iterable[Identity]) -> dict[Identity, int]:
        return {one: hashes[crc32(repr(one).encode()) % len(hashes)] for one in identities}

    monkeypatch.setattr(KeyIndex, "hash_identities", hashes_of)
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


# --- failures ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-10", "CO-16")
@pytest.mark.parametrize("is_run_first", [False, True])
def test_error_at_any_statement_loses_no_key(
    tmp_path: Path, is_run_first: bool, is_soak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With segments of two keys, nearly every commit seals, and merges soon run on several levels.

    Without --soak, only the first commits fail, and the last ones, which begin the second level.
    """
    monkeypatch.setattr(transaction, "EXPIRY_INTERVAL_COMMITS", 1)  # so that every attempt runs the same statements
    path = tmp_path / "log.db"
    driver = FailingDriver()
    failures, keys = 0, 90 if is_soak else 72
    with session_on(path, 2, driver) as session, session_on(path, 2) as other:
        for number in range(0, keys, 3):
            batch = (number, number + 1, number + 2)
            if 12 <= number < 51 and not is_soak:
                assert are_new(commit(session, *batch))
                continue
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
            # If COMMIT failed after it was executed, the retry is a replay.
            assert are_known(verdicts) if is_run_first else are_new(verdicts)
            check_segments(path)
        with session_on(path, 2) as later:
            for one in (session, other, later):
                check_all_known(one, keys)
            assert max(segment.level for segment in later.index.segments) == 2
    assert failures > 300


@pytest.mark.rule("CO-10", "CO-16")
def test_index_changes_of_a_failed_commit_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit, which has no changes, must not apply the staged changes."""

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
        remembered = fresh.find_keys([key_identity(write(known)) for known in range(number)])
        assert all(it is not None for it in remembered)
        assert len({it is None for it in fresh.find_keys([key_identity(write(known)) for known in batch])}) == 1
    check_segments(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("key_segments SET keys = 1 << 60", "a segment with 1152921504606846976 keys in a log of 60 records"),
        ("key_segments SET keys = -1", "a segment with -1 keys"),
        ("key_jobs SET keys = 1 << 60", "a segment with 1152921504606846976 keys"),
        ("key_jobs SET sources = '[1,'", "the sources '[1,', which are not a list of segments"),
        ("key_jobs SET sources = '7'", "the sources '7', which are not a list of segments"),
    ],
)
def test_impossible_index_is_reported_as_corrupt(tmp_path: Path, change: str, message: str) -> None:
    """The error comes before memory is allocated for the keys, because a failed allocation would kill the process."""
    path = tmp_path / "log.db"
    with session_on(path, 8) as session:
        for number in range(60):
            commit(session, number)
    with open_tables(path) as connection:
        assert connection.execute(f"UPDATE oncelog_{change}").rowcount > 0
        connection.commit()
    with pytest.raises(CorruptError, match=re.escape(message)), session_on(path, 8) as session:
        commit(session, 1)


# --- the filter ----------------------------------------------------------------------------------------------


def test_filter_filled_during_commits_contains_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8) as session:
        for start in range(0, 300, 10):
            commit(session, *range(start, start + 10))
    monkeypatch.setattr(transaction, "IMMEDIATE_FILL_KEYS_MAX", 0)
    with session_on(path, 8) as other:

        def make(clock: ManualClock, _: object) -> SqliteStore:
            return SqliteStore(path, clock=clock, seal_keys=8)

        log = StoreDriver(make, SETTINGS, is_durable=True)
        store = log.store
        assert isinstance(store, SqliteStore)
        assert not has_filter(store)
        for number in range(300, 400):
            commit(other, number)  # sealed while the filter is filled
        assert store._fill_task is not None
        for number in range(400, 440):
            log(write(number))
        log.run(wait_for(store))
        assert has_filter(store)
        verdicts = log.commit_items(*[write(number) for number in range(440)])
        assert are_known(verdicts)
        log.close()


def has_filter(store: SqliteStore) -> bool:
    return store._file_writer.index.has_filter


async def wait_for(store: SqliteStore) -> None:
    assert store._fill_task is not None
    await store._fill_task


def test_filter_grows_by_layers_without_false_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "GLOBAL_CAPACITY_MIN", 100)
    random = Random(1)
    hashes = [random.randrange(HASH_MAX) for _ in range(5000)]
    sealed = LayeredBloomFilter()
    for start in range(0, 5000, 37):
        sealed.add(hashes[start : start + 37])
    assert len(sealed._layers) > 1
    assert sealed.possible_members(hashes) == hashes
    assert len(sealed.possible_members(random.randrange(HASH_MAX) for _ in range(5000))) < 150
    few = LayeredBloomFilter()
    few.add(hashes[:50])
    assert few.possible_members(hashes[:50]) == hashes[:50]
    assert len(few.possible_members(hashes[50:])) < 400
    assert compute_deep_size(sealed) < 50_000


def test_new_key_does_not_read_segments(tmp_path: Path) -> None:
    statements: list[str] = []
    with session_on(tmp_path / "log.db", 8) as session:
        for start in range(0, 400, 10):
            commit(session, *range(start, start + 10))
        session.connection.set_trace_callback(statements.append)
        for number in range(400, 500):
            assert are_new(commit(session, number))
    looks = sum("FROM json_each" in statement and "oncelog_key_runs" in statement for statement in statements)
    assert looks <= 5  # false positives of about 1 in 200


def count_segment_reads(session: Writer, *numbers: int) -> int:
    """Return the number of segment reads for known keys."""
    statements: list[str] = []
    session.connection.set_trace_callback(statements.append)
    assert are_known(commit(session, *numbers))
    session.connection.set_trace_callback(None)
    return sum("FROM json_each" in statement and "oncelog_key_runs" in statement for statement in statements)


def test_known_key_reads_only_matching_segments(tmp_path: Path) -> None:
    """This includes a process that opens the file later, except for segments that others create after that."""
    path = tmp_path / "log.db"
    with session_on(path, 40) as session:
        for number in range(1500):
            commit(session, number)
        segments = len(session.index.segments)
        assert segments > 3
        assert sum(count_segment_reads(session, number) for number in range(100)) < 150
        with session_on(path, 40) as later:
            assert are_known(commit(later, 0))
            # One merge had started before the session was opened.
            assert sum(count_segment_reads(later, number) for number in range(100)) < 190
            for number in range(1500, 2500):
                commit(session if number % 2 else later, number)
            assert max(count_segment_reads(later, number) for number in range(0, 2500, 9)) > 1
            check_all_known(later, 2500)


# --- cost ----------------------------------------------------------------------------------------------------

GROWING = re.compile(r"oncelog_(records|key_runs|partition_records|stream_records|rows)\b")
LOOKS_AT_ALL = re.compile(r"(all|missing|extra|count)_\w+|\w+_sizes")
"""Statements that verify a log or count the tenants' usage read all rows by design."""
SORTS_A_FEW = {"bodies", "briefs_at", "internal_page", "records_at"}
"""Statements that sort one page, or one page of each lane."""


def explain(connection: sqlite3.Connection, statement: str) -> list[str]:
    names = re.findall(r":(\w+)", statement)
    numbered = [int(number) for number in re.findall(r"\?(\d+)", statement)]
    parameters = dict.fromkeys(names, 1) if names else (1,) * max(numbered, default=statement.count("?"))
    rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
    return [detail for *_, detail in rows]


@pytest.mark.rule("DE-5")
def test_no_statement_scans_a_growing_table(tmp_path: Path) -> None:
    with session_on(tmp_path / "log.db", 8) as session:
        commit(session, *range(100))
        statements = {name: statement for name, statement in SQL.items() if GROWING.search(statement)}
        looked_at = {name: explain(session.connection, it) for name, it in statements.items()}
        side_state = {table.name: explain(session.connection, LOAD_SQL[table.name]) for table in TABLES}
        side_state |= {f"delete {table.name}": explain(session.connection, DELETE_SQL[table.name]) for table in TABLES}
    assert len(statements) >= 15
    for name, steps in (looked_at | side_state).items():
        if LOOKS_AT_ALL.fullmatch(name):
            continue
        # A subquery has a separate limit, and its steps are listed too.
        scans = [step for step in steps if re.match(r"SCAN (?!\(subquery)", step) and "VIRTUAL TABLE" not in step]
        assert scans == [], name
        sorts = [step for step in steps if "TEMP B-TREE" in step]
        assert sorts == [] or name in SORTS_A_FEW, name


def test_index_work_per_commit_is_bounded(tmp_path: Path) -> None:
    """Each commit writes the rows of a few slices at most, and never runs a large merge."""
    with session_on(tmp_path / "log.db", 64) as session:
        most = 0
        for number in range(2000):
            before = session.connection.total_changes
            commit(session, number)
            most = max(most, session.connection.total_changes - before)
    assert most < 60  # a whole merge in one commit would write more than 400


def test_merged_runs_are_cleared_soon(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    left = 0
    with session_on(path, 64) as session, open_tables(path) as connection:
        for number in range(1500):
            commit(session, number)
            for sources, cursor in connection.execute("SELECT sources, cursor FROM oncelog_key_jobs").fetchall():
                for source in json.loads(sources):
                    below = "SELECT count(*) FROM oncelog_key_runs WHERE segment = ? AND last <= ?"
                    left = max(left, connection.execute(below, (source, cursor)).fetchone()[0])
    # The limit leaves room for an extra slice and an uneven spread of hashes. A source has at least 13 runs.
    assert 0 < left <= 3 * segments.CLEAR_RUNS


def test_short_lived_processes_seal_the_memtable(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for number in range(150):
        with session_on(path, 40) as session:
            assert are_new(commit(session, number))
            assert session.index.memtable_keys < 2 * 40


def test_index_survives_a_checkpoint_on_a_full_disk(tmp_path: Path) -> None:
    class FullDiskConnection(QuickConnection):
        def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
            if is_full and "wal_checkpoint" in statement:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            return super().execute(statement, *arguments)

    class FullDiskDriver(QuickDriver):
        def connect(self, path: str) -> sqlite3.Connection:
            return sqlite3.connect(path, factory=FullDiskConnection, isolation_level=None, check_same_thread=False)

    is_full = False
    with session_on(tmp_path / "log.db", 16, FullDiskDriver()) as session:
        assert are_new(commit(session, *range(10)))
        before = session.index
        is_full = True
        with pytest.raises(DiskFullError):
            session.scrub()
        assert session.index is before
        assert are_known(commit(session, *range(10)))
