"""Inspection of a log in an SQLite file, for the command line."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from oncelog.core.values import KeyIdentity
from oncelog.storage.backups import checkpoint_and_close, renew_epoch
from oncelog.storage.clock import JUMP_MS_MAX, ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus, LogView, select_stored_keys
from oncelog.storage.leaps import NO_OPERATOR, EpochRenewal, Operator
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.sqlite.key_index.index import KeyIndex, LaneIndexState
from oncelog.storage.sqlite.moved_marker import MOVED_SCHEMA_VERSION, check_not_moved
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.read_transaction import ExistingFileDriver, open_read_transaction, to_store_error
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.transaction import load_key_status
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import KeyStatus
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, ExportedHead, Finding, VerifyOptions
from oncelog.storage.verify.sqlite import verify_file

T = TypeVar("T")


class FileView(LogView):
    """See `LogView` for what each method promises."""

    def __init__(self, connection: Any, path: str, metadata: LogMetadata) -> None:
        self._connection = connection
        self._path = path
        self.metadata = metadata
        self._commits, _, *mark = connection.execute(SQL["state"]).fetchone()
        self._mark = ClockMark(*mark)

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """As `LogView` says."""
        return run_query(self._connection, query, *arguments)

    def iterate_rows(self, statement: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        """As `LogView` says."""
        return iter(self._connection.execute(SQL[statement], parameters))

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """As `LogView` says."""
        return load_key_status(self._connection, self._index, identity, self.metadata.settings.lanes)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `LogView` says."""
        hashes = self._index.hash_identities(identities)
        places = self._index.find_places(self._connection, set(hashes.values())).values()
        return select_stored_keys(identities, self.iterate_rows("remembered", str(sorted(set(chain(*places))))))

    def estimate_records(self) -> int:
        """As `LogView` says. Rows are numbered from 1 on, in the order of their commits, and stay."""
        return int(self._connection.execute(SQL["newest_id"]).fetchone()[0])

    def scan_records(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """As `LogView` says."""
        newest = self.estimate_records()
        wanted = json.dumps([key.hex().upper() for key in keys])
        for first in range(0, newest, SCAN_PAGE_RECORDS):
            last = min(first + SCAN_PAGE_RECORDS, newest)
            rows = self._connection.execute(SQL["records_of_keys"], (first, last, wanted)).fetchall()
            yield last - first, [(policy, scope, client, key) for policy, scope, client, key in rows]

    def get_clock_status(self) -> ClockStatus:
        """As `LogView` says."""
        blindness = "the machine has been restarted since"
        return ClockStatus(SystemClock(), "wall clock", self._mark, self._mark.time_ms, blindness)

    def get_sizes(self) -> dict[str, Any]:
        """As `LogView` says."""
        levels = Counter(segment.level for segment in self._index.segments)
        # Before the connection is closed: the last one out empties the write-ahead log.
        wal = Path(f"{self._path}-wal")
        return {
            "keys": {
                "hot": self._index.memtable_keys,
                "sealed": self._index.segment_keys,
                "segments": {str(level): levels[level] for level in sorted(levels)},
            },
            "bytes": Path(self._path).stat().st_size,
            "wal_bytes": wal.stat().st_size if wal.exists() else 0,
        }

    @cached_property
    def _index(self) -> KeyIndex:
        index = KeyIndex(self.metadata.index_secret)
        lanes = {
            row[0]: LaneIndexState(row[1], row[8], row[9]) for row in self._connection.execute(SQL["lanes"]).fetchall()
        }
        index.catch_up(self._connection, self._commits, lanes)
        return index


class FileInspector:
    """See `Inspector` for what each method promises."""

    def __init__(self, path: str) -> None:
        self._path = path

    @contextmanager
    def open_view(self) -> Iterator[FileView]:
        """As `Inspector` says."""
        with open_read_transaction(self._path) as (connection, metadata):
            yield FileView(connection, self._path, metadata)

    def verify(self, head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS) -> Iterator[Finding]:
        """As `Inspector` says."""
        return verify_file(self._path, head, options)

    def confirm_clock(self) -> None:
        """As `Inspector` says."""
        session = Writer(self._path, ExistingFileDriver(query_only=False), SystemClock(), bytes, JUMP_MS_MAX)
        try:
            session.open(None)
            session.confirm_clock()
        finally:
            session.close()

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> EpochRenewal:
        """As `Inspector` says. Raises StoreError for a log that is open elsewhere, and MovedError."""
        # An older schema is migrated by `renew`: a server must not open the log before its numbers leap.
        with open_read_transaction(self._path, allow_older=True) as (connection, metadata):
            if metadata.schema_version >= MOVED_SCHEMA_VERSION:
                check_not_moved(connection)
        try:
            checkpoint_and_close(Path(self._path))
        except sqlite3.Error as error:
            raise to_store_error(error, self._path) from error
        return renew_epoch(self._path, above, operator=operator)
