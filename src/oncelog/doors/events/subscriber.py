"""What one connection reads: pages that it asks for, then what comes, in the order that EV-12 to EV-15 say.

A subscriber has a scope: the partitions of its last `sync`. It is in one of these modes:

    idle      it has not asked for anything yet
    paused    a sync cycle is open: no broadcasts, and answers that would overtake them are held
    catching  the cycle is over: what was committed meanwhile is read from the store and sent, in order
    live      the hub puts records straight into the outbox
    ended     nothing more

`delivered` says up to where the reader has got everything in its scope. An event that it submitted is never broadcast
to it, in any mode; its place in the order is that of its answer. The positions of these events are kept for the life of
the connection, as far as there is room (`own`). A reader that would have to catch up from before the positions that
were forgotten is closed: it can sync again on another connection, without a loss.
"""

import asyncio
import heapq
import logging
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Final

from msgspec import Struct

from oncelog.doors.events.dialect import Dialect
from oncelog.doors.events.door import EventsDoor
from oncelog.doors.events.hub import Flight, is_event
from oncelog.doors.events.own import OwnPositions
from oncelog.doors.events.reading import Sync
from oncelog.doors.outbox import Outbox
from oncelog.doors.replies import ReplyQueue

logger: Final = logging.getLogger("oncelog.doors")

CATCH_UP_RECORDS: Final = 500


class Reads(Enum):
    """See above."""

    IDLE = "idle"
    PAUSED = "paused"
    CATCHING = "catching"
    LIVE = "live"
    ENDED = "ended"


class _Cycle(Struct, frozen=True):
    """A paging that goes on."""

    partitions: tuple[str, ...]
    following: int
    upto: int


class Subscriber:
    """The reading side of one connection."""

    def __init__(
        self,
        door: EventsDoor,
        replies: ReplyQueue,
        outbox: Outbox,
        on_error: Callable[[Exception], None],
        on_abort: Callable[[], None],
        on_lost_track: Callable[[], None],
    ) -> None:
        self.mode = Reads.IDLE
        self.partitions: tuple[str, ...] = ()
        self.outbox = outbox
        self.replies = replies
        self.dialect: Dialect = door.first
        self._door = door
        self._hub = door.hub
        self._on_error = on_error
        self._on_abort = on_abort
        self._on_lost_track = on_lost_track
        self._delivered = 0
        self._cycle: _Cycle | None = None
        self._held: list[tuple[int, int, Flight]] = []
        self._order = count()
        self._own = OwnPositions()
        self.own = self._own.add
        """As `Reader` says."""
        self._holds_back = False
        """Paused or catching: answers that would overtake broadcasts are held."""
        self._is_reading = False
        self._catching: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_paging(self) -> bool:
        """Whether a cycle is open."""
        return self._cycle is not None

    # --- the place of an answer (see `Reader`)

    def place(self, number: int, flight: Flight) -> None:
        """As `Reader` says."""
        if self.mode is Reads.ENDED:
            return
        if flight.placed_at is not None:
            if flight.placed_at >= number:
                return
            if flight.is_placed:
                self.replies.take_back(flight)
        flight.placed_at = number
        if not self._holds_back or not self._hold(number, flight):
            self.replies.place(flight)

    def enter(self, number: int, flight: Flight) -> None:
        """As `Reader` says."""
        if self.mode is Reads.ENDED:
            return
        flight.placed_at = number
        if not self._holds_back or not self._hold(number, flight):
            self.replies.enter(flight)

    def _hold(self, number: int, flight: Flight) -> bool:
        """Hold an answer that would overtake broadcasts."""
        if number <= self._delivered:
            return False
        heapq.heappush(self._held, (number, next(self._order), flight))
        self._watch_cycle()
        return True

    def abort(self) -> None:
        """As `Reader` says."""
        self._on_abort()

    def _release(self, upto: int) -> None:
        """Held answers whose turn has come. One that has moved on since stands there a second time, further back."""
        while self._held and self._held[0][0] <= upto:
            number, _, flight = heapq.heappop(self._held)
            if flight.placed_at == number:
                self.replies.place(flight)

    # --- pages

    async def page(self, sync: Sync, msg_id: bytes, demand_allowed: Callable[[], None]) -> None:
        """Sends a page. If it cannot be read the scope is as it was, and goes on where it stood.

        `demand_allowed` is asked once more when it has been read: rights may have been taken away meanwhile. Raises
        what it raises, and DoorError.
        """
        await self.outbox.drained()
        was_delivering = self._pause()
        cycle = self._cycle
        goes_on = cycle is not None and (cycle.partitions, cycle.following) == (sync.partitions, sync.since)
        self._is_reading = True
        try:
            upto = cycle.upto if cycle is not None and goes_on else self._hub.position
            page = await self._door.read(sync, upto, self.dialect)
            demand_allowed()
        except BaseException:
            self._is_reading = False
            if was_delivering:
                self._catch_up_soon()
            else:
                self._watch_cycle()
            raise
        self._is_reading = False
        if self.mode is Reads.ENDED:
            return
        self.partitions = sync.partitions
        # What the rest of the cycle will bring has not been delivered: if nobody goes on with it, it still will be.
        self._delivered = page.next
        self._release(self._delivered)
        parts = self._door.page(sync, page, self.dialect)
        self.outbox.put(self.dialect.frame(b"sync_response", parts, self._door.clock.wall_ms(), msg_id))
        self._hub.flush_soon(self)
        if page.has_more:
            self._cycle = _Cycle(sync.partitions, page.next, max(page.upto, sync.since))
            self._watch_cycle()
        else:
            self._catch_up_soon()

    def _pause(self) -> bool:
        """Stops broadcasts. True if there were any, or would have been."""
        self._stop_timer()
        was_delivering = self.mode is not Reads.PAUSED
        if self.mode is Reads.ENDED:
            return False
        if self._catching is not None:
            self._catching.cancel()
            self._catching = None
        elif was_delivering:
            self._hub.leave(self)
            self._delivered = self._hub.position
        self.mode, self._holds_back = Reads.PAUSED, True
        return was_delivering

    # --- catching up

    def _catch_up_soon(self) -> None:
        self._cycle = None
        if self.mode is Reads.ENDED:
            return
        if self._is_level():
            self._go_live()
            return
        self.mode, self._holds_back = Reads.CATCHING, True
        self._catching = asyncio.get_running_loop().create_task(self._catch_up())

    def _is_level(self) -> bool:
        """Not if it is ahead either: a reader that comes from another gateway may have read what the hub has not."""
        return self._delivered == self._hub.position or not self.partitions

    def _go_live(self) -> None:
        """From here on the hub delivers. Nothing may be awaited between the look at its position and this."""
        self._catching = None
        if self.mode is Reads.ENDED:
            return
        self._delivered = max(self._delivered, self._hub.position)
        self._release(self._delivered)
        self._holds_back = False
        self.mode = Reads.LIVE if self.partitions else Reads.IDLE
        self._hub.join(self)
        self._hub.flush_soon(self)

    async def _catch_up(self) -> None:
        """What was committed while the cycle was open, in order, the answers of its own in their places."""
        try:
            while not self._is_level():
                if self._delivered > self._hub.position:
                    await self._hub.reached(self._delivered)
                elif self._delivered < self._own.known_after:
                    self._catching = None
                    self._on_lost_track()
                    return
                else:
                    await self._catch_up_once()
            self._go_live()
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must not wait for ever
            self._catching = None
            self._on_error(error)

    async def _catch_up_once(self) -> None:
        reading = await self._door.log.read(
            partitions=self.partitions, after=self._delivered, upto=self._hub.position, limit=CATCH_UP_RECORDS
        )
        now_ms = self._door.clock.wall_ms()
        for record in filter(is_event, reading.records):
            self._release(record.position - 1)
            frame = None if record.position in self._own else self.dialect.broadcast(record, now_ms)
            if frame is not None:
                self.outbox.put(frame)
                self._door.counts.deliveries += 1
        self._delivered = reading.cursor.position
        self._release(self._delivered)
        await self.outbox.drained()

    # --- a cycle that nobody goes on with

    def _watch_cycle(self) -> None:
        """An answer must not wait for ever for pages that its client does not ask for."""
        if self._held and self._cycle is not None and self._idle_timer is None and not self._is_reading:
            idle_s = self._door.limits.cycle_idle_ms / 1000
            self._idle_timer = asyncio.get_running_loop().call_later(idle_s, self._give_cycle_up)

    def _give_cycle_up(self) -> None:
        """What the rest of the pages would have brought is broadcast in its place: no gap, and in order."""
        self._idle_timer = None
        cycle = self._cycle
        if cycle is not None and self.mode is Reads.PAUSED:
            self._catch_up_soon()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    # --- the end

    def end(self) -> None:
        """Gets nothing more."""
        if self.mode is Reads.LIVE:
            self._hub.leave(self)
        self.mode = Reads.ENDED
        self._stop_timer()
        if self._catching is not None:
            self._catching.cancel()
        self._held.clear()
