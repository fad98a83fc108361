"""Inspection of a log in an SQLite file, for the command line."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from oncelog.core.proof import Block
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import KeyIdentity, LaneHead, Record
from oncelog.storage.backups import checkpoint_and_close, renew_epoch
from oncelog.storage.clock import JUMP_MS_MAX, ClockMark, SystemClock
from oncelog.storage.inspect.inspector import SCAN_PAGE_RECORDS, ClockStatus
from oncelog.storage.leaps import NO_OPERATOR, EpochRenewal, LaneGaps, Operator
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.sqlite import record_queries, tenants
from oncelog.storage.sqlite.key_index.index import KeyIndex, LaneIndexState, encode_place
from oncelog.storage.sqlite.key_status import load_key_status
from oncelog.storage.sqlite.moved_marker import MOVED_SCHEMA_VERSION, check_not_moved
from oncelog.storage.sqlite.read_transaction import ExistingFileDriver, open_read_transaction, to_store_error
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.store import Consumer, KeyStatus
from oncelog.storage.verify.findings import DEFAULT_OPTIONS, ExportedHead, Finding, VerifyOptions
from oncelog.storage.verify.sqlite import verify_file


class FileView:
    """See `LogView` for what each method promises."""

    def __init__(self, connection: Any, path: str, metadata: LogMetadata) -> None:
        self._connection = connection
        self._path = path
        self.metadata = metadata
        self._commits, self._erasures, *mark = connection.execute(SQL["state"]).fetchone()
        self._mark = ClockMark(*mark)

    def load_heads(self) -> dict[int, LaneHead]:
        """As `LogView` says."""
        return record_queries.load_heads(self._connection)

    def load_gaps(self) -> dict[int, LaneGaps]:
        """As `LogView` says."""
        return record_queries.load_gaps(self._connection)

    def list_internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `LogView` says."""
        return record_queries.list_internal_records(self._connection, after, limit)

    def count_audit_records(self) -> int:
        """As `LogView` says."""
        return record_queries.count_audit_records(self._connection)

    def list_policies(self) -> list[tuple[str, str]]:
        """As `LogView` says."""
        found: list[tuple[str, str]] = self._connection.execute(SQL["policies"]).fetchall()
        return found

    def list_consumers(self) -> list[Consumer]:
        """As `LogView` says."""
        return record_queries.list_consumers(self._connection, self.metadata.settings.lanes)

    def list_usage(self) -> list[tuple[Tenant, Usage]]:
        """As `LogView` says."""
        return tenants.load_usage(self._connection)

    def count_erasures(self) -> int:
        """As `LogView` says."""
        return int(self._erasures)

    def get_key_status(self, identity: KeyIdentity) -> KeyStatus:
        """As `LogView` says."""
        return load_key_status(self._connection, self._index, identity, self.load_heads(), self.metadata.settings.lanes)

    def find_stored_keys(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `LogView` says."""
        hashes = self._index.hash_identities(identities)
        places = self._index.find_places(self._connection, set(hashes.values())).values()
        rows = self._connection.execute(SQL["remembered"], (str(sorted(set(chain(*places)))),)).fetchall()
        stored = {
            (policy, scope, client if number else "", key) for *_, number, policy, scope, client, key, _, _ in rows
        }
        return [identity for identity in identities if identity in stored]

    def iterate_streams(self) -> Iterator[str]:
        """As `LogView` says."""
        return (scope for (scope,) in self._connection.execute(SQL["scopes"]))

    def iterate_clients(self) -> Iterator[tuple[str, str, str]]:
        """As `LogView` says."""
        return ((policy, scope, client) for policy, scope, client in self._connection.execute(SQL["client_names"]))

    def find_leases(self, key: bytes, limit: int) -> list[KeyIdentity]:
        """As `LogView` says."""
        rows = self._connection.execute(SQL["leases_of_key"], (key.hex(), limit)).fetchall()
        return [(policy, scope, client, key) for policy, scope, client in rows]

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

    def find_record(self, lane: int, position: int) -> Record | None:
        """As `LogView` says."""
        row = self._connection.execute(SQL["records_at"], (f"[{encode_place(lane, position)}]",)).fetchone()
        return None if row is None else record_queries.decode_record(row)

    def find_block(self, lane: int, height: int) -> Block | None:
        """As `LogView` says."""
        row = self._connection.execute(SQL["block"], (lane, height)).fetchone()
        return None if row is None else Block(*row)

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
