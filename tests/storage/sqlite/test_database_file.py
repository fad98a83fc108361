"""A log's file: foreign files are not changed, damage is reported, and older files are migrated."""

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier

import pytest

from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, Rate, Reason, Refused, Request, Settings, Submission, Verdict
from oncelog.errors import (
    CorruptError,
    NewerSchemaError,
    NotALogError,
    OncelogError,
    SettingsError,
    StoreError,
    StoreUnavailableError,
)
from oncelog.storage.queries.writes import declare_policies
from oncelog.storage.sqlite import SqliteStore, database_file
from oncelog.storage.sqlite.database_file import APPLICATION_ID, SCHEMA_VERSION
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.sqlite.statements import load_migrations
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import Query
from oncelog.storage.verify.findings import VerificationSummary
from oncelog.storage.verify.verification import verify_log
from oncelog.testing.clock import ManualClock
from storage.sqlite.writers import ORDERS, are_known, are_new, commit, make_older, session_on, write

HEADER_BYTES = 100
NOBODY = 65534


def contents(directory: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir() if entry.is_file()}


async def open_and_close(path: Path) -> None:
    store = SqliteStore(path, clock=ManualClock())
    await store.open()
    await store.close()


def make_log(path: Path, writes: int = 300) -> None:
    """Write a log of some pages and close it, so that the write-ahead log is empty."""
    with session_on(path, 50) as session:
        for start in range(0, writes, 50):
            assert are_new(commit(session, *range(start, start + 50)))
    assert list(contents(path.parent)) == [path.name]


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


# --- files that are not logs or cannot be read --------------------------------------------------------------


def text(path: Path) -> None:
    path.write_text("Dear diary, today I did not use a database.\n" * 100)


def short_text(path: Path) -> None:
    path.write_text("hello")


def magic_alone(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def foreign_database(path: Path) -> None:
    with database(path) as connection:
        connection.execute("CREATE TABLE oncelog_log (id INTEGER)")


def foreign_database_with_write_ahead_log(path: Path) -> None:
    with database(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA application_id = 252006675")
        connection.execute("CREATE TABLE t (id INTEGER)")


def without_tables(path: Path) -> None:
    with database(path) as connection:
        connection.execute("PRAGMA user_version = 3")


def newer(path: Path) -> None:
    make_log(path)
    with database(path) as connection:
        connection.execute("UPDATE oncelog_log SET schema_version = ?", (SCHEMA_VERSION + 1,))


def newer_with_another_table(path: Path) -> None:
    newer(path)
    with database(path) as connection:
        connection.execute("ALTER TABLE oncelog_log DROP COLUMN created_ms")


def without_its_table(path: Path) -> None:
    with database(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("CREATE TABLE t (id INTEGER)")


def without_its_row(path: Path) -> None:
    make_log(path)
    with database(path) as connection:
        connection.execute("DELETE FROM oncelog_log")


def truncated(path: Path) -> None:
    make_log(path)
    os.truncate(path, path.stat().st_size // 2)


def truncated_to_a_page(path: Path) -> None:
    make_log(path)
    os.truncate(path, 4096)


def garbage_after_the_header(path: Path) -> None:
    make_log(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:HEADER_BYTES] + b"\xa5" * (len(whole) - HEADER_BYTES))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (text, NotALogError),
        (short_text, NotALogError),
        (magic_alone, NotALogError),
        (foreign_database, NotALogError),
        (foreign_database_with_write_ahead_log, NotALogError),
        (without_tables, NotALogError),
        (newer, NewerSchemaError),
        (newer_with_another_table, NewerSchemaError),
        (without_its_table, CorruptError),
        (without_its_row, CorruptError),
        (truncated, CorruptError),
        (truncated_to_a_page, CorruptError),
        (garbage_after_the_header, CorruptError),
    ],
)
async def test_unusable_file_is_reported_with_its_path_and_not_changed(
    tmp_path: Path, make: Callable[[Path], None], error: type[OncelogError]
) -> None:
    path = tmp_path / "log.db"
    make(path)
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(error) as raised:
            await open_and_close(path)
        assert str(path) in str(raised.value)
        assert contents(tmp_path) == before


async def test_foreign_database_in_use_is_not_changed(tmp_path: Path) -> None:
    """Its write-ahead log is not changed either, although opening a database in WAL mode could write to it."""
    path = tmp_path / "theirs.db"
    with database(path) as theirs:
        theirs.execute("PRAGMA journal_mode = WAL")
        theirs.execute("CREATE TABLE t (id INTEGER)")
        before = contents(tmp_path)
        assert sorted(before) == ["theirs.db", "theirs.db-shm", "theirs.db-wal"]
        with pytest.raises(NotALogError):
            await open_and_close(path)
        assert contents(tmp_path) == before


async def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="directory"):
        await open_and_close(tmp_path)
    assert contents(tmp_path) == {}


async def test_log_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StoreUnavailableError, match=f"the directory {tmp_path}/nowhere does not exist; create it first"
    ):
        await open_and_close(tmp_path / "nowhere" / "log.db")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def drop_superuser_rights() -> Iterator[Path]:
    """Create a directory and drop superuser rights, because the superuser ignores file modes."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        is_superuser = os.geteuid() == 0
        if is_superuser:
            os.chown(directory, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield directory
        finally:
            if is_superuser:
                os.seteuid(0)
            directory.chmod(0o700)


async def test_read_only_file_is_unavailable() -> None:
    with drop_superuser_rights() as directory:
        path = directory / "log.db"
        make_log(path, 50)
        path.chmod(0o400)
        directory.chmod(0o500)
        before = contents(directory)
        with pytest.raises(StoreUnavailableError):
            await open_and_close(path)
        assert contents(directory) == before


def test_reader_without_write_access_is_told_what_sqlite_needs() -> None:
    with drop_superuser_rights() as directory:
        path = directory / "log.db"
        make_log(path, 50)
        path.chmod(0o400)
        directory.chmod(0o500)
        before = contents(directory)
        with pytest.raises(StoreUnavailableError, match="SQLite needs write access"), open_read_transaction(str(path)):
            pass
        assert contents(directory) == before


async def test_read_only_directory_is_unavailable() -> None:
    with drop_superuser_rights() as directory:
        directory.chmod(0o500)
        with pytest.raises(StoreUnavailableError):
            await open_and_close(directory / "log.db")
        assert contents(directory) == {}


async def test_unreadable_file_is_unavailable() -> None:
    with drop_superuser_rights() as directory:
        path = directory / "log.db"
        make_log(path, 50)
        path.chmod(0)
        with pytest.raises(StoreUnavailableError):
            await open_and_close(path)
        path.chmod(0o600)
        assert list(contents(directory)) == ["log.db"]


# --- creation --------------------------------------------------------------------------------------------------


async def test_empty_file_is_initialized_as_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.touch()
    await open_and_close(path)
    assert int.from_bytes(path.read_bytes()[68:72], "big") == APPLICATION_ID


def test_threads_that_create_one_file_concurrently_open_the_same_log(tmp_path: Path) -> None:
    """A thread with different settings gets an error that contains the stored settings."""
    for attempt in range(5):
        path = tmp_path / f"{attempt}.db"
        together = Barrier(6)

        def epoch_of(number: int, path: Path = path, together: Barrier = together) -> tuple[str, Settings]:
            async def commit_one() -> tuple[str, Settings]:
                store = SqliteStore(path, Settings(lanes=number), clock=ManualClock())
                together.wait()
                try:
                    await store.open()
                except SettingsError as error:
                    store = SqliteStore(path, clock=ManualClock())
                    await store.open()
                    assert f"created with lanes={store.settings.lanes}," in str(error)  # noqa: PT017
                    assert store.settings.lanes != number
                else:
                    assert store.settings.lanes == number
                await store.commit([Request((write(number),))])
                found = store.epoch, store.settings
                await store.close()
                return found

            return asyncio.run(commit_one())

        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(epoch_of, range(1, 7)))) == 1
        with session_on(path, 8) as session:
            assert are_known(commit(session, *range(1, 7)))


def epoch_made_by_a_process(path: str, numbers: range) -> str:
    async def commit_all() -> str:
        store = SqliteStore(path)
        await store.open()
        for number in numbers:
            await store.commit([Request((write(number), write(number + 1)))])
        await store.close()
        return store.epoch

    return asyncio.run(commit_all())


@pytest.mark.rule("CO-14")
def test_processes_that_create_one_file_concurrently_open_the_same_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:  # an executor's `map` fails when a process dies
        jobs = (range(60), range(20, 80), range(0, 80, 3))
        assert len(set(pool.map(epoch_made_by_a_process, [str(path)] * 3, jobs))) == 1
    with session_on(path, 8) as session:
        assert are_known(commit(session, *range(80)))
        heads = session.connection.execute("SELECT sum(position) FROM oncelog_lanes").fetchone()
        assert heads == (81,)


async def test_different_settings_are_refused_without_changing_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    make_log(path, 50)
    before = contents(tmp_path)
    for settings, words in (
        (Settings(), f"{path} was created with lanes=3, which cannot change, and cannot be opened with lanes="),
        (Settings(lanes=3, eviction_interval=7), "cannot be opened with eviction_interval=7. "),
    ):
        with pytest.raises(SettingsError) as raised:
            await SqliteStore(path, settings, clock=ManualClock()).open()
        assert words in str(raised.value)
        assert contents(tmp_path) == before
    await open_and_close(path)


# --- migration ---------------------------------------------------------------------------------------------------

NEXT = SCHEMA_VERSION + 1
ADDED = f"""
-- One more column; and a comment with a semicolon; in it.
ALTER TABLE oncelog_records ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue';
CREATE TABLE oncelog_{NEXT} (id INTEGER PRIMARY KEY) STRICT;
"""
FAILING = "INSERT INTO nowhere VALUES (1);"


def with_migration(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    added = [(SCHEMA_VERSION + 1 + place, script) for place, script in enumerate(scripts)]
    known = [*load_migrations(), *added]
    monkeypatch.setattr(database_file, "load_migrations", lambda: known)
    monkeypatch.setattr(database_file, "SCHEMA_VERSION", known[-1][0])


def read_version(path: Path) -> int:
    with database(path) as connection:
        return int(connection.execute("SELECT schema_version FROM oncelog_log").fetchone()[0])


def test_older_file_is_migrated_with_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    make_log(path)
    with_migration(monkeypatch, ADDED, "CREATE TABLE oncelog_more (id INTEGER PRIMARY KEY) STRICT;")
    with session_on(path, 50) as session:
        assert are_known(commit(session, *range(300)))
        assert are_new(commit(session, 300))
        colours = session.connection.execute("SELECT DISTINCT colour FROM oncelog_records").fetchall()
        assert colours == [("blue",)]
        session.connection.execute("SELECT * FROM oncelog_more").fetchall()
    assert read_version(path) == SCHEMA_VERSION + 2
    with session_on(path, 50) as session:
        assert are_known(commit(session, *range(301)))


def build_rated_event(number: int) -> Submission:
    """Return a write with a rate limit whose burst is two per actor."""
    key = number.to_bytes(16, "big")
    return Submission(
        policy=EVENTS, scope="", key=key, fingerprint=b"f", actor="user:ann", rate=Rate(1, burst=2), partitions=("p",)
    )


def is_rate_used_up(session: Writer) -> bool:
    """Commit three rated writes and return whether the third is refused."""
    start = 10_000 + session.connection.execute("SELECT count(*) FROM oncelog_records").fetchone()[0]
    batch = [Request(tuple(build_rated_event(start + number) for number in range(3)))]
    verdicts: list[Verdict] = session.commit(batch, None).verdicts[0]
    assert isinstance(verdicts[0], Committed)
    assert isinstance(verdicts[1], Committed)
    return isinstance(verdicts[2], Refused) and verdicts[2].reason is Reason.RATE_LIMITED


@pytest.mark.parametrize("rows_at_once", [1, 7, 60_000])
def test_file_of_the_first_schema_is_migrated_and_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(database_file, "_MIGRATION_BATCH_ROWS", rows_at_once)
    path = tmp_path / "log.db"
    make_log(path)
    make_older(path)
    with session_on(path, 50) as session:
        assert read_version(path) == SCHEMA_VERSION
        session.run_write(declare_policies, [EVENTS, ORDERS])
        assert are_known(commit(session, *range(300)))
        assert is_rate_used_up(session)
        for number in range(300, 340):  # enough commits for a full expiry pass
            assert are_new(commit(session, number))
    with session_on(path, 50) as session:
        assert are_known(commit(session, *range(340)))
    *_, last = verify_log(path)
    assert isinstance(last, VerificationSummary), last


def test_process_of_an_older_version_cannot_write_keys_during_a_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older process could write to the index between two steps, but the first step removes the table."""
    path = tmp_path / "log.db"
    make_log(path)
    make_older(path)
    steps = load_migrations()
    with monkeypatch.context() as patched, database(path) as connection:
        patched.setattr(database_file, "load_migrations", lambda: [step for step in steps if step[0] <= 7])
        database_file.migrate_schema(connection, 1)
        with pytest.raises(sqlite3.OperationalError, match="no such table: oncelog_keys"):
            connection.execute("INSERT INTO oncelog_keys VALUES (1, 2, 3)")
    assert read_version(path) == 7
    with session_on(path, 50) as session:
        assert are_known(commit(session, *range(300)))
    assert read_version(path) == SCHEMA_VERSION


def test_verify_refuses_a_file_that_is_not_migrated(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    make_log(path, 50)
    make_older(path)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=f"this version reads schema {SCHEMA_VERSION}. Open the log once"):
        list(verify_log(path))
    assert contents(tmp_path) == before
    assert read_version(path) == 1


def test_concurrent_migrations_run_once(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    make_log(path, 50)
    make_older(path)
    barrier = Barrier(4)

    def open_it(_: int) -> bool:
        barrier.wait()
        with session_on(path, 50) as session:
            return are_known(commit(session, *range(50)))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(open_it, range(4)))
    assert read_version(path) == SCHEMA_VERSION


async def test_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    make_log(path)
    epoch_and_schema = "SELECT epoch, (SELECT group_concat(sql) FROM sqlite_schema) FROM oncelog_log"
    with database(path) as connection:
        before = connection.execute(epoch_and_schema).fetchone()
    with monkeypatch.context() as patched:
        with_migration(patched, f"{ADDED} {FAILING}")
        with pytest.raises(sqlite3.OperationalError, match="nowhere"):
            await open_and_close(path)
    assert read_version(path) == SCHEMA_VERSION
    with database(path) as connection:
        assert connection.execute(epoch_and_schema).fetchone() == before
    with session_on(path, 50) as session:
        assert are_known(commit(session, *range(300)))


async def test_completed_migration_is_kept_when_the_next_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.db"
    make_log(path)
    with monkeypatch.context() as patched:
        with_migration(patched, ADDED, FAILING)
        with pytest.raises(sqlite3.OperationalError):
            await open_and_close(path)
    assert read_version(path) == SCHEMA_VERSION + 1


async def test_new_file_has_the_newest_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_migration(monkeypatch, ADDED)
    path = tmp_path / "log.db"
    await open_and_close(path)
    assert read_version(path) == SCHEMA_VERSION + 1


# --- tables of the application -------------------------------------------------------------------------------------


async def test_application_tables_in_the_file_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    make_log(path)
    with database(path) as connection, session_on(path, 8) as session:
        connection.execute("CREATE TABLE records (id INTEGER PRIMARY KEY, note TEXT)")
        for number in range(300, 340):
            connection.execute("INSERT INTO records (note) VALUES (?)", (f"note {number}",))
            assert are_new(commit(session, number))
            assert are_known(commit(session, number - 1))
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (40,)
    store = SqliteStore(path)
    await store.open()
    page = await store.read(Query(limit=1000))
    await store.close()
    assert len(page.records) == len([number for number in range(340) if number % 6 == 0])
