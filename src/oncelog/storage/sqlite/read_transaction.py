"""Read-only transactions for commands, which must not create, migrate or change a log."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from oncelog.errors import CorruptError, NotALogError, StoreError, StoreUnavailableError
from oncelog.storage.metadata import DAMAGE_HINT, LogMetadata
from oncelog.storage.record_rows import DAMAGE_ERRORS
from oncelog.storage.sqlite.database_file import (
    BUSY_TIMEOUT_MS,
    SCHEMA_VERSION,
    SqliteDriver,
    connect,
    load_metadata,
    translate_error,
)

_CANNOT_OPEN: Final = "SQLITE_CANTOPEN"
_READ_ONLY: Final = "SQLITE_READONLY"
PROGRESS_OPERATIONS: Final = 100_000


class ExistingFileDriver(SqliteDriver):
    """Opens connections only to a file that exists.

    The connections are opened for writing, because a read-only connection leaves an empty write-ahead log behind, which
    confuses the next backup of the file. `query_only` keeps them from changing anything.
    """

    def __init__(self, *, query_only: bool = True, is_open_here: bool = False) -> None:
        """Set `is_open_here` if this process has the log open. Only SQLite may then open the file."""
        super().__init__()
        self._is_open_here = is_open_here
        self._query_only = query_only

    def check(self, path: str) -> None:
        """See `Driver`. Also rejects a missing or empty file."""
        found = Path(path)
        if not found.exists():
            raise NotALogError(f"{path} does not exist. Check the path.")
        if not found.is_file():
            raise NotALogError(f"{path} is not a file. Name the file of a log.")
        if self._is_open_here:  # `SqliteDriver.check` could find this out only where /proc/locks is readable
            self.check_by_sqlite(path)
        else:
            super().check(path)
        if found.stat().st_size == 0:
            raise NotALogError(f"{path} is empty: it contains no log.")

    def create(self, path: str) -> None:
        """Do nothing: `check` refuses a missing file."""

    def connect(self, path: str) -> sqlite3.Connection:
        """See `Driver`."""
        connection = self._connect(path, "mode=rw")
        try:
            connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorname != _CANNOT_OPEN or Path(f"{path}-wal").exists():
                raise
            # The directory is read-only, for example on a backup medium. Without a write-ahead log, no process is
            # writing to the file, and none can start to.
            connection = self._connect(path, "immutable=1")
        if self._query_only:
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _connect(self, path: str, query: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{Path(path).absolute().as_uri()}?{query}",
            uri=True,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )


@contextmanager
def open_read_transaction(
    path: str, *, allow_older: bool = False, is_open_here: bool = False
) -> Iterator[tuple[sqlite3.Connection, LogMetadata]]:
    """Yield a connection in a read transaction, and the file's metadata.

    A file with an older schema is refused unless `allow_older` is set. The caller must then avoid tables that the file
    lacks.

    Raises NotALogError, NewerSchemaError, CorruptError or StoreUnavailableError, but never an SQLite error.
    """
    with open_existing(path, is_open_here=is_open_here) as connection:
        # The handler returns to Python during long statements, so that an interrupt takes effect.
        connection.set_progress_handler(lambda: None, PROGRESS_OPERATIONS)
        connection.execute("BEGIN")
        yield connection, (load_metadata if allow_older else load_current_metadata)(connection, path)


@contextmanager
def open_existing(path: str, *, query_only: bool = True, is_open_here: bool = False) -> Iterator[sqlite3.Connection]:
    """Yield a connection to an existing file. Raises NotALogError and the errors of `translate_read_errors`."""
    driver = ExistingFileDriver(query_only=query_only, is_open_here=is_open_here)
    driver.check(path)
    with translate_read_errors(path), closing(connect(driver, path)) as connection:
        yield connection


@contextmanager
def translate_read_errors(path: str) -> Iterator[None]:
    """Translate SQLite errors, and errors caused by damaged values, into StoreUnavailableError or CorruptError."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
            raise KeyboardInterrupt from error
        raise to_store_error(error, path) from error
    except DAMAGE_ERRORS as error:
        raise CorruptError(f"{path} contains a value that Oncelog never writes: {error}") from error


def to_store_error(error: sqlite3.Error, path: str) -> StoreError:
    """Translate an SQLite error for a command that only reads the file."""
    if getattr(error, "sqlite_errorname", "").startswith(_READ_ONLY):
        return StoreUnavailableError(
            f"{path} cannot be read or written: {error}. SQLite needs write access to the directory, even to read "
            "this log. Run the command as the log's owner, or on a copy of the log"
        )
    store_error = translate_error(error, path)
    if isinstance(store_error, StoreUnavailableError):
        return StoreUnavailableError(f"{path} cannot be read or written: {error}")
    if isinstance(store_error, CorruptError):
        return CorruptError(f"{path} is damaged: {error}; {DAMAGE_HINT}")
    return CorruptError(f"{path} does not have the structure of a log: {error}")


def load_current_metadata(connection: sqlite3.Connection, path: str) -> LogMetadata:
    """Return a file's metadata. Raises StoreError if its schema is older."""
    file = load_metadata(connection, path)
    if file.schema_version < SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema {file.schema_version}, and this version reads schema {SCHEMA_VERSION}. "
            "Open the log once with this version to migrate the file."
        )
    return file
