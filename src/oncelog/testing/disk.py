"""A simulated in-memory disk for SQLite, which loses power and fails operations when a test requests it.

    with Disk() as disk:
        connection = disk.connect("log.db")
        connection.execute("PRAGMA journal_mode=WAL")
        ...
        disk.lose_power(seed=7)
        connection = disk.connect("log.db")  # with the data that survived

Written data is readable immediately, but pending until its file is synced. A power loss drops pending data or, with a
seed, keeps some of it, partly torn between two sectors. The disk models the directory as follows:

- The name of a new file is durable after the first sync of the file.
- A deletion is durable immediately if SQLite syncs the directory, otherwise once a new file in it is synced for the
  first time. Until then, a power loss can restore the deleted file in its synced state.

A failed write writes nothing, and a failed sync leaves pending data pending. With `Disk(forgets_failed_syncs=True)`,
this data remains readable but is never written, as on Linux. The seeds determine the behaviour, except for the random
salts in SQLite's journals, which change bytes but never the order of operations.

A store opens its file on the disk with a `DiskDriver`.

Needs the extra `oncelog[testing]`.
"""

from pathlib import Path
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
    """A simulated disk with named files, for SQLite connections. Close it, or use it as a context manager.

    Counters start when the disk is created. They include failed operations, but not operations of dead connections. To
    test every possible failure of an action, run the action once to find the final count, then repeat it on a new disk
    for each number.
    """

    def __init__(self, *, forgets_failed_syncs: bool = False) -> None:
        self._drive = Drive(forgets_failed_syncs=forgets_failed_syncs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open connections, including dead ones, and unregister the disk from SQLite."""
        for connection in list(self._drive.connections):
            connection.close()

    @property
    def is_on(self) -> bool:
        """Return whether the disk has power."""
        return self._drive.is_on

    @property
    def operations(self) -> int:
        """Return how many operations so far could have failed with `Fault.IO_ERROR`."""
        return self._drive.counts[Fault.IO_ERROR]

    @property
    def allocations(self) -> int:
        """Return how many operations so far could have failed with `Fault.FULL`."""
        return self._drive.counts[Fault.FULL]

    @property
    def syncs(self) -> int:
        """Return the number of syncs so far."""
        return self._drive.syncs

    def count(self, fault: Fault) -> int:
        """Return how many operations could have failed with a fault: `operations` or `allocations`."""
        return self._drive.counts[fault]

    def connect(self, name: str) -> DiskConnection:
        """Open a database, creating it if it does not exist. Names have no directories.

        From its first read or write until it is closed, a connection locks out other connections to the database,
        because shared memory is not simulated.
        """
        if not name or "/" in name:
            raise ValueError(f"a file name on the simulated disk must not contain a directory, got {name!r}")
        return DiskConnection(name, self._drive)

    def lose_power(self, seed: int | None = None) -> None:
        """Lose power and turn it on again. All connections are then dead, but new ones can be opened.

        Pending data is lost or, with a seed, survives in part: some writes, and parts of some writes.
        """
        with self._drive.lock:
            self._drive.cut_power(seed)
            self.power_on()

    def lose_power_at_sync(self, number: int, seed: int | None = None) -> None:
        """Lose power immediately before a sync takes effect. The next sync is number 1.

        The power remains off until `power_on`, so that the tested code cannot open new connections.
        """
        self._drive.sync_event = (self.syncs + _check_number(number), lambda: self._drive.cut_power(seed))

    def kill(self) -> None:
        """Kill the process that owns the connections, as SIGKILL does. They are then dead, but new ones can be opened.

        The data it has written is kept, and pending data remains pending.
        """
        with self._drive.lock:
            self._drive.kill()
            self.power_on()

    def kill_at_sync(self, number: int) -> None:
        """Kill the process immediately before a sync takes effect. The next sync is number 1."""
        self._drive.sync_event = (self.syncs + _check_number(number), self._drive.kill)

    def power_on(self) -> None:
        """Turn the power on and cancel a planned event at a sync. Old connections remain dead."""
        self._drive.sync_event = None
        self._drive.is_on = True

    def fail_at(self, number: int, fault: Fault, *, sticky: bool = False) -> None:
        """Plan a fault. The next operation that can fail in this way is number 1. Replaces an earlier plan for the same
        fault.

        With `sticky`, all later operations of this kind fail too, until `repair`.
        """
        self._drive.plans[fault] = FaultPlan(self.count(fault) + _check_number(number), sticky)

    def repair(self) -> None:
        """Cancel all planned and sticky faults."""
        self._drive.plans.clear()

    def head(self, name: str, size: int) -> bytes | None:
        """Return the first bytes of a file as a read sees them, or None if the file does not exist."""
        file = self._drive.directory.files.get(name)
        return None if file is None else bytes(file.content[:size])

    def copy_to(self, directory: Path) -> None:
        """Write all files, as a read sees them, to a real directory, where other SQLite libraries can open them."""
        with self._drive.lock:
            for name, file in self._drive.directory.files.items():
                (directory / name).write_bytes(file.content)

    def load(self, path: Path) -> None:
        """Load a real database, which must be closed, with its journals.

        All of its data becomes durable under the same name.
        """
        files = self._drive.directory.files
        with self._drive.lock:
            for suffix in ("", "-wal", "-journal"):
                source = path.with_name(path.name + suffix)
                files.pop(source.name, None)
                if source.exists():
                    files[source.name] = File(source.read_bytes())


class DiskDriver:
    """Driver for a log on a simulated disk: `SqliteStore(name, driver=DiskDriver(disk))`."""

    is_shared = False

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.free: int | None = None
        """Free bytes to report, or None for unknown."""

    def get_free_bytes(self, path: str) -> int | None:  # noqa: ARG002 - there is one disk
        """Return the free bytes that the test has set."""
        return self.free

    def check(self, path: str) -> None:
        """Check the path as the driver for real files does."""
        header = self._disk.head(path, HEADER_BYTES)
        if header:
            check_header(path, header, self._disk.head(f"{path}-journal", HEADER_BYTES) or b"")

    def create(self, path: str) -> None:
        """Do nothing, because files on this disk have no modes."""

    def get_file_id(self, path: str) -> object:  # noqa: ARG002 - files are never removed from this disk
        """Return the identity of the disk."""
        return self._disk

    def connect(self, path: str) -> DiskConnection:
        """Connect through the disk."""
        return self._disk.connect(path)


def _check_number(number: int) -> int:
    if number < 1:
        raise ValueError(f"the next operation is number 1, got {number}")
    return number
