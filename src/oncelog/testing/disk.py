"""A simulated disk for SQLite, wholly in memory, that loses power and fails where a test wants it to.

    with Disk() as disk:
        connection = disk.connect("log.db")
        connection.execute("PRAGMA journal_mode=WAL")
        ...
        disk.lose_power(seed=7)
        connection = disk.connect("log.db")  # on what has survived

What is written can be read at once and is pending until its file is synced. Losing power drops what is pending or, with
a seed, keeps some of it, some of that torn between two sectors. Of the directory the disk keeps this much:

- The name of a new file is durable once the file was synced for the first time.
- A deletion is durable at once where SQLite asks for the directory to be synced, else from the next first sync of a
  new file in it. Until then losing power can bring the deleted file back, as it was synced.

A write that fails has written nothing, and a sync that fails leaves pending what was pending; with
`Disk(forgets_failed_syncs=True)` it is never written, though it can be read, as on Linux. All of it follows from the
seeds, but for the salts that SQLite draws for its journals: they change bytes, never the order of operations.

A store opens its file on it with a `DiskDriver`.

Needs the extra `oncelog[testing]`.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.storage.sqlite.database_file import HEADER_BYTES, check_header
from oncelog.testing.disk_connection import DEFAULT_CHECKPOINT_PAGES, DiskConnection, DiskCursor, Parameters, Row, Value
from oncelog.testing.disk_files import SECTOR_BYTES, Drive, Fault, FaultPlan, File

__all__ = [
    "DEFAULT_CHECKPOINT_PAGES",
    "SECTOR_BYTES",
    "Disk",
    "DiskConnection",
    "DiskCursor",
    "DiskDriver",
    "Fault",
    "Parameters",
    "Row",
    "Value",
]


class Disk:
    """Files by name, that SQLite reads and writes through `connect`. Close it, or use it as a context manager.

    The counters start with the disk and count failed operations too, but not what dead connections try. A test that
    wants every failure of some work does it once to see how far the counter goes, then once a number on new disks.
    """

    def __init__(self, *, forgets_failed_syncs: bool = False) -> None:
        self._drive = Drive(forgets_failed_syncs=forgets_failed_syncs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections that are still open, dead ones too, and takes the disk away from SQLite."""
        for connection in list(self._drive.connections):
            connection.close()

    @property
    def is_on(self) -> bool:
        """Whether there is power."""
        return self._drive.is_on

    @property
    def operations(self) -> int:
        """How many operations there were that can fail with `Fault.IO_ERROR`."""
        return self._drive.counts[Fault.IO_ERROR]

    @property
    def allocations(self) -> int:
        """How many operations there were that can fail with `Fault.FULL`."""
        return self._drive.counts[Fault.FULL]

    @property
    def syncs(self) -> int:
        """How many syncs there were."""
        return self._drive.syncs

    def count(self, fault: Fault) -> int:
        """How many operations there were that can fail so: `operations` or `allocations`."""
        return self._drive.counts[fault]

    def connect(self, name: str) -> DiskConnection:
        """Opens the database `name`, made when it is not there. Names are flat.

        Two connections to one database exclude each other for as long as the first is open and has read or written:
        its lock is not given back, because memory that connections share is not simulated.
        """
        if not name or "/" in name:
            raise ValueError(f"names on the disk are flat, got {name!r}")
        return DiskConnection(name, self._drive)

    def lose_power(self, seed: int | None = None) -> None:
        """Loses the power and turns it on again. Every connection is dead then, and new ones can be opened.

        All that was pending is lost or, with a seed, survives in part: some writes, and parts of some.
        """
        with self._drive.lock:
            self._drive.cut_power(seed)
            self.power_on()

    def lose_power_at_sync(self, number: int, seed: int | None = None) -> None:
        """Plans to lose power immediately before a sync takes effect: the next one is number 1.

        The power stays off until `power_on`, so that what is under test cannot open new connections by itself.
        """
        self._drive.sync_event = (self.syncs + _check_number(number), lambda: self._drive.cut_power(seed))

    def kill(self) -> None:
        """Ends the process that has the connections, as SIGKILL does: they are dead, and new ones can be opened.

        Nothing is lost that it has written, but what was pending stays pending.
        """
        with self._drive.lock:
            self._drive.kill()
            self.power_on()

    def kill_at_sync(self, number: int) -> None:
        """Plans to end the process immediately before a sync takes effect, as `lose_power_at_sync` loses the power."""
        self._drive.sync_event = (self.syncs + _check_number(number), self._drive.kill)

    def power_on(self) -> None:
        """Turns the power on, and forgets what was planned for a sync. Connections of before stay dead."""
        self._drive.sync_event = None
        self._drive.is_on = True

    def fail_at(self, number: int, fault: Fault, *, sticky: bool = False) -> None:
        """Plans a fault: the next operation that can fail so is number 1. Replaces a plan for the same fault.

        A sticky fault stays: every operation that can fail so does, until `repair`.
        """
        self._drive.plans[fault] = FaultPlan(self.count(fault) + _check_number(number), sticky)

    def repair(self) -> None:
        """Forgets all faults, those planned and those that stay."""
        self._drive.plans.clear()

    def head(self, name: str, size: int) -> bytes | None:
        """The first bytes of a file as they read now; None if there is no such file."""
        file = self._drive.directory.files.get(name)
        return None if file is None else bytes(file.content[:size])

    def copy_to(self, directory: Path) -> None:
        """Writes all files as they read now into a real directory, where any SQLite can open them."""
        with self._drive.lock:
            for name, file in self._drive.directory.files.items():
                (directory / name).write_bytes(file.content)

    def load(self, path: Path) -> None:
        """Takes in a real database that nothing has open, with its journals; all of it durable, under its own name."""
        files = self._drive.directory.files
        with self._drive.lock:
            for suffix in ("", "-wal", "-journal"):
                source = path.with_name(path.name + suffix)
                files.pop(source.name, None)
                if source.exists():
                    files[source.name] = File(source.read_bytes())


class DiskDriver:
    """For `SqliteStore(name, driver=DiskDriver(disk))`: a log on a simulated disk."""

    is_shared = False

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.free: int | None = None
        """What is said to be free."""

    def get_free_bytes(self, path: str) -> int | None:  # noqa: ARG002 - there is one disk
        """As `Driver` says: what the test says."""
        return self.free

    def check(self, path: str) -> None:
        """As the driver of real files does."""
        header = self._disk.head(path, HEADER_BYTES)
        if header:
            check_header(path, header, self._disk.head(f"{path}-journal", HEADER_BYTES) or b"")

    def create(self, path: str) -> None:
        """Do nothing: files of this disk have no modes."""

    def get_file_id(self, path: str) -> object:  # noqa: ARG002 - nobody removes files from this disk
        """As `Driver` says."""
        return self._disk

    def connect(self, path: str) -> DiskConnection:
        """A connection through the disk."""
        return self._disk.connect(path)


def _check_number(number: int) -> int:
    if number < 1:
        raise ValueError(f"the next operation is number 1, got {number}")
    return number
