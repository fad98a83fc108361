"""Deletes side state that log time has made absent: in some of the commits, as many rows as are being written."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from oncelog.core.values import Changes, LaneHead
from oncelog.storage.expiry import EXPIRING_TABLES, EXPIRY_BATCH_ROWS, EXPIRY_INTERVAL_COMMITS, ExpiryCheck
from oncelog.storage.queries.statement import DeleteRows, QuerySteps, Statement, TableSlice
from oncelog.storage.side_state import CLIENTS


class ExpirySweep:
    """Goes through the tables again and again. Its progress is in memory only: it may start again at any time."""

    def __init__(self) -> None:
        self._commits: Counter[int] = Counter()
        """Of each lane since it was swept."""
        self._cursors: dict[tuple[str, int | None], Any] = {}
        """The end of the last slice of each table and lane."""
        self._rows_written = dict.fromkeys((table.name for table in EXPIRING_TABLES), 0)

    def add_commit(self, changes: Changes) -> None:
        """Count the rows that a commit writes."""
        for name in self._rows_written:
            self._rows_written[name] += len(getattr(changes, name))

    def find_due_lane(self, lanes: Mapping[int, LaneHead]) -> int | None:
        """Count a commit in its lanes. Returns the one of them that is due."""
        self._commits.update(lanes.keys())
        lane = max(lanes, key=self._commits.__getitem__)
        if self._commits[lane] < EXPIRY_INTERVAL_COMMITS:
            return None
        self._commits[lane] = 0
        return lane

    def run(self, heads: Mapping[int, LaneHead], lane: int | None = None) -> QuerySteps[int]:
        """Delete expired rows of a slice of each table, in a commit's transaction, by the heads from before it.

        Without a lane the slice is of all lanes. Returns the number of deleted client entries.
        """
        clients = 0
        is_expired = ExpiryCheck((yield Statement("policies")), heads)
        for table in EXPIRING_TABLES:
            rows_max = max(EXPIRY_BATCH_ROWS, 2 * self._rows_written[table.name])
            cursor = self._cursors.get((table.name, lane))
            rows, self._cursors[table.name, lane] = yield TableSlice(table, lane, cursor, rows_max)
            width = 1 + len(table.keys)
            absent = [row[:width] for row in rows if is_expired(row[:width], table.decode_value(row[width:]))]
            yield DeleteRows(table, absent)
            clients += len(absent) if table is CLIENTS else 0
            self._rows_written[table.name] = 0
        return clients
