"""Fixtures of the deltas tests: a shared server."""

import pytest
import pytest_asyncio

from server.deltas.delta_servers import DeltasServer, SharedServer, server_pool_with
from server.shared_servers import ServerPool, unique_name

server_pool = server_pool_with()
"""Development-mode servers. Modules that need other settings override this fixture."""


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    session_loop: None, server_pool: ServerPool[DeltasServer], store_kind: str, request: pytest.FixtureRequest
) -> SharedServer:
    """A server from the module's pool, shared with other tests, with gateways that only this test uses."""
    return SharedServer(await server_pool.get(store_kind), unique_name(request))
