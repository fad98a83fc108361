"""HTTP requests to a gateway, and its live deltas over a WebSocket.

All functions raise LostError, ProtocolError or GatewayRefusedError.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Raw

from oncelog.client.deltas.codec import (
    DeltaPage,
    GatewayRefusedError,
    OutboxEntry,
    PushReply,
    RowPage,
    decode_connected,
    decode_delta_page,
    decode_deltas,
    decode_error,
    decode_live,
    decode_push_reply,
    decode_snapshot_page,
)
from oncelog.client.deltas.values import DeltasLimits
from oncelog.client.runtime.http import HttpClient, WebSocket, translate_errors
from oncelog.client.runtime.options import Token
from oncelog.core.deltas import encode_push
from oncelog.core.merge import RowDelta
from oncelog.errors import ServerRefusedError

T = TypeVar("T")


class LiveStream:
    """WebSocket on which the gateway streams deltas committed after a cursor."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.epoch = ""

    async def connect(self, since: int, epoch: str, token: str | None) -> None:
        """Send the cursor and wait for the gateway's epoch."""
        first = {"type": "connect", "since": since, "epoch": epoch, "token": token}
        await self._socket.send(
            msgspec.json.encode({name: value for name, value in first.items() if value not in ("", None)})
        )
        self.epoch = decode_connected(await self._socket.receive())

    async def receive(self) -> DeltaPage[RowDelta]:
        """Return the next message. The connection cannot be used after an error."""
        return decode_deltas(await self.receive_encoded())

    async def receive_encoded(self) -> DeltaPage[Raw]:
        """Return the next message without decoding its deltas."""
        return decode_live(await self._socket.receive(), self.epoch)

    async def close(self) -> None:
        """Close the connection. Never raises."""
        await self._socket.close()


class DeltasTransport(HttpClient):
    """HTTP client for one gateway. Tests subclass it."""

    def __init__(
        self,
        url: str,
        gateway: str,
        *,
        token: Token,
        limits: DeltasLimits,
        headers: Mapping[str, str] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(url, token=token, limits=limits, headers=headers, tls=tls)
        self._base = f"/v1/sync/{quote(gateway, safe='')}"

    async def push(self, entries: Sequence[OutboxEntry]) -> PushReply:
        """Push the deltas in the given order."""
        body = encode_push([entry.body for entry in entries])
        return await self.call("push", {}, lambda answer: decode_push_reply(answer, entries), body)

    async def pull(self, since: int, epoch: str, limit: int) -> DeltaPage[RowDelta]:
        """Read a page of deltas after a cursor."""
        query = {"since": str(since), "limit": str(limit), **({"epoch": epoch} if epoch else {})}
        return await self.call("pull", query, decode_delta_page)

    async def snapshot(self, page: str, limit: int) -> RowPage:
        """Read a page of all rows."""
        query = {"limit": str(limit), **({"page": page} if page else {})}
        return await self.call("snapshot", query, decode_snapshot_page)

    async def follow(self, since: int, epoch: str) -> LiveStream:
        """Open a live connection that delivers the deltas after a cursor."""
        token = await self.get_token()
        try:
            socket = await self.open_websocket(f"{self._base}/live")
        except ServerRefusedError as error:
            raise GatewayRefusedError(error.code, str(error), error.retry_after_ms) from error
        live = LiveStream(socket)
        try:
            with translate_errors(socket.url):
                async with asyncio.timeout(self._limits.connect_timeout_ms / 1000):
                    await live.connect(since, epoch, token)
        except BaseException:
            await live.close()
            raise
        return live

    async def call(
        self, name: str, query: Mapping[str, str], decode: Callable[[bytes], T], body: bytes | None = None
    ) -> T:
        """Send a POST request if there is a body, otherwise a GET request, and return the decoded response."""
        answer = await self.request("GET" if body is None else "POST", f"{self._base}/{name}", query, body)
        if answer.status != 200:
            raise decode_error(answer.status, answer.body, answer.retry_after_ms)
        return decode(answer.body)
