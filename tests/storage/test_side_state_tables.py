"""The descriptions of the side-state tables match the core's mappings and both schemas."""

import sqlite3
from contextlib import closing
from pathlib import Path

from databases import query
from oncelog.core.batch_state import BatchState
from oncelog.core.read_set import ReadSet
from oncelog.core.values import STATE_TABLES, Settings, Snapshot
from oncelog.engine.log import open_log
from oncelog.storage.side_state import STORED_TABLES, TABLES
from oncelog.storage.sqlite.database_file import SqliteDriver, connect, create_or_open

IDENTITIES = {"keys", "sequences"}
"""Mappings of a snapshot without a table, because stores derive them from the records."""
COLUMNS = """
SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
"""


def test_every_mapping_of_a_snapshot_has_a_table() -> None:
    names = [table.name for table in TABLES]
    assert {*names} == {*STATE_TABLES} - IDENTITIES
    assert len(names) == len({*names})
    assert {*STATE_TABLES} <= {*ReadSet.__struct_fields__}
    assert {*STATE_TABLES} <= {*vars(BatchState(Snapshot(), 0))}


def test_batch_without_items_changes_nothing() -> None:
    changes = BatchState(Snapshot(), 0).collect_changes()
    assert all(getattr(changes, name) == {} for name in STATE_TABLES)
    assert changes.is_empty


def test_columns_of_the_file_match_the_description(tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    with closing(connect(SqliteDriver(), path)) as connection:
        create_or_open(connection, path, Settings(), 0)
    with closing(sqlite3.connect(path)) as connection:
        for table in STORED_TABLES:
            statement = "SELECT name, pk FROM pragma_table_info(?)"
            rows = connection.execute(statement, (f"oncelog_{table.name}",)).fetchall()
            assert {name for name, _ in rows} == {*table.columns}, table.name
            assert {name for name, key in rows if key} == {"lane", *table.keys}, table.name


async def test_columns_of_the_database_match_the_description(database: str) -> None:
    async with open_log(database):
        pass
    for table in STORED_TABLES:
        found = dict(query(database, COLUMNS, f"oncelog_{table.name}"))
        assert found.pop("lane") == "integer"
        assert (found.pop("digest", None) == "bytea") is table.has_long_keys, table.name
        assert found == {**table.keys, **table.values}, table.name
