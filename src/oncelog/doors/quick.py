"""Requests that come by the thousand, answered without a task, a request and a response of aiohttp's for each.

A connection begins here. As long as each of its requests is a plain one of a route that is served so, and has come as a
whole, its handler gets the body and answers when it can. At the first request that is anything else the connection is
handed over to aiohttp, with what it has sent, and stays there: errors of HTTP, other routes, browsers and proxies are
left to aiohttp.

Nothing of HTTP is understood in two ways: a head is read by aiohttp's own parser, once, and known again by its bytes.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from aiohttp import HttpVersion11, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.tcp_helpers import tcp_keepalive
from msgspec import Struct

from oncelog import codes
from oncelog.doors.connections import Caller, ForwardedRequest
from oncelog.doors.faults import DoorError
from oncelog.doors.gate import Gate
from oncelog.doors.http_headers import RESPONSE_HEADERS
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.requests import JSON, bearer_of, error_response

logger: Final = logging.getLogger("oncelog.doors")

HEADS_MAX: Final = 4096
"""Heads that are known again. A client sends the same one for every body of the same length."""
HEAD_BYTES_MAX: Final = 2048
WAITING_BYTES_MAX: Final = 64 * 1024
"""What a connection may send while its request is being answered, before it is not read any more."""
_END: Final = b"\r\n\r\n"
_NOT_PLAIN: Final = (
    "Origin",
    "Expect",
    "Content-Encoding",
    "Transfer-Encoding",
    "X-Forwarded-For",
    "X-Forwarded-Proto",
)
"""Headers whose meaning is left to the long way."""
_FIXED_LINES: Final = "".join(f"{name}: {value}\r\n" for name, value in RESPONSE_HEADERS.items())

Transport = Any
"""uvloop's is an asyncio.Transport without saying so."""


class Head(Struct, frozen=True):
    """What the head of a request says."""

    path: str
    host: str
    credential: str | None
    body_bytes: int


class Request(Struct, frozen=True):
    """One request, and how it is answered. Either is called once, by whoever has it."""

    credential: str | None
    caller: Caller
    body: bytes
    answer: Callable[[bytes], None]
    """With JSON."""
    fail: Callable[[Exception], None]
    """With an error, a DoorError or one that is the server's fault."""


Handler = Callable[[Request], None]
"""Answers a request now or later. May raise DoorError in place of answering."""


class Quick:
    """All connections of a server that have sent nothing else so far."""

    def __init__(
        self,
        routes: Mapping[str, Handler],
        *,
        demand_ours: Callable[[str, str], None],
        failed: Callable[[str, DoorError], None],
        body_bytes_max: int,
        varies: bool,
    ) -> None:
        self.routes = routes
        self.demand_ours = demand_ours
        """Raises DoorError for an address and a `Host` that are not served."""
        self.failed = failed
        """Told of every request that was refused: its path, and why."""
        self._body_bytes_max = min(body_bytes_max, LONG_FRAME_BYTES)
        self._always = b"Vary: Origin\r\n" if varies else b""
        """Lines of every answer's head."""
        self.is_ending = False
        """Whether each answer is the last one of its connection."""
        self.connections: set[_Connection] = set()
        self.head = lru_cache(maxsize=HEADS_MAX)(self._read)
        self._ok: tuple[str, bytes] = ("", b"")

    def protocol(self, serve: Callable[[], asyncio.Protocol], gate: Gate) -> asyncio.Protocol:
        """For a new connection behind a gate. `serve` makes the protocol to which it may be handed over."""
        return _Connection(self, serve, gate)

    def close_idle(self, since_s: float) -> None:
        """Closes those that have asked for nothing since then."""
        for connection in [one for one in self.connections if one.is_idle_since(since_s)]:
            connection.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request has no answer yet."""
        return any(connection.is_busy for connection in self.connections)

    def end(self) -> None:
        """From now on each connection is closed with its next answer, which says so."""
        self.is_ending = True
        self._always += b"Connection: close\r\n"
        self._ok = ("", b"")

    def finish(self) -> None:
        """Closes all of them; what was answered is sent."""
        for connection in list(self.connections):
            connection.close()

    def _read(self, data: bytes) -> Head | None:
        """What a head says; None if it is not a plain one of a route that is served here."""
        if data.count(b"\n") != data.count(b"\r\n"):
            return None
        loop = asyncio.get_running_loop()
        parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16, max_field_size=HEAD_BYTES_MAX)
        try:
            messages, is_upgraded, tail = parser.feed_data(data)
        except HttpProcessingError:
            return None
        if len(messages) != 1 or is_upgraded or tail:
            return None
        return self._plain(messages[0][0])

    def _plain(self, message: RawRequestMessage) -> Head | None:
        headers = message.headers
        lengths, hosts = headers.getall("Content-Length", [""]), headers.getall("Host", [""])
        credentials = headers.getall("Authorization", [""])
        is_plain = (
            message.method == "POST"
            and message.path in self.routes
            and message.version == HttpVersion11
            and not (message.should_close or message.chunked or message.upgrade or message.compression)
            and not any(name in headers for name in _NOT_PLAIN)
            and len(lengths) == len(hosts) == len(credentials) == 1
            and lengths[0].isascii()
            and lengths[0].isdecimal()
            and headers.get("Content-Type", "").partition(";")[0].strip().lower() == JSON
        )
        if not is_plain or not 0 < int(lengths[0]) <= self._body_bytes_max:
            return None
        return Head(message.path, hosts[0], bearer_of(credentials[0]), int(lengths[0]))

    def ok(self, body: bytes) -> bytes:
        """An answer, with what aiohttp would have said above it."""
        date = rfc822_formatted_time()
        if date != self._ok[0]:
            head = (
                f"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Type: {JSON}\r\nDate: {date}\r\n{_FIXED_LINES}"
            ).encode() + self._always
            self._ok = (date, head.replace(b"%", b"%%") + b"Content-Length: %d\r\n\r\n%b")
        return self._ok[1] % (len(body), body)

    def error(self, response: web.Response) -> bytes:
        """An error as aiohttp would have sent it."""
        body = response.body
        assert isinstance(body, bytes)  # noqa: S101 - it was made of bytes
        named = {
            **response.headers,
            "Date": rfc822_formatted_time(),
            **RESPONSE_HEADERS,
            "Content-Length": str(len(body)),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return f"HTTP/1.1 {response.status} {response.reason}\r\n{lines}".encode() + self._always + b"\r\n" + body


class _Connection(asyncio.Protocol):
    """One client. It has one request at a time; what it sends meanwhile waits."""

    def __init__(self, quick: Quick, serve: Callable[[], asyncio.Protocol], gate: Gate) -> None:
        self._quick = quick
        self._serve = serve
        self._gate = gate
        connection = self._counted = gate.connection
        # Other callers use the connection of a proxy too.
        self._caller = ForwardedRequest(connection, connection.address) if connection.is_proxy else connection
        self._loop = asyncio.get_running_loop()
        self._transport: Transport = None
        self._remote = ""
        self._path = ""
        self._waiting = b""
        self._active_s = 0.0
        self.is_busy = False
        """Whether a request waits for its answer."""
        self._is_paused = False
        """Not read from, because too much waits."""
        self._is_full = False
        """Not written to, because the client does not read."""

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        tcp_keepalive(self._transport)
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if isinstance(peer, tuple) else ""
        self._active_s = self._loop.time()
        self._quick.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - whatever it was
        self._quick.connections.discard(self)
        self._waiting = b""

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if self.is_busy or self._is_full or self._waiting:
            self._waiting += data
            if len(self._waiting) > WAITING_BYTES_MAX and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
        else:
            self._take(data)

    # --- requests

    def _take(self, data: bytes) -> None:
        body_at = data.find(_END, 0, HEAD_BYTES_MAX) + len(_END)
        head = self._quick.head(data[:body_at]) if body_at >= len(_END) else None
        if head is None or len(data) < body_at + head.body_bytes:
            self._hand_over(data)
            return
        end = body_at + head.body_bytes
        self._waiting = data[end:]
        self.is_busy = True
        if self._counted.group is not None:
            self._counted.requested()
        self._path = head.path
        request = Request(head.credential, self._caller, data[body_at:end], self._answer, self._fail)
        try:
            self._quick.demand_ours(self._remote, head.host)
            self._quick.routes[head.path](request)
        except Exception as error:  # noqa: BLE001 - told, and logged if it is not the client's
            self._fail(error)

    def _hand_over(self, data: bytes) -> None:
        """To aiohttp, from here on."""
        self._quick.connections.discard(self)
        served = self._serve()
        self._gate.hand_over(served)
        served.connection_made(self._transport)
        served.data_received(data)

    def _answer(self, body: bytes) -> None:
        self._send(self._quick.ok(body))

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, DoorError):
            logger.error("a request failed", exc_info=error, extra={"method": "POST", "path": self._path})
            error = DoorError(codes.SERVER_ERROR, "the server is at fault", status=500)
        else:
            self._quick.failed(self._path, error)
        self._send(self._quick.error(error_response(error)))

    def _send(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        self._active_s = self._loop.time()
        self.is_busy = False
        if self._counted.group is not None:
            self._counted.answered()
        if self._quick.is_ending:
            self.close()
        elif self._waiting:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """With what has waited."""
        if self.is_busy or self._is_full or not self._waiting or self._transport.is_closing():
            return
        data, self._waiting = self._waiting, b""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._take(data)

    def is_idle_since(self, since_s: float) -> bool:
        """Whether it has had nothing to do since then."""
        return not self.is_busy and self._active_s < since_s

    def close(self) -> None:
        """What was written is sent first."""
        self._transport.close()
