"""Sessions on one file, like those of several processes, and a driver whose statements fail."""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from oncelog.core.policy import EVENTS, FOREVER, OnReuse, Order, Policy
from oncelog.core.values import Committed, Replayed, Request, Settings, Submission, Verdict
from oncelog.sql_files import run_script
from oncelog.storage.queries.writes import erase_bodies
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.database_file import APPLICATION_ID, SqliteDriver
from oncelog.storage.sqlite.key_index.key_run import unpack_run
from oncelog.storage.sqlite.side_state_tables import erase_values
from oncelog.storage.sqlite.statements import load_migrations
from oncelog.storage.sqlite.transaction import TransactionOptions
from oncelog.storage.sqlite.writer import Writer
from oncelog.testing.clock import ManualClock

SETTINGS = Settings(lanes=3)
ORDERS = Policy(name="orders", key_bytes=(1, 16), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=FOREVER)


@contextmanager
def session_on(path: Path, seal_keys: int, driver: SqliteDriver | None = None) -> Iterator[Writer]:
    """Open a file as one process would. An existing log keeps its settings."""
    session = Writer(str(path), driver or QuickDriver(), TransactionOptions(ManualClock(), bytes, seal_keys=seal_keys))
    session.open(None if path.exists() and path.stat().st_size else SETTINGS)
    try:
        yield session
    finally:
        session.close()


def erase(session: Writer, lane: int, positions: Sequence[int]) -> int:
    """Erase records in a lane, and return their number."""
    return session.run_write(erase_bodies, lane, positions, None, 0, erase_values)


async def open_sqlite(path: Path) -> SqliteStore:
    """Open a store with a manual clock."""
    store = SqliteStore(path, clock=ManualClock())
    await store.open()
    return store


def write(number: int) -> Submission:
    """Return the write for a number, in lane 0 or in one of five streams."""
    key = number.to_bytes(16, "big")
    if number % 6 == 0:
        return Submission(policy=EVENTS, scope="", key=key, fingerprint=b"f")
    return Submission(policy=ORDERS, scope=f"stream {number % 6}", key=key, fingerprint=b"f")


def make_older(path: Path) -> None:
    """Replace a closed log with a log of the first schema, which contains the rows that this schema supports."""
    older = path.with_suffix(".older")
    with closing(sqlite3.connect(older, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS newer", (str(path),))
        of_the_application = "type = 'table' AND name NOT LIKE 'oncelog%'"
        made = connection.execute(f"SELECT sql FROM newer.sqlite_schema WHERE {of_the_application}").fetchall()  # noqa: S608
        run_script(connection, load_migrations()[0][1])
        for (statement,) in made:
            connection.execute(statement)
        for (table,) in connection.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table'").fetchall():
            if table == "oncelog_keys":
                connection.executemany("INSERT INTO oncelog_keys VALUES (?, ?, ?)", list(_key_rows(connection)))
                continue
            columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({table})"))
            connection.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM newer.{table}")  # noqa: S608
        connection.execute("UPDATE main.oncelog_log SET schema_version = 1")
        connection.execute(f"PRAGMA main.application_id = {APPLICATION_ID}")
    older.replace(path)


def _key_rows(connection: sqlite3.Connection) -> Iterator[tuple[int, int, int]]:
    """Return the keys of all segments except keys that were merged into another segment."""
    jobs = connection.execute("SELECT sources, cursor FROM newer.oncelog_key_jobs").fetchall()
    done = {segment: cursor for sources, cursor in jobs for segment in json.loads(sources)}
    for segment, packed in connection.execute("SELECT segment, keys FROM newer.oncelog_key_runs"):
        for one, place in zip(*unpack_run(packed), strict=True):
            if one > done.get(segment, -1):
                yield segment, one, place


def commit(session: Writer, *numbers: int) -> list[Verdict]:
    """Commit the writes of these numbers as one batch."""
    return session.commit([Request(tuple(write(number) for number in numbers))], None).verdicts[0]


def are_new(verdicts: list[Verdict]) -> bool:
    return all(isinstance(verdict, Committed) for verdict in verdicts)


def are_known(verdicts: list[Verdict]) -> bool:
    return all(isinstance(verdict, Replayed) for verdict in verdicts)


class QuickConnection(sqlite3.Connection):
    """A connection that does not sync to disk, for speed."""

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        is_sync = statement == "PRAGMA synchronous = FULL"
        return super().execute("PRAGMA synchronous = OFF" if is_sync else statement, *arguments)


class QuickDriver(SqliteDriver):
    def connect(self, path: str) -> sqlite3.Connection:
        options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
        return sqlite3.connect(path, timeout=60, factory=QuickConnection, **options)


class FailingDriver(QuickDriver):
    """Once armed, fails before or after running a chosen statement."""

    def __init__(self) -> None:
        super().__init__()
        self._left: int | None = None
        self._is_run_first = False
        self.has_failed = False

    def arm(self, statement: int, *, is_run_first: bool) -> None:
        self._left, self._is_run_first, self.has_failed = statement, is_run_first, False

    def disarm(self) -> None:
        self._left = None

    def connect(self, path: str) -> Any:
        return _FailingConnection(super().connect(path), self)

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._left, self.has_failed = None, True
                if self._is_run_first:
                    call(*arguments)
                raise sqlite3.OperationalError("injected")
        return call(*arguments)


class _FailingConnection:
    def __init__(self, connection: sqlite3.Connection, driver: FailingDriver) -> None:
        self._connection = connection
        self._driver = driver

    def execute(self, *arguments: Any) -> Any:
        return self._driver.run(self._connection.execute, *arguments)

    def executemany(self, *arguments: Any) -> Any:
        return self._driver.run(self._connection.executemany, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)
