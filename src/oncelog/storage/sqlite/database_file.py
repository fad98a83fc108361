"""The file: creates the log's tables, checks that it is a log this version can read, and opens connections.

Whatever is not ours is left as it is. The first look is at the header's bytes, without SQLite, because even opening a
file in WAL mode can write beside it.
"""

import os
import secrets
import sqlite3
import time
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
from oncelog.file_modes import OWNER_ONLY, create_or_report
from oncelog.sql_files import split_script
from oncelog.storage.key_hash import SECRET_BYTES
from oncelog.storage.metadata import (
    LogMetadata,
    check_schema_version,
    check_settings,
    decode_metadata,
    new_epoch,
    new_settings,
)
from oncelog.storage.sqlite.key_index.key_run import RUN_KEYS, KeyPairs, write_runs
from oncelog.storage.sqlite.moved_marker import check_not_moved
from oncelog.storage.sqlite.statements import SQL, load_migrations, transaction

APPLICATION_ID: Final = 0x4F6E636C  # "Oncl"
SCHEMA_VERSION: Final = load_migrations()[-1][0]
BUSY_TIMEOUT_MS: Final = 10_000
"""How long a writer waits for another process's transaction."""
_BUSY_POLL_MS: Final = 5
CHECKPOINT_PAGES: Final = 4000
"""The write-ahead log is moved into the file when it has come to this (16 MB)."""
CACHE_KIB: Final = 32_768

_MIGRATION_BATCH_ROWS: Final = 1000 * RUN_KEYS

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
    # No decision writes a row twice, so the tables contradict each other.
    "SQLITE_CONSTRAINT_UNIQUE",
    "SQLITE_CONSTRAINT_PRIMARYKEY",
    "SQLITE_CONSTRAINT_ROWID",
)
_CORRUPT_MESSAGES: Final = ("no such table: oncelog_", "no such column: ", "Could not decode to UTF-8")
_UNSTORABLE_ERRORS: Final = ("SQLITE_CONSTRAINT", "SQLITE_TOOBIG", "SQLITE_MISMATCH", "SQLITE_RANGE")


class Driver(Protocol):
    """How connections are made. The tests have one whose disk fails."""

    is_shared: bool
    """Whether there can be several connections to a file at once."""

    def check(self, path: str) -> None:
        """Raises NotALogError if the file is certainly not a log. Changes nothing."""

    def create(self, path: str) -> None:
        """Create an empty file, with the mode of new logs, if it is missing. Raises StoreUnavailableError."""

    def connect(self, path: str) -> Any:
        """A connection in autocommit mode, as sqlite3 has it."""

    def get_free_bytes(self, path: str) -> int | None:
        """Of the file system that it is on; None if that is not known."""

    def get_file_id(self, path: str) -> object:
        """Tells the file that is there now from any other: who writes to one that was removed writes for nobody."""


class SqliteDriver:
    """The SQLite that comes with Python, which an application's own connections to the file use too.

    Two copies of SQLite in one process would break each other's locks (docs/decisions/0008).
    """

    is_shared = True

    def __init__(self, file_mode: int = OWNER_ONLY) -> None:
        self._file_mode = file_mode

    def check(self, path: str) -> None:
        """Looks at the header."""
        if _is_locked_by_process(path):
            self._check_by_sqlite(path)
            return
        header = _read_header(path)
        if header:
            check_header(path, header, _read_header(f"{path}-journal"))

    def _check_by_sqlite(self, path: str) -> None:
        try:
            with closing(self.connect(path)) as connection:
                if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:  # else it is being made
                    check_application_id(connection, path)
        except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: for a damaged name in a message of sqlite3
            raise translate_error(error, path) from error

    def create(self, path: str) -> None:
        """As `Driver` says. An existing file that has more permissions than new ones is reported."""
        try:
            create_or_report(path, self._file_mode)
        except OSError as error:
            raise StoreUnavailableError(f"{path} cannot be created: {error.strerror}") from error

    def get_free_bytes(self, path: str) -> int | None:
        """As `Driver` says: what those may have who are not root."""
        try:
            found = os.statvfs(os.path.dirname(path) or ".")  # noqa: PTH120 - once a commit
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def get_file_id(self, path: str) -> object:
        """As `Driver` says."""
        try:
            found = os.stat(path)  # noqa: PTH116 - once a commit, and half as dear
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def connect(self, path: str) -> sqlite3.Connection:
        """As `Driver` says."""
        return sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=256
        )


def check_header(path: str, header: bytes, journal: bytes) -> None:
    """Raises NotALogError for the first bytes of a file that is not ours, its rollback journal's beside them."""
    if not any(header) and _is_from_empty_database(journal):
        return  # the power went while a log was being made; SQLite will find the file empty again
    if not header.startswith(_MAGIC) or len(header) < HEADER_BYTES:
        raise NotALogError(f"{path} is no SQLite database, so it is no log. Nothing was changed.")
    if not _has_application_id(header):
        raise _build_foreign_error(path)


def is_foreign_database(path: str) -> bool:
    """Whether a file is an SQLite database of somebody else's. What is no database at all may be a log's remains."""
    header = _read_header(path)
    return header.startswith(_MAGIC) and len(header) == HEADER_BYTES and not _has_application_id(header)


def _has_application_id(header: bytes) -> bool:
    return int.from_bytes(header[68:72], "big") == APPLICATION_ID


def check_application_id(connection: Any, path: str) -> None:
    """Raises NotALogError for a connection to a file that is not ours."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise _build_foreign_error(path)


def _build_foreign_error(path: str) -> NotALogError:
    return NotALogError(
        f"{path} is an SQLite database, but not a log of Oncelog's. Nothing was changed. "
        "Open a file of its own; an application's tables can live in a log, not the other way round."
    )


def _is_locked_by_process(path: str) -> bool:
    """Whether SQLite holds a lock on the file in this process: another log of it is open, or the application's own.

    Then it must not be opened by other means. POSIX drops all of a process's locks on a file when the process closes
    any descriptor of it: another process could then take itself for the last one, and remove the write-ahead log into
    which this one goes on to write.
    """
    try:
        inode, process = f":{os.stat(path).st_ino} ", f" {os.getpid()} "  # noqa: PTH116
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(inode in lock and process in lock for lock in locks)


def _is_from_empty_database(journal: bytes) -> bool:
    """Whether a rollback journal leads back to a database of no pages."""
    return len(journal) >= 28 and journal.startswith(_JOURNAL_MAGIC) and not int.from_bytes(journal[16:20], "big")


def _read_header(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(HEADER_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreUnavailableError(f"{path} cannot be read: {error.strerror}") from error


def translate_error(error: Exception, path: str, hint: str = "") -> Exception:
    """Translate an error of SQLite, or an error of decoding. Returns an error of a wrong use of SQLite unchanged."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name == "SQLITE_FULL":
        return DiskFullError(f"{path}: {error} [{name}]{hint}")
    if name.startswith(_UNAVAILABLE_ERRORS):
        return StoreUnavailableError(f"{path}: {error} [{name}]{hint}")
    is_sqlite = isinstance(error, sqlite3.Error)
    if not is_sqlite or name.startswith(_CORRUPT_ERRORS) or str(error).startswith(_CORRUPT_MESSAGES):
        code = f" [{name}]" if name else ""
        return CorruptError(f"{path} is damaged: {error}{code}; see `oncelog verify`")
    if name.startswith(_UNSTORABLE_ERRORS):
        return UnstorableError(f"{path} cannot store this: {name}")
    return error


def connect(driver: Driver, path: str) -> Any:
    """A connection as every use of the file needs it."""
    driver.create(path)  # SQLite itself would give a new file the permissions that the umask leaves
    connection = driver.connect(path)
    try:
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        # Deleted bytes are overwritten where that costs no further writing; `erase` asks for more.
        connection.execute("PRAGMA secure_delete = FAST")
    except BaseException:
        connection.close()
        raise
    return connection


def create_or_open(
    connection: Any, path: str, settings: Settings | RequestedSettings | None, now_ms: int
) -> LogMetadata:
    """Makes the log in an empty file, brings an older one up to date, and says what it is.

    Raises SettingsError for settings that a log which is there was not made with; None takes what it has. Raises
    MovedError for a log that is written to elsewhere by now.
    """
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        _create_log(connection, path, new_settings(settings), now_ms)
    file = load_metadata(connection, path)
    check_settings(path, file.settings, settings)
    _enable_wal(connection, path)
    return migrate_if_older(connection, path, file)


def migrate_if_older(connection: Any, path: str, metadata: LogMetadata) -> LogMetadata:
    """What the file says about itself once it has all our tables. Raises MovedError.

    If it is of an older schema no transaction may be open.
    """
    if metadata.schema_version < SCHEMA_VERSION:
        migrate_schema(connection, metadata.schema_version)
        metadata = load_metadata(connection, path)
    check_not_moved(connection)
    return metadata


def _enable_wal(connection: Any, path: str) -> None:
    """Processes that make a log together come here together, and for this SQLite does not wait by itself."""
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
    if mode != "wal":
        raise StoreUnavailableError(f"{path} cannot be set to write-ahead logging on this file system")


def load_metadata(connection: Any, path: str) -> LogMetadata:
    """What the file says about itself. Raises NewerSchemaError and CorruptError; changes nothing."""
    (schema_version,) = _fetch_only_row(connection, "schema_version", path)
    check_schema_version(path, schema_version, SCHEMA_VERSION)
    metadata = decode_metadata(path, _fetch_only_row(connection, "log", path))
    _fetch_only_row(connection, "state", path)
    return metadata


def _fetch_only_row(connection: Any, statement: str, path: str) -> tuple[Any, ...]:
    try:
        row: tuple[Any, ...] | None = connection.execute(SQL[statement]).fetchone()
    except sqlite3.OperationalError as error:
        if "no such" in str(error):
            raise CorruptError(f"{path} says it is a log, but lacks a table of one: {error}") from error
        raise
    if row is None:
        raise CorruptError(f"{path} says it is a log, but its table of {statement} has no row")
    return row


def _create_log(connection: Any, path: str, settings: Settings, now_ms: int) -> None:
    """In one transaction, and before write-ahead logging: a file is a whole log or still empty."""
    with transaction(connection, "BEGIN EXCLUSIVE"):
        if connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
            return  # another process has created the log meanwhile
        _check_empty(connection, path)
        for _, script in load_migrations():
            for statement in split_script(script):
                connection.execute(statement)
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


def _check_empty(connection: Any, path: str) -> None:
    if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        raise NotALogError(f"{path} is an SQLite database, but not a log of Oncelog's. Nothing was changed.")


def migrate_schema(connection: Any, version: int) -> None:
    """Step by step, each in a transaction of its own that also notes the version it leads to."""
    for number, script in load_migrations():
        if number <= version:
            continue
        with transaction(connection):
            if connection.execute("SELECT schema_version FROM oncelog_log").fetchone()[0] < number:
                for statement in split_script(script):
                    connection.execute(statement)
                if number in _CONVERSIONS:
                    _CONVERSIONS[number](connection)
                connection.execute(SQL["set_schema_version"], (number,))


def _pack_keys(connection: Any) -> None:
    """Keys had a row each before there were runs."""
    for (segment,) in connection.execute("SELECT segment FROM oncelog_key_segments").fetchall():
        for keys in _iterate_key_rows(connection, segment):
            write_runs(connection, segment, keys)


def _iterate_key_rows(connection: Any, segment: int) -> Iterator[KeyPairs]:
    """Some at a time, those of one hash together."""
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
"""What no statement can do, after the script of the same number."""
