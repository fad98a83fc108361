"""The HTTP client against a real server."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from deadlines import soon
from oncelog.client.runtime.http import HttpClient
from oncelog.client.runtime.values import ConnectionLimits
from oncelog.errors import ServerRefusedError

SECRET = "a-secret"  # noqa: S105
REDIRECTS = (301, 302, 303, 307, 308)


@asynccontextmanager
async def running(add_routes: Callable[[web.UrlDispatcher], object]) -> AsyncIterator[str]:
    """Run a server with these routes and yield its URL."""
    application = web.Application(client_max_size=8 * 1024 * 1024)
    add_routes(application.router)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, token=SECRET, limits=ConnectionLimits(), headers={"X-Proxy-Token": SECRET}, tls=None)
    try:
        yield client
    finally:
        await client.close()


async def test_large_body_is_sent_in_parts_without_a_warning() -> None:
    async def count_bytes(request: web.Request) -> web.Response:
        return web.json_response({"length": request.content_length, "received": len(await request.read())})

    async with running(lambda router: router.add_post("/", count_bytes)) as url, connected(url) as client:
        size = 3 * 1024 * 1024
        answer = await client.request("POST", "/", body=b"x" * size)
        assert answer.body == b'{"length": %d, "received": %d}' % (size, size)


@pytest.mark.parametrize("status", REDIRECTS)
@pytest.mark.parametrize("operation", ["get", "websocket"])
async def test_redirect_is_refused_and_the_other_server_receives_nothing(operation: str, status: int) -> None:
    requests = []

    async def accept(request: web.Request) -> web.StreamResponse:
        requests.append(request.headers)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        return socket

    async with running(lambda router: router.add_get("/{path:.*}", accept)) as other_url:

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": other_url + request.path})

        async with running(lambda router: router.add_get("/path", redirect)) as url, connected(url) as client:
            sent = client.send("GET", "/path") if operation == "get" else client.open_websocket("/path")
            with pytest.raises(ServerRefusedError, match=rf"no Oncelog server at {url} \(HTTP status {status}\)"):
                await soon(sent)
    assert requests == []
