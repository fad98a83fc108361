"""Looking at a log in a file, for the command line."""

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
from oncelog.stores.about import About
from oncelog.stores.clock import JUMP_MS_MAX, ClockMark, SystemClock
from oncelog.stores.leaps import NO_OPERATOR, LaneGaps, Operator, Renewed
from oncelog.stores.protocol import Consumer, Standing
from oncelog.stores.sqlite import reading, tenants
from oncelog.stores.sqlite.copying import close_for_good, renew
from oncelog.stores.sqlite.index import KeyIndex, Lane, place_of
from oncelog.stores.sqlite.looking import ExistingFile, in_our_words, looking_at
from oncelog.stores.sqlite.moved import MOVED_SCHEMA, demand_not_moved
from oncelog.stores.sqlite.session import Session
from oncelog.stores.sqlite.standing import standing_of
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.verifying import verify_file
from oncelog.stores.verifying.findings import DEFAULT_OPTIONS, ExportedHead, Finding, Options
from oncelog.stores.viewing import SCAN_PAGE_RECORDS, TimeSeen


class FileView:
    """See `View` for what each method promises."""

    def __init__(self, connection: Any, path: str, about: About) -> None:
        self._connection = connection
        self._path = path
        self.about = about
        self._commits, self._erasures, *mark = connection.execute(SQL["state"]).fetchone()
        self._mark = ClockMark(*mark)

    def heads(self) -> dict[int, LaneHead]:
        """As `View` says."""
        return reading.heads(self._connection)

    def gaps(self) -> dict[int, LaneGaps]:
        """As `View` says."""
        return reading.gaps(self._connection)

    def internal_records(self, after: Mapping[int, int], limit: int) -> list[Record]:
        """As `View` says."""
        return reading.internal_records(self._connection, after, limit)

    def count_audit(self) -> int:
        """As `View` says."""
        return reading.count_audit(self._connection)

    def policies(self) -> list[tuple[str, str]]:
        """As `View` says."""
        found: list[tuple[str, str]] = self._connection.execute(SQL["policies"]).fetchall()
        return found

    def consumers(self) -> list[Consumer]:
        """As `View` says."""
        return reading.consumers(self._connection, self.about.settings.lanes)

    def usage(self) -> list[tuple[Tenant, Usage]]:
        """As `View` says."""
        return tenants.usage(self._connection)

    def erasures(self) -> int:
        """As `View` says."""
        return int(self._erasures)

    def standing(self, identity: KeyIdentity) -> Standing:
        """As `View` says."""
        return standing_of(self._connection, self._index, identity, self.heads(), self.about.settings.lanes)

    def known(self, identities: Sequence[KeyIdentity]) -> list[KeyIdentity]:
        """As `View` says."""
        hashes = self._index.hashes_of(identities)
        places = self._index.find(self._connection, set(hashes.values())).values()
        rows = self._connection.execute(SQL["remembered"], (str(sorted(set(chain(*places)))),)).fetchall()
        stored = {
            (policy, scope, client if number else "", key) for *_, number, policy, scope, client, key, _, _ in rows
        }
        return [one for one in identities if one in stored]

    def streams(self) -> Iterator[str]:
        """As `View` says."""
        return (scope for (scope,) in self._connection.execute(SQL["scopes"]))

    def clients(self) -> Iterator[tuple[str, str, str]]:
        """As `View` says."""
        return ((policy, scope, client) for policy, scope, client in self._connection.execute(SQL["client_names"]))

    def leased(self, key: bytes, limit: int) -> list[KeyIdentity]:
        """As `View` says."""
        rows = self._connection.execute(SQL["leases_of_key"], (key.hex(), limit)).fetchall()
        return [(policy, scope, client, key) for policy, scope, client in rows]

    def record_estimate(self) -> int:
        """As `View` says. Rows are numbered from 1 on, in the order of their commits, and stay."""
        return int(self._connection.execute(SQL["newest_id"]).fetchone()[0])

    def scan(self, keys: Sequence[bytes]) -> Iterator[tuple[int, list[KeyIdentity]]]:
        """As `View` says."""
        newest = self.record_estimate()
        wanted = json.dumps([key.hex().upper() for key in keys])
        for first in range(0, newest, SCAN_PAGE_RECORDS):
            last = min(first + SCAN_PAGE_RECORDS, newest)
            rows = self._connection.execute(SQL["records_of_keys"], (first, last, wanted)).fetchall()
            yield last - first, [(policy, scope, client, key) for policy, scope, client, key in rows]

    def record_at(self, lane: int, position: int) -> Record | None:
        """As `View` says."""
        row = self._connection.execute(SQL["records_at"], (f"[{place_of(lane, position)}]",)).fetchone()
        return None if row is None else reading.record_of(row)

    def block_at(self, lane: int, height: int) -> Block | None:
        """As `View` says."""
        row = self._connection.execute(SQL["block"], (lane, height)).fetchone()
        return None if row is None else Block(*row)

    def time(self) -> TimeSeen:
        """As `View` says."""
        blindness = "the machine has been restarted since"
        return TimeSeen(SystemClock(), "wall clock", self._mark, self._mark.time_ms, blindness)

    def sizes(self) -> dict[str, Any]:
        """As `View` says."""
        levels = Counter(segment.level for segment in self._index.segments)
        # Before the connection is closed: the last one out empties the write-ahead log.
        wal = Path(f"{self._path}-wal")
        return {
            "keys": {
                "hot": self._index.hot_keys,
                "sealed": self._index.sealed_keys,
                "segments": {str(level): levels[level] for level in sorted(levels)},
            },
            "bytes": Path(self._path).stat().st_size,
            "wal_bytes": wal.stat().st_size if wal.exists() else 0,
        }

    @cached_property
    def _index(self) -> KeyIndex:
        index = KeyIndex(self.about.index_secret)
        lanes = {row[0]: Lane(row[1], row[8], row[9]) for row in self._connection.execute(SQL["lanes"]).fetchall()}
        index.catch_up(self._connection, self._commits, lanes)
        return index


class FileInspector:
    """See `Inspector` for what each method promises."""

    def __init__(self, path: str) -> None:
        self._path = path

    @contextmanager
    def looking(self) -> Iterator[FileView]:
        """As `Inspector` says."""
        with looking_at(self._path) as (connection, about):
            yield FileView(connection, self._path, about)

    def verify(self, head: ExportedHead | None = None, options: Options = DEFAULT_OPTIONS) -> Iterator[Finding]:
        """As `Inspector` says."""
        return verify_file(self._path, head, options)

    def confirm_clock(self) -> None:
        """As `Inspector` says."""
        session = Session(self._path, ExistingFile(query_only=False), SystemClock(), bytes, JUMP_MS_MAX)
        try:
            session.open(None)
            session.confirm_clock()
        finally:
            session.close()

    def renew_epoch(self, above: int | None = None, operator: Operator = NO_OPERATOR) -> Renewed:
        """As `Inspector` says. Raises StoreError for a log that is open elsewhere, and MovedError."""
        # An older schema is migrated by `renew`: a server must not open the log before its numbers leap.
        with looking_at(self._path, allow_older=True) as (connection, about):
            if about.schema_version >= MOVED_SCHEMA:
                demand_not_moved(connection)
        try:
            close_for_good(Path(self._path))
        except sqlite3.Error as error:
            raise in_our_words(error, self._path) from error
        return renew(self._path, above, operator=operator)
