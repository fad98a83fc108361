"""The HTTP fast path and aiohttp give equal answers, and aiohttp serves all requests if its internals differ."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from aiohttp import helpers, http_parser, tcp_helpers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deadlines import soon, until
from oncelog.server.http_fast_path import HttpFastPath
from oncelog.server.http_protocol import HttpProtocol
from server.auth.auth_material import token
from server.raw_http import WRITE_PATH, RawConnection, post, raw_connection, write
from server.running_server import Serving, serving

Answer = tuple[int, tuple[tuple[str, str], ...], bytes]

TO_AIOHTTP: Final = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
LAST: Final = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PATHS: Final = (
    WRITE_PATH,
    WRITE_PATH,
    WRITE_PATH,
    "/v1/ledger/batch-write",
    f"{WRITE_PATH}?number=1",
    f"{WRITE_PATH}/",
    "/v1/ledger/%77rite",
    "/v1/ledger/nothing",
    "/v1/ledger/client-state?organization=acme&client_id=c1",
    "/healthz",
    "/",
)
HEADERS: Final = (
    "Accept: application/json",
    "User-Agent: " + "x" * 300,
    "X-Long: " + "y" * 3000,
    "Connection: keep-alive",
    "Origin: http://example.org",
    "Origin: null",
    "X-Forwarded-For: 10.0.0.1",
    "X-Forwarded-Proto: https",
    "Content-Encoding: gzip",
    "Content-Encoding: identity",
    "Cookie: a=b",
    "X-Empty:",
)
CONTENT_TYPES: Final = (
    "Content-Type: application/json",
    "Content-Type: application/json",
    "content-type: Application/JSON; charset=utf-8",
    "Content-Type: text/plain",
    "X-No-Content-Type: 1",
)
# The order of writes must not matter, because each connection sends all of them, one by one.
WRITES: Final = tuple(
    write(number, client, **more)
    for number, client, more in (
        (1, "ada", {}),
        (1, "ada", {}),
        (1, "c1", {}),
        (1, "c2", {}),
        (1, "ä" * 40, {}),
        (9, "c9", {}),  # c9 commits nothing, because the error names the last committed sequence
        (1, "c1", {"sequence": 0}),
        (1, "c2", {"sequence": -1}),
        (1, "c3", {"operations": []}),
        (1, "c4", {"unknown": True}),
        (1, "c5", {"organization": "other"}),
        (1, "", {}),
    )
)
BODIES: Final = (
    *WRITES,
    json.dumps({"writes": [json.loads(WRITES[0])]}).encode(),
    b"",
    b"{",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"organization":"acme","organization":"acme"}',
    b" " * 70_000,
)
# The test sends each of these alone, because aiohttp does not answer requests that arrive in one segment with malformed
# data.
MALFORMED: Final = (
    b"POST\r\n\r\n",
    post(WRITES[0]).replace(b"POST", b"FETCH"),
    b"\0" * 100,
    post(WRITES[0], "Content-Length: +5"),
    post(WRITES[0], "Content-Length: 5", "Content-Length: 6"),
    post(WRITES[0], f"Content-Length: {len(WRITES[0])}", "Transfer-Encoding: chunked"),
    post(WRITES[0], "Transfer-Encoding: chunked"),
    post(WRITES[0]).replace(b"Host:", b"Host :"),
    post(WRITES[0]).replace(b"HTTP/1.1", b"HTTP/9.9"),
    post(WRITES[0]).replace(b"\r\nHost", b"\nHost"),
    post(WRITES[0], "X-Bad\0: 1"),
    post(WRITES[0], "X-Huge: " + "z" * 40_000),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Generate requests that HTTP allows. Most are plain requests, which remain on the fast path."""
    if draw(st.integers(0, 5)):
        path, body = draw(st.sampled_from(PATHS[:4])), draw(st.sampled_from(BODIES))
        credential = draw(st.sampled_from((CREDENTIAL, CREDENTIAL, "wrong")))
        lines = draw(st.lists(st.sampled_from((*HEADERS[:2], HEADERS[3])), max_size=2, unique=True))
        return post(body, f"Authorization: Bearer {credential}", *lines, path=path)
    method = draw(st.sampled_from(("POST", "POST", "POST", "POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS")))
    path, body = draw(st.sampled_from(PATHS)), draw(st.sampled_from(BODIES))
    credential = draw(st.sampled_from(("valid", "valid", "valid", "", "wrong", "Basic", "both")))
    lines = [draw(st.sampled_from(CONTENT_TYPES)), *draw(st.lists(st.sampled_from(HEADERS), max_size=2, unique=True))]
    if credential in ("valid", "both"):
        lines.append(f"authorization: Bearer {CREDENTIAL}")
    if credential in ("wrong", "both"):
        lines.append("Authorization: Bearer wrong")
    if credential == "Basic":
        lines.append("Authorization: Basic YTpi")
    if draw(st.integers(0, 4)):
        lines.append(f"Content-Length: {len(body)}")
    else:
        cut = draw(st.integers(0, len(body)))
        lines.append("Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part)
        body += b"0\r\n\r\n"
    draw(st.randoms(use_true_random=False)).shuffle(lines)
    host = draw(st.sampled_from(("Host: 127.0.0.1", "Host: 127.0.0.1", "host: example.org")))
    return "\r\n".join([f"{method} {path} HTTP/1.1", host, *lines, "", ""]).encode() + body


scripts = st.lists(st.lists(requests(), min_size=1, max_size=4), min_size=1, max_size=4)
"""Requests for one connection, in pipelined groups."""

CREDENTIAL: Final = token(grants={"read": ["*"], "write": ["*"]})


async def read_answer(client: RawConnection) -> Answer | None:
    """Return the next answer, or None at the end of the connection.

    The answer omits the `Date` and `Connection` headers. After a malformed body, aiohttp closes the connection because
    it may not have read the whole body. The fast path has read it and keeps the connection open.
    """
    try:
        head = await soon(client.reader.readuntil(b"\r\n\r\n"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    status, *lines = head.decode().split("\r\n")[:-2]
    headers = dict(line.split(": ", 1) for line in lines)
    body = await soon(client.reader.readexactly(int(headers.get("Content-Length", 0))))
    del headers["Date"]
    headers.pop("Connection", None)
    return int(status.split()[1]), tuple(sorted(headers.items())), body


async def ask(client: RawConnection, data: bytes, cut: int, count: int) -> list[Answer | None]:
    """Send data in two parts and return `count` answers, or fewer if the connection ends."""
    client.send(data[:cut])
    await asyncio.sleep(0)
    client.send(data[cut:])
    answers: list[Answer | None] = []
    while len(answers) < count and (not answers or answers[-1] is not None):
        answers.append(await read_answer(client))
    return answers


@asynccontextmanager
async def two_connections(served: Serving) -> AsyncIterator[tuple[RawConnection, RawConnection]]:
    """Open two connections: one that starts on the fast path, and one that aiohttp serves."""
    async with raw_connection(served) as fast, raw_connection(served) as slow:
        slow.send(TO_AIOHTTP)
        assert (await slow.read_answer())[0] == 200
        yield fast, slow


async def compare(served: Serving, script: list[list[bytes]], last: bytes, cut: float) -> None:
    """Send the same requests on both connections, group by group, and compare the answers."""
    async with two_connections(served) as (fast, slow):
        for group in [*script, [last]]:
            data = b"".join(group)
            at = int(cut * len(data)) if cut < 1 else len(data)
            fast_answers, slow_answers = [await ask(client, data, at, len(group)) for client in (fast, slow)]
            if slow_answers[-1] is None:
                assert fast_answers[: len(slow_answers) - 1] == slow_answers[:-1], data[:2000]
                return
            assert fast_answers == slow_answers, data[:2000]


@pytest.fixture(params=[False, True], ids=["development", "tokens"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Start a server and return a function that runs a comparison on it."""
    with asyncio.Runner() as runner:
        server = serving(tmp_path, tokens=request.param, auth_failures_per_minute_max=0, requests_per_second_max=0)
        served = runner.run(server.__aenter__())
        yield lambda *arguments: runner.run(compare(served, *arguments))
        runner.run(server.__aexit__(None, None, None))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts, last=st.sampled_from((LAST, *MALFORMED)), cut=st.sampled_from((1, 1, 0.0, 0.3, 0.9)))
def test_fast_path_and_aiohttp_give_equal_answers(
    run: Callable[..., None], script: list[list[bytes]], last: bytes, cut: float
) -> None:
    run(script, last, cut)


def date_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(helpers, "rfc822_formatted_time")


def keepalive_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tcp_helpers, "tcp_keepalive")


def parser_has_different_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_parser, "HttpRequestParser", lambda protocol: protocol)


def replace_results(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Make the parser return changed results."""
    new_parser = http_parser.HttpRequestParser

    class Parser:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.parser = new_parser(*arguments, **options)

        def feed_data(self, data: bytes) -> Any:
            return change(self.parser.feed_data(data))

    monkeypatch.setattr(http_parser, "HttpRequestParser", Parser)


def parser_returns_different_values(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_results(monkeypatch, lambda result: result[0])


def parser_renames_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_results(monkeypatch, lambda result: ([(object(), body) for _, body in result[0]], *result[1:]))


def parser_ignores_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = HttpFastPath._parse_head

    def parse_without_chunks(self: HttpFastPath, data: bytes) -> Any:
        return parse(self, data.replace(b"Transfer-Encoding: chunked", b"Content-Length: 2"))

    monkeypatch.setattr(HttpFastPath, "_parse_head", parse_without_chunks)


@pytest.mark.parametrize(
    "change",
    [
        date_is_missing,
        keepalive_is_missing,
        parser_has_different_arguments,
        parser_returns_different_values,
        parser_renames_fields,
        parser_ignores_chunks,
    ],
)
async def test_aiohttp_serves_all_requests_if_its_internals_differ(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with monkeypatch.context() as patched:
        change(patched)
        async with serving(tmp_path) as served, raw_connection(served) as client:
            client.send(post(write(1)), post(write(2)))
            assert [await client.read_committed_sequence(), await client.read_committed_sequence()] == [1, 2]
            assert not served.server._http.fast_path.connections
    assert caplog.text.count("the HTTP fast path") == 1


async def test_fast_path_serves_requests_if_aiohttp_internals_are_as_expected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as served, raw_connection(served) as client:
        client.send(post(write(1)))
        assert await client.read_committed_sequence() == 1
        await until(lambda: len(served.server._http.fast_path.connections) == 1)
    assert "the HTTP fast path" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"_reading_paused": False, "_buffer_paused": False}, False),
        ({"_reading_paused": True, "_buffer_paused": False}, True),
        ({"_reading_paused": False, "_buffer_paused": True}, True),
        ({"_reading_paused": False}, False),
        ({}, False),
    ],
)
def test_aiohttp_version_without_pause_flags_counts_as_reading(flags: dict[str, bool], *, expected: bool) -> None:
    is_reading_paused: Any = HttpProtocol.is_reading_paused
    assert is_reading_paused.fget(SimpleNamespace(**flags)) is expected
