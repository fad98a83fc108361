"""Answers that the idempotency middleware stores: status codes, bodies, size limits and unfinished answers."""

import asyncio
from collections.abc import Sequence
from typing import Final

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from deadlines import turns, until
from engine.observable_store import WatchedLog, count_leases
from idempotency.asgi_application import (
    START,
    WHOLE,
    Scripted,
    Shop,
    bare,
    bare_scope,
    body_part,
    check_answers,
    check_problem,
    exchange,
    is_replay,
    parts_of,
    streaming,
)
from idempotency.conftest import Waiters
from oncelog.idempotency.asgi import IdempotencyMiddleware, Message, Receive, Scope, Send

# --- status codes ---------------------------------------------------------------------------------------


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("status", [500, 503, 599])
async def test_5xx_answer_is_not_stored(kind: str, status: int) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, streaming(b"no", b"t", b" now", status=status))
        for _ in range(2):
            response = await shop.send("k")
            assert (response.status_code, response.content, is_replay(response)) == (status, b"not now", False)
        shop.answer = shop.paid
        check_answers([await shop.send("k") for _ in range(2)], ("3", False), ("3", True))


@pytest.mark.rule("RU-11")
async def test_exception_is_not_stored(kind: str) -> None:
    async def raise_error(_: Request) -> Response:
        raise LookupError("no such account")

    async with WatchedLog() as log:
        shop = Shop(kind, log, raise_error)
        response = await shop.send("k")
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        shop.answer = shop.paid
        check_answers([await shop.send("k") for _ in range(2)], ("2", False), ("2", True))


async def test_one_waiting_retry_runs_after_the_first_request_fails(kind: str, waiters: Waiters) -> None:
    async with WatchedLog() as log:
        await Shop(kind, log, in_flight="wait").check_waiting_retries_after(503, waiters)


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("status", [400, 402, 404, 409, 499])
async def test_4xx_answer_is_stored(kind: str, status: int) -> None:
    async def refuse(_: Request) -> Response:
        raise HTTPException(status, "no", {"X-Charge": "none"})

    async with WatchedLog() as log:
        shop = Shop(kind, log, refuse)
        answers = [await shop.send("k") for _ in range(2)]
        check_answers(answers, ("none", False), ("none", True))
        assert [one.status_code for one in answers] == [status] * 2
        assert answers[0].content == answers[1].content != b""
        assert len(shop.runs) == 1


async def test_validation_errors_and_model_responses_of_fastapi_are_stored() -> None:
    class Payment(BaseModel):
        amount: int

    async with WatchedLog() as log:
        api = FastAPI()
        api.add_middleware(IdempotencyMiddleware, log=log, scope=lambda _: "ann")
        paid: list[int] = []
        notified: list[int] = []

        @api.post("/pay", status_code=201)
        async def pay(payment: Payment, tasks: BackgroundTasks) -> Payment:
            paid.append(payment.amount)
            tasks.add_task(notified.append, payment.amount)
            return payment

        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://shop") as client:
            for key, amount, status in (("a", 5, 201), ("b", "much", 422)):
                headers = {"Idempotency-Key": key}
                first, again = [await client.post("/pay", headers=headers, json={"amount": amount}) for _ in range(2)]
                assert [first.status_code, again.status_code] == [status] * 2
                assert first.json() == again.json()
                assert (is_replay(first), is_replay(again)) == (False, True)
        assert (paid, notified) == ([5], [5])


# --- bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 10, b"x"), (b"x",) * 11])
async def test_request_above_the_size_limit_is_refused_and_not_run(kind: str, parts: Sequence[bytes]) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, request_bytes_max=10)
        check_problem(await shop.send("k", content=parts_of(*parts)), 413, "request-too-large")
        assert shop.runs == []
        assert log.store.batches == []
        check_answers([await shop.send("k", content=b"x" * 10)], ("1", False))
        check_answers([await shop.send(content=b"x" * 11)], ("2", False))


async def test_chunked_request_equals_the_same_request_in_one_part(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        answers = [
            await shop.send("k", content=parts_of(b"am", b"", b"ount")),
            await shop.send("k", content=b"amount"),
        ]
        check_answers(answers, ("1", False), ("1", True))
        assert shop.runs == [b"amount"]


async def test_streamed_answer_is_replayed_in_one_part(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, streaming(b"one ", b"", b"two \0", b"three"), answer_bytes_max=14)
        answers = [await shop.send("k") for _ in range(2)]
        assert [one.content for one in answers] == [b"one two \0three"] * 2
        assert [is_replay(one) for one in answers] == [False, True]


async def test_answer_is_not_sent_before_it_is_committed() -> None:
    async with WatchedLog() as log:
        sent: list[Message] = []
        records_at_send: list[int] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            for message in (START, body_part(b"one", more=True)):
                await send(message)
                assert sent == []
            log.hold_commits()
            await send(body_part(b"two"))

        async def send(message: Message) -> None:
            records_at_send.append(len((await log.read(stream="http/ann")).records))
            sent.append(message)

        async def receive() -> Message:
            return WHOLE

        exchanging = asyncio.ensure_future(bare(app, log)(bare_scope(), receive, send))
        await log.gate.reached.wait()
        await turns()
        assert sent == []
        log.gate.open()
        await exchanging
        assert sent == [START, body_part(b"onetwo")]
        assert records_at_send == [1, 1]


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 10, b"x", b"yz"), (b"x",) * 50, (b"x" * 10, b"xx", b"")])
async def test_answer_above_the_size_limit_is_sent_but_neither_stored_nor_rerun(
    kind: str, parts: Sequence[bytes]
) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, streaming(*parts, status=202), answer_bytes_max=10)
        first = await shop.send("k")
        assert (first.status_code, first.content, is_replay(first)) == (202, b"".join(parts), False)
        for _ in range(2):
            response = await shop.send("k")
            check_problem(response, 409, "answer-not-kept")
            assert "retry-after" not in response.headers
            assert "202" in response.json()["detail"]
        assert len(shop.runs) == 1


async def test_answer_above_the_size_limit_is_streamed() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for part, expected in ((b"12", 0), (b"345", 2), (b"6", 3), (b"7", 4)):
            await send(body_part(part, more=True))
            assert len(sent) == expected
        await send(body_part(b""))

    async with WatchedLog() as log:

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return WHOLE

        await bare(app, log, answer_bytes_max=4)(bare_scope(), receive, send)
        parts = [body_part(b"12345", more=True), body_part(b"6", more=True), body_part(b"7", more=True)]
        assert sent == [START, *parts, body_part(b"")]


async def test_answer_above_the_body_limit_of_the_log_is_not_rerun(kind: str) -> None:
    async with WatchedLog(body_bytes_max=200) as log:
        for key, size, is_kept in (("a", 50, True), ("b", 200, False)):
            shop = Shop(kind, log, streaming(b"x" * size))
            first, again = [await shop.send(key) for _ in range(2)]
            assert (first.status_code, len(first.content)) == (200, size)
            if is_kept:
                assert is_replay(again)
            else:
                check_problem(again, 409, "answer-not-kept")
            assert len(shop.runs) == 1


# --- unfinished requests ----------------------------------------------------------------------------------


async def test_client_that_disconnects_before_the_end_of_its_request_runs_nothing() -> None:
    async with WatchedLog() as log:
        app = Scripted(START, body_part(b"ok"))
        part = {"type": "http.request", "body": b"{", "more_body": True}
        assert await exchange(bare(app, log), part, {"type": "http.disconnect"}) == []
        assert (app.runs, log.store.batches) == (0, [])
        assert await exchange(bare(app, log), WHOLE) == [START, body_part(b"ok")]


async def test_application_receives_the_disconnect_message() -> None:
    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([await receive(), await receive()])

    async with WatchedLog() as log:
        await exchange(bare(app, log), WHOLE, {"type": "http.disconnect"})
        assert heard == [WHOLE, {"type": "http.disconnect"}]


@pytest.mark.rule("RU-7")
async def test_cancelling_a_running_request_lets_the_next_one_run_immediately(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        running = await shop.start_running()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        shop.gate.open()
        check_answers([await shop.send("k") for _ in range(2)], ("2", False), ("2", True))


async def test_cancelling_a_request_during_the_commit_keeps_its_answer(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        running = await shop.start_running()
        log.hold_commits()
        shop.gate.open()
        await log.gate.reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        log.gate.open()
        await until(lambda: count_leases(log) == 0)
        check_answers([await shop.send("k")], ("1", True))


UNFINISHED: Final = [
    [],
    [START],
    [START, body_part(b"some", more=True)],
]


@pytest.mark.parametrize("messages", UNFINISHED)
@pytest.mark.parametrize("error", [None, LookupError("later")])
async def test_unfinished_answer_is_neither_sent_nor_stored(
    messages: Sequence[Message], error: Exception | None
) -> None:
    async with WatchedLog() as log:
        app = Scripted(*messages, error=error)
        sent: list[Message] = []
        try:
            sent += await exchange(bare(app, log), WHOLE)
        except LookupError as raised:
            assert raised is error  # noqa: PT017 - depends on the parameter
        else:
            assert error is None
        assert sent == [], "the server must be able to answer with 500"
        app.messages, app.error = (START, body_part(b"ok")), None
        assert await exchange(bare(app, log), WHOLE) == [START, body_part(b"ok")]


async def test_answer_that_fails_after_the_size_limit_is_not_rerun() -> None:
    async with WatchedLog() as log:
        app = Scripted(START, body_part(b"more than four", more=True), error=LookupError("too late"))
        middleware = bare(app, log, answer_bytes_max=4)
        with pytest.raises(LookupError):
            await exchange(middleware, WHOLE)
        assert (await exchange(middleware, WHOLE))[0]["status"] == 409
        assert app.runs == 1


@pytest.mark.parametrize("messages", [[body_part(b"")], [START, START]])
async def test_violation_of_asgi_by_the_application_raises_runtime_error(messages: Sequence[Message]) -> None:
    async with WatchedLog() as log:
        with pytest.raises(RuntimeError, match="the application"):
            await exchange(bare(Scripted(*messages), log), WHOLE)


@pytest.mark.parametrize("fails", [False, True])
async def test_background_tasks_run_once_after_the_answer(kind: str, fails: bool) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)

        async def run_in_background() -> None:
            records = (await log.read(stream="http/ann")).records
            shop.events.append(f"background, {len(records)} kept")
            if fails:
                raise LookupError("in background")

        async def answer(_: Request) -> Response:
            return PlainTextResponse("ok", background=BackgroundTask(run_in_background))

        async def record_messages(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_and_record(message: Message) -> None:
                shop.events.append(message["type"])
                await send(message)

            await app(scope, receive, send_and_record)

        shop.answer = answer
        app, shop.app = shop.app, record_messages  # type: ignore[assignment]
        answers = [await shop.send("k") for _ in range(2)]
        assert [(one.text, is_replay(one)) for one in answers] == [("ok", False), ("ok", True)]
        sent = ["http.response.start", "http.response.body"]
        assert shop.events == [*sent, "background, 1 kept", *sent]
