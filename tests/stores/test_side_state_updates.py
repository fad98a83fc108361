"""Rows that a batch has read are updated in place. A missing row is an error."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from oncelog.core.desk import Desk
from oncelog.core.merge import Row
from oncelog.core.values import Settings, Snapshot
from oncelog.errors import CorruptError
from oncelog.stores.sqlite import tables
from oncelog.stores.sqlite.files import SqliteDriver, connect, make_or_open

ROW = ("deltas/shop", "products", "tea")


def test_update_of_a_missing_row_is_reported_as_corrupt(tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    changes = replace(Desk(Snapshot(), 0).changes(), rows={ROW: Row({"a": (b"2", (2, b"", b""))}, (2, b"", b""))})
    with closing(connect(SqliteDriver(), path)) as connection:
        make_or_open(connection, path, Settings(), 0)
        with pytest.raises(CorruptError, match="of 1 rows that were read 0 are there"):
            tables.save(connection, changes, 1, Snapshot(rows={ROW: Row()}))
        assert stored(connection) == []
        tables.save(connection, changes, 1)
        assert len(stored(connection)) == 1
        newer = replace(changes, rows={ROW: Row({"a": (b"3", (3, b"", b""))}, (3, b"", b""))})
        before = stored(connection)
        tables.save(connection, newer, 1, Snapshot(rows={ROW: Row()}))
        assert len(stored(connection)) == 1
        assert stored(connection) != before


def stored(connection: sqlite3.Connection) -> list[tuple[str, bytes]]:
    return connection.execute("SELECT row_id, state FROM oncelog_rows").fetchall()
