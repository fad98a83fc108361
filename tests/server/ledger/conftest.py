"""Fixtures of the ledger tests: a wire protocol and a shared server."""

import pytest
import pytest_asyncio

from deadlines import WAIT_S
from oncelog.server.ledger import health_service
from server.ledger.ledger_servers import LedgerServer, SharedServer, server_pool_with
from server.ledger.ledger_transports import WIRES
from server.shared_servers import ServerPool, unique_name

server_pool = server_pool_with()
"""Development-mode servers. Modules that need other settings override this fixture."""


@pytest.fixture(autouse=True)
def patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the timeout for the message of a health call for busy machines. Tests of the timeout set a short one."""
    monkeypatch.setattr(health_service, "READ_TIMEOUT_S", WAIT_S)


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """The protocol between test and server: gRPC or HTTP."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(
    session_loop: None,
    server_pool: ServerPool[LedgerServer],
    wire: str,
    store_kind: str,
    request: pytest.FixtureRequest,
) -> SharedServer:
    """A server from the module's pool, shared with other tests, with an organization that only this test uses."""
    server = await server_pool.get(store_kind)
    server.kind = wire
    return SharedServer(server, unique_name(request))
