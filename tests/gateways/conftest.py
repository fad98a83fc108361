"""What the tests of several gateways on one database share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateways.gateway_stores import run
from oncelog.engine.log import open_log
from oncelog.testing.postgres import fresh_schema, postgres_server


@pytest.fixture(scope="module")
def standby_server() -> Iterator[str]:
    """The address of a server of our own: it is told for whom to wait."""
    directory = Path(tempfile.mkdtemp(prefix="oncelog-standby-"))
    try:
        with postgres_server(directory, is_own=True) as found:
            yield found.address
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def address(standby_server: str) -> str:
    """Of a log that is there, so that nobody in a hurry has to make it."""

    async def made() -> str:
        found = await fresh_schema(standby_server)
        async with open_log(found):
            return found

    return str(run(made()))
