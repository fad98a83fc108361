"""One connection of the Chat API, without its socket: decodes frames and sends replies."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Replayed, Verdict
from oncelog.errors import OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.chat import codec
from oncelog.server.chat.ack_queue import BUSY_RETRY_AFTER_MS, AckQueue, PendingAck
from oncelog.server.chat.decode import (
    Ack,
    BadFrameError,
    Connect,
    Frame,
    Ping,
    Send,
    SyncRequest,
    decode_fast,
    decode_frame,
)
from oncelog.server.chat.hub import ChatHub
from oncelog.server.chat.service import ChatService, refusal_error
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import UNREADABLE, ApiError, to_api_error
from oncelog.server.frame_rate_limiter import FrameRateLimiter
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.send_queue import SendQueue, SessionTransport
from oncelog.server.websocket_frames import CloseCode

logger: Final = logging.getLogger("oncelog.doors")

RECONNECT_DELAY_MS: Final = 1000
"""What a client is told that is sent away and may come back."""
KNOWN_CHATS_MAX: Final = 1000
"""Of one connection, so that grants need not be asked for each message."""


class _PendingSend:
    """An answer to `send_message`. It is a `VerdictSink` of the committer's, which tells it its verdict."""

    __slots__ = ("send", "session")

    def __init__(self, session: "ChatSession", send: Send) -> None:
        self.session = session
        self.send = send

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict, /) -> None:
        self.session.on_verdict(self.send, result)

    def set_exception(self, exception: Exception, /) -> None:
        self.session.on_failure(self.send, to_api_error(exception))


class ChatSession:
    """One connection. `receive` takes its frames one after the other; `closed` is to be called when it is gone."""

    def __init__(
        self, service: ChatService, hub: ChatHub, acks: AckQueue, transport: SessionTransport, caller: Caller
    ) -> None:
        self.service = service
        self.hub = hub
        self.acks = acks
        self.transport = transport
        self.caller = caller
        self.address = caller.address
        self.principal: Principal | None = None
        self.device_id = ""
        self.send_queue = SendQueue(transport, service.limits, service.counts, self._close_slow, self._describe)
        self._is_live = False
        self._in_flight_count = 0
        self._writable: set[str] = set()
        """Chats of which the principal's grants have been asked."""
        self._rate_limiter = FrameRateLimiter(service.limits, service.clock)
        self._is_closing = False

    @property
    def user_id(self) -> str:
        """As `ChatReader` says."""
        return "" if self.principal is None else self.principal.actor

    def may_follow(self, scope: str) -> bool:
        """As `ChatReader` says."""
        return self._is_live and self.principal is not None and self.principal.grants.may_read(scope)

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """A text frame. What it gives is to be awaited before the next."""
        if self._is_closing:
            return None
        self.service.counts.frames_received += 1
        refused = self._rate_limiter.find_violation(len(data), is_authenticated=self.principal is not None)
        if refused is not None:
            self._send_error(refused)
            return None
        if len(data) > LONG_FRAME_BYTES:
            return self._receive_in_thread(data)
        return self._process(partial(self._decode, data))

    async def _receive_in_thread(self, data: bytes) -> None:
        """Others must not wait while it is read."""
        try:
            found = await asyncio.to_thread(self._decode, data)
        except BadFrameError as error:
            self._send_error(error, error.request_ids)
            return
        receive_task = None if self._is_closing else self._process(lambda: found)
        if receive_task is not None:
            await receive_task

    def _decode(self, data: bytes) -> Frame:
        bytes_max = self.service.limits.message_bytes_max
        return decode_fast(data, bytes_max) or decode_frame(data, bytes_max)

    def _process(self, decode: Callable[[], Frame]) -> Awaitable[None] | None:
        request_ids: Mapping[str, str] = {}
        try:
            found = decode()
            if isinstance(found, Send):
                self._send(found)
                return None
            request_ids = _get_request_ids(found)
            return self._handle(found)
        except BadFrameError as error:
            self._send_error(error, error.request_ids)
        except ApiError as error:
            self._send_error(error, request_ids)
        return None

    def receive_binary(self) -> None:
        """A binary frame: there are none."""
        if not self._is_closing:
            self.service.counts.frames_received += 1
            self._send_error(ApiError(error_codes.BAD_REQUEST, "frames must be text, in JSON"))

    async def receive_oversize(self) -> None:
        """As `WebSocketSession` says. Acknowledgements are repeated on another connection: nothing is waited for."""
        if not self._is_closing:
            self.service.counts.frames_received += 1
            self.service.counts.requests["chat", "websocket", error_codes.TOO_LARGE] += 1

    def _handle(self, found: Connect | SyncRequest | Ack | Ping) -> Awaitable[None] | None:
        if isinstance(found, Connect):
            if self.principal is not None:
                raise ApiError(error_codes.BAD_REQUEST, "already connected")
            return self._connect(found)
        principal = self._get_principal()
        if isinstance(found, SyncRequest):
            return self._sync(found)
        if isinstance(found, Ack):
            self._acknowledge(found, principal)
        else:
            self._enqueue(codec.encode_reply("pong", b'"time_ms":%d' % self.service.clock.wall_ms(), found.request_id))
        return None

    def _get_principal(self) -> Principal:
        """Who this is, as of now. Raises ApiError if that has expired."""
        principal = self.principal
        if principal is None:
            raise ApiError(error_codes.BAD_REQUEST, "the first frame must be connect")
        if principal.expires_ms is not None and principal.has_expired(self.service.clock.wall_ms()):
            raise ApiError(error_codes.AUTH_FAILED, "the token has expired")
        return principal

    async def _connect(self, request: Connect) -> None:
        try:
            self.service.check_not_stopping()
            self.principal = self.service.auth_gate.authenticate(request.token, self.caller)
            self.device_id, self._is_live = request.device_id, request.is_live
            if request.is_live:
                await self._join()
        except ApiError as error:
            self._send_error(error, _get_request_ids(request))
            self.close(CloseCode.POLICY, codec.get_code(error))
            return
        service = self.service
        members = codec.encode_connected(self.user_id, service.log.epoch, service.limits.heartbeat_ms)
        self._enqueue(codec.encode_reply("connected", members, request.request_id))
        self._count_request("ok")

    async def _join(self) -> None:
        """Before the client is told that it is connected: what is sent after that reaches it."""
        try:
            await self.hub.join(self)
        except OncelogError as error:
            raise to_api_error(error, UNREADABLE) from error
        if self._is_closing:  # it has gone meanwhile
            self.hub.leave(self)

    async def wait_for_replies(self) -> None:
        """As `WebSocketSession` says."""
        await self.send_queue.drain()

    # --- sync and ack

    async def _sync(self, request: SyncRequest) -> None:
        service = self.service
        try:
            service.check_readable(request.scope, self._get_principal())
            await self.send_queue.drain()
            batch = await service.load_after(request.scope, self._get_principal(), request.after, request.limit)
            # After the membership: whoever is a stranger learns not even whether his epoch is that of the log.
            service.check_epoch(request.epoch)
            service.check_readable(request.scope, self._get_principal())
        except ApiError as error:
            self._send_error(error, _get_request_ids(request))
            return
        members = codec.encode_batch(
            request.chat_id,
            batch.records,
            has_more=batch.has_more,
            following=batch.following,
            newest=batch.newest,
            is_ahead=batch.is_ahead,
        )
        self._enqueue(codec.encode_reply("message_batch", members, request.request_id))
        self._count_request("ok")

    def _acknowledge(self, request: Ack, principal: Principal) -> None:
        self.service.check_not_stopping()
        self.service.check_readable(request.scope, principal)
        self._count_request("ok")
        self.acks.submit(
            request.scope, principal.actor, PendingAck(request.sequence, partial(self._reject_ack, request))
        )

    def _reject_ack(self, request: Ack, error: ApiError) -> None:
        self._send_error(error, _get_request_ids(request))

    # --- send

    def _send(self, send: Send) -> None:
        service = self.service
        try:
            principal = self._get_principal()
            service.check_not_stopping()
            if self._in_flight_count >= service.limits.events_in_flight_max:
                self._raise_busy()
            if send.scope not in self._writable:
                self._check_writable(send.scope, principal)
        except ApiError as error:
            self._send_error(error, _get_request_ids(send))
            return
        self._in_flight_count += 1
        if self._is_live:  # nobody else is sent messages, and where nobody is, no lane is read that would bring it
            self.hub.expect_message(send.scope, send.key, send.body, self)
        try:
            outcome = service.log.submit_nowait(service.to_submission(send, principal), _PendingSend(self, send))
        except OncelogError as error:
            self.on_failure(send, to_api_error(error))
            return
        if outcome is not None:
            self.on_verdict(send, outcome)

    def _raise_busy(self) -> None:
        messages_max = self.service.limits.events_in_flight_max
        message = (
            f"{self._in_flight_count} messages of this connection wait for their answer; at most {messages_max} may"
        )
        raise ApiError(error_codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS)

    def _check_writable(self, scope: str, principal: Principal) -> None:
        self.service.check_writable(scope, principal)
        if len(self._writable) >= KNOWN_CHATS_MAX:
            self._writable.clear()
        self._writable.add(scope)

    def on_verdict(self, send: Send, verdict: Verdict) -> None:
        """What became of a message. Never raises: the committer tells it, and has others to tell."""
        self._in_flight_count -= 1
        try:
            if isinstance(verdict, Committed | Replayed):
                self._send_reply(send, verdict)
            else:
                self._reject_send(send, refusal_error(verdict))
        except Exception:
            logger.exception("an answer could not be written", extra=self._describe())
            self._reject_send(send, ApiError(error_codes.SERVER_ERROR, "the server is at fault; send it again"))

    def _send_reply(self, send: Send, verdict: Committed | Replayed) -> None:
        receipt = verdict.receipt
        assert receipt is not None  # noqa: S101 - a key that is remembered has a place
        self.service.count_verdict(verdict)
        self._count_request("ok")
        is_known = isinstance(verdict, Replayed)
        if is_known:
            self.hub.cancel_expected(send.scope, send.key, self)
        members = codec.encode_sent(
            send.client_message_id,
            send.chat_id,
            receipt,
            duplicate=is_known,
            mismatch=isinstance(verdict, Replayed) and verdict.mismatch,
            erased=isinstance(verdict, Replayed) and verdict.erased,
        )
        self._enqueue(codec.encode_reply("send_message_ack", members, send.request_id))

    def on_failure(self, send: Send, error: ApiError) -> None:
        """Nobody can tell what became of it."""
        self._in_flight_count -= 1
        self._reject_send(send, error)

    def _reject_send(self, send: Send, error: ApiError) -> None:
        self.hub.cancel_expected(send.scope, send.key, self)
        self._send_error(error, _get_request_ids(send))

    # --- frames out

    def _enqueue(self, frame: bytes) -> None:
        if not self._is_closing:
            self.send_queue.put(frame)
            self.hub.coalescer.schedule(self)

    def _send_error(self, error: ApiError, request_ids: Mapping[str, str] | None = None) -> None:
        if self._is_closing:
            return
        self._count_request(codec.get_code(error).lower())
        self._enqueue(codec.encode_error_frame(error, request_ids))
        if error.code in codec.CLOSING_CODES:
            self.close(CloseCode.POLICY, codec.get_code(error))

    def _count_request(self, outcome: str) -> None:
        self.service.counts.requests["chat", "websocket", outcome] += 1

    # --- the end

    def renew(self, principal: Principal | None) -> None:
        """As `WebSocketSession` says."""
        if principal is None:
            self._send_error(ApiError(error_codes.AUTH_FAILED, "the token has expired, or its rights have changed"))
            return
        if principal != self.principal:  # that of an API key is another one at each look, and most often the same
            self.principal = principal
            self._writable.clear()
            self.hub.refresh_reader(self)

    def fail(self, error: Exception) -> None:
        """As `WebSocketSession` says."""
        if not self._is_closing:
            self._enqueue(codec.encode_error_frame(to_api_error(error, UNREADABLE)))
            self._close_with_notice("unavailable", CloseCode.SERVER_ERROR)

    def close(self, code: int, reason: str) -> None:
        """As `WebSocketSession` says."""
        if code == CloseCode.GOING_AWAY and not self._is_closing:
            self._enqueue(codec.encode_closing_frame(reason, RECONNECT_DELAY_MS))
        self._close_transport(code, reason)

    def _close_with_notice(self, reason: str, code: int) -> None:
        self._enqueue(codec.encode_closing_frame(reason, RECONNECT_DELAY_MS))
        self._close_transport(code, reason)

    def _close_transport(self, code: int, reason: str) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self.hub.leave(self)
        self.send_queue.flush()
        self.send_queue.close()
        self.transport.close(code, reason)

    def _close_slow(self) -> None:
        """It reads less than comes for it (CO-31). What it has not read is in the log, behind its cursor."""
        if self._is_closing:
            return
        self._count_request(error_codes.SLOW_CONSUMER)
        self._is_closing = True
        self.hub.leave(self)
        self.send_queue.close()
        # In place of all that waits, behind what is on its way: whoever reads on finds it there.
        error = ApiError(
            error_codes.SLOW_CONSUMER, "more waits for this connection than it reads; connect again and sync"
        )
        self.transport.write(
            codec.encode_error_frame(error) + codec.encode_closing_frame("slow consumer", RECONNECT_DELAY_MS)
        )
        self.transport.close(CloseCode.POLICY, codec.get_code(error))

    def on_disconnect(self) -> None:
        """As `WebSocketSession` says."""
        self._is_closing = True
        self.hub.leave(self)
        self.send_queue.close()

    def abort(self) -> None:
        """As `ChatReader` says."""
        self.on_disconnect()
        self.transport.abort()

    def _describe(self) -> Mapping[str, JsonValue]:
        return {"address": self.address, "actor": self.user_id or None, "device_id": self.device_id}


def _get_request_ids(frame: Frame) -> dict[str, str]:
    """The ids that an answer carries."""
    request_ids = {name: getattr(frame, name, None) for name in ("request_id", "client_message_id", "chat_id")}
    return {name: value for name, value in request_ids.items() if value is not None}
