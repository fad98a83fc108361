"""Readers who follow something, by server-sent events or a WebSocket, until they go or are sent away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol

from aiohttp import web

from oncelog.errors import OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate, credential_ended_error, renew_each
from oncelog.server.errors import UNREADABLE, ApiError, encode_error, to_api_error
from oncelog.server.http_protocol import HttpProtocol
from oncelog.server.limits import ApiLimits
from oncelog.server.metrics import Counts

logger: Final = logging.getLogger("oncelog.doors")

SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StreamTransport(Protocol):
    """How one reader is written to."""

    async def write(self, data: bytes) -> None:
        """Sends what is for the reader, and waits until there is room for more."""

    async def send_heartbeat(self) -> None:
        """Shows that the connection lives."""

    def encode_failure(self, error: ApiError) -> bytes:
        """What a reader is told who is sent away."""

    def abort(self) -> None:
        """Cuts the connection off."""


class SseTransport:
    """Server-sent events."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        encode: Callable[[ApiError], bytes] = encode_error,
    ) -> None:
        self._request = request
        self._response = response
        self._encode = encode

    async def write(self, data: bytes) -> None:
        """As `StreamTransport` says."""
        await self._response.write(data)

    async def send_heartbeat(self) -> None:
        """As `StreamTransport` says."""
        await self.write(b":\n\n")

    def encode_failure(self, error: ApiError) -> bytes:
        """As `StreamTransport` says."""
        return b"event: error\ndata: %b\n\n" % self._encode(error)

    def abort(self) -> None:
        """As `StreamTransport` says."""
        if self._request.transport is not None:
            self._request.transport.abort()


class WebSocketStreamTransport:
    """A WebSocket, whose beats are aiohttp's."""

    def __init__(
        self, request: web.Request, socket: web.WebSocketResponse, encode: Callable[[ApiError], bytes]
    ) -> None:
        self._request = request
        self._socket = socket
        self._encode = encode

    async def write(self, data: bytes) -> None:
        """As `StreamTransport` says."""
        await self._socket.send_str(data.decode())

    async def send_heartbeat(self) -> None:
        """As `StreamTransport` says."""

    def encode_failure(self, error: ApiError) -> bytes:
        """As `StreamTransport` says."""
        return self._encode(error)

    def abort(self) -> None:
        """As `StreamTransport` says."""
        if self._request.transport is not None:
            self._request.transport.abort()


class LiveStreams:
    """All streams of an API."""

    def __init__(self, auth_gate: AuthGate, limits: ApiLimits, counts: Counts, api: str) -> None:
        self._auth_gate = auth_gate
        self._limits = limits
        self._counts = counts
        self._api = api
        self._streams: set[_LiveStream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    async def serve(
        self,
        request: web.Request,
        principal: Principal,
        may_read: Callable[[Principal], bool],
        chunks: Callable[[], AsyncGenerator[bytes, None]],
        encode: Callable[[ApiError], bytes] = encode_error,
    ) -> web.StreamResponse:
        """Answers with what comes out of `chunks`, for as long as the reader may have it."""
        self._counts.requests[self._api, "http", "ok"] += 1
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self._counts.sse_connections += 1
        try:
            stream = self._new_stream(SseTransport(request, response, encode), principal, may_read)
            # Nothing is read from the client, so only the protocol notices that the connection is closed.
            with _get_protocol(request).call_on_loss(partial(stream.stop, None)):
                await self._run(stream, chunks)
        finally:
            self._counts.sse_connections -= 1
        return response

    async def run(
        self,
        transport: StreamTransport,
        principal: Principal,
        may_read: Callable[[Principal], bool],
        chunks: Callable[[], AsyncGenerator[bytes, None]],
    ) -> None:
        """Writes what comes out of `chunks`, for as long as the reader may have it. Cancel it when he has gone."""
        await self._run(self._new_stream(transport, principal, may_read), chunks)

    def _new_stream(
        self, transport: StreamTransport, principal: Principal, may_read: Callable[[Principal], bool]
    ) -> "_LiveStream":
        return _LiveStream(self._limits, self._counts, transport, principal, may_read)

    async def _run(self, stream: "_LiveStream", chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        self._streams.add(stream)
        try:
            await stream.run(chunks)
        finally:
            self._streams.discard(stream)

    def renew(self) -> None:
        """Ends the streams of those whose rights have ended."""
        renew_each(self._streams, self._renew_stream, lambda stream, _: stream.stop(credential_ended_error()))

    def _renew_stream(self, stream: "_LiveStream") -> None:
        current = self._auth_gate.refresh_principal(stream.principal)
        if current is None or not stream.may_read(current):
            stream.stop(credential_ended_error())

    def close_all(self) -> None:
        """Ends all streams: their readers come back with the id of the last thing they got."""
        for stream in list(self._streams):
            stream.stop(None)


def _get_protocol(request: web.Request) -> HttpProtocol:
    protocol = request.protocol
    assert isinstance(protocol, HttpProtocol)  # noqa: S101 - the server makes no other one
    return protocol


class _LiveStream:
    """One reader."""

    def __init__(
        self,
        limits: ApiLimits,
        counts: Counts,
        transport: StreamTransport,
        principal: Principal,
        may_read: Callable[[Principal], bool],
    ) -> None:
        self._heartbeat_s = limits.heartbeat_ms / 1000
        self._counts = counts
        self._transport = transport
        self.principal = principal
        self.may_read = may_read
        self._send_task: asyncio.Task[None] | None = None
        self._is_ended = False
        self._last_chunk = b""

    async def run(self, chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        """Until the reader goes, or is sent away."""
        try:
            await self._send_until_ended(chunks)
            await self._write(self._last_chunk)
        except ConnectionError:
            pass  # it is gone
        except TimeoutError:
            # It does not read. What waits for it would keep the connection open for as long as it likes; so it is cut
            # off, and can come back with the id of the last thing it got (CO-31).
            logger.warning("a slow reader is closed", extra={"actor": self.principal.actor})
            self._counts.slow_readers_closed += 1
            self._transport.abort()

    async def _send_until_ended(self, chunks: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        if self._is_ended:
            return
        self._send_task = asyncio.get_running_loop().create_task(self._send_all(chunks()))
        try:
            await asyncio.wait([self._send_task])
        finally:
            self._send_task.cancel()  # if it is us who were cancelled
        if not self._send_task.cancelled():
            self._send_task.result()

    def stop(self, error: ApiError | None) -> None:
        """Sends the reader away, with a reason if there is one."""
        self._is_ended = True
        if error is not None:
            self._last_chunk = self._transport.encode_failure(error)
        if self._send_task is not None:
            self._send_task.cancel()

    async def _send_all(self, chunks: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(chunks):
            while True:
                coming = asyncio.ensure_future(anext(chunks))
                try:
                    while not (await asyncio.wait([coming], timeout=self._heartbeat_s))[0]:
                        await self._wait_bounded(self._transport.send_heartbeat())
                    chunk = await coming
                except StopAsyncIteration:
                    return
                except (OncelogError, ApiError) as error:
                    self._last_chunk = self._transport.encode_failure(to_api_error(error, UNREADABLE))
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
            await self._wait_bounded(self._transport.write(data))

    async def _wait_bounded(self, write: Awaitable[None]) -> None:
        async with asyncio.timeout(2 * self._heartbeat_s):
            await write
