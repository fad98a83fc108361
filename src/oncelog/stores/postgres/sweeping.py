"""What log time has made absent goes from the database: a slice in some of the commits, of a lane that they hold."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from oncelog.core.values import Changes, LaneHead
from oncelog.stores.absence import SWEEP_COMMITS, SWEEP_ROWS, SWEPT, Absence
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.tables import DELETE, columns_of
from oncelog.stores.side_state import Table


class Sweep:
    """Goes through the tables again and again. Where it stands is in memory alone: it may begin anew at any time."""

    def __init__(self) -> None:
        self._commits: Counter[int] = Counter()
        """Of each lane."""
        self._cursors: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._written = dict.fromkeys((table.name for table in SWEPT), 0)

    async def __call__(self, connection: Any, heads: Mapping[int, LaneHead], changes: Changes) -> None:
        """In a commit's transaction, by the heads that it has locked as they were before it."""
        for table in SWEPT:
            self._written[table.name] += len(getattr(changes, table.name))
        self._commits.update(heads.keys())
        lane = max(heads, key=self._commits.__getitem__)
        if self._commits[lane] < SWEEP_COMMITS:
            return
        self._commits[lane] = 0
        is_absent = Absence([tuple(row) for row in await connection.fetch(SQL["policies"])], heads)
        for table in SWEPT:
            await self._sweep(connection, table, lane, max(SWEEP_ROWS, 2 * self._written[table.name]), is_absent)
            self._written[table.name] = 0

    async def _sweep(self, connection: Any, table: Table, lane: int, rows_max: int, is_absent: Absence) -> None:
        after = self._cursors.get((table.name, lane))
        statement = slice_of(table, is_first=not after)
        rows = [tuple(row) for row in await connection.fetch(statement, lane, rows_max, *(after or ()))]
        width = 1 + len(table.keys)
        absent = [row[:width] for row in rows if is_absent(row[:width], table.value_of(row[width:]))]
        if absent:
            await connection.execute(DELETE[table.name], *columns_of(absent))
        self._cursors[table.name, lane] = rows[-1][1:width] if len(rows) == rows_max else ()


def slice_of(table: Table, *, is_first: bool) -> str:
    """The statement that gives the next rows of a lane: the first ones, or those after a key."""
    keys = ", ".join(table.keys)
    marks = ", ".join(f"${place}" for place in range(3, 3 + len(table.keys)))
    where = "" if is_first else f"AND ({keys}) > ({marks})"
    columns = ", ".join(("lane", *table.keys, *table.values))
    return f"SELECT {columns} FROM oncelog_{table.name} WHERE lane = $1 {where} ORDER BY {keys} LIMIT $2"  # noqa: S608
