"""Side state in PostgreSQL: one table for each mapping of a snapshot, loaded and saved in one statement each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from oncelog.core.footprint import Footprint
from oncelog.core.values import Changes, Snapshot
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.side_state import TABLES, USAGE, Table, changed_members, lane_of_scope

_BYTES: Final = {"last_key", "last_fingerprint", "value", "state", "fingerprint", "failure"}
_NUMBERS: Final = {
    *("sequence", "last_seen_ms", "version", "expires_at_ms", "fence", "until_ms", "failed_fence", "cursor"),
    *("full_at_us", "bytes", "records", "floor"),
}


def _type_of(column: str) -> str:
    if column == "lane":
        return "integer"
    if column in _BYTES:
        return "bytea"
    return "bigint" if column in _NUMBERS else "text"


def _arrays(columns: Sequence[str]) -> str:
    """One array a column, as rows."""
    return "unnest(" + ", ".join(f"${place}::{_type_of(name)}[]" for place, name in enumerate(columns, 1)) + ")"


def _load_sql(table: Table) -> str:
    keys = ("lane", *table.keys)
    columns = ", ".join(f"t.{column}" for column in (*table.keys, *table.values))
    names, on = ", ".join(keys), " AND ".join(f"t.{column} = n.{column}" for column in keys)
    return f"SELECT {columns} FROM {_arrays(keys)} AS n ({names}) JOIN oncelog_{table.name} AS t ON {on}"  # noqa: S608


def _save_sql(table: Table) -> str:
    keys, columns = ("lane", *table.keys), ("lane", *table.keys, *table.values)
    if not table.values:
        then = "DO NOTHING"
    else:
        then = "DO UPDATE SET " + ", ".join(f"{column} = excluded.{column}" for column in table.values)
    return (
        f"INSERT INTO oncelog_{table.name} ({', '.join(columns)}) SELECT * FROM {_arrays(columns)} "  # noqa: S608
        f"ON CONFLICT ({', '.join(keys)}) {then}"
    )


def _delete_sql(table: Table) -> str:
    keys = ("lane", *table.keys)
    names, on = ", ".join(keys), " AND ".join(f"t.{column} = n.{column}" for column in keys)
    return f"DELETE FROM oncelog_{table.name} AS t USING {_arrays(keys)} AS n ({names}) WHERE {on}"  # noqa: S608


LOAD: Final = {table.name: _load_sql(table) for table in TABLES}
SAVE: Final = {table.name: _save_sql(table) for table in TABLES}
DELETE: Final = {table.name: _delete_sql(table) for table in TABLES}


async def load(connection: Any, needs: Footprint, snapshot: Snapshot) -> None:
    """Fills the snapshot's side state with what the footprint names."""
    for table in TABLES:
        wanted = getattr(needs, table.name)
        if wanted:
            setattr(snapshot, table.name, await load_table(connection, table, wanted, snapshot.settings.lanes))


async def load_table(connection: Any, table: Table, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """The rows of one table that are there, by key."""
    if table.name == USAGE:
        rows = await connection.fetch(SQL["lock_usage"], list(keys))
        return {tenant: table.value_of(tuple(values)) for tenant, *values in rows}
    needs = [(lane_of_scope(table.scope(key), lanes), *table.columns_of_key(key)) for key in keys]
    rows = await connection.fetch(LOAD[table.name], *columns_of(needs))
    width = len(table.keys)
    return {table.key_of(tuple(row)[:width]): table.value_of(tuple(row)[width:]) for row in rows}


async def save(connection: Any, changes: Changes, lanes: int) -> None:
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
            await connection.execute(SAVE[table.name], *columns_of(saved))
        if deleted:
            await connection.execute(DELETE[table.name], *columns_of(deleted))
    if changes.members or changes.acknowledged:
        await connection.execute(SQL["save_member_changes"], *columns_of(changed_members(changes, lanes)))


def columns_of(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows as one array a column. There must be one at least."""
    return list(zip(*rows, strict=True))
