"""The `Idempotency-Key` header, in front of Starlette and of FastAPI: what clients get, and how often it is run."""

import asyncio
import inspect
import re
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Final

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import oncelog
from crash.processes import started
from databases import BOTH_STORES, POSTGRES, SQLITE, log_at
from engine.watched import Gate, WatchedLog, run, turns
from idempotency import asgi_worker
from oncelog import Log, kept_for
from oncelog.core.tenants import Tenant
from oncelog.core.values import Submission
from oncelog.errors import ClockJumpedError, CorruptError, OncelogError, StoreUnavailableError
from oncelog.idempotency import asgi
from oncelog.idempotency.asgi import IdempotencyMiddleware, Message, Receive, Scope, Send

DAY_MS: Final = 24 * 3600 * 1000
METHODS: Final = ["GET", "HEAD", "POST", "PATCH"]
PROBLEM: Final = "application/problem+json"

Handler = Callable[[Request], Awaitable[Response]]


@pytest.fixture(params=["starlette", "fastapi"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- an application --------------------------------------------------------------------------------------


class Authentication:
    """Believes what it is told."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["user"] = dict(scope["headers"]).get(b"x-user", b"").decode() or None
        await self._app(scope, receive, send)


def user_of(connection: Scope) -> str | None:
    user: str | None = connection["user"]
    return user


class Shop:
    """One endpoint for everything, behind authentication and the middleware; it knows what it has run."""

    def __init__(
        self, kind: str, log: Log | Callable[[], Log] | str | Path, answer: Handler | None = None, **options: Any
    ) -> None:
        self.runs: list[bytes] = []
        self.gate = Gate()
        self.answer = answer or self.paid
        self.events: list[str] = []
        options = {"scope": user_of, **options}
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
        """An answer that only this run can have given."""
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

    def sending(self, *keys: str) -> "asyncio.Task[httpx.Response]":
        return asyncio.ensure_future(self.send(*keys))

    async def running(self) -> "asyncio.Task[httpx.Response]":
        """One with the key `k` that has come as far as the endpoint and stays there until the gate is opened."""
        self.gate.shut()
        task = self.sending("k")
        await self.gate.reached.wait()
        return task


def is_replay(response: httpx.Response) -> bool:
    marks = response.headers.get_list("idempotent-replayed")
    assert marks in ([], ["true"])
    return bool(marks)


def demand_problem(response: httpx.Response, status: int, kind: str) -> None:
    told = response.json()
    assert (response.status_code, told["status"], told["type"]) == (status, status, f"urn:oncelog:problem:{kind}")
    assert response.headers["content-type"] == PROBLEM
    assert int(response.headers["content-length"]) == len(response.content)
    assert told["title"]
    assert told["detail"]
    assert not is_replay(response)


def demand_answers(responses: Iterable[httpx.Response], *expected: tuple[str, bool]) -> None:
    """The number of the run that the answer is of, and whether it is a replay."""
    found = [(response.headers.get("x-charge"), is_replay(response)) for response in responses]
    assert found == list(expected)


async def parts_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def streaming(*parts: bytes, status: int = 200) -> Handler:
    async def answer(_: Request) -> Response:
        return StreamingResponse(parts_of(*parts), status)

    return answer


# --- bare ASGI: messages as they are ---------------------------------------------------------------------

App = Callable[[Scope, Receive, Send], Awaitable[None]]
WHOLE: Final[Message] = {"type": "http.request", "body": b"{}", "more_body": False}
START: Final[Message] = {"type": "http.response.start", "status": 200, "headers": []}


def bare_scope(**more: Any) -> Scope:
    headers = [(b"idempotency-key", b"k")]
    return {"type": "http", "method": "POST", "path": "/pay", "query_string": b"", "headers": headers, **more}


def bare(app: App, log: Log | str | Path, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, log=log, scope=lambda _: "ann", **options)


async def talk(app: App, *messages: Message, scope: Scope | None = None) -> list[Message]:
    """What the application sends, if these messages come and then nothing more."""
    sent: list[Message] = []
    coming = iter(messages)

    async def receive() -> Message:
        for message in coming:
            return message
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope if scope is not None else bare_scope(), receive, send)
    return sent


def body_part(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Scripted:
    """An application that sends what it is told to, and counts."""

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


# --- the first answer is the answer ----------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("RU-11")
def test_the_first_answer_is_given_again_with_status_headers_and_body_also_after_a_restart(
    kind: str, tmp_path: Path
) -> None:
    async def main() -> None:
        answers = []
        runs = []
        for _ in range(2):
            async with oncelog.open(log_at(tmp_path / "log.db")) as log:
                shop = Shop(kind, log)
                answers += [await shop.send("k") for _ in range(2)]
                runs.append(len(shop.runs))
        assert runs == [1, 0]
        first, *again = answers
        assert (first.status_code, first.content, first.headers["x-charge"]) == (201, b'{"charge":1}', "1")
        assert [cookie.split(";")[0] for cookie in first.headers.get_list("set-cookie")] == ["a=1", "b=2"]
        assert not is_replay(first)
        for one in again:
            assert is_replay(one)
            assert (one.status_code, one.content) == (first.status_code, first.content)
            assert one.headers.raw == [*first.headers.raw, (b"idempotent-replayed", b"true")]

    run(main())


@pytest.mark.rule("RU-11")
def test_another_key_is_another_request(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            demand_answers([await shop.send(key) for key in ("k", "K", "k")], ("1", False), ("2", False), ("1", True))

    run(main())


def test_headers_of_the_connection_are_not_kept(kind: str) -> None:
    async def answer(_: Request) -> Response:
        response = PlainTextResponse("ok", headers={"Keep-Alive": "timeout=5", "X-Hop": "1", "X-Kept": "2"})
        response.headers.append("Connection", "Keep-Alive, X-Hop")
        response.headers.append("Connection", "close")
        return response

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, answer)
            first, again = [await shop.send("k") for _ in range(2)]
            assert first.headers["x-hop"] == "1", "the first answer is as the application gave it"
            assert sorted(again.headers) == ["content-length", "content-type", "idempotent-replayed", "x-kept"]

    run(main())


@pytest.mark.parametrize("status", [204, 302, 304])
def test_answers_without_a_body(kind: str, status: int) -> None:
    async def answer(_: Request) -> Response:
        return Response(None, status, {"Location": "/elsewhere", "X-Charge": "1"})

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, answer)
            answers = [await shop.send("k") for _ in range(2)]
            demand_answers(answers, ("1", False), ("1", True))
            assert [(one.status_code, one.content) for one in answers] == [(status, b"")] * 2

    run(main())


def test_the_answer_to_a_head_request_keeps_the_length_that_it_says(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, methods=["head"])
            answers = [await shop.send("k", method="HEAD") for _ in range(2)]
            demand_answers(answers, ("1", False), ("1", True))
            assert [(one.headers["content-length"], one.content) for one in answers] == [("12", b"")] * 2

    run(main())


def test_headers_may_be_something_that_can_be_gone_through_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers: Iterator[list[bytes]] = iter([[b"x-a", b"1"], [b"x-a", b"\xff"]])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    async def main() -> None:
        async with WatchedLog() as log:
            middleware = bare(app, log)
            first, again = [await talk(middleware, WHOLE) for _ in range(2)]
            kept = [(b"x-a", b"1"), (b"x-a", b"\xff")]
            assert first == [{**START, "headers": kept}, body_part(b"")]
            assert again == [{**START, "headers": [*kept, (b"idempotent-replayed", b"true")]}, body_part(b"")]

    run(main())


# --- whose key, and for what ------------------------------------------------------------------------------

OTHERS: Final = [
    {"method": "PATCH"},
    {"path": "/pa/y?a=1"},
    {"path": "/pa%2Fy"},
    {"path": "/pay?a=2"},
    {"path": "/pay"},
    {"content": b'{"amount":6}'},
    {"content": b""},
]


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_key_for_another_request_is_refused_and_nothing_is_run(kind: str, other: dict[str, Any]) -> None:
    path = "/pa/y" if other.get("path") == "/pa%2Fy" else "/pay?a=1"

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, in_flight="wait")
            running = asyncio.ensure_future(shop.send("k", path=path))
            shop.gate.shut()
            await shop.gate.reached.wait()
            demand_problem(await shop.send("k", **{"path": path, **other}), 422, "key-reused")
            shop.gate.open()
            demand_answers([await running], ("1", False))
            demand_problem(await shop.send("k", **{"path": path, **other}), 422, "key-reused")
            demand_answers([await shop.send("k", path=path)], ("1", True))
            assert len(shop.runs) == 1

    run(main())


@pytest.mark.rule("RU-11")
def test_users_do_not_get_each_others_answers(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            answers = [await shop.send("k", user=user) for user in ("ann", "bob", "ann", "bob")]
            demand_answers(answers, ("1", False), ("2", False), ("1", True), ("2", True))

    run(main())


def test_any_text_can_be_a_user() -> None:
    users = ["", "a", "a/b", "a%2Fb", "a\0", "\ud800", "ü" * 500, "ü" * 501, "ü" * 600, "sha256", "sha256/x"]

    async def main() -> None:
        async with WatchedLog() as log:
            app = Scripted(START, body_part(b"ok"))
            middleware = IdempotencyMiddleware(app, log=log, scope=user_of)
            for number, user in enumerate(users, 1):
                for _ in range(2):
                    sent = await talk(middleware, WHOLE, scope=bare_scope(user=user))
                    assert (sent[0]["status"], app.runs) == (200, number), user

    run(main())


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("keys", [("k",), ("k", "l"), ("",), ()])
def test_without_a_user_requests_are_left_alone(kind: str, keys: Sequence[str]) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, required=True)
            demand_answers([await shop.send(*keys, user="") for _ in range(2)], ("1", False), ("2", False))
            assert log.store.batches == []

    run(main())


def test_the_user_may_be_found_asynchronously(kind: str) -> None:
    async def found(connection: Scope) -> str | None:
        await asyncio.sleep(0)
        return user_of(connection)

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, scope=found)
            users = ["ann", "bob", "ann", "", ""]
            answers = [await shop.send("k", user=user) for user in users]
            demand_answers(answers, ("1", False), ("2", False), ("1", True), ("3", False), ("4", False))

    run(main())


def test_a_user_that_is_no_text_is_an_error_of_the_program() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            app = Scripted(START, body_part(b""))
            numbered: Any = lambda _: 17  # noqa: E731
            with pytest.raises(TypeError, match="a text or None, not int"):
                await talk(IdempotencyMiddleware(app, log=log, scope=numbered), WHOLE)
            assert app.runs == 0

    run(main())


# --- the header ------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-11")
def test_a_missing_key_where_it_is_required(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, required=True)
            demand_problem(await shop.send(), 400, "key-missing")
            demand_problem(await shop.send(method="PATCH"), 400, "key-missing")
            assert shop.runs == []
            demand_answers([await shop.send(method="GET")], ("1", False))

    run(main())


def test_a_missing_key_where_it_is_not_required_and_nobody_is_asked_for_the_user(kind: str) -> None:
    def nobody(_: Scope) -> str:
        raise AssertionError("asked for the user")

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, scope=nobody)
            demand_answers([await shop.send() for _ in range(2)], ("1", False), ("2", False))
            assert log.store.batches == []

    run(main())


NO_KEYS: Final = [
    ("k", "k"),
    ("k", "l"),
    ("",),
    ("  ",),
    ("k" * 256,),
    ("é",),
    ("a b",),
    ("a\tb",),
    ('""',),
    ('"',),
    ('"k',),
    ('"k"l',),
    ('"k","l"',),
    ('"k";p=1',),
    ('"a\\b"',),
    ('"a\\"',),
    (f'"{"k" * 256}"',),
]


@pytest.mark.parametrize("keys", NO_KEYS, ids=ascii)
def test_what_is_no_key(kind: str, keys: Sequence[str]) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            demand_problem(await shop.send(*keys), 400, "key-invalid")
            assert shop.runs == []

    run(main())


@pytest.mark.parametrize(
    ("one", "other"),
    [("k", '"k"'), ("k", ' "k" '), ('a"b\\c', r'"a\"b\\c"'), ("k" * 255, f'"{"k" * 255}"'), ("a\\\\", r'"a\\\\"')],
)
def test_a_quoted_key_is_the_same_as_the_unquoted(kind: str, one: str, other: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            demand_answers([await shop.send(one), await shop.send(other)], ("1", False), ("1", True))

    run(main())


# --- in flight -------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-7", "RU-11")
def test_a_request_in_flight_is_answered_with_409(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            running = await shop.running()
            told = await shop.send("k")
            demand_problem(told, 409, "in-flight")
            assert told.headers["retry-after"] == "1"
            shop.gate.open()
            demand_answers([await running, await shop.send("k")], ("1", False), ("1", True))

    run(main())


@pytest.mark.rule("RU-7", "RU-11")
def test_or_it_is_waited_for(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, in_flight="wait")
            running = await shop.running()
            waiting = [shop.sending("k") for _ in range(5)]
            await turns(100)
            assert not any(task.done() for task in waiting)
            shop.gate.open()
            first, *others = await asyncio.gather(running, *waiting)
            demand_answers([first, *others], ("1", False), *[("1", True)] * 5)
            assert {(one.status_code, one.content) for one in others} == {(201, first.content)}

    run(main())


def test_but_not_longer_than_it_is_told_to(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, in_flight="wait", wait_s=0.001)
            running = await shop.running()
            told = await shop.send("k")
            demand_problem(told, 409, "in-flight")
            assert told.headers["retry-after"] == "1"
            shop.gate.open()
            demand_answers([await running], ("1", False))

    run(main())


# --- what is not kept ------------------------------------------------------------------------------------


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("status", [500, 503, 599])
def test_an_answer_of_5xx_is_not_kept(kind: str, status: int) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, streaming(b"no", b"t", b" now", status=status))
            for _ in range(2):
                told = await shop.send("k")
                assert (told.status_code, told.content, is_replay(told)) == (status, b"not now", False)
            shop.answer = shop.paid
            demand_answers([await shop.send("k") for _ in range(2)], ("3", False), ("3", True))

    run(main())


@pytest.mark.rule("RU-11")
def test_an_exception_is_not_kept(kind: str) -> None:
    async def fails(_: Request) -> Response:
        raise LookupError("no such account")

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, fails)
            told = await shop.send("k")
            assert (told.status_code, told.text) == (500, "Internal Server Error")
            shop.answer = shop.paid
            demand_answers([await shop.send("k") for _ in range(2)], ("2", False), ("2", True))

    run(main())


def test_of_those_who_wait_for_one_that_fails_the_next_is_run(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, in_flight="wait")

            async def fails_first(request: Request) -> Response:
                number = len(shop.runs)
                await shop.gate()
                return Response(status_code=503) if number == 1 else await shop.paid(request)

            shop.answer = fails_first
            running = await shop.running()
            waiting = [shop.sending("k") for _ in range(3)]
            await turns(100)
            shop.gate.open()
            assert (await running).status_code == 503
            answers = sorted(await asyncio.gather(*waiting), key=is_replay)
            demand_answers(answers, ("2", False), ("2", True), ("2", True))

    run(main())


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("status", [400, 402, 404, 409, 499])
def test_an_answer_of_4xx_is_kept(kind: str, status: int) -> None:
    async def refuses(_: Request) -> Response:
        raise HTTPException(status, "no", {"X-Charge": "none"})

    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, refuses)
            answers = [await shop.send("k") for _ in range(2)]
            demand_answers(answers, ("none", False), ("none", True))
            assert [one.status_code for one in answers] == [status] * 2
            assert answers[0].content == answers[1].content != b""
            assert len(shop.runs) == 1

    run(main())


def test_what_fastapi_answers_of_its_own_is_kept_like_any_other() -> None:
    class Payment(BaseModel):
        amount: int

    async def main() -> None:
        async with WatchedLog() as log:
            api = FastAPI()
            api.add_middleware(IdempotencyMiddleware, log=log, scope=lambda _: "ann")
            paid: list[int] = []
            told: list[int] = []

            @api.post("/pay", status_code=201)
            async def pay(payment: Payment, tasks: BackgroundTasks) -> Payment:
                paid.append(payment.amount)
                tasks.add_task(told.append, payment.amount)
                return payment

            async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://shop") as client:
                for key, amount, status in (("a", 5, 201), ("b", "much", 422)):
                    headers = {"Idempotency-Key": key}
                    first, again = [
                        await client.post("/pay", headers=headers, json={"amount": amount}) for _ in range(2)
                    ]
                    assert [first.status_code, again.status_code] == [status] * 2
                    assert first.json() == again.json()
                    assert (is_replay(first), is_replay(again)) == (False, True)
            assert (paid, told) == ([5], [5])

    run(main())


# --- bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 10, b"x"), (b"x",) * 11])
def test_a_request_over_the_limit_is_refused_and_not_run(kind: str, parts: Sequence[bytes]) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, request_bytes_max=10)
            demand_problem(await shop.send("k", content=parts_of(*parts)), 413, "request-too-large")
            assert shop.runs == []
            assert log.store.batches == []
            demand_answers([await shop.send("k", content=b"x" * 10)], ("1", False))
            demand_answers([await shop.send(content=b"x" * 11)], ("2", False))

    run(main())


def test_a_request_in_parts_is_the_same_as_in_one(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            answers = [
                await shop.send("k", content=parts_of(b"am", b"", b"ount")),
                await shop.send("k", content=b"amount"),
            ]
            demand_answers(answers, ("1", False), ("1", True))
            assert shop.runs == [b"amount"]

    run(main())


def test_an_answer_in_parts_is_given_again_whole(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, streaming(b"one ", b"", b"two \0", b"three"), answer_bytes_max=14)
            answers = [await shop.send("k") for _ in range(2)]
            assert [one.content for one in answers] == [b"one two \0three"] * 2
            assert [is_replay(one) for one in answers] == [False, True]

    run(main())


def test_nothing_of_an_answer_is_sent_before_it_is_kept() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            sent: list[Message] = []
            log_was_told: list[int] = []

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                for message in (START, body_part(b"one", more=True)):
                    await send(message)
                    assert sent == []
                log.hold_commits()
                await send(body_part(b"two"))

            async def send(message: Message) -> None:
                log_was_told.append(len((await log.read(stream="http/ann")).records))
                sent.append(message)

            async def receive() -> Message:
                return WHOLE

            talking = asyncio.ensure_future(bare(app, log)(bare_scope(), receive, send))
            await log.gate.reached.wait()
            await turns()
            assert sent == []
            log.gate.open()
            await talking
            assert sent == [START, body_part(b"onetwo")]
            assert log_was_told == [1, 1]

    run(main())


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 10, b"x", b"yz"), (b"x",) * 50, (b"x" * 10, b"xx", b"")])
def test_an_answer_over_the_limit_is_sent_and_not_kept_but_not_made_again(kind: str, parts: Sequence[bytes]) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, streaming(*parts, status=202), answer_bytes_max=10)
            first = await shop.send("k")
            assert (first.status_code, first.content, is_replay(first)) == (202, b"".join(parts), False)
            for _ in range(2):
                told = await shop.send("k")
                demand_problem(told, 409, "answer-not-kept")
                assert "retry-after" not in told.headers
                assert "202" in told.json()["detail"]
            assert len(shop.runs) == 1

    run(main())


def test_an_answer_over_the_limit_is_passed_on_as_it_comes() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for part, expected in ((b"12", 0), (b"345", 2), (b"6", 3), (b"7", 4)):
            await send(body_part(part, more=True))
            assert len(sent) == expected
        await send(body_part(b""))

    async def main() -> None:
        async with WatchedLog() as log:

            async def send(message: Message) -> None:
                sent.append(message)

            async def receive() -> Message:
                return WHOLE

            await bare(app, log, answer_bytes_max=4)(bare_scope(), receive, send)
            parts = [body_part(b"12345", more=True), body_part(b"6", more=True), body_part(b"7", more=True)]
            assert sent == [START, *parts, body_part(b"")]

    run(main())


def test_an_answer_that_is_too_large_for_the_log_is_not_made_again_either(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog(body_bytes_max=200) as log:
            for key, size, is_kept in (("a", 50, True), ("b", 200, False)):
                shop = Shop(kind, log, streaming(b"x" * size))
                first, again = [await shop.send(key) for _ in range(2)]
                assert (first.status_code, len(first.content)) == (200, size)
                if is_kept:
                    assert is_replay(again)
                else:
                    demand_problem(again, 409, "answer-not-kept")
                assert len(shop.runs) == 1

    run(main())


# --- ends that are none ----------------------------------------------------------------------------------


def test_a_client_that_goes_before_its_request_is_whole_has_asked_for_nothing() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            app = Scripted(START, body_part(b"ok"))
            part = {"type": "http.request", "body": b"{", "more_body": True}
            assert await talk(bare(app, log), part, {"type": "http.disconnect"}) == []
            assert (app.runs, log.store.batches) == (0, [])
            assert await talk(bare(app, log), WHOLE) == [START, body_part(b"ok")]

    run(main())


def test_an_application_still_hears_that_its_client_has_gone() -> None:
    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([await receive(), await receive()])

    async def main() -> None:
        async with WatchedLog() as log:
            await talk(bare(app, log), WHOLE, {"type": "http.disconnect"})
            assert heard == [WHOLE, {"type": "http.disconnect"}]

    run(main())


@pytest.mark.rule("RU-7")
def test_cancelling_a_request_while_it_runs_lets_the_next_one_run_at_once(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            running = await shop.running()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            shop.gate.open()
            demand_answers([await shop.send("k") for _ in range(2)], ("2", False), ("2", True))

    run(main())


def test_cancelling_a_request_while_its_answer_is_being_kept_keeps_it(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            running = await shop.running()
            log.hold_commits()
            shop.gate.open()
            await log.gate.reached.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            log.gate.open()
            await turns()
            demand_answers([await shop.send("k")], ("1", True))

    run(main())


UNFINISHED: Final = [
    [],
    [START],
    [START, body_part(b"some", more=True)],
]


@pytest.mark.parametrize("messages", UNFINISHED)
@pytest.mark.parametrize("error", [None, LookupError("later")])
def test_an_answer_that_is_not_finished_is_not_sent_and_not_kept(
    messages: Sequence[Message], error: Exception | None
) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            app = Scripted(*messages, error=error)
            sent: list[Message] = []
            try:
                sent += await talk(bare(app, log), WHOLE)
            except LookupError as raised:
                assert raised is error  # noqa: PT017 - either may be
            else:
                assert error is None
            assert sent == [], "so that the server can answer with 500"
            app.messages, app.error = (START, body_part(b"ok")), None
            assert await talk(bare(app, log), WHOLE) == [START, body_part(b"ok")]

    run(main())


def test_an_answer_that_fails_beyond_the_limit_counts_as_carried_out() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            app = Scripted(START, body_part(b"more than four", more=True), error=LookupError("too late"))
            middleware = bare(app, log, answer_bytes_max=4)
            with pytest.raises(LookupError):
                await talk(middleware, WHOLE)
            assert (await talk(middleware, WHOLE))[0]["status"] == 409
            assert app.runs == 1

    run(main())


@pytest.mark.parametrize("messages", [[body_part(b"")], [START, START]])
def test_an_application_that_breaks_the_rules_is_told(messages: Sequence[Message]) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            with pytest.raises(RuntimeError, match="the application"):
                await talk(bare(Scripted(*messages), log), WHOLE)

    run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_background_tasks_run_once_after_the_answer(kind: str, fails: bool) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)

            async def in_background() -> None:
                records = (await log.read(stream="http/ann")).records
                shop.events.append(f"background, {len(records)} kept")
                if fails:
                    raise LookupError("in background")

            async def answer(_: Request) -> Response:
                return PlainTextResponse("ok", background=BackgroundTask(in_background))

            async def noting(scope: Scope, receive: Receive, send: Send) -> None:
                async def sending(message: Message) -> None:
                    shop.events.append(message["type"])
                    await send(message)

                await app(scope, receive, sending)

            shop.answer = answer
            app, shop.app = shop.app, noting  # type: ignore[assignment]
            answers = [await shop.send("k") for _ in range(2)]
            assert [(one.text, is_replay(one)) for one in answers] == [("ok", False), ("ok", True)]
            sent = ["http.response.start", "http.response.body"]
            assert shop.events == [*sent, "background, 1 kept", *sent]

    run(main())


# --- leases ----------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-7")
@pytest.mark.parametrize("is_done", [False, True])
def test_who_lost_the_lease_is_told_so_and_not_given_the_lost_answer(kind: str, is_done: bool) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            late, other = Shop(kind, log), Shop(kind, log)
            lost = await late.running()
            log.clock.advance(30_000)
            taking_over = await other.running()
            if is_done:
                other.gate.open()
                await taking_over
            late.runs.append(b"so that its answer is another")
            late.gate.open()
            told = await lost
            demand_problem(told, 409, "taken-over")
            assert told.headers["retry-after"] == "1"
            other.gate.open()
            demand_answers([await taking_over, await late.send("k")], ("1", False), ("1", True))

    run(main())


def test_late_work_counts_while_nobody_took_over(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, lease_s=5)
            running = await shop.running()
            log.clock.advance(4_999)
            demand_problem(await shop.send("k"), 409, "in-flight")
            log.clock.advance(1)
            shop.gate.open()
            demand_answers([await running, await shop.send("k")], ("1", False), ("1", True))

    run(main())


# --- a log that is in trouble ----------------------------------------------------------------------------

TROUBLES: Final = [StoreUnavailableError("disk full"), CorruptError("torn"), ClockJumpedError(10**9, 600_000)]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: type(trouble).__name__)
def test_without_the_log_nothing_is_run(kind: str, trouble: OncelogError, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)

            async def fail(_: object) -> None:
                raise trouble

            before, log.store.before_commit = log.store.before_commit, fail
            told = await shop.send("k")
            demand_problem(told, 503, "log-unavailable")
            assert told.headers["retry-after"] == "1"
            assert str(trouble) not in told.text
            assert str(trouble) in caplog.text
            assert shop.runs == []
            demand_answers([await shop.send()], ("1", False))
            log.store.before_commit = before
            demand_answers([await shop.send("k")], ("2", False))

    run(main())


def test_a_closed_log_is_one_in_trouble(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, lambda: log)
        demand_problem(await shop.send("k"), 503, "log-unavailable")
        assert shop.runs == []

    run(main())


def test_those_who_wait_when_the_log_is_closed_are_told(kind: str) -> None:
    async def main() -> None:
        log = await WatchedLog().__aenter__()
        shop = Shop(kind, log, in_flight="wait")
        running = await shop.running()
        waiting = shop.sending("k")
        await turns()
        await log.close()
        demand_problem(await waiting, 503, "log-unavailable")
        shop.gate.open()
        demand_problem(await running, 503, "log-unavailable")

    run(main())


async def fail_to_keep(requests: Sequence[oncelog.Request]) -> None:
    if any(isinstance(item, Submission) for request in requests for item in request.items):
        raise CorruptError("torn")


def test_an_answer_that_cannot_be_kept_is_not_given(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            before, log.store.before_commit = log.store.before_commit, fail_to_keep
            demand_problem(await shop.send("k"), 503, "log-unavailable")
            log.store.before_commit = before
            demand_problem(await shop.send("k"), 409, "in-flight")
            log.clock.advance(30_000)
            demand_answers([await shop.send("k")], ("2", False))

    run(main())


def test_nor_is_the_rest_of_one_that_goes_on() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.store.before_commit = fail_to_keep
            app = Scripted(START, body_part(b"12345", more=True), body_part(b"6", more=True), body_part(b"7"))
            start, body = await talk(bare(app, log, answer_bytes_max=4), WHOLE)
            assert (start["status"], body["more_body"]) == (503, False)
            assert b"log-unavailable" in body["body"]

    run(main())


def test_a_log_that_has_too_much_to_do(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=1) as log:
            shop = Shop(kind, log)
            log.hold_commits()
            first = shop.sending("a")
            await log.gate.reached.wait()
            asked = shop.sending("b")  # the log has room for a question yet: is it known?
            await turns()
            refused = shop.sending("c")
            await turns()
            assert (asked.done(), refused.done()) == (False, True)
            log.gate.open()
            demand_answers([await first], ("1", False))
            for told in (await asked, await refused):
                demand_problem(told, 503, "busy")
                assert int(told.headers["retry-after"]) >= 1
            assert len(shop.runs) == 1

    run(main())


@pytest.mark.parametrize(
    ("tenant", "status", "problem"),
    [
        (None, 503, "read-only"),
        (Tenant("http", records_max=1), 507, "quota-exceeded"),
        (Tenant("http", new_writes_per_second_max=1), 429, "rate-limited"),
    ],
)
def test_what_is_held_back_is_told_by_its_reason(kind: str, tenant: Tenant | None, status: int, problem: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            if tenant is not None:
                await log.set_tenants([tenant])
            demand_answers([await shop.sending("a")], ("1", False))
            if tenant is None:
                log.set_read_only()
            told = await shop.sending("b")
            demand_problem(told, status, problem)
            assert int(told.headers["retry-after"]) >= 1
            demand_answers([await shop.sending("a")], ("1", True))
            assert len(shop.runs) == 1

    run(main())


def test_an_erased_answer_is_not_given_and_not_made_again(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log)
            await shop.send("k")
            assert await log.erase(stream="http/ann") == 1
            demand_problem(await shop.send("k"), 410, "answer-erased")
            assert len(shop.runs) == 1

    run(main())


# --- how long --------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize(("options", "kept_ms"), [({}, DAY_MS), ({"retention": kept_for(seconds=60)}, 60_000)])
def test_keys_are_forgotten_after_a_day_or_as_told(kind: str, options: dict[str, Any], kept_ms: int) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, **options)
            answers = [await shop.send("k")]
            log.clock.advance(kept_ms - 1)
            answers.append(await shop.send("k"))
            log.clock.advance(1)
            answers.append(await shop.send("k", content=b"even another"))
            demand_answers(answers, ("1", False), ("1", True), ("2", False))

    run(main())


def test_two_names_keep_their_keys_apart(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shops = [Shop(kind, log), Shop(kind, log, name="http.long", retention=kept_for(days=30))]
            for shop in shops:
                demand_answers([await shop.send("k") for _ in range(2)], ("1", False), ("1", True))

    run(main())


# --- a log that is given by its path ---------------------------------------------------------------------


@asynccontextmanager
async def lifespan(app: App) -> AsyncIterator[list[Message]]:
    """As a server does it; gives what the application has said so far."""
    said: list[Message] = []
    may_end = asyncio.Event()
    coming = iter(["startup", "shutdown"])
    spoke = asyncio.Event()

    async def receive() -> Message:
        one = next(coming)
        if one == "shutdown":
            await may_end.wait()
        return {"type": f"lifespan.{one}"}

    async def send(message: Message) -> None:
        said.append(message)
        spoke.set()

    living = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, receive, send))
    await spoke.wait()
    yield said
    may_end.set()
    await living


def types_of(messages: Iterable[Message]) -> list[str]:
    return [message["type"].removeprefix("lifespan.") for message in messages]


def test_a_path_is_opened_and_closed_with_the_lifespan(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        shop = Shop(kind, tmp_path / "log.db")
        for number in (1, 2):
            async with lifespan(shop.app) as said:
                assert types_of(said) == ["startup.complete"]
                assert (tmp_path / "log.db-wal").exists()
                demand_answers([await shop.send("k") for _ in range(2)], ("1", number == 2), ("1", True))
            assert types_of(said) == ["startup.complete", "shutdown.complete"]
            assert not (tmp_path / "log.db-wal").exists(), "it is closed when the lifespan ends"
        assert shop.events == ["startup", "shutdown"] * 2

    run(main())


@BOTH_STORES
def test_a_path_is_opened_once_by_the_first_requests_where_there_is_no_lifespan(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        shop = Shop(kind, log_at(tmp_path / "log.db"), in_flight="wait")
        answers = await asyncio.gather(*[shop.send("k") for _ in range(10)])
        demand_answers(sorted(answers, key=is_replay), ("1", False), *[("1", True)] * 9)
        async with lifespan(shop.app):
            pass  # to have it closed
        assert not (tmp_path / "log.db-wal").exists()

    run(main())


@BOTH_STORES
def test_a_client_that_goes_while_the_log_is_opened_harms_nobody(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        shop = Shop(kind, log_at(tmp_path / "log.db"))
        gone, stays = shop.sending("a"), shop.sending("b")
        await turns(3)
        gone.cancel()
        demand_answers([await stays], ("1", False))
        async with lifespan(shop.app):
            demand_answers([await shop.send("a")], ("2", False))

    run(main())


def test_an_application_may_be_tested_with_a_loop_a_request(kind: str, tmp_path: Path) -> None:
    shop = Shop(kind, tmp_path / "log.db")
    answers = [run(shop.send(key)) for key in ("k", "l", "k", "l")]
    demand_answers(answers, ("1", False), ("2", False), ("1", True), ("2", True))

    async def main() -> None:
        async with lifespan(shop.app):
            demand_answers([await shop.send("k")], ("1", True))

    run(main())


def test_a_file_that_is_no_log_stops_the_application_at_its_start(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes\n" * 100)

    async def main() -> None:
        shop = Shop(kind, path)
        async with lifespan(shop.app) as said:
            assert types_of(said) == ["startup.failed"]
            assert "NotALogError" in said[0]["message"]
            assert str(path) in said[0]["message"]
        assert types_of(said) == ["startup.failed"]
        assert shop.events == []
        demand_problem(await shop.send("k"), 503, "log-unavailable")
        path.unlink()
        demand_answers([await shop.send("k")], ("1", False))
        async with lifespan(shop.app):
            pass

    run(main())


@BOTH_STORES
def test_another_retention_under_the_same_name_stops_it_too(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        for retention, expected in ((kept_for(days=1), "startup.complete"), (kept_for(days=2), "startup.failed")):
            async with lifespan(Shop(kind, log_at(tmp_path / "log.db"), retention=retention).app) as said:
                assert types_of(said) == [expected]
        assert "http" in said[0]["message"]

    run(main())


def test_an_application_that_fails_at_its_start_does_not_leave_the_log_open(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no"})

    async def main() -> None:
        async with lifespan(bare(app, tmp_path / "log.db")) as said:
            assert said == [{"type": "lifespan.startup.failed", "message": "no"}]
            assert not (tmp_path / "log.db-wal").exists()

    run(main())


# --- what it leaves alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        bare_scope(method="GET"),
        bare_scope(method="PUT"),
        bare_scope(method="DELETE"),
        bare_scope(headers=[]),
        bare_scope(type="websocket"),
        {"type": "lifespan"},
    ],
    ids=lambda scope: f"{scope['type']} {scope.get('method')}",
)
def test_other_connections_are_passed_on_untouched(scope: Scope) -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, receive, send])

    async def nothing(*_: object) -> Any:
        raise AssertionError("touched")

    async def main() -> None:
        async with WatchedLog() as log:
            before = dict(scope)
            await bare(app, log)(scope, nothing, nothing)
            assert [id(one) for one in seen] == [id(scope), id(nothing), id(nothing)]
            assert scope == before

    run(main())


def test_methods_can_be_chosen(kind: str) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            shop = Shop(kind, log, methods=["get"])
            answers = [await shop.send("k", method=method) for method in ("POST", "POST", "GET", "GET")]
            demand_answers(answers, ("1", False), ("2", False), ("3", False), ("3", True))

    run(main())


def test_a_file_is_kept_though_the_server_could_send_it_itself(tmp_path: Path) -> None:
    (tmp_path / "bill.txt").write_bytes(b"5 euros")
    extensions: dict[str, Any] = {"http.response.pathsend": {}, "http.response.trailers": {}, "http.response.debug": {}}
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["extensions"])
        scope["route"] = "/pay"
        await FileResponse(tmp_path / "bill.txt")(scope, receive, send)

    async def main() -> None:
        async with WatchedLog() as log:
            scope = bare_scope(extensions=extensions)
            first = await talk(bare(app, log), WHOLE, scope=scope)
            again = await talk(bare(app, log), WHOLE, scope=bare_scope(extensions=extensions))
            assert [b"".join(one.get("body", b"") for one in sent) for sent in (first, again)] == [b"5 euros"] * 2
            assert seen == [{"http.response.debug": {}}]
            assert scope["route"] == "/pay", "those outside see what the application put into the scope"
            assert len(extensions) == 3, "the server's own is not changed"

    run(main())


def test_messages_of_other_extensions_go_straight_through() -> None:
    hint = {"type": "http.response.early_hint", "links": [b"</a.css>"]}

    async def main() -> None:
        async with WatchedLog() as log:
            middleware = bare(Scripted(hint, START, body_part(b"ok")), log)
            assert types_of(await talk(middleware, WHOLE)) == [hint["type"], START["type"], "http.response.body"]
            assert types_of(await talk(middleware, WHOLE)) == [START["type"], "http.response.body"]

    run(main())


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"log": 17}, TypeError, "not int"),
        ({"log": None}, TypeError, "not NoneType"),
        ({"scope": "ann"}, TypeError, "scope is a function"),
        ({"methods": "POST"}, TypeError, "methods is a list"),
        ({"in_flight": "never"}, ValueError, "'wait' or 'raise'"),
        ({"request_bytes_max": 0}, ValueError, "request_bytes_max"),
        ({"answer_bytes_max": 1.5}, ValueError, "answer_bytes_max"),
        ({"lease_s": 0}, ValueError, "lease_s"),
        ({"wait_s": -1}, ValueError, "wait_s"),
        ({"name": "No Name"}, ValueError, "a policy's name"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        IdempotencyMiddleware(Scripted(), **{"log": "log.db", "scope": user_of, **options})
    assert said in str(raised.value)


def test_a_function_that_gives_no_log_is_an_error_of_the_program(tmp_path: Path) -> None:
    app = Scripted(START, body_part(b""))
    with oncelog.open_blocking(tmp_path / "log.db") as blocking:
        gives: Any = lambda: blocking  # noqa: E731
        with pytest.raises(TypeError, match="not BlockingLog"):
            run(talk(bare(app, gives), WHOLE))
    assert app.runs == 0


# --- the page about it -----------------------------------------------------------------------------------

PAGE: Final = (Path(__file__).parents[2] / "docs/idempotency-key.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 1], ids=["starlette", "fastapi"])
def test_the_applications_of_the_page_answer(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 2
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(programs[number], namespace)  # noqa: S102 - it is our own page
    app = namespace["app"]

    async def send(user: str, amount: int) -> httpx.Response:
        headers = {"Idempotency-Key": "k"} | ({"Authorization": user} if user else {})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return await client.post("/pay", headers=headers, json={"amount": amount})

    async def main() -> None:
        asked = [("ann", 5), ("ann", 5), ("bob", 6), ("ann", 6), ("", 7), ("", 8)]
        async with lifespan(app):
            answers = [await send(*one) for one in asked]
        assert [one.status_code for one in answers] == [201, 201, 201, 422, 201, 201]
        assert [is_replay(one) for one in answers] == [False, True, False, False, False, False]
        assert [one.json().get("paid") for one in answers[:3]] == [{"amount": 5}, {"amount": 5}, {"amount": 6}]

    run(main())


def test_every_option_is_on_the_page_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (?:`(.*?)`)? ?\|", PAGE, re.MULTILINE)
    defaults = {name: eval(text, {"kept_for": kept_for}) if text else inspect.Parameter.empty for name, text in rows}  # noqa: S307
    parameters = inspect.signature(IdempotencyMiddleware).parameters.values()
    assert defaults == {one.name: one.default for one in parameters if one.name != "app"}


def test_every_problem_is_on_the_page_with_its_status() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    raised = re.findall(r'_Problem\((\d+), "([a-z-]+)"', Path(asgi.__file__).read_text(encoding="utf-8"))
    held_back = {(kind, str(status)) for status, kind, _ in asgi._HELD_BACK.values()}
    assert sorted(rows) == sorted({(kind, status) for status, kind in raised} | held_back)


# --- several processes -----------------------------------------------------------------------------------

PROCESSES: Final = 3
REQUESTS: Final = 100
PATIENCE_S: Final = 60
SERVERS: Final = pytest.mark.parametrize(
    ("kind", "store_kind"), [("starlette", SQLITE), ("fastapi", SQLITE), ("starlette", POSTGRES)], indirect=True
)
"""They take long to start, and what they share with each other is the store."""


class Servers:
    """Processes on one log, each with a port of its own so that the test says which one gets a request."""

    def __init__(self, stack: ExitStack, path: str, kind: str, lease_s: float) -> None:
        self._changed = Condition()
        self._ports: dict[int, int] = {}
        self.heard: Counter[str] = Counter()
        self.running: list[int] = []
        """The numbers of the processes that began to carry out the request, in order."""
        arguments = (asgi_worker.__file__, path, kind, str(lease_s))
        self.processes = [stack.enter_context(started(*arguments)) for _ in range(PROCESSES)]
        for number, process in enumerate(self.processes):
            Thread(target=self._listen, args=(number, process), daemon=True).start()
        self.wait(lambda: len(self._ports) == PROCESSES)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), (self.heard, self.running)

    def let_end(self, *numbers: int) -> None:
        for number in numbers:
            pipe = self.processes[number].stdin
            assert pipe is not None
            pipe.write(b"go\n")
            pipe.flush()

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        assert self.processes[number].wait(PATIENCE_S) == -signal.SIGKILL

    async def send(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        url = f"http://127.0.0.1:{self._ports[number]}/pay"
        return await client.post(url, headers={"Idempotency-Key": "k"}, json={"amount": 5})

    def _listen(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, *more = line.decode().split()
            with self._changed:
                self.heard[word] += 1
                if word == "port":
                    self._ports[number] = int(more[0])
                elif word == "run":
                    self.running.append(number)
                self._changed.notify_all()


def demand_one_answer(answers: Sequence[httpx.Response], by: "subprocess.Popen[bytes]") -> None:
    """All are the answer of one run, and one of them is its own."""
    assert {one.status_code for one in answers} == {201}
    assert len({one.content for one in answers}) == 1
    assert answers[0].json()["process"] == by.pid
    assert sorted(is_replay(one) for one in answers) == [False] + [True] * (len(answers) - 1)


@SERVERS
@pytest.mark.rule("RU-7", "RU-11")
def test_a_hundred_requests_to_three_processes_run_once_and_get_one_answer(kind: str, tmp_path: Path) -> None:
    async def main(servers: Servers) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as client:
            sending = [asyncio.ensure_future(servers.send(client, number % PROCESSES)) for number in range(REQUESTS)]
            await asyncio.to_thread(
                servers.wait, lambda: servers.heard["request"] == REQUESTS and bool(servers.running)
            )
            assert not any(task.done() for task in sending)
            servers.let_end(*range(PROCESSES))
            return await asyncio.gather(*sending)

    with ExitStack() as stack:
        servers = Servers(stack, log_at(tmp_path / "log.db"), kind, lease_s=30)
        answers = asyncio.run(main(servers))
        assert len(servers.running) == 1
        demand_one_answer(answers, servers.processes[servers.running[0]])


@SERVERS
@pytest.mark.rule("RU-7", "RU-11")
def test_when_the_process_that_runs_it_is_killed_one_other_takes_over(kind: str, tmp_path: Path) -> None:
    async def main(servers: Servers) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as client:
            lost = asyncio.ensure_future(servers.send(client, 0))
            await asyncio.to_thread(servers.wait, lambda: servers.running == [0])
            servers.kill(0)
            with pytest.raises(httpx.RemoteProtocolError):
                await lost
            others = [asyncio.ensure_future(servers.send(client, 1 + number % 2)) for number in range(20)]
            await asyncio.to_thread(servers.wait, lambda: servers.heard["request"] == 21 and len(servers.running) > 1)
            servers.let_end(1, 2)
            return await asyncio.gather(*others)

    with ExitStack() as stack:
        servers = Servers(stack, log_at(tmp_path / "log.db"), kind, lease_s=0.5)
        answers = asyncio.run(main(servers))
        assert len(servers.running) == 2
        demand_one_answer(answers, servers.processes[servers.running[1]])
