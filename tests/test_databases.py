"""The marker `stores` selects the store that a test uses."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import oncelog
from databases import BOTH_STORES, POSTGRES, SQLITE, DatabasePool, is_postgres, log_at, query
from oncelog.testing.contract.writes import event

COUNT = "SELECT count(*) FROM oncelog_records"


@BOTH_STORES
def test_log_is_in_the_marked_store(tmp_path: Path, store_kind: str) -> None:
    path = tmp_path / "log.db"
    with oncelog.open_blocking(log_at(path)) as log:
        log.submit(event(1))
    assert is_postgres() == (store_kind == POSTGRES)
    assert path.exists() == (store_kind == SQLITE)
    if store_kind == POSTGRES:
        assert query(log_at(path), COUNT) == [(1,)]
    else:
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute(COUNT).fetchall() == [(1,)]


def test_log_of_a_test_without_a_marker_is_a_file(tmp_path: Path) -> None:
    assert log_at(tmp_path / "log.db") == str(tmp_path / "log.db")


@BOTH_STORES
def test_each_path_has_a_separate_database(tmp_path: Path) -> None:
    assert log_at(tmp_path / "a") == log_at(tmp_path / "a") != log_at(tmp_path / "b")


def test_server_is_not_started_with_check() -> None:
    databases = DatabasePool()
    databases.is_allowed = False
    with pytest.raises(RuntimeError, match="--check runs without PostgreSQL"):
        _ = databases.server
