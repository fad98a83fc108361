"""Base class of all WebSocket sessions: the logic of one connection, without its socket.

A session receives frames and writes frames through a `SessionTransport`; it opens no socket and starts no task. The
base class limits the frame rate, decodes frames (long ones in a thread), checks that the first frame authenticates the
client, looks up the handler in the session's message table, submits writes, counts outcomes, and closes the connection.
A subclass adds its decoder, message table, handlers, and error format.

`websocket.py` connects sessions to aiohttp.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, Generic, TypeVar

from aiohttp import WSCloseCode

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.engine.batch_report import RequestArrival
from oncelog.errors import OncelogError
from oncelog.server import logger
from oncelog.server.auth.principal import Principal
from oncelog.server.auth_gate import AuthGate
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import (
    BUSY_RETRY_AFTER_MS,
    UNREADABLE,
    ApiError,
    credential_ended_error,
    field_error,
    to_api_error,
)
from oncelog.server.limits import CONNECT_BYTES_MAX, LONG_FRAME_BYTES
from oncelog.server.send_queue import SendQueue, SessionTransport
from oncelog.server.tracing import RequestSpan

CHECKED_NAMES_MAX: Final = 1000
"""Size of the cache of the names that a connection's principal may or may not write."""
M = TypeVar("M")
"""A decoded message."""
R = TypeVar("R")
"""The ids of a request that its reply repeats."""
MessageHandler = Callable[[Any, Any], Awaitable[None] | None]
"""Session method that handles a message. The next frame is received once the awaitable has completed."""


class PendingWrite:
    """`VerdictSink` of one write: passes the outcome to its session. Never raises."""

    __slots__ = ()

    session: "WebSocketSession[Any, Any]"

    def done(self) -> bool:
        """Return False, because the session always needs the outcome."""
        return False

    def set_result(self, result: Any, /) -> None:
        """Pass on an outcome, which is durable by now."""
        self.session.settle(self, result)

    def set_exception(self, exception: Exception, /) -> None:
        """Pass on the error of a write whose outcome is unknown."""
        self.session.fail_undecided(self, to_api_error(exception))


class WebSocketSession(ABC, Generic[M, R]):
    """One connection. Its owner passes frames to `receive`, one at a time, and finally calls `on_disconnect`."""

    api: ClassVar[str]
    """Name of the API in metrics."""
    transport_name: ClassVar[str] = "websocket"
    """Name of the transport in metrics."""
    handlers: ClassVar[Mapping[Hashable, MessageHandler]]
    """The message table: the handler for each kind."""
    connect_kind: ClassVar[Hashable]
    """Kind of the first message, which must authenticate the connection."""
    frame_noun: ClassVar[str]
    write_noun: ClassVar[str]
    """The API's words for a frame and for several writes, in error texts."""

    def __init__(self, auth_gate: AuthGate, transport: SessionTransport, caller: Caller) -> None:
        self.auth_gate = auth_gate
        self.transport = transport
        self.caller = caller
        self.principal: Principal | None = None
        self.send_queue = SendQueue(transport, auth_gate.limits, auth_gate.counts, self._close_slow, self._describe)
        self.in_flight_count = 0
        """How many writes are unanswered."""
        self._may_write: Callable[[str], bool]
        """`may_write` of the principal's grants, with a cache. Set together with the principal."""
        self._second = 0
        self._second_frames = 0
        """How many frames were received in second `_second` of the steady clock."""
        self._is_refusing = False
        """Whether the session ignores all further frames."""
        self._is_closing = False
        """Whether the session neither reads nor writes any more frames."""
        self._write_spans: dict[PendingWrite, RequestSpan] = {}
        """Spans of unanswered writes, with tracing."""

    # --- what a session adds

    @abstractmethod
    def _decode(self, data: bytes) -> M:
        """Decode a text frame, in a thread if it is long. Raises ApiError if it is malformed."""

    @abstractmethod
    def _get_kind(self, message: M) -> Hashable:
        """Return the key of the message in `handlers`."""

    @abstractmethod
    def _get_reply_to(self, message: M) -> R:
        """Return the ids of the message that its reply repeats."""

    @abstractmethod
    def _send_error(self, error: ApiError, reply_to: R | None = None) -> None:
        """Send an error, and close the connection if the error code requires it."""

    def _send_outcome(self, pending: Any, outcome: Any) -> None:
        """Answer a write. Sessions that support writes implement it."""
        raise NotImplementedError

    def fail_write(self, pending: Any, error: ApiError) -> None:
        """Answer a write that is undecided or has an unknown outcome. Sessions that support writes implement it."""
        raise NotImplementedError

    @abstractmethod
    def _stop_delivery(self) -> None:
        """Leave the hub, so that no more broadcasts enter the send queue."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Close the connection because of an error."""

    def _find_reply_to(self, data: bytes) -> R | None:  # noqa: ARG002 - for sessions that find them
        """Return the ids in a frame that exceeds a limit, if they can be found cheaply."""
        return None

    def _describe(self) -> Mapping[str, JsonValue]:
        """Return the fields that identify the connection in log lines."""
        return {"address": self.caller.address, "actor": None if self.principal is None else self.principal.actor}

    def _may_continue(self, principal: Principal) -> bool:  # noqa: ARG002 - for sessions with a scope
        """Return whether the connection may remain open with changed rights."""
        return True

    def _end_credential(self, error: ApiError) -> None:
        """Close the connection because its rights are no longer valid."""
        self._send_error(error)

    def _apply_rights(self) -> None:
        """Apply the changed rights of `principal`."""

    async def _finish_replies(self) -> None:
        """Wait (bounded) for the replies to accepted requests, before a frame above the limit closes the connection."""

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """Handle a text frame. The caller awaits the result before it passes the next frame."""
        if self._is_refusing:
            return None
        self.auth_gate.counts.frames_received += 1
        violation = self._find_violation(len(data))
        if violation is not None:
            self._send_error(violation, self._find_reply_to(data))
            return None
        if len(data) > LONG_FRAME_BYTES:
            return self._receive_in_thread(data)
        if not self.auth_gate.measures_latency:
            return self._process(partial(self._decode, data))
        with RequestArrival():
            return self._process(partial(self._decode, data))

    def _find_violation(self, size: int) -> ApiError | None:
        """Return the error for a frame that is too large before authentication or exceeds the frame rate."""
        if self.principal is None and size > CONNECT_BYTES_MAX:
            message = f"the first message must have at most {CONNECT_BYTES_MAX} bytes, not {size}"
            return ApiError(error_codes.BAD_REQUEST, message, limit=CONNECT_BYTES_MAX)
        frames_max = self.auth_gate.limits.frames_per_second_max
        if not frames_max:
            return None
        second = self.auth_gate.clock.elapsed_ms() // 1000
        if second != self._second:
            self._second, self._second_frames = second, 0
        self._second_frames += 1
        if self._second_frames <= frames_max:
            return None
        message = f"too many frames: frames_per_second_max is {frames_max}"
        return ApiError(error_codes.RATE_LIMITED, message, limit=frames_max, retry_after_ms=1000)

    async def _receive_in_thread(self, data: bytes) -> None:
        """Decode a long frame in a thread, so that other connections do not wait for it."""
        with RequestArrival():
            decoded = asyncio.get_running_loop().run_in_executor(None, self._decode, data)
            await asyncio.wait([decoded])
            if self._is_refusing:
                decoded.exception()  # asyncio would log an exception that was never retrieved
                return
            waiting = self._process(decoded.result)
        if waiting is not None:
            await waiting

    def receive_binary(self) -> None:
        """Refuse a binary frame, which no API uses."""
        if not self._is_refusing:
            self.auth_gate.counts.frames_received += 1
            self._send_error(ApiError(error_codes.BAD_REQUEST, "frames must be text, in JSON"))

    async def receive_oversize(self) -> None:
        """Count an unread frame above `frame_bytes_max`, and wait (bounded) for the replies before it."""
        if not self._is_refusing:
            self._is_refusing = True
            self.auth_gate.counts.frames_received += 1
            self._count_request(error_codes.TOO_LARGE)
            await self._finish_replies()

    def _process(self, decode: Callable[[], M]) -> Awaitable[None] | None:
        try:
            message = decode()
        except ApiError as error:
            self._send_error(error, error.reply_to)
            return None
        try:
            waiting = self._find_handler(self._get_kind(message))(self, message)
        except ApiError as error:
            self._send_error(error, self._get_reply_to(message))
            return None
        return None if waiting is None else self._wait_for(waiting, message)

    async def _wait_for(self, handling: Awaitable[None], message: M) -> None:
        """Wait for a handler that reads the log. If it fails, answer the message with an error."""
        try:
            await handling
        except (ApiError, OncelogError) as error:
            self._send_error(to_api_error(error, UNREADABLE), self._get_reply_to(message))

    def _find_handler(self, kind: Hashable) -> MessageHandler:
        """Return the handler for a message. Raises ApiError if the kind is unknown or not allowed in this state."""
        if (self.principal is None) is not (kind == self.connect_kind):
            what = "already connected" if kind == self.connect_kind else f"the first {self.frame_noun} must be connect"
            raise ApiError(error_codes.BAD_REQUEST, what)
        handler = self.handlers.get(kind)
        if handler is None:
            *others, last = self.handlers
            names = f"{', '.join(map(str, others))} or {last}"
            raise field_error("$.type", f"must be {names}")
        return handler

    def _get_principal(self) -> Principal:
        """Return the authenticated principal. Raises ApiError if its credential has expired."""
        principal = self.principal
        assert principal is not None  # noqa: S101 - other handlers than `connect` run after authentication
        if principal.expires_ms is not None and principal.has_expired(self.auth_gate.clock.wall_ms()):
            raise ApiError(error_codes.AUTH_FAILED, "the token has expired")
        return principal

    # --- writes

    def _check_in_flight(self, count: int) -> None:
        """Raise ApiError if this many further writes would exceed the in-flight limit."""
        in_flight, limit = self.in_flight_count, self.auth_gate.limits.events_in_flight_max
        if in_flight and in_flight + count > limit:
            message = f"{in_flight} {self.write_noun} of this connection are unanswered; at most {limit} may be"
            raise ApiError(error_codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS)

    def _submit_write(self, pending: PendingWrite, submit: Callable[[], Any], traceparent: str = "") -> None:
        """Submit a write to the log, which settles it immediately or later. With tracing, it continues the client's
        trace."""
        tracer = self.auth_gate.tracer
        try:
            if tracer is None:
                outcome = submit()
            else:
                attributes = {"oncelog.api": self.api, "network.protocol.name": "websocket"}
                span = tracer.start(f"{self.api} write", {"traceparent": traceparent}, attributes)
                self._write_spans[pending] = span
                with span.activate():
                    outcome = submit()
        except OncelogError as error:
            self.fail_undecided(pending, to_api_error(error))
            return
        if outcome is not None:
            self.settle(pending, outcome)

    def fail_undecided(self, pending: PendingWrite, error: ApiError) -> None:
        """Answer a write that has no verdict."""
        if self._write_spans:
            self._end_span(pending, error.code)
        self.fail_write(pending, error)

    def _end_span(self, pending: PendingWrite, error_code: str = "") -> None:
        span = self._write_spans.pop(pending, None)
        if span is not None:
            span.end(error_code, is_fault=error_code == error_codes.SERVER_ERROR)

    def settle(self, pending: PendingWrite, outcome: Any) -> None:
        """Answer a write whose outcome is known. Never raises: the committer calls it for many sessions."""
        if self._write_spans:
            self._end_span(pending)
        try:
            self._send_outcome(pending, outcome)
        except Exception:
            logger.exception("an answer could not be written", extra=self._describe())
            self.fail_write(pending, ApiError(error_codes.SERVER_ERROR, "internal server error; send it again"))

    def _count_request(self, outcome: str) -> None:
        self.auth_gate.counts.requests[self.api, self.transport_name, outcome] += 1

    # --- the end

    async def wait_for_replies(self) -> None:
        """Wait until the replies to all accepted requests have been handed to the connection."""
        await self.send_queue.drain()

    def renew(self, principal: Principal | None) -> None:
        """Apply the current rights. Closes the connection if its credential is invalid or its rights do not suffice."""
        if principal is None or not self._may_continue(principal):
            self._end_credential(credential_ended_error())
        elif principal != self.principal:  # each look-up of an API key returns a new object, equal in most cases
            self._set_principal(principal)
            self._apply_rights()

    def _set_principal(self, principal: Principal) -> None:
        """Set the authenticated principal, and start a new cache for its rights."""
        self.principal = principal
        self._may_write = lru_cache(maxsize=CHECKED_NAMES_MAX)(principal.grants.may_write)

    def refuse_silence(self) -> None:
        """Close a connection whose first message did not arrive in time."""
        self.close(WSCloseCode.POLICY_VIOLATION, "no connect message arrived in time")

    def close(self, code: int, reason: str) -> None:
        """Close the connection, after writing the queued frames that can be written now."""
        if self._is_closing:
            return
        self._is_refusing = self._is_closing = True
        self._stop_delivery()
        self.send_queue.flush()
        self._release()
        self.transport.close(code, reason)

    def on_disconnect(self) -> None:
        """Release the session once its connection has been closed."""
        self._is_refusing = self._is_closing = True
        self._stop_delivery()
        self._release()

    def abort(self) -> None:
        """Abort the connection. The client can read the missing records from the log, after its cursor."""
        self.on_disconnect()
        self.transport.abort()

    def _close_slow(self) -> None:
        """Close the connection of a client that reads more slowly than the server sends (CO-31)."""
        self.abort()

    def _release(self) -> None:
        """Release the queues. The session writes no frames afterwards."""
        self.send_queue.close()
