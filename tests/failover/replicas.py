"""Clients of the Deltas API, each with a file, that constantly edit the same rows and eventually agree."""

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from oncelog.client.deltas import DeltasClient

GATEWAY = "replicas"
TABLE = "t"
ROWS = 10
PAUSE_S = 0.1


class Replicas:
    """One client per server."""

    def __init__(self, clients: list[DeltasClient], session: aiohttp.ClientSession, urls: list[str]) -> None:
        self._clients = clients
        self._session = session
        self._urls = urls
        self.is_done = False

    @classmethod
    async def open(
        cls, stack: AsyncExitStack, directory: Path, session: aiohttp.ClientSession, urls: list[str]
    ) -> "Replicas":
        """Open the clients. The stack closes them."""
        clients = [
            DeltasClient(url, GATEWAY, path=str(directory / f"replica{number}.db"), client_id=f"replica{number}")
            for number, url in enumerate(urls)
        ]
        return cls([await stack.enter_async_context(client) for client in clients], session, urls)

    async def edit(self, number: int) -> None:
        """Edit rows until `is_done`, without waiting for the server."""
        for step in count():
            columns = {"n": step, f"by{number}": step}
            await self._clients[number].put(TABLE, f"r{(step * 7 + number) % ROWS}", columns)
            await asyncio.sleep(PAUSE_S)
            if self.is_done:
                return

    async def run(self) -> None:
        """Edit in all clients."""
        await asyncio.gather(*(self.edit(number) for number in range(len(self._clients))))

    async def check_agreement(self) -> None:
        """Assert that all replicas and all servers have the same rows."""
        for _ in range(2):  # The second sync receives deltas that other clients sent during the first.
            for client in self._clients:
                await client.synced()
        found = [{row.row_id: dict(row.columns) for row in await one.rows(TABLE)} for one in self._clients]
        found += [await self._served(url) for url in self._urls]
        assert len(found[0]) == ROWS
        assert all(rows == found[0] for rows in found), found

    async def _served(self, url: str) -> dict[str, Any]:
        async with self._session.get(f"{url}/v1/sync/{GATEWAY}/rows/{TABLE}") as response:
            return {row["rowId"]: row["columns"] for row in (await response.json())["rows"]}
