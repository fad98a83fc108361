"""An application behind the idempotency middleware, and a minimal ASGI client and server to test it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine.observable_store import Gate
from idempotency.conftest import Waiters
from oncelog import Log
from oncelog.idempotency.asgi import IdempotencyMiddleware, Message, Receive, Scope, Send

METHODS: Final = ["GET", "HEAD", "POST", "PATCH"]
PROBLEM: Final = "application/problem+json"

Handler = Callable[[Request], Awaitable[Response]]


# --- application -----------------------------------------------------------------------------------------


class Authentication:
    """Middleware that takes the user from the `X-User` header."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["user"] = dict(scope["headers"]).get(b"x-user", b"").decode() or None
        await self._app(scope, receive, send)


def get_user(connection: Scope) -> str | None:
    user: str | None = connection["user"]
    return user


class Shop:
    """One endpoint for all paths, behind authentication and the middleware. It records the requests that reach it."""

    def __init__(
        self, kind: str, log: Log | Callable[[], Log] | str | Path, answer: Handler | None = None, **options: Any
    ) -> None:
        self.runs: list[bytes] = []
        self.gate = Gate()
        self.answer = answer or self.paid
        self.events: list[str] = []
        options = {"scope": get_user, **options}
        middleware = [Middleware(Authentication), Middleware(IdempotencyMiddleware, log=log, **options)]

        async def endpoint(request: Request) -> Response:
            self.runs.append(await request.body())
            return await self.answer(request)

        @asynccontextmanager
        async def lifespan(_: object) -> AsyncIterator[None]:
            self.events.append("startup")
            yield
            self.events.append("shutdown")

        self.app: Starlette
        if kind == "fastapi":
            self.app = api = FastAPI(middleware=middleware, lifespan=lifespan, openapi_url=None)
            api.api_route("/{path:path}", methods=METHODS, response_model=None)(endpoint)
        else:
            route = Route("/{path:path}", endpoint, methods=METHODS)
            self.app = Starlette(routes=[route], middleware=middleware, lifespan=lifespan)

    async def paid(self, _: Request) -> Response:
        """Answer with the number of this run."""
        await self.gate()
        body = b'{"charge":%d}' % len(self.runs)
        response = Response(body, 201, {"X-Charge": str(len(self.runs))}, "application/json")
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        return response

    async def send(
        self,
        *keys: str | bytes,
        method: str = "POST",
        path: str = "/pay",
        user: str = "ann",
        content: bytes | AsyncIterator[bytes] = b'{"amount":5}',
    ) -> httpx.Response:
        raw = [key if isinstance(key, bytes) else key.encode("latin-1") for key in keys]
        headers = [(b"Idempotency-Key", key) for key in raw] + ([(b"X-User", user.encode())] if user else [])
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.request(method, path, headers=headers, content=content)

    def start_sending(self, *keys: str) -> "asyncio.Task[httpx.Response]":
        return asyncio.ensure_future(self.send(*keys))

    async def start_running(self) -> "asyncio.Task[httpx.Response]":
        """Send a request with the key `k`, and wait until the endpoint runs. It then waits until the gate opens."""
        self.gate.shut()
        task = self.start_sending("k")
        await self.gate.reached.wait()
        return task

    async def check_waiting_retries_after(self, status: int, waiters: Waiters) -> None:
        """Answer the first request with a status that is not stored. One of the three waiting retries then runs for all
        of them.
        """

        async def fail_first(request: Request) -> Response:
            number = len(self.runs)
            await self.gate()
            return Response(status_code=status) if number == 1 else await self.paid(request)

        self.answer = fail_first
        running = await self.start_running()
        waiting = [self.start_sending("k") for _ in range(3)]
        await waiters.until(3)
        self.gate.open()
        assert (await running).status_code == status
        answers = sorted(await asyncio.gather(*waiting), key=is_replay)
        check_answers(answers, ("2", False), ("2", True), ("2", True))


def is_replay(response: httpx.Response) -> bool:
    marks = response.headers.get_list("idempotent-replayed")
    assert marks in ([], ["true"])
    return bool(marks)


def check_problem(response: httpx.Response, status: int, kind: str) -> None:
    problem = response.json()
    assert (response.status_code, problem["status"]) == (status, status)
    assert problem["type"] == f"urn:oncelog:problem:{kind}"
    assert response.headers["content-type"] == PROBLEM
    assert int(response.headers["content-length"]) == len(response.content)
    assert problem["title"]
    assert problem["detail"]
    assert not is_replay(response)


def check_answers(responses: Iterable[httpx.Response], *expected: tuple[str, bool]) -> None:
    """Assert that each response is from the expected run, and whether it is a replay."""
    found = [(response.headers.get("x-charge"), is_replay(response)) for response in responses]
    assert found == list(expected)


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def streaming(*parts: bytes, status: int = 200) -> Handler:
    async def answer(_: Request) -> Response:
        return StreamingResponse(parts_of(*parts), status)

    return answer


# --- ASGI without a framework ---------------------------------------------------------------------------

App = Callable[[Scope, Receive, Send], Awaitable[None]]
WHOLE: Final[Message] = {"type": "http.request", "body": b"{}", "more_body": False}
START: Final[Message] = {"type": "http.response.start", "status": 200, "headers": []}


def bare_scope(**more: Any) -> Scope:
    headers = [(b"idempotency-key", b"k")]
    return {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": headers, **more}


def bare(app: App, log: Log | str | Path, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, log=log, scope=lambda _: "ann", **options)


async def exchange(app: App, *messages: Message, scope: Scope | None = None) -> list[Message]:
    """Return the messages that the application sends in response to these messages."""
    sent: list[Message] = []
    incoming = iter(messages)

    async def receive() -> Message:
        for message in incoming:
            return message
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope if scope is not None else bare_scope(), receive, send)
    return sent


def body_part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Scripted:
    """An application that sends the given messages and counts its runs."""

    def __init__(self, *messages: Message, error: Exception | None = None) -> None:
        self.runs = 0
        self.messages = messages
        self.error = error

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        self.runs += 1
        await receive()
        for message in self.messages:
            await send(message)
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def lifespan(app: App) -> AsyncIterator[list[Message]]:
    """Run the lifespan of the application like a server, and yield the list of messages that it sends."""
    sent: list[Message] = []
    may_end = asyncio.Event()
    incoming = iter(["startup", "shutdown"])
    spoke = asyncio.Event()

    async def receive() -> Message:
        one = next(incoming)
        if one == "shutdown":
            await may_end.wait()
        return {"type": f"lifespan.{one}"}

    async def send(message: Message) -> None:
        sent.append(message)
        spoke.set()

    living = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, receive, send))
    await spoke.wait()
    yield sent
    may_end.set()
    await living


def list_types(messages: Iterable[Message]) -> list[str]:
    return [message["type"].removeprefix("lifespan.") for message in messages]
