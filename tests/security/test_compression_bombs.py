"""Compressed input: the server never inflates beyond its limits. test_events_endpoints.py tests compressed bodies."""

import zlib
from pathlib import Path

import aiohttp
import pytest
from aiohttp import WSMsgType

from deadlines import soon
from server.running_server import serving


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("path", ["/v1/events", "/v1/chat"])
async def test_websocket_does_not_negotiate_compression(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as served:
        socket = await soon(served.session.ws_connect(served.url + path, compress=15))
        assert socket.compress == 0
        assert "Sec-WebSocket-Extensions" not in socket._response.headers
        await socket.close()


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("path", ["/v1/events", "/v1/chat"])
async def test_compressed_frame_closes_the_connection(tmp_path: Path, path: str) -> None:
    packing = zlib.compressobj(9, wbits=-15)
    bomb = (packing.compress(bytes(100_000_000)) + packing.flush(zlib.Z_SYNC_FLUSH))[:-4]
    async with serving(tmp_path) as served:
        socket: aiohttp.ClientWebSocketResponse = await soon(served.session.ws_connect(served.url + path))
        writer = socket._writer
        assert writer is not None
        # A text frame with RSV1 set and an all-zero mask.
        head = bytes((0xC1, 0x80 | 127)) + len(bomb).to_bytes(8, "big") + bytes(4)
        transport = socket._conn.transport  # type: ignore[union-attr]
        assert transport is not None
        transport.write(head + bomb)
        message = await soon(socket.receive())
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
        assert (await served.get("/healthz")).status == 200
