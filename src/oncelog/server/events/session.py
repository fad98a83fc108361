"""WebSocket sessions of the Events API, which handle `connect`, `submit_events` and `sync` messages.

The subscriber delivers pages and broadcasts, the send queue holds unwritten frames, and the reply queue keeps replies
in the order of their requests. Only the pages of an open sync cycle overtake results, which wait until the cycle is
complete (EV-13).
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from aiohttp import WSCloseCode

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Verdict
from oncelog.server import logger
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import ApiError, MalformedMessageError, encode_error, to_api_error
from oncelog.server.events.dialect import (
    CLOSING_CODES,
    Dialect,
    Envelope,
    Submit,
    find_highest_position,
    find_request_error,
    merge_results,
    select_submissions,
)
from oncelog.server.events.hub import PendingReply, to_reply_key
from oncelog.server.events.insieme_dialect import detect_dialect
from oncelog.server.events.service import EventsService
from oncelog.server.events.subscriber import Subscriber
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.reply_queue import CloseReason, ReplyQueue
from oncelog.server.send_queue import SessionTransport
from oncelog.server.websocket_session import PendingWrite, WebSocketSession

SubmitMessage = tuple[bytes, Submit]
"""The `msg_id` and content of a `submit_events`, which the dialect decodes in one step."""


class _PendingSubmit(PendingReply, PendingWrite):
    """An unanswered `submit_events`."""

    __slots__ = ("msg_id", "session", "submit")

    def __init__(self, session: "EventsSession", msg_id: bytes, submit: Submit) -> None:
        PendingReply.__init__(self, session.subscriber)
        self.session = session
        self.msg_id = msg_id
        self.submit = submit

    def on_written(self) -> None:
        self.session.in_flight_count -= len(self.submit.ids)
        self.queue.remove_written(self)


class EventsSession(WebSocketSession["SubmitMessage | Envelope", bytes]):
    """One Events API connection. A reply repeats the `msg_id` of its request."""

    api: ClassVar = "events"
    connect_kind: ClassVar = "connect"
    frame_noun: ClassVar = "message"
    write_noun: ClassVar = "events"

    def __init__(self, service: EventsService, transport: SessionTransport, caller: Caller) -> None:
        super().__init__(service.auth_gate, transport, caller)
        self.service = service
        self.client_id = ""
        self.dialect: Dialect = service.native
        """The dialect of the first frame that reveals one."""
        self._has_dialect = False
        self.replies = ReplyQueue(self.send_queue, self._schedule_close)
        self.subscriber = Subscriber(
            service, self.replies, self.send_queue, self.fail, self.abort, self._close_untracked
        )
        self._close_timer: asyncio.TimerHandle | None = None

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """See the base class. Stops reading while `outbox_frames_max` replies are queued, usually short errors."""
        if self.replies.count >= self.service.limits.outbox_frames_max and not self._is_refusing:
            return self._receive_when_empty(data)
        return super().receive(data)

    async def _receive_when_empty(self, data: bytes) -> None:
        await self.replies.wait_empty()
        waiting = self.receive(data)
        if waiting is not None:
            await waiting

    def _find_reply_to(self, data: bytes) -> bytes:
        """Return the `msg_id` of a frame above a limit. Such a frame closes the connection, so this runs once."""
        if self.principal is None or len(data) > LONG_FRAME_BYTES:
            return b""
        try:
            return self.dialect.decode_message(data).msg_id
        except MalformedMessageError as error:
            return bytes(error.reply_to)

    def _decode(self, data: bytes) -> SubmitMessage | Envelope:
        """See the base class. After `connect` it changes no state, so it may run in a worker thread."""
        principal = self.principal
        if principal is None:
            return self._decode_first(data)
        return self.dialect.decode(data, principal.actor, self.client_id, self.service.limits.request_events_max)

    def _decode_first(self, data: bytes) -> Envelope:
        dialect = None if self._has_dialect else detect_dialect(data, self.service.native, self.service.insieme)
        if dialect is not None:
            self._has_dialect = True
            self.dialect = self.subscriber.dialect = dialect
        return self.dialect.decode_message(data)

    def _get_kind(self, message: SubmitMessage | Envelope) -> str:
        return message.type if isinstance(message, Envelope) else "submit_events"

    def _get_reply_to(self, message: SubmitMessage | Envelope) -> bytes:
        return message.msg_id if isinstance(message, Envelope) else message[0]

    async def _finish_replies(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.service.limits.close_wait_ms / 1000):
                await self.replies.wait_empty()

    # --- messages

    def _connect(self, message: Envelope) -> None:
        connect = self.dialect.connect.decode(message.payload, "$.payload")
        principal = self.auth_gate.authenticate(connect.token, self.caller)
        client_id = self.auth_gate.get_event_client(principal, connect.client_id or None)
        if client_id is None:
            raise self.auth_gate.reject_client(self.caller, connect.client_id)
        if connect.project is not None:
            self.service.check_project_access(connect.project.partition, principal)
        self._set_principal(principal)
        self.client_id = client_id
        self.dialect = self.subscriber.dialect = self.dialect.bind(connect)
        payload = self.dialect.encode_connected(
            client_id, principal.actor, self.service.hub.position, self.service.log.epoch
        )
        self._send_reply(self._encode_frame(b"connected", payload, message.msg_id))

    async def _sync(self, message: Envelope) -> None:
        sync = self.dialect.decode_sync(message.payload)

        def check_allowed() -> None:
            self.service.check_readable(sync.partitions, self._get_principal())

        check_allowed()
        self.service.check_epoch(sync.epoch)
        if self.replies.count and not self.subscriber.is_paging:
            # A page must not overtake the results of earlier requests. Only the pages of an open cycle do, because
            # results wait until the cycle is complete.
            await self.replies.wait_empty()
            if self._is_refusing:
                return
            check_allowed()
        await self.subscriber.send_page(sync, message.msg_id, check_allowed)
        self._count_request("ok")

    def _submit(self, message: SubmitMessage) -> None:
        msg_id, submit = message
        service = self.service
        self._get_principal()
        self.auth_gate.check_open()
        self._check_in_flight(len(submit.ids))
        allowed = service.authorize(submit, self._may_write)
        pending = _PendingSubmit(self, msg_id, allowed)
        self.in_flight_count += len(allowed.ids)
        new = select_submissions(allowed)
        pending.expected_keys = [(to_reply_key(item), item.fingerprint) for item in new]
        service.hub.expect_reply(pending)
        if not new:
            self.settle(pending, ())
        elif len(new) == 1:
            self._submit_write(pending, partial(service.log.submit_nowait, new[0], pending), submit.traceparent)
        else:
            submit_all = partial(service.log.submit_many_nowait, new, pending, submit.mode, is_admitted_whole=True)
            self._submit_write(pending, submit_all, submit.traceparent)

    handlers: ClassVar = {"connect": _connect, "submit_events": _submit, "sync": _sync}

    # --- answers to writes

    def _send_outcome(self, pending: _PendingSubmit, outcome: Verdict | Sequence[Verdict]) -> None:
        service = self.service
        if type(outcome) is Committed and len(pending.submit.items) == 1:  # most requests on a busy server
            receipt = outcome.receipt
            service.counts.events_committed += 1
            pending.frame = self.dialect.encode_committed(
                pending.submit.ids[0], receipt, service.clock.wall_ms(), pending.msg_id
            )
            pending.position = receipt.position
        else:
            verdicts = outcome if isinstance(outcome, list | tuple) else (outcome,)
            results = merge_results(pending.submit, verdicts)
            error = find_request_error(results)
            if error is not None:
                self.fail_write(pending, error)
                return
            service.count_results(results)
            payload = self.dialect.encode_results(pending.submit.ids, results, service.clock.wall_ms())
            pending.frame = self._encode_frame(b"submit_events_result", payload, pending.msg_id)
            pending.position = find_highest_position(results)
        self._count_request("ok")
        service.hub.settle_reply(pending)

    def fail_write(self, pending: _PendingSubmit, error: ApiError) -> None:
        """See the base class."""
        self._count_request(error.code)
        if error.code == error_codes.RATE_LIMITED:
            # RATE_LIMITED would close the connection. After a write above the rate, the client should only retry
            # (EV-8).
            error = ApiError(error_codes.SERVER_BUSY, error.message, **error.details)
        pending.frame, pending.close_reason = self._encode_error(error, pending.msg_id)
        pending.position = 0
        self.service.hub.settle_reply(pending)
        self._close_after_error(pending.close_reason)

    # --- frames out

    def _encode_frame(self, kind: bytes, payload: bytes, msg_id: bytes = b"") -> bytes:
        return self.dialect.encode_frame(kind, (payload,), self.service.clock.wall_ms(), msg_id)

    def _encode_error(self, error: ApiError, msg_id: bytes = b"") -> tuple[bytes, CloseReason | None]:
        """Return the frame of an error in the dialect, and the close reason if the error closes the connection."""
        translated = self.dialect.translate_error(error)
        code, close_reason = translated.code, None
        if not CLOSING_CODES.isdisjoint((error.code, code)):
            close_reason = (
                WSCloseCode.INTERNAL_ERROR if code == error_codes.SERVER_ERROR else WSCloseCode.POLICY_VIOLATION,
                code,
            )
        return self._encode_frame(b"error", encode_error(translated), msg_id), close_reason

    def _send_reply(self, frame: bytes, close_reason: CloseReason | None = None) -> None:
        self.replies.send(frame, close_reason)
        self.service.hub.coalescer.schedule(self.subscriber)

    def _send_error(self, error: ApiError, reply_to: bytes | None = None) -> None:
        if self._is_refusing:
            return
        self._count_request(error.code)
        frame, close_reason = self._encode_error(error, reply_to or b"")
        self._send_reply(frame, close_reason)
        self._close_after_error(close_reason)

    def _close_after_error(self, close_reason: CloseReason | None) -> None:
        """If an error has a close reason, close the connection once all replies up to the error are written."""
        if close_reason is None or self._is_closing:
            return
        self._is_refusing = True
        if self.replies.count <= 1:
            self.close(*close_reason)
        elif self._close_timer is None:
            wait_s = self.service.limits.close_wait_ms / 1000
            self._close_timer = asyncio.get_running_loop().call_later(wait_s, self.close, *close_reason)

    def _schedule_close(self, close_reason: CloseReason) -> None:
        """Close the connection in the next turn of the event loop, because both `close` and the caller flush."""
        if not self._is_closing:
            asyncio.get_running_loop().call_soon(self.close, *close_reason)

    # --- the end

    async def wait_for_replies(self) -> None:
        """See the base class. During a sync cycle, results wait for the client's next request."""
        if not self.subscriber.is_paging:
            await self.replies.wait_empty()
        await self.send_queue.drain()

    def _may_continue(self, principal: Principal) -> bool:
        return all(map(principal.grants.may_read, self.subscriber.partitions))

    def _end_credential(self, error: ApiError) -> None:
        if self.subscriber.partitions:
            # Results in flight would have to follow broadcasts that the client may no longer read.
            self._fail_now(error)
        else:
            self._send_error(error)

    def fail(self, error: Exception) -> None:
        """See the base class."""
        self._fail_now(to_api_error(error))

    def _fail_now(self, error: ApiError, close_reason: CloseReason | None = None) -> None:
        """Close the connection with an error that does not wait for replies, because they may never be due."""
        if self._is_closing:
            return
        self._count_request(error.code)
        frame, own_reason = self._encode_error(error)
        self.send_queue.put(frame)
        self.close(
            *(close_reason or own_reason or (WSCloseCode.POLICY_VIOLATION, self.dialect.translate_error(error).code))
        )

    def _close_untracked(self) -> None:
        """Close a connection after `OwnPositions` has dropped positions that a catch-up needs (`RANGES_MAX`).

        The client is waiting for a result. The npm package `insieme` reconnects after an error but ignores a close.
        """
        logger.warning("a sync cycle was left open for too long; the connection is closed", extra=self._describe())
        reason = "the sync cycle was left open for too long; sync again"
        self._fail_now(ApiError(error_codes.SERVER_ERROR, reason), (WSCloseCode.POLICY_VIOLATION, reason))

    def _stop_delivery(self) -> None:
        self.subscriber.stop()

    def _release(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
        super()._release()
        self.replies.close()

    def _describe(self) -> Mapping[str, JsonValue]:
        return {**super()._describe(), "client_id": self.client_id}
