"""One connection of the events door, without its socket: frames in, frames out, in the order that EV-12 to EV-15 say.

A session has a scope: the partitions of its last `sync`. It is in one of four modes:

    idle      it has not asked for anything yet
    paused    a sync cycle is open: no broadcasts, and answers that would overtake them are held
    catching  the cycle is over: what was committed meanwhile is read from the store and sent, in order
    live      the hub puts records straight into the outbox

`delivered` says up to where the reader has got everything in its scope, or will get it by the open cycle. A commit of
its own is never broadcast to it, in none of the modes; its place in the order is that of its answer.
"""

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Mapping, Sequence
from enum import Enum
from itertools import count
from typing import Final, Protocol, cast

from msgspec import Struct

from oncelog.core.canonical import JsonValue
from oncelog.core.values import Committed, Submission, Verdict
from oncelog.doors.events import words
from oncelog.doors.events.door import EventsDoor, error_of, highest, is_event
from oncelog.doors.events.hub import Answer
from oncelog.doors.events.reading import (
    BadMessageError,
    Message,
    Submit,
    Sync,
    read_connect,
    read_message,
    read_quickly,
    read_submit,
    read_sync,
)
from oncelog.doors.events.words import DoorError, Rejected, Result
from oncelog.doors.principal import Principal
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.doors")

CATCH_UP_RECORDS: Final = 500
WIRE_BYTES_HIGH: Final = 64 * 1024
"""With more than this on its way, what follows waits in the outbox, where it is counted."""


class CloseCode:
    """Of the WebSocket."""

    GOING_AWAY: Final = 1001
    POLICY: Final = 1008
    SERVER_ERROR: Final = 1011


_CODES: Final = {words.SERVER_ERROR: CloseCode.SERVER_ERROR}


class Wire(Protocol):
    """The socket, as far as a session is concerned."""

    def write(self, data: bytes) -> None:
        """Sends frames. Never waits."""

    def waiting_bytes(self) -> int:
        """How much has been written and is not on its way yet."""

    async def drained(self) -> None:
        """Returns when there is room again."""

    def close(self, code: int, reason: str) -> None:
        """Ends the connection after what was written."""

    def abort(self) -> None:
        """Ends it at once."""


class Mode(Enum):
    """See above."""

    IDLE = "idle"
    PAUSED = "paused"
    CATCHING = "catching"
    LIVE = "live"
    CLOSED = "closed"


class _Pending(Answer):
    """An answer to `submit_events`."""

    __slots__ = ("_of", "ids", "items", "msg_id")

    def __init__(self, session: "Session", msg_id: bytes, ids: list[str], items: list[Submission | Rejected]) -> None:
        super().__init__(session)
        self.msg_id = msg_id
        self.ids = ids
        self.items = items
        self._of = session

    # As a `Receiver` of the committer's.

    def done(self) -> bool:
        return False

    def set_result(self, result: Verdict | Sequence[Verdict], /) -> None:
        self._of.decided(self, result)

    def set_exception(self, exception: Exception, /) -> None:
        self._of.undecided(self, exception)


class _Cycle(Struct, frozen=True):
    """A paging that goes on."""

    partitions: tuple[str, ...]
    following: int
    upto: int


class Session:
    """One connection. `receive` takes its frames one after the other; `closed` is to be called when it is gone."""

    def __init__(self, door: EventsDoor, wire: Wire, address: str) -> None:
        self.door = door
        self.wire = wire
        self.address = address
        self.principal: Principal | None = None
        self.client_id = ""
        self.mode = Mode.IDLE
        self.partitions: tuple[str, ...] = ()
        self.outbox: list[bytes | Answer] = []
        self.outbox_bytes = 0
        self.is_dirty = False
        self._answers_in_outbox = 0
        self._events_in_flight = 0
        self._delivered = 0
        self._cycle: _Cycle | None = None
        self._held: list[tuple[int, int, Answer]] = []
        self._order = count()
        self._own: set[int] = set()
        self._catching: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._writable: set[tuple[str, ...]] = set()
        """Partitions of which the principal's grants have been asked."""
        self._holds_back = False
        """Paused or catching: answers that would overtake broadcasts are held."""
        self._is_warned = False
        self._second = 0
        self._frames_in_second = 0
        self._is_ending = False
        self._has_ended = False
        """Nothing may be written after the farewell."""

    # --- frames in

    def receive(self, data: bytes) -> Awaitable[None] | None:
        """A text frame. What it gives is to be awaited before the next."""
        if self._is_ending:
            return None
        self.door.counts.frames_received += 1
        msg_id = b""
        try:
            if self.door.limits.frames_per_second_max:
                self._demand_rate(self.door.limits.frames_per_second_max)
            principal = self.principal
            if principal is not None and (quick := self._read_quickly(data, principal)) is not None:
                msg_id, submit = quick
                self._submit(submit, msg_id, principal)
                return None
            message = read_message(data)
            msg_id = message.msg_id
            return self._handle(message)
        except BadMessageError as error:
            self._refuse(error, error.msg_id)
        except DoorError as error:
            self._refuse(error, msg_id)
        return None

    def _demand_rate(self, frames_max: int) -> None:
        """Counts frames second by second."""
        second = self.door.clock.elapsed_ms() // 1000
        if second != self._second:
            self._second, self._frames_in_second = second, 0
        self._frames_in_second += 1
        if self._frames_in_second > frames_max:
            message = f"frames_per_second_max is {frames_max}"
            raise DoorError(words.RATE_LIMITED, message, limit=frames_max, retry_after_ms=1000)

    def receive_binary(self) -> None:
        """A binary frame: there are none."""
        if self._is_ending:
            return
        self.door.counts.frames_received += 1
        self._refuse(DoorError(words.BAD_REQUEST, "frames must be text, in JSON"), b"")

    def _read_quickly(self, data: bytes, principal: Principal) -> tuple[bytes, Submit] | None:
        return read_quickly(data, principal.actor, self.client_id, self.door.limits.request_events_max)

    def _handle(self, message: Message) -> Awaitable[None] | None:
        principal = self.principal
        if message.type == "connect":
            if principal is not None:
                raise DoorError(words.BAD_REQUEST, "already connected")
            self._connect(message)
        elif principal is None:
            raise DoorError(words.BAD_REQUEST, "the first message must be connect")
        elif message.type == "submit_events":
            limits = self.door.limits
            submit = read_submit(message.payload, principal.actor, self.client_id, limits.request_events_max)
            self._submit(submit, message.msg_id, principal)
        elif message.type == "sync":
            return self._sync(message, principal)
        else:
            raise DoorError(words.BAD_REQUEST, "$.type: must be connect, submit_events or sync", field="$.type")
        return None

    def _connect(self, message: Message) -> None:
        asked = read_connect(message.payload)
        principal = self.door.authenticate(asked.token, self.address)
        if not principal.may_connect_as(asked.client_id):
            raise self.door.refuse_client(self.address, asked.client_id)
        self.principal, self.client_id = principal, asked.client_id
        payload = words.connected_json(self.client_id, self.door.hub.position, self.door.log.epoch)
        self._send(b"connected", payload, message.msg_id)

    def _demand_current(self, principal: Principal) -> None:
        if principal.expires_ms is not None and principal.has_expired(self.door.clock.wall_ms()):
            raise DoorError(words.AUTH_FAILED, "the token has expired")

    # --- submit

    def _submit(self, submit: Submit, msg_id: bytes, principal: Principal) -> None:
        door = self.door
        limits = door.limits
        self._demand_current(principal)
        if door.is_closing:
            raise DoorError(words.SERVER_BUSY, "the server is being stopped", retry_after_ms=1000)
        if self._events_in_flight and self._events_in_flight + len(submit.ids) > limits.events_in_flight_max:
            raise DoorError(
                words.SERVER_BUSY,
                f"{self._events_in_flight} events of this connection wait for their answer; at most "
                f"{limits.events_in_flight_max} may",
                retry_after_ms=100,
            )
        items = door.authorized(submit, principal, self._writable)
        pending = _Pending(self, msg_id, submit.ids, items)
        self._events_in_flight += len(items)
        new = [item for item in items if type(item) is Submission]
        pending.flights = [(item.key, item.fingerprint) for item in new]
        door.hub.expect(pending)
        outcome: Verdict | Sequence[Verdict] | None
        try:
            if len(new) == 1:
                outcome = door.log.submit_nowait(new[0], pending)
            else:
                outcome = door.log.submit_many_nowait(new, pending) if new else ()
        except OncelogError as error:
            self._failed(pending, error_of(error))
            return
        if outcome is not None:
            self.decided(pending, outcome)

    def decided(self, pending: "_Pending", outcome: Verdict | Sequence[Verdict]) -> None:
        """What became of a request. Never raises: the committer tells it, and has others to tell."""
        try:
            self._answer(pending, outcome)
        except Exception:
            logger.exception("an answer could not be written", extra=self._described())
            self._failed(pending, DoorError(words.SERVER_ERROR, "the server is at fault; send it again"))

    def undecided(self, pending: "_Pending", error: Exception) -> None:
        """Nobody can tell what became of it."""
        self._failed(pending, error_of(error))

    def _answer(self, pending: _Pending, outcome: Verdict | Sequence[Verdict]) -> None:
        if type(outcome) is Committed and len(pending.items) == 1:
            self._answer_committed(pending, outcome)
            return
        verdicts: Sequence[Verdict] = outcome if isinstance(outcome, list | tuple) else (outcome,)
        results: Sequence[Result] = verdicts
        if len(verdicts) != len(pending.items):
            following = iter(verdicts)
            results = [next(following) if isinstance(item, Submission) else item for item in pending.items]
        error = words.request_error(results)
        if error is not None:
            self._failed(pending, error)
            return
        if self.principal is not None:
            self.door.count(results, self.principal)
        payload = words.results_json(pending.ids, results)
        pending.frame = self._framed(b"submit_events_result", payload, pending.msg_id)
        pending.number = highest(results)
        self.door.hub.answered(pending)

    def _answer_committed(self, pending: _Pending, committed: Committed) -> None:
        """The same for what most requests of a busy server are."""
        receipt = committed.receipt
        if self.principal is not None:
            self.door.count_committed(1, self.principal)
        pending.frame = words.committed_frame(pending.ids[0], receipt, self.door.clock.wall_ms(), pending.msg_id)
        pending.number = receipt.position
        self.door.hub.answered(pending)

    def _failed(self, pending: _Pending, error: DoorError) -> None:
        self.door.counts.requests["events", "websocket", error.code] += 1
        pending.frame = self._framed(b"error", words.error_json(error), pending.msg_id)
        self.door.hub.answered(pending)
        self._end_if(error)

    # --- the place of an answer (see `Reader`)

    def place_origin(self, position: int, answer: Answer) -> None:
        """As `Reader` says."""
        if self._holds_back:
            self._own.add(position)
        self._put(position, answer)

    def place(self, answer: Answer) -> None:
        """As `Reader` says."""
        self._put(answer.number, answer)

    def _put(self, number: int, answer: Answer) -> None:
        if answer.is_placed or self.mode is Mode.CLOSED:
            return
        answer.is_placed = True
        if self._holds_back and number > self._delivered:
            heapq.heappush(self._held, (number, next(self._order), answer))
            self._watch_cycle()
        else:
            self._put_out(answer)

    def _put_out(self, answer: Answer) -> None:
        self.outbox.append(answer)
        self._answers_in_outbox += 1

    def _release(self, upto: int) -> None:
        """Held answers whose turn has come."""
        while self._held and self._held[0][0] <= upto:
            self._put_out(heapq.heappop(self._held)[2])

    # --- sync

    async def _sync(self, message: Message, principal: Principal) -> None:
        try:
            sync = read_sync(message.payload)
            self._demand_current(principal)
            self.door.demand_readable(sync.partitions, principal)
            self.door.demand_epoch(sync.epoch)
            await self.drained()
            await self._page(sync, message.msg_id)
        except DoorError as error:
            self._refuse(error, message.msg_id)

    async def _page(self, sync: Sync, msg_id: bytes) -> None:
        """One page. If it cannot be read the scope is as it was, and goes on where it stood."""
        was_delivering = self._pause()
        cycle = self._cycle
        goes_on = cycle is not None and (cycle.partitions, cycle.following) == (sync.partitions, sync.since)
        try:
            upto = cycle.upto if cycle is not None and goes_on else self.door.hub.position
            page = await self.door.read(sync, upto)
        except BaseException:
            if was_delivering:
                self._catch_up_soon()
            else:
                self._watch_cycle()
            raise
        if self.mode is Mode.CLOSED:
            return
        self.partitions = sync.partitions
        self._delivered = max(page.upto, sync.since)
        self._release(self._delivered)
        parts = self.door.page(sync, page)
        self._put_frame(words.frame_of_parts(b"sync_response", parts, self.door.clock.wall_ms(), msg_id))
        self.door.hub.flush_soon(self)
        if page.has_more:
            self._cycle = _Cycle(sync.partitions, page.next, self._delivered)
            self._watch_cycle()
        else:
            self._catch_up_soon()

    def _pause(self) -> bool:
        """Stops broadcasts. True if there were any, or would have been."""
        self._stop_timer()
        if self.mode is Mode.LIVE:
            self.door.hub.leave(self)
            self._delivered = self.door.hub.position
        elif self._catching is not None:
            self._catching.cancel()
            self._catching = None
        elif self.mode is Mode.IDLE:
            self._delivered = self.door.hub.position
        was_delivering = self.mode in (Mode.LIVE, Mode.CATCHING, Mode.IDLE)
        self.mode, self._holds_back = Mode.PAUSED, True
        return was_delivering

    def _catch_up_soon(self) -> None:
        self._cycle = None
        if self.mode is Mode.CLOSED:
            return
        if self._is_level():
            self._go_live()
            return
        self.mode, self._holds_back = Mode.CATCHING, True
        self._catching = asyncio.get_running_loop().create_task(self._catch_up())

    def _is_level(self) -> bool:
        return self._delivered >= self.door.hub.position or not self.partitions

    def _go_live(self) -> None:
        """From here on the hub delivers. Nothing may be awaited between the look at its position and this."""
        self._delivered = max(self._delivered, self.door.hub.position)
        self._release(self._delivered)
        self._own.clear()
        self._catching = None
        self._holds_back = False
        if self.partitions:
            self.door.hub.join(self)
            self.mode = Mode.LIVE
        else:
            self.mode = Mode.IDLE
        self.door.hub.flush_soon(self)

    async def _catch_up(self) -> None:
        """What was committed while the cycle was open, in order, the answers of its own in their places."""
        door = self.door
        try:
            while not self._is_level():
                reading = await door.log.read(
                    partitions=self.partitions,
                    after=self._delivered,
                    upto=door.hub.position,
                    limit=CATCH_UP_RECORDS,
                )
                for record in filter(is_event, reading.records):
                    self._release(record.position - 1)
                    if record.position not in self._own:
                        event = words.event_json(record)
                        self._put_frame(self._framed(b"event_broadcast", event))
                        door.counts.deliveries += 1
                self._delivered = reading.cursor.position
                self._release(self._delivered)
                self.flush()
                await self.drained()
            self._go_live()
        except OncelogError as error:
            self._catching = None
            self.end(error)

    # --- a cycle that nobody goes on with

    def _watch_cycle(self) -> None:
        """An answer must not wait for ever for pages that its client does not ask for."""
        if self._held and self._cycle is not None and self._idle_timer is None:
            idle_s = self.door.limits.cycle_idle_ms / 1000
            self._idle_timer = asyncio.get_running_loop().call_later(idle_s, self._give_cycle_up)

    def _give_cycle_up(self) -> None:
        """What the rest of the pages would have brought is broadcast in its place: no gap, and in order."""
        self._idle_timer = None
        cycle = self._cycle
        if cycle is not None and self.mode is Mode.PAUSED:
            self._delivered = cycle.following
            self._catch_up_soon()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    # --- frames out

    def _framed(self, kind: bytes, payload: bytes, msg_id: bytes = b"") -> bytes:
        return words.frame(words.envelope(kind, payload, self.door.clock.wall_ms(), msg_id))

    def _send(self, kind: bytes, payload: bytes, msg_id: bytes = b"") -> None:
        self._put_frame(self._framed(kind, payload, msg_id))
        self.door.hub.flush_soon(self)

    def _put_frame(self, frame: bytes) -> None:
        self.outbox.append(frame)
        self.outbox_bytes += len(frame)

    def _refuse(self, error: DoorError, msg_id: bytes) -> None:
        self.door.counts.requests["events", "websocket", error.code] += 1
        self._send(b"error", words.error_json(error), msg_id)
        self._end_if(error)

    def _end_if(self, error: DoorError) -> None:
        if error.code in words.CLOSING:
            self.finish(_CODES.get(error.code, CloseCode.POLICY), error.code)

    def flush(self) -> None:
        """Writes what is in the outbox, up to an answer that is not known yet."""
        outbox = self.outbox
        if not outbox or self.mode is Mode.CLOSED or self._has_ended:
            return
        if self._draining is not None or self.wire.waiting_bytes() > WIRE_BYTES_HIGH:
            self._wait_for_room()
            return
        if not self._answers_in_outbox:
            data = b"".join(cast("list[bytes]", outbox))
            outbox.clear()
            self.outbox_bytes = 0
        else:
            data = self._taken()
        if data:
            self.door.counts.bytes_sent += len(data)
            self.wire.write(data)

    def _taken(self) -> bytes:
        frames: list[bytes] = []
        for one in self.outbox:
            if isinstance(one, Answer):
                if one.frame is None:
                    break
                frames.append(one.frame)
                self._answers_in_outbox -= 1
                self._events_in_flight -= len(one.ids) if isinstance(one, _Pending) else 0
            else:
                frames.append(one)
                self.outbox_bytes -= len(one)
        del self.outbox[: len(frames)]
        return b"".join(frames)

    def _wait_for_room(self) -> None:
        """The reader is slower than what comes for it: that is counted, warned of, and ended (CO-31)."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        limits = self.door.limits
        frames, size = len(self.outbox), self.outbox_bytes
        if frames > limits.outbox_frames_max or size > limits.outbox_bytes_max:
            logger.warning("a slow reader is closed", extra=self._described(waiting=frames, waiting_bytes=size))
            self.door.counts.slow_readers_closed += 1
            # There is no room for a word of farewell either. What it has not read is in the store, behind its cursor.
            self.closed()
            self.wire.abort()
        elif not self._is_warned and (2 * frames > limits.outbox_frames_max or 2 * size > limits.outbox_bytes_max):
            self._is_warned = True
            logger.warning("a reader is slow", extra=self._described(waiting=frames, waiting_bytes=size))
            self.door.counts.slow_readers_warned += 1

    async def _drain(self) -> None:
        try:
            await self.wire.drained()
        finally:
            self._draining = None
        self._is_warned = False
        self.flush()

    async def drained(self) -> None:
        """Returns when what was sent is on its way: a client that asks for pages gets no more than it reads."""
        self.flush()
        while self._draining is not None and self.mode is not Mode.CLOSED:
            await asyncio.wait([self._draining])

    # --- the end

    def renew(self, principal: Principal | None) -> None:
        """The rights of now. Ends the connection if there are none any more, or its scope is not among them."""
        if principal is None or not all(map(principal.grants.may_read, self.partitions)):
            self._refuse(DoorError(words.AUTH_FAILED, "the token has expired, or its rights have changed"), b"")
        else:
            self.principal = principal
            self._writable.clear()

    def end(self, error: Exception) -> None:
        """The log could not be read."""
        self._refuse(error_of(error), b"")

    def finish(self, code: int, reason: str) -> None:
        """Ends the connection, after what is in the outbox and can be written."""
        if self._is_ending:
            return
        self._is_ending = True
        self.flush()
        self._has_ended = True
        self.wire.close(code, reason)

    def closed(self) -> None:
        """The connection is gone."""
        if self.mode is Mode.LIVE:
            self.door.hub.leave(self)
        self.mode = Mode.CLOSED
        self._stop_timer()
        for task in (self._catching, self._draining):
            if task is not None:
                task.cancel()
        self.outbox.clear()
        self._held.clear()
        self._own.clear()

    def _described(self, **fields: JsonValue) -> Mapping[str, JsonValue]:
        actor = None if self.principal is None else self.principal.actor
        return {"address": self.address, "client_id": self.client_id, "actor": actor, **fields}
