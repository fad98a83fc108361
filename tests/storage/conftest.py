import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.sample_log import make_log
from engine.observable_store import loop_clock
from oncelog.storage.sqlite import SqliteStore
from storage.sqlite.writers import open_sqlite

__all__ = ["loop_clock"]


@pytest.fixture(scope="session")
def sample_log_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed log with records of every kind, which tests copy."""
    path = tmp_path_factory.mktemp("sample") / "log.db"
    make_log(path, rounds=8)
    return path


@pytest.fixture
def log(sample_log_template: Path, tmp_path: Path) -> Path:
    """A copy of the closed log with records of every kind."""
    path = tmp_path / "log.db"
    shutil.copy(sample_log_template, path)
    return path


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """An open store with a manual clock."""
    store = await open_sqlite(tmp_path / "log.db")
    yield store
    await store.close()
