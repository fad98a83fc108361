"""Fast path for the most frequent requests, which avoids aiohttp's task, request and response objects.

Every connection begins on the fast path, which serves plain requests for a fast route once they have arrived
completely: the route's handler receives the body and answers when it can. On the first request of any other kind, the
fast path permanently hands the connection over to aiohttp, together with the received bytes. aiohttp therefore serves
malformed HTTP, other routes, browsers and proxies.

Both paths read HTTP in the same way: aiohttp's parser parses each new head, and a cache recognises repeated heads by
their bytes.
"""

import asyncio
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Final

from aiohttp import HttpVersion11, base_protocol, helpers, http_exceptions, http_parser, tcp_helpers, web
from msgspec import Struct

from oncelog.engine.batch_report import RequestArrival
from oncelog.server.connection_limiter import Caller, Transport
from oncelog.server.endpoint import parse_bearer
from oncelog.server.http_protocol import DEFAULT_HEADERS, RESPONSE_HEADERS, set_headers
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.messages import JSON
from oncelog.server.preauth_limiter import PreauthLimiter

HEADS_MAX: Final = 4096
"""Size of the head cache. A client sends the same head for every body of the same length."""
HEAD_BYTES_MAX: Final = 2048
BUFFERED_BYTES_MAX: Final = 64 * 1024
"""Bytes that a client may send while it waits for an answer. Above the limit the server stops reading."""
_HEAD_END: Final = b"\r\n\r\n"
_SLOW_PATH_HEADERS: Final = (
    "Origin",
    "Expect",
    "Content-Encoding",
    "Transfer-Encoding",
    "X-Forwarded-For",
    "X-Forwarded-Proto",
)
"""A request with one of these headers is left to aiohttp."""
_FIXED_HEADER_LINES: Final = "".join(
    f"{name}: {value}\r\n" for name, value in {**RESPONSE_HEADERS, **DEFAULT_HEADERS}.items()
)

_SAMPLE_HEAD: Final = (
    b"POST %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token\r\n"
    b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n"
)
_OTHER_SAMPLES: Final = (
    ("another method", b"POST ", b"PUT "),
    ("another path", b" HTTP/1.1", b"/other HTTP/1.1"),
    ("HTTP/1.0", b"HTTP/1.1", b"HTTP/1.0"),
    ("a request that closes its connection", b"Host:", b"Connection: close\r\nHost:"),
    ("an upgrade", b"Host:", b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost:"),
    ("a chunked body", b"Content-Length: 2", b"Transfer-Encoding: chunked"),
    ("a compressed body", b"Host:", b"Content-Encoding: gzip\r\nHost:"),
    ("a second Content-Length", b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 3"),
    ("an invalid head", b"Host:", b"Host :"),
)
"""Sample heads that the fast path must leave to aiohttp: a description, the part of the plain head to replace, and its
replacement."""


class RequestHead(Struct, frozen=True):
    """The parsed head of a request."""

    path: str
    host: str
    credential: str | None
    body_bytes: int


class FastRequest(Struct, frozen=True):
    """One request with two ways to answer it. The handler calls exactly one of them, once."""

    credential: str | None
    caller: Caller
    body: bytes
    answer: Callable[[bytes], None]
    """Sends JSON with the status 200."""
    fail: Callable[[Exception], None]
    """Sends an error response: for an ApiError, or for any other exception, which is a fault of the server."""


FastHandler = Callable[[FastRequest], None]
"""Answers a request now or later. May raise ApiError instead."""


def measure_fast_route(handler: FastHandler) -> FastHandler:
    """Return a handler whose writes note when their request arrived."""

    def handle(request: FastRequest) -> None:
        with RequestArrival():
            handler(request)

    return handle


class HttpFastPath:
    """The connections of a server that have sent only plain requests so far, and the routes that serve them."""

    def __init__(
        self,
        routes: Mapping[str, FastHandler],
        *,
        check_request: Callable[[str, str], None],
        respond_to_failure: Callable[[str, str, Exception], web.Response],
        body_bytes_max: int,
        varies_by_origin: bool,
        trace_headers: tuple[str, ...] = (),
    ) -> None:
        self.routes = routes
        self.check_request = check_request
        """Raises ApiError for a request that the server refuses, by its address and `Host`."""
        self.respond_to_failure = respond_to_failure
        """Returns the response to a failed request, given its method, path and error."""
        self._slow_path_headers = (*_SLOW_PATH_HEADERS, *trace_headers)
        self._body_bytes_max = min(body_bytes_max, LONG_FRAME_BYTES)
        self._extra_headers = b"Vary: Origin\r\n" if varies_by_origin else b""
        """Further header lines of every answer."""
        self.is_ending = False
        """Whether each answer closes its connection."""
        self.connections: set[_FastConnection] = set()
        self.parse_head = lru_cache(maxsize=HEADS_MAX)(self._parse_head)
        self._ok_template: tuple[str, bytes] = ("", b"")

    def find_difference(self) -> str:
        """Return how aiohttp's internals differ from what the fast path expects, or "" if they do not."""
        try:
            path = next(iter(self.routes))
            sample = _SAMPLE_HEAD % path.encode()
            expected = RequestHead(path, "localhost", "token", 2)
            if (found := self._parse_head(sample)) != expected:
                return f"a plain head is parsed as {found}"
            for name, old, new in _OTHER_SAMPLES:
                if self._parse_head(sample.replace(old, new)) is not None:
                    return f"{name} is parsed as a plain head"
            parsedate_to_datetime(helpers.rfc822_formatted_time())
            tcp_helpers.tcp_keepalive  # noqa: B018 - checks only that it exists
        except Exception as error:  # noqa: BLE001 - a different version's interface can fail in any way
            return f"{type(error).__name__}: {error}"
        return ""

    def new_protocol(self, new_fallback: Callable[[], asyncio.Protocol], limiter: PreauthLimiter) -> asyncio.Protocol:
        """Return the protocol for a new connection. `new_fallback` creates aiohttp's protocol for the hand-over."""
        return _FastConnection(self, new_fallback, limiter)

    def close_idle(self, since_s: float) -> None:
        """Close connections that have had no request since `since_s`."""
        for connection in list(self.connections):
            if not connection.is_busy and connection.last_active_s < since_s:
                connection.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is waiting for its answer."""
        return any(connection.is_busy for connection in self.connections)

    def start_shutdown(self) -> None:
        """Close each connection after its next answer, which has a `Connection: close` header."""
        self.is_ending = True
        self._extra_headers += b"Connection: close\r\n"
        self._ok_template = ("", b"")

    def close_all(self) -> None:
        """Close all connections once the answers already written are sent."""
        for connection in list(self.connections):
            connection.close()

    def _parse_head(self, data: bytes) -> RequestHead | None:
        """Parse a head. Returns None unless it is a plain head for a fast route."""
        if data.count(b"\n") != data.count(b"\r\n"):
            return None
        loop = asyncio.get_running_loop()
        parser = http_parser.HttpRequestParser(
            base_protocol.BaseProtocol(loop), loop, 2**16, max_field_size=HEAD_BYTES_MAX
        )
        try:
            messages, is_upgraded, tail = parser.feed_data(data)
        except http_exceptions.HttpProcessingError:
            return None
        if len(messages) != 1 or is_upgraded or tail:
            return None
        return self._to_head(messages[0][0])

    def _to_head(self, message: http_parser.RawRequestMessage) -> RequestHead | None:
        headers = message.headers
        lengths, hosts = headers.getall("Content-Length", [""]), headers.getall("Host", [""])
        credentials = headers.getall("Authorization", [""])
        is_plain = (
            message.method == "POST"
            and message.path in self.routes
            and message.version == HttpVersion11
            and not (message.should_close or message.chunked or message.upgrade or message.compression)
            and not any(name in headers for name in self._slow_path_headers)
            and len(lengths) == len(hosts) == len(credentials) == 1
            and lengths[0].isascii()
            and lengths[0].isdecimal()
            and headers.get("Content-Type", "").partition(";")[0].strip().lower() == JSON
        )
        if not is_plain or not 0 < int(lengths[0]) <= self._body_bytes_max:
            return None
        return RequestHead(message.path, hosts[0], parse_bearer(credentials[0]), int(lengths[0]))

    def encode_ok(self, body: bytes) -> bytes:
        """Encode a successful answer, with the same head that aiohttp would send."""
        date = helpers.rfc822_formatted_time()
        if date != self._ok_template[0]:
            head = (
                f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nDate: {date}\r\n{_FIXED_HEADER_LINES}"
            ).encode() + self._extra_headers
            self._ok_template = (date, head.replace(b"%", b"%%") + b"Content-Length: %d\r\n\r\n%b")
        return self._ok_template[1] % (len(body), body)

    def encode_error(self, response: web.Response) -> bytes:
        """Encode an error response as aiohttp would."""
        body = response.body
        assert isinstance(body, bytes)  # noqa: S101 - `to_error_response` sets bytes
        named = response.headers.copy()
        named.update({"Date": helpers.rfc822_formatted_time(), "Content-Length": str(len(body))})
        set_headers(named)
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return (
            f"HTTP/1.1 {response.status} {response.reason}\r\n{lines}".encode() + self._extra_headers + b"\r\n" + body
        )


class _FastConnection(asyncio.Protocol):
    """One connection. It serves one request at a time and buffers bytes that arrive in the meantime."""

    def __init__(
        self, fast_path: HttpFastPath, new_fallback: Callable[[], asyncio.Protocol], limiter: PreauthLimiter
    ) -> None:
        self._fast_path = fast_path
        self._new_fallback = new_fallback
        self._limiter = limiter
        connection = self._connection = limiter.connection
        # A proxy's connection carries requests from other callers too.
        self._caller = Caller(connection.address, connection) if connection.is_proxy else connection
        self._loop = asyncio.get_running_loop()
        self._transport: Transport = None
        self._remote = ""
        self._path = ""
        self._buffered = b""
        self.last_active_s = 0.0
        self.is_busy = False
        """Whether a request on this connection is waiting for its answer."""
        self.is_reading_paused = False
        """Whether the server has stopped reading because too many bytes are buffered."""
        self._is_write_paused = False
        """Whether the write buffer is full because the client does not read its answers."""

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        tcp_helpers.tcp_keepalive(self._transport)
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if isinstance(peer, tuple) else ""
        self.last_active_s = self._loop.time()
        self._fast_path.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the reason does not matter
        self._fast_path.connections.discard(self)
        self._buffered = b""

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._resume()

    def data_received(self, data: bytes) -> None:
        if self.is_busy or self._is_write_paused or self._buffered:
            self._buffered += data
            if len(self._buffered) > BUFFERED_BYTES_MAX and not self.is_reading_paused:
                self.is_reading_paused = True
                self._transport.pause_reading()
        else:
            self._handle_data(data)

    # --- requests

    def _handle_data(self, data: bytes) -> None:
        body_at = data.find(_HEAD_END, 0, HEAD_BYTES_MAX) + len(_HEAD_END)
        head = self._fast_path.parse_head(data[:body_at]) if body_at >= len(_HEAD_END) else None
        if head is None or len(data) < body_at + head.body_bytes:
            self._fall_back(data)
            return
        end = body_at + head.body_bytes
        self._buffered = data[end:]
        self.is_busy = True
        if self._connection.counted_address is not None:
            self._connection.start_request()
        self._path = head.path
        request = FastRequest(head.credential, self._caller, data[body_at:end], self._send_ok, self._send_error)
        try:
            self._fast_path.check_request(self._remote, head.host)
            self._fast_path.routes[head.path](request)
        except Exception as error:  # noqa: BLE001 - answered, and logged if it is a fault of the server
            self._send_error(error)

    def _fall_back(self, data: bytes) -> None:
        """Hand the connection and the received bytes over to aiohttp."""
        self._fast_path.connections.discard(self)
        self._resume_reading()
        served = self._new_fallback()
        self._limiter.replace_inner(served)
        served.connection_made(self._transport)
        served.data_received(data)

    def _send_ok(self, body: bytes) -> None:
        self._send(self._fast_path.encode_ok(body))

    def _send_error(self, error: Exception) -> None:
        response = self._fast_path.respond_to_failure("POST", self._path, error)
        self._send(self._fast_path.encode_error(response))

    def _send(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        self.last_active_s = self._loop.time()
        self.is_busy = False
        if self._connection.counted_address is not None:
            self._connection.finish_request()
        if self._fast_path.is_ending:
            self.close()
        elif self._buffered:
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Handle the buffered bytes."""
        if self.is_busy or self._is_write_paused or not self._buffered or self._transport.is_closing():
            return
        data, self._buffered = self._buffered, b""
        self._handle_data(data)
        if len(self._buffered) <= BUFFERED_BYTES_MAX:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self.is_reading_paused:
            self.is_reading_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection once the bytes already written are sent."""
        self._transport.close()
