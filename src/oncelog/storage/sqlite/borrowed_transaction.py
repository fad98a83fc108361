"""Commits to a log in a transaction of the application, on the application's connection.

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
from oncelog.storage.clock import Clock, SystemClock
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.records import load_records
from oncelog.storage.sqlite.database_file import (
    SCHEMA_VERSION,
    SqliteDriver,
    check_application_id,
    load_metadata,
    migrate_if_older,
    translate_error,
)
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.transaction import StoreTransaction, TransactionOptions
from oncelog.storage.store import BatchResult

_SYNCHRONOUS_FULL: Final = 2
_SAVEPOINT: Final = "oncelog_guest"
_ROOT_SQL: Final = "SELECT root FROM oncelog_blocks WHERE lane = ? AND height = ?"
_NEWEST_ROOT_SQL: Final = "SELECT lane, height, root FROM oncelog_blocks ORDER BY lane DESC, height DESC LIMIT 1"


class _BorrowedConnection:
    """The caller's connection as the store's code wants it: rows are tuples, whatever the caller has them made into."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self._create_cursor().execute(statement, parameters)

    def executemany(self, statement: str, parameters: Any) -> sqlite3.Cursor:
        return self._create_cursor().executemany(statement, parameters)

    def _create_cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor


class _SharedFile:
    """What all guests of one file in one process share. Its lock is taken before the file's, by all of them."""

    def __init__(self, transaction: StoreTransaction) -> None:
        self.transaction = transaction
        self.lock = threading.RLock()
        """It knows its owner: whoever is interrupted at any moment can tell whether it is his to release."""
        self.newest_root: tuple[int, int, bytes] | None = None
        """Lane, height and root of a block that the memory of the file has seen. Salts make every root another one."""


@lru_cache(maxsize=16)
def _get_shared_file(metadata: LogMetadata, file_id: Hashable, process: int, clock: Any) -> _SharedFile:  # noqa: ARG001 - which file it is
    """For the files that were used last: what is not here any more is made anew, at the cost of some reading."""
    return _SharedFile(StoreTransaction(metadata, TransactionOptions(clock, fills_later=False)))


_shared_files_lock: Final = threading.Lock()
_CLOCK: Final = SystemClock()


class BorrowedTransaction:
    """The log in the file of a connection. Belongs to the connection's thread, as the connection does."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError(f"a connection of sqlite3 is shared, not {type(connection).__name__}")
        if connection.text_factory is not str:
            raise SettingsError("the connection's text_factory must be str")
        self._newest_root: tuple[int, int, bytes] | None = None
        self._raw_connection = connection
        self._connection = _BorrowedConnection(connection)
        self._path = ""
        with self._translate_errors():
            self._path = self._connection.execute("PRAGMA database_list").fetchone()[2]
            if not self._path:
                raise NotALogError("the connection is not to a file, so it is not to a log")
            check_application_id(self._connection, self._path)
            self._file_id = SqliteDriver().get_file_id(self._path)
            file = load_metadata(self._connection, self._path)
        self._check_synchronous()
        if file.schema_version < SCHEMA_VERSION:
            self._check_no_transaction()
        with self._translate_errors():
            file = migrate_if_older(self._connection, self._path, file)
        shared_clock: Any = clock or _CLOCK
        with _shared_files_lock:  # the memory of a fork is not ours
            self._shared_file = _get_shared_file(file, self._file_id, os.getpid(), shared_clock)

    @contextmanager
    def transaction(self) -> Iterator["BorrowedTransaction"]:
        """Holds the write lock inside, and commits at the end; rolls back if anything is raised."""
        self._check_no_transaction()
        if SqliteDriver().get_file_id(self._path) != self._file_id:
            raise StoreUnavailableError(f"{self._path} has been removed or replaced since the connection was opened")
        self._check_synchronous()
        store_transaction = self._shared_file.transaction
        try:
            self._acquire_lock()
            with self._translate_errors():
                self._connection.execute("BEGIN IMMEDIATE")
                self._reset_if_replaced()
            yield self
            with self._translate_errors():
                self._connection.execute("COMMIT")
            store_transaction.confirm()
            self._shared_file.newest_root = self._newest_root
        except BaseException:
            self._raw_connection.set_authorizer(None)
            if self._shared_file.lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
                store_transaction.roll_back()
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            if self._shared_file.lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001
                self._shared_file.lock.release()

    def _reset_if_replaced(self) -> None:
        """Between two calls nobody may have had the file open, and another one may have been copied into it."""
        tip = self._shared_file.newest_root
        if tip is not None:
            row = self._connection.execute(_ROOT_SQL, tip[:2]).fetchone()
            if row is None or row[0] != tip[2]:
                self._shared_file.transaction.reset()
                tip = None
        self._newest_root = tip or self._connection.execute(_NEWEST_ROOT_SQL).fetchone()

    def _acquire_lock(self) -> None:
        """Waits as long as the connection waits for other processes."""
        (timeout_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        if not self._shared_file.lock.acquire(timeout=timeout_ms / 1000):
            raise StoreUnavailableError(f"{self._path}: another thread holds the log's write lock; try again")

    def _check_synchronous(self) -> None:
        if self._connection.execute("PRAGMA synchronous").fetchone()[0] < _SYNCHRONOUS_FULL:
            raise SettingsError(
                "the connection must be on PRAGMA synchronous = FULL: what is not synced can be lost with the power"
            )

    @contextmanager
    def guard_transaction(self) -> Iterator[None]:
        """The caller's own statements. Raises TransactionError if one of them would end the transaction.

        What they did is undone if they raise; what was done before them stands.
        """
        refused = False

        def authorize(action: int, *_: object) -> int:
            nonlocal refused
            # Where SQLite has rolled back by itself (OR ROLLBACK), what comes next would be durable on its own.
            if action != sqlite3.SQLITE_TRANSACTION and self._raw_connection.in_transaction:
                return sqlite3.SQLITE_OK
            refused = True
            return sqlite3.SQLITE_DENY

        self._connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            self._raw_connection.set_authorizer(authorize)
            yield
        except BaseException as error:
            self._raw_connection.set_authorizer(None)
            if not self._connection.in_transaction:
                raise _build_rollback_error() from error
            self._connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            if refused and isinstance(error, sqlite3.DatabaseError):
                raise _build_ended_error() from error
            raise
        finally:
            self._raw_connection.set_authorizer(None)
        self._check_in_transaction()
        if refused:
            raise _build_ended_error()
        self._connection.execute(f"RELEASE {_SAVEPOINT}")

    # --- inside a transaction

    def declare(self, policy: Policy) -> None:
        """Keeps the policy's declaration. Raises PolicyError for another of its name."""
        self._check_in_transaction()
        with self._translate_errors():
            self._shared_file.transaction.declare(self._connection, [policy])

    def preview(self, submission: Submission) -> Verdict:
        """Return what the log knows of the write: its verdict, or NOT_KNOWN if the write is new and valid."""
        return self._commit(replace(submission, known_only=True)).verdicts[0][0]

    def commit(self, submission: Submission) -> Verdict:
        """Decides it. It is durable when the transaction has ended."""
        result = self._commit(submission)
        for block in result.sealed.blocks:
            self._newest_root = (block.lane, block.height, block.root)
        return result.verdicts[0][0]

    def _commit(self, submission: Submission) -> BatchResult:
        self._check_in_transaction()
        with self._translate_errors():
            return self._shared_file.transaction.commit(self._connection, [Request((submission,))], None)

    def load_record(self, receipt: Receipt) -> Record:
        """The record at a place."""
        with self._translate_errors():
            return run_query(self._connection, load_records, receipt.lane, [receipt.position])[0]

    def _check_no_transaction(self) -> None:
        if self._raw_connection.in_transaction:
            raise TransactionError("a transaction is open on this connection: commit it or roll it back before")

    def _check_in_transaction(self) -> None:
        if not self._connection.in_transaction:
            raise _build_rollback_error()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise ClosedError(f"the connection cannot be used: {error}") from error
        except sqlite3.Error as error:
            store_error = translate_error(error, self._path, "; call again with the same key")
            if store_error is error:
                raise
            raise store_error from error


def _build_rollback_error() -> TransactionError:
    return TransactionError(
        "SQLite rolled the transaction back while the function ran (OR ROLLBACK, RAISE(ROLLBACK), a full disk): it was "
        "not kept, and is to be called again"
    )


def _build_ended_error() -> TransactionError:
    return TransactionError(
        "the function must not end its transaction (commit, rollback, `with connection`): everything was rolled back"
    )
