"""One connection of the events door, without its socket: frames in, and what becomes of them.

The subscriber reads pages and broadcasts, the outbox holds unwritten frames, and the reply queue keeps replies in the
order of their requests. Only the pages of an open sync cycle overtake results, which wait for its end (EV-13).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from oncelog import codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Mode, Submission, Verdict
from oncelog.doors.connections import Caller
from oncelog.doors.events import words
from oncelog.doors.events.camel import spoken
from oncelog.doors.events.dialect import Dialect
from oncelog.doors.events.door import EventsDoor, highest, merged, to_ask
from oncelog.doors.events.hub import Flight, flight_key
from oncelog.doors.events.reading import BadMessageError, Message, Submit
from oncelog.doors.events.subscriber import Reads, Subscriber
from oncelog.doors.events.words import Rejected
from oncelog.doors.faults import DoorError, error_json, error_of, stopping
from oncelog.doors.frames import CloseCode
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.outbox import Outbox, Wire
from oncelog.doors.pacing import Pace
from oncelog.doors.principal import Principal
from oncelog.doors.replies import Closing, ReplyQueue
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.doors")

BUSY_RETRY_AFTER_MS: Final = 100


_CODES: Final = {codes.SERVER_ERROR: CloseCode.SERVER_ERROR}


class _Pending(Flight):
    """An answer to `submit_events`. It is a `Receiver` of the committer's, which tells it its verdicts."""

    __slots__ = ("ids", "items", "mode", "msg_id", "session")

    def __init__(
        self, session: "Session", msg_id: bytes, ids: list[str], items: list[Submission | Rejected], mode: Mode
    ) -> None:
        Flight.__init__(self, session.subscriber)
        self.session = session
        self.msg_id = msg_id
        self.ids = ids
        self.items = items
        self.mode = mode

    def written(self) -> None:
        self.session.events_in_flight -= len(self.ids)
        self.queue.written(self)

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict | Sequence[Verdict], /) -> None:
        self.session.decided(self, result)

    def set_exception(self, exception: Exception, /) -> None:
        self.session.failed(self, error_of(exception))


class Session:
    """One connection. `receive` takes its frames one after the other; `closed` is to be called when it is gone."""

    def __init__(self, door: EventsDoor, wire: Wire, caller: Caller) -> None:
        self.door = door
        self.wire = wire
        self.caller = caller
        self.address = caller.address
        self.principal: Principal | None = None
        self.client_id = ""
        self.dialect: Dialect = door.first
        """That of the first frame that told one."""
        self._has_spoken = False
        self.events_in_flight = 0
        self.outbox = Outbox(wire, door.limits, door.counts, self._abort, self._described)
        self.replies = ReplyQueue(self.outbox, self._finish_soon)
        self.subscriber = Subscriber(door, self.replies, self.outbox, self.end, self._abort, self._lost_track)
        self._writable: set[tuple[str, ...]] = set()
        """Partitions of which the principal's grants have been asked."""
        self._pace = Pace(door.limits, door.clock)
        self._is_refusing = False
        """An error that closes the connection waits for the replies before it: no more frames are read."""
        self._is_ending = False
        self._close_timer: asyncio.TimerHandle | None = None

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """A text frame. What it gives is to be awaited before the next."""
        if self._is_refusing:
            return None
        if self.replies.count >= self.door.limits.outbox_frames_max:
            return self._receive_later(data)
        self.door.counts.frames_received += 1
        refused = self._pace.refusal(len(data), is_known=self.principal is not None)
        if refused is not None:
            self._refuse(refused, self._msg_id_of(data))
            return None
        if len(data) > LONG_FRAME_BYTES:
            return self._receive_long(data)
        return self._take(lambda: self._read(data))

    async def _receive_later(self, data: bytes) -> None:
        """Read nothing more while as many replies wait as frames may: most are short errors, but they take memory."""
        await self.replies.emptied()
        waiting = self.receive(data)
        if waiting is not None:
            await waiting

    def _msg_id_of(self, data: bytes) -> bytes:
        """Return the `msg_id` of a frame that is refused unread. It ends the connection, so this is done once."""
        if self.principal is None or len(data) > LONG_FRAME_BYTES:
            return b""
        try:
            return self.dialect.read_message(data).msg_id
        except BadMessageError as error:
            return error.msg_id

    async def _receive_long(self, data: bytes) -> None:
        """Others must not wait while it is read: that may take seconds for what somebody has made for it."""
        read = await asyncio.to_thread(_outcome_of, partial(self._read, data))
        waiting = None if self._is_refusing else self._take(read)
        if waiting is not None:
            await waiting

    def _read(self, data: bytes) -> "tuple[bytes, Submit] | Message":
        """A message, or at once the submissions of one. Raises BadMessageError.

        Touches nothing of a session that is connected: then it may be called in a thread.
        """
        principal = self.principal
        if principal is None:
            return self._read_before_connected(data)
        return self.dialect.read(data, principal.actor, self.client_id, self.door.limits.request_events_max)

    def _read_before_connected(self, data: bytes) -> Message:
        dialect = None if self._has_spoken else spoken(data, self.door.first, self.door.second)
        if dialect is not None:
            self._has_spoken = True
            self._speak(dialect)
        return self.dialect.read_message(data)

    def _speak(self, dialect: Dialect) -> None:
        self.dialect = self.subscriber.dialect = dialect

    def _take(self, read: "Callable[[], tuple[bytes, Submit] | Message]") -> Awaitable[None] | None:
        msg_id = b""
        try:
            found = read()
            if isinstance(found, Message):
                msg_id = found.msg_id
                return self._handle(found)
            msg_id, submit = found
            self._submit(submit, msg_id)
        except BadMessageError as error:
            self._refuse(error, error.msg_id)
        except DoorError as error:
            self._refuse(error, msg_id)
        return None

    def receive_binary(self) -> None:
        """A binary frame: there are none."""
        if self._is_refusing:
            return
        self.door.counts.frames_received += 1
        self._refuse(DoorError(codes.BAD_REQUEST, "frames must be text, in JSON"), b"")

    async def receive_oversize(self) -> None:
        """Count a frame beyond `frame_bytes_max`, which is not read, and wait (bounded) for the replies before it."""
        if self._is_refusing:
            return
        self._is_refusing = True
        self.door.counts.frames_received += 1
        self.door.counts.requests["events", "websocket", codes.TOO_LARGE] += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(self.door.limits.close_wait_ms / 1000):
                await self.replies.emptied()

    def _handle(self, message: Message) -> Awaitable[None] | None:
        if message.type == "connect":
            if self.principal is not None:
                raise DoorError(codes.BAD_REQUEST, "already connected")
            self._connect(message)
        elif self.principal is None:
            raise DoorError(codes.BAD_REQUEST, "the first message must be connect")
        elif message.type == "sync":
            return self._sync(message)
        else:
            raise DoorError(codes.BAD_REQUEST, "$.type: must be connect, submit_events or sync", field="$.type")
        return None

    def _connect(self, message: Message) -> None:
        asked = self.dialect.read_connect(message.payload)
        principal = self.door.entrance.authenticate(asked.token, self.caller)
        client_id = self.door.entrance.event_client(principal, asked.client_id)
        if client_id is None:
            raise self.door.entrance.refuse_client(self.caller, asked.client_id)
        if asked.project is not None:
            self.door.demand_entry(asked.project.partition, principal)
        self.principal, self.client_id = principal, client_id
        self._speak(self.dialect.bound(asked))
        payload = self.dialect.connected(client_id, principal.actor, self.door.hub.position, self.door.log.epoch)
        self._reply(b"connected", payload, message.msg_id)

    def _current(self) -> Principal:
        """Who this is, as of now. Raises DoorError if that has expired."""
        principal = self.principal
        if principal is None or (principal.expires_ms is not None and principal.has_expired(self.door.clock.wall_ms())):
            raise DoorError(codes.AUTH_FAILED, "the token has expired")
        return principal

    # --- sync

    async def _sync(self, message: Message) -> None:
        try:
            sync = self.dialect.read_sync(message.payload)

            def demand_allowed() -> None:
                self.door.demand_readable(sync.partitions, self._current())

            demand_allowed()
            self.door.demand_epoch(sync.epoch)
            if self.replies.count and not self.subscriber.is_paging:
                # A page must not overtake the results of earlier requests. Those of an open cycle must: the results
                # wait for its end.
                await self.replies.emptied()
                if self._is_refusing:
                    return
                demand_allowed()
            await self.subscriber.page(sync, message.msg_id, demand_allowed)
            self.door.counts.requests["events", "websocket", "ok"] += 1
        except DoorError as error:
            self._refuse(error, message.msg_id)

    async def replied(self) -> None:
        """As `sockets.Session` says. During a sync cycle results wait for the client's next request."""
        if not self.subscriber.is_paging:
            await self.replies.emptied()
        await self.outbox.drained()

    # --- submit

    def _submit(self, submit: Submit, msg_id: bytes) -> None:
        door = self.door
        principal = self._current()
        if door.is_closing:
            raise stopping()
        in_flight, most = self.events_in_flight, door.limits.events_in_flight_max
        if in_flight and in_flight + len(submit.ids) > most:
            message = f"{in_flight} events of this connection wait for their answer; at most {most} may"
            raise DoorError(codes.SERVER_BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS)
        items = door.authorized(submit, principal, self._writable)
        pending = _Pending(self, msg_id, submit.ids, items, submit.mode)
        self.events_in_flight += len(items)
        new = to_ask(items, submit.mode)
        pending.waits_for = [(flight_key(item), item.fingerprint) for item in new]
        door.hub.expect(pending)
        outcome: Verdict | Sequence[Verdict] | None
        try:
            if len(new) == 1:
                outcome = door.log.submit_nowait(new[0], pending)
            else:
                outcome = door.log.submit_many_nowait(new, pending, submit.mode, is_admitted_whole=True) if new else ()
        except OncelogError as error:
            self.failed(pending, error_of(error))
            return
        if outcome is not None:
            self.decided(pending, outcome)

    def decided(self, pending: "_Pending", outcome: Verdict | Sequence[Verdict]) -> None:
        """What became of a request. Never raises: the committer tells it, and has others to tell."""
        try:
            self._answer(pending, outcome)
        except Exception:
            logger.exception("an answer could not be written", extra=self._described())
            self.failed(pending, DoorError(codes.SERVER_ERROR, "the server is at fault; send it again"))

    def _answer(self, pending: _Pending, outcome: Verdict | Sequence[Verdict]) -> None:
        door = self.door
        if type(outcome) is Committed and len(pending.items) == 1:  # what most requests of a busy server are
            receipt = outcome.receipt
            door.counts.events_committed += 1
            pending.frame = self.dialect.committed(pending.ids[0], receipt, door.clock.wall_ms(), pending.msg_id)
            pending.number = receipt.position
        else:
            verdicts = outcome if isinstance(outcome, list | tuple) else (outcome,)
            results = merged(pending.items, verdicts, pending.mode)
            error = words.request_error(results)
            if error is not None:
                self.failed(pending, error)
                return
            door.count(results)
            payload = self.dialect.results(pending.ids, results, door.clock.wall_ms())
            pending.frame = self._framed(b"submit_events_result", payload, pending.msg_id)
            pending.number = highest(results)
        door.counts.requests["events", "websocket", "ok"] += 1
        door.hub.answered(pending)

    def failed(self, pending: _Pending, error: DoorError) -> None:
        """Nobody can tell what became of it, or nothing was decided."""
        self.door.counts.requests["events", "websocket", error.code] += 1
        error = _busy_if_limited(error)
        told = self.dialect.error(error)
        pending.frame = self._framed(b"error", error_json(told), pending.msg_id)
        pending.number = 0
        pending.closing = _closing_of(error, told)
        self.door.hub.answered(pending)
        self._end_if_closing(pending.closing)

    # --- frames out

    def _framed(self, kind: bytes, payload: bytes, msg_id: bytes = b"") -> bytes:
        return self.dialect.frame(kind, (payload,), self.door.clock.wall_ms(), msg_id)

    def _reply(self, kind: bytes, payload: bytes, msg_id: bytes = b"", closing: Closing | None = None) -> None:
        self.replies.send(self._framed(kind, payload, msg_id), closing)
        self.door.hub.flush_soon(self.subscriber)

    def _refuse(self, error: DoorError, msg_id: bytes) -> None:
        if self._is_refusing:
            return
        self.door.counts.requests["events", "websocket", error.code] += 1
        told = self.dialect.error(error)
        closing = _closing_of(error, told)
        self._reply(b"error", error_json(told), msg_id, closing)
        self._end_if_closing(closing)

    def _end_if_closing(self, closing: Closing | None) -> None:
        """End the connection after an error that does so: when it is written, behind the replies before it."""
        if closing is None or self._is_ending:
            return
        self._is_refusing = True
        if self.replies.count <= 1:
            self.finish(*closing)
        elif self._close_timer is None:
            wait_s = self.door.limits.close_wait_ms / 1000
            self._close_timer = asyncio.get_running_loop().call_later(wait_s, self.finish, *closing)

    def _finish_soon(self, closing: Closing) -> None:
        """The error that closes the connection is being written. `finish` must not write in the middle of that."""
        if not self._is_ending:
            asyncio.get_running_loop().call_soon(self.finish, *closing)

    # --- the end

    def renew(self, principal: Principal | None) -> None:
        """The rights of now. Ends the connection if there are none any more, or its scope is not among them."""
        if principal is None or not all(map(principal.grants.may_read, self.subscriber.partitions)):
            error = DoorError(codes.AUTH_FAILED, "the token has expired, or its rights have changed")
            if self.subscriber.partitions:
                # Results in flight would need the broadcasts before them, which it may not read any more.
                self._end_now(error)
            else:
                self._refuse(error, b"")
        else:
            self.principal = principal
            self._writable.clear()

    def end(self, error: Exception) -> None:
        """Something that this connection cannot go on with."""
        self._end_now(error_of(error))

    def _end_now(self, error: DoorError) -> None:
        """End the connection with an error that waits for no reply: missing replies may never be due."""
        if self._is_ending:
            return
        told = self._put_error(error)
        self.finish(*(_closing_of(error, told) or (CloseCode.POLICY, told.code)))

    def _put_error(self, error: DoorError) -> DoorError:
        """Count an error, and put it behind the frames that are in the outbox. Return it in terms of the dialect."""
        self.door.counts.requests["events", "websocket", error.code] += 1
        told = self.dialect.error(error)
        self.outbox.put(self._framed(b"error", error_json(told)))
        return told

    def _lost_track(self) -> None:
        """Close a connection whose own events are not all known any more (`own.RANGES_MAX`).

        Its client waits for a result. The npm package `insieme` reconnects after the error; it ignores a close.
        """
        logger.warning("a sync cycle was left open for too long; the connection is closed", extra=self._described())
        reason = "the sync cycle was left open for too long; sync again"
        self._put_error(DoorError(codes.SERVER_ERROR, reason))
        self.finish(CloseCode.POLICY, reason)

    def finish(self, code: int, reason: str) -> None:
        """Ends the connection, after what is in the outbox and can be written. Then nothing more is."""
        if self._is_ending:
            return
        self._is_refusing = self._is_ending = True
        self.subscriber.end()
        self.outbox.flush()
        self._close()
        self.wire.close(code, reason)

    def closed(self) -> None:
        """The connection is gone."""
        self._is_refusing = self._is_ending = True
        self.subscriber.end()
        self._close()

    def _close(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.outbox.close()
        self.replies.close()

    def _abort(self) -> None:
        """There is no room for a word of farewell either. What it has not read is in the store, behind its cursor."""
        self.closed()
        self.wire.abort()

    def _described(self) -> Mapping[str, JsonValue]:
        actor = None if self.principal is None else self.principal.actor
        return {"address": self.address, "client_id": self.client_id, "actor": actor}

    @property
    def is_live(self) -> bool:
        """Whether what others commit is broadcast to it."""
        return self.subscriber.mode is Reads.LIVE


def _outcome_of(read: "Callable[[], tuple[bytes, Submit] | Message]") -> "Callable[[], tuple[bytes, Submit] | Message]":
    """What reading gave or raised, to be had later: so that it is raised where it is handled."""
    try:
        found = read()
    except DoorError as error:
        raised = error

        def raising() -> "tuple[bytes, Submit] | Message":
            raise raised

        return raising
    return lambda: found


def _closing_of(error: DoorError, told: DoorError) -> Closing | None:
    """Return how an error closes the connection, by itself or in the words of its dialect; None if it does not."""
    if error.code in words.CLOSING or told.code in words.CLOSING:
        return _CODES.get(told.code, CloseCode.POLICY), told.code
    return None


def _busy_if_limited(error: DoorError) -> DoorError:
    """A rate ends no connection: the client sends the request again on it, after a while (EV-8)."""
    return DoorError(codes.SERVER_BUSY, error.message, **error.details) if error.code == codes.RATE_LIMITED else error
