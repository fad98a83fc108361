"""Fixtures of the API tests: a server that tests share."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
import pytest_asyncio

from doors.serving import Serving, serving
from doors.shared import ServerPool


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server_pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerPool[Serving]]:
    def start() -> AbstractAsyncContextManager[Serving]:
        # A malformed request may close its connection, which the next test must not reuse.
        connector = aiohttp.TCPConnector(force_close=True)
        return serving(tmp_path_factory.mktemp("shared"), connector=connector)

    async with ServerPool(start) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="session")
async def shared_server(server_pool: ServerPool[Serving], store_kind: str) -> Serving:
    """A server in development mode, for requests that the server refuses: its log stays empty."""
    return await server_pool.get(store_kind)
