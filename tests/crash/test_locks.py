"""POSIX drops a process's locks on a file when the process closes any descriptor of the file. A log must keep its
locks.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

import oncelog
from scripts import start_script

OTHER: Final = Path(__file__).with_name("lock_worker.py")


def event(number: int) -> oncelog.Submission:
    return oncelog.event(f"00000000-0000-4000-8000-{number:012}", {"type": "ours"}, ["p"])


def open_and_close_elsewhere(path: Path) -> None:
    with start_script(OTHER, path) as process:
        assert process.wait() == 0


@contextmanager
def another_log(path: Path) -> Iterator[None]:
    with oncelog.open_blocking(path):
        yield


@contextmanager
def borrowed_transaction(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path)) as connection:
        oncelog.share(connection)
        yield


@contextmanager
def refused_open(path: Path) -> Iterator[None]:
    """Fail to open the log after reading the file, because the settings differ."""
    with pytest.raises(oncelog.SettingsError), oncelog.open_blocking(path, settings=oncelog.Settings(lanes=3)):
        pass
    yield


@pytest.mark.rule("CO-12")
@pytest.mark.parametrize("second", [another_log, borrowed_transaction, refused_open])
def test_log_keeps_its_locks_when_same_process_opens_the_file_again(tmp_path: Path, second: object) -> None:
    """Without the locks, another process would consider itself the last user and remove the write-ahead log in use."""
    path = tmp_path / "app.db"
    with oncelog.open_blocking(path) as log:
        log.submit(event(2))
        with second(path):  # type: ignore[operator]
            pass
        open_and_close_elsewhere(path)
        verdict = log.submit(event(3))
        assert isinstance(verdict, oncelog.Committed)
        open_and_close_elsewhere(path)
        assert Path(f"{path}-wal").samefile(_wal_of_this_process(path))
    with oncelog.open_blocking(path) as log:
        assert isinstance(log.submit(event(3)), oncelog.Replayed)


def test_application_connection_keeps_its_locks_when_a_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with oncelog.open_blocking(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
        with oncelog.open_blocking(path):
            pass
        open_and_close_elsewhere(path)
        connection.execute("INSERT INTO accounts VALUES ('ada')")
        connection.commit()
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT name FROM accounts").fetchall() == [("ada",)]
        open_and_close_elsewhere(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM accounts").fetchall() == [("ada",)]


def test_open_database_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        with pytest.raises(oncelog.NotALogError), oncelog.open_blocking(path):
            pass


def _wal_of_this_process(path: Path) -> Path:
    """Return the descriptor of the open write-ahead log in this process."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_symlink() and str(descriptor.readlink()).startswith(f"{path}-wal"):
            return descriptor
    raise AssertionError("no write-ahead log is open")
