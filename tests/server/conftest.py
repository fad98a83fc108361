"""Fixtures of the API tests: a shared server."""

import aiohttp
import pytest
import pytest_asyncio

from deadlines import WAIT_S
from oncelog.server import operator_endpoints
from server.running_server import Serving, serving
from server.shared_servers import ServerPool, pool_fixture

# A malformed request may close its connection, so the next test must not reuse it.
server_pool = pool_fixture(lambda directory: serving(directory, connector=aiohttp.TCPConnector(force_close=True)))


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(session_loop: None, server_pool: ServerPool[Serving], store_kind: str) -> Serving:
    """A development-mode server for requests that the server refuses, so its log remains empty."""
    return await server_pool.get(store_kind)


@pytest.fixture(autouse=True)
def patient_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the store timeout of `/readyz` for slow machines. Tests of the timeout set a short one."""
    monkeypatch.setattr(operator_endpoints, "READY_TIMEOUT_S", WAIT_S)
