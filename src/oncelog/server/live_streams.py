"""Streams that follow a log until the reader disconnects or the server closes them, and their tickets."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from aiohttp import web

from oncelog.errors import OncelogError
from oncelog.server import logger
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate, OpenConnections
from oncelog.server.endpoint import Answer, Call, Endpoint, Parameter, Reply
from oncelog.server.errors import UNREADABLE, ApiError, credential_ended_error, encode_error, to_api_error
from oncelog.server.http_protocol import HttpProtocol
from oncelog.server.messages import TEXT_SCHEMA, TIMESTAMP, Schema, object_schema, schema_response

SSE_HEADERS: Final = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}

_TICKET_DESCRIPTION: Final = (
    "For browsers, whose `EventSource` cannot send a credential. Add the ticket to the address of the stream as the "
    "parameter `ticket`, with the same values of the parameters below. It opens only this stream, any number of times, "
    "until it expires or the credential becomes invalid."
)

B = TypeVar("B")
"""A batch of records that the log delivers together."""


class LiveStream:
    """One open stream, which runs in the task of its request."""

    def __init__(self, principal: Principal, names: Sequence[str], heartbeat_ms: int) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - aiohttp and gRPC run every request in one
        self.principal = principal
        self.heartbeat_s = heartbeat_ms / 1000
        self._names = names
        self._task = task
        self._error: ApiError | None = None
        self._is_stopped = False
        """Whether `stop` has cancelled the task."""
        self._is_ending = False
        """Whether `stop` no longer has an effect."""

    async def run(self, work: Coroutine[Any, Any, None]) -> ApiError | None:
        """Run the coroutine that serves the stream. Returns the error that stopped it, if any."""
        try:
            await work
        except (ApiError, OncelogError) as error:
            return to_api_error(error, UNREADABLE)
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise  # the request was cancelled
            self._task.uncancel()
        finally:
            self._is_ending = True
        return self._error

    async def wait_bounded(self, write: Awaitable[None]) -> None:
        """Wait until a write is complete. Raises TimeoutError if the client does not read for two heartbeats."""
        async with asyncio.timeout(2 * self.heartbeat_s):
            await write

    def renew(self, principal: Principal | None) -> None:
        """See `OpenConnection`."""
        if principal is None or not all(map(principal.grants.may_read, self._names)):
            self.stop(credential_ended_error())

    def fail(self, error: Exception) -> None:  # noqa: ARG002 - the caller logs it
        """See `OpenConnection`."""
        self.stop(credential_ended_error())

    def stop(self, error: ApiError | None = None) -> None:
        """Stop the stream, with or without an error."""
        if not self._is_stopped and not self._is_ending:
            self._is_stopped = True
            self._error = error
            self._task.cancel()

    def start_cleanup(self) -> None:
        """Ignore further calls of `stop`, which would interrupt the cleanup of a failed stream."""
        self._is_ending = True


class LiveStreams(OpenConnections[LiveStream]):
    """The open HTTP streams of an API. `encode_error` encodes the error that stops a stream."""

    def __init__(self, auth_gate: AuthGate, api: str, encode_error: Callable[[ApiError], bytes] = encode_error) -> None:
        super().__init__(auth_gate)
        self._api = api
        self._encode_error = encode_error

    async def serve(
        self,
        call: Call,
        names: Sequence[str],
        hello: bytes,
        batches: AsyncGenerator[B, None],
        encode: Callable[[B], bytes],
    ) -> web.StreamResponse:
        """Answer a call with `hello` and all batches, for as long as its principal may read all of these names."""
        request, counts = call.request, self.auth_gate.counts
        self.auth_gate.check_open()
        # The credential may have become invalid while the call waited for the store, and `renew` only covers streams
        # that are already in `connections`.
        call.principal = self.auth_gate.recheck_principal(call.principal)
        counts.requests[self._api, "http", "ok"] += 1
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        stream = LiveStream(call.principal, names, self.auth_gate.limits.heartbeat_ms)
        # The server reads nothing from the client, so only the protocol notices that the connection was closed.
        protocol = request.protocol
        assert isinstance(protocol, HttpProtocol)  # noqa: S101 - the server uses no other protocol
        self.connections.add(stream)
        try:
            with protocol.call_on_loss(stream.stop):
                error = await stream.run(self._send_all(stream, response, hello, batches, encode))
                if error is not None:
                    await self._write(stream, response, b"event: error\ndata: %b\n\n" % self._encode_error(error))
        except ConnectionError:
            pass  # the client has closed the connection
        except TimeoutError:
            # The client does not read. Unsent data would keep the connection open, so the server aborts it. The client
            # can resume after the last event that it received (CO-31).
            logger.warning("a slow reader is closed", extra={"actor": call.principal.actor})
            counts.slow_readers_closed += 1
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.connections.discard(stream)
        return response

    def declare_ticket(self, stream: Endpoint, name: str, parameters: tuple[Parameter, ...]) -> Endpoint:
        """Return the operation that issues tickets for a stream. Its `parameters` choose what the stream reads."""
        list_names = stream.list_stream_names
        assert list_names is not None  # noqa: S101 - it is a stream

        async def issue(call: Call) -> Answer:
            ticket = self.auth_gate.tickets.issue(call.principal, stream.name, list_names(call))
            return Reply(201, {"ticket": ticket.text, "expires_at_ms": ticket.expires_ms})

        return Endpoint(
            method="POST",
            path=stream.path,
            api=stream.api,
            name=name,
            summary=f"Get a ticket for the stream: {stream.summary.lower()}",
            description=_TICKET_DESCRIPTION,
            parameters=parameters,
            authorize=stream.authorize,
            handle=issue,
            responses={201: schema_response("StreamTicket", "The ticket.")},
        )

    async def _send_all(
        self,
        stream: LiveStream,
        response: web.StreamResponse,
        hello: bytes,
        batches: AsyncGenerator[B, None],
        encode: Callable[[B], bytes],
    ) -> None:
        await self._write(stream, response, hello)
        async with aclosing(batches):
            while True:
                coming = asyncio.ensure_future(anext(batches))
                try:
                    while not (await asyncio.wait([coming], timeout=stream.heartbeat_s))[0]:
                        await stream.wait_bounded(response.write(b":\n\n"))
                    batch = await coming
                except StopAsyncIteration:
                    return
                finally:
                    if not coming.done():
                        stream.start_cleanup()
                        coming.cancel()
                        await asyncio.wait([coming])
                await self._write(stream, response, encode(batch))

    async def _write(self, stream: LiveStream, response: web.StreamResponse, data: bytes) -> None:
        if data:
            self.auth_gate.counts.bytes_sent += len(data)
            await stream.wait_bounded(response.write(data))

    def close_all(self) -> None:
        """Stop all streams. Their readers reconnect with the id of the last event that they received."""
        for stream in list(self.connections):
            stream.stop()


def encode_event(event_id: int, data: bytes) -> bytes:
    """Encode a server-sent event."""
    return b"id: %d\ndata: %b\n\n" % (event_id, data)


def build_schemas() -> dict[str, Schema]:
    """Return the schema of the answer that contains a ticket."""
    expires_at = {**TIMESTAMP, "description": "When the ticket expires, in milliseconds since 1970."}
    return {"StreamTicket": object_schema(ticket=TEXT_SCHEMA, expires_at_ms=expires_at)}
