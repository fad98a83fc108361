"""Limits the bytes that a connection may send before it is authenticated.

A `PreauthLimiter` is a transport's protocol until the caller is authenticated. It forwards all calls to the inner
protocol, counts the bytes, and stops reading above the limit. After authentication the inner protocol takes its place,
so an authenticated connection has no overhead.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from aiohttp import StreamReader

from oncelog.server.connection_limiter import Connection, Transport
from oncelog.server.send_queue import TRANSPORT_BYTES_HIGH

HEAD_BYTES_MAX: Final = 128 * 1024
"""Largest HTTP request head: the longest request line (64 KiB) and the headers."""
GRACE_S: Final = 0.2
"""How long a connection above the limit stays open. A request in the received bytes may still authenticate it."""


class PreauthLimiter(asyncio.Protocol):
    """Protocol of one connection until it is authenticated. `new_protocol` creates the inner protocol."""

    def __init__(self, connection: Connection, new_protocol: Callable[["PreauthLimiter"], asyncio.Protocol]) -> None:
        self.connection = connection
        self._new_protocol = new_protocol
        self._refuse: Callable[[], None] | None = None
        """Closes a WebSocket. None for HTTP."""
        self._bytes_max = HEAD_BYTES_MAX
        self._bytes = 0
        self._unread_bytes = 0
        """Lower bound of the response bytes that the client has not read."""
        self._inner: Any = None
        """The inner protocol. While its `is_reading_paused` is true, requests are waiting and the transport must not be
        read."""
        self._transport: Transport = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._ignored_body: StreamReader | None = None
        self._is_removed = False
        self._is_paused = False

    # --- for the connection

    def remove(self) -> None:
        """See `ByteLimit`."""
        if not self._is_removed:
            self._is_removed = True
            self._transport.set_protocol(self._inner)
            self._resume()

    def reset(self, bytes_max: int | None = None, refuse: Callable[[], None] | None = None) -> None:
        """See `ByteLimit`."""
        self._bytes = 0
        if self._inner is None or not self._inner.is_reading_paused:
            self._hold()  # otherwise the bytes of the waiting requests remain counted
        self._bytes_max = bytes_max or HEAD_BYTES_MAX
        self._refuse = refuse
        self._ignored_body = None
        if self._is_removed:
            self._is_removed = False
            self._inner = self._transport.get_protocol()
            self._transport.set_protocol(self)
        self._resume()

    def ignore_body(self, body: StreamReader) -> None:
        """See `ByteLimit`. aiohttp discards the rest of an answered request's body."""
        self._ignored_body = body

    def replace_inner(self, inner: asyncio.Protocol) -> None:
        """Replace the inner protocol."""
        self._inner = inner
        if self._is_removed:
            self._transport.set_protocol(inner)

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the inner protocol."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=TRANSPORT_BYTES_HIGH)  # the default with TLS is 512 KiB
        self.connection.byte_limit = self
        self.connection.attach(transport)
        self._inner = self._new_protocol(self)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's buffers, which would otherwise wait for the garbage collector."""
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        inner, self._inner = self._inner, asyncio.Protocol()
        self._refuse = None
        self._ignored_body = None
        self.connection.close()
        inner.connection_lost(exc)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Forward the data, and stop reading above the limit."""
        if self._ignored_body is not None:
            if not self._ignored_body.is_eof():
                self._inner.data_received(data)
                return
            self._ignored_body = None
        self._bytes += len(data)
        self._inner.data_received(data)
        if self._is_removed:
            return
        self._hold()
        is_closed = self.connection.counted_address is None
        if self._bytes > self._bytes_max and self._grace_timer is None and not is_closed:
            self._is_paused = True
            self._transport.pause_reading()
            self._grace_timer = asyncio.get_running_loop().call_later(GRACE_S, self._end_grace)

    def eof_received(self) -> bool | None:
        """Forward the end of the data."""
        keeps_open: bool | None = self._inner.eof_received()
        return keeps_open

    def pause_writing(self) -> None:
        """Forward the call. Responses that the client does not read count like unfinished requests."""
        self._unread_bytes = TRANSPORT_BYTES_HIGH + self._transport.get_write_buffer_size()
        self._hold()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward the call."""
        self._unread_bytes = 0
        self._hold()
        self._inner.resume_writing()

    # --- the limit

    def _hold(self) -> None:
        self.connection.hold(self._bytes + self._unread_bytes)

    def _end_grace(self) -> None:
        self._grace_timer = None
        is_answering = self.connection.idle_since_ms is None and self._refuse is None
        if not self._is_removed and not is_answering:
            self.connection.refuse("too_large", self._refuse)

    def _resume(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None
        if self._is_paused:
            self._is_paused = False
            # The inner protocol may have paused reading too. It resumes reading once it has room.
            if not self._inner.is_reading_paused and not self._transport.is_closing():
                self._transport.resume_reading()
