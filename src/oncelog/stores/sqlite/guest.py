"""A log through its caller's own connection: what it writes and what the caller writes are one transaction.

The write lock of the file is taken before anything is looked at and kept until the end, so nobody else can come in
between. The caller's function must not end the transaction: SQLite's authorizer refuses that while it runs.
"""

import os
import sqlite3
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from msgspec.structs import replace

from oncelog.core.policy import Policy
from oncelog.core.values import Receipt, Record, Request, Submission, Verdict
from oncelog.errors import ClosedError, NotALogError, SettingsError, StoreUnavailableError, TransactionError
from oncelog.stores.about import About
from oncelog.stores.clock import JUMP_MS_MAX, Clock, SystemClock
from oncelog.stores.protocol import Query
from oncelog.stores.sqlite import reading
from oncelog.stores.sqlite.files import (
    SCHEMA_VERSION,
    SqliteDriver,
    brought_up_to_date,
    demand_log_by_its_id,
    look,
    translated,
)
from oncelog.stores.sqlite.writing import Writing

_FULL: Final = 2
_SAVEPOINT: Final = "oncelog_guest"
_ROOT: Final = "SELECT root FROM oncelog_blocks WHERE lane = ? AND height = ?"
_NEWEST_ROOT: Final = "SELECT lane, height, root FROM oncelog_blocks ORDER BY lane DESC, height DESC LIMIT 1"
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
        self.lock = threading.RLock()
        """It knows its owner: whoever is interrupted at any moment can tell whether it is his to release."""
        self.tip: tuple[int, int, bytes] | None = None
        """Lane, height and root of a block that the memory of the file has seen. Salts make every root another one."""


@lru_cache(maxsize=16)
def _file_of(file: About, mark: Hashable, process: int, clock: Any) -> _File:  # noqa: ARG001 - which file it is
    """For the files that were used last: what is not here any more is made anew, at the cost of some reading."""
    return _File(Writing(file, clock, os.urandom, JUMP_MS_MAX, fills_later=False))


_file_lock: Final = threading.Lock()
_CLOCK: Final = SystemClock()


class Guest:
    """The log in the file of a connection. Belongs to the connection's thread, as the connection does."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError(f"a connection of sqlite3 is shared, not {type(connection).__name__}")
        if connection.text_factory is not str:
            raise SettingsError("the connection's text_factory must be str")
        self._tip: tuple[int, int, bytes] | None = None
        self._own = connection
        self._connection = _Borrowed(connection)
        self._path = ""
        with self._translating():
            self._path = self._connection.execute("PRAGMA database_list").fetchone()[2]
            if not self._path:
                raise NotALogError("the connection is not to a file, so it is not to a log")
            demand_log_by_its_id(self._connection, self._path)
            self._mark = SqliteDriver().mark(self._path)
            file = look(self._connection, self._path)
        self._demand_synced()
        if file.schema_version < SCHEMA_VERSION:
            self._demand_no_transaction()
        with self._translating():
            file = brought_up_to_date(self._connection, self._path, file)
        its_clock: Any = clock or _CLOCK
        with _file_lock:  # the memory of a fork is not ours
            self._file = _file_of(file, self._mark, os.getpid(), its_clock)

    @contextmanager
    def transaction(self) -> Iterator["Guest"]:
        """Holds the write lock inside, and commits at the end; rolls back if anything is raised."""
        self._demand_no_transaction()
        if SqliteDriver().mark(self._path) != self._mark:
            raise StoreUnavailableError(f"{self._path} has been removed or replaced since the connection was opened")
        self._demand_synced()
        writing = self._file.writing
        try:
            self._lock()
            with self._translating():
                self._connection.execute("BEGIN IMMEDIATE")
                self._forget_another_history()
            yield self
            with self._translating():
                self._connection.execute("COMMIT")
            writing.confirm()
            self._file.tip = self._tip
        except BaseException:
            self._own.set_authorizer(None)
            if self._file.lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
                writing.roll_back()
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            if self._file.lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
                self._file.lock.release()

    def _forget_another_history(self) -> None:
        """Between two calls nobody may have had the file open, and another one may have been copied into it."""
        tip = self._file.tip
        if tip is not None:
            row = self._connection.execute(_ROOT, tip[:2]).fetchone()
            if row is None or row[0] != tip[2]:
                self._file.writing.forget()
                tip = None
        self._tip = tip or self._connection.execute(_NEWEST_ROOT).fetchone()

    def _lock(self) -> None:
        """Waits as long as the connection waits for other processes."""
        (timeout_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        if not self._file.lock.acquire(timeout=timeout_ms / 1000):
            raise StoreUnavailableError(f"{self._path}: another thread holds the log's write lock; try again")

    def _demand_synced(self) -> None:
        if self._connection.execute("PRAGMA synchronous").fetchone()[0] < _FULL:
            raise SettingsError(
                "the connection must be on PRAGMA synchronous = FULL: what is not synced can be lost with the power"
            )

    @contextmanager
    def not_ended(self) -> Iterator[None]:
        """The caller's own statements. Raises TransactionError if one of them would end the transaction.

        What they did is undone if they raise; what was done before them stands.
        """
        refused = False

        def authorize(action: int, *_: object) -> int:
            nonlocal refused
            # Where SQLite has rolled back by itself (OR ROLLBACK), what comes next would be durable on its own.
            if action != sqlite3.SQLITE_TRANSACTION and self._own.in_transaction:
                return sqlite3.SQLITE_OK
            refused = True
            return sqlite3.SQLITE_DENY

        self._connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            self._own.set_authorizer(authorize)
            yield
        except BaseException as error:
            self._own.set_authorizer(None)
            if not self._connection.in_transaction:
                raise _rolled_back() from error
            self._connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            if refused and isinstance(error, sqlite3.DatabaseError):
                raise _ended() from error
            raise
        finally:
            self._own.set_authorizer(None)
        if not self._connection.in_transaction:
            raise _rolled_back()
        if refused:
            raise _ended()
        self._connection.execute(f"RELEASE {_SAVEPOINT}")

    # --- inside a transaction

    def declare(self, policy: Policy) -> None:
        """Keeps the policy's declaration. Raises PolicyError for another of its name."""
        self._demand_transaction()
        with self._translating():
            self._file.writing.declare(self._connection, [policy])

    def look(self, submission: Submission) -> Verdict:
        """What would become of it, with RATE_LIMITED if it is new and nothing stands in its way."""
        asked = replace(submission, retry_after_ms=_LOOK_MS)
        self._demand_transaction()
        with self._translating():
            return self._file.writing.commit(self._connection, [Request((asked,))], None).verdicts[0][0]

    def commit(self, submission: Submission) -> Verdict:
        """Decides it. It is durable when the transaction has ended."""
        self._demand_transaction()
        with self._translating():
            decided = self._file.writing.commit(self._connection, [Request((submission,))], None)
        for block in decided.sealed.blocks:
            self._tip = (block.lane, block.height, block.root)
        return decided.verdicts[0][0]

    def record(self, receipt: Receipt) -> Record:
        """The record at a place."""
        query = Query(lane=receipt.lane, after=receipt.position - 1, upto=receipt.position, limit=1)
        with self._translating():
            file = self._file.writing.file
            return reading.read(self._connection, query, file.settings.lanes, file.epoch).records[0]

    def _demand_no_transaction(self) -> None:
        if self._own.in_transaction:
            raise TransactionError("a transaction is open on this connection: commit it or roll it back before")

    def _demand_transaction(self) -> None:
        if not self._connection.in_transaction:
            raise _rolled_back()

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


def _rolled_back() -> TransactionError:
    return TransactionError(
        "SQLite rolled the transaction back while the function ran (OR ROLLBACK, RAISE(ROLLBACK), a full disk): it was "
        "not kept, and is to be called again"
    )


def _ended() -> TransactionError:
    return TransactionError(
        "the function must not end its transaction (commit, rollback, `with connection`): everything was rolled back"
    )
