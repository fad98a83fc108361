"""SQLite's integrity checks, the definitions of the tables, and the quick check of a backup."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

from oncelog.core.proof import Block
from oncelog.sql_files import split_script
from oncelog.storage.queries.records import load_heads
from oncelog.storage.sqlite.key_index.index import POSITION_BITS, encode_place
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.statements import SQL, load_migrations
from oncelog.storage.verify.findings import InconsistencyError, StepProgress, translate_damage
from oncelog.storage.verify.schema_definitions import check_definitions


def check_structure(connection: Any) -> None:
    """Let SQLite check the file. It does not compare indexes with their tables: `check_indexes` does."""
    _check_by_sqlite(connection, "PRAGMA quick_check(1)")


def check_indexes(connection: Any) -> Iterator[StepProgress]:
    """Let SQLite compare the indexes of Oncelog's tables with the tables: an entry that is missing hides a row.

    Other tables are an application's. Their indexes may need functions that only the application defines.
    """
    tables = [name for (name,) in connection.execute(SQL["indexed_tables"])]
    for done, name in enumerate(tables):
        yield StepProgress("structure", done, len(tables))
        _check_by_sqlite(connection, f"PRAGMA integrity_check({name})")


def _check_by_sqlite(connection: Any, pragma: str) -> None:
    found = connection.execute(pragma).fetchone()
    if found is None or found[0] != "ok":
        raise InconsistencyError("SQLite finds the file damaged: " + " ".join(str(found and found[0]).split()))


def check_schema(connection: Any) -> None:
    """Compare Oncelog's tables, and all indexes, triggers and views on them, with what the migrations create."""
    check_definitions(_build_expected_schema(), _load_schema(connection))


@cache
def _build_expected_schema() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:")) as expected:
        for _, script in load_migrations():
            for statement in split_script(script):
                expected.execute(statement)
        return _load_schema(expected)


def _load_schema(connection: Any) -> dict[str, str]:
    """Return the definitions by kind and name: `index oncelog_members_member on oncelog_members`."""
    found = {}
    for kind, name, table, definition in connection.execute(SQL["schema"]):
        place = f" on {table}" if kind in {"index", "trigger"} else ""
        found[f"{kind} {name}{place}"] = str(definition)
    return found


def verify_quickly(connection: Any) -> None:
    """Run SQLite's own check, and verify the newest block of each lane. Raises InconsistencyError."""
    with translate_damage():
        check_structure(connection)
        check_schema(connection)
        _check_newest(connection)


def _check_newest(connection: Any) -> None:
    """Compare each head with the newest block and the newest record of its lane."""
    for lane, head in run_query(connection, load_heads).items():
        rows = connection.execute(SQL["blocks"], (lane, head.height - 1, 2)).fetchall()
        block = Block(*rows[0]) if rows else None
        if head.height == 0 and block is None and head.position == 0:
            continue
        if block is None or len(rows) > 1 or block.height != head.height:
            raise InconsistencyError(f"the head says height {head.height}, the blocks do not end there", lane)
        if block.hash != head.block_hash or block.first_position + block.count - 1 != head.position:
            raise InconsistencyError("the head is not that of the newest block", lane, head.position)
        last = connection.execute(SQL["last_place"], (encode_place(lane, (1 << POSITION_BITS) - 1),)).fetchone()[0]
        if last != encode_place(lane, head.position):
            raise InconsistencyError("the newest record is not the one that the head names", lane, head.position)
