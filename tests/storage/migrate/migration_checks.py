"""Helpers for tests that move a log from a file into a database."""

import os
import shutil
import signal
import sqlite3
import traceback
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from cli.sample_log import HOUR_MS, START_MS, SetClock
from databases import query, run_in_thread
from deadlines import WAIT_S
from oncelog.core.policy import EVENTS
from oncelog.core.values import Item, Request, Settings, Verdict
from oncelog.errors import MovedError, StoreError
from oncelog.storage.address import redact_address
from oncelog.storage.migrate import migration
from oncelog.storage.migrate.migration import MigrationOutcome, migrate_log
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.queries.writes import declare_policies
from oncelog.storage.side_state import TABLES
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.moved_marker import load_marker
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import Store
from oncelog.storage.verify.findings import StepProgress, VerificationSummary
from oncelog.storage.verify.verification import verify_log
from oncelog.testing.contract.driver import StoreDriver
from storage.migrate.migration_worker import stop_at_point
from storage.sqlite.writers import ORDERS, session_on

PLACE = ("place >> 48", "place & 281474976710655")
RECORD = (
    "sequence, log_time_ms, height, client_sequence, policy, scope, client, key, fingerprint, actor, partitions, salt, "
    "body_hash, body"
)
LATER_MS = START_MS + 400 * HOUR_MS


def ignore_progress(_: StepProgress) -> None:
    """Ignore progress reports."""


def use_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.storage.migrate.source.SLICE_ROWS", 7)
    monkeypatch.setattr(migration, "SLICE_ROWS", 7)


# --- comparing the file and the database -----------------------------------------------------------------


def build_queries(*, is_file: bool) -> dict[str, str]:
    """Return one query per common table, for which both sides must return the same rows."""
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


def read_file_rows(path: Path) -> dict[str, set[Any]]:
    with closing(sqlite3.connect(path)) as connection:
        return {name: set(connection.execute(select)) for name, select in build_queries(is_file=True).items()}


def read_database_rows(address: str) -> dict[str, set[Any]]:
    async def fetched() -> dict[str, set[Any]]:
        connection = await asyncpg.connect(address)
        try:
            return {
                name: {tuple(row) for row in await connection.fetch(select)}
                for name, select in build_queries(is_file=False).items()
            }
        finally:
            await connection.close()

    return run_in_thread(fetched())


def assert_moved(path: Path, address: str) -> None:
    """Assert that the database has the rows of the file, that the move has finished, and that the file is marked."""
    assert read_database_rows(address) == read_file_rows(path)
    assert query(address, "SELECT move FROM oncelog_state") == [(None,)]
    with open_read_transaction(str(path)) as (connection, _):
        mark = load_marker(connection)
    assert mark is not None
    assert mark.target == redact_address(address)
    *_, last = verify_log(path)
    assert isinstance(last, VerificationSummary), last


def can_be_opened(store: Store) -> bool:
    """Return whether the store opens. If it does not, assert that the error reports the move."""

    async def open_and_close() -> None:
        await store.open()
        await store.close()

    try:
        run_in_thread(open_and_close())
    except StoreError as error:
        assert isinstance(error, MovedError) or "has not finished: run `oncelog move` again" in str(error)  # noqa: PT017
        return False
    return True


# --- logs ------------------------------------------------------------------------------------------------


@contextmanager
def open_writer(path: Path) -> Iterator[Writer]:
    """Open the file for writing, as another process would."""
    with session_on(path, 8) as session:
        session.run_write(declare_policies, [EVENTS, ORDERS])
        yield session


@contextmanager
def open_driver(make: Any, clock: Any = None) -> Iterator[StoreDriver]:
    log = StoreDriver(lambda its, _: make(clock or its), Settings(), is_durable=True)
    try:
        yield log
    finally:
        log.close()


def move_with_copy(path: Path, address: str) -> MigrationOutcome:
    """Copy the file, then move it."""
    shutil.copy(path, path.with_name("twin.db"))
    return migrate_log(str(path), address, ignore_progress)


@contextmanager
def open_copy_and_database(path: Path, address: str) -> Iterator[tuple[SetClock, StoreDriver, StoreDriver]]:
    """Open the copy made before the move, and the database, on one clock."""
    clock = SetClock(LATER_MS)
    copy = path.with_name("twin.db")

    def in_file(_: Any) -> Store:
        return SqliteStore(copy, clock=clock, draw=bytes)

    def in_database(_: Any) -> Store:
        return PostgresStore(address, clock=clock, draw=bytes, keep_clock_ms=0)

    with open_driver(in_file) as one, open_driver(in_database) as other:
        yield clock, one, other


def submit_items(log: StoreDriver, items: list[Item]) -> list[Verdict]:
    return [one for verdicts in log.commit_batch(*(Request((item,)) for item in items)).verdicts for one in verdicts]


# --- killing ---------------------------------------------------------------------------------------------


def move_and_kill(path: Path, address: str, point: str, number: int = 1) -> None:
    """Move the log in a forked process that kills itself at the given call of the point, counted from 1.

    A fork starts much faster than an interpreter. The caller must have no SQLite connection and no event loop.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about threads
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(WAIT_S)
            stop_at_point(point, number)
            migrate_log(str(path), address, ignore_progress)
        except BaseException:  # noqa: BLE001 - the parent sees the exit status
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
