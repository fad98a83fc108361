"""HTTP requests and WebSockets to a server over one aiohttp session."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from oncelog.client.runtime.options import Token, resolve_token
from oncelog.client.runtime.values import ConnectionLimits
from oncelog.client.runtime.websocket import EVENTS_PATH, WebSocket, translate_errors
from oncelog.errors import ProtocolError

if TYPE_CHECKING:
    import aiohttp

_CHUNK_BYTES: Final = 64 * 1024
_RETRY_AFTER_S_MAX: Final = 10**6


class HttpResponse(Struct, frozen=True):
    """Status and body of a response."""

    status: int
    body: bytes
    retry_after_ms: int
    """Value of the header `Retry-After`; 0 without it."""


class HttpClient:
    """One session to one server. It follows no redirects, because only this server may get the token."""

    def __init__(
        self,
        url: str,
        *,
        token: Token,
        limits: ConnectionLimits,
        headers: Mapping[str, str] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.url = url
        self._token = token
        self._limits = limits
        self._headers = dict(headers or {})
        self._tls = True if tls is None else tls
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> HttpResponse:
        """Send a request and return the response. Raises LostError, or ProtocolError if the response is too large."""
        token = await self.get_token()
        headers = {**self._headers, "Authorization": f"Bearer {token}"} if token else dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        with translate_errors(self.url):
            async with (
                asyncio.timeout(self._limits.answer_timeout_ms / 1000),
                self._get_session().request(
                    method,
                    self.url + path,
                    params=query,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    ssl=self._tls,
                ) as response,
            ):
                answer = await self._read_body(response)
        return HttpResponse(response.status, answer, _parse_retry_after_ms(response.headers.get("Retry-After", "")))

    async def open_websocket(self, path: str) -> WebSocket:
        """Open a WebSocket. Raises LostError or ServerRefusedError."""
        import aiohttp  # noqa: PLC0415 - the library without clients does not need it

        limits = self._limits
        with translate_errors(self.url):
            async with asyncio.timeout(limits.connect_timeout_ms / 1000):
                socket = await self._get_session().ws_connect(
                    self.url + path,
                    heartbeat=limits.heartbeat_ms / 1000,
                    max_msg_size=limits.message_bytes_max + 1,  # aiohttp refuses a message of exactly this size
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                    headers=self._headers,
                    ssl=self._tls,
                )
        return WebSocket(self.url, socket, limits.message_bytes_max)

    async def get_token(self) -> str | None:
        """Return the current token. Raises LostError."""
        return await resolve_token(self._token)

    async def close(self) -> None:
        """Close the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _get_session(self) -> "aiohttp.ClientSession":
        import aiohttp  # noqa: PLC0415 - as above

        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def _read_body(self, response: "aiohttp.ClientResponse") -> bytes:
        body = bytearray()
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            body += part
            if len(body) > self._limits.message_bytes_max:
                size = self._limits.message_bytes_max
                raise ProtocolError(f"the answer of the server is larger than message_bytes_max ({size})")
        return bytes(body)


class WebSocketTransport:
    """Connections to the Events API of a server over aiohttp."""

    def __init__(
        self,
        url: str,
        limits: ConnectionLimits,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = HttpClient(url, token=None, limits=limits, headers=headers, tls=tls)

    async def connect(self) -> WebSocket:
        """As `Transport.connect`."""
        return await self._http.open_websocket(EVENTS_PATH)

    async def close(self) -> None:
        """As `Transport.close`."""
        await self._http.close()


def _parse_retry_after_ms(text: str) -> int:
    """Return the time in the header `Retry-After`; 0 if it is not a number of seconds."""
    return 1000 * min(int(text), _RETRY_AFTER_S_MAX) if text.isascii() and text.isdecimal() else 0
