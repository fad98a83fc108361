"""What a client of the ledger keeps: for each scope the writes without an outcome, and the last sequence.

All of it lies in one SQLite file of its own. Everything here blocks, and is called by one thread at a time.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from oncelog.client.ledger.entries import QueueEntry, ScopeState, StoreChanges
from oncelog.client.runtime.store_file import create_store_file
from oncelog.core.transactions import OperationJson, operations_from_json
from oncelog.errors import (
    CanonicalError,
    CorruptError,
    NewerSchemaError,
    NotALogError,
    SettingsError,
    StoreInUseError,
    StoreUnavailableError,
)
from oncelog.file_modes import open_or_create
from oncelog.sql_files import parse_statements, split_script

MEMORY: Final = ":memory:"
APPLICATION_ID: Final = 0x4F4C4C43  # "OLLC"
SCHEMA_VERSION: Final = 2
BUSY_TIMEOUT_MS: Final = 10_000
_SQL: Final = files("oncelog.client.ledger") / "sql"
SQL: Final = parse_statements((_SQL / "queries.sql").read_text(encoding="utf-8"))
_CORRUPT_ERRORS: Final = ("SQLITE_CORRUPT",)
_NOT_A_DATABASE_ERRORS: Final = ("SQLITE_NOTADB",)
_UNAVAILABLE_ERRORS: Final = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
)


class _Body(Struct, frozen=True):
    operations: tuple[OperationJson, ...]


_BODY_DECODER: Final = msgspec.json.Decoder(_Body)


class StoredScope(NamedTuple):
    """What the file has of a scope."""

    id: int
    state: ScopeState
    pending: list[QueueEntry]


class LedgerStore:
    """One file, open in one process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None
        """Which file it is: who writes to one that was removed writes for nobody."""

    # --- opening and closing

    def open(self, client_id: str) -> list[tuple[str, str]]:
        """Gives the scopes in which writes wait for their outcomes.

        Raises StoreInUseError, NotALogError, NewerSchemaError, SettingsError if the file is another client's, or
        another StoreError.
        """
        self._acquire_lock()
        try:
            with self._translate_errors():
                create_store_file(self._path)
                self._connection = sqlite3.connect(
                    self._path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
                )
                self._check_file_kind(self._connection)
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
                self._file_id = None if self._path == MEMORY else _get_file_id(self._path)
                return self._prepare(self._connection, client_id)
        except BaseException:
            self.close()
            raise

    def _check_file_kind(self, connection: sqlite3.Connection) -> None:
        """Before anything in it is changed."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if application != APPLICATION_ID and (application or version or tables):
            raise NotALogError(f"{self._path} is no file of a ledger's client: give it a file of its own")
        if version > SCHEMA_VERSION:
            raise NewerSchemaError(f"{self._path} was made by a newer version of Oncelog's ledger client")

    def _prepare(self, connection: sqlite3.Connection, client_id: str) -> list[tuple[str, str]]:
        with self._transaction(is_durable=True):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version < SCHEMA_VERSION:
                script = "schema.sql" if version == 0 else "migrate_2.sql"
                for statement in split_script((_SQL / script).read_text(encoding="utf-8")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            if version == 0:
                connection.execute(SQL["make_client"], (client_id,))
            (known,) = connection.execute(SQL["client"]).fetchone()
            if known != client_id:
                # Its numbers are those of that client; under another one they would mean other writes.
                raise SettingsError(f"{self._path} belongs to the client {known!r}, not to {client_id!r}")
            return connection.execute(SQL["scopes_pending"]).fetchall()

    def close(self) -> None:
        """Lets go of the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _acquire_lock(self) -> None:
        """Two clients with one file would give one number to two writes. Of the file itself no descriptor may be
        opened: to close it would take away SQLite's locks."""
        if self._path == MEMORY:
            return
        path = f"{os.path.realpath(self._path)}-lock"  # one for all names that lead to the file
        try:
            self._lock = open_or_create(path, os.O_RDWR)
        except OSError as error:
            raise StoreUnavailableError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreInUseError(f"another ledger client has {self._path} open; each needs its own file") from error

    # --- scopes

    def load_scope(self, organization: str, vault: str) -> StoredScope:
        """What the file has of a scope; nothing of a new one."""
        with self._translate_errors(), self._transaction(is_durable=False) as connection:
            found = connection.execute(SQL["scope"], (organization, vault)).fetchone()
            if found is None:
                connection.execute(SQL["make_scope"], (organization, vault))
                found = connection.execute(SQL["scope"], (organization, vault)).fetchone()
            rows = connection.execute(SQL["pending"], (found[0],)).fetchall()
            return StoredScope(found[0], ScopeState(*found[1:]), [self._decode_entry(*row) for row in rows])

    def save(self, scope_id: int, changes: StoreChanges) -> None:
        """On return it is on the disk."""
        with self._translate_errors(), self._transaction(is_durable=changes.must_be_durable) as connection:
            connection.executemany(
                SQL["save"],
                [
                    (scope_id, entry.number, entry.key, sequence, lowest, entry.body, entry.made_at_ms)
                    for entry, sequence, lowest in changes.entries
                ],
            )
            connection.executemany(SQL["settle"], [(scope_id, one.entry.number) for one in changes.settled])
            connection.execute(SQL["save_state"], (*changes.state, scope_id))

    def _decode_entry(
        self, number: int, key: bytes, sequence: int, lowest: int, body: bytes, made_at_ms: int
    ) -> QueueEntry:
        try:
            operations = operations_from_json(_BODY_DECODER.decode(body).operations)
        except CanonicalError as error:
            raise CorruptError(f"{self._path} is damaged: {error}") from error
        entry = QueueEntry(number, key, operations, body, made_at_ms)
        entry.sequence = sequence
        entry.mark_unknown(lowest)
        return entry

    # --- transactions

    @contextmanager
    def _transaction(self, *, is_durable: bool) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        if connection is None:
            raise StoreUnavailableError(f"{self._path} is closed")
        if self._file_id is not None and self._file_id != _get_file_id(self._path):
            raise StoreUnavailableError(f"{self._path} was removed or replaced while the client had it open")
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
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            if name.startswith(_NOT_A_DATABASE_ERRORS):
                raise NotALogError(f"{self._path} is no SQLite database") from error
            if name.startswith(_CORRUPT_ERRORS):
                raise CorruptError(f"{self._path} is damaged: {error}") from error
            if name.startswith(_UNAVAILABLE_ERRORS):
                raise StoreUnavailableError(f"{self._path}: {error} [{name}]") from error
            raise
        except msgspec.MsgspecError as error:
            raise CorruptError(f"{self._path} is damaged: {error}") from error


def _get_file_id(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - once a transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino
