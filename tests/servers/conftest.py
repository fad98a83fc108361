"""Fixtures for tests of several servers on one database."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.observable_store import loop_clock
from oncelog.engine.log import open_log
from oncelog.testing.postgres import create_schema, postgres_server

__all__ = ["loop_clock"]


@pytest.fixture(scope="session")
def standby_server() -> Iterator[str]:
    """Address of a separate PostgreSQL server whose `synchronous_standby_names` the tests change."""
    directory = Path(tempfile.mkdtemp(prefix="oncelog-standby-"))
    try:
        with postgres_server(directory, is_own=True) as found:
            yield found.address
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def address(standby_server: str) -> str:
    """Address of a log that already exists, because creating it could exceed the short timeouts of the tests."""
    found = str(await create_schema(standby_server))
    async with open_log(found):
        return found
