"""Server-sent events: one reader who follows something, until he goes or is sent away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from aiohttp import web

from oncelog.doors.entrance import Entrance, has_ended
from oncelog.doors.faults import UNREADABLE, DoorError, error_json, error_of
from oncelog.doors.limits import DoorLimits
from oncelog.doors.metrics import Counts
from oncelog.doors.principal import Principal
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.doors")

HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


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
    ) -> web.StreamResponse:
        """Answers with what comes out of `chunks`, for as long as the reader may have it."""
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        stream = _Stream(self._limits, self._counts, request, response, principal, may_read)
        self._streams.add(stream)
        self._counts.sse_connections += 1
        try:
            await stream.run(chunks)
        finally:
            self._streams.discard(stream)
            self._counts.sse_connections -= 1
        return response

    def renew(self) -> None:
        """Ends the streams of those whose rights have ended."""
        for stream in list(self._streams):
            current = self._entrance.current(stream.principal)
            if current is None or not stream.may_read(current):
                stream.end(has_ended())

    def finish(self) -> None:
        """Ends all streams: their readers come back with the id of the last thing they got."""
        for stream in list(self._streams):
            stream.end(None)


class _Stream:
    """One reader."""

    def __init__(
        self,
        limits: DoorLimits,
        counts: Counts,
        request: web.Request,
        response: web.StreamResponse,
        principal: Principal,
        may_read: Callable[[Principal], bool],
    ) -> None:
        self._heartbeat_s = limits.heartbeat_ms / 1000
        self._counts = counts
        self._request = request
        self._response = response
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
            if self._request.transport is not None:
                self._request.transport.abort()

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
            self._last_words = _error_event(error)
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self, chunks: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(chunks):
            while True:
                coming = asyncio.ensure_future(anext(chunks))
                try:
                    while not (await asyncio.wait([coming], timeout=self._heartbeat_s))[0]:
                        await self._write(b":\n\n")
                    chunk = await coming
                except StopAsyncIteration:
                    return
                except OncelogError as error:
                    self._last_words = _error_event(error_of(error, UNREADABLE))
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
            async with asyncio.timeout(2 * self._heartbeat_s):
                await self._response.write(data)


def _error_event(error: DoorError) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_json(error)
