"""What log time has made absent goes from the disk: ended leases, forgotten clients, expired entities.

It counts as absent from the moment that the core says so, whether or not its row is there (docs/decisions/0004 and
0005). So the rows can go whenever it suits: a slice in some of the commits, in proportion to what is written.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from oncelog.core.leases import is_forgotten
from oncelog.core.operations import Entity
from oncelog.core.policy import Policy
from oncelog.core.values import ClientEntry, LaneHead, Lease
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.tables import TABLES, Table

SWEEP_COMMITS: Final = 16
"""One commit of so many looks at a slice."""
SWEEP_ROWS: Final = 128
"""Of each table: more than so many commits of one write can have added."""

_POLICY: Final = msgspec.json.Decoder(Policy)
_SWEPT: Final = [table for table in TABLES if table.name in ("leases", "clients", "entities")]


class Sweep:
    """Goes through the tables again and again. Where it stands is in memory alone: it may begin anew at any time."""

    def __init__(self) -> None:
        self._cursors: dict[str, tuple[Any, ...]] = {}

    def __call__(self, connection: Any, commits: int, heads: Mapping[int, LaneHead]) -> None:
        """In a commit's transaction, by the heads from before it and the number of commits there have been."""
        if commits % SWEEP_COMMITS:
            return
        is_absent = _Absence(connection, heads)
        for table in _SWEPT:
            self._sweep(connection, table, is_absent)

    def _sweep(self, connection: Any, table: Table, is_absent: "_Absence") -> None:
        keys = ("lane", *table.keys)
        columns = ", ".join((*keys, *table.values))
        after = self._cursors.get(table.name)
        where = f"WHERE ({', '.join(keys)}) > ({', '.join('?' * len(keys))})" if after else ""
        statement = f"SELECT {columns} FROM oncelog_{table.name} {where} ORDER BY {', '.join(keys)} LIMIT ?"  # noqa: S608
        rows = connection.execute(statement, (*(after or ()), SWEEP_ROWS)).fetchall()
        width = len(keys)
        absent = [row[:width] for row in rows if is_absent(row[:width], table.value_of(row[width:]))]
        if absent:
            connection.executemany(table.delete_sql, absent)
        self._cursors[table.name] = rows[-1][:width] if len(rows) == SWEEP_ROWS else ()


class _Absence:
    """Whether a row counts as absent, by its lane's head."""

    def __init__(self, connection: Any, heads: Mapping[int, LaneHead]) -> None:
        self._connection = connection
        self._heads = heads
        self._policies: dict[str, Policy] | None = None
        self._kinds: Mapping[type, Callable[[tuple[Any, ...], Any, LaneHead], bool]] = {
            Lease: lambda _, lease, head: is_forgotten(lease, head.log_time_ms),
            Entity: lambda _, entity, head: not entity.is_live(head.log_time_ms),
            ClientEntry: self._is_client_forgotten,
        }

    def __call__(self, key: tuple[Any, ...], value: Any) -> bool:
        head = self._heads.get(key[0])
        return head is not None and self._kinds[type(value)](key, value, head)

    def _is_client_forgotten(self, key: tuple[Any, ...], entry: ClientEntry, head: LaneHead) -> bool:
        if self._policies is None:
            rows = self._connection.execute(SQL["policies"]).fetchall()
            self._policies = {name: _POLICY.decode(declaration) for name, declaration in rows}
        policy = self._policies.get(key[1])
        if policy is None:
            return False
        return not policy.retention.remembers(entry.last_seen_ms, head.log_time_ms, head.eviction_time_ms)
