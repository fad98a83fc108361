"""Side state in SQLite: a batch reads only the rows that it needs, and updates them in place."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from oncelog.core.batch_state import BatchState
from oncelog.core.merge import Row
from oncelog.core.read_set import ReadSet
from oncelog.core.values import LaneHead, Member, Settings, Snapshot
from oncelog.errors import CorruptError
from oncelog.storage.queries.side_state import load_tables
from oncelog.storage.sqlite import side_state_tables
from oncelog.storage.sqlite.database_file import SqliteDriver, connect, create_or_open
from oncelog.storage.sqlite.query_driver import run_query

ROW = ("deltas/shop", "products", "tea")


def test_update_of_a_missing_row_is_reported_as_corrupt(tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    changes = replace(
        BatchState(Snapshot(), 0).collect_changes(), rows={ROW: Row({"a": (b"2", (2, b"", b""))}, (2, b"", b""))}
    )
    with closing(connect(SqliteDriver(), path)) as connection:
        create_or_open(connection, path, Settings(), 0)
        with pytest.raises(CorruptError, match="only 0 of 1 rows that were read from the table rows can be updated"):
            side_state_tables.save_tables(connection, changes, 1, Snapshot(rows={ROW: Row()}))
        assert read_stored_members(connection) == []
        side_state_tables.save_tables(connection, changes, 1)
        assert len(read_stored_members(connection)) == 1
        newer = replace(changes, rows={ROW: Row({"a": (b"3", (3, b"", b""))}, (3, b"", b""))})
        before = read_stored_members(connection)
        side_state_tables.save_tables(connection, newer, 1, Snapshot(rows={ROW: Row()}))
        assert len(read_stored_members(connection)) == 1
        assert read_stored_members(connection) != before


@pytest.mark.rule("CH-19")
def test_each_stream_loads_the_requested_number_of_oldest_members(tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    members = {(f"chat/{chat}", f"user:{number}"): Member(number) for chat in range(5) for number in range(1, 21)}
    with closing(connect(SqliteDriver(), path)) as connection:
        create_or_open(connection, path, Settings(), 0)
        side_state_tables.save_tables(
            connection, replace(BatchState(Snapshot(), 0).collect_changes(), members=members, heads={1: LaneHead()}), 1
        )
        snapshot = Snapshot(settings=Settings(lanes=1))
        needed = {"chat/0": 15, "chat/1": 2, "chat/2": 2, "chat/3": 3, "chat/none": 2}
        run_query(connection, load_tables, ReadSet(rosters=set(needed), oldest=needed), snapshot)
    assert snapshot.members == {
        (scope, f"user:{number}"): Member(number)
        for scope, count in needed.items()
        for number in range(1, count + 1)
        if scope != "chat/none"
    }


def read_stored_members(connection: sqlite3.Connection) -> list[tuple[str, bytes]]:
    return connection.execute("SELECT row_id, state FROM oncelog_rows").fetchall()
