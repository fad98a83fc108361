"""Inspection of a log in an SQLite file, for the command line."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from oncelog.core.internal_records import count_missing_numbers
from oncelog.core.read_set import ReadSet
from oncelog.core.values import KeyIdentity
from oncelog.errors import NotALogError, StoreError, StoreUnavailableError
from oncelog.storage.clock import ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus, LogView, RowTuple
from oncelog.storage.metadata import (
    NO_GAPS,
    EpochRenewal,
    LogMetadata,
    Operator,
    ReplacedLog,
)
from oncelog.storage.queries.records import load_gaps
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.sqlite.database_file import connect
from oncelog.storage.sqlite.key_index.index import KeyIndex, LaneIndexState
from oncelog.storage.sqlite.key_index.segments import count_sealed_keys, load_progress
from oncelog.storage.sqlite.moved_marker import MOVED_SCHEMA_VERSION, check_not_moved
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import ExistingFileDriver, open_read_transaction, translate_read_errors
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.transaction import TransactionOptions, load_key_status, load_remembered
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import KeyStatus

T = TypeVar("T")


class FileView(LogView):
    """See `LogView` for the contract of each method."""

    def __init__(self, connection: Any, path: str, metadata: LogMetadata) -> None:
        self.connection = connection
        self._path = Path(path).absolute()
        self.directory = str(self._path.parent)
        self.metadata = metadata

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """See `LogView`."""
        return run_query(self.connection, query, *arguments)

    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[RowTuple]:
        """See `LogView`."""
        return iter(self.connection.execute(SQL[statement], parameters))

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """See `LogView`."""
        return load_key_status(self.connection, self._index, identity, self.metadata.settings.lanes)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """See `LogView`."""
        hashes = self._index.hash_identities(identities)
        places = self._index.find_places(self.connection, set(hashes.values())).values()
        stored, _ = load_remembered(self.connection, set(chain(*places)), ReadSet(keys=set(identities)))
        return [identity for identity in identities if identity in stored]

    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """See `LogView`."""
        newest = self.estimate_records()
        wanted = json.dumps([key.hex().upper() for key in keys])
        for first in range(0, newest, SCAN_PAGE_RECORDS):
            last = min(first + SCAN_PAGE_RECORDS, newest)
            yield last - first, list(self.iterate_rows("records_of_keys", first, last, wanted))

    def get_clock_status(self) -> ClockStatus:
        """See `LogView`."""
        [(_, _, *columns)] = self.iterate_rows("state")
        mark = ClockMark(*columns)
        blind_reason = "the machine has been restarted since"
        return ClockStatus(ClockMark.read(SystemClock()), "wall clock", mark, mark.time_ms, blind_reason)

    def get_sizes(self) -> dict[str, Any]:
        """See `LogView`."""
        # The figures come from the progress that the index has saved. The index itself would hash all unsealed keys.
        lanes = load_lane_index_states(self.connection)
        segments, jobs = load_progress(self.connection, sum(lane.position for lane in lanes.values()))
        gaps = self.run_query(load_gaps)
        levels = Counter(segment.level for segment in segments)
        # Read the size before closing the connection: the last connection to close empties the write-ahead log.
        try:
            size = self._path.stat().st_size
            wal = Path(f"{self._path}-wal")
            wal_size = wal.stat().st_size if wal.exists() else 0
        except OSError as error:
            raise StoreUnavailableError(f"the size of {self._path} cannot be read: {error.strerror}") from error
        return {
            "keys": {
                "hot": sum(
                    lane.position
                    - lane.sealed_position
                    - count_missing_numbers(gaps.get(number, NO_GAPS).positions, lane.sealed_position, lane.position)
                    for number, lane in lanes.items()
                ),
                "sealed": count_sealed_keys(segments, jobs.values()),
                "segments": {str(level): levels[level] for level in sorted(levels)},
            },
            "bytes": size,
            "wal_bytes": wal_size,
        }

    @cached_property
    def _index(self) -> KeyIndex:
        index = KeyIndex(self.metadata.index_secret)
        [(commits, *_)] = self.iterate_rows("state")
        index.catch_up(self.connection, commits, load_lane_index_states(self.connection))
        return index


def load_lane_index_states(connection: Any) -> dict[int, LaneIndexState]:
    """Return the progress of the key index in each lane of a file."""
    rows = connection.execute(SQL["lanes"]).fetchall()
    return {row[0]: LaneIndexState(row[1], row[8], row[9]) for row in rows}


class FileInspector:
    """See `Inspector` for the contract of each method."""

    def __init__(self, path: str, *, is_open_here: bool = False) -> None:
        """Set `is_open_here` if this process has the log open (see `ExistingFileDriver`)."""
        self._path = path
        self._is_open_here = is_open_here

    @contextmanager
    def open_view(self) -> Iterator[FileView]:
        """See `Inspector`."""
        with open_read_transaction(self._path, is_open_here=self._is_open_here) as (connection, metadata):
            yield FileView(connection, self._path, metadata)

    def confirm_clock(self) -> None:
        """See `Inspector`."""
        with _open_writer(self._path) as writer:
            writer.confirm_clock()

    def renew_epoch(self, above: int | None = None, operator: Operator = Operator()) -> EpochRenewal:
        """See `Inspector`. Raises StoreError if the log is open elsewhere, or MovedError."""
        # `renew_epoch` migrates an older schema itself, because no server may open the log before the leap.
        with open_read_transaction(self._path, allow_older=True) as (connection, metadata):
            if metadata.schema_version >= MOVED_SCHEMA_VERSION:
                check_not_moved(connection)
        with translate_read_errors(self._path):
            checkpoint_and_close(Path(self._path))
        return renew_epoch(self._path, above, operator=operator)


def renew_epoch(
    path: str, above: int | None, replaced: ReplacedLog = ReplacedLog(), operator: Operator = Operator()
) -> EpochRenewal:
    """Start a new history of a log that no process has open (see `Store.renew_epoch` and `build_leap_request`)."""
    with _open_writer(path) as writer:
        return writer.renew_epoch(above, replaced, operator)


def checkpoint_and_close(path: Path) -> None:
    """Move the write-ahead log into the file. Raises StoreError if another process has the file open."""
    driver = ExistingFileDriver(query_only=False)
    try:
        driver.check(str(path))
        with closing(connect(driver, str(path))) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except (NotALogError, sqlite3.DatabaseError, UnicodeError):
        return  # too damaged to read; a restore moves the file with its side files
    if Path(f"{path}-wal").exists():  # closing the last connection deletes the -wal
        raise StoreError(f"{path} is open in another process. Stop the programs that use it first.")


@contextmanager
def _open_writer(path: str) -> Iterator[Writer]:
    writer = Writer(path, ExistingFileDriver(query_only=False), TransactionOptions(SystemClock()))
    with closing(writer):
        writer.open(None)
        yield writer
