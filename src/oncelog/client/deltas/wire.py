"""Requests to a gateway, and what comes back as values. Never raises for what a network or a gateway does."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar
from urllib.parse import quote

from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.live import WebSocketLive
from oncelog.client.deltas.messages import (
    Acknowledged,
    Entry,
    Fault,
    LiveCompacted,
    LiveDeltas,
    PulledPage,
    SnapshotPage,
    Unanswered,
    read_fault,
    read_pulled,
    read_pushed,
    read_snapshot,
)
from oncelog.client.http import HttpCaller
from oncelog.client.tokens import Token
from oncelog.core.deltas import deltas_body
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

T = TypeVar("T")


class Live(Protocol):
    """What is committed from a cursor on."""

    epoch: str

    async def receive(self) -> LiveDeltas | LiveCompacted | Fault | Unanswered:
        """The next message. Behind a fault, or what is unanswered, there is none."""

    async def close(self) -> None:
        """Never raises."""


class Wire(Protocol):
    """A gateway, as the client sees it."""

    async def push(self, entries: Sequence[Entry]) -> Acknowledged | Fault | Unanswered:
        """Deltas, in this order."""

    async def pull(self, since: int, epoch: str, limit: int) -> PulledPage | Fault | Unanswered:
        """Deltas after a cursor."""

    async def snapshot(self, page: str, limit: int) -> SnapshotPage | Fault | Unanswered:
        """A page of all rows."""

    async def follow(self, since: int, epoch: str) -> Live | Fault | Unanswered:
        """What is committed from now on."""

    async def close(self) -> None:
        """When no more is needed."""


class HttpWire:
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
        self._caller = HttpCaller(url, token=token, limits=limits, headers=headers, tls=tls)
        self._base = f"/v1/sync/{quote(gateway, safe='')}"
        self._limits = limits

    async def push(self, entries: Sequence[Entry]) -> Acknowledged | Fault | Unanswered:
        """As `Wire` says."""
        body = deltas_body([one.body for one in entries])
        return await self._asked("push", {}, lambda answer: read_pushed(answer, entries), body)

    async def pull(self, since: int, epoch: str, limit: int) -> PulledPage | Fault | Unanswered:
        """As `Wire` says."""
        query = {"since": str(since), "limit": str(limit), **({"epoch": epoch} if epoch else {})}
        return await self._asked("pull", query, read_pulled)

    async def snapshot(self, page: str, limit: int) -> SnapshotPage | Fault | Unanswered:
        """As `Wire` says."""
        return await self._asked("snapshot", {"limit": str(limit), **({"page": page} if page else {})}, read_snapshot)

    async def follow(self, since: int, epoch: str) -> Live | Fault | Unanswered:
        """As `Wire` says."""
        try:
            token = await self._caller.token()
            socket = await self._caller.socket(f"{self._base}/live")
        except ServerRefusedError as error:
            return Fault(error.code.upper(), str(error), None, error.retry_after_ms)
        except LostError as error:
            return Unanswered(str(error))
        return await WebSocketLive(socket).connect(since, epoch, token, self._limits)

    async def close(self) -> None:
        """As `Wire` says."""
        await self._caller.close()

    async def _asked(
        self, name: str, query: Mapping[str, str], read: Callable[[bytes], T], body: bytes | None = None
    ) -> T | Fault | Unanswered:
        try:
            answer = await self._caller.ask("GET" if body is None else "POST", f"{self._base}/{name}", query, body)
            if answer.status == 200:
                return read(answer.body)
            return read_fault(answer.status, answer.body, answer.retry_after_ms)
        except (LostError, ProtocolError) as error:
            return Unanswered(str(error))
