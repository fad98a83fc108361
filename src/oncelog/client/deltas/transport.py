"""Requests to a gateway, and what comes back as values. Never raises for what a network or a gateway does."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar
from urllib.parse import quote

from oncelog.client.deltas.codec import (
    DeltaPage,
    LiveCompacted,
    LiveDeltas,
    NoReply,
    OutboxEntry,
    PushReply,
    ServerError,
    SnapshotPage,
    decode_delta_page,
    decode_error,
    decode_push_reply,
    decode_snapshot_page,
)
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.live_stream import WebSocketLiveStream
from oncelog.client.runtime.http import HttpClient
from oncelog.client.runtime.tokens import Token
from oncelog.core.deltas import encode_push
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

T = TypeVar("T")


class LiveStream(Protocol):
    """What is committed from a cursor on."""

    epoch: str

    async def receive(self) -> LiveDeltas | LiveCompacted | ServerError | NoReply:
        """The next message. Behind a fault, or what is unanswered, there is none."""

    async def close(self) -> None:
        """Never raises."""


class DeltasTransport(Protocol):
    """A gateway, as the client sees it."""

    async def push(self, entries: Sequence[OutboxEntry]) -> PushReply | ServerError | NoReply:
        """Deltas, in this order."""

    async def pull(self, since: int, epoch: str, limit: int) -> DeltaPage | ServerError | NoReply:
        """Deltas after a cursor."""

    async def snapshot(self, page: str, limit: int) -> SnapshotPage | ServerError | NoReply:
        """A page of all rows."""

    async def follow(self, since: int, epoch: str) -> LiveStream | ServerError | NoReply:
        """What is committed from now on."""

    async def close(self) -> None:
        """When no more is needed."""


class HttpDeltasTransport:
    """By aiohttp: requests over HTTP, and a WebSocket for what is live."""

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
        self._caller = HttpClient(url, token=token, limits=limits, headers=headers, tls=tls)
        self._base = f"/v1/sync/{quote(gateway, safe='')}"
        self._limits = limits

    async def push(self, entries: Sequence[OutboxEntry]) -> PushReply | ServerError | NoReply:
        """As `DeltasTransport` says."""
        body = encode_push([entry.body for entry in entries])
        return await self._request("push", {}, lambda answer: decode_push_reply(answer, entries), body)

    async def pull(self, since: int, epoch: str, limit: int) -> DeltaPage | ServerError | NoReply:
        """As `DeltasTransport` says."""
        query = {"since": str(since), "limit": str(limit), **({"epoch": epoch} if epoch else {})}
        return await self._request("pull", query, decode_delta_page)

    async def snapshot(self, page: str, limit: int) -> SnapshotPage | ServerError | NoReply:
        """As `DeltasTransport` says."""
        return await self._request(
            "snapshot", {"limit": str(limit), **({"page": page} if page else {})}, decode_snapshot_page
        )

    async def follow(self, since: int, epoch: str) -> LiveStream | ServerError | NoReply:
        """As `DeltasTransport` says."""
        try:
            token = await self._caller.get_token()
            socket = await self._caller.open_websocket(f"{self._base}/live")
        except ServerRefusedError as error:
            return ServerError(error.code.upper(), str(error), None, error.retry_after_ms)
        except LostError as error:
            return NoReply(str(error))
        return await WebSocketLiveStream(socket).connect(since, epoch, token, self._limits)

    async def close(self) -> None:
        """As `DeltasTransport` says."""
        await self._caller.close()

    async def _request(
        self, name: str, query: Mapping[str, str], decode: Callable[[bytes], T], body: bytes | None = None
    ) -> T | ServerError | NoReply:
        try:
            answer = await self._caller.request("GET" if body is None else "POST", f"{self._base}/{name}", query, body)
            if answer.status == 200:
                return decode(answer.body)
            return decode_error(answer.status, answer.body, answer.retry_after_ms)
        except (LostError, ProtocolError) as error:
            return NoReply(str(error))
