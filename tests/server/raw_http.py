"""HTTP requests as raw bytes, and connections that send them."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

from deadlines import soon
from server.running_server import Serving

WRITE_PATH: Final = "/v1/ledger/write"


def write(number: int, client: str = "c1", **more: Any) -> bytes:
    """Return the body of a ledger write, with a client sequence of `number`."""
    operations = [{"set_entity": {"key": f"entity/{number}", "value": "dmFsdWU="}}]
    key = str(UUID(int=number, version=4))
    named = {"organization": "acme", "client_id": client, "sequence": number, "idempotency_key": key}
    return json.dumps({**named, "operations": operations, **more}).encode()


def post(body: bytes, *headers: str, path: str = WRITE_PATH, host: str = "127.0.0.1") -> bytes:
    """Return the bytes of a POST request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class RawConnection:
    """A TCP connection on which a test sends raw bytes and reads HTTP responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))

    async def read_answer(self) -> tuple[int, dict[str, str], Any]:
        """Read the next response and return its status, headers and body."""
        head = (await soon(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        body = await soon(self.reader.readexactly(int(headers["Content-Length"])))
        is_json = headers["Content-Type"].endswith("json")
        return int(head[0].split()[1]), headers, json.loads(body) if is_json else body

    async def read_committed_sequence(self) -> int:
        """Read the next response, assert that it is a committed write, and return the assigned sequence."""
        status, _, answer = await self.read_answer()
        assert status == 200, answer
        return int(answer["assigned_sequence"])


@asynccontextmanager
async def raw_connection(served: Serving, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawConnection]:
    """Connect to the server."""
    reader, writer = await soon(asyncio.open_connection("127.0.0.1", served.port, ssl=tls))
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.close()
