"""The database file: creates a log's tables, checks that a file is a log, migrates older schemas, and opens
connections.

Files of other applications are never changed. The first check reads the header without SQLite, because merely opening a
file in WAL mode can create files next to it.
"""

import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

from oncelog.core.values import RequestedSettings, Settings
from oncelog.errors import (
    CorruptError,
    DiskFullError,
    NotALogError,
    StoreUnavailableError,
    UnstorableError,
)
from oncelog.file_modes import OWNER_ONLY, create_or_report, describe_creation_error, describe_read_error
from oncelog.sql_files import run_script
from oncelog.sqlite_files import get_file_id, transaction
from oncelog.storage.key_hash import SECRET_BYTES
from oncelog.storage.metadata import (
    DAMAGE_HINT,
    LogMetadata,
    check_schema_version,
    check_settings,
    new_epoch,
    new_settings,
)
from oncelog.storage.sqlite.key_index.key_run import RUN_KEYS, KeyPairs, write_runs
from oncelog.storage.sqlite.moved_marker import check_not_moved
from oncelog.storage.sqlite.statements import SQL, load_migrations

APPLICATION_ID: Final = 0x4F6E636C  # "Oncl"
SCHEMA_VERSION: Final = load_migrations()[-1][0]
BUSY_TIMEOUT_MS: Final = 10_000
"""How long a writer waits for another process's transaction."""
_BUSY_POLL_MS: Final = 5
CHECKPOINT_PAGES: Final = 4000
"""Size of the write-ahead log (16 MB) at which a commit moves its pages into the file."""
CACHE_KIB: Final = 32_768
CACHED_STATEMENTS: Final = 256
_WAL_MODES: Final = ("wal", "memory")
"""Journal modes that are accepted after the switch to WAL mode. An in-memory database keeps its journal in memory."""

_MIGRATION_BATCH_ROWS: Final = 1000 * RUN_KEYS
"""How many rows of an old key table are converted at a time."""

HEADER_BYTES: Final = 100
_MAGIC: Final = b"SQLite format 3\0"
_JOURNAL_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
_UNAVAILABLE_ERRORS: Final = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
)
_CORRUPT_ERRORS: Final = (
    "SQLITE_CORRUPT",
    "SQLITE_NOTADB",
    # A batch never inserts an existing row, so this error means that the tables contradict each other.
    "SQLITE_CONSTRAINT_UNIQUE",
    "SQLITE_CONSTRAINT_PRIMARYKEY",
    "SQLITE_CONSTRAINT_ROWID",
)
_CORRUPT_MESSAGES: Final = ("no such table: oncelog_", "no such column: ", "Could not decode to UTF-8")
_UNSTORABLE_ERRORS: Final = ("SQLITE_CONSTRAINT", "SQLITE_TOOBIG", "SQLITE_MISMATCH", "SQLITE_RANGE")


class Driver(Protocol):
    """Opens connections. Tests use a driver that simulates a failing disk."""

    is_shared: bool
    """Whether a file can have several connections at the same time."""

    def check(self, path: str) -> None:
        """Raise NotALogError if the file is certainly not a log. Changes nothing."""

    def create(self, path: str) -> None:
        """Create an empty file with the mode for new logs if none exists. Raises StoreUnavailableError."""

    def connect(self, path: str) -> Any:
        """Return a connection in autocommit mode, with the interface of sqlite3."""

    def get_free_bytes(self, path: str) -> int | None:
        """Return the free bytes of the file system, or None if unknown."""

    def get_file_id(self, path: str) -> object:
        """Return the identity of the current file, which reveals whether the file has been removed or replaced."""


class SqliteDriver:
    """Python's own SQLite, which the application's connections to the file also use.

    Two copies of SQLite in one process break each other's locks (docs/decisions/0008).
    """

    is_shared = True

    def __init__(self, file_mode: int = OWNER_ONLY) -> None:
        self._file_mode = file_mode

    def check(self, path: str) -> None:
        """See `Driver`. The check reads the file's header."""
        if _is_locked_by_process(path):
            self.check_by_sqlite(path)
            return
        header = _read_header(path)
        if header:
            check_header(path, header, _read_header(f"{path}-journal"))

    def check_by_sqlite(self, path: str) -> None:
        """Like `check`, but only SQLite opens the file. See `_is_locked_by_process` for the reason."""
        try:
            with closing(self.connect(path)) as connection:
                if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:  # 0 during creation
                    check_application_id(connection, path)
        except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: an sqlite3 message contains a damaged name
            raise translate_error(error, path) from error

    def create(self, path: str) -> None:
        """See `Driver`. An existing file with wider permissions than a new one is reported."""
        try:
            create_or_report(path, self._file_mode)
        except OSError as error:
            raise StoreUnavailableError(describe_creation_error(path, error)) from error

    def get_free_bytes(self, path: str) -> int | None:
        """See `Driver`. Counts only the bytes that processes without root privileges may use."""
        try:
            found = os.statvfs(os.path.dirname(path) or ".")  # noqa: PTH120 - runs in every commit
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def get_file_id(self, path: str) -> object:
        """See `Driver`."""
        return get_file_id(path)

    def connect(self, path: str) -> sqlite3.Connection:
        """See `Driver`."""
        return sqlite3.connect(
            path,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=CACHED_STATEMENTS,
        )


class _MemoryConnection(sqlite3.Connection):
    """The only connection to an in-memory database. SQLite discards the database when the connection is closed."""

    def close(self) -> None:
        """Only roll back: the writer closes its connection after an error and then connects again."""
        if self.in_transaction:
            self.rollback()


class MemoryDriver:
    """Returns the connection to an in-memory database, which exists as long as the driver.

    SQLite can open several connections to one such database (`vfs=memdb`), but then limits its size to 1 GiB.
    """

    is_shared = False

    def __init__(self) -> None:
        self._connection = sqlite3.connect(
            ":memory:",
            isolation_level=None,
            check_same_thread=False,
            cached_statements=CACHED_STATEMENTS,
            factory=_MemoryConnection,
        )
        weakref.finalize(self, sqlite3.Connection.close, self._connection)

    def check(self, path: str) -> None:
        """See `Driver`. Nothing to check, because no other application can reach the database."""

    def create(self, path: str) -> None:
        """Do nothing, because the database has no file."""

    def connect(self, path: str) -> sqlite3.Connection:  # noqa: ARG002 - the driver has only one database
        """See `Driver`."""
        return self._connection

    def get_free_bytes(self, path: str) -> int | None:  # noqa: ARG002
        """See `Driver`."""
        return None

    def get_file_id(self, path: str) -> object:
        """See `Driver`. The database cannot be replaced."""
        return path


def check_header(path: str, header: bytes, journal: bytes) -> None:
    """Raise NotALogError if the headers of a file and its rollback journal show that it is not a log."""
    if not any(header) and _is_from_empty_database(journal):
        return  # power failed while the log was being created; SQLite will restore the empty file
    if not header.startswith(_MAGIC) or len(header) < HEADER_BYTES:
        raise NotALogError(
            f"{path} is not an SQLite database, so it is not a log. Nothing was changed. Name another file."
        )
    if not _has_application_id(header):
        raise _build_foreign_error(path)


def is_foreign_database(path: str) -> bool:
    """Return whether a file is an SQLite database of another application.

    Returns False for a file without a valid header, which may be a damaged log.
    """
    header = _read_header(path)
    return header.startswith(_MAGIC) and len(header) == HEADER_BYTES and not _has_application_id(header)


def _has_application_id(header: bytes) -> bool:
    return int.from_bytes(header[68:72], "big") == APPLICATION_ID


def check_application_id(connection: Any, path: str) -> None:
    """Raise NotALogError if a connection's file is not a log."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise _build_foreign_error(path)


def _build_foreign_error(path: str) -> NotALogError:
    return NotALogError(
        f"{path} is an SQLite database, but not a log. Nothing was changed. Open a separate file: an application can "
        "add tables to a log, but a log cannot be added to another database."
    )


def _is_locked_by_process(path: str) -> bool:
    """Return whether SQLite holds a lock on the file in this process, for another log object or for the application.

    While it does, only SQLite may open the file. Under POSIX, a process loses all its locks on a file when it closes
    any descriptor of that file. Another process could then consider itself the last user and remove the write-ahead log
    that this process still uses.
    """
    try:
        inode, process = f":{os.stat(path).st_ino} ", f" {os.getpid()} "  # noqa: PTH116
        # Decoding bytes imports no codec, which a process that has dropped its rights may be unable to read.
        locks = Path("/proc/locks").read_bytes().decode("ascii").splitlines()
    except OSError:
        return False
    return any(inode in lock and process in lock for lock in locks)


def _is_from_empty_database(journal: bytes) -> bool:
    """Return whether a rollback journal would restore an empty database."""
    return len(journal) >= 28 and journal.startswith(_JOURNAL_MAGIC) and not int.from_bytes(journal[16:20], "big")


def _read_header(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(HEADER_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreUnavailableError(describe_read_error(path, error)) from error


def translate_error(error: Exception, path: str, hint: str = "") -> Exception:
    """Translate an error raised by SQLite or while decoding stored values.

    Errors that indicate misuse of SQLite are returned unchanged.
    """
    name = getattr(error, "sqlite_errorname", "") or ""
    if name == "SQLITE_FULL":
        return DiskFullError(f"{path}: {error} [{name}]; free space{hint}")
    if name.startswith(_UNAVAILABLE_ERRORS):
        advice = "; check the disk" if name.startswith("SQLITE_IOERR") else ""
        return StoreUnavailableError(f"{path}: {error} [{name}]{advice}{hint}")
    is_sqlite = isinstance(error, sqlite3.Error)
    if not is_sqlite or name.startswith(_CORRUPT_ERRORS) or str(error).startswith(_CORRUPT_MESSAGES):
        code = f" [{name}]" if name else ""
        return CorruptError(f"{path} is damaged: {error}{code}; {DAMAGE_HINT}")
    if name.startswith(_UNSTORABLE_ERRORS):
        return UnstorableError(f"{path} cannot store this: {name}")
    return error


def connect(driver: Driver, path: str) -> Any:
    """Return a connection with the settings that every use of the file needs."""
    driver.create(path)  # SQLite would create the file with the umask's permissions
    connection = driver.connect(path)
    try:
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        # FAST overwrites deleted bytes only where that needs no additional write. `erase` overwrites all of them.
        connection.execute("PRAGMA secure_delete = FAST")
    except BaseException:
        connection.close()
        raise
    return connection


def create_or_open(
    connection: Any, path: str, settings: Settings | RequestedSettings | None, now_ms: int
) -> LogMetadata:
    """Create the log in an empty file or migrate an older log, and return its metadata.

    Raises SettingsError if an existing log has different settings; None accepts any. Raises MovedError if the log has
    moved elsewhere.
    """
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        _create_log(connection, path, new_settings(settings), now_ms)
    file = load_metadata(connection, path)
    check_settings(path, file.settings, settings)
    _enable_wal(connection, path)
    return migrate_if_older(connection, path, file)


def migrate_if_older(connection: Any, path: str, metadata: LogMetadata) -> LogMetadata:
    """Migrate an older schema, and return the file's metadata. Raises MovedError.

    If the schema is older, no transaction may be open.
    """
    if metadata.schema_version < SCHEMA_VERSION:
        migrate_schema(connection, metadata.schema_version)
        metadata = load_metadata(connection, path)
    check_not_moved(connection)
    return metadata


def _enable_wal(connection: Any, path: str) -> None:
    """Switch to WAL mode.

    SQLite does not wait for other processes that are creating the log at the same time, so this function polls.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            is_busy = (getattr(error, "sqlite_errorname", "") or "").startswith("SQLITE_BUSY")
            if not is_busy or time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_POLL_MS / 1000)
        else:
            break
    if mode not in _WAL_MODES:
        raise StoreUnavailableError(f"{path} cannot use write-ahead logging on this file system")


def load_metadata(connection: Any, path: str) -> LogMetadata:
    """Return a file's metadata without changing anything. Raises NewerSchemaError or CorruptError."""
    (schema_version,) = _fetch_only_row(connection, "schema_version", path)
    check_schema_version(path, schema_version, SCHEMA_VERSION)
    metadata = LogMetadata.from_columns(path, _fetch_only_row(connection, "log", path))
    _fetch_only_row(connection, "state", path)
    return metadata


def _fetch_only_row(connection: Any, statement: str, path: str) -> tuple[Any, ...]:
    try:
        row: tuple[Any, ...] | None = connection.execute(SQL[statement]).fetchone()
    except sqlite3.OperationalError as error:
        if "no such" in str(error):
            raise CorruptError(f"{path} is marked as a log, but a table is missing: {error}") from error
        raise
    if row is None:
        raise CorruptError(f"{path} is marked as a log, but its table for {statement} has no row")
    return row


def _create_log(connection: Any, path: str, settings: Settings, now_ms: int) -> None:
    """Create the log in one transaction before switching to WAL mode, so that the file is empty or a complete log."""
    with transaction(connection, "BEGIN EXCLUSIVE"):
        if connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
            return  # another process has created the log in the meantime
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise NotALogError(f"{path} is an SQLite database, but not a log. Nothing was changed.")
        for _, script in load_migrations():
            run_script(connection, script)
        parameters = {
            "schema_version": SCHEMA_VERSION,
            "epoch": new_epoch(),
            "lanes": settings.lanes,
            "eviction_interval": settings.eviction_interval,
            "index_secret": secrets.token_bytes(SECRET_BYTES),
            "created_ms": now_ms,
        }
        connection.execute(SQL["make_log"], parameters)
        connection.execute(SQL["make_state"])
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def migrate_schema(connection: Any, version: int) -> None:
    """Migrate step by step. Each step's transaction also saves the new schema version."""
    for number, script in load_migrations():
        if number <= version:
            continue
        with transaction(connection):
            if connection.execute("SELECT schema_version FROM oncelog_log").fetchone()[0] < number:
                run_script(connection, script)
                if number in _CONVERSIONS:
                    _CONVERSIONS[number](connection)
                connection.execute(SQL["set_schema_version"], (number,))


def _pack_keys(connection: Any) -> None:
    """Convert keys to key runs. Older schemas have one row per key."""
    for (segment,) in connection.execute("SELECT segment FROM oncelog_key_segments").fetchall():
        for keys in _iterate_key_rows(connection, segment):
            write_runs(connection, segment, keys)


def _iterate_key_rows(connection: Any, segment: int) -> Iterator[KeyPairs]:
    """Yield the keys in batches. Keys with the same hash are in the same batch."""
    cursor = connection.execute(
        "SELECT hash, place FROM oncelog_key_rows WHERE segment = ? ORDER BY hash, place", (segment,)
    )
    pairs: list[tuple[int, int]] = []
    while rows := cursor.fetchmany(_MIGRATION_BATCH_ROWS):
        pairs += rows
        end = len(pairs)
        while end and pairs[end - 1][0] == pairs[-1][0]:
            end -= 1
        yield [key_hash for key_hash, _ in pairs[:end]], [place for _, place in pairs[:end]]
        del pairs[:end]
    yield [key_hash for key_hash, _ in pairs], [place for _, place in pairs]


_CONVERSIONS: Final[dict[int, Callable[[Any], None]]] = {7: _pack_keys}
"""Conversions that need Python. Each runs after the migration script of the same version."""
