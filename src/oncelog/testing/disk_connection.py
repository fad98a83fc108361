"""A connection to a database on a simulated disk, with the interface of `sqlite3`."""

# Method names of SQLite's VFS interface.
# ruff: noqa: N802

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count, islice
from typing import Any, Final, Self, TypeAlias, cast

import apsw

from oncelog.testing.disk_files import SECTOR_BYTES, Drive, File, FileTruncate, FileWrite, Operation

DEFAULT_CHECKPOINT_PAGES: Final = 1000
"""SQLite's default: the commit that extends the write-ahead log to this many pages runs a checkpoint."""

Value: TypeAlias = bytes | str | int | float | None
Parameters: TypeAlias = Sequence[Value] | Mapping[str, Value]
Row: TypeAlias = tuple[Any, ...]

_VFS_NUMBERS: Final = count(1)


class _Vfs(apsw.VFS):
    """One connection's view of the disk.

    After a power loss this view is dead, while the views of later connections work.
    """

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self._power_cycle = drive.power_cycle
        self.name = f"oncelog-disk-{next(_VFS_NUMBERS)}"
        self.checkpoint_pages = DEFAULT_CHECKPOINT_PAGES
        super().__init__(self.name, base="")

    @property
    def is_alive(self) -> bool:
        return self.drive.is_alive(self._power_cycle)

    def run_operation(self, operation: Operation, *, allocates: bool = False) -> AbstractContextManager[None]:
        return self.drive.run_operation(self._power_cycle, operation, allocates=allocates)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        with self.run_operation(Operation.OPEN):
            if name is None:
                file = File()  # a temporary file, which has no name that could survive
            else:
                path = name.filename() if isinstance(name, apsw.URIFilename) else name
                file = self.drive.directory.get_file(path, create=bool(flags[0] & apsw.SQLITE_OPEN_CREATE))
            flags[1] = flags[0]
            # apsw needs only the methods, not the class.
            return cast("apsw.VFSFile", _Handle(self, file))

    def xAccess(self, pathname: str, flags: int) -> bool:  # noqa: ARG002
        with self.run_operation(Operation.ACCESS):
            return self.drive.directory.has_content(pathname)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        with self.run_operation(Operation.DELETE):
            self.drive.directory.delete(filename, is_durable=syncdir)

    def xFullPathname(self, name: str) -> str:
        return name


class _Handle:
    """A file that SQLite has opened."""

    def __init__(self, vfs: _Vfs, file: File) -> None:
        self._vfs = vfs
        self._file = file

    def xRead(self, amount: int, offset: int) -> bytes:
        with self._vfs.run_operation(Operation.READ):
            return bytes(self._file.content[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        with self._vfs.run_operation(Operation.WRITE, allocates=True):
            self._file.change(FileWrite(offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        with self._vfs.run_operation(Operation.TRUNCATE, allocates=newsize > len(self._file.content)):
            self._file.change(FileTruncate(newsize))

    def xSync(self, flags: int) -> None:  # noqa: ARG002
        may_forget = self._vfs.drive.forgets_failed_syncs and self._vfs.is_alive
        try:
            with self._vfs.run_operation(Operation.SYNC, allocates=True):
                self._vfs.drive.directory.sync(self._file)
        except apsw.Error:
            if may_forget:
                self._file.drop_pending()
            raise

    def xFileSize(self) -> int:
        with self._vfs.run_operation(Operation.FILE_SIZE):
            return len(self._file.content)

    def xLock(self, level: int) -> None:
        with self._vfs.run_operation(Operation.LOCK):
            others = max((held for handle, held in self._file.locks.items() if handle is not self), default=0)
            tolerated = {
                apsw.SQLITE_LOCK_SHARED: apsw.SQLITE_LOCK_RESERVED,
                apsw.SQLITE_LOCK_RESERVED: apsw.SQLITE_LOCK_SHARED,
            }
            if others > tolerated.get(level, apsw.SQLITE_LOCK_NONE):
                raise apsw.exception_for(apsw.SQLITE_BUSY)
            self._file.locks[self] = max(level, self._file.locks.get(self, 0))

    def xUnlock(self, level: int) -> None:
        self._file.locks[self] = level

    def xCheckReservedLock(self) -> bool:
        return any(held >= apsw.SQLITE_LOCK_RESERVED for held in self._file.locks.values())

    def xClose(self) -> None:
        self._file.locks.pop(self, None)

    def xSectorSize(self) -> int:
        return SECTOR_BYTES

    def xDeviceCharacteristics(self) -> int:
        # As on Linux, a torn write does not change the bytes next to it.
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE

    def xFileControl(self, op: int, ptr: int) -> bool:
        if op != apsw.SQLITE_FCNTL_PRAGMA:
            return False
        pragma = apsw.VFSFcntlPragma(ptr)
        if pragma.name.lower() != "wal_autocheckpoint":
            return False
        # SQLite would replace the connection's hook.
        if pragma.value is not None:
            self._vfs.checkpoint_pages = int(pragma.value)
        pragma.result = str(self._vfs.checkpoint_pages)
        return True


_END: Final[Row] = ()
_CHANGES_ROWS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE | re.DOTALL
)
_ROLLBACK: Final = re.compile(r"\s*ROLLBACK(?:\s+TRANSACTION)?\s*;?\s*", re.IGNORECASE)

_ERRORS: Final[dict[int, type[sqlite3.Error]]] = {
    apsw.SQLITE_AUTH: sqlite3.DatabaseError,
    apsw.SQLITE_CONSTRAINT: sqlite3.IntegrityError,
    apsw.SQLITE_CORRUPT: sqlite3.DatabaseError,
    apsw.SQLITE_FORMAT: sqlite3.DatabaseError,
    apsw.SQLITE_INTERNAL: sqlite3.InternalError,
    apsw.SQLITE_MISMATCH: sqlite3.IntegrityError,
    apsw.SQLITE_MISUSE: sqlite3.InterfaceError,
    apsw.SQLITE_NOTADB: sqlite3.DatabaseError,
    apsw.SQLITE_NOTFOUND: sqlite3.InternalError,
    apsw.SQLITE_RANGE: sqlite3.InterfaceError,
    apsw.SQLITE_TOOBIG: sqlite3.DataError,
}
"""Exception classes of `sqlite3` by error code. All other codes are `OperationalError`."""

_MESSAGES: Final = {
    apsw.SQLITE_IOERR: "disk I/O error",
    apsw.SQLITE_FULL: "database or disk is full",
    apsw.SQLITE_CANTOPEN: "unable to open database file",
}


def _to_sqlite3_error(error: BaseException) -> sqlite3.Error:
    """Convert an error to the corresponding `sqlite3` error."""
    # SQLite reports the first failure. apsw raises the last one, from the cleanup, with the first as its context.
    while isinstance(error.__context__, apsw.Error):
        error = error.__context__
    code: int | None = getattr(error, "extendedresult", None)
    if code is None:
        return sqlite3.ProgrammingError(str(error))
    message = str(error) or _MESSAGES.get(code & 0xFF, "")
    standard = _ERRORS.get(code & 0xFF, sqlite3.OperationalError)(message)
    name = apsw.mapping_extended_result_codes.get(code) or apsw.mapping_result_codes.get(code, "unknown")
    standard.sqlite_errorcode = code
    standard.sqlite_errorname = str(name)
    return standard


class DiskConnection:
    """A connection to a database on a disk, similar to `sqlite3.connect(…, isolation_level=None)`.

    It has the methods of `sqlite3.Connection` that a store needs. Several threads may use it, one at a time. Create it
    with `Disk.connect`.
    """

    def __init__(self, name: str, drive: Drive) -> None:
        self._vfs = _Vfs(drive)
        self._has_committed = False
        try:
            self._connection = apsw.Connection(name, vfs=self._vfs.name)
        except apsw.Error as error:
            self._vfs.unregister()
            raise _to_sqlite3_error(error) from error
        # Without shared memory, SQLite can use a write-ahead log only with exclusive locking.
        self._connection.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        self._connection.set_wal_hook(self._after_commit)
        drive.connections.add(self)

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open."""
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Parameters = ()) -> "DiskCursor":
        """Run a statement up to its first row, or to completion if it produces no rows."""
        return DiskCursor(self, sql, [parameters])

    def executemany(self, sql: str, rows: Iterable[Parameters]) -> "DiskCursor":
        """Run a statement that produces no rows once for each set of parameters."""
        return DiskCursor(self, sql, rows)

    def close(self) -> None:
        """Close the connection. As in `sqlite3`, disk faults are not reported."""
        # SQLite has closed the connection even if apsw raises.
        with suppress(apsw.IOError, apsw.FullError):
            self._connection.close()
        self._vfs.unregister()
        self._vfs.drive.connections.discard(self)

    def start(self, sql: str, parameters: Parameters) -> apsw.Cursor:
        """Start a statement for a cursor."""
        return self._connection.execute(sql, parameters)

    def changes(self) -> int:
        """Return the number of rows that the last statement changed, for a cursor."""
        return self._connection.changes()

    @contextmanager
    def translate_errors(self, sql: str) -> Iterator[None]:
        """Raise `sqlite3` errors for a cursor, but only errors that SQLite itself reports."""
        if not self._vfs.is_alive:
            # SQLite could answer from its cache, but a process without power has lost its memory.
            raise _to_sqlite3_error(apsw.exception_for(apsw.SQLITE_IOERR))
        was_in_transaction = self._has_committed = False
        try:
            was_in_transaction = self._connection.in_transaction
            yield
        except apsw.Error as error:
            # apsw raises every disk error, even if SQLite continued. SQLite continues if a checkpoint or the truncation
            # of the log fails after a commit, and in a rollback, which always succeeds.
            is_rolled_back = was_in_transaction and not self._connection.in_transaction and _ROLLBACK.fullmatch(sql)
            if not (self._has_committed or is_rolled_back):
                raise _to_sqlite3_error(error) from error

    def _after_commit(self, connection: apsw.Connection, schema: str, pages: int) -> int:
        """Run a checkpoint, as SQLite's default hook does. SQLite calls this after a commit to the write-ahead log."""
        self._has_committed = True
        if 0 < self._vfs.checkpoint_pages <= pages:
            with suppress(apsw.Error):
                connection.wal_checkpoint(schema)
        return apsw.SQLITE_OK


class DiskCursor:
    """Rows of a statement. As in `sqlite3`, the cursor reads one row ahead, so that the last row completes the
    statement.

    Once the statement has completed, `rowcount` is the number of changed rows. It is -1 for a statement that cannot
    change rows.
    """

    def __init__(self, connection: DiskConnection, sql: str, rows: Iterable[Parameters]) -> None:
        self.rowcount = -1
        self._connection = connection
        self._sql = sql
        self._counts_changes = _CHANGES_ROWS.match(sql) is not None
        self._next_row = _END
        for parameters in rows:
            with connection.translate_errors(sql):
                self._rows: Iterator[Row] = connection.start(sql, parameters)
                self._next_row = next(self._rows, _END)
            self._count_changes()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        row = self._next_row
        if row is _END:
            raise StopIteration
        self._next_row = _END
        with self._connection.translate_errors(self._sql):
            self._next_row = next(self._rows, _END)
        self._count_changes()
        return row

    def fetchone(self) -> Row | None:
        """Return the next row, or None after the last one."""
        return next(self, None)

    def fetchmany(self, size: int = 1) -> list[Row]:
        """Return the next rows, at most `size`."""
        return list(islice(self, size))

    def fetchall(self) -> list[Row]:
        """Return the remaining rows."""
        return list(self)

    def _count_changes(self) -> None:
        if self._counts_changes and self._next_row is _END:
            self.rowcount = max(self.rowcount, 0) + self._connection.changes()
