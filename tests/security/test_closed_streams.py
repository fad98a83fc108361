"""A stream no longer counts against `connections_max` once its client has closed the connection (CO-27, CO-30)."""

import asyncio
import ssl
from pathlib import Path
from typing import Any, Final

import pytest

from deadlines import soon, until
from server.auth.auth_material import token
from server.running_server import Serving, serving
from server.test_server_app import make_certificate

HEARTBEAT_MS: Final = 3_600_000
"""Longer than any test, so that no failing heartbeat can reveal a closed connection to the server."""
STREAMS: Final = ["/v1/events/stream?partition=a", "/v1/ledger/blocks/stream?organization=acme", "/v1/sync/g/live"]


async def open_stream(served: Serving, path: str, credential: str, tls: ssl.SSLContext | None) -> asyncio.StreamWriter:
    """Open a stream and read the response head."""
    reader, writer = await soon(asyncio.open_connection("127.0.0.1", served.port, ssl=tls))
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {credential}\r\n\r\n"
    writer.write(head.encode())
    assert b" 200 " in (await soon(reader.readuntil(b"\r\n\r\n")))
    return writer


@pytest.mark.rule("CO-27", "CO-30")
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("is_aborted", [False, True], ids=["closed", "aborted"])
async def test_closed_stream_frees_its_connection_slot_without_a_heartbeat(
    tmp_path: Path, path: str, is_tls: bool, is_aborted: bool
) -> None:
    settings: dict[str, Any] = {}
    trusted = None
    if is_tls:
        settings["tls"] = make_certificate(tmp_path, "server")
        trusted = ssl.create_default_context(cafile=settings["tls"].certificate)
        trusted.check_hostname = False
    async with serving(tmp_path, tokens=True, connections_max=2, heartbeat_ms=HEARTBEAT_MS, **settings) as served:
        server = served.server
        credential = token(grants={"read": ["*"]})
        for _ in range(4):  # exceeds `connections_max`
            writer = await open_stream(served, path, credential, trusted)
            await until(lambda: server.apis.count_connections()["sse"] == server._reader_count == 1)
            if is_aborted:
                writer.transport.abort()
            else:
                writer.close()
            await until(lambda: server.apis.count_connections()["sse"] == server._reader_count == 0)
            await until(server._limiter.are_all_closed)


@pytest.mark.rule("CO-27", "CO-30")
async def test_stream_closed_through_a_proxy_frees_the_slot_of_its_client(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trusted_proxies": ("127.0.0.1",), "connections_per_principal_max": 1}
    async with serving(tmp_path, tokens=True, heartbeat_ms=HEARTBEAT_MS, **settings) as served:
        credential = token(grants={"read": ["*"]})
        for _ in range(3):
            writer = await open_stream(served, STREAMS[0], credential, None)
            writer.close()
            await until(lambda: not served.server._reader_count)
