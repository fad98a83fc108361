"""WebSockets as raw bytes, for attacks that no client library sends."""

import json
from typing import Final

from deadlines import soon
from server.raw_http import RawConnection
from server.running_server import Serving

UPGRADE: Final = (
    "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{headers}\r\n"
)


def frame(payload: bytes, declared: int | None = None) -> bytes:
    """Return a text frame with an all-zero mask; `declared` is the length in its header."""
    length = len(payload) if declared is None else declared
    return b"\x81\xff" + length.to_bytes(8, "big") + bytes(4) + payload


def connect_frame(credential: str) -> bytes:
    payload = {"client_id": "user:ada", "token": credential}
    return frame(json.dumps({"type": "connect", "protocol_version": "1.0", "payload": payload}).encode())


async def upgrade(connection: RawConnection, path: str = "/v1/events", headers: str = "") -> None:
    """Upgrade a raw connection to an unauthenticated WebSocket."""
    connection.send(UPGRADE.format(path=path, headers=headers).encode())
    head = await soon(connection.reader.readuntil(b"\r\n\r\n"))
    assert b" 101 " in head, head


async def wait_closed(connection: RawConnection) -> bool:
    """Wait until the server has closed the connection."""
    try:
        while await soon(connection.reader.read(65536)):
            pass
    except ConnectionError:
        pass
    return True


def count_refusals(served: Serving) -> dict[str, int]:
    """Return the number of refused connections by reason."""
    return {reason: count for reason, count in served.server.counts.connections_refused.items() if count}
