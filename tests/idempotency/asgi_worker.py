"""A web server for test_asgi_processes.py: python asgi_worker.py LOG KIND LEASE_S

It prints its port, a line for each request that arrives, and a line for each request that it runs. A run lasts until
the test writes to standard input.
"""

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deadlines import WAIT_S
from oncelog.idempotency.asgi import IdempotencyMiddleware, Receive, Scope, Send
from scripts import print_line


class RequestPrinter:
    """The outermost middleware, which prints a line when a request arrives."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            print_line("request")
        await self._app(scope, receive, send)


def application(kind: str, path: str, lease_s: float, may_end: asyncio.Event) -> RequestPrinter:
    async def pay(request: Request) -> Response:
        print_line("run")
        await may_end.wait()
        return JSONResponse({"charge": str(uuid.uuid4()), "process": os.getpid()}, 201)

    app: Starlette
    if kind == "fastapi":
        app = api = FastAPI()
        api.post("/pay", response_model=None)(pay)
    else:
        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(
        IdempotencyMiddleware, log=path, scope=lambda _: "ann", in_flight="wait", wait_s=WAIT_S, lease_s=lease_s
    )
    return RequestPrinter(app)


async def main(path: str, kind: str, lease_s: str) -> None:
    may_end = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), may_end.set)
    app = application(kind, path, float(lease_s), may_end)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
        print_line(f"port {listening.getsockname()[1]}")
        await server.serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
