"""Side state in SQLite: one table for each mapping of a snapshot, loaded and saved in one statement each.

Every call into SQLite lets go of the interpreter and must wait for it again, behind an event loop that is busy. So the
rows that a batch needs are asked for together, as one JSON array.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from oncelog.core.values import Changes, Snapshot
from oncelog.errors import CorruptError
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
    """Gives the rows of a JSON array of keys."""
    terms = ("lane", *table.keys)
    on = " AND ".join(f"t.{column} = n.value ->> {place}" for place, column in enumerate(terms))
    columns = ", ".join(f"t.{column}" for column in (*table.keys, *table.values))
    return f"SELECT {columns} FROM json_each(?) AS n CROSS JOIN oncelog_{table.name} AS t ON {on}"  # noqa: S608


def _build_load_group_sql(table: SideStateTable) -> str:
    """Gives the rows whose keys are alike but for the last column, of which it takes a JSON array."""
    *shared_terms, last = table.keys
    on = " AND ".join(f"t.{column} = ?" for column in ("lane", *shared_terms))
    columns = ", ".join(f"t.{column}" for column in (last, *table.values))
    rows = f"json_each(?) AS n CROSS JOIN oncelog_{table.name} AS t ON {on} AND t.{last} = n.value"
    return f"SELECT {columns} FROM {rows}"  # noqa: S608


def _build_insert(table: SideStateTable) -> BulkInsert:
    """Inserts rows or sets their values: in their place, where a replaced row would be taken out and put in anew."""
    values = ", ".join(f"{column} = excluded.{column}" for column in table.values)
    on_conflict = f" ON CONFLICT DO UPDATE SET {values}" if values else " ON CONFLICT DO NOTHING"
    return BulkInsert(f"oncelog_{table.name}", table.columns, on_conflict)


def _build_update_sql(table: SideStateTable) -> str:
    """Sets the values of a row that is there. Takes them in the order in which they would be inserted."""
    keys = ("lane", *table.keys)
    values = ", ".join(f"{column} = ?{place}" for place, column in enumerate(table.values, len(keys) + 1))
    on = " AND ".join(f"{column} = ?{place}" for place, column in enumerate(keys, 1))
    return f"UPDATE oncelog_{table.name} SET {values} WHERE {on}"  # noqa: S608


def _build_delete_sql(table: SideStateTable) -> str:
    """Removes a row."""
    on = " AND ".join(f"{column} = ?" for column in ("lane", *table.keys))
    return f"DELETE FROM oncelog_{table.name} WHERE {on}"  # noqa: S608


def _build_encoder(table: SideStateTable) -> Callable[[Any], tuple[Any, ...]]:
    """Return what encodes a value. sqlite3 takes long to find out that bytes are bytes: it is given bytearrays."""
    encode = table.encode_value
    if BYTEA not in table.values.values():
        return encode
    return lambda value: tuple([bytearray(column) if type(column) is bytes else column for column in encode(value)])


GROUP_ROWS_MIN: Final = 8
"""Average rows per group from which a statement for each group is cheaper."""
LOAD_SQL: Final = {table.name: _build_load_sql(table) for table in (*TABLES, PAST_MEMBERS)}
LOAD_GROUP_SQL: Final = {table.name: _build_load_group_sql(table) for table in (*TABLES, PAST_MEMBERS)}
_ENCODERS: Final = {table.name: _build_encoder(table) for table in TABLES}
_INSERTS: Final = {table.name: _build_insert(table) for table in STORED_TABLES}
_UPDATE_SQL: Final = {
    table.name: _build_update_sql(table) for table in TABLES if table.values and table.name not in CACHED_TABLES
}
"""Of cached tables it is not known which rows are in the file."""
DELETE_SQL: Final = {table.name: _build_delete_sql(table) for table in TABLES}


def load_table(connection: Any, table: SideStateTable, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """The rows of one table that are there, by key."""
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
    """The same where many keys differ in their last column only: nothing else need be read out of JSON for each."""
    found = {}
    for shared_key, lasts in groups.items():
        lasts.sort()  # in the order in which they lie
        rows = connection.execute(LOAD_GROUP_SQL[table.name], (orjson.dumps(lasts).decode(), *shared_key)).fetchall()
        for row in rows:
            found[table.decode_key((*shared_key[1:], row[0]))] = table.decode_value(row[1:])
    return found


def load_slice(connection: Any, table: SideStateTable, after: Any, rows_max: int) -> tuple[list[Any], Any]:
    """The next rows of a table after a key, in the order of keys, and the key after which to continue."""
    keys = ("lane", *table.keys)
    where = f"WHERE ({', '.join(keys)}) > ({', '.join('?' * len(keys))})" if after else ""
    columns = ", ".join(table.columns)
    statement = f"SELECT {columns} FROM oncelog_{table.name} {where} ORDER BY {', '.join(keys)} LIMIT ?"  # noqa: S608
    rows = connection.execute(statement, (*(after or ()), rows_max)).fetchall()
    return rows, rows[-1][: len(keys)] if len(rows) == rows_max else None


def delete_rows(connection: Any, table: SideStateTable, keys: Sequence[tuple[Any, ...]]) -> None:
    """Delete the rows of some keys, each with its lane."""
    if keys:
        connection.executemany(DELETE_SQL[table.name], keys)


def save_tables(connection: Any, changes: Changes, lanes: int, stored: Snapshot | None = None) -> None:
    """Save all side state that has changed.

    `stored` has the rows that are known to exist. They are updated one by one: that takes two thirds of the time of an
    insert, but one call into SQLite per row, so the caller passes them only where no other thread wants the GIL.
    """
    for table, (inserted, updated, deleted) in iterate_changes(changes, lanes, _ENCODERS, stored, _UPDATE_SQL):
        if inserted:
            inserted.sort()  # in the order of the table, page by page; no two rows have the same key
            _INSERTS[table.name](connection, inserted, len(inserted))
        if updated:
            updated.sort()
            found = connection.executemany(_UPDATE_SQL[table.name], updated).rowcount
            if found != len(updated):  # never silently: the row was read in the same transaction
                raise CorruptError(f"of {len(updated)} {table.name} that were read {found} are there to be updated")
        delete_rows(connection, table, deleted)
