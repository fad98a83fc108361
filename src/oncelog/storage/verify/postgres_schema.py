"""Compares the tables and indexes of a log with those that the migrations create."""

from importlib.resources import files
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.values import LaneHead
from oncelog.storage.postgres.read_session import ReadSession
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.verify.findings import InconsistencyError
from oncelog.storage.verify.schema_definitions import check_definitions


class CatalogSchema(Struct):
    """What the catalog says of a log: `sql/shape.json` has it of one that the migrations have made."""

    tables: dict[str, dict[str, str]]
    """The columns of each, and what they hold."""
    indexes: dict[str, str]


EXPECTED_SCHEMA: Final = msgspec.json.decode(
    (files("oncelog.storage.postgres") / "sql" / "shape.json").read_bytes(), type=CatalogSchema, strict=True
)


def load_schema(session: ReadSession) -> CatalogSchema:
    """Of the log that the session sees. Indexes that are not valid are not there."""
    tables: dict[str, dict[str, str]] = {}
    for table, column, definition in session.iterate_rows(SQL["columns"]):
        tables.setdefault(table, {})[column] = definition
    indexes = {}
    for index, table, definition, is_unique, is_valid in session.iterate_rows(SQL["indexes"]):
        if is_valid:
            indexes[index] = f"{'UNIQUE ' if is_unique else ''}ON {table} USING {definition}"
    return CatalogSchema(tables, indexes)


def check_schema(session: ReadSession) -> None:
    """Compare the tables with the result of the migrations. Added indexes are accepted.

    Triggers, rules and policies are not: they change the effect of writes and reads.
    """
    check_definitions({}, {f"{kind} {name}": "" for kind, name in session.iterate_rows(SQL["additions"])})
    found = load_schema(session)
    for name in sorted(EXPECTED_SCHEMA.tables.keys() | found.tables.keys()):
        wanted, has = EXPECTED_SCHEMA.tables.get(name), found.tables.get(name)
        if wanted != has:
            raise InconsistencyError(f"the table {name} is not as Oncelog makes it{_describe_difference(wanted, has)}")
    for name, definition in EXPECTED_SCHEMA.indexes.items():
        if found.indexes.get(name) != definition:
            raise InconsistencyError(f"the index {name} is missing, not valid, or not as Oncelog makes it")


def check_lanes(heads: dict[int, LaneHead], lanes: int) -> None:
    """All heads are there from the beginning: whoever writes must have a row to lock."""
    for lane in range(lanes + 1):
        if lane not in heads:
            raise InconsistencyError("has no head", lane)


def _describe_difference(wanted: dict[str, str] | None, found: dict[str, str] | None) -> str:
    if found is None:
        return ": it is missing"
    if wanted is None:
        return ": there is no such table"
    columns = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return f": see its column {columns[0]}"
