"""What log time has made absent goes from the disk: a slice in some of the commits, as much as is being written."""

from collections.abc import Mapping
from typing import Any

from oncelog.core.values import Changes, LaneHead
from oncelog.stores.absence import CLIENTS, SWEEP_COMMITS, SWEEP_ROWS, SWEPT, Absence
from oncelog.stores.side_state import Table
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.tables import DELETE


class Sweep:
    """Goes through the tables again and again. Where it stands is in memory alone: it may begin anew at any time."""

    def __init__(self) -> None:
        self._cursors: dict[str, tuple[Any, ...]] = {}
        self._written = dict.fromkeys((table.name for table in SWEPT), 0)

    def __call__(self, connection: Any, commits: int, heads: Mapping[int, LaneHead], changes: Changes) -> int:
        """In a commit's transaction, by the heads from before it and the number of commits there have been.

        Returns how many entries of clients it deleted.
        """
        for name in self._written:
            self._written[name] += len(getattr(changes, name))
        if commits % SWEEP_COMMITS:
            return 0
        clients = 0
        is_absent = Absence(connection.execute(SQL["policies"]).fetchall(), heads)
        for table in SWEPT:
            deleted = self._sweep(connection, table, max(SWEEP_ROWS, 2 * self._written[table.name]), is_absent)
            clients += deleted if table.name == CLIENTS else 0
            self._written[table.name] = 0
        return clients

    def _sweep(self, connection: Any, table: Table, rows_max: int, is_absent: Absence) -> int:
        keys = ("lane", *table.keys)
        columns = ", ".join((*keys, *table.values))
        after = self._cursors.get(table.name)
        where = f"WHERE ({', '.join(keys)}) > ({', '.join('?' * len(keys))})" if after else ""
        statement = f"SELECT {columns} FROM oncelog_{table.name} {where} ORDER BY {', '.join(keys)} LIMIT ?"  # noqa: S608
        rows = connection.execute(statement, (*(after or ()), rows_max)).fetchall()
        width = len(keys)
        absent = [row[:width] for row in rows if is_absent(row[:width], table.value_of(row[width:]))]
        if absent:
            connection.executemany(DELETE[table.name], absent)
        self._cursors[table.name] = rows[-1][:width] if len(rows) == rows_max else ()
        return len(absent)
