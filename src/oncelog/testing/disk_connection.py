"""A connection to a database on a simulated disk, as the standard library's `sqlite3` has it."""

# SQLite gave the methods of a disk their names.
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
"""What SQLite does by itself: a checkpoint after the commit that makes the write-ahead log as long as this."""

Value: TypeAlias = bytes | str | int | float | None
Parameters: TypeAlias = Sequence[Value] | Mapping[str, Value]
Row: TypeAlias = tuple[Any, ...]

_VFS_NUMBERS: Final = count(1)


class _Vfs(apsw.VFS):
    """The disk as one connection sees it. Dead once the power was lost; only so can it be told from later ones."""

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
                file = File()  # temporary: it has no name that could survive
            else:
                path = name.filename() if isinstance(name, apsw.URIFilename) else name
                file = self.drive.directory.get_file(path, create=bool(flags[0] & apsw.SQLITE_OPEN_CREATE))
            flags[1] = flags[0]
            # apsw asks for the methods and not for the class.
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
    """A file opened by SQLite."""

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
        # As SQLite's own disk on Linux: a write that is torn leaves alone the bytes beside it.
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE

    def xFileControl(self, op: int, ptr: int) -> bool:
        if op != apsw.SQLITE_FCNTL_PRAGMA:
            return False
        pragma = apsw.VFSFcntlPragma(ptr)
        if pragma.name.lower() != "wal_autocheckpoint":
            return False
        # SQLite would put its own hook in the place of the connection's.
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
"""Which class the standard library raises for which code; for all others it is `OperationalError`."""

_MESSAGES: Final = {
    apsw.SQLITE_IOERR: "disk I/O error",
    apsw.SQLITE_FULL: "database or disk is full",
    apsw.SQLITE_CANTOPEN: "unable to open database file",
}


def _to_sqlite3_error(error: BaseException) -> sqlite3.Error:
    """The error as the standard library raises it."""
    # SQLite reports the first failure; apsw raises the last one, that of cleaning up, with the first as its context.
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
    """A connection to a database on a disk, as `sqlite3.connect(…, isolation_level=None)` gives one.

    It does what a store needs of the standard library's connection. It may go from thread to thread, but only one may
    use it at a time. Made by `Disk.connect`.
    """

    def __init__(self, name: str, drive: Drive) -> None:
        self._vfs = _Vfs(drive)
        self._has_committed = False
        try:
            self._connection = apsw.Connection(name, vfs=self._vfs.name)
        except apsw.Error as error:
            self._vfs.unregister()
            raise _to_sqlite3_error(error) from error
        # Without it there is no write-ahead log here: that needs memory which connections share, or a sole connection.
        self._connection.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        self._connection.set_wal_hook(self._after_commit)
        drive.connections.add(self)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Parameters = ()) -> "DiskCursor":
        """Runs a statement: up to its first row if it has rows, else to its end."""
        return DiskCursor(self, sql, [parameters])

    def executemany(self, sql: str, rows: Iterable[Parameters]) -> "DiskCursor":
        """Runs a statement that has no rows once for each of the parameters."""
        return DiskCursor(self, sql, rows)

    def close(self) -> None:
        """Closes the connection. Faults of the disk are not told, as the standard library does not tell them."""
        # SQLite has let go of the connection even where apsw raises.
        with suppress(apsw.IOError, apsw.FullError):
            self._connection.close()
        self._vfs.unregister()
        self._vfs.drive.connections.discard(self)

    def start(self, sql: str, parameters: Parameters) -> apsw.Cursor:
        """For cursors: a statement that was begun."""
        return self._connection.execute(sql, parameters)

    def changes(self) -> int:
        """For cursors: how many rows the last statement changed."""
        return self._connection.changes()

    @contextmanager
    def translate_errors(self, sql: str) -> Iterator[None]:
        """For cursors: raises the standard library's errors, and those only that SQLite reports."""
        if not self._vfs.is_alive:
            # Much would be answered from memory still; but who has lost power has lost that.
            raise _to_sqlite3_error(apsw.exception_for(apsw.SQLITE_IOERR))
        was_in_transaction = self._has_committed = False
        try:
            was_in_transaction = self._connection.in_transaction
            yield
        except apsw.Error as error:
            # apsw raises whatever the disk has raised, even where SQLite went on without it. That is so after a commit,
            # when a checkpoint fails or the log is not shortened, and in a rollback, which is always done.
            is_rolled_back = was_in_transaction and not self._connection.in_transaction and _ROLLBACK.fullmatch(sql)
            if not (self._has_committed or is_rolled_back):
                raise _to_sqlite3_error(error) from error

    def _after_commit(self, connection: apsw.Connection, schema: str, pages: int) -> int:
        """SQLite calls it when a commit to the write-ahead log has succeeded; its own hook does the same checkpoint."""
        self._has_committed = True
        if 0 < self._vfs.checkpoint_pages <= pages:
            with suppress(apsw.Error):
                connection.wal_checkpoint(schema)
        return apsw.SQLITE_OK


class DiskCursor:
    """The rows of a statement. As in the standard library it is one row ahead, so the last row ends the statement.

    `rowcount` is the number of rows that were changed once the statement has ended, and -1 if it is none that changes.
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
        """The next row; None if there is none."""
        return next(self, None)

    def fetchmany(self, size: int = 1) -> list[Row]:
        """The next rows, at most so many."""
        return list(islice(self, size))

    def fetchall(self) -> list[Row]:
        """The rows that are left."""
        return list(self)

    def _count_changes(self) -> None:
        if self._counts_changes and self._next_row is _END:
            self.rowcount = max(self.rowcount, 0) + self._connection.changes()
