from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cli.server_process import reserve_port
from client.events.event_clients import client_of
from oncelog.client import Client
from server.running_server import Serving, serving


@pytest.fixture
def port() -> Iterator[int]:
    """A port on 127.0.0.1 for a server that the test stops and restarts."""
    with reserve_port() as number:
        yield number


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with default settings."""
    async with serving(tmp_path) as server:
        yield server


@pytest.fixture
async def client(served: Serving) -> AsyncIterator[Client]:
    """An open client of `served` with an in-memory store."""
    async with client_of(served.url) as opened:
        yield opened
