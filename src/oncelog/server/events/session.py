"""One connection of the Events API, without its socket: decodes frames and sends replies.

The subscriber reads pages and broadcasts, the outbox holds unwritten frames, and the reply queue keeps replies in the
order of their requests. Only the pages of an open sync cycle overtake results, which wait for its end (EV-13).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Mode, Submission, Verdict
from oncelog.errors import OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import ApiError, encode_error, shutdown_error, to_api_error
from oncelog.server.events import codec
from oncelog.server.events.codec import RejectedItem
from oncelog.server.events.decode import BadMessageError, Envelope, Submit
from oncelog.server.events.dialect import Dialect
from oncelog.server.events.hub import PendingReply, to_reply_key
from oncelog.server.events.insieme_dialect import detect_dialect
from oncelog.server.events.service import EventsService, find_highest_position, merge_results, select_submissions
from oncelog.server.events.subscriber import Subscriber, SubscriptionMode
from oncelog.server.frame_rate_limiter import FrameRateLimiter
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.reply_queue import CloseReason, ReplyQueue
from oncelog.server.send_queue import SendQueue, SessionTransport
from oncelog.server.websocket_frames import CloseCode

logger: Final = logging.getLogger("oncelog.doors")

BUSY_RETRY_AFTER_MS: Final = 100


_CLOSE_CODES: Final = {error_codes.SERVER_ERROR: CloseCode.SERVER_ERROR}


class _PendingSubmit(PendingReply):
    """An answer to `submit_events`. It is a `VerdictSink` of the committer's, which tells it its verdicts."""

    __slots__ = ("ids", "items", "mode", "msg_id", "session")

    def __init__(
        self,
        session: "EventsSession",
        msg_id: bytes,
        ids: list[str],
        items: list[Submission | RejectedItem],
        mode: Mode,
    ) -> None:
        PendingReply.__init__(self, session.subscriber)
        self.session = session
        self.msg_id = msg_id
        self.ids = ids
        self.items = items
        self.mode = mode

    def on_written(self) -> None:
        self.session.events_in_flight -= len(self.ids)
        self.queue.remove_written(self)

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict | Sequence[Verdict], /) -> None:
        self.session.on_verdict(self, result)

    def set_exception(self, exception: Exception, /) -> None:
        self.session.on_failure(self, to_api_error(exception))


class EventsSession:
    """One connection. `receive` takes its frames one after the other; `closed` is to be called when it is gone."""

    def __init__(self, service: EventsService, transport: SessionTransport, caller: Caller) -> None:
        self.service = service
        self.transport = transport
        self.caller = caller
        self.address = caller.address
        self.principal: Principal | None = None
        self.client_id = ""
        self.dialect: Dialect = service.native
        """That of the first frame that told one."""
        self._has_dialect = False
        self.events_in_flight = 0
        self.send_queue = SendQueue(transport, service.limits, service.counts, self._abort, self._describe)
        self.replies = ReplyQueue(self.send_queue, self._schedule_close)
        self.subscriber = Subscriber(
            service, self.replies, self.send_queue, self.fail, self._abort, self._close_untracked
        )
        self._writable: set[tuple[str, ...]] = set()
        """Partitions of which the principal's grants have been asked."""
        self._rate_limiter = FrameRateLimiter(service.limits, service.clock)
        self._is_refusing = False
        """An error that closes the connection waits for the replies before it: no more frames are read."""
        self._is_closing = False
        self._close_timer: asyncio.TimerHandle | None = None

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """A text frame. What it gives is to be awaited before the next."""
        if self._is_refusing:
            return None
        if self.replies.count >= self.service.limits.outbox_frames_max:
            return self._receive_when_empty(data)
        self.service.counts.frames_received += 1
        refused = self._rate_limiter.find_violation(len(data), is_authenticated=self.principal is not None)
        if refused is not None:
            self._send_error(refused, self._find_msg_id(data))
            return None
        if len(data) > LONG_FRAME_BYTES:
            return self._receive_in_thread(data)
        return self._process(lambda: self._decode(data))

    async def _receive_when_empty(self, data: bytes) -> None:
        """Read nothing more while as many replies wait as frames may: most are short errors, but they take memory."""
        await self.replies.wait_empty()
        receive_task = self.receive(data)
        if receive_task is not None:
            await receive_task

    def _find_msg_id(self, data: bytes) -> bytes:
        """Return the `msg_id` of a frame that is refused unread. It ends the connection, so this is done once."""
        if self.principal is None or len(data) > LONG_FRAME_BYTES:
            return b""
        try:
            return self.dialect.decode_message(data).msg_id
        except BadMessageError as error:
            return error.msg_id

    async def _receive_in_thread(self, data: bytes) -> None:
        """Others must not wait while it is read: that may take seconds for what somebody has made for it."""
        decode = await asyncio.to_thread(_capture_outcome, partial(self._decode, data))
        receive_task = None if self._is_refusing else self._process(decode)
        if receive_task is not None:
            await receive_task

    def _decode(self, data: bytes) -> "tuple[bytes, Submit] | Envelope":
        """A message, or at once the submissions of one. Raises BadMessageError.

        Touches nothing of a session that is connected: then it may be called in a thread.
        """
        principal = self.principal
        if principal is None:
            return self._decode_first(data)
        return self.dialect.decode(data, principal.actor, self.client_id, self.service.limits.request_events_max)

    def _decode_first(self, data: bytes) -> Envelope:
        dialect = None if self._has_dialect else detect_dialect(data, self.service.native, self.service.insieme)
        if dialect is not None:
            self._has_dialect = True
            self._use_dialect(dialect)
        return self.dialect.decode_message(data)

    def _use_dialect(self, dialect: Dialect) -> None:
        self.dialect = self.subscriber.dialect = dialect

    def _process(self, decode: "Callable[[], tuple[bytes, Submit] | Envelope]") -> Awaitable[None] | None:
        msg_id = b""
        try:
            found = decode()
            if isinstance(found, Envelope):
                msg_id = found.msg_id
                return self._handle(found)
            msg_id, submit = found
            self._submit(submit, msg_id)
        except BadMessageError as error:
            self._send_error(error, error.msg_id)
        except ApiError as error:
            self._send_error(error, msg_id)
        return None

    def receive_binary(self) -> None:
        """A binary frame: there are none."""
        if self._is_refusing:
            return
        self.service.counts.frames_received += 1
        self._send_error(ApiError(error_codes.BAD_REQUEST, "frames must be text, in JSON"), b"")

    async def receive_oversize(self) -> None:
        """Count a frame beyond `frame_bytes_max`, which is not read, and wait (bounded) for the replies before it."""
        if self._is_refusing:
            return
        self._is_refusing = True
        self.service.counts.frames_received += 1
        self.service.counts.requests["events", "websocket", error_codes.TOO_LARGE] += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(self.service.limits.close_wait_ms / 1000):
                await self.replies.wait_empty()

    def _handle(self, message: Envelope) -> Awaitable[None] | None:
        if message.type == "connect":
            if self.principal is not None:
                raise ApiError(error_codes.BAD_REQUEST, "already connected")
            self._connect(message)
        elif self.principal is None:
            raise ApiError(error_codes.BAD_REQUEST, "the first message must be connect")
        elif message.type == "sync":
            return self._sync(message)
        else:
            raise ApiError(error_codes.BAD_REQUEST, "$.type: must be connect, submit_events or sync", field="$.type")
        return None

    def _connect(self, message: Envelope) -> None:
        connect = self.dialect.decode_connect(message.payload)
        principal = self.service.auth_gate.authenticate(connect.token, self.caller)
        client_id = self.service.auth_gate.get_event_client(principal, connect.client_id)
        if client_id is None:
            raise self.service.auth_gate.reject_client(self.caller, connect.client_id)
        if connect.project is not None:
            self.service.check_project_access(connect.project.partition, principal)
        self.principal, self.client_id = principal, client_id
        self._use_dialect(self.dialect.bind(connect))
        payload = self.dialect.encode_connected(
            client_id, principal.actor, self.service.hub.position, self.service.log.epoch
        )
        self._send_reply(b"connected", payload, message.msg_id)

    def _get_principal(self) -> Principal:
        """Who this is, as of now. Raises ApiError if that has expired."""
        principal = self.principal
        if principal is None or (
            principal.expires_ms is not None and principal.has_expired(self.service.clock.wall_ms())
        ):
            raise ApiError(error_codes.AUTH_FAILED, "the token has expired")
        return principal

    # --- sync

    async def _sync(self, message: Envelope) -> None:
        try:
            sync = self.dialect.decode_sync(message.payload)

            def check_allowed() -> None:
                self.service.check_readable(sync.partitions, self._get_principal())

            check_allowed()
            self.service.check_epoch(sync.epoch)
            if self.replies.count and not self.subscriber.is_paging:
                # A page must not overtake the results of earlier requests. Those of an open cycle must: the results
                # wait for its end.
                await self.replies.wait_empty()
                if self._is_refusing:
                    return
                check_allowed()
            await self.subscriber.send_page(sync, message.msg_id, check_allowed)
            self.service.counts.requests["events", "websocket", "ok"] += 1
        except ApiError as error:
            self._send_error(error, message.msg_id)

    async def wait_for_replies(self) -> None:
        """As `WebSocketSession` says. During a sync cycle results wait for the client's next request."""
        if not self.subscriber.is_paging:
            await self.replies.wait_empty()
        await self.send_queue.drain()

    # --- submit

    def _submit(self, submit: Submit, msg_id: bytes) -> None:
        service = self.service
        principal = self._get_principal()
        if service.is_closing:
            raise shutdown_error()
        in_flight, events_max = self.events_in_flight, service.limits.events_in_flight_max
        if in_flight and in_flight + len(submit.ids) > events_max:
            message = f"{in_flight} events of this connection wait for their answer; at most {events_max} may"
            raise ApiError(error_codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS)
        items = service.authorize(submit, principal, self._writable)
        pending = _PendingSubmit(self, msg_id, submit.ids, items, submit.mode)
        self.events_in_flight += len(items)
        new = select_submissions(items, submit.mode)
        pending.expected_keys = [(to_reply_key(item), item.fingerprint) for item in new]
        service.hub.expect_reply(pending)
        outcome: Verdict | Sequence[Verdict] | None
        try:
            if len(new) == 1:
                outcome = service.log.submit_nowait(new[0], pending)
            else:
                outcome = (
                    service.log.submit_many_nowait(new, pending, submit.mode, is_admitted_whole=True) if new else ()
                )
        except OncelogError as error:
            self.on_failure(pending, to_api_error(error))
            return
        if outcome is not None:
            self.on_verdict(pending, outcome)

    def on_verdict(self, pending: "_PendingSubmit", outcome: Verdict | Sequence[Verdict]) -> None:
        """What became of a request. Never raises: the committer tells it, and has others to tell."""
        try:
            self._send_outcome(pending, outcome)
        except Exception:
            logger.exception("an answer could not be written", extra=self._describe())
            self.on_failure(pending, ApiError(error_codes.SERVER_ERROR, "the server is at fault; send it again"))

    def _send_outcome(self, pending: _PendingSubmit, outcome: Verdict | Sequence[Verdict]) -> None:
        service = self.service
        if type(outcome) is Committed and len(pending.items) == 1:  # what most requests of a busy server are
            receipt = outcome.receipt
            service.counts.events_committed += 1
            pending.frame = self.dialect.encode_committed(
                pending.ids[0], receipt, service.clock.wall_ms(), pending.msg_id
            )
            pending.position = receipt.position
        else:
            verdicts = outcome if isinstance(outcome, list | tuple) else (outcome,)
            results = merge_results(pending.items, verdicts, pending.mode)
            error = codec.find_request_error(results)
            if error is not None:
                self.on_failure(pending, error)
                return
            service.count_results(results)
            payload = self.dialect.encode_results(pending.ids, results, service.clock.wall_ms())
            pending.frame = self._encode_frame(b"submit_events_result", payload, pending.msg_id)
            pending.position = find_highest_position(results)
        service.counts.requests["events", "websocket", "ok"] += 1
        service.hub.settle_reply(pending)

    def on_failure(self, pending: _PendingSubmit, error: ApiError) -> None:
        """Nobody can tell what became of it, or nothing was decided."""
        self.service.counts.requests["events", "websocket", error.code] += 1
        error = _to_busy_error(error)
        translated = self.dialect.translate_error(error)
        pending.frame = self._encode_frame(b"error", encode_error(translated), pending.msg_id)
        pending.position = 0
        pending.close_reason = _find_close_reason(error, translated)
        self.service.hub.settle_reply(pending)
        self._close_after_error(pending.close_reason)

    # --- frames out

    def _encode_frame(self, kind: bytes, payload: bytes, msg_id: bytes = b"") -> bytes:
        return self.dialect.encode_frame(kind, (payload,), self.service.clock.wall_ms(), msg_id)

    def _send_reply(
        self, kind: bytes, payload: bytes, msg_id: bytes = b"", close_reason: CloseReason | None = None
    ) -> None:
        self.replies.send(self._encode_frame(kind, payload, msg_id), close_reason)
        self.service.hub.schedule_flush(self.subscriber)

    def _send_error(self, error: ApiError, msg_id: bytes) -> None:
        if self._is_refusing:
            return
        self.service.counts.requests["events", "websocket", error.code] += 1
        translated = self.dialect.translate_error(error)
        closing = _find_close_reason(error, translated)
        self._send_reply(b"error", encode_error(translated), msg_id, closing)
        self._close_after_error(closing)

    def _close_after_error(self, close_reason: CloseReason | None) -> None:
        """End the connection after an error that does so: when it is written, behind the replies before it."""
        if close_reason is None or self._is_closing:
            return
        self._is_refusing = True
        if self.replies.count <= 1:
            self.close(*close_reason)
        elif self._close_timer is None:
            wait_s = self.service.limits.close_wait_ms / 1000
            self._close_timer = asyncio.get_running_loop().call_later(wait_s, self.close, *close_reason)

    def _schedule_close(self, close_reason: CloseReason) -> None:
        """The error that closes the connection is being written. `finish` must not write in the middle of that."""
        if not self._is_closing:
            asyncio.get_running_loop().call_soon(self.close, *close_reason)

    # --- the end

    def renew(self, principal: Principal | None) -> None:
        """The rights of now. Ends the connection if there are none any more, or its scope is not among them."""
        if principal is None or not all(map(principal.grants.may_read, self.subscriber.partitions)):
            error = ApiError(error_codes.AUTH_FAILED, "the token has expired, or its rights have changed")
            if self.subscriber.partitions:
                # Results in flight would need the broadcasts before them, which it may not read any more.
                self._fail_now(error)
            else:
                self._send_error(error, b"")
        else:
            self.principal = principal
            self._writable.clear()

    def fail(self, error: Exception) -> None:
        """Something that this connection cannot go on with."""
        self._fail_now(to_api_error(error))

    def _fail_now(self, error: ApiError) -> None:
        """End the connection with an error that waits for no reply: missing replies may never be due."""
        if self._is_closing:
            return
        translated = self._enqueue_error(error)
        self.close(*(_find_close_reason(error, translated) or (CloseCode.POLICY, translated.code)))

    def _enqueue_error(self, error: ApiError) -> ApiError:
        """Count an error, and put it behind the frames that are in the outbox. Return it in terms of the dialect."""
        self.service.counts.requests["events", "websocket", error.code] += 1
        translated = self.dialect.translate_error(error)
        self.send_queue.put(self._encode_frame(b"error", encode_error(translated)))
        return translated

    def _close_untracked(self) -> None:
        """Close a connection whose own events are not all known any more (`own.RANGES_MAX`).

        Its client waits for a result. The npm package `insieme` reconnects after the error; it ignores a close.
        """
        logger.warning("a sync cycle was left open for too long; the connection is closed", extra=self._describe())
        reason = "the sync cycle was left open for too long; sync again"
        self._enqueue_error(ApiError(error_codes.SERVER_ERROR, reason))
        self.close(CloseCode.POLICY, reason)

    def close(self, code: int, reason: str) -> None:
        """Ends the connection, after what is in the outbox and can be written. Then nothing more is."""
        if self._is_closing:
            return
        self._is_refusing = self._is_closing = True
        self.subscriber.stop()
        self.send_queue.flush()
        self._close_queues()
        self.transport.close(code, reason)

    def on_disconnect(self) -> None:
        """The connection is gone."""
        self._is_refusing = self._is_closing = True
        self.subscriber.stop()
        self._close_queues()

    def _close_queues(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.send_queue.close()
        self.replies.close()

    def _abort(self) -> None:
        """There is no room for a word of farewell either. What it has not read is in the store, behind its cursor."""
        self.on_disconnect()
        self.transport.abort()

    def _describe(self) -> Mapping[str, JsonValue]:
        actor = None if self.principal is None else self.principal.actor
        return {"address": self.address, "client_id": self.client_id, "actor": actor}

    @property
    def is_live(self) -> bool:
        """Whether what others commit is broadcast to it."""
        return self.subscriber.mode is SubscriptionMode.LIVE


def _capture_outcome(
    decode: "Callable[[], tuple[bytes, Submit] | Envelope]",
) -> "Callable[[], tuple[bytes, Submit] | Envelope]":
    """What reading gave or raised, to be had later: so that it is raised where it is handled."""
    try:
        found = decode()
    except ApiError as error:
        raised = error

        def raise_error() -> "tuple[bytes, Submit] | Envelope":
            raise raised

        return raise_error
    return lambda: found


def _find_close_reason(error: ApiError, translated: ApiError) -> CloseReason | None:
    """Return how an error closes the connection, by itself or in the words of its dialect; None if it does not."""
    if error.code in codec.CLOSING_CODES or translated.code in codec.CLOSING_CODES:
        return _CLOSE_CODES.get(translated.code, CloseCode.POLICY), translated.code
    return None


def _to_busy_error(error: ApiError) -> ApiError:
    """A rate ends no connection: the client sends the request again on it, after a while (EV-8)."""
    return (
        ApiError(error_codes.SERVER_BUSY, error.message, **error.details)
        if error.code == error_codes.RATE_LIMITED
        else error
    )
