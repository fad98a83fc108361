"""Side state in SQLite: one table for each mapping of a snapshot, loaded and saved with few statements.

Every call into SQLite releases the GIL and then waits to get it back from a busy event loop. One statement therefore
loads all rows of a table that a batch needs, with the keys passed as a JSON array.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from oncelog.core.values import Changes, Snapshot
from oncelog.errors import CorruptError
from oncelog.storage.queries.statement import QuerySteps, Statement
from oncelog.storage.queries.writes import ErasedValues
from oncelog.storage.side_state import (
    BYTEA,
    PAST_MEMBERS,
    STORED_TABLES,
    TABLES,
    SideStateTable,
    iterate_changes,
    lane_of_scope,
)
from oncelog.storage.sqlite.row_cache import CACHED_TABLES
from oncelog.storage.sqlite.statements import BulkInsert


def _build_load_sql(table: SideStateTable) -> str:
    """Return the statement that selects the rows for a JSON array of keys."""
    terms = ("lane", *table.keys)
    on = " AND ".join(f"t.{column} = n.value ->> {place}" for place, column in enumerate(terms))
    columns = ", ".join(f"t.{column}" for column in (*table.keys, *table.values))
    return f"SELECT {columns} FROM json_each(?) AS n CROSS JOIN oncelog_{table.name} AS t ON {on}"  # noqa: S608


def _build_load_group_sql(table: SideStateTable) -> str:
    """Return the statement that selects rows whose keys differ only in the last column, given as a JSON array."""
    *shared_terms, last = table.keys
    on = " AND ".join(f"t.{column} = ?" for column in ("lane", *shared_terms))
    columns = ", ".join(f"t.{column}" for column in (last, *table.values))
    rows = f"json_each(?) AS n CROSS JOIN oncelog_{table.name} AS t ON {on} AND t.{last} = n.value"
    return f"SELECT {columns} FROM {rows}"  # noqa: S608


def _build_insert(table: SideStateTable) -> BulkInsert:
    """Return an INSERT that updates an existing row in place. REPLACE would delete the row and insert it again."""
    values = ", ".join(f"{column} = excluded.{column}" for column in table.values)
    on_conflict = f" ON CONFLICT DO UPDATE SET {values}" if values else " ON CONFLICT DO NOTHING"
    return BulkInsert(f"oncelog_{table.name}", table.columns, on_conflict)


def _build_update_sql(table: SideStateTable) -> str:
    """Return the statement that updates an existing row. Its parameters have the same order as an INSERT's."""
    keys = ("lane", *table.keys)
    values = ", ".join(f"{column} = ?{place}" for place, column in enumerate(table.values, len(keys) + 1))
    on = " AND ".join(f"{column} = ?{place}" for place, column in enumerate(keys, 1))
    return f"UPDATE oncelog_{table.name} SET {values} WHERE {on}"  # noqa: S608


def _build_delete_sql(table: SideStateTable) -> str:
    """Return the statement that deletes a row."""
    on = " AND ".join(f"{column} = ?" for column in ("lane", *table.keys))
    return f"DELETE FROM oncelog_{table.name} WHERE {on}"  # noqa: S608


def _build_encoder(table: SideStateTable) -> Callable[[Any], tuple[Any, ...]]:
    """Return the encoder of a value. It produces bytearrays, which sqlite3 binds faster than bytes."""
    encode = table.encode_value
    if BYTEA not in table.values.values():
        return encode
    return lambda value: tuple([bytearray(column) if type(column) is bytes else column for column in encode(value)])


GROUP_ROWS_MIN: Final = 8
"""Average rows per group at which one statement per group becomes cheaper."""
LOAD_SQL: Final = {table.name: _build_load_sql(table) for table in (*TABLES, PAST_MEMBERS)}
LOAD_GROUP_SQL: Final = {table.name: _build_load_group_sql(table) for table in (*TABLES, PAST_MEMBERS)}
_ENCODERS: Final = {table.name: _build_encoder(table) for table in TABLES}
_INSERTS: Final = {table.name: _build_insert(table) for table in STORED_TABLES}
_UPDATE_SQL: Final = {
    table.name: _build_update_sql(table) for table in TABLES if table.values and table.name not in CACHED_TABLES
}
"""Cached tables are left out, because a row from the cache may not exist in the file."""
DELETE_SQL: Final = {table.name: _build_delete_sql(table) for table in TABLES}


def load_table(connection: Any, table: SideStateTable, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """Return the existing rows of one table, by key."""
    needs = [(lane_of_scope(table.get_scope(key), lanes), *table.encode_key(key)) for key in keys]
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for columns in needs:
        groups.setdefault(columns[:-1], []).append(columns[-1])
    if len(groups) * GROUP_ROWS_MIN <= len(needs):
        return _load_groups(connection, table, groups)
    rows = connection.execute(LOAD_SQL[table.name], (orjson.dumps(needs).decode(),)).fetchall()
    width = len(table.keys)
    return {table.decode_key(row[:width]): table.decode_value(row[width:]) for row in rows}


def _load_groups(connection: Any, table: SideStateTable, groups: Mapping[tuple[Any, ...], list[Any]]) -> dict[Any, Any]:
    """Load keys that differ only in the last column. SQLite then parses only that column from JSON."""
    found = {}
    for shared_key, lasts in groups.items():
        lasts.sort()  # in the order of the table
        rows = connection.execute(LOAD_GROUP_SQL[table.name], (orjson.dumps(lasts).decode(), *shared_key)).fetchall()
        for row in rows:
            found[table.decode_key((*shared_key[1:], row[0]))] = table.decode_value(row[1:])
    return found


def load_slice(connection: Any, table: SideStateTable, after: Any, rows_max: int) -> tuple[list[Any], Any]:
    """Return the next rows of a table after a key, ordered by key, and the key after which to continue."""
    keys = ("lane", *table.keys)
    where = f"WHERE ({', '.join(keys)}) > ({', '.join('?' * len(keys))})" if after else ""
    columns = ", ".join(table.columns)
    statement = f"SELECT {columns} FROM oncelog_{table.name} {where} ORDER BY {', '.join(keys)} LIMIT ?"  # noqa: S608
    rows = connection.execute(statement, (*(after or ()), rows_max)).fetchall()
    return rows, rows[-1][: len(keys)] if len(rows) == rows_max else None


def delete_rows(connection: Any, table: SideStateTable, keys: Sequence[tuple[Any, ...]]) -> None:
    """Delete the rows with the given keys, each of which starts with its lane."""
    if keys:
        connection.executemany(DELETE_SQL[table.name], keys)


def save_tables(connection: Any, changes: Changes, lanes: int, stored: Snapshot | None = None) -> None:
    """Save all changed side state.

    `stored` has the rows that are known to exist. An update takes two thirds of the time of an insert, but each row
    needs its own call into SQLite, so the caller passes these rows only if no other thread needs the GIL.
    """
    for table, (inserted, updated, deleted) in iterate_changes(changes, lanes, _ENCODERS, stored, _UPDATE_SQL):
        if inserted:
            inserted.sort()  # in the order of the table, page by page; all keys differ
            _INSERTS[table.name](connection, inserted, len(inserted))
        if updated:
            updated.sort()
            found = connection.executemany(_UPDATE_SQL[table.name], updated).rowcount
            if found != len(updated):  # the same transaction has read these rows
                rows = f"{found} of {len(updated)} rows that were read from the table {table.name}"
                raise CorruptError(f"only {rows} can be updated")
        delete_rows(connection, table, deleted)


def erase_values(lane: int, erased: ErasedValues) -> QuerySteps[int]:
    """Erase the values of entities. Returns how many bytes tenants were charged for them."""
    name = "all_values" if erased.keys is None else "values"
    place = (lane, *(column for column in erased if column is not None))
    [(size,)] = yield Statement(f"bytes_of_{name}", *place)
    yield Statement(f"erase_{name}", *place)
    return int(size)
