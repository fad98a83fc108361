"""What log time has made absent goes from the disk: ended leases, forgotten clients, expired entities.

It counts as absent from the moment that the core says so, whether or not its row is there (docs/decisions/0004 and
0005). So the rows can go whenever it suits: a slice in some of the commits, in proportion to what is written.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from oncelog.core.leases import is_forgotten
from oncelog.core.operations import Entity
from oncelog.core.policy import Policy
from oncelog.core.values import Changes, ClientEntry, LaneHead, Lease
from oncelog.errors import PolicyError
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.tables import TABLES, Table

SWEEP_COMMITS: Final = 16
"""One commit of so many looks at a slice."""
SWEEP_ROWS: Final = 128
"""Of each table, or twice as many as have been written to it since: so it keeps up."""

_POLICY: Final = msgspec.json.Decoder(Policy)
_SWEPT: Final = [table for table in TABLES if table.name in ("leases", "clients", "entities")]


class Sweep:
    """Goes through the tables again and again. Where it stands is in memory alone: it may begin anew at any time."""

    def __init__(self) -> None:
        self._cursors: dict[str, tuple[Any, ...]] = {}
        self._written = dict.fromkeys((table.name for table in _SWEPT), 0)

    def __call__(self, connection: Any, commits: int, heads: Mapping[int, LaneHead], changes: Changes) -> None:
        """In a commit's transaction, by the heads from before it and the number of commits there have been."""
        for table in _SWEPT:
            self._written[table.name] += len(getattr(changes, table.name))
        if commits % SWEEP_COMMITS:
            return
        is_absent = _Absence(connection, heads)
        for table in _SWEPT:
            self._sweep(connection, table, max(SWEEP_ROWS, 2 * self._written[table.name]), is_absent)
            self._written[table.name] = 0

    def _sweep(self, connection: Any, table: Table, rows_max: int, is_absent: "_Absence") -> None:
        keys = ("lane", *table.keys)
        columns = ", ".join((*keys, *table.values))
        after = self._cursors.get(table.name)
        where = f"WHERE ({', '.join(keys)}) > ({', '.join('?' * len(keys))})" if after else ""
        statement = f"SELECT {columns} FROM oncelog_{table.name} {where} ORDER BY {', '.join(keys)} LIMIT ?"  # noqa: S608
        rows = connection.execute(statement, (*(after or ()), rows_max)).fetchall()
        width = len(keys)
        absent = [row[:width] for row in rows if is_absent(row[:width], table.value_of(row[width:]))]
        if absent:
            connection.executemany(table.delete_sql, absent)
        self._cursors[table.name] = rows[-1][:width] if len(rows) == rows_max else ()


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
            self._policies = {}
            for name, declaration in self._connection.execute(SQL["policies"]).fetchall():
                with suppress(msgspec.MsgspecError, PolicyError):  # of a newer version, which will know what to do
                    self._policies[name] = _POLICY.decode(declaration)
        policy = self._policies.get(key[1])
        if policy is None:
            return False
        return not policy.retention.remembers(entry.last_seen_ms, head.log_time_ms, head.eviction_time_ms)
