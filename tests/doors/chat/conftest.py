"""Fixtures of the chat tests: a server that the tests share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from doors.chat.chat_doors import Door, SharedServer, opened
from doors.shared import ServerPool, unique_name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server_pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerPool[Door]]:
    """Servers in development mode."""
    async with ServerPool(lambda: opened(tmp_path_factory.mktemp("shared"))) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    server_pool: ServerPool[Door], store_kind: str, request: pytest.FixtureRequest
) -> AsyncIterator[SharedServer]:
    """A server in development mode that other tests use too, with chats that only this test has."""
    server = SharedServer(await server_pool.get(store_kind), unique_name(request))
    yield server
    await server.wait_until_idle()
