"""Every answer has the security headers: of all paths, APIs, ports and errors, and of both HTTP implementations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from deadlines import soon
from oncelog.server.http_protocol import DEFAULT_HEADERS
from server.auth.auth_material import token
from server.raw_http import WRITE_PATH, post, raw_connection, write
from server.running_server import Serving, serving

FIXED: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Server": "oncelog"}
PAGES: Final = ("/docs", "/chat", "/assets/docs.mjs", "/chat/main.mjs")
TO_AIOHTTP: Final = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def check(headers: Mapping[str, str], where: object, **expected: str) -> None:
    """Check the headers of an answer; `expected` replaces defaults."""
    for name, value in {**FIXED, **DEFAULT_HEADERS, **expected}.items():
        assert headers.get(name) == value, (where, name)


@pytest.mark.rule("CO-24")
async def test_answers_of_all_apis_have_the_headers(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        ada = token(grants={"read": ["*"], "write": ["*"]})
        for method, path, credential, status in (
            ("GET", "/", None, 200),
            ("GET", "/healthz", None, 200),
            ("GET", "/readyz", None, 200),
            ("HEAD", "/readyz", None, 200),
            ("GET", "/v1/events?partition=a", ada, 200),
            ("GET", "/v1/ledger/entities?organization=o", ada, 200),
            ("GET", "/v1/sync/shop/pull", ada, 200),
            ("GET", "/v1/chats", ada, 200),
            ("POST", "/v1/events/stream?partition=a", ada, 201),
            ("GET", "/v1/events?partition=a", None, 401),
            ("GET", "/v1/audit", ada, 403),
            ("GET", "/v1/events?since=x", ada, 400),
            ("GET", "/none", None, 404),
            ("PATCH", "/v1/events", None, 405),
            ("POST", "/v1/events", ada, 415),
            ("GET", "/v1/chat", None, 426),
            ("FETCH", "/v1/events", None, 501),
        ):
            answer = await served.request(method, path, credential=credential)
            assert answer.status == status, (method, path, answer.body)
            check(answer.headers, (method, path))
        document = await served.get("/openapi.json")
        known = await served.get("/openapi.json", headers={"If-None-Match": document.headers["ETag"]})
        assert known.status == 304
        for answer in (document, known):
            check(answer.headers, answer.status, **{"Cache-Control": "no-cache"})


async def test_streams_websockets_and_preflights_have_the_headers(tmp_path: Path) -> None:
    async with serving(tmp_path, origins=("https://app.example.org",)) as served:
        stream = await served.stream("a")
        check(stream.response.headers, "stream")
        response = await soon(served.session.ws_connect(f"{served.url}/v1/events"))
        check(response._response.headers, "WebSocket")
        await soon(response.close())
        preflight = {"Origin": "https://app.example.org", "Access-Control-Request-Method": "POST"}
        check((await served.request("OPTIONS", "/v1/events", headers=preflight)).headers, "preflight")
        home = await served.get("/", headers={"Origin": "https://app.example.org"})
        assert home.headers["Vary"] == "Accept, Origin"


async def test_pages_have_a_policy_that_allows_only_their_own_files(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        home = await served.get("/", headers={"Accept": "text/html"})
        for answer in (home, *[await served.get(path) for path in PAGES]):
            policy = answer.headers["Content-Security-Policy"]
            directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
            assert directives["default-src"] == directives["base-uri"] == directives["frame-ancestors"] == "'none'"
            assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
            assert directives["require-trusted-types-for"] == "'script'"
            headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
            check(answer.headers, policy, **headers, **{"Cross-Origin-Opener-Policy": "same-origin"})


@pytest.mark.parametrize("begins_with", [b"", TO_AIOHTTP], ids=["fast path", "aiohttp"])
async def test_both_http_paths_send_the_headers(tmp_path: Path, begins_with: bytes) -> None:
    async with serving(tmp_path) as served, raw_connection(served) as client:
        if begins_with:
            client.send(begins_with)
            await client.read_answer()
        for body in (write(1), write(1), write(9), b"{"):
            client.send(post(body, path=WRITE_PATH))
            head = (await soon(client.reader.readuntil(b"\r\n\r\n"))).decode()
            headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
            await soon(client.reader.readexactly(int(headers["Content-Length"])))
            check(headers, body)


async def test_metrics_port_and_malformed_requests_have_the_headers(tmp_path: Path) -> None:
    async with serving(tmp_path, metrics_port=0) as served:
        port = served.server.metrics_listener.port
        for path in ("/metrics", "/healthz", "/none"):
            response = await soon(served.session.get(f"http://127.0.0.1:{port}{path}"))
            check(response.headers, path)
            response.close()
        for data in (b"GET / HTTP/9.9\r\n\r\n", b"\0\0\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"):
            check(await malformed(served, data), data)


async def malformed(served: Serving, data: bytes) -> Mapping[str, str]:
    async with raw_connection(served) as client:
        client.send(data)
        head = (await soon(client.reader.readuntil(b"\r\n\r\n"))).decode()
        return dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])


@pytest.mark.parametrize(
    ("request_line", "status", "code"),
    [
        (b"FETCH / HTTP/1.1", 501, "unknown_method"),
        (b"get / HTTP/1.1", 501, "unknown_method"),
        (b"X-1.a~ /v1/ledger/write HTTP/1.1", 501, "unknown_method"),
        (b"PATCH / HTTP/1.1", 405, "method_not_allowed"),
        (b"PROPFIND /v1/events HTTP/1.1", 405, "method_not_allowed"),
        (b"TRACE / HTTP/1.1", 405, "method_not_allowed"),
        (b"F{} / HTTP/1.1", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01 / HTTP/1.1", 400, "bad_request"),
        (b"FETCH / HTTP/2", 400, "bad_request"),
        (b"FETCH", 400, "bad_request"),
    ],
)
async def test_unknown_method_is_distinguished_from_malformed_http(
    tmp_path: Path, request_line: bytes, status: int, code: str
) -> None:
    async with serving(tmp_path) as served, raw_connection(served) as client:
        client.send(request_line + b"\r\nHost: 127.0.0.1\r\n\r\n")
        found, _, answer = await client.read_answer()
        assert (found, answer["code"]) == (status, code)
