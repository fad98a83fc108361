"""Options of the idempotency middleware: stored statuses and request fingerprints."""

import asyncio
import re
from decimal import Decimal
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import httpx
import pytest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import oncelog
from databases import BOTH_STORES, log_at
from engine.observable_store import WatchedLog
from idempotency.asgi_application import (
    START,
    WHOLE,
    Scripted,
    Shop,
    bare,
    body_part,
    check_answers,
    check_problem,
    exchange,
    is_replay,
)
from idempotency.conftest import Waiters
from idempotency.test_asgi_docs import PAGE
from oncelog import STORED_STATUSES, HttpRequest, IdempotencyMiddleware, OnReuse, Order, Policy, Submission, kept_for

# --- statuses --------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-15")
@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500, 503, 599])
async def test_answer_that_invites_a_retry_is_not_stored(kind: str, status: int) -> None:
    async def refuse(_: Request) -> Response:
        return Response("later", status, {"Retry-After": "1"})

    async with WatchedLog() as log:
        shop = Shop(kind, log, refuse)
        for _ in range(2):
            response = await shop.send("k")
            assert (response.status_code, response.headers["retry-after"], is_replay(response)) == (status, "1", False)
        shop.answer = shop.paid
        check_answers([await shop.send("k") for _ in range(2)], ("3", False), ("3", True))


@pytest.mark.rule("RU-15")
def test_all_other_statuses_are_stored_by_default() -> None:
    assert set(range(200, 600)) - STORED_STATUSES == {401, 403, 408, 425, 429, *range(500, 600)}


@pytest.mark.rule("RU-15")
@pytest.mark.parametrize(
    "store_status",
    [
        lambda status: status in (200, 503),
        [200, 503],
        {HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE},
    ],
)
async def test_store_status_selects_the_stored_answers(store_status: Any) -> None:
    stored = {}
    async with WatchedLog() as log:
        for status in (200, 201, 404, 500, 503):
            app = Scripted({**START, "status": status}, body_part(b"a", more=True), body_part(b"b"))
            middleware = bare(app, log, name=f"http{status}", store_status=store_status)
            answers = [await exchange(middleware, WHOLE) for _ in range(2)]
            assert [answer[0]["status"] for answer in answers] == [status, status]
            stored[status] = app.runs == 1
    assert stored == {200: True, 201: False, 404: False, 500: False, 503: True}


@pytest.mark.rule("RU-15")
async def test_answer_that_is_not_stored_is_streamed() -> None:
    async with WatchedLog() as log:
        parts = [body_part(b"a", more=True), body_part(b"b", more=True), body_part(b"c")]
        app = Scripted({**START, "status": 429}, *parts)
        assert await exchange(bare(app, log), WHOLE) == [{**START, "status": 429}, *parts]


@BOTH_STORES
@pytest.mark.rule("RU-15", "RU-7")
async def test_waiting_request_runs_after_an_answer_that_is_not_stored(tmp_path: Path, waiters: Waiters) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        await Shop("starlette", log, in_flight="wait").check_waiting_retries_after(429, waiters)


@pytest.mark.parametrize(
    ("store_status", "error", "message"),
    [
        ("200", TypeError, "a function or a set of statuses, not str"),
        (200, TypeError, "a function or a set of statuses, not int"),
        (None, TypeError, "a function or a set of statuses, not NoneType"),
        ([199], ValueError, "from 200 to 599, not 199"),
        ([600], ValueError, "from 200 to 599, not 600"),
        ([True], ValueError, "from 200 to 599, not True"),
        (["200"], ValueError, "from 200 to 599, not '200'"),
        ([], ValueError, "at least one status"),
        (lambda _: False, ValueError, "at least one status"),
        (lambda _: None, TypeError, "True or False, not None for 200"),
    ],
)
def test_invalid_store_status_is_refused_at_startup(store_status: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        bare(Scripted(), "log.db", store_status=store_status)


# --- fingerprints ----------------------------------------------------------------------------------------


def multipart(boundary: str, amount: str) -> tuple[bytes, dict[str, str]]:
    files = {"receipt": ("receipt.txt", amount.encode(), "text/plain")}
    request = httpx.Request(
        "POST", "http://shop", files=files, headers={"content-type": f"multipart/form-data; boundary={boundary}"}
    )
    return request.read(), {"content-type": request.headers["content-type"]}


def fingerprint_of_page() -> Any:
    """Return the documented function that ignores the boundary of multipart requests."""
    (program,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def fingerprint" in one]
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(program, namespace)  # noqa: S102 - it is our own page
    return namespace["fingerprint"]


async def send_multipart(shop: Shop, boundary: str, amount: str = "5") -> httpx.Response:
    content, headers = multipart(boundary, amount)
    transport = httpx.ASGITransport(shop.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await client.post("/pay", content=content, headers={**headers, "Idempotency-Key": "k", "X-User": "ann"})


@pytest.mark.rule("RU-15")
@pytest.mark.parametrize("boundaries", [("one", "two"), ('"one 1"', "two"), ("one", '"two:2"')])
async def test_multipart_retry_with_a_new_boundary_is_replayed(kind: str, boundaries: tuple[str, str]) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, fingerprint=fingerprint_of_page())
        check_answers([await send_multipart(shop, one) for one in boundaries], ("1", False), ("1", True))
        check_problem(await send_multipart(shop, boundaries[0], "6"), 422, "key-reused")
        check_answers([await shop.send("plain") for _ in range(2)], ("2", False), ("2", True))
        check_problem(await shop.send("plain", content=b"{}"), 422, "key-reused")


async def test_multipart_retry_with_a_new_boundary_is_a_different_request_by_default() -> None:
    async with WatchedLog() as log:
        shop = Shop("starlette", log)
        check_answers([await send_multipart(shop, "one")], ("1", False))
        check_problem(await send_multipart(shop, "two"), 422, "key-reused")


@pytest.mark.rule("RU-15")
@pytest.mark.parametrize("is_async", [False, True])
async def test_fingerprint_function_gets_the_whole_request(is_async: bool) -> None:
    asked: list[HttpRequest] = []

    def use_header(request: HttpRequest) -> bytes:
        asked.append(request)
        return sha256(request.header("X-Order")).digest()

    async def use_header_later(request: HttpRequest) -> bytes:
        await asyncio.sleep(0)
        return use_header(request)

    async def send(order: bytes, body: bytes) -> list[Any]:
        headers = [(b"Idempotency-Key", b"k"), (b"X-Order", order), (b"x-order", b"b")]
        scope = {"type": "http", "method": "POST", "path": "/p y", "raw_path": b"/p%20y", "query_string": b"q=1"}
        return await exchange(
            middleware, {"type": "http.request", "body": body, "more_body": False}, scope={**scope, "headers": headers}
        )

    async with WatchedLog() as log:
        app = Scripted(START, body_part(b"ok"))
        middleware = bare(app, log, fingerprint=use_header_later if is_async else use_header)
        answers = [await send(b"a", b"1"), await send(b"a", b"2"), await send(b"c", b"1")]
    assert [answer[0]["status"] for answer in answers] == [200, 200, 422]
    assert app.runs == 1
    headers = ((b"idempotency-key", b"k"), (b"x-order", b"a"), (b"x-order", b"b"))
    assert asked[0] == HttpRequest("POST", b"/p%20y", b"q=1", headers, b"1")
    assert (asked[0].header("X-ORDER"), asked[0].header("missing")) == (b"a, b", b"")


class Payment(BaseModel):
    order: str
    cents: Decimal


@pytest.mark.rule("RU-15")
@pytest.mark.parametrize("is_async", [False, True])
async def test_fingerprint_function_may_return_a_model_of_the_body(is_async: bool) -> None:
    def read(request: HttpRequest) -> Payment:
        return Payment.model_validate_json(request.body)

    async def read_later(request: HttpRequest) -> Payment:
        return read(request)

    async def send(path: str, body: bytes) -> int:
        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"Idempotency-Key", b"k")]}
        message = {"type": "http.request", "body": body, "more_body": False}
        answer: list[Any] = await exchange(middleware, message, scope=scope)
        return int(answer[0]["status"])

    async with WatchedLog() as log:
        app = Scripted(START, body_part(b"ok"))
        middleware = bare(app, log, fingerprint=read_later if is_async else read)
        assert await send("/pay", b'{"order": "a", "cents": "1.50"}') == 200
        assert await send("/pay", b'{"cents":"1.50","order":"a"}') == 200
        assert await send("/pay", b'{"order": "a", "cents": "1.60"}') == 422
        assert await send("/refund", b'{"order": "a", "cents": "1.50"}') == 422
        assert app.runs == 1


async def test_scope_may_be_a_uuid() -> None:
    user = UUID(int=7)
    async with WatchedLog() as log:
        app = Scripted(START, body_part(b"ok"))
        for scope in (user, str(user)):
            middleware = IdempotencyMiddleware(app, log=log, scope=lambda _, scope=scope: scope)  # type: ignore[misc]
            await exchange(middleware, WHOLE)
        assert app.runs == 1


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, "must return bytes, or a value that identifies the request, not None"),
        (object(), TypeError, "returned a value of type object, which has no canonical form"),
        (b"", ValueError, "1 to 64 bytes, not 0"),
        (bytes(65), ValueError, "1 to 64 bytes, not 65; return a hash"),
    ],
)
async def test_invalid_fingerprint_raises_and_runs_nothing(returned: Any, error: type, message: str) -> None:
    async with WatchedLog() as log:
        app = Scripted(START, body_part(b""))
        with pytest.raises(error, match=message):
            await exchange(bare(app, log, fingerprint=lambda _: returned), WHOLE)
        assert app.runs == 0


def test_fingerprint_that_is_not_a_function_is_refused_at_startup() -> None:
    with pytest.raises(TypeError, match="fingerprint must be a function or None, not bytes"):
        bare(Scripted(), "log.db", fingerprint=b"x")


# --- answers from earlier versions -------------------------------------------------------------------------

HTTP: Final = Policy(
    name="http",
    key_bytes=(1, 255),
    order=Order.STREAM,
    on_reuse=OnReuse.REFUSE,
    retention=kept_for(hours=24),
    leased=True,
)
STORED_BEFORE: Final = b'{"status":%d,"headers":[["x-charge","1"]],"is_whole":true}\0{"charge":1}'
FINGERPRINT: Final = bytes.fromhex("f08f0a75c4fb3c090d7c544f89475951f68d3599ae05f05d420fd9ee4ba6ad69")
"""Stored answers to `POST /pay` with the body `{"amount":5}`."""


@BOTH_STORES
@pytest.mark.rule("RU-15", "RU-11")
@pytest.mark.parametrize("status", [201, 429])
async def test_answers_that_an_earlier_version_stored_are_replayed(tmp_path: Path, status: int) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db"), policies=[HTTP]) as log:
        stored = STORED_BEFORE % status
        await log.submit(Submission(policy=HTTP, scope="http/ann", key=b"k", fingerprint=FINGERPRINT, body=stored))
        shop = Shop("starlette", log, fingerprint=fingerprint_of_page())
        response = await shop.send("k")
        assert (response.status_code, response.content) == (status, b'{"charge":1}')
        check_answers([response], ("1", True))
        assert shop.runs == []
