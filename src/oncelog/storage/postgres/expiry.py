"""Deletes expired rows from the database: a slice in some of the commits, of a lane that the commit holds."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from oncelog.core.values import Changes, LaneHead
from oncelog.storage.expiry import (
    CLIENTS_TABLE,
    EXPIRING_TABLES,
    EXPIRY_BATCH_ROWS,
    EXPIRY_INTERVAL_COMMITS,
    ExpiryCheck,
)
from oncelog.storage.postgres.side_state_tables import delete_rows
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.side_state import SideStateTable


class ExpirySweep:
    """Goes through the tables again and again. Where it stands is in memory alone: it may begin anew at any time."""

    def __init__(self) -> None:
        self._commits: Counter[int] = Counter()
        """Of each lane."""
        self._cursors: dict[tuple[str, int], tuple[Any, ...] | bytes] = {}
        """The last short key, or the last digest among long keys, of each table and lane."""
        self._rows_written = dict.fromkeys((table.name for table in EXPIRING_TABLES), 0)

    async def __call__(self, connection: Any, heads: Mapping[int, LaneHead], changes: Changes) -> int:
        """In a commit's transaction, by the heads that it has locked as they were before it.

        Returns how many entries of clients it deleted.
        """
        for table in EXPIRING_TABLES:
            self._rows_written[table.name] += len(getattr(changes, table.name))
        self._commits.update(heads.keys())
        lane = max(heads, key=self._commits.__getitem__)
        if self._commits[lane] < EXPIRY_INTERVAL_COMMITS:
            return 0
        clients = 0
        self._commits[lane] = 0
        is_absent = ExpiryCheck([tuple(row) for row in await connection.fetch(SQL["policies"])], heads)
        for table in EXPIRING_TABLES:
            rows_max = max(EXPIRY_BATCH_ROWS, 2 * self._rows_written[table.name])
            deleted = await self._expire_rows(connection, table, lane, rows_max, is_absent)
            clients += deleted if table.name == CLIENTS_TABLE else 0
            self._rows_written[table.name] = 0
        return clients

    async def _expire_rows(
        self, connection: Any, table: SideStateTable, lane: int, rows_max: int, is_expired: ExpiryCheck
    ) -> int:
        first, next_page, long = build_slice_statements(table)
        after = self._cursors.get((table.name, lane))
        is_long = isinstance(after, bytes)
        statement, place = (long, (after,)) if is_long else (next_page, after) if after else (first, ())
        rows = [tuple(row) for row in await connection.fetch(statement, lane, rows_max, *place)]
        width = 1 + len(table.keys)
        absent = [row[:width] for row in rows if is_expired(row[:width], table.decode_value(row[width:-1]))]
        await delete_rows(connection, table, absent)
        if len(rows) == rows_max:
            self._cursors[table.name, lane] = rows[-1][-1] if is_long else rows[-1][1:width]
        else:
            # Short keys, then long ones, then short ones again.
            self._cursors[table.name, lane] = () if is_long else b""
        return len(absent)


def build_slice_statements(table: SideStateTable) -> tuple[str, str, str]:
    """The statements that give the next rows of a lane: the first short keys, those after a key, the long keys.

    Each row ends with its digest, which orders the long keys.
    """
    keys = ", ".join(table.keys)
    marks = ", ".join(f"${place}" for place in range(3, 3 + len(table.keys)))
    columns = ", ".join(("lane", *table.keys, *table.values, "digest"))
    of_lane = f"SELECT {columns} FROM oncelog_{table.name} WHERE lane = $1 AND digest IS"  # noqa: S608
    return (
        f"{of_lane} NULL ORDER BY {keys} LIMIT $2",
        f"{of_lane} NULL AND ({keys}) > ({marks}) ORDER BY {keys} LIMIT $2",
        f"{of_lane} NOT NULL AND digest > $3 ORDER BY digest LIMIT $2",
    )
