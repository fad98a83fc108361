"""Fixtures of the chat tests: a shared server."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from server.chat.chat_servers import ChatServer, SharedServer, run_server
from server.shared_servers import ServerPool, pool_fixture, unique_name

server_pool = pool_fixture(run_server)


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    session_loop: None, server_pool: ServerPool[ChatServer], store_kind: str, request: pytest.FixtureRequest
) -> AsyncIterator[SharedServer]:
    """A development-mode server shared with other tests, with chats that only this test uses."""
    server = SharedServer(await server_pool.get(store_kind), unique_name(request))
    yield server
    await server.wait_until_idle()
