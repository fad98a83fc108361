"""Fixtures of the deltas tests: a server that the tests share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from doors.deltas.delta_doors import Door, SharedServer, server_pool_of
from doors.shared import ServerPool, unique_name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server_pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerPool[Door]]:
    """Servers in development mode. A module that needs other settings overrides this fixture."""
    async with server_pool_of(tmp_path_factory) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(server_pool: ServerPool[Door], store_kind: str, request: pytest.FixtureRequest) -> SharedServer:
    """A server of the module's pool, which other tests use too, with gateways that only this test has."""
    return SharedServer(await server_pool.get(store_kind), unique_name(request))
