"""HTTP relay between clients and a gateway that injects seeded network faults.

The relay loses requests and answers, and delivers a second copy of a request either immediately or after later
requests. It cuts a WebSocket after some messages.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
from aiohttp import web


class FaultyRelay:
    def __init__(self, target: str, seed: int) -> None:
        self.target = target
        self.done: Counter[str] = Counter()
        self.is_calm = False
        self._chance = Random(seed)
        self._copies: list[tuple[str, bytes]] = []
        self._session: aiohttp.ClientSession
        self.url = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator["FaultyRelay"]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as self._session:
            try:
                yield self
            finally:
                await runner.cleanup()

    def _is_chosen(self, what: str, rate: float) -> bool:
        if self.is_calm or self._chance.random() >= rate:
            return False
        self.done[what] += 1
        return True

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._bridge(request)
        body = await request.read()
        address = str(request.rel_url)
        if self._is_chosen("lost", 0.15):
            return self._cut(request)
        status, answer, headers = await self._forward(request.method, address, body)
        if request.method == "POST":
            if self._is_chosen("doubled", 0.2):
                await self._forward("POST", address, body)
            if self._is_chosen("kept", 0.2):
                self._copies.append((address, body))
            elif self._copies and self._is_chosen("late", 0.3):
                await self._forward("POST", *self._copies.pop(self._chance.randrange(len(self._copies))))
        if self._is_chosen("answer lost", 0.2):
            return self._cut(request)
        return web.Response(status=status, body=answer, headers=headers)

    async def _forward(self, method: str, address: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        headers = {"Content-Type": "application/json"} if body else {}
        async with self._session.request(method, self.target + address, data=body or None, headers=headers) as response:
            return response.status, await response.read(), {"Content-Type": "application/json"}

    @staticmethod
    def _cut(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _bridge(self, request: web.Request) -> web.StreamResponse:
        if self._is_chosen("refused", 0.1):
            return self._cut(request)
        ours = web.WebSocketResponse()
        await ours.prepare(request)
        async with self._session.ws_connect(self.target + str(request.rel_url)) as theirs:
            both = [
                asyncio.create_task(self._forward_messages(ours, theirs)),
                asyncio.create_task(self._forward_messages(theirs, ours)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if request.transport is not None:
            request.transport.abort()
        return ours

    async def _forward_messages(self, source: Any, target: Any) -> None:
        async for message in source:
            if message.type is not aiohttp.WSMsgType.TEXT or self._is_chosen("cut", 0.15):
                return
            await target.send_str(message.data)
