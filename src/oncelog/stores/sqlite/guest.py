"""A log through its caller's own connection: what it writes and what the caller writes are one transaction.

The write lock of the file is taken before anything is looked at and kept until the end, so nobody else can come in
between. The caller's function must not end the transaction: SQLite's authorizer refuses that while it runs.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from msgspec.structs import replace

from oncelog.core.policy import Policy
from oncelog.core.values import Receipt, Record, Request, Submission, Verdict
from oncelog.errors import ClosedError, NotALogError, SettingsError, StoreUnavailableError, TransactionError
from oncelog.stores.clock import JUMP_MS_MAX, Clock, SystemClock
from oncelog.stores.protocol import Query
from oncelog.stores.sqlite import reading
from oncelog.stores.sqlite.files import BUSY_TIMEOUT_MS, SqliteDriver, demand_log_by_its_id, look, translated
from oncelog.stores.sqlite.writing import Writing

_FULL: Final = 2
_SAVEPOINT: Final = "oncelog_guest"
_LOOK_MS: Final = 1
"""Tells the decision that a new write is not taken: it is only asked about."""


class _Borrowed:
    """The caller's connection as the store's code wants it: rows are tuples, whatever the caller has them made into."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self._cursor().execute(statement, parameters)

    def executemany(self, statement: str, parameters: Any) -> sqlite3.Cursor:
        return self._cursor().executemany(statement, parameters)

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor


class _File:
    """What all guests of one file in one process share. Its lock is taken before the file's, by all of them."""

    def __init__(self, writing: Writing) -> None:
        self.writing = writing
        self.lock = threading.Lock()


_files: dict[tuple[object, str, int], _File] = {}
_files_lock: Final = threading.Lock()


class Guest:
    """The log in the file of a connection. Belongs to the connection's thread, as the connection does."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError(f"a connection of sqlite3 is shared, not {type(connection).__name__}")
        if connection.text_factory is not str:
            raise SettingsError("the connection's text_factory must be str")
        self._own = connection
        self._connection = _Borrowed(connection)
        self._path = ""
        with self._translating():
            self._path = self._connection.execute("PRAGMA database_list").fetchone()[2]
            if not self._path:
                raise NotALogError("the connection is not to a file, so it is not to a log")
            demand_log_by_its_id(self._connection, self._path)
        if self._connection.execute("PRAGMA synchronous").fetchone()[0] < _FULL:
            raise SettingsError(
                "the connection must be on PRAGMA synchronous = FULL: what is not synced can be lost with the power"
            )
        with self._translating():
            file = look(self._connection, self._path)
        place = (SqliteDriver().mark(self._path), file.epoch, os.getpid())  # the memory of a fork is not ours
        with _files_lock:
            clock = clock or SystemClock()
            self._file = _files.setdefault(place, _File(Writing(file, clock, os.urandom, JUMP_MS_MAX)))

    @contextmanager
    def transaction(self) -> Iterator["Guest"]:
        """Holds the write lock inside, and commits at the end; rolls back if anything is raised."""
        if self._own.in_transaction:
            raise TransactionError("a transaction is open on this connection: commit it or roll it back before")
        if not self._file.lock.acquire(timeout=BUSY_TIMEOUT_MS / 1000):
            raise StoreUnavailableError(f"{self._path}: another thread holds the log's write lock; try again")
        writing = self._file.writing
        try:
            with self._translating():
                self._connection.execute("BEGIN IMMEDIATE")
            yield self
            with self._translating():
                self._connection.execute("COMMIT")
            writing.confirm()
        except BaseException:
            writing.roll_back()
            if self._connection.in_transaction:
                self._own.rollback()
            raise
        finally:
            self._file.lock.release()

    @contextmanager
    def not_ended(self) -> Iterator[None]:
        """The caller's own statements. Raises TransactionError if one of them would end the transaction.

        What they did is undone if they raise; what was done before them stands.
        """
        refused = False

        def authorize(action: int, *_: object) -> int:
            nonlocal refused
            if action != sqlite3.SQLITE_TRANSACTION:
                return sqlite3.SQLITE_OK
            refused = True
            return sqlite3.SQLITE_DENY

        self._connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        self._own.set_authorizer(authorize)
        try:
            yield
        except BaseException as error:
            self._own.set_authorizer(None)
            if self._own.in_transaction:
                self._connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            if refused and isinstance(error, sqlite3.DatabaseError):
                raise _ended() from error
            raise
        finally:
            self._own.set_authorizer(None)
        if refused:
            raise _ended()
        if not self._connection.in_transaction:
            raise TransactionError("SQLite has rolled the transaction back while the function ran: nothing was kept")
        self._connection.execute(f"RELEASE {_SAVEPOINT}")

    # --- inside a transaction

    def declare(self, policy: Policy) -> None:
        """Keeps the policy's declaration. Raises PolicyError for another of its name."""
        with self._translating():
            self._file.writing.declare(self._connection, [policy])

    def look(self, submission: Submission) -> Verdict:
        """What would become of it, with RATE_LIMITED if it is new and nothing stands in its way."""
        asked = replace(submission, retry_after_ms=_LOOK_MS)
        with self._translating():
            return self._file.writing.commit(self._connection, [Request((asked,))], None).verdicts[0][0]

    def commit(self, submission: Submission) -> Verdict:
        """Decides it. It is durable when the transaction has ended."""
        with self._translating():
            return self._file.writing.commit(self._connection, [Request((submission,))], None).verdicts[0][0]

    def record(self, receipt: Receipt) -> Record:
        """The record at a place."""
        query = Query(lane=receipt.lane, after=receipt.position - 1, upto=receipt.position, limit=1)
        with self._translating():
            file = self._file.writing.file
            return reading.read(self._connection, query, file.settings.lanes, file.epoch).records[0]

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise ClosedError(f"the connection cannot be used: {error}") from error
        except sqlite3.Error as error:
            ours = translated(error, self._path, "; call again with the same key")
            if ours is error:
                raise
            raise ours from error


def _ended() -> TransactionError:
    return TransactionError(
        "the function must not end its transaction (commit, rollback, `with connection`): everything was rolled back"
    )
