import asyncio
import shutil
from pathlib import Path

import pytest
import pytest_asyncio

from cli.sample import make_log
from engine.watched import LoopClock


@pytest.fixture(scope="session")
def sample_log_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed log with records of every kind. Tests get copies."""
    path = tmp_path_factory.mktemp("sample") / "log.db"
    make_log(path, rounds=8)
    return path


@pytest.fixture
def log(sample_log_template: Path, tmp_path: Path) -> Path:
    """A closed log with records of every kind."""
    path = tmp_path / "log.db"
    shutil.copy(sample_log_template, path)
    return path


@pytest_asyncio.fixture
async def loop_clock() -> LoopClock:
    return LoopClock(asyncio.get_running_loop())
