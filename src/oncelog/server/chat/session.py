"""WebSocket sessions of the Chat API, which handle `connect`, `send_message`, `sync`, `ack` and `ping` frames."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Final

from aiohttp import WSCloseCode

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Replayed, Verdict
from oncelog.server.chat import codec
from oncelog.server.chat.ack_queue import AckQueue, PendingAck
from oncelog.server.chat.hub import ChatHub
from oncelog.server.chat.messages import Ack, Connect, Frame, Ping, Send, SyncRequest
from oncelog.server.chat.service import ChatService, membership_error, refusal_error
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import UNREADABLE, ApiError, to_api_error, translate_errors
from oncelog.server.send_queue import SessionTransport
from oncelog.server.websocket_session import PendingWrite, WebSocketSession

RECONNECT_DELAY_MS: Final = 1000
"""Reconnect delay for clients that the server disconnects."""


class _PendingSend(PendingWrite):
    """An unanswered `send_message`."""

    __slots__ = ("send", "session")

    def __init__(self, session: "ChatSession", send: Send) -> None:
        self.session = session
        self.send = send


class ChatSession(WebSocketSession[Frame, Mapping[str, str]]):
    """One Chat API connection. A reply repeats the ids of its request."""

    api: ClassVar = "chat"
    connect_kind: ClassVar = Connect
    frame_noun: ClassVar = "frame"
    write_noun: ClassVar = "messages"

    def __init__(
        self, service: ChatService, hub: ChatHub, acks: AckQueue, transport: SessionTransport, caller: Caller
    ) -> None:
        super().__init__(service.auth_gate, transport, caller)
        self.service = service
        self.hub = hub
        self.acks = acks
        self.device_id = ""
        self._is_live = False

    @property
    def user_id(self) -> str:
        """See `ChatReader`."""
        return "" if self.principal is None else self.principal.actor

    def may_follow(self, scope: str) -> bool:
        """See `ChatReader`."""
        return self._is_live and self.principal is not None and self.principal.grants.may_read(scope)

    # --- frames in

    def _decode(self, data: bytes) -> Frame:
        messages = self.service.messages
        return messages.decode_fast(data) or messages.decode_frame(data)

    def _get_kind(self, message: Frame) -> type[Frame]:
        return type(message)

    def _get_reply_to(self, message: Frame) -> dict[str, str]:
        """Return the ids that the reply to a message repeats."""
        ids = {name: getattr(message, name, None) for name in ("request_id", "client_message_id", "chat_id")}
        return {name: value for name, value in ids.items() if value is not None}

    # --- messages

    async def _connect(self, request: Connect) -> None:
        try:
            self.service.check_not_stopping()
            self._set_principal(self.auth_gate.authenticate(request.token, self.caller))
            self.device_id, self._is_live = request.device_id, request.is_live
            if request.is_live:
                # Join before answering `connect`, so that all messages sent after the answer are delivered.
                with translate_errors():
                    await self.hub.join(self)
                if self._is_closing:  # the client disconnected during the join
                    self.hub.leave(self)
        except ApiError as error:
            self._send_error(error, self._get_reply_to(request))
            self.close(WSCloseCode.POLICY_VIOLATION, codec.get_code(error))
            return
        service = self.service
        members = codec.encode_connected(self.user_id, service.log.epoch, service.limits.heartbeat_ms)
        self._enqueue(codec.encode_reply("connected", members, request.request_id))
        self._count_request("ok")

    async def _sync(self, request: SyncRequest) -> None:
        service = self.service
        service.check_readable(request.scope, self._get_principal())
        await self.send_queue.drain()
        page = await service.load_after(request.scope, self._get_principal(), request.after, request.limit)
        # Check the epoch after the membership, because only members may learn whether it is the log's epoch.
        service.check_epoch(request.epoch)
        service.check_readable(request.scope, self._get_principal())
        self._enqueue(codec.encode_reply("message_batch", codec.encode_batch(request.scope, page), request.request_id))
        self._count_request("ok")

    def _acknowledge(self, request: Ack) -> None:
        principal = self._get_principal()
        self.service.check_not_stopping()
        self.service.check_readable(request.scope, principal)
        self._count_request("ok")
        on_refused = partial(self._send_error, reply_to=self._get_reply_to(request))
        self.acks.submit(request.scope, principal.actor, PendingAck(request.sequence, on_refused))

    def _ping(self, request: Ping) -> None:
        self._get_principal()
        self._enqueue(codec.encode_reply("pong", b'"time_ms":%d' % self.service.clock.wall_ms(), request.request_id))

    def _send(self, send: Send) -> None:
        service = self.service
        principal = self._get_principal()
        service.check_not_stopping()
        self._check_in_flight(1)
        if not self._may_write(send.scope):
            raise membership_error()
        self.in_flight_count += 1
        if self._is_live:  # only live connections receive broadcasts
            self.hub.expect_message(send.scope, send.key, send.body, self)
        pending = _PendingSend(self, send)
        self._submit_write(
            pending,
            lambda: service.log.submit_nowait(service.to_submission(send, principal), pending),
            send.traceparent,
        )

    handlers: ClassVar = {Connect: _connect, Send: _send, SyncRequest: _sync, Ack: _acknowledge, Ping: _ping}

    # --- answers to writes

    def _send_outcome(self, pending: _PendingSend, outcome: Verdict) -> None:
        send = pending.send
        if not isinstance(outcome, Committed | Replayed):
            self.fail_write(pending, refusal_error(outcome))
            return
        self.service.count_verdict(outcome)
        self._count_request("ok")
        if isinstance(outcome, Replayed):
            self.hub.cancel_expected(send.scope, send.key, self)
        self._enqueue(codec.encode_reply("send_message_ack", codec.encode_sent(send, outcome), send.request_id))
        self.in_flight_count -= 1

    def fail_write(self, pending: _PendingSend, error: ApiError) -> None:
        """See the base class."""
        self.in_flight_count -= 1
        send = pending.send
        self.hub.cancel_expected(send.scope, send.key, self)
        self._send_error(error, self._get_reply_to(send))

    # --- frames out

    def _enqueue(self, frame: bytes) -> None:
        if not self._is_closing:
            self.send_queue.put(frame)
            self.hub.coalescer.schedule(self)

    def _send_error(self, error: ApiError, reply_to: Mapping[str, str] | None = None) -> None:
        if self._is_closing:
            return
        self._count_request(codec.get_code(error).lower())
        self._enqueue(codec.encode_error_frame(error, reply_to))
        if error.code in codec.CLOSING_CODES:
            self.close(WSCloseCode.POLICY_VIOLATION, codec.get_code(error))

    # --- the end

    def _apply_rights(self) -> None:
        self.hub.refresh_reader(self)

    def fail(self, error: Exception) -> None:
        """See the base class."""
        if not self._is_closing:
            self._enqueue(codec.encode_error_frame(to_api_error(error, UNREADABLE)))
            self._enqueue(codec.encode_closing_frame("unavailable", RECONNECT_DELAY_MS))
            self.close(WSCloseCode.INTERNAL_ERROR, "unavailable")

    def close(self, code: int, reason: str) -> None:
        """See the base class. Before the close, a client that may reconnect receives the delay."""
        if code == WSCloseCode.GOING_AWAY:
            self._enqueue(codec.encode_closing_frame(reason, RECONNECT_DELAY_MS))
        super().close(code, reason)

    def _stop_delivery(self) -> None:
        self.hub.leave(self)

    def _close_slow(self) -> None:
        """See the base class (CO-31). The client finds unread messages in the log, after its cursor."""
        if self._is_closing:
            return
        self._count_request(error_codes.SLOW_CONSUMER)
        self.on_disconnect()
        # The error replaces the queued frames and follows the frames already written, so that a client that keeps
        # reading receives it.
        error = ApiError(
            error_codes.SLOW_CONSUMER, "the client reads more slowly than messages arrive; connect again and sync"
        )
        self.transport.write(
            codec.encode_error_frame(error) + codec.encode_closing_frame("slow consumer", RECONNECT_DELAY_MS)
        )
        self.transport.close(WSCloseCode.POLICY_VIOLATION, codec.get_code(error))

    def _describe(self) -> Mapping[str, JsonValue]:
        return {**super()._describe(), "device_id": self.device_id}
