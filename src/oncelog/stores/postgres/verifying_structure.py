"""The tables and indexes of a log, held against those that the migrations make."""

from importlib.resources import files
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.values import LaneHead
from oncelog.stores.postgres.looking import Looking
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.verifying.definitions import check_definitions
from oncelog.stores.verifying.findings import ContradictionError


class Shape(Struct):
    """What the catalog says of a log: `sql/shape.json` has it of one that the migrations have made."""

    tables: dict[str, dict[str, str]]
    """The columns of each, and what they hold."""
    indexes: dict[str, str]


SHAPE: Final = msgspec.json.decode(
    (files("oncelog.stores.postgres") / "sql" / "shape.json").read_bytes(), type=Shape, strict=True
)


def shape_of(session: Looking) -> Shape:
    """Of the log that the session sees. Indexes that are not valid are not there."""
    tables: dict[str, dict[str, str]] = {}
    for table, column, definition in session.rows(SQL["columns"]):
        tables.setdefault(table, {})[column] = definition
    indexes = {}
    for index, table, definition, is_unique, is_valid in session.rows(SQL["indexes"]):
        if is_valid:
            indexes[index] = f"{'UNIQUE ' if is_unique else ''}ON {table} USING {definition}"
    return Shape(tables, indexes)


def check_shape(session: Looking) -> None:
    """Compare the tables with the result of the migrations. Added indexes are accepted.

    Triggers, rules and policies are not: they change the effect of writes and reads.
    """
    check_definitions({}, {f"{kind} {name}": "" for kind, name in session.rows(SQL["additions"])})
    found = shape_of(session)
    for name in sorted(SHAPE.tables.keys() | found.tables.keys()):
        wanted, has = SHAPE.tables.get(name), found.tables.get(name)
        if wanted != has:
            raise ContradictionError(f"the table {name} is not as Oncelog makes it{_difference(wanted, has)}")
    for name, definition in SHAPE.indexes.items():
        if found.indexes.get(name) != definition:
            raise ContradictionError(f"the index {name} is missing, not valid, or not as Oncelog makes it")


def check_lanes(heads: dict[int, LaneHead], lanes: int) -> None:
    """All heads are there from the beginning: whoever writes must have a row to lock."""
    for lane in range(lanes + 1):
        if lane not in heads:
            raise ContradictionError("has no head", lane)


def _difference(wanted: dict[str, str] | None, has: dict[str, str] | None) -> str:
    if has is None:
        return ": it is missing"
    if wanted is None:
        return ": there is no such table"
    columns = sorted(name for name in wanted.keys() | has.keys() if wanted.get(name) != has.get(name))
    return f": see its column {columns[0]}"
