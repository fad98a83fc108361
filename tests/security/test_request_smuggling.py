"""Request smuggling: the server does not execute a request hidden in a body whose length is ambiguous."""

import asyncio
from pathlib import Path

import pytest

from deadlines import soon
from server.raw_http import WRITE_PATH, post, raw_connection, write
from server.running_server import serving

HIDDEN = post(write(7))
PATHS = (WRITE_PATH, "/v1/events")
CHUNKED = b"0\r\n\r\n"


def smuggling(path: str, *headers: bytes, body: bytes) -> bytes:
    """Return a POST request with the given length headers."""
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: 127.0.0.1", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


ATTACKS = {
    "length-and-chunked": ((b"Content-Length: %d", b"Transfer-Encoding: chunked"), CHUNKED + HIDDEN),
    "chunked-and-length": ((b"Transfer-Encoding: chunked", b"Content-Length: %d"), CHUNKED + HIDDEN),
    "two-lengths": ((b"Content-Length: %d", b"Content-Length: 2"), b"{}" + HIDDEN),
    "two-lengths-other-order": ((b"Content-Length: 2", b"Content-Length: %d"), b"{}" + HIDDEN),
    "length-list": ((b"Content-Length: 2, %d",), b"{}" + HIDDEN),
    "signed-length": ((b"Content-Length: +2",), b"{}" + HIDDEN),
    "hexadecimal-length": ((b"Content-Length: 0x2",), b"{}" + HIDDEN),
    "unknown-coding": ((b"Transfer-Encoding: xchunked", b"Content-Length: 2"), b"{}" + HIDDEN),
    "two-codings": ((b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"), CHUNKED + HIDDEN),
    "folded-header": ((b"X-Folded: a\r\n Content-Length: 2",), b"{}" + HIDDEN),
    "folded-coding": ((b"Transfer-Encoding:\r\n chunked", b"Content-Length: 2"), b"{}" + HIDDEN),
    "space-before-colon": ((b"Content-Length : 2",), b"{}" + HIDDEN),
    "bare-line-feed": ((b"X: y\nContent-Length: 2",), b"{}" + HIDDEN),
    "negative-chunk": ((b"Transfer-Encoding: chunked",), b"-1\r\n\r\n" + HIDDEN),
    "chunk-with-bare-line-feed": ((b"Transfer-Encoding: chunked",), b"0\n\n" + HIDDEN),
}


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_smuggled_request_is_not_executed(tmp_path: Path, path: str, attack: str) -> None:
    headers, body = ATTACKS[attack]
    filled = [header % len(body) if b"%d" in header else header for header in headers]
    async with serving(tmp_path) as served:
        async with raw_connection(served) as connection:
            connection.send(smuggling(path, *filled, body=body))
            connection.writer.write_eof()
            try:
                answers = await soon(connection.reader.read())
            except ConnectionError:
                answers = b""
            await asyncio.sleep(0)
        statuses = [line.split()[1] for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert b"200" not in statuses
        assert len(statuses) <= 1
        assert not await served.server.log.heads()  # no lane has a commit
