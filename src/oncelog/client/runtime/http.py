"""Requests to a server over HTTP, and one aiohttp session for them and for WebSockets."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from oncelog.client.runtime.limits import ConnectionLimits
from oncelog.client.runtime.tokens import Token, resolve_token
from oncelog.client.runtime.websocket import WebSocket, open_websocket, translate_errors
from oncelog.errors import ProtocolError

if TYPE_CHECKING:
    import aiohttp

_CHUNK_BYTES: Final = 64 * 1024
_RETRY_AFTER_S_MAX: Final = 10**6


class HttpResponse:
    """All of one."""

    def __init__(self, status: int, body: bytes, retry_after_ms: int) -> None:
        self.status = status
        self.body = body
        self.retry_after_ms = retry_after_ms
        """Of the header; 0 where it has none."""


class HttpClient:
    """One session to one server. Never follows a redirect: the token is for nobody else."""

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
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> HttpResponse:
        """Raises LostError, or ProtocolError for an answer that is too large."""
        headers = {**self._headers, **await self._get_authorization()}
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
                    ssl=True if self._tls is None else self._tls,
                ) as response,
            ):
                answer = await self._read_body(response)
        return HttpResponse(response.status, answer, _parse_retry_after_ms(response.headers.get("Retry-After", "")))

    async def open_websocket(self, path: str) -> WebSocket:
        """A WebSocket. Raises LostError, or ServerRefusedError. Nothing has been said yet on it, nor who we are."""
        return await open_websocket(self._get_session(), self.url, path, self._limits, self._headers, self._tls)

    async def get_token(self) -> str | None:
        """The one for now. Raises LostError."""
        return await resolve_token(self._token)

    async def close(self) -> None:
        """When no more is needed."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _get_session(self) -> "aiohttp.ClientSession":
        import aiohttp  # noqa: PLC0415 - what the store alone does not need

        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def _read_body(self, response: "aiohttp.ClientResponse") -> bytes:
        parts: list[bytes] = []
        bytes_left = self._limits.message_bytes_max
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            bytes_left -= len(part)
            if bytes_left < 0:
                size = self._limits.message_bytes_max
                raise ProtocolError(f"an answer of the server is larger than message_bytes_max ({size})")
            parts.append(part)
        return b"".join(parts)

    async def _get_authorization(self) -> dict[str, str]:
        token = await self.get_token()
        return {"Authorization": f"Bearer {token}"} if token else {}


def _parse_retry_after_ms(text: str) -> int:
    """Of the header, where it is a number of seconds."""
    return 1000 * min(int(text), _RETRY_AFTER_S_MAX) if text.isascii() and text.isdecimal() else 0
