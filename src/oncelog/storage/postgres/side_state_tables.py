"""Side state in PostgreSQL: one table for each mapping of a snapshot. A single statement loads or saves all rows of a
table.

An index row holds at most 2,704 bytes, so keys with long names are indexed by a digest of their text columns
(`sql/migrations/0005_long_names.sql`). Nearly all keys are short; separate statements handle the long ones.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from operator import itemgetter
from typing import Any, Final

from oncelog.core.values import Changes
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.queries.statement import QuerySteps, Statement, TableSlice
from oncelog.storage.queries.writes import ErasedValues
from oncelog.storage.side_state import (
    BYTEA,
    PAST_MEMBERS,
    STORED_TABLES,
    TABLES,
    TEXT,
    USAGE_TABLE,
    SideStateTable,
    iterate_changes,
    lane_of_scope,
)

SHORT_BYTES_MAX: Final = 2000
"""Maximum total UTF-8 bytes of a short key's text columns, below PostgreSQL's limit of 2,704 bytes for an index row."""
_SHORT_CHARACTERS_MAX: Final = SHORT_BYTES_MAX // 4
"""A key with at most this many characters is certainly short, because a character has at most four bytes."""
_DIGEST: Final = {"digest": BYTEA}
_LANE: Final = {"lane": "integer"}


def compute_digest(key: Sequence[Any]) -> bytes | None:
    """Return the SHA-256 digest of a long key's text columns, or None for a short key.

    The separator is U+0000, which no name contains.
    """
    texts = [column for column in key if type(column) is str]
    if sum(map(len, texts)) <= _SHORT_CHARACTERS_MAX:
        return None
    encoded = [text.encode() for text in texts]
    return sha256(b"\0".join(encoded)).digest() if sum(map(len, encoded)) > SHORT_BYTES_MAX else None


def _build_unnest(columns: Mapping[str, str]) -> str:
    """Return the SQL that turns parameters, one array for each column, into rows."""
    arrays = ", ".join(f"${place}::{type_name}[]" for place, type_name in enumerate(columns.values(), 1))
    return f"unnest({arrays})"


def _get_key_columns(table: SideStateTable, *, is_long: bool) -> dict[str, str]:
    """Return the columns that identify a row, with their types."""
    return {**_LANE, **table.keys, **(_DIGEST if is_long else {})}


def _build_condition(table: SideStateTable, *, is_long: bool) -> str:
    """Return the SQL condition that a row `t` has the key `n`. For long keys, it compares the text columns too."""
    equal = " AND ".join(f"t.{column} = n.{column}" for column in _get_key_columns(table, is_long=is_long))
    if is_long:  # the planner may also choose the index for listings
        texts = (column for column, type_name in table.keys.items() if type_name == TEXT)
        equal += "".join(f" AND left(t.{column}, 64) = left(n.{column}, 64)" for column in texts)
    return f"{equal} AND t.digest IS {'NOT NULL' if is_long else 'NULL'}" if table.has_long_keys else equal


# `OFFSET 0` makes the planner look up each key in the index. Plans may be made while tables are empty: the planner then
# expects one row in a partial index, and would read the whole index for every key.


def _build_load_sql(table: SideStateTable, *, is_long: bool = False) -> str:
    key_columns = _get_key_columns(table, is_long=is_long)
    columns = ", ".join(f"t.{column}" for column in (*table.keys, *table.values))
    names, on = ", ".join(key_columns), _build_condition(table, is_long=is_long)
    return (
        f"SELECT t.* FROM {_build_unnest(key_columns)} AS n ({names}) CROSS JOIN LATERAL "  # noqa: S608
        f"(SELECT {columns} FROM oncelog_{table.name} AS t WHERE {on} OFFSET 0) AS t"
    )


def _build_save_sql(table: SideStateTable, *, is_long: bool = False) -> str:
    columns = {**_get_key_columns(table, is_long=is_long), **table.values}
    if not table.values:
        on_conflict = "DO NOTHING"
    else:
        on_conflict = "DO UPDATE SET " + ", ".join(f"{column} = excluded.{column}" for column in table.values)
    numbers = [column for column, type_name in table.keys.items() if type_name != TEXT]
    unique = ("lane", "digest", *numbers) if is_long else ("lane", *table.keys)
    predicate = f" WHERE digest IS {'NOT NULL' if is_long else 'NULL'}" if table.has_long_keys else ""
    return (
        f"INSERT INTO oncelog_{table.name} ({', '.join(columns)}) SELECT * FROM {_build_unnest(columns)} "  # noqa: S608
        f"ON CONFLICT ({', '.join(unique)}){predicate} {on_conflict}"
    )


def _build_delete_sql(table: SideStateTable, *, is_long: bool = False) -> str:
    key_columns = _get_key_columns(table, is_long=is_long)
    names, on = ", ".join(key_columns), _build_condition(table, is_long=is_long)
    return (
        f"DELETE FROM oncelog_{table.name} WHERE ctid = ANY(ARRAY("  # noqa: S608
        f"SELECT t.place FROM {_build_unnest(key_columns)} AS n ({names}) CROSS JOIN LATERAL "
        f"(SELECT t.ctid AS place FROM oncelog_{table.name} AS t WHERE {on} OFFSET 0) AS t))"
    )


def _build_slice_sql(table: SideStateTable) -> tuple[str, str, str]:
    """Return the statements that read the next rows of a lane: the first short keys, short keys after a key, and long
    keys.

    Each row ends with its digest, which orders the long keys.
    """
    keys = ", ".join(table.keys)
    marks = ", ".join(f"${place}" for place in range(3, 3 + len(table.keys)))
    columns = ", ".join((*table.columns, "digest"))
    of_lane = f"SELECT {columns} FROM oncelog_{table.name} WHERE lane = $1 AND digest IS"  # noqa: S608
    return (
        f"{of_lane} NULL ORDER BY {keys} LIMIT $2",
        f"{of_lane} NULL AND ({keys}) > ({marks}) ORDER BY {keys} LIMIT $2",
        f"{of_lane} NOT NULL AND digest > $3 ORDER BY digest LIMIT $2",
    )


def _build_both(build: Callable[..., str], tables: Iterable[SideStateTable]) -> dict[str, tuple[str, ...]]:
    """Return a statement for each table's short keys, and a second one for long keys if the table can have them."""
    return {
        table.name: (build(table), build(table, is_long=True)) if table.has_long_keys else (build(table),)
        for table in tables
    }


LOAD: Final = _build_both(_build_load_sql, (*TABLES, PAST_MEMBERS))
SAVE: Final = _build_both(_build_save_sql, STORED_TABLES)
DELETE: Final = _build_both(_build_delete_sql, TABLES)
SLICE: Final = {table.name: _build_slice_sql(table) for table in TABLES if table.expires}
STATEMENTS: Final = tuple(chain.from_iterable(chain(LOAD.values(), SAVE.values(), DELETE.values(), SLICE.values())))
"""All side-state statements, for sessions that prepare their statements in advance."""
_KEY_TEXT_GETTERS: Final = {
    table.name: [itemgetter(place) for place, name in enumerate(table.keys.values(), 1) if name == TEXT]
    for table in STORED_TABLES
}
"""Functions that return the text columns of a row's key."""
_ENCODERS: Final = {table.name: table.encode_value for table in TABLES}


async def load_table(connection: Any, table: SideStateTable, keys: Iterable[Any], lanes: int) -> dict[Any, Any]:
    """Return the existing rows of one table, by key."""
    if table.name == USAGE_TABLE:
        rows = await connection.fetch(SQL["lock_usage"], list(keys))
        return {tenant: table.decode_value(tuple(values)) for tenant, *values in rows}
    wanted = [(lane_of_scope(table.get_scope(key), lanes), *table.encode_key(key)) for key in keys]
    width = len(table.keys)
    found = {}
    for statement, columns in _split_by_length(LOAD, table, wanted):
        for row in map(tuple, await connection.fetch(statement, *columns)):
            found[table.decode_key(row[:width])] = table.decode_value(row[width:])
    return found


async def load_slice(connection: Any, request: TableSlice) -> tuple[list[Any], Any]:
    """Return the next rows of a lane: short keys ordered by key, then long keys ordered by digest."""
    first, next_, long = SLICE[request.table.name]
    after = request.after
    is_long = isinstance(after, bytes)
    statement, place = (long, (after,)) if is_long else (next_, after) if after else (first, ())
    rows = [tuple(row) for row in await connection.fetch(statement, request.lane, request.rows_max, *place)]
    if len(rows) < request.rows_max:  # the next slice has long keys, or starts a new pass
        following: Any = None if is_long else b""
    else:
        following = rows[-1][-1] if is_long else rows[-1][1 : 1 + len(request.table.keys)]
    return [row[:-1] for row in rows], following


async def save_tables(connection: Any, changes: Changes, lanes: int) -> None:
    """Save all side state that has changed."""
    for table, rows in iterate_changes(changes, lanes, _ENCODERS):
        for statement, columns in _split_by_length(SAVE, table, rows.inserted):
            await connection.execute(statement, *columns)
        await delete_rows(connection, table, rows.deleted)


async def delete_rows(connection: Any, table: SideStateTable, keys: Sequence[tuple[Any, ...]]) -> None:
    """Delete the rows with the given keys, each of which starts with its lane."""
    for statement, columns in _split_by_length(DELETE, table, keys):
        await connection.execute(statement, *columns)


def _split_by_length(
    statements: Mapping[str, tuple[str, ...]], table: SideStateTable, rows: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Yield the statements for short and for long keys, each with its rows as columns. A statement without rows is
    skipped.

    A row has a lane, a key and possibly values. Rows with long keys get their digests after the key.
    """
    if not rows:
        return
    short, *long = statements[table.name]
    if long and _may_be_long(table, rows):
        end = 1 + len(table.keys)
        digested = [(row, compute_digest(row[1:end])) for row in rows]
        rows = [row for row, digest in digested if digest is None]
        long_rows = [(*row[:end], digest, *row[end:]) for row, digest in digested if digest is not None]
        if long_rows:
            yield long[0], to_columns(long_rows)
    if rows:
        yield short, to_columns(rows)


def _may_be_long(table: SideStateTable, rows: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether any key may be long, judging only by the longest strings, which are short in most batches."""
    return sum(max(map(len, map(text, rows))) for text in _KEY_TEXT_GETTERS[table.name]) > _SHORT_CHARACTERS_MAX


def to_columns(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Convert rows to one array per column. There must be at least one row."""
    return list(zip(*rows, strict=True))


def erase_values(lane: int, erased: ErasedValues) -> QuerySteps[int]:
    """Erase the values of entities. Returns how many bytes tenants were charged for them."""
    place = (lane, erased.scope, erased.versions)
    if erased.keys is None:
        rows = yield Statement("erase_all_values", *place)
    else:
        digests = {key: compute_digest((erased.scope, key)) for key in erased.keys}
        short = [key for key, digest in digests.items() if digest is None]
        long = [digest for digest in digests.values() if digest is not None]
        rows = (yield Statement("erase_values", *place, short)) if short else []
        rows += (yield Statement("erase_long_values", *place, long)) if long else []
    return sum(row[0] for row in rows)
