"""The HTTP client against a real server."""

from aiohttp import web

from oncelog.client.runtime.http import HttpClient
from oncelog.client.runtime.values import ConnectionLimits


async def test_large_body_is_sent_in_parts_without_a_warning() -> None:
    async def count_bytes(request: web.Request) -> web.Response:
        return web.json_response({"length": request.content_length, "received": len(await request.read())})

    application = web.Application(client_max_size=8 * 1024 * 1024)
    application.router.add_post("/", count_bytes)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = HttpClient(url, token=None, limits=ConnectionLimits(), headers=None, tls=None)
    try:
        size = 3 * 1024 * 1024
        answer = await client.request("POST", "/", body=b"x" * size)
        assert answer.body == b'{"length": %d, "received": %d}' % (size, size)
    finally:
        await client.close()
        await runner.cleanup()
