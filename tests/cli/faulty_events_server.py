"""A server of the Events API in the test process, whose answers are the return values of a function."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[list[str], int], Any]


@contextmanager
def faulty_server(results: Answer) -> Iterator[str]:
    """Run a server in this process. Its answers are the return values of a function."""
    requests = 0

    async def events(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for frame in socket:
            message = json.loads(frame.data)
            if message["type"] == "connect":
                payload = {"client_id": "x", "server_last_committed_id": 0, "epoch": "e"}
                await socket.send_json({"type": "connected", "payload": payload})
                continue
            requests += 1
            answer = results([one["id"] for one in message["payload"]["events"]], requests)
            if answer is not None:
                kind = "error" if "code" in answer else "submit_events_result"
                await socket.send_json({"type": kind, "msg_id": message["msg_id"], "payload": answer})
        return socket

    application = web.Application()
    application.router.add_get("/v1/events", events)
    with run_in_thread(application) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def run_in_thread(application: web.Application) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(application, shutdown_timeout=0.1)

    def do(waited_for: Awaitable[Any]) -> None:
        async def wait() -> None:
            await waited_for

        asyncio.run_coroutine_threadsafe(wait(), loop).result(300)

    try:
        do(runner.setup())
        do(web.TCPSite(runner, "127.0.0.1", 0).start())
        yield runner.addresses[0][1]
        do(runner.cleanup())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def committed(ids: list[str], *numbers: int) -> dict[str, Any]:
    return {
        "results": [
            {"id": id_text, "status": "committed", "committed_id": number}
            for id_text, number in zip(ids, numbers, strict=True)
        ]
    }
