"""Side state in SQLite: one table for each mapping of a snapshot, loaded and saved in one statement each.

Every call into SQLite lets go of the interpreter and must wait for it again, behind an event loop that is busy. So the
rows that a batch needs are asked for together, as one JSON array.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import orjson

from oncelog.core.read_set import ReadSet
from oncelog.core.values import Changes, Snapshot
from oncelog.errors import CorruptError
from oncelog.storage.side_state import (
    PAST_MEMBERS,
    TABLES,
    SideStateTable,
    add_oldest_members,
    build_member_change_rows,
    lane_of_scope,
)
from oncelog.storage.sqlite.row_cache import CACHED_TABLES as RECENT
from oncelog.storage.sqlite.row_cache import RowCache
from oncelog.storage.sqlite.statements import SQL, BulkInsert


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
    return BulkInsert(f"oncelog_{table.name}", ("lane", *table.keys, *table.values), on_conflict)


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


def _to_bindable(value: Any) -> Any:
    """As `writing._columns` says: sqlite3 takes long to find out that bytes are bytes."""
    return bytearray(value) if type(value) is bytes else value


_get_tables: Final = attrgetter(*(table.name for table in TABLES))
GROUP_ROWS_MIN: Final = 8
"""Of so many rows on average it pays to ask for each group by a statement of its own."""
LOAD_SQL: Final = {table.name: _build_load_sql(table) for table in (*TABLES, PAST_MEMBERS)}
LOAD_GROUP_SQL: Final = {table.name: _build_load_group_sql(table) for table in TABLES}
_INSERTS: Final = {table.name: _build_insert(table) for table in TABLES}
_UPDATE_SQL: Final = {
    table.name: _build_update_sql(table) for table in TABLES if table.values and table.name not in RECENT
}
"""Of the others it is not known which rows are in the file."""
_INSERT_MEMBER_CHANGES: Final = BulkInsert(
    "oncelog_member_changes",
    ("lane", "scope", "member", "kind", "revision"),
    " ON CONFLICT DO UPDATE SET revision = excluded.revision",
)
DELETE_SQL: Final = {table.name: _build_delete_sql(table) for table in TABLES}


def load_tables(
    connection: Any, read_set: ReadSet, snapshot: Snapshot, cache: RowCache | None = None
) -> dict[str, list[Any]]:
    """Fill the snapshot with the side state that the read set names. Return the keys that `cache` did not have."""
    keys_by_table: dict[str, list[Any]] = {}
    named = _get_tables(read_set)
    if not any(named):
        return keys_by_table
    for table, wanted in zip(TABLES, named, strict=True):
        if not wanted:
            continue
        known: dict[Any, Any] = {}
        if cache is not None and table.name in RECENT:
            known, keys_by_table[table.name] = cache.find_rows(table.name, wanted)
            wanted = keys_by_table[table.name]  # noqa: PLW2901 - what is known need not be asked for
        if wanted:
            known |= load_table(connection, table, wanted, snapshot.settings.lanes)
        setattr(snapshot, table.name, known)
    if read_set.oldest:
        add_oldest_members(snapshot, _load_oldest_members(connection, read_set.oldest, snapshot.settings.lanes))
    if read_set.past_members:
        snapshot.past_members = load_table(connection, PAST_MEMBERS, read_set.past_members, snapshot.settings.lanes)
    return keys_by_table


def _load_oldest_members(connection: Any, wanted: Mapping[str, int], lanes: int) -> list[tuple[Any, ...]]:
    """Return the members of some streams that joined first, as `add_oldest_members` takes them.

    One statement for all streams with the same count, because LIMIT cannot refer to a column. Most streams of a batch
    lose one member.
    """
    keys_by_count: dict[int, list[tuple[int, str]]] = {}
    for scope, count in wanted.items():
        keys_by_count.setdefault(count, []).append((lane_of_scope(scope, lanes), scope))
    rows: list[tuple[Any, ...]] = []
    for count, keys in keys_by_count.items():
        rows += connection.execute(SQL["oldest_members"], (orjson.dumps(keys).decode(), count))
    return rows


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


def save_tables(connection: Any, changes: Changes, lanes: int, stored: Snapshot | None = None) -> None:
    """Saves all side state that has changed.

    Who knows what is `there`, and has the interpreter for himself, updates it row by row: that takes two thirds of the
    time, but as many calls into SQLite as there are rows.
    """
    changed_of_all: Sequence[Mapping[Any, Any]] = _get_tables(changes)
    for table, changed in zip(TABLES, changed_of_all, strict=True):
        if not changed:
            continue
        known: Mapping[Any, Any] = (
            getattr(stored, table.name) if stored is not None and table.name in _UPDATE_SQL else {}
        )
        saved: list[Any] = []
        updated: list[Any] = []
        deleted = []
        for key, value in changed.items():
            columns = (lane_of_scope(table.get_scope(key), lanes), *table.encode_key(key))
            if value is None:
                deleted.append(columns)
            else:
                rows = updated if key in known else saved
                rows.append((*columns, *map(_to_bindable, table.encode_value(value))))
        if saved:
            saved.sort()  # in the order in which they lie, page by page; no two have the same key
            _INSERTS[table.name](connection, saved, len(saved))
        if updated:
            updated.sort()
            found = connection.executemany(_UPDATE_SQL[table.name], updated).rowcount
            if found != len(updated):  # never silently: the row was read in the same transaction
                raise CorruptError(f"of {len(updated)} {table.name} that were read {found} are there to be updated")
        if deleted:
            connection.executemany(DELETE_SQL[table.name], deleted)
    if changes.members or changes.acknowledged:
        rows = build_member_change_rows(changes, lanes)
        _INSERT_MEMBER_CHANGES(connection, rows, len(rows))
