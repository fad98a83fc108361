"""Side state in PostgreSQL: one table for each mapping of a snapshot, loaded and saved in one statement each.

An index row holds at most 2,704 bytes, so keys with long names are indexed by a digest of their texts
(`sql/migrations/0005_long_names.sql`). They have statements of their own; those of short keys, which nearly all keys
are, do not mention them.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Any, Final

from oncelog.core.read_set import ReadSet
from oncelog.core.values import Changes, Snapshot
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.side_state import (
    MEMBER_CHANGES,
    PAST_MEMBERS,
    STORED_TABLES,
    TABLES,
    USAGE_TABLE,
    SideStateTable,
    add_oldest_members,
    build_member_change_rows,
    lane_of_scope,
)

SHORT_BYTES_MAX: Final = 2000
"""UTF-8 bytes that the texts of a key have together if it is indexed by them: below PostgreSQL's limit of 2,704."""
_SHORT_CHARACTERS_MAX: Final = SHORT_BYTES_MAX // 4
"""A character has at most four bytes: up to this many need no counting."""
_BYTEA_COLUMNS: Final = {"last_key", "last_fingerprint", "value", "state", "fingerprint", "failure", "digest"}
_INTEGER_COLUMNS: Final = {"lane", "kind", "is_owner", "erased"}
_BIGINT_COLUMNS: Final = {
    *("sequence", "last_seen_ms", "version", "expires_at_ms", "fence", "until_ms", "failed_fence", "cursor"),
    *("full_at_us", "bytes", "records", "revision", "floor", "joined", "members", "owners"),
}
_SINGLE_NAME_TABLES: Final = {"streams", "horizons", "floors", "rosters", USAGE_TABLE}
"""Tables whose key is one name, which always fits into an index."""


def has_digest(table: SideStateTable) -> bool:
    """Whether the keys of a table can be too long for an index."""
    return table.name not in _SINGLE_NAME_TABLES


def compute_digest(key: Sequence[Any]) -> bytes | None:
    """The SHA-256 of a key's texts if they are too long together for an index row; None for a short key.

    Names have no U+0000, so it separates them without ambiguity.
    """
    texts = [column for column in key if type(column) is str]
    if sum(map(len, texts)) <= _SHORT_CHARACTERS_MAX:
        return None
    encoded = [text.encode() for text in texts]
    return sha256(b"\0".join(encoded)).digest() if sum(map(len, encoded)) > SHORT_BYTES_MAX else None


def _get_column_type(column: str) -> str:
    if column in _INTEGER_COLUMNS:
        return "integer"
    if column in _BYTEA_COLUMNS:
        return "bytea"
    return "bigint" if column in _BIGINT_COLUMNS else "text"


def _build_unnest(columns: Sequence[str]) -> str:
    """One array a column, as rows."""
    return "unnest(" + ", ".join(f"${place}::{_get_column_type(name)}[]" for place, name in enumerate(columns, 1)) + ")"


def _list_key_columns(table: SideStateTable, *, is_long: bool) -> tuple[str, ...]:
    """The columns that a row is found by, as they are sent."""
    return ("lane", *table.keys, "digest") if is_long else ("lane", *table.keys)


def _build_condition(table: SideStateTable, *, is_long: bool) -> str:
    """The condition that a row `t` has the key `n`. The texts are compared where the digest finds the row, too."""
    equal = " AND ".join(f"t.{column} = n.{column}" for column in _list_key_columns(table, is_long=is_long))
    if is_long:  # for the index of listings, which the planner may take as well
        texts = [column for column in table.keys if _get_column_type(column) == "text"]
        equal += "".join(f" AND left(t.{column}, 64) = left(n.{column}, 64)" for column in texts)
    return f"{equal} AND t.digest IS {'NOT NULL' if is_long else 'NULL'}" if has_digest(table) else equal


# `OFFSET 0` keeps each look-up apart, by the index. Plans are made when tables may be empty: of a partial index the
# planner then expects one row, and would read all of it for every key.


def _build_load_sql(table: SideStateTable, *, is_long: bool = False) -> str:
    key_columns = _list_key_columns(table, is_long=is_long)
    columns = ", ".join(f"t.{column}" for column in (*table.keys, *table.values))
    names, on = ", ".join(key_columns), _build_condition(table, is_long=is_long)
    return (
        f"SELECT t.* FROM {_build_unnest(key_columns)} AS n ({names}) CROSS JOIN LATERAL "  # noqa: S608
        f"(SELECT {columns} FROM oncelog_{table.name} AS t WHERE {on} OFFSET 0) AS t"
    )


def _build_save_sql(table: SideStateTable, *, is_long: bool = False) -> str:
    columns = (*_list_key_columns(table, is_long=is_long), *table.values)
    if not table.values:
        on_conflict = "DO NOTHING"
    else:
        on_conflict = "DO UPDATE SET " + ", ".join(f"{column} = excluded.{column}" for column in table.values)
    numbers = [column for column in table.keys if _get_column_type(column) != "text"]
    unique = ("lane", "digest", *numbers) if is_long else ("lane", *table.keys)
    predicate = f" WHERE digest IS {'NOT NULL' if is_long else 'NULL'}" if has_digest(table) else ""
    return (
        f"INSERT INTO oncelog_{table.name} ({', '.join(columns)}) SELECT * FROM {_build_unnest(columns)} "  # noqa: S608
        f"ON CONFLICT ({', '.join(unique)}){predicate} {on_conflict}"
    )


def _build_delete_sql(table: SideStateTable, *, is_long: bool = False) -> str:
    key_columns = _list_key_columns(table, is_long=is_long)
    names, on = ", ".join(key_columns), _build_condition(table, is_long=is_long)
    return (
        f"DELETE FROM oncelog_{table.name} WHERE ctid = ANY(ARRAY("  # noqa: S608
        f"SELECT t.place FROM {_build_unnest(key_columns)} AS n ({names}) CROSS JOIN LATERAL "
        f"(SELECT t.ctid AS place FROM oncelog_{table.name} AS t WHERE {on} OFFSET 0) AS t))"
    )


_LONG_KEY_TABLES: Final = tuple(table for table in TABLES if has_digest(table))
LOAD: Final = {table.name: _build_load_sql(table) for table in (*TABLES, PAST_MEMBERS)}
LOAD_LONG: Final = {table.name: _build_load_sql(table, is_long=True) for table in (*_LONG_KEY_TABLES, PAST_MEMBERS)}
SAVE: Final = {table.name: _build_save_sql(table) for table in STORED_TABLES}
SAVE_LONG: Final = {table.name: _build_save_sql(table, is_long=True) for table in (*_LONG_KEY_TABLES, MEMBER_CHANGES)}
DELETE: Final = {table.name: _build_delete_sql(table) for table in TABLES}
DELETE_LONG: Final = {table.name: _build_delete_sql(table, is_long=True) for table in _LONG_KEY_TABLES}
STATEMENTS: Final = tuple(
    statement
    for statements in (LOAD, LOAD_LONG, SAVE, SAVE_LONG, DELETE, DELETE_LONG)
    for statement in statements.values()
)
"""All of them, for sessions that know their statements in advance."""

KeyRows = list[tuple[Any, ...]]
_KEY_TEXT_GETTERS: Final = {
    table.name: [itemgetter(place) for place, name in enumerate(table.keys, 1) if _get_column_type(name) == "text"]
    for table in (*_LONG_KEY_TABLES, MEMBER_CHANGES)
}
"""The texts of a row's key."""


async def load_tables(connection: Any, read_set: ReadSet, snapshot: Snapshot) -> None:
    """Fill the snapshot with the side state that the read set names."""
    for table in TABLES:
        wanted = getattr(read_set, table.name)
        if wanted:
            setattr(snapshot, table.name, await load_table(connection, table, wanted, snapshot.settings.lanes))
    if read_set.oldest:
        keys = [
            (lane_of_scope(scope, snapshot.settings.lanes), scope, count) for scope, count in read_set.oldest.items()
        ]
        add_oldest_members(snapshot, await connection.fetch(SQL["oldest_members"], *to_columns(keys)))
    if read_set.past_members:
        lanes = snapshot.settings.lanes
        snapshot.past_members = await load_table(connection, PAST_MEMBERS, read_set.past_members, lanes)


async def load_table(connection: Any, table: SideStateTable, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """The rows of one table that are there, by key."""
    if table.name == USAGE_TABLE:
        rows = await connection.fetch(SQL["lock_usage"], list(keys))
        return {tenant: table.decode_value(tuple(values)) for tenant, *values in rows}
    needs = [(lane_of_scope(table.get_scope(key), lanes), *table.encode_key(key)) for key in keys]
    short, long = _split_by_length(table, needs)
    rows = await connection.fetch(LOAD[table.name], *to_columns(short)) if short else []
    if long:
        rows = [*rows, *await connection.fetch(LOAD_LONG[table.name], *to_columns(long))]
    width = len(table.keys)
    return {table.decode_key(tuple(row)[:width]): table.decode_value(tuple(row)[width:]) for row in rows}


async def save_tables(connection: Any, changes: Changes, lanes: int) -> None:
    """Saves all side state that has changed."""
    for table in TABLES:
        changed: Mapping[Any, Any] = getattr(changes, table.name)
        if not changed:
            continue
        saved, deleted = [], []
        for key, value in changed.items():
            columns = (lane_of_scope(table.get_scope(key), lanes), *table.encode_key(key))
            if value is None:
                deleted.append(columns)
            else:
                saved.append((*columns, *table.encode_value(value)))
        await _save_rows(connection, table, saved)
        await delete_rows(connection, table, deleted)
    if changes.members or changes.acknowledged:
        await _save_rows(connection, MEMBER_CHANGES, build_member_change_rows(changes, lanes))


async def _save_rows(connection: Any, table: SideStateTable, rows: Sequence[tuple[Any, ...]]) -> None:
    """Inserts rows, or updates existing ones."""
    short, long = _split_by_length(table, rows)
    if short:
        await connection.execute(SAVE[table.name], *to_columns(short))
    if long:
        await connection.execute(SAVE_LONG[table.name], *to_columns(long))


async def delete_rows(connection: Any, table: SideStateTable, keys: Sequence[tuple[Any, ...]]) -> None:
    """Deletes the rows of some keys, each with its lane."""
    short, long = _split_by_length(table, keys)
    if short:
        await connection.execute(DELETE[table.name], *to_columns(short))
    if long:
        await connection.execute(DELETE_LONG[table.name], *to_columns(long))


def _split_by_length(
    table: SideStateTable, rows: Sequence[tuple[Any, ...]]
) -> tuple[Sequence[tuple[Any, ...]], KeyRows]:
    """Rows with short keys, and those with long keys and their digests. A row has lane, key, and perhaps values."""
    if not rows or not has_digest(table):
        return rows, []
    longest = sum(max(map(len, map(text, rows))) for text in _KEY_TEXT_GETTERS[table.name])
    if longest <= _SHORT_CHARACTERS_MAX:  # the common case, found without checking each row
        return rows, []
    end = 1 + len(table.keys)
    digests = [compute_digest(row[1:end]) for row in rows]
    if not any(digests):
        return rows, []
    both = list(zip(rows, digests, strict=True))
    long = [(*row[:end], digest, *row[end:]) for row, digest in both if digest is not None]
    return [row for row, digest in both if digest is None], long


def to_columns(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows as one array a column. There must be one at least."""
    return list(zip(*rows, strict=True))
