"""Servers that many tests share: one per store, in the event loop of the test session."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import pytest_asyncio

S = TypeVar("S")


class ServerPool(Generic[S]):
    """Starts a server when the first test of a store needs it, and stops all servers at the end of the session."""

    def __init__(self, start: Callable[[], AbstractAsyncContextManager[S]]) -> None:
        self._start = start
        self._stack = AsyncExitStack()
        self._servers: dict[str, S] = {}

    async def get(self, store_kind: str) -> S:
        if store_kind not in self._servers:
            self._servers[store_kind] = await self._stack.enter_async_context(self._start())
        return self._servers[store_kind]

    async def __aenter__(self) -> "ServerPool[S]":
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._stack.aclose()


def pool_fixture(start: Callable[[Path], AbstractAsyncContextManager[Any]]) -> Any:
    """Return a fixture for a pool of servers. `start` starts each server in a new directory."""

    @pytest_asyncio.fixture(scope="session", loop_scope="session")
    async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerPool[Any]]:
        async with ServerPool(lambda: start(tmp_path_factory.mktemp("shared"))) as found:
            yield found

    return pool


def unique_name(request: pytest.FixtureRequest) -> str:
    """Return a name for the running test's data that no other test uses."""
    return sha256(request.node.nodeid.encode()).hexdigest()[:20]
