"""Fixtures of the ledger tests: a wire protocol, and a server that the tests share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from doors.ledger.ledger_doors import Door, SharedServer, server_pool_of
from doors.ledger.wires import WIRES
from doors.shared import ServerPool, unique_name


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server_pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerPool[Door]]:
    """Servers in development mode. A module that needs other settings overrides this fixture."""
    async with server_pool_of(tmp_path_factory) as pool:
        yield pool


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """The protocol that the test speaks to the server: gRPC or HTTP."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    server_pool: ServerPool[Door], wire: str, store_kind: str, request: pytest.FixtureRequest
) -> SharedServer:
    """A server of the module's pool, which other tests use too, with an organization that only this test has."""
    door = await server_pool.get(store_kind)
    door.kind = wire
    return SharedServer(door, unique_name(request))
