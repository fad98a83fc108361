"""An SQLite file that belongs to one client in one process: opened, locked, and written to in transactions.

Everything here blocks, and is called by one thread at a time.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from oncelog.errors import (
    CanonicalError,
    CorruptError,
    NewerSchemaError,
    NotALogError,
    StoreInUseError,
    StoreUnavailableError,
)
from oncelog.file_modes import create_or_report, open_or_create
from oncelog.sql_files import split_script

MEMORY: Final = ":memory:"
BUSY_TIMEOUT_MS: Final = 10_000
_CORRUPT: Final = ("SQLITE_CORRUPT",)
_NOT_A_DATABASE: Final = ("SQLITE_NOTADB",)
_UNAVAILABLE: Final = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
)


class StoreFile:
    """One file, open in one process."""

    def __init__(self, path: str, kind: str, application_id: int, schema_version: int) -> None:
        """`kind` is whose it is, in the texts of errors: "deltas client"."""
        self.path = path
        self._kind = kind
        self._application_id = application_id
        self._schema_version = schema_version
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._file_identity: tuple[int, int] | None = None
        """Which file it is: who writes to one that was removed writes for nobody."""

    @property
    def connection(self) -> sqlite3.Connection:
        """Raises StoreUnavailableError where it is closed."""
        if self._connection is None:
            raise StoreUnavailableError(f"{self.path} is closed")
        return self._connection

    def open(self) -> None:
        """Raises StoreInUseError, NotALogError, NewerSchemaError or another StoreError."""
        self._acquire_lock()
        try:
            with self.translate_errors():
                create_store_file(self.path)
                self._connection = sqlite3.connect(
                    self.path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
                )
                self._check_owner(self._connection)
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
            self._file_identity = None if self.path == MEMORY else _get_file_identity(self.path)
        except BaseException:
            self.close()
            raise

    def create_tables(self, connection: sqlite3.Connection, script: str) -> bool:
        """In a transaction. False if they are there."""
        if connection.execute("PRAGMA user_version").fetchone()[0]:
            return False
        for statement in split_script(script):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {self._application_id}")
        connection.execute(f"PRAGMA user_version = {self._schema_version}")
        return True

    def close(self) -> None:
        """Lets go of the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _check_owner(self, connection: sqlite3.Connection) -> None:
        """Before anything in it is changed."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if application != self._application_id and (application or version or tables):
            raise NotALogError(f"{self.path} is no file of a {self._kind}: give it a file of its own")
        if version > self._schema_version:
            raise NewerSchemaError(f"{self.path} was made by a newer version of Oncelog's {self._kind}")

    def _acquire_lock(self) -> None:
        """Two clients with one file would send one outbox. Of the file itself no descriptor may be
        opened: to close it would take away SQLite's locks."""
        if self.path == MEMORY:
            return
        path = f"{os.path.realpath(self.path)}-lock"  # one for all names that lead to the file
        try:
            self._lock = open_or_create(path, os.O_RDWR)
        except OSError as error:
            raise StoreUnavailableError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreInUseError(f"another {self._kind} has {self.path} open; each needs its own file") from error

    @contextmanager
    def transaction(self, *, is_durable: bool) -> Iterator[sqlite3.Connection]:
        """All of it or nothing. What is not durable may be lost with the machine's power, and comes again then."""
        with self.translate_errors():
            connection = self.connection
            if self._file_identity is not None and self._file_identity != _get_file_identity(self.path):
                raise StoreUnavailableError(f"{self.path} was removed or replaced while the client had it open")
            connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                raise

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turns SQLite's errors into our own."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            if name.startswith(_NOT_A_DATABASE):
                raise NotALogError(f"{self.path} is no SQLite database") from error
            if name.startswith(_CORRUPT):
                raise CorruptError(f"{self.path} is damaged: {error}") from error
            if name.startswith(_UNAVAILABLE):
                raise StoreUnavailableError(f"{self.path}: {error} [{name}]") from error
            raise

    @contextmanager
    def translate_damage(self) -> Iterator[None]:
        """What lies in the file is believed, but not blindly."""
        try:
            yield
        except (msgspec.MsgspecError, CanonicalError) as error:
            raise CorruptError(f"{self.path} is damaged: {error}") from error


def create_store_file(path: str) -> None:
    """Create the file for its owner alone, if it is missing and not in memory. Raises StoreUnavailableError."""
    if path == MEMORY:
        return
    try:
        create_or_report(path)
    except OSError as error:
        raise StoreUnavailableError(f"{path} cannot be created: {error.strerror}") from error


def _get_file_identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - once a transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino
