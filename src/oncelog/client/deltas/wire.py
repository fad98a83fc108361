"""Requests to a gateway, and what comes back as values. Never raises for what a network or a gateway does."""

import asyncio
import inspect
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from urllib.parse import quote

from oncelog.client.cancelling import is_being_cancelled
from oncelog.client.checking import is_token
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
from oncelog.client.wire import as_lost
from oncelog.core.deltas import deltas_body
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

if TYPE_CHECKING:
    import aiohttp

logger: Final = logging.getLogger("oncelog.client.deltas")

Token = str | Callable[[], Awaitable[str | None] | str | None] | None
"""A token, or a function that gives one for each request: the last one may have expired."""
T = TypeVar("T")
_CHUNK_BYTES: Final = 64 * 1024
_RETRY_AFTER_S_MAX: Final = 10**6


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
        self._url = url
        self._base = f"{url}/v1/sync/{quote(gateway, safe='')}"
        self._token = token
        self._limits = limits
        self._headers = dict(headers or {})
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

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
        import aiohttp  # noqa: PLC0415 - what the store alone does not need

        limits = self._limits
        try:
            token = await self._current_token()
            with as_lost(self._url):
                async with asyncio.timeout(limits.connect_timeout_ms / 1000):
                    socket = await self._opened().ws_connect(
                        f"{self._base}/live",
                        heartbeat=limits.heartbeat_ms / 1000,
                        max_msg_size=limits.message_bytes_max,
                        timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                        headers=self._headers,
                        ssl=True if self._tls is None else self._tls,
                    )
        except ServerRefusedError as error:
            return Fault(error.code.upper(), str(error), None, error.retry_after_ms)
        except LostError as error:
            return Unanswered(str(error))
        return await WebSocketLive(self._url, socket).connect(since, epoch, token, limits)

    async def close(self) -> None:
        """As `Wire` says."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> "aiohttp.ClientSession":
        import aiohttp  # noqa: PLC0415 - as above

        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def _asked(
        self, name: str, query: Mapping[str, str], read: Callable[[bytes], T], body: bytes | None = None
    ) -> T | Fault | Unanswered:
        limits = self._limits
        try:
            headers = {**self._headers, **await self._credential()}
            if body is not None:
                headers["Content-Type"] = "application/json"
            with as_lost(self._url):
                async with (
                    asyncio.timeout(limits.answer_timeout_ms / 1000),
                    self._opened().request(
                        "GET" if body is None else "POST",
                        f"{self._base}/{name}",
                        params=query,
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                        ssl=True if self._tls is None else self._tls,
                    ) as response,
                ):
                    answer = await self._body(response)
            if response.status == 200:
                return read(answer)
            return read_fault(response.status, answer, _retry_after_ms(response.headers.get("Retry-After", "")))
        except (LostError, ProtocolError) as error:
            return Unanswered(str(error))

    async def _body(self, response: "aiohttp.ClientResponse") -> bytes:
        parts: list[bytes] = []
        left = self._limits.message_bytes_max
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            left -= len(part)
            if left < 0:
                size = self._limits.message_bytes_max
                raise ProtocolError(f"an answer of the gateway is larger than message_bytes_max ({size})")
            parts.append(part)
        return b"".join(parts)

    async def _credential(self) -> dict[str, str]:
        token = await self._current_token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _current_token(self) -> str | None:
        if not callable(self._token):
            return self._token
        try:
            given = self._token()
            token = await given if inspect.isawaitable(given) else given
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise LostError("there is no token: what it waits for was cancelled") from error
        except Exception as error:
            logger.exception("there is no token")
            raise LostError(f"there is no token: {type(error).__name__}: {error}") from error
        if not is_token(token):
            raise LostError("there is no token: what the function gives is none")
        return token


def _retry_after_ms(text: str) -> int:
    """Of the header, where it is a number of seconds."""
    return 1000 * min(int(text), _RETRY_AFTER_S_MAX) if text.isascii() and text.isdecimal() else 0
