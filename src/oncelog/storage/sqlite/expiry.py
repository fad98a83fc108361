"""Deletes expired rows from the file: a slice in some of the commits, as many rows as are being written."""

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
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.sqlite.side_state_tables import DELETE_SQL
from oncelog.storage.sqlite.statements import SQL


class ExpirySweep:
    """Goes through the tables again and again. Where it stands is in memory alone: it may begin anew at any time."""

    def __init__(self) -> None:
        self._cursors: dict[str, tuple[Any, ...]] = {}
        self._rows_written = dict.fromkeys((table.name for table in EXPIRING_TABLES), 0)

    def __call__(self, connection: Any, commits: int, heads: Mapping[int, LaneHead], changes: Changes) -> int:
        """In a commit's transaction, by the heads from before it and the number of commits there have been.

        Returns how many entries of clients it deleted.
        """
        for name in self._rows_written:
            self._rows_written[name] += len(getattr(changes, name))
        if commits % EXPIRY_INTERVAL_COMMITS:
            return 0
        clients = 0
        is_absent = ExpiryCheck(connection.execute(SQL["policies"]).fetchall(), heads)
        for table in EXPIRING_TABLES:
            deleted = self._expire_rows(
                connection, table, max(EXPIRY_BATCH_ROWS, 2 * self._rows_written[table.name]), is_absent
            )
            clients += deleted if table.name == CLIENTS_TABLE else 0
            self._rows_written[table.name] = 0
        return clients

    def _expire_rows(self, connection: Any, table: SideStateTable, rows_max: int, is_expired: ExpiryCheck) -> int:
        keys = ("lane", *table.keys)
        columns = ", ".join((*keys, *table.values))
        after = self._cursors.get(table.name)
        where = f"WHERE ({', '.join(keys)}) > ({', '.join('?' * len(keys))})" if after else ""
        statement = f"SELECT {columns} FROM oncelog_{table.name} {where} ORDER BY {', '.join(keys)} LIMIT ?"  # noqa: S608
        rows = connection.execute(statement, (*(after or ()), rows_max)).fetchall()
        width = len(keys)
        absent = [row[:width] for row in rows if is_expired(row[:width], table.decode_value(row[width:]))]
        if absent:
            connection.executemany(DELETE_SQL[table.name], absent)
        self._cursors[table.name] = rows[-1][:width] if len(rows) == rows_max else ()
        return len(absent)
