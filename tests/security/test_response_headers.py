"""Response headers, answers to malformed HTTP, and caching of the OpenAPI document."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deadlines import soon
from oncelog.server import app as server_module
from oncelog.server.http_server import HEADER_BYTES_MAX, LINE_BYTES_MAX
from oncelog.server.openapi import build_document
from server.raw_http import post, raw_connection, write
from server.running_server import Serving, item, serving


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server in development mode."""
    async with serving(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 200, id="handler"),
        pytest.param(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400, id="api-error"),
        pytest.param(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404, id="no-route"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA b: c\r\n\r\n", 400, id="malformed-http"),
        pytest.param(post(write(1)), 200, id="fast-path"),
        pytest.param(post(b"{"), 400, id="fast-path-error"),
    ],
)
async def test_no_response_reveals_a_version_or_allows_sniffing(
    served: Serving, request_bytes: bytes, status: int
) -> None:
    async with raw_connection(served) as connection:
        connection.send(request_bytes)
        found, headers, _ = await connection.read_answer()
    assert found == status
    assert headers["Server"] == "oncelog"
    assert headers["X-Content-Type-Options"] == "nosniff"


async def test_streams_and_websockets_reveal_no_version(served: Serving) -> None:
    await served.commit(item(1))
    stream = await served.stream("a")
    socket = await served.socket()
    for headers in (stream.response.headers, socket.socket._response.headers):
        assert headers["Server"] == "oncelog"
        assert headers["X-Content-Type-Options"] == "nosniff"


async def test_openapi_document_is_built_once_and_revalidated(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def count_build(*arguments: object) -> object:
        built.append(arguments)
        return build_document(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(server_module, "build_document", count_build)
    first, second = await served.get("/openapi.json"), await served.get("/openapi.json")
    assert first.body == second.body
    assert json.loads(first.body) == build_document(served.server.list_endpoints(), served.server.settings.api_limits)
    assert len(built) == 1
    etag = first.headers["ETag"]
    unchanged = await served.get("/openapi.json", headers={"If-None-Match": etag})
    assert (unchanged.status, unchanged.body, unchanged.headers["ETag"]) == (304, b"", etag)
    assert (await served.get("/openapi.json", headers={"If-None-Match": '"other"'})).status == 200


@pytest.mark.rule("CO-21", "CO-33")
@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer\r\n olk_SECRET\r\n\r\n", id="folded-header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization olk_SECRET: b\r\n\r\n", id="header-name"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: olk_SECRET\x01\r\n\r\n", id="header-value"),
        pytest.param(b"GET /?token=olk_SECRET HTTP/9\r\nHost: a\r\n\r\n", id="request-line"),
        pytest.param(b"olk_SECRET\r\n\r\n", id="not-http"),
    ],
)
@pytest.mark.parametrize("is_metrics_port", [False, True], ids=["port", "metrics-port"])
async def test_answer_to_malformed_http_does_not_quote_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, request_bytes: bytes, is_metrics_port: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(tmp_path, metrics_port=0) as running:
        port = running.server.metrics_listener.port if is_metrics_port else running.port
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", port))
        writer.write(request_bytes)
        head, _, body = (await soon(reader.read())).partition(b"\r\n\r\n")
        writer.close()
    assert head.split()[1] == b"400"
    assert b"SECRET" not in head
    text = "the request is not valid HTTP"
    assert json.loads(body) == {
        "type": "urn:oncelog:problem:bad_request",
        "title": "Malformed request",
        "status": 400,
        "detail": text,
        "code": "bad_request",
        "error": {"code": "bad_request", "message": text, "details": {}},
    }
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /" + b"a" * LINE_BYTES_MAX + b" HTTP/1.1\r\nHost: a", id="request-line"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nCookie: " + b"a" * (HEADER_BYTES_MAX + 1), id="header"),
    ],
)
async def test_answer_to_an_overlong_line_names_the_kind_of_line(served: Serving, head: bytes) -> None:
    async with raw_connection(served) as connection:
        connection.send(head + b"\r\n\r\n")
        status, _, body = await connection.read_answer()
    assert status == 400
    assert body["detail"] == "the request line or a request header is too long"
