"""The model behind `oncelog.testing.disk`: files, their directory, and the drive that counts and fails operations."""

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
    """What can go wrong with an operation, other than losing power."""

    IO_ERROR = "disk I/O error"
    """`Disk.operations` counts what can fail so: every open, read, write, truncate, sync, delete and file size."""

    FULL = "database or disk is full"
    """`Disk.allocations` counts what can fail so: every write, every truncate that makes a file longer, every sync.
    A write over what is there already is among them, as on file systems that never write in place."""


class Operation(IntEnum):
    """What SQLite asks of the disk, with the code of its failure."""

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
"""These fail without power, but no fault is planned for them."""


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Bytes that were written at an offset."""

    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        """Makes the change."""
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def tear(self, random: Random) -> "FileWrite":
        """The part before or after a sector boundary inside the write; all of it if there is no such boundary."""
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
    """A new size."""

    size: int

    def apply(self, content: bytearray) -> None:
        """Makes the change."""
        del content[self.size :]
        content.extend(bytes(self.size - len(content)))

    def tear(self, random: Random) -> "FileTruncate":  # noqa: ARG002
        """A size is changed or it is not."""
        return self


class File:
    """What reads see, what is durable, and in order the changes between the two."""

    def __init__(self, durable: bytes | None = None) -> None:
        self.durable = bytearray(durable or b"")
        self.content = bytearray(self.durable)
        self.pending: list[FileWrite | FileTruncate] = []
        self.is_name_durable = durable is not None
        self.locks: dict[object, int] = {}

    def change(self, change: FileWrite | FileTruncate) -> None:
        """Reads see it at once; it is durable with the next sync."""
        change.apply(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        """All that is pending is durable."""
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()
        self.is_name_durable = True

    def drop_pending(self) -> None:
        """What is pending stays readable and is never written, as after a sync that failed on Linux."""
        self.pending.clear()

    def build_after_power_loss(self, random: Random | None) -> "File | None":
        """The file as it is found when the power is back; None if not even its name has survived."""
        if random is None:
            return File(bytes(self.durable)) if self.is_name_durable else None
        survives = self.is_name_durable or random.random() < 0.5
        share = random.choice(_SURVIVAL_RATES)
        for change in self.pending:
            if random.random() < share:
                (change.tear(random) if random.random() < 0.5 else change).apply(self.durable)
        return File(bytes(self.durable)) if survives else None


class Directory:
    """Files by name, and those whose deletion is pending."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self._deleted: dict[str, File] = {}

    def get_file(self, name: str, *, create: bool) -> File:
        """The file of a name."""
        if name not in self.files:
            if not create:
                raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
            self.files[name] = File()
        return self.files[name]

    def has_content(self, name: str) -> bool:
        """Whether there is such a file. SQLite's own disk on Linux, too, says no where it is empty."""
        return name in self.files and bool(self.files[name].content)

    def sync(self, file: File) -> None:
        """With the first sync of a new file the directory is synced, as SQLite does it for journals."""
        if not file.is_name_durable:
            self._deleted.clear()
        file.sync()

    def delete(self, name: str, *, is_durable: bool) -> None:
        """Takes the name away."""
        if name not in self.files:
            raise apsw.exception_for(apsw.SQLITE_IOERR_DELETE_NOENT)
        file = self.files.pop(name)
        if is_durable:
            self._deleted.clear()
        elif file.is_name_durable:
            self._deleted[name] = file

    def lose_power(self, random: Random | None) -> None:
        """Leaves what has survived."""
        survivors = {name: file.build_after_power_loss(random) for name, file in self.files.items()}
        for name, file in self._deleted.items():
            # A name can stand for only one file: a new one that survives has replaced the deleted one.
            if survivors.get(name) is None and (random is None or random.random() < 0.5):
                survivors[name] = file.build_after_power_loss(random)
        self.files = {name: file for name, file in survivors.items() if file is not None}
        self._deleted.clear()


class Closable(Protocol):
    """A connection, as the drive knows it."""

    def close(self) -> None:
        """Closes it."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The operation that will fail, by its number since the disk was made, and whether all after it fail too."""

    number: int
    is_sticky: bool

    def matches(self, number: int) -> bool:
        """Whether the operation of this number fails."""
        return number == self.number or (self.is_sticky and number > self.number)


class Drive:
    """The inside of a disk: every operation of SQLite comes by here, is counted, and fails if that is planned."""

    def __init__(self, *, forgets_failed_syncs: bool = False) -> None:
        self.forgets_failed_syncs = forgets_failed_syncs
        self.directory = Directory()
        self.connections: set[Closable] = set()
        self.is_on = True
        self.power_cycle = 0
        self.sync_event: tuple[int, Callable[[], None]] | None = None
        """At which sync what happens to the whole machine, or to the process."""
        self.plans: dict[Fault, FaultPlan] = {}
        self.counts = dict.fromkeys(Fault, 0)
        self.syncs = 0
        # The power may be lost in one thread while a connection works in another.
        self.lock = RLock()

    def is_alive(self, power_cycle: int) -> bool:
        """Whether what was opened in that power cycle can still reach the disk."""
        return self.is_on and power_cycle == self.power_cycle

    def cut_power(self, seed: int | None) -> None:
        """Loses the power; it stays off."""
        self.directory.lose_power(None if seed is None else Random(seed))  # noqa: S311  it must be repeatable
        self.power_cycle += 1
        self.is_on = False

    def kill(self) -> None:
        """Ends the process: its connections are dead, its locks are gone, and what it has written stays as it is."""
        for file in self.directory.files.values():
            file.locks.clear()
        self.power_cycle += 1
        self.is_on = False

    @contextmanager
    def run_operation(self, power_cycle: int, operation: Operation, *, allocates: bool = False) -> Iterator[None]:
        """Counts the operation and lets it happen, or fails it."""
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
