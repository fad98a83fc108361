"""One connection of the chat door, without its socket: frames in, and what becomes of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from oncelog import codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Replayed, Verdict
from oncelog.doors.chat import words
from oncelog.doors.chat.acks import BUSY_RETRY_AFTER_MS, Acks, Waiting
from oncelog.doors.chat.door import ChatDoor, refusal
from oncelog.doors.chat.hub import ChatHub
from oncelog.doors.chat.reading import (
    Ack,
    BadFrameError,
    Connect,
    Frame,
    Ping,
    Send,
    SyncRequest,
    read_frame,
    read_quickly,
)
from oncelog.doors.connections import Caller
from oncelog.doors.faults import UNREADABLE, DoorError, error_of
from oncelog.doors.frames import CloseCode
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.outbox import Outbox, Wire
from oncelog.doors.pacing import Pace
from oncelog.doors.principal import Principal
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.doors")

RECONNECT_DELAY_MS: Final = 1000
"""What a client is told that is sent away and may come back."""
KNOWN_CHATS_MAX: Final = 1000
"""Of one connection, so that grants need not be asked for each message."""


class _Pending:
    """An answer to `send_message`. It is a `Receiver` of the committer's, which tells it its verdict."""

    __slots__ = ("send", "session")

    def __init__(self, session: "ChatSession", send: Send) -> None:
        self.session = session
        self.send = send

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict, /) -> None:
        self.session.decided(self.send, result)

    def set_exception(self, exception: Exception, /) -> None:
        self.session.failed(self.send, error_of(exception))


class ChatSession:
    """One connection. `receive` takes its frames one after the other; `closed` is to be called when it is gone."""

    def __init__(self, door: ChatDoor, hub: ChatHub, acks: Acks, wire: Wire, caller: Caller) -> None:
        self.door = door
        self.hub = hub
        self.acks = acks
        self.wire = wire
        self.caller = caller
        self.address = caller.address
        self.principal: Principal | None = None
        self.device_id = ""
        self.outbox = Outbox(wire, door.limits, door.counts, self._slow, self._described)
        self._is_live = False
        self._in_flight = 0
        self._writable: set[str] = set()
        """Chats of which the principal's grants have been asked."""
        self._pace = Pace(door.limits, door.clock)
        self._is_ending = False

    @property
    def user_id(self) -> str:
        """As `Reader` says."""
        return "" if self.principal is None else self.principal.actor

    def may_follow(self, scope: str) -> bool:
        """As `Reader` says."""
        return self._is_live and self.principal is not None and self.principal.grants.may_read(scope)

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """A text frame. What it gives is to be awaited before the next."""
        if self._is_ending:
            return None
        self.door.counts.frames_received += 1
        refused = self._pace.refusal(len(data), is_known=self.principal is not None)
        if refused is not None:
            self._refuse(refused)
            return None
        if len(data) > LONG_FRAME_BYTES:
            return self._receive_long(data)
        return self._take(partial(self._read, data))

    async def _receive_long(self, data: bytes) -> None:
        """Others must not wait while it is read."""
        try:
            found = await asyncio.to_thread(self._read, data)
        except BadFrameError as error:
            self._refuse(error, error.about)
            return
        waiting = None if self._is_ending else self._take(lambda: found)
        if waiting is not None:
            await waiting

    def _read(self, data: bytes) -> Frame:
        bytes_max = self.door.limits.message_bytes_max
        return read_quickly(data, bytes_max) or read_frame(data, bytes_max)

    def _take(self, read: Callable[[], Frame]) -> Awaitable[None] | None:
        about: Mapping[str, str] = {}
        try:
            found = read()
            if isinstance(found, Send):
                self._send(found)
                return None
            about = _about(found)
            return self._handle(found)
        except BadFrameError as error:
            self._refuse(error, error.about)
        except DoorError as error:
            self._refuse(error, about)
        return None

    def receive_binary(self) -> None:
        """A binary frame: there are none."""
        if not self._is_ending:
            self.door.counts.frames_received += 1
            self._refuse(DoorError(codes.BAD_REQUEST, "frames must be text, in JSON"))

    async def receive_oversize(self) -> None:
        """As `sockets.Session` says. Acknowledgements are repeated on another connection: nothing is waited for."""
        if not self._is_ending:
            self.door.counts.frames_received += 1
            self.door.counts.requests["chat", "websocket", codes.TOO_LARGE] += 1

    def _handle(self, found: Connect | SyncRequest | Ack | Ping) -> Awaitable[None] | None:
        if isinstance(found, Connect):
            if self.principal is not None:
                raise DoorError(codes.BAD_REQUEST, "already connected")
            return self._connect(found)
        principal = self._current()
        if isinstance(found, SyncRequest):
            return self._sync(found)
        if isinstance(found, Ack):
            self._acknowledge(found, principal)
        else:
            self._put(words.reply("pong", b'"time_ms":%d' % self.door.clock.wall_ms(), found.request_id))
        return None

    def _current(self) -> Principal:
        """Who this is, as of now. Raises DoorError if that has expired."""
        principal = self.principal
        if principal is None:
            raise DoorError(codes.BAD_REQUEST, "the first frame must be connect")
        if principal.expires_ms is not None and principal.has_expired(self.door.clock.wall_ms()):
            raise DoorError(codes.AUTH_FAILED, "the token has expired")
        return principal

    async def _connect(self, asked: Connect) -> None:
        try:
            self.door.demand_going_on()
            self.principal = self.door.entrance.authenticate(asked.token, self.caller)
            self.device_id, self._is_live = asked.device_id, asked.is_live
            if asked.is_live:
                await self._join()
        except DoorError as error:
            self._refuse(error, _about(asked))
            self.finish(CloseCode.POLICY, words.code_of(error))
            return
        door = self.door
        members = words.connected_json(self.user_id, door.log.epoch, door.limits.heartbeat_ms)
        self._put(words.reply("connected", members, asked.request_id))
        self._count("ok")

    async def _join(self) -> None:
        """Before the client is told that it is connected: what is sent after that reaches it."""
        try:
            await self.hub.join(self)
        except OncelogError as error:
            raise error_of(error, UNREADABLE) from error
        if self._is_ending:  # it has gone meanwhile
            self.hub.leave(self)

    async def replied(self) -> None:
        """As `sockets.Session` says."""
        await self.outbox.drained()

    # --- sync and ack

    async def _sync(self, asked: SyncRequest) -> None:
        door = self.door
        try:
            door.demand_readable(asked.scope, self._current())
            await self.outbox.drained()
            batch = await door.after(asked.scope, self._current(), asked.after, asked.limit)
            # After the membership: whoever is a stranger learns not even whether his epoch is that of the log.
            door.demand_epoch(asked.epoch)
            door.demand_readable(asked.scope, self._current())
        except DoorError as error:
            self._refuse(error, _about(asked))
            return
        members = words.batch_json(
            asked.chat_id,
            batch.records,
            has_more=batch.has_more,
            following=batch.following,
            newest=batch.newest,
            is_ahead=batch.is_ahead,
        )
        self._put(words.reply("message_batch", members, asked.request_id))
        self._count("ok")

    def _acknowledge(self, asked: Ack, principal: Principal) -> None:
        self.door.demand_going_on()
        self.door.demand_readable(asked.scope, principal)
        self._count("ok")
        self.acks.take(asked.scope, principal.actor, Waiting(asked.sequence, partial(self._not_acknowledged, asked)))

    def _not_acknowledged(self, asked: Ack, error: DoorError) -> None:
        self._refuse(error, _about(asked))

    # --- send

    def _send(self, send: Send) -> None:
        door = self.door
        try:
            principal = self._current()
            door.demand_going_on()
            if self._in_flight >= door.limits.events_in_flight_max:
                self._demand_room()
            if send.scope not in self._writable:
                self._demand_writable(send.scope, principal)
        except DoorError as error:
            self._refuse(error, _about(send))
            return
        self._in_flight += 1
        if self._is_live:  # nobody else is sent messages, and where nobody is, no lane is read that would bring it
            self.hub.expect(send.scope, send.key, send.body, self)
        try:
            outcome = door.log.submit_nowait(door.submission(send, principal), _Pending(self, send))
        except OncelogError as error:
            self.failed(send, error_of(error))
            return
        if outcome is not None:
            self.decided(send, outcome)

    def _demand_room(self) -> None:
        most = self.door.limits.events_in_flight_max
        message = f"{self._in_flight} messages of this connection wait for their answer; at most {most} may"
        raise DoorError(codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS)

    def _demand_writable(self, scope: str, principal: Principal) -> None:
        self.door.demand_writable(scope, principal)
        if len(self._writable) >= KNOWN_CHATS_MAX:
            self._writable.clear()
        self._writable.add(scope)

    def decided(self, send: Send, verdict: Verdict) -> None:
        """What became of a message. Never raises: the committer tells it, and has others to tell."""
        self._in_flight -= 1
        try:
            if isinstance(verdict, Committed | Replayed):
                self._answer(send, verdict)
            else:
                self._not_sent(send, refusal(verdict))
        except Exception:
            logger.exception("an answer could not be written", extra=self._described())
            self._not_sent(send, DoorError(codes.SERVER_ERROR, "the server is at fault; send it again"))

    def _answer(self, send: Send, verdict: Committed | Replayed) -> None:
        receipt = verdict.receipt
        assert receipt is not None  # noqa: S101 - a key that is remembered has a place
        self.door.count(verdict)
        self._count("ok")
        is_known = isinstance(verdict, Replayed)
        if is_known:
            self.hub.unexpect(send.scope, send.key, self)
        members = words.sent_json(
            send.client_message_id,
            send.chat_id,
            receipt,
            duplicate=is_known,
            mismatch=isinstance(verdict, Replayed) and verdict.mismatch,
            erased=isinstance(verdict, Replayed) and verdict.erased,
        )
        self._put(words.reply("send_message_ack", members, send.request_id))

    def failed(self, send: Send, error: DoorError) -> None:
        """Nobody can tell what became of it."""
        self._in_flight -= 1
        self._not_sent(send, error)

    def _not_sent(self, send: Send, error: DoorError) -> None:
        self.hub.unexpect(send.scope, send.key, self)
        self._refuse(error, _about(send))

    # --- frames out

    def _put(self, frame: bytes) -> None:
        if not self._is_ending:
            self.outbox.put(frame)
            self.hub.flusher.soon(self)

    def _refuse(self, error: DoorError, about: Mapping[str, str] | None = None) -> None:
        if self._is_ending:
            return
        self._count(words.code_of(error).lower())
        self._put(words.error_frame(error, about))
        if error.code in words.CLOSING:
            self.finish(CloseCode.POLICY, words.code_of(error))

    def _count(self, outcome: str) -> None:
        self.door.counts.requests["chat", "websocket", outcome] += 1

    # --- the end

    def renew(self, principal: Principal | None) -> None:
        """As `Session` says."""
        if principal is None:
            self._refuse(DoorError(codes.AUTH_FAILED, "the token has expired, or its rights have changed"))
            return
        if principal != self.principal:  # that of an API key is another one at each look, and most often the same
            self.principal = principal
            self._writable.clear()
            self.hub.renew(self)

    def end(self, error: Exception) -> None:
        """As `Session` says."""
        if not self._is_ending:
            self._put(words.error_frame(error_of(error, UNREADABLE)))
            self._farewell("unavailable", CloseCode.SERVER_ERROR)

    def finish(self, code: int, reason: str) -> None:
        """As `Session` says."""
        if code == CloseCode.GOING_AWAY and not self._is_ending:
            self._put(words.closing_frame(reason, RECONNECT_DELAY_MS))
        self._close(code, reason)

    def _farewell(self, reason: str, code: int) -> None:
        self._put(words.closing_frame(reason, RECONNECT_DELAY_MS))
        self._close(code, reason)

    def _close(self, code: int, reason: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        self.hub.leave(self)
        self.outbox.flush()
        self.outbox.close()
        self.wire.close(code, reason)

    def _slow(self) -> None:
        """It reads less than comes for it (CO-31). What it has not read is in the log, behind its cursor."""
        if self._is_ending:
            return
        self._count(codes.SLOW_CONSUMER)
        self._is_ending = True
        self.hub.leave(self)
        self.outbox.close()
        # In place of all that waits, behind what is on its way: whoever reads on finds it there.
        error = DoorError(codes.SLOW_CONSUMER, "more waits for this connection than it reads; connect again and sync")
        self.wire.write(words.error_frame(error) + words.closing_frame("slow consumer", RECONNECT_DELAY_MS))
        self.wire.close(CloseCode.POLICY, words.code_of(error))

    def closed(self) -> None:
        """As `Session` says."""
        self._is_ending = True
        self.hub.leave(self)
        self.outbox.close()

    def abort(self) -> None:
        """As `Reader` says."""
        self.closed()
        self.wire.abort()

    def _described(self) -> Mapping[str, JsonValue]:
        return {"address": self.address, "actor": self.user_id or None, "device_id": self.device_id}


def _about(found: Frame) -> dict[str, str]:
    """The ids that an answer carries."""
    about = {name: getattr(found, name, None) for name in ("request_id", "client_message_id", "chat_id")}
    return {name: value for name, value in about.items() if value is not None}
