"""The `Idempotency-Key` header with Starlette and FastAPI: replay, scope, key syntax and requests in flight."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response

import oncelog
from databases import BOTH_STORES, log_at
from engine.observable_store import WatchedLog
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
    get_user,
    is_replay,
    list_types,
)
from idempotency.conftest import Waiters
from oncelog.idempotency.asgi import IdempotencyMiddleware, Receive, Scope, Send

# --- replay ----------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("RU-11")
async def test_retry_replays_status_headers_and_body_even_after_a_restart(kind: str, tmp_path: Path) -> None:
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


@pytest.mark.rule("RU-11")
async def test_requests_with_different_keys_run_separately(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        check_answers([await shop.send(key) for key in ("k", "K", "k")], ("1", False), ("2", False), ("1", True))


async def test_replay_omits_hop_by_hop_headers(kind: str) -> None:
    async def answer(_: Request) -> Response:
        response = PlainTextResponse("ok", headers={"Keep-Alive": "timeout=5", "X-Hop": "1", "X-Kept": "2"})
        response.headers.append("Connection", "Keep-Alive, X-Hop")
        response.headers.append("Connection", "close")
        return response

    async with WatchedLog() as log:
        shop = Shop(kind, log, answer)
        first, again = [await shop.send("k") for _ in range(2)]
        assert first.headers["x-hop"] == "1", "the first answer is sent unchanged"
        assert sorted(again.headers) == ["content-length", "content-type", "idempotent-replayed", "x-kept"]


@pytest.mark.parametrize("status", [204, 302, 304])
async def test_answers_without_a_body_are_replayed(kind: str, status: int) -> None:
    async def answer(_: Request) -> Response:
        return Response(None, status, {"Location": "/elsewhere", "X-Charge": "1"})

    async with WatchedLog() as log:
        shop = Shop(kind, log, answer)
        answers = [await shop.send("k") for _ in range(2)]
        check_answers(answers, ("1", False), ("1", True))
        assert [(one.status_code, one.content) for one in answers] == [(status, b"")] * 2


async def test_replay_of_a_head_request_keeps_content_length(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, methods=["head"])
        answers = [await shop.send("k", method="HEAD") for _ in range(2)]
        check_answers(answers, ("1", False), ("1", True))
        assert [(one.headers["content-length"], one.content) for one in answers] == [("12", b"")] * 2


async def test_response_headers_may_be_an_iterator() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers: Iterator[list[bytes]] = iter([[b"x-a", b"1"], [b"x-a", b"\xff"]])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    async with WatchedLog() as log:
        middleware = bare(app, log)
        first, again = [await exchange(middleware, WHOLE) for _ in range(2)]
        kept = [(b"x-a", b"1"), (b"x-a", b"\xff")]
        assert first == [{**START, "headers": kept}, body_part(b"")]
        assert again == [{**START, "headers": [*kept, (b"idempotent-replayed", b"true")]}, body_part(b"")]


# --- scope and fingerprint --------------------------------------------------------------------------------

OTHER_REQUESTS: Final = [
    {"method": "PATCH"},
    {"path": "/pa/y?a=1"},
    {"path": "/pa%2Fy"},
    {"path": "/pay?a=2"},
    {"path": "/pay"},
    {"content": b'{"amount":6}'},
    {"content": b""},
]


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("other", OTHER_REQUESTS, ids=str)
async def test_key_reused_for_a_different_request_is_refused_and_runs_nothing(kind: str, other: dict[str, Any]) -> None:
    path = "/pa/y" if other.get("path") == "/pa%2Fy" else "/pay?a=1"
    async with WatchedLog() as log:
        shop = Shop(kind, log, in_flight="wait")
        running = asyncio.ensure_future(shop.send("k", path=path))
        shop.gate.shut()
        await shop.gate.reached.wait()
        check_problem(await shop.send("k", **{"path": path, **other}), 422, "key-reused")
        shop.gate.open()
        check_answers([await running], ("1", False))
        check_problem(await shop.send("k", **{"path": path, **other}), 422, "key-reused")
        check_answers([await shop.send("k", path=path)], ("1", True))
        assert len(shop.runs) == 1


@pytest.mark.rule("RU-11")
async def test_equal_keys_of_different_users_are_separate(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        answers = [await shop.send("k", user=user) for user in ("ann", "bob", "ann", "bob")]
        check_answers(answers, ("1", False), ("2", False), ("1", True), ("2", True))


async def test_scope_accepts_any_text() -> None:
    users = ["", "a", "a/b", "a%2Fb", "a\0", "\ud800", "ü" * 500, "ü" * 501, "ü" * 600, "sha256", "sha256/x"]
    async with WatchedLog() as log:
        app = Scripted(START, body_part(b"ok"))
        middleware = IdempotencyMiddleware(app, log=log, scope=get_user)
        for number, user in enumerate(users, 1):
            for _ in range(2):
                sent = await exchange(middleware, WHOLE, scope=bare_scope(user=user))
                assert (sent[0]["status"], app.runs) == (200, number), user


@pytest.mark.rule("RU-11")
@pytest.mark.parametrize("keys", [("k",), ("k", "l"), ("",), ()])
async def test_requests_without_a_user_bypass_the_middleware(kind: str, keys: Sequence[str]) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, required=True)
        check_answers([await shop.send(*keys, user="") for _ in range(2)], ("1", False), ("2", False))
        assert log.store.batches == []


async def test_scope_may_be_an_async_function(kind: str) -> None:
    async def get_scope(connection: Scope) -> str | None:
        await asyncio.sleep(0)
        return get_user(connection)

    async with WatchedLog() as log:
        shop = Shop(kind, log, scope=get_scope)
        users = ["ann", "bob", "ann", "", ""]
        answers = [await shop.send("k", user=user) for user in users]
        check_answers(answers, ("1", False), ("2", False), ("1", True), ("3", False), ("4", False))


async def test_scope_function_that_does_not_return_text_raises_type_error() -> None:
    async with WatchedLog() as log:
        app = Scripted(START, body_part(b""))
        numbered: Any = lambda _: 17  # noqa: E731
        with pytest.raises(TypeError, match="a string, a UUID or None, not int"):
            await exchange(IdempotencyMiddleware(app, log=log, scope=numbered), WHOLE)
        assert app.runs == 0


# --- the header ------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-11")
async def test_missing_key_is_refused_when_required(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, required=True)
        check_problem(await shop.send(), 400, "key-missing")
        check_problem(await shop.send(method="PATCH"), 400, "key-missing")
        assert shop.runs == []
        check_answers([await shop.send(method="GET")], ("1", False))


async def test_missing_optional_key_bypasses_the_middleware_without_calling_scope(kind: str) -> None:
    def fail(_: Scope) -> str:
        raise AssertionError("the scope function was called")

    async with WatchedLog() as log:
        shop = Shop(kind, log, scope=fail)
        check_answers([await shop.send() for _ in range(2)], ("1", False), ("2", False))
        assert log.store.batches == []


INVALID_KEYS: Final = [
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
    ('"a\tb"',),
    ('"é"',),
    ('"a\x7f"',),
    (f'"{"k" * 256}"',),
]


@pytest.mark.parametrize("keys", INVALID_KEYS, ids=ascii)
async def test_invalid_key_is_refused(kind: str, keys: Sequence[str]) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        check_problem(await shop.send(*keys), 400, "key-invalid")
        assert shop.runs == []


@pytest.mark.parametrize(
    ("one", "other"),
    [("k", '"k"'), ("k", ' "k" '), ('a"b\\c', r'"a\"b\\c"'), ("k" * 255, f'"{"k" * 255}"'), ("a\\\\", r'"a\\\\"')],
)
async def test_quoted_and_unquoted_key_are_equal(kind: str, one: str, other: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        check_answers([await shop.send(one), await shop.send(other)], ("1", False), ("1", True))


@pytest.mark.rule("RU-11")
async def test_quoted_key_may_have_all_characters_of_a_structured_field_string(kind: str) -> None:
    printable = bytes(range(0x20, 0x7F)).decode()
    escaped = printable.replace("\\", r"\\").replace('"', r"\"")
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        keys = ['"a b"', '"a  b"', '" a b"', '"a b"', f'"{escaped}"', f'"{escaped}"']
        answers = [await shop.send(key) for key in keys]
    check_answers(answers, ("1", False), ("2", False), ("3", False), ("1", True), ("4", False), ("4", True))


# --- in flight -------------------------------------------------------------------------------------------


@pytest.mark.rule("RU-7", "RU-11")
async def test_retry_of_a_request_in_flight_is_answered_with_409(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log)
        running = await shop.start_running()
        response = await shop.send("k")
        check_problem(response, 409, "in-flight")
        assert response.headers["retry-after"] == "1"
        shop.gate.open()
        check_answers([await running, await shop.send("k")], ("1", False), ("1", True))


@pytest.mark.rule("RU-7", "RU-11")
async def test_retry_waits_for_the_request_in_flight_when_configured(kind: str, waiters: Waiters) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, in_flight="wait")
        running = await shop.start_running()
        waiting = [shop.start_sending("k") for _ in range(5)]
        await waiters.until(5)
        assert not any(task.done() for task in waiting)
        shop.gate.open()
        first, *others = await asyncio.gather(running, *waiting)
        check_answers([first, *others], ("1", False), *[("1", True)] * 5)
        assert {(one.status_code, one.content) for one in others} == {(201, first.content)}


async def test_retry_is_answered_with_409_after_wait_s(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, in_flight="wait", wait_s=0.001)
        running = await shop.start_running()
        response = await shop.send("k")
        check_problem(response, 409, "in-flight")
        assert response.headers["retry-after"] == "1"
        shop.gate.open()
        check_answers([await running], ("1", False))


# --- other connections -----------------------------------------------------------------------------------


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
async def test_other_methods_and_connection_types_are_passed_through_unchanged(scope: Scope) -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, receive, send])

    async def nothing(*_: object) -> Any:
        raise AssertionError("receive or send was called")

    async with WatchedLog() as log:
        before = dict(scope)
        await bare(app, log)(scope, nothing, nothing)
        assert [id(one) for one in seen] == [id(scope), id(nothing), id(nothing)]
        assert scope == before


async def test_methods_option_selects_the_covered_methods(kind: str) -> None:
    async with WatchedLog() as log:
        shop = Shop(kind, log, methods=["get"])
        answers = [await shop.send("k", method=method) for method in ("POST", "POST", "GET", "GET")]
        check_answers(answers, ("1", False), ("2", False), ("3", False), ("3", True))


async def test_file_response_is_stored_even_if_the_server_supports_pathsend(tmp_path: Path) -> None:
    (tmp_path / "bill.txt").write_bytes(b"5 euros")
    extensions: dict[str, Any] = {"http.response.pathsend": {}, "http.response.trailers": {}, "http.response.debug": {}}
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["extensions"])
        scope["route"] = "/pay"
        await FileResponse(tmp_path / "bill.txt")(scope, receive, send)

    async with WatchedLog() as log:
        scope = bare_scope(extensions=extensions)
        first = await exchange(bare(app, log), WHOLE, scope=scope)
        again = await exchange(bare(app, log), WHOLE, scope=bare_scope(extensions=extensions))
        assert [b"".join(one.get("body", b"") for one in sent) for sent in (first, again)] == [b"5 euros"] * 2
        assert seen == [{"http.response.debug": {}}]
        assert scope["route"] == "/pay", "outer middleware sees the application's changes to the scope"
        assert len(extensions) == 3, "the extensions of the server are not changed"


async def test_messages_of_other_extensions_are_passed_through_and_not_replayed() -> None:
    hint = {"type": "http.response.early_hint", "links": [b"</a.css>"]}
    async with WatchedLog() as log:
        middleware = bare(Scripted(hint, START, body_part(b"ok")), log)
        assert list_types(await exchange(middleware, WHOLE)) == [hint["type"], START["type"], "http.response.body"]
        assert list_types(await exchange(middleware, WHOLE)) == [START["type"], "http.response.body"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"log": 17}, TypeError, "not int"),
        ({"log": None}, TypeError, "not NoneType"),
        ({"scope": "ann"}, TypeError, "scope must be a function"),
        ({"methods": "POST"}, TypeError, "methods must be a list"),
        ({"in_flight": "never"}, ValueError, "'wait' or 'raise'"),
        ({"request_bytes_max": 0}, ValueError, "request_bytes_max"),
        ({"answer_bytes_max": 1.5}, ValueError, "answer_bytes_max"),
        ({"lease_s": 0}, ValueError, "lease_s"),
        ({"wait_s": -1}, ValueError, "wait_s"),
        ({"name": "No Name"}, ValueError, "a policy's name"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        IdempotencyMiddleware(Scripted(), **{"log": "log.db", "scope": get_user, **options})
    assert message in str(raised.value)


async def test_log_function_that_does_not_return_a_log_raises_type_error(tmp_path: Path) -> None:
    app = Scripted(START, body_part(b""))
    with oncelog.open_blocking(tmp_path / "log.db") as blocking:
        gives: Any = lambda: blocking  # noqa: E731
        with pytest.raises(TypeError, match="not BlockingLog"):
            await exchange(bare(app, gives), WHOLE)
    assert app.runs == 0
