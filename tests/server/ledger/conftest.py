"""Fixtures of the ledger tests: a wire protocol, and a server that the tests share."""

import pytest
import pytest_asyncio

from deadlines import WAIT_S
from oncelog.server.ledger import health_service
from server.ledger.ledger_servers import Door, SharedServer, server_pool_with
from server.ledger.ledger_transports import WIRES
from server.shared_servers import ServerPool, unique_name

server_pool = server_pool_with()
"""Servers in development mode. A module that needs other settings overrides this fixture."""


@pytest.fixture(autouse=True)
def patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the message of a health call time to arrive on a busy machine. A test of the timeout sets a short one."""
    monkeypatch.setattr(health_service, "READ_TIMEOUT_S", WAIT_S)


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """The protocol that the test speaks to the server: gRPC or HTTP."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    session_loop: None, server_pool: ServerPool[Door], wire: str, store_kind: str, request: pytest.FixtureRequest
) -> SharedServer:
    """A server of the module's pool, which other tests use too, with an organization that only this test has."""
    door = await server_pool.get(store_kind)
    door.kind = wire
    return SharedServer(door, unique_name(request))
