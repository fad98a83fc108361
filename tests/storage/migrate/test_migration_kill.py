"""A move that is killed at any point can be continued, and the log is never writable in both places."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import oncelog
from cli.sample_log import full_event
from databases import address_of, query
from oncelog.errors import MovedError, StoreError
from oncelog.storage.migrate.migration import check_migration, migrate_log
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from storage.migrate.migration_checks import (
    assert_moved,
    can_be_opened,
    ignore_progress,
    move_and_kill,
    move_with_copy,
    open_copy_and_database,
    open_driver,
    open_writer,
    use_small_slices,
)
from storage.sqlite.writers import are_new, commit, erase
from storage.test_agreement import read_store


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slices(monkeypatch)


BEFORE_THE_MARK = [
    ("target.begin.after", 1),
    ("source.make_durable.after", 1),
    ("target.save_slice.before", 1),
    ("target.save_slice.after", 1),
    ("target._copy.before", 5),
    ("target._copy.after", 12),
    ("target.save_slice.after", 4),
    ("source.lock.after", 1),
    ("target.replace_side_state.before", 1),
    ("source.iterate_side_state.before", 4),
    ("target.replace_side_state.after", 1),
    ("target.count_rows.before", 1),
    ("source.save_marker.before", 1),
]


@pytest.mark.parametrize(("point", "number"), BEFORE_THE_MARK)
def test_killed_move_can_be_continued(log: Path, database: str, point: str, number: int) -> None:
    move_and_kill(log, database, point, number)
    assert not can_be_opened(PostgresStore(database))
    with open_writer(log) as session:  # the file is still the log and accepts writes
        assert are_new(commit(session, *range(5000, 5020)))
        erase(session, 0, [1, 3])
    before = query(database, "SELECT count(*) FROM oncelog_records")
    move_and_kill(log, database, "target.save_slice.after", 1)
    assert query(database, "SELECT count(*) FROM oncelog_records") > before
    move_with_copy(log, database)
    assert_moved(log, database)
    with open_copy_and_database(log, database) as (_, one, other):
        assert read_store(other) == read_store(one)


def test_move_killed_before_it_begins_leaves_no_tables(log: Path, database: str) -> None:
    move_and_kill(log, database, "target.begin.before")
    assert query(database, "SELECT to_regclass('oncelog_log')") == [(None,)]


def test_rows_lost_by_the_database_after_the_mark_are_copied_again(log: Path, database: str) -> None:
    """The loss simulates a failover to a standby that lagged behind."""
    move_and_kill(log, database, "source.save_marker.after")
    query(database, "DELETE FROM oncelog_records WHERE lane = 0 AND position > 10")
    query(database, "DELETE FROM oncelog_partition_records WHERE lane = 0 AND position > 10")
    query(database, "DELETE FROM oncelog_blocks WHERE lane = 0 AND first_position > 10")
    query(database, "DELETE FROM oncelog_leases")
    assert migrate_log(str(log), database, ignore_progress).is_new
    assert_moved(log, database)


@pytest.mark.parametrize("point", ["source.save_marker.after", "target.finish.before"])
def test_move_killed_after_the_mark_leaves_neither_side_writable(log: Path, database: str, point: str) -> None:
    move_and_kill(log, database, point)
    assert not can_be_opened(PostgresStore(database))
    assert not can_be_opened(SqliteStore(log))
    assert migrate_log(str(log), database, ignore_progress).is_new
    assert_moved(log, database)
    assert can_be_opened(PostgresStore(database))


def test_repeated_move_after_the_end_changes_nothing(log: Path, database: str) -> None:
    move_and_kill(log, database, "target.finish.after")
    for _ in range(2):
        check_migration(str(log), database)
        assert not migrate_log(str(log), database, ignore_progress).is_new
    assert_moved(log, database)
    with open_driver(lambda clock: PostgresStore(database, clock=clock)) as other:  # even after a later write
        assert isinstance(other(full_event(777_777, ["orders"])), oncelog.Committed)
    assert not migrate_log(str(log), database, ignore_progress).is_new


def test_older_copy_is_marked_as_moved_only_if_nothing_has_changed_since(log: Path, database: str) -> None:
    move_with_copy(log, database)
    copy = log.with_name("twin.db")
    assert migrate_log(str(copy), database, ignore_progress).is_new  # the copy has no mark and equal content
    with pytest.raises(MovedError):
        migrate_log(str(copy), address_of(log / "other"), ignore_progress)
    assert_moved(copy, database)
    another = log.with_name("another.db")
    shutil.copy(log, another)
    with closing(sqlite3.connect(another)) as connection:
        connection.execute("UPDATE oncelog_state SET moved = NULL")
        connection.commit()
    with open_writer(another) as session:
        commit(session, 9000)
    with pytest.raises(StoreError, match="one of the two has been written to"):
        migrate_log(str(another), database, ignore_progress)
    assert can_be_opened(SqliteStore(another))
