"""POSIX drops a process's locks on a file with any descriptor of it that the process closes. None of ours may."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

import oncelog
from crash.processes import started

OTHER: Final = str(Path(__file__).with_name("lock_worker.py"))


def event(number: int) -> oncelog.Submission:
    return oncelog.event(f"00000000-0000-4000-8000-{number:012}", {"type": "ours"}, ["p"])


def opened_and_closed_elsewhere(path: Path) -> None:
    with started(OTHER, str(path)) as process:
        assert process.wait() == 0


@contextmanager
def another_log(path: Path) -> Iterator[None]:
    with oncelog.open_blocking(path):
        yield


@contextmanager
def a_guest(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path)) as connection:
        oncelog.share(connection)
        yield


@contextmanager
def a_refusal(path: Path) -> Iterator[None]:
    """One that looks at the file and goes again."""
    with pytest.raises(oncelog.SettingsError), oncelog.open_blocking(path, settings=oncelog.Settings(lanes=3)):
        pass
    yield


@pytest.mark.rule("CO-12")
@pytest.mark.parametrize("second", [another_log, a_guest, a_refusal])
def test_a_second_use_of_a_file_in_one_process_costs_the_first_nothing(tmp_path: Path, second: object) -> None:
    """Else the other process takes itself for the last one, and removes the write-ahead log that is written to."""
    path = tmp_path / "app.db"
    with oncelog.open_blocking(path) as log:
        log.submit(event(2))
        with second(path):  # type: ignore[operator]
            pass
        opened_and_closed_elsewhere(path)
        verdict = log.submit(event(3))
        assert isinstance(verdict, oncelog.Committed)
        with started(OTHER, str(path)) as process:
            assert process.wait() == 0
        assert Path(f"{path}-wal").samefile(_wal_of_this_process(path))
    with oncelog.open_blocking(path) as log:
        assert isinstance(log.submit(event(3)), oncelog.Replayed)


def test_an_applications_own_connection_keeps_its_locks(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with oncelog.open_blocking(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
        with oncelog.open_blocking(path):
            pass
        opened_and_closed_elsewhere(path)
        connection.execute("INSERT INTO accounts VALUES ('ada')")
        connection.commit()
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT name FROM accounts").fetchall() == [("ada",)]
        opened_and_closed_elsewhere(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM accounts").fetchall() == [("ada",)]


def test_a_database_of_somebody_else_that_is_open_here_is_still_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        with pytest.raises(oncelog.NotALogError), oncelog.open_blocking(path):
            pass


def _wal_of_this_process(path: Path) -> Path:
    """The write-ahead log that this process has open, by its descriptor."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_symlink() and str(descriptor.readlink()).startswith(f"{path}-wal"):
            return descriptor
    raise AssertionError("no write-ahead log is open")
