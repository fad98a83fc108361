"""Model of the simulated disk: files, a directory, and the drive that counts and fails operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from random import Random
from threading import RLock
from typing import Final, Protocol

import apsw

SECTOR_BYTES: Final = 512

_SURVIVAL_RATES: Final = (0.1, 0.5, 0.9)


class Fault(Enum):
    """How an operation can fail, apart from a power loss."""

    IO_ERROR = "disk I/O error"
    """Counted by `Disk.operations`: every open, read, write, truncate, sync, delete and query of a file's size."""

    FULL = "database or disk is full"
    """Counted by `Disk.allocations`: every write, every sync, and every truncate that extends a file. This includes
    writes over existing data, as on file systems that never write in place."""


class Operation(IntEnum):
    """SQLite operation on the disk, with the error code of its failure."""

    OPEN = apsw.SQLITE_IOERR
    READ = apsw.SQLITE_IOERR_READ
    WRITE = apsw.SQLITE_IOERR_WRITE
    TRUNCATE = apsw.SQLITE_IOERR_TRUNCATE
    SYNC = apsw.SQLITE_IOERR_FSYNC
    DELETE = apsw.SQLITE_IOERR_DELETE
    FILE_SIZE = apsw.SQLITE_IOERR_FSTAT
    ACCESS = apsw.SQLITE_IOERR_ACCESS
    LOCK = apsw.SQLITE_IOERR_LOCK


_UNCOUNTED_OPERATIONS: Final = frozenset({Operation.ACCESS, Operation.LOCK})
"""Operations that fail without power, but cannot have planned faults."""


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Bytes written at an offset."""

    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        """Apply the change."""
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def tear(self, random: Random) -> "FileWrite":
        """Return the part before or after a sector boundary in the write, or all of it if it crosses no boundary."""
        first = SECTOR_BYTES - self.offset % SECTOR_BYTES
        boundaries = range(first, len(self.data), SECTOR_BYTES)
        if not boundaries:
            return self
        boundary = random.choice(boundaries)
        if random.random() < 0.5:
            return FileWrite(self.offset, self.data[:boundary])
        return FileWrite(self.offset + boundary, self.data[boundary:])


@dataclass(frozen=True, slots=True)
class FileTruncate:
    """A change of a file's size."""

    size: int

    def apply(self, content: bytearray) -> None:
        """Apply the change."""
        del content[self.size :]
        content.extend(bytes(self.size - len(content)))

    def tear(self, random: Random) -> "FileTruncate":  # noqa: ARG002
        """Return the change itself, because a size changes completely or not at all."""
        return self


class File:
    """A file: the content that reads see, the durable content, and the pending changes between them in order."""

    def __init__(self, durable: bytes | None = None) -> None:
        self.durable = bytearray(durable or b"")
        self.content = bytearray(self.durable)
        self.pending: list[FileWrite | FileTruncate] = []
        self.is_name_durable = durable is not None
        self.locks: dict[object, int] = {}

    def change(self, change: FileWrite | FileTruncate) -> None:
        """Apply a change. It is visible immediately, and durable after the next sync."""
        change.apply(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        """Make all pending changes durable."""
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()
        self.is_name_durable = True

    def drop_pending(self) -> None:
        """Keep pending data readable but never write it, as after a failed sync on Linux."""
        self.pending.clear()

    def build_after_power_loss(self, random: Random | None) -> "File | None":
        """Return the file after a power loss, or None if its name has not survived."""
        if random is None:
            return File(bytes(self.durable)) if self.is_name_durable else None
        survives = self.is_name_durable or random.random() < 0.5
        share = random.choice(_SURVIVAL_RATES)
        for change in self.pending:
            if random.random() < share:
                (change.tear(random) if random.random() < 0.5 else change).apply(self.durable)
        return File(bytes(self.durable)) if survives else None


class Directory:
    """Files by name, and files whose deletion is pending."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self._deleted: dict[str, File] = {}

    def get_file(self, name: str, *, create: bool) -> File:
        """Return the file with the given name."""
        if name not in self.files:
            if not create:
                raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
            self.files[name] = File()
        return self.files[name]

    def has_content(self, name: str) -> bool:
        """Return whether the file exists and is not empty. On Linux, SQLite treats an empty file as missing."""
        return name in self.files and bool(self.files[name].content)

    def sync(self, file: File) -> None:
        """Sync a file. The first sync of a new file also syncs the directory, as SQLite does for journals."""
        if not file.is_name_durable:
            self._deleted.clear()
        file.sync()

    def delete(self, name: str, *, is_durable: bool) -> None:
        """Remove a name."""
        if name not in self.files:
            raise apsw.exception_for(apsw.SQLITE_IOERR_DELETE_NOENT)
        file = self.files.pop(name)
        if is_durable:
            self._deleted.clear()
        elif file.is_name_durable:
            self._deleted[name] = file

    def lose_power(self, random: Random | None) -> None:
        """Keep only the data that survives a power loss."""
        survivors = {name: file.build_after_power_loss(random) for name, file in self.files.items()}
        for name, file in self._deleted.items():
            # Each name has only one file, so a surviving new file replaces the deleted one.
            if survivors.get(name) is None and (random is None or random.random() < 0.5):
                survivors[name] = file.build_after_power_loss(random)
        self.files = {name: file for name, file in survivors.items() if file is not None}
        self._deleted.clear()


class Closable(Protocol):
    """Interface of a connection, as the drive uses it."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Number of the operation that will fail, counted from the creation of the disk, and whether later ones fail
    too."""

    number: int
    is_sticky: bool

    def matches(self, number: int) -> bool:
        """Return whether the operation with this number fails."""
        return number == self.number or (self.is_sticky and number > self.number)


class Drive:
    """State of a disk. It counts every SQLite operation, and fails the planned ones."""

    def __init__(self, *, forgets_failed_syncs: bool = False) -> None:
        self.forgets_failed_syncs = forgets_failed_syncs
        self.directory = Directory()
        self.connections: set[Closable] = set()
        self.is_on = True
        self.power_cycle = 0
        self.sync_event: tuple[int, Callable[[], None]] | None = None
        """Number of a sync, and the event that happens to the machine or the process before that sync."""
        self.plans: dict[Fault, FaultPlan] = {}
        self.counts = dict.fromkeys(Fault, 0)
        self.syncs = 0
        # One thread may cut the power while a connection works in another thread.
        self.lock = RLock()

    def is_alive(self, power_cycle: int) -> bool:
        """Return whether an object that was opened in a power cycle can reach the disk."""
        return self.is_on and power_cycle == self.power_cycle

    def cut_power(self, seed: int | None) -> None:
        """Cut the power until it is turned on again."""
        self.directory.lose_power(None if seed is None else Random(seed))  # noqa: S311  it must be repeatable
        self.power_cycle += 1
        self.is_on = False

    def kill(self) -> None:
        """Kill the process. Its connections are then dead and its locks released, but written data is kept."""
        for file in self.directory.files.values():
            file.locks.clear()
        self.power_cycle += 1
        self.is_on = False

    @contextmanager
    def run_operation(self, power_cycle: int, operation: Operation, *, allocates: bool = False) -> Iterator[None]:
        """Count an operation, then run or fail it."""
        with self.lock:
            if not self.is_alive(power_cycle):
                raise apsw.exception_for(operation)
            if operation not in _UNCOUNTED_OPERATIONS:
                self._count_and_fail(operation, allocates)
            yield

    def _count_and_fail(self, operation: Operation, allocates: bool) -> None:
        self.counts[Fault.IO_ERROR] += 1
        self.counts[Fault.FULL] += allocates
        if operation is Operation.SYNC:
            self.syncs += 1
            if self.sync_event is not None and self.sync_event[0] == self.syncs:
                self.sync_event[1]()
                raise apsw.exception_for(operation)
        if self._should_fail(Fault.IO_ERROR):
            raise apsw.exception_for(operation)
        if allocates and self._should_fail(Fault.FULL):
            raise apsw.exception_for(apsw.SQLITE_FULL)

    def _should_fail(self, fault: Fault) -> bool:
        plan = self.plans.get(fault)
        return plan is not None and plan.matches(self.counts[fault])
