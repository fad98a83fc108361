"""A web server of test_asgi.py: python asgi_worker.py LOG KIND LEASE_S

It says its port, then every request that comes in and every one that it carries out. What it carries out takes until
the test says that it may end.
"""

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncelog.idempotency.asgi import IdempotencyMiddleware, Receive, Scope, Send

OUT: Final = 1


def say(word: str) -> None:
    os.write(OUT, f"{word}\n".encode())


class Saying:
    """Outside of everything: says that a request has come."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            say("request")
        await self._app(scope, receive, send)


def application(kind: str, path: str, lease_s: float, may_end: asyncio.Event) -> Saying:
    async def pay(request: Request) -> Response:
        say("run")
        await may_end.wait()
        return JSONResponse({"charge": str(uuid.uuid4()), "process": os.getpid()}, 201)

    app: Starlette
    if kind == "fastapi":
        app = api = FastAPI()
        api.post("/pay", response_model=None)(pay)
    else:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(
        IdempotencyMiddleware, log=path, scope=lambda _: "ann", in_flight="wait", wait_s=60, lease_s=lease_s
    )
    return Saying(app)


async def main(path: str, kind: str, lease_s: str) -> None:
    may_end = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), may_end.set)
    app = application(kind, path, float(lease_s), may_end)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
        say(f"port {listening.getsockname()[1]}")
        await server.serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
