"""Side state in SQLite: one table for each mapping of a snapshot, loaded and saved in one statement each.

Every call into SQLite lets go of the interpreter and must wait for it again, behind an event loop that is busy. So the
rows that a batch needs are asked for together, as one JSON array.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from oncelog.core.footprint import Footprint
from oncelog.core.identity import lane_of
from oncelog.core.merge import Row
from oncelog.core.operations import Entity
from oncelog.core.values import Changes, ClientEntry, Lease, Snapshot

_ROW: Final = msgspec.msgpack.Decoder(Row)
_lane_of: Final = lru_cache(maxsize=8192)(lane_of)


class Table(NamedTuple):
    """How a mapping of a snapshot lies in its table."""

    name: str
    keys: tuple[str, ...]
    """The columns of the key after the lane."""
    values: tuple[str, ...]
    scope: Callable[[Any], str]
    """Where in the key the scope is, which says the lane."""
    columns_of_key: Callable[[Any], tuple[Any, ...]]
    key_of: Callable[[tuple[Any, ...]], Any]
    columns_of_value: Callable[[Any], tuple[Any, ...]]
    value_of: Callable[[tuple[Any, ...]], Any]

    @property
    def load_sql(self) -> str:
        """Gives the rows of a JSON array of keys."""
        terms = ("lane", *self.keys)
        on = " AND ".join(f"t.{column} = n.value ->> {place}" for place, column in enumerate(terms))
        columns = ", ".join(f"t.{column}" for column in (*self.keys, *self.values))
        return f"SELECT {columns} FROM json_each(?) AS n CROSS JOIN oncelog_{self.name} AS t ON {on}"  # noqa: S608

    @property
    def save_sql(self) -> str:
        """Inserts a row or replaces its values."""
        columns = ("lane", *self.keys, *self.values)
        marks = ", ".join("?" * len(columns))
        return f"INSERT OR REPLACE INTO oncelog_{self.name} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608

    @property
    def delete_sql(self) -> str:
        """Removes a row."""
        on = " AND ".join(f"{column} = ?" for column in ("lane", *self.keys))
        return f"DELETE FROM oncelog_{self.name} WHERE {on}"  # noqa: S608


def _one(value: Any) -> tuple[Any, ...]:
    return (value,)


def _lease_key(identity: Any) -> tuple[Any, ...]:
    policy, scope, client, key = identity
    return (policy, scope, client, key.hex())


def _lease_identity(columns: tuple[Any, ...]) -> Any:
    policy, scope, client, key_hex = columns
    return (policy, scope, client, bytes.fromhex(key_hex))


def _encode_row(row: Row) -> tuple[bytes]:
    return (msgspec.msgpack.encode(row),)


_FIRST: Final[Callable[[Any], Any]] = itemgetter(0)
_SECOND: Final[Callable[[Any], Any]] = itemgetter(1)
_ENTRY: Final = ("sequence", "last_seen_ms", "last_key", "last_fingerprint")
_LEASE: Final = ("fence", "holder", "until_ms", "fingerprint", "failed_fence", "failure")

TABLES: Final = (
    Table("streams", ("scope",), ("sequence",), str, _one, _FIRST, _one, _FIRST),
    Table(
        "clients",
        ("policy", "scope", "client"),
        _ENTRY,
        _SECOND,
        tuple,
        tuple,
        msgspec.structs.astuple,
        lambda columns: ClientEntry(*columns),
    ),
    Table(
        "entities",
        ("scope", "key"),
        ("value", "version", "expires_at_ms"),
        _FIRST,
        tuple,
        tuple,
        msgspec.structs.astuple,
        lambda columns: Entity(*columns),
    ),
    Table(
        "relationships", ("scope", "resource", "relation", "subject"), ("version",), _FIRST, tuple, tuple, _one, _FIRST
    ),
    Table(
        "rows",
        ("scope", "table_name", "row_id"),
        ("state",),
        _FIRST,
        tuple,
        tuple,
        _encode_row,
        lambda columns: _ROW.decode(columns[0]),
    ),
    Table(
        "leases",
        ("policy", "scope", "client", "key_hex"),
        _LEASE,
        _SECOND,
        _lease_key,
        _lease_identity,
        msgspec.structs.astuple,
        lambda columns: Lease(*columns),
    ),
    Table("members", ("scope", "member"), (), _FIRST, tuple, tuple, lambda _: (), lambda _: True),
    Table("acknowledged", ("scope", "member"), ("sequence",), _FIRST, tuple, tuple, _one, _FIRST),
    Table("consumers", ("scope", "consumer"), ("cursor",), _FIRST, tuple, tuple, _one, _FIRST),
)

_LOAD: Final = {table.name: table.load_sql for table in TABLES}
_SAVE: Final = {table.name: table.save_sql for table in TABLES}
_DELETE: Final = {table.name: table.delete_sql for table in TABLES}


def lane_of_scope(scope: str, lanes: int) -> int:
    """The lane of a stream, or lane 0 where none is named (consumers of the whole log)."""
    return _lane_of(scope, lanes) if scope else 0


def load(connection: Any, needs: Footprint, snapshot: Snapshot) -> None:
    """Fills the snapshot's side state with what the footprint names."""
    for table in TABLES:
        wanted = getattr(needs, table.name)
        if wanted:
            setattr(snapshot, table.name, load_table(connection, table, wanted, snapshot.settings.lanes))


def load_table(connection: Any, table: Table, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """The rows of one table that are there, by key."""
    needs = [(lane_of_scope(table.scope(key), lanes), *table.columns_of_key(key)) for key in keys]
    rows = connection.execute(_LOAD[table.name], (orjson.dumps(needs).decode(),)).fetchall()
    width = len(table.keys)
    return {table.key_of(row[:width]): table.value_of(row[width:]) for row in rows}


def save(connection: Any, changes: Changes, lanes: int) -> None:
    """Saves all side state that has changed."""
    for table in TABLES:
        changed: Mapping[Any, Any] = getattr(changes, table.name)
        if not changed:
            continue
        saved, deleted = [], []
        for key, value in changed.items():
            columns = (lane_of_scope(table.scope(key), lanes), *table.columns_of_key(key))
            if value is None:
                deleted.append(columns)
            else:
                saved.append((*columns, *table.columns_of_value(value)))
        if saved:
            connection.executemany(_SAVE[table.name], saved)
        if deleted:
            connection.executemany(_DELETE[table.name], deleted)
