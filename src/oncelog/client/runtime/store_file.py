"""The SQLite file of a client: locking, creation, migration and transactions.

Every client stores its outbox and its cursors in such a file. `StoreSchema` describes the tables of one kind of client;
`StoreFile` is an open file. All calls block, and only one thread may call at a time.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.resources import files
from typing import ClassVar, Final, TypeVar

import msgspec
from msgspec import Struct

from oncelog.error_translation import translate_raised
from oncelog.errors import (
    CanonicalError,
    CorruptError,
    NewerSchemaError,
    NotALogError,
    SettingsError,
    StoreError,
    StoreInUseError,
    StoreUnavailableError,
)
from oncelog.file_modes import create_or_report, describe_creation_error, open_or_create
from oncelog.sql_files import parse_statements, run_script
from oncelog.sqlite_files import get_file_id, transaction

T = TypeVar("T")

MEMORY: Final = ":memory:"
BUSY_TIMEOUT_MS: Final = 10_000
_ERRORS: Final[tuple[tuple[tuple[str, ...], type[StoreError], str], ...]] = (
    (("SQLITE_NOTADB",), NotALogError, "{path} is not an SQLite database: use another file"),
    (("SQLITE_CORRUPT",), CorruptError, "{path} is damaged: {error}"),
    (
        ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY"),
        StoreUnavailableError,
        "{path}: {error} [{name}]",
    ),
)
"""SQLite error name prefixes, the error that the client raises instead, and its text."""


class StoreSchema(Struct, frozen=True):
    """Tables of one kind of client, and the scripts that create and migrate them."""

    kind: str
    """Name of the client in errors, such as "deltas client"."""
    package: str
    """Package with a `sql` directory: `schema.sql`, `queries.sql`, and `migrate_N.sql` for each version N from 2 on."""
    version: int
    application_id: int = 0
    """`application_id` of the file, or 0 if the tables may be in the application's own file."""
    state_table: str = ""
    """Table with a `schema_version` column, for tables that may be in the application's own file."""
    lock_suffix: str = "-lock"

    def read_script(self, name: str) -> str:
        """Return the text of a file in the client's `sql` directory."""
        return (files(self.package) / "sql" / name).read_text(encoding="utf-8")

    def load_queries(self) -> dict[str, str]:
        """Return the statements of `queries.sql` by name."""
        return parse_statements(self.read_script("queries.sql"))

    def load_version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the tables in a file, or 0 if it has none."""
        if not self.state_table:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (self.state_table,)).fetchone() is None:
            return 0
        found = connection.execute(f"SELECT schema_version FROM {self.state_table}").fetchone()  # noqa: S608 - a constant
        return 0 if found is None else int(found[0])

    def save_version(self, connection: sqlite3.Connection) -> None:
        """Record the current version in the file."""
        if self.state_table:
            connection.execute(f"UPDATE {self.state_table} SET schema_version = {self.version}")  # noqa: S608 - as above
        else:
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {self.version}")


class StoreFile:
    """One file, open in one process."""

    def __init__(self, path: str | os.PathLike[str], schema: StoreSchema) -> None:
        self.path = os.fspath(path)
        self._schema = schema
        self._resources = ExitStack()
        """Closes the connection, then the lock file."""
        self._connection: sqlite3.Connection | None = None
        self._file_identity: tuple[int, int] | None = None
        """Device and inode of the open file, to detect its removal: writes to a removed file are lost."""

    @property
    def connection(self) -> sqlite3.Connection:
        """The open connection. Raises StoreUnavailableError if the file is closed."""
        if self._connection is None:
            raise StoreUnavailableError(f"{self.path} is closed")
        return self._connection

    @contextmanager
    def open(self) -> Iterator[tuple[sqlite3.Connection, bool]]:
        """Open the file, create or migrate its tables, and yield the connection and whether the tables are new.

        The caller loads its state in the same transaction. An error closes the file. Raises StoreInUseError,
        NotALogError, NewerSchemaError or another StoreError.
        """
        self._acquire_lock()
        try:
            with self.translate_errors():
                create_store_file(self.path)
                self._connection = sqlite3.connect(
                    self.path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
                )
                self._resources.callback(self._connection.close)
                version = self._check_version(self._connection)
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
                self._file_identity = None if self.path == MEMORY else get_file_id(self.path)
                with self.transaction(is_durable=True) as connection:
                    self._migrate(connection, version)
                    yield connection, version == 0
        except BaseException:
            self.close()
            raise

    def _check_version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the tables, or 0 if they do not exist. Raises NotALogError for a foreign file."""
        schema = self._schema
        version = schema.load_version(connection)
        if schema.application_id:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if application != schema.application_id and (application or version or tables):
                raise NotALogError(f"{self.path} is not a {schema.kind} file: use a separate file")
        if version > schema.version:
            raise NewerSchemaError(
                f"{self.path} was created by a newer version of Oncelog's {schema.kind}: upgrade Oncelog"
            )
        return version

    def _migrate(self, connection: sqlite3.Connection, version: int) -> None:
        """Bring the tables to the current version."""
        schema = self._schema
        scripts = [f"migrate_{later}.sql" for later in range(version + 1, schema.version + 1)]
        for name in scripts if version else ["schema.sql"]:
            run_script(connection, schema.read_script(name))
        if version != schema.version:
            schema.save_version(connection)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._connection = None
        self._resources.close()

    def _acquire_lock(self) -> None:
        """Lock a second file with a similar name, because two clients with one file would send its outbox twice.

        The lock is not on the file itself, because closing any descriptor of that file releases SQLite's locks.
        """
        if self.path == MEMORY:
            return
        path = f"{os.path.realpath(self.path)}{self._schema.lock_suffix}"  # the same for every path to the file
        try:
            lock = open_or_create(path, os.O_RDWR)
        except OSError as error:
            raise StoreUnavailableError(describe_creation_error(path, error)) from error
        self._resources.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreInUseError(
                f"another {self._schema.kind} has {self.path} open; each needs its own file"
            ) from error

    @contextmanager
    def transaction(self, *, is_durable: bool) -> Iterator[sqlite3.Connection]:
        """Run a transaction. A power failure may lose a commit that is not durable."""
        with self.translate_errors():
            connection = self.connection
            if self._file_identity is not None and self._file_identity != get_file_id(self.path):
                raise StoreUnavailableError(f"{self.path} was removed or replaced while the client had it open")
            connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
            with transaction(connection):
                yield connection

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate SQLite errors into StoreErrors."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            for prefixes, kind, text in _ERRORS:
                if name.startswith(prefixes):
                    raise kind(text.format(path=self.path, error=error, name=name)) from error
            raise

    def translate_damage(self) -> AbstractContextManager[None]:
        """Raise CorruptError for stored values that cannot be decoded. Must not wrap calls to application functions."""
        return translate_raised(
            (msgspec.MsgspecError, CanonicalError), lambda error: CorruptError(f"{self.path} is damaged: {error}")
        )


class BaseStore:
    """Base class of the clients' stores."""

    _schema: ClassVar[StoreSchema]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = StoreFile(path, self._schema)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_owner(self, kind: str, known: str, requested: str) -> None:
        """Raise SettingsError for a file of a different owner, because it holds that owner's writes and cursors."""
        if known != requested:
            raise SettingsError(
                f"{self._file.path} belongs to the {kind} {known!r}, not to {requested!r}: use another file"
            )


def create_store_file(path: str) -> None:
    """Create the file if it is missing, readable only by its owner. Raises StoreUnavailableError."""
    if path == MEMORY:
        return
    try:
        create_or_report(path)
    except OSError as error:
        raise StoreUnavailableError(describe_creation_error(path, error)) from error
