"""Tombstone horizons are verified, moved and backed up with their log (DE-13)."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli.sample_log import START_MS, append, make_log
from core.item_builders import delta
from databases import query
from oncelog.core.merge import Op
from oncelog.core.values import DropTombstones, Tombstone
from oncelog.storage.backups import backup
from oncelog.storage.verify.findings import Inconsistency, VerificationSummary
from oncelog.storage.verify.verification import verify_log
from storage.migrate.migration_checks import assert_moved, ignore_progress, move_with_copy, read_file_rows

DAMAGE = (
    "UPDATE oncelog_horizons SET hlc = '-1'",
    "UPDATE oncelog_horizons SET hlc = 'soon'",
    "UPDATE oncelog_horizons SET hlc = '18446744073709551615'",
    "UPDATE oncelog_horizons SET lane = 0",
)


def make_log_with_horizon(log: Path | str) -> None:
    make_log(log, rounds=1)
    deleted = delta(8_000, hlc=START_MS << 16, op=Op.DELETE, scope="gateway/2")
    assert deleted.delta is not None
    append(log, deleted)
    append(log, DropTombstones("gateway/2", (Tombstone("todos", "r1", deleted.delta.stamp, 1, START_MS),), 0, ()))


@pytest.mark.rule("DE-13", "LG-18")
def test_impossible_horizon_in_a_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    make_log_with_horizon(path)
    *_, last = verify_log(str(path))
    assert isinstance(last, VerificationSummary)
    for statement in DAMAGE:
        with closing(sqlite3.connect(path)) as connection:
            (kept,) = connection.execute("SELECT lane, scope, hlc FROM oncelog_horizons").fetchall()
            connection.execute(statement)
            connection.commit()
            *_, last = verify_log(str(path))
            assert isinstance(last, Inconsistency), statement
            connection.execute("UPDATE oncelog_horizons SET lane = ?, scope = ?, hlc = ?", kept)
            connection.commit()


@pytest.mark.rule("DE-13", "LG-18")
def test_impossible_horizon_in_a_database_is_found(database: str) -> None:
    make_log_with_horizon(database)
    *_, last = verify_log(database)
    assert isinstance(last, VerificationSummary)
    for statement in DAMAGE:
        ((lane, scope, hlc),) = query(database, "SELECT lane, scope, hlc FROM oncelog_horizons")
        query(database, statement)
        *_, last = verify_log(database)
        assert isinstance(last, Inconsistency), statement
        query(database, "UPDATE oncelog_horizons SET lane = $1, scope = $2, hlc = $3", lane, scope, hlc)


@pytest.mark.rule("DE-13")
def test_moved_and_copied_logs_keep_their_horizon(tmp_path: Path, database: str) -> None:
    path, copy = tmp_path / "log.db", tmp_path / "copy.db"
    make_log_with_horizon(path)
    backup(str(path), str(copy), ignore_progress)
    horizons = read_file_rows(path)["horizons"]
    assert [row[1:] for row in horizons] == [("gateway/2", str((START_MS << 16) + 1))]
    assert read_file_rows(copy)["horizons"] == horizons
    move_with_copy(path, database)
    assert_moved(path, database)
