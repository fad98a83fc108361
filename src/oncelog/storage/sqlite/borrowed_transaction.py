"""Commits to a log inside a transaction that the application began, on the application's connection.

A borrowed transaction first takes the file's write lock and keeps it until the end, so no other writer can interfere.
The caller's function must not end the transaction: SQLite's authorizer refuses that while the function runs.
"""

import os
import sqlite3
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TypeVar

from oncelog.core.values import Request
from oncelog.error_translation import raise_translated
from oncelog.errors import ClosedError, NotALogError, SettingsError, StoreUnavailableError, TransactionError
from oncelog.storage.clock import Clock, SystemClock
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.sqlite.database_file import (
    SCHEMA_VERSION,
    SqliteDriver,
    check_application_id,
    load_metadata,
    migrate_if_older,
    translate_error,
)
from oncelog.storage.sqlite.query_driver import run_steps
from oncelog.storage.sqlite.transaction import StoreTransaction, TransactionOptions
from oncelog.storage.store import BatchResult

T = TypeVar("T")

_SYNCHRONOUS_FULL: Final = 2
_SAVEPOINT: Final = "oncelog_guest"
_ROOT_SQL: Final = "SELECT root FROM oncelog_blocks WHERE lane = ? AND height = ?"
_NEWEST_ROOT_SQL: Final = "SELECT lane, height, root FROM oncelog_blocks ORDER BY lane DESC, height DESC LIMIT 1"


class _BorrowedConnection:
    """Wraps the caller's connection for the store: rows are tuples, regardless of the connection's row factory."""

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
    """State that all borrowed transactions on one file share within a process.

    A transaction acquires its lock before the lock of the file.
    """

    def __init__(self, transaction: StoreTransaction) -> None:
        self.transaction = transaction
        self.lock = threading.RLock()
        """An RLock knows its owner, so an interrupted thread can tell whether it must release the lock."""
        self.newest_root: tuple[int, int, bytes] | None = None
        """Lane, height and root of the newest block that the cached state includes. Salts make every root unique."""


@lru_cache(maxsize=16)
def _get_shared_file(metadata: LogMetadata, file_id: Hashable, process: int, clock: Any) -> _SharedFile:  # noqa: ARG001 - which file it is
    """Return the shared state of a file. State that the cache has dropped is rebuilt at the cost of a few reads."""
    return _SharedFile(StoreTransaction(metadata, TransactionOptions(clock, fills_later=False)))


_shared_files_lock: Final = threading.Lock()
_CLOCK: Final = SystemClock()


class BorrowedTransaction:
    """The log in a connection's file. Only the connection's own thread may use it."""

    def __init__(self, connection: sqlite3.Connection, *, clock: Clock | None = None) -> None:
        if not isinstance(connection, sqlite3.Connection):
            raise TypeError(f"the connection must be an sqlite3.Connection, not {type(connection).__name__}")
        if connection.text_factory is not str:
            raise SettingsError("the connection's text_factory must be str")
        self._newest_root: tuple[int, int, bytes] | None = None
        self._raw_connection = connection
        self._connection = _BorrowedConnection(connection)
        self._path = ""
        with self._translate_errors():
            self._path = self._connection.execute("PRAGMA database_list").fetchone()[2]
            if not self._path:
                raise NotALogError("the connection has no file, so it has no log")
            check_application_id(self._connection, self._path)
            self._file_id = SqliteDriver().get_file_id(self._path)
            file = load_metadata(self._connection, self._path)
        self._check_synchronous()
        if file.schema_version < SCHEMA_VERSION:
            self._check_no_transaction()
        with self._translate_errors():
            file = migrate_if_older(self._connection, self._path, file)
        shared_clock: Any = clock or _CLOCK
        with _shared_files_lock:  # keyed by process, because a forked child must not use its parent's state
            self._shared_file = _get_shared_file(file, self._file_id, os.getpid(), shared_clock)

    @contextmanager
    def transaction(self) -> Iterator["BorrowedTransaction"]:
        """Hold the write lock for the duration of the block, and commit at its end.

        An exception rolls the transaction back.
        """
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
        """Discard the cached state if another file has replaced this one, which can happen between two transactions."""
        tip = self._shared_file.newest_root
        if tip is not None:
            row = self._connection.execute(_ROOT_SQL, tip[:2]).fetchone()
            if row is None or row[0] != tip[2]:
                self._shared_file.transaction.reset()
                tip = None
        self._newest_root = tip or self._connection.execute(_NEWEST_ROOT_SQL).fetchone()

    def _acquire_lock(self) -> None:
        """Acquire the lock. Waits at most as long as the connection waits for other processes (its busy timeout)."""
        (timeout_ms,) = self._connection.execute("PRAGMA busy_timeout").fetchone()
        if not self._shared_file.lock.acquire(timeout=timeout_ms / 1000):
            raise StoreUnavailableError(f"{self._path}: another thread holds the log's write lock; try again")

    def _check_synchronous(self) -> None:
        if self._connection.execute("PRAGMA synchronous").fetchone()[0] < _SYNCHRONOUS_FULL:
            raise SettingsError(
                "the connection must use PRAGMA synchronous = FULL: a power failure can lose unsynced commits"
            )

    @contextmanager
    def guard_transaction(self) -> Iterator[None]:
        """Run the caller's statements. Raises TransactionError if one of them tries to end the transaction.

        If the block raises, its statements are undone and earlier statements are kept.
        """
        refused = False

        def authorize(action: int, *_: object) -> int:
            nonlocal refused
            # After SQLite itself has rolled back (OR ROLLBACK), each further statement would commit separately.
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

    def run(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Run a query. The batches that it commits are durable once the transaction has ended."""
        self._check_in_transaction()
        with self._translate_errors():
            return run_steps(self._connection, query(*arguments), commit=self._commit_batch)

    def _commit_batch(self, connection: Any, batch: Sequence[Request]) -> BatchResult:
        result = self._shared_file.transaction.commit(connection, batch)
        for block in result.sealed.blocks:
            self._newest_root = (block.lane, block.height, block.root)
        return result

    def _check_no_transaction(self) -> None:
        if self._raw_connection.in_transaction:
            raise TransactionError("a transaction is open on this connection: commit it or roll it back first")

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
            raise_translated(translate_error(error, self._path, "; call again with the same key"), error)


def _build_rollback_error() -> TransactionError:
    return TransactionError(
        "SQLite rolled the transaction back while the function ran (OR ROLLBACK, RAISE(ROLLBACK), a full disk): "
        "nothing was stored; call the function again"
    )


def _build_ended_error() -> TransactionError:
    return TransactionError(
        "the function must not end its transaction (commit, rollback, `with connection`): everything was rolled back"
    )
