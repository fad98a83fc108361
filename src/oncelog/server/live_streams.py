"""Streams of server-sent events: each follows a log until its reader leaves or the server ends it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

from aiohttp import web

from oncelog.errors import OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.endpoint import Call
from oncelog.server.errors import UNREADABLE, ApiError, credential_ended_error, encode_error, to_api_error
from oncelog.server.http_protocol import HttpProtocol

logger: Final = logging.getLogger("oncelog.doors")

SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}

B = TypeVar("B")
"""Records that a log delivers together."""


class LiveStreams:
    """The open streams of an API. `encode_error` encodes the errors that end them."""

    def __init__(self, auth_gate: AuthGate, api: str, encode_error: Callable[[ApiError], bytes] = encode_error) -> None:
        self._auth_gate = auth_gate
        self._api = api
        self._encode_error = encode_error
        self._streams: set[_LiveStream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    async def serve(
        self,
        call: Call,
        names: Sequence[str],
        hello: bytes,
        batches: AsyncGenerator[B, None],
        encode: Callable[[B], bytes],
    ) -> web.StreamResponse:
        """Answer a call with `hello` and all batches, while its principal may read all of these names."""
        self._auth_gate.check_open()
        # The credential may have ended while the call waited for the store: `renew` does not see it before.
        call.principal = self._auth_gate.recheck_principal(call.principal)
        request = call.request
        self._auth_gate.counts.requests[self._api, "http", "ok"] += 1
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        chunks = _iterate_chunks(hello, batches, encode)
        stream = _LiveStream(self._auth_gate, call, names, response, chunks, self._encode_error)
        self._streams.add(stream)
        try:
            # The server reads nothing from the client, so only the protocol notices a closed connection.
            protocol = request.protocol
            assert isinstance(protocol, HttpProtocol)  # noqa: S101 - the server has no other protocol
            with protocol.call_on_loss(partial(stream.stop, None)):
                await stream.run()
        finally:
            self._streams.discard(stream)
        return response

    def renew(self) -> None:
        """End the streams of principals whose rights have ended."""
        self._auth_gate.renew_rights(self._streams)

    def close_all(self) -> None:
        """End all streams. Their readers connect again with the id of the last event that they received."""
        for stream in list(self._streams):
            stream.stop(None)


def encode_event(event_id: int, data: bytes) -> bytes:
    """Encode a server-sent event."""
    return b"id: %d\ndata: %b\n\n" % (event_id, data)


async def _iterate_chunks(
    hello: bytes, batches: AsyncGenerator[B, None], encode: Callable[[B], bytes]
) -> AsyncGenerator[bytes, None]:
    yield hello
    async with aclosing(batches):
        async for batch in batches:
            yield encode(batch)


class _LiveStream:
    """One open stream."""

    def __init__(
        self,
        auth_gate: AuthGate,
        call: Call,
        names: Sequence[str],
        response: web.StreamResponse,
        chunks: AsyncGenerator[bytes, None],
        encode_error: Callable[[ApiError], bytes],
    ) -> None:
        self._heartbeat_s = auth_gate.limits.heartbeat_ms / 1000
        self._counts = auth_gate.counts
        self._request = call.request
        self.principal = call.principal
        self._names = names
        self._response = response
        self._encode_error = encode_error
        self._last_chunk = b""
        self._send_task = asyncio.get_running_loop().create_task(self._send_all(chunks))

    async def run(self) -> None:
        """Return when all chunks are sent, or the stream is ended."""
        try:
            try:
                await asyncio.wait([self._send_task])
            finally:
                self._send_task.cancel()  # if this task was cancelled
            if not self._send_task.cancelled():
                self._send_task.result()
            await self._write(self._last_chunk)
        except ConnectionError:
            pass  # the client has closed the connection
        except TimeoutError:
            # The client does not read. Unsent data would keep the connection open, so the server aborts it. The client
            # can continue after the last event that it received (CO-31).
            logger.warning("a slow reader is closed", extra={"actor": self.principal.actor})
            self._counts.slow_readers_closed += 1
            if self._request.transport is not None:
                self._request.transport.abort()

    def renew(self, principal: Principal | None) -> None:
        """As `OpenConnection` says."""
        if principal is None or not all(map(principal.grants.may_read, self._names)):
            self.stop(credential_ended_error())

    def fail(self, error: Exception) -> None:  # noqa: ARG002 - the caller logs it
        """As `OpenConnection` says."""
        self.stop(credential_ended_error())

    def stop(self, error: ApiError | None) -> None:
        """End the stream. An error becomes its last event."""
        if error is not None:
            self._last_chunk = self._encode_failure(error)
        self._send_task.cancel()

    def _encode_failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % self._encode_error(error)

    async def _send_all(self, chunks: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(chunks):
            while True:
                coming = asyncio.ensure_future(anext(chunks))
                try:
                    while not (await asyncio.wait([coming], timeout=self._heartbeat_s))[0]:
                        await self._wait_bounded(self._response.write(b":\n\n"))
                    chunk = await coming
                except StopAsyncIteration:
                    return
                except (OncelogError, ApiError) as error:
                    self._last_chunk = self._encode_failure(to_api_error(error, UNREADABLE))
                    return
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait([coming])
                await self._write(chunk)

    async def _write(self, data: bytes) -> None:
        if data:
            self._counts.bytes_sent += len(data)
            await self._wait_bounded(self._response.write(data))

    async def _wait_bounded(self, write: Awaitable[None]) -> None:
        """Wait until the client has read enough. Raises TimeoutError after two heartbeats."""
        async with asyncio.timeout(2 * self._heartbeat_s):
            await write
