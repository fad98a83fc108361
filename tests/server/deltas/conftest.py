"""Fixtures of the deltas tests: a server that the tests share."""

import pytest
import pytest_asyncio

from server.deltas.delta_servers import Door, SharedServer, server_pool_with
from server.shared_servers import ServerPool, unique_name

server_pool = server_pool_with()
"""Servers in development mode. A module that needs other settings overrides this fixture."""


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    session_loop: None, server_pool: ServerPool[Door], store_kind: str, request: pytest.FixtureRequest
) -> SharedServer:
    """A server of the module's pool, which other tests use too, with gateways that only this test has."""
    return SharedServer(await server_pool.get(store_kind), unique_name(request))
