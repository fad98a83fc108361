"""Readers who follow something, by server-sent events or a WebSocket, until they go or are sent away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol

from aiohttp import web

from oncelog.doors.entrance import Entrance, has_ended, renew_each
from oncelog.doors.faults import UNREADABLE, DoorError, error_json, error_of
from oncelog.doors.http_protocol import HttpProtocol
from oncelog.doors.limits import DoorLimits
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.doors")

HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Wire(Protocol):
    """How one reader is written to."""

    async def write(self, data: bytes) -> None:
        """Sends what is for the reader, and waits until there is room for more."""

    async def beat(self) -> None:
        """Shows that the connection lives."""

    def last_words(self, error: DoorError) -> bytes:
        """What a reader is told who is sent away."""

    def abort(self) -> None:
        """Cuts the connection off."""


class SseWire:
    """Server-sent events."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        words: Callable[[DoorError], bytes] = error_json,
    ) -> None:
        self._request = request
        self._response = response
        self._words = words

    async def write(self, data: bytes) -> None:
        """As `Wire` says."""
        await self._response.write(data)

    async def beat(self) -> None:
        """As `Wire` says."""
        await self.write(b":\n\n")

    def last_words(self, error: DoorError) -> bytes:
        """As `Wire` says."""
        return b"event: error\ndata: %b\n\n" % self._words(error)

    def abort(self) -> None:
        """As `Wire` says."""
        if self._request.transport is not None:
            self._request.transport.abort()


class SocketWire:
    """A WebSocket, whose beats are aiohttp's."""

    def __init__(
        self, request: web.Request, socket: web.WebSocketResponse, words: Callable[[DoorError], bytes]
    ) -> None:
        self._request = request
        self._socket = socket
        self._words = words

    async def write(self, data: bytes) -> None:
        """As `Wire` says."""
        await self._socket.send_str(data.decode())

    async def beat(self) -> None:
        """As `Wire` says."""

    def last_words(self, error: DoorError) -> bytes:
        """As `Wire` says."""
        return self._words(error)

    def abort(self) -> None:
        """As `Wire` says."""
        if self._request.transport is not None:
            self._request.transport.abort()


class Streams:
    """All readers of a door."""

    def __init__(self, entrance: Entrance, limits: DoorLimits, counts: Counts) -> None:
        self._entrance = entrance
        self._limits = limits
        self._counts = counts
        self._streams: set[_Stream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    async def serve(
        self,
        request: web.Request,
        principal: Principal,
        may_read: Callable[[Principal], bool],
        chunks: Callable[[], AsyncGenerator[bytes, None]],
        words: Callable[[DoorError], bytes] = error_json,
    ) -> web.StreamResponse:
        """Answers with what comes out of `chunks`, for as long as the reader may have it."""
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self._counts.sse_connections += 1
        try:
            stream = self._new_stream(SseWire(request, response, words), principal, may_read)
            # Nothing is read from the client, so only the protocol notices that the connection is closed.
            with _protocol_of(request).calling_when_lost(partial(stream.end, None)):
                await self._run(stream, chunks)
        finally:
            self._counts.sse_connections -= 1
        return response

    async def run(
        self,
        wire: Wire,
        principal: Principal,
        may_read: Callable[[Principal], bool],
        chunks: Callable[[], AsyncGenerator[bytes, None]],
    ) -> None:
        """Writes what comes out of `chunks`, for as long as the reader may have it. Cancel it when he has gone."""
        await self._run(self._new_stream(wire, principal, may_read), chunks)

    def _new_stream(self, wire: Wire, principal: Principal, may_read: Callable[[Principal], bool]) -> "_Stream":
        return _Stream(self._limits, self._counts, wire, principal, may_read)

    async def _run(self, stream: "_Stream", chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        self._streams.add(stream)
        try:
            await stream.run(chunks)
        finally:
            self._streams.discard(stream)

    def renew(self) -> None:
        """Ends the streams of those whose rights have ended."""
        renew_each(self._streams, self._renew_stream, lambda stream, _: stream.end(has_ended()))

    def _renew_stream(self, stream: "_Stream") -> None:
        current = self._entrance.current(stream.principal)
        if current is None or not stream.may_read(current):
            stream.end(has_ended())

    def finish(self) -> None:
        """Ends all streams: their readers come back with the id of the last thing they got."""
        for stream in list(self._streams):
            stream.end(None)


def _protocol_of(request: web.Request) -> HttpProtocol:
    protocol = request.protocol
    assert isinstance(protocol, HttpProtocol)  # noqa: S101 - the server makes no other one
    return protocol


class _Stream:
    """One reader."""

    def __init__(
        self,
        limits: DoorLimits,
        counts: Counts,
        wire: Wire,
        principal: Principal,
        may_read: Callable[[Principal], bool],
    ) -> None:
        self._heartbeat_s = limits.heartbeat_ms / 1000
        self._counts = counts
        self._wire = wire
        self.principal = principal
        self.may_read = may_read
        self._sending: asyncio.Task[None] | None = None
        self._is_ended = False
        self._last_words = b""

    async def run(self, chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        """Until the reader goes, or is sent away."""
        try:
            await self._send_until_ended(chunks)
            await self._write(self._last_words)
        except ConnectionError:
            pass  # it is gone
        except TimeoutError:
            # It does not read. What waits for it would keep the connection open for as long as it likes; so it is cut
            # off, and can come back with the id of the last thing it got (CO-31).
            logger.warning("a slow reader is closed", extra={"actor": self.principal.actor})
            self._counts.slow_readers_closed += 1
            self._wire.abort()

    async def _send_until_ended(self, chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        if self._is_ended:
            return
        self._sending = asyncio.get_running_loop().create_task(self._send_all(chunks()))
        try:
            await asyncio.wait([self._sending])
        finally:
            self._sending.cancel()  # if it is us who were cancelled
        if not self._sending.cancelled():
            self._sending.result()

    def end(self, error: DoorError | None) -> None:
        """Sends the reader away, with a reason if there is one."""
        self._is_ended = True
        if error is not None:
            self._last_words = self._wire.last_words(error)
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self, chunks: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(chunks):
            while True:
                coming = asyncio.ensure_future(anext(chunks))
                try:
                    while not (await asyncio.wait([coming], timeout=self._heartbeat_s))[0]:
                        await self._in_time(self._wire.beat())
                    chunk = await coming
                except StopAsyncIteration:
                    return
                except (OncelogError, DoorError) as error:
                    self._last_words = self._wire.last_words(error_of(error, UNREADABLE))
                    return
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait([coming])
                await self._write(chunk)

    async def _write(self, data: bytes) -> None:
        """One who does not read for as long as two heartbeats is let go."""
        if data:
            self._counts.bytes_sent += len(data)
            await self._in_time(self._wire.write(data))

    async def _in_time(self, writing: Awaitable[None]) -> None:
        async with asyncio.timeout(2 * self._heartbeat_s):
            await writing
