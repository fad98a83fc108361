"""HTTP requests and WebSockets to a server over one aiohttp session.

All failures are translated into LostError, ServerRefusedError or ProtocolError.
"""

import asyncio
import errno
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from oncelog import error_codes
from oncelog.client.runtime.options import Token, resolve_token
from oncelog.client.runtime.values import ConnectionLimits
from oncelog.errors import LostError, ProtocolError, ServerRefusedError, SettingsError
from oncelog.extras import explain_missing_package

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_SCHEMES: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_STATUS_CODES: Final = {
    401: error_codes.AUTH_FAILED,
    403: error_codes.FORBIDDEN,
    429: error_codes.RATE_LIMITED,
    502: error_codes.SERVER_BUSY,
    503: error_codes.SERVER_BUSY,
    504: error_codes.SERVER_BUSY,
}
EVENTS_PATH: Final = "/v1/events"
CLOSE_TOO_LARGE: Final = 1009
"""Close code of a WebSocket whose peer received a message that is too large (RFC 6455)."""
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed documents."""
_CHUNK_BYTES: Final = 64 * 1024
_WHOLE_BODY_BYTES_MAX: Final = 1024 * 1024
"""aiohttp sends a body of bytes in one step. It warns above this size, because the step blocks the event loop."""
_RETRY_AFTER_S_MAX: Final = 10**6
_NO_TLS: Final = "WRONG_VERSION_NUMBER"
"""Part of OpenSSL's error for an answer that is not TLS."""


class Socket(Protocol):
    """A connection for text messages."""

    close_code: int | None

    async def send(self, data: bytes) -> None:
        """Send a message. Raises LostError."""

    async def receive(self) -> str | bytes:
        """Return the next message. Raises LostError when the connection is closed or lost.

        Raises ProtocolError if the message is too large.
        """

    async def close(self) -> None:
        """Close the connection. Raises no error."""


class Transport(Protocol):
    """Opens connections to one server."""

    async def connect(self) -> Socket:
        """Open a connection. Raises LostError or ServerRefusedError."""

    async def close(self) -> None:
        """Close all connections."""


def normalize_url(url: str, name: str = "url") -> str:
    """Return a server URL with an HTTP scheme and no trailing slash. Raises SettingsError for a malformed URL."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        (parts.hostname or "").encode("idna")  # raises for an empty or overlong label
        is_url = parts.scheme in _SCHEMES and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # also a UnicodeError
        is_url = False
    if not is_url or parts.query or parts.fragment or "@" in parts.netloc:
        shown = "a URL with a user or a password; pass a token separately" if "@" in str(url) else repr(url)
        raise SettingsError(f"{name} must be http://HOST:PORT or https://HOST:PORT, not {shown}")
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/').removesuffix(EVENTS_PATH)}"


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Translate aiohttp errors into LostError and ServerRefusedError."""
    import aiohttp  # noqa: PLC0415 - the library without clients does not need it

    try:
        yield
    except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
        raise LostError(f"{url} cannot be used: {_describe_unusable(error)}") from error
    except aiohttp.WSServerHandshakeError as error:
        raise status_error(error.status, url) from error
    except aiohttp.ClientResponseError as error:  # its text is the data that the server sent
        raise LostError(f"{url} did not answer with HTTP; is it the gRPC port?") from error
    except aiohttp.ClientConnectorDNSError as error:
        problem = error.os_error.strerror or "the host is unknown"
        raise LostError(f"{url} cannot be reached: {problem} (check the host name)") from error
    except aiohttp.ClientConnectorError as error:
        hint = " (is the server running at this URL?)" if error.errno == errno.ECONNREFUSED else ""
        raise LostError(f"{url} cannot be reached: {_describe_error(error)}{hint}") from error
    except TimeoutError as error:
        raise LostError(f"{url} did not respond in time") from error
    except aiohttp.ServerDisconnectedError as error:
        raise LostError(f"the connection to {url} was lost: the server closed it before it answered") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise LostError(f"the connection to {url} was lost: {_describe_error(error)}") from error


def _describe_unusable(error: Exception) -> str:
    """Return why TLS failed or the URL is invalid, without the connection's description that aiohttp adds."""
    reason = str(getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error)
    return "the server does not use TLS at this port: use http://" if _NO_TLS in reason else reason


def _describe_error(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return str(error) or type(error).__name__


def get_status_code(status: int) -> str:
    """Return the error code for an HTTP status."""
    return _STATUS_CODES.get(status, error_codes.SERVER_ERROR if status >= 500 else error_codes.BAD_REQUEST)


def status_error(status: int, url: str) -> ServerRefusedError:
    """Build the error for a response without an error document, for example one from a proxy."""
    # Web servers without dynamic pages answer a POST with 501. Such a server would refuse each retry, too.
    code = error_codes.BAD_REQUEST if status == 501 else get_status_code(status)
    is_foreign = code == error_codes.BAD_REQUEST
    text = f"HTTP status {status}"
    return ServerRefusedError(code, f"no Oncelog server at {url} ({text}): check the URL" if is_foreign else text)


class WebSocket:
    """A `Socket` over aiohttp."""

    def __init__(self, url: str, socket: "aiohttp.ClientWebSocketResponse", message_bytes_max: int) -> None:
        import aiohttp  # noqa: PLC0415 - as above

        self.url = url
        self._socket = socket
        self._message_bytes_max = message_bytes_max
        self._text, self._close = aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.CLOSE
        self.close_code: int | None = None

    async def send(self, data: bytes) -> None:
        """Send a message. Raises LostError."""
        with translate_errors(self.url):
            await self._socket.send_frame(data, self._text)

    async def receive(self) -> str:
        """Like `Socket.receive`."""
        with translate_errors(self.url):
            message = await self._socket.receive()
        if message.type is self._text:
            data: str = message.data
            return data
        code = self._socket.close_code
        if message.type is self._close:
            self.close_code = code  # sent by the server; aiohttp sets other codes for frames that it rejects
        elif code == CLOSE_TOO_LARGE:
            raise ProtocolError(
                f"a message from the server is larger than message_bytes_max ({self._message_bytes_max})"
            )
        raise LostError(f"the connection to {self.url} was lost" + (f" (closed with {code})" if code else ""))

    async def close(self) -> None:
        """Close the connection. Raises no error."""
        with suppress(LostError, ServerRefusedError), translate_errors(self.url):
            await self._socket.close()


class HttpResponse(Struct, frozen=True):
    """Status and body of a response."""

    status: int
    body: bytes
    retry_after_ms: int
    """Value of the `Retry-After` header, or 0 if the response has none."""


class _ErrorBody(Struct):
    code: str
    message: str = ""
    retry_after_ms: int = 0
    details: dict[str, Any] = {}


class _ErrorResponse(Struct):
    error: _ErrorBody


class HttpClient:
    """An HTTP session with one server. It does not follow redirects, which could leak the token to another server."""

    def __init__(
        self,
        url: str,
        *,
        token: Token,
        limits: ConnectionLimits,
        headers: Mapping[str, str] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Raises SettingsError if aiohttp is not installed."""
        with explain_missing_package("oncelog.client", "client"):
            import aiohttp  # noqa: PLC0415 - checks that it is installed

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
                    data=body if body is None or len(body) <= _WHOLE_BODY_BYTES_MAX else BytesIO(body),
                    headers=headers,
                    allow_redirects=False,
                    ssl=self._tls,
                ) as response,
            ):
                answer = await self._read_body(response)
        return HttpResponse(response.status, answer, _parse_retry_after_ms(response.headers.get("Retry-After", "")))

    async def send(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        """Send a request and return the body of the answer. Raises ServerRefusedError and the errors of `request`."""
        response = await self.request(method, path, query, body)
        if not 200 <= response.status < 300:
            raise _decode_refusal(response, self.url)
        return response.body

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
            tracing = aiohttp.TraceConfig()
            tracing.on_request_redirect.append(self._refuse_redirect)
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[tracing])
        return self._session

    async def _refuse_redirect(
        self, _session: "aiohttp.ClientSession", _context: object, params: "aiohttp.TraceRequestRedirectParams"
    ) -> None:
        """Raise ServerRefusedError before aiohttp follows a redirect: `ws_connect` has no parameter that forbids it."""
        params.response.close()
        raise status_error(params.response.status, self.url)

    async def _read_body(self, response: "aiohttp.ClientResponse") -> bytes:
        body = bytearray()
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            body += part
            if len(body) > self._limits.message_bytes_max:
                size = self._limits.message_bytes_max
                raise ProtocolError(f"the server's answer is larger than message_bytes_max ({size})")
        return bytes(body)


class WebSocketTransport:
    """A `Transport` that connects to the Events API of a server over aiohttp."""

    def __init__(
        self,
        url: str,
        limits: ConnectionLimits,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = HttpClient(url, token=None, limits=limits, headers=headers, tls=tls)

    async def connect(self) -> WebSocket:
        """Like `Transport.connect`."""
        return await self._http.open_websocket(EVENTS_PATH)

    async def close(self) -> None:
        """Like `Transport.close`."""
        await self._http.close()


def decode_answer(body: bytes, kind: type[T], sender: str = "server") -> T:
    """Decode a JSON document from the server. Raises ProtocolError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"malformed answer from the {sender}: {error}") from error


def _decode_refusal(response: HttpResponse, url: str) -> ServerRefusedError:
    try:
        body = msgspec.json.decode(response.body, type=_ErrorResponse).error
    except DECODE_ERRORS:
        return status_error(response.status, url)
    retry_after_ms = body.details.get("retry_after_ms", 0)
    retry_after_ms = retry_after_ms if type(retry_after_ms) is int else 0
    return ServerRefusedError(
        body.code, body.message, max(body.retry_after_ms, retry_after_ms, response.retry_after_ms)
    )


def _parse_retry_after_ms(text: str) -> int:
    """Parse the `Retry-After` header. Return 0 if it is not a number of seconds."""
    return 1000 * min(int(text), _RETRY_AFTER_S_MAX) if text.isascii() and text.isdecimal() else 0
