"""What one connection reads: pages that it asks for, then what comes, in the order that EV-12 to EV-15 say.

A subscriber has a scope: the partitions of its last `sync`. It is in one of these modes:

    idle      it has not asked for anything yet
    paused    a sync cycle is open: no broadcasts, and answers that would overtake them are held
    catching  the cycle is over: what was committed meanwhile is read from the store and sent, in order
    live      the hub puts records straight into the outbox
    ended     nothing more

`delivered` says up to where the reader has got everything in its scope. An event that it submitted is never broadcast
to it, in any mode; its place in the order is that of its answer. The positions of these events are kept for the life of
the connection, as far as there is room (`OwnPositions`). A reader that would have to catch up from before the
positions that were forgotten is closed: it can sync again on another connection, without a loss.
"""

import asyncio
import heapq
import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Final

from msgspec import Struct

from oncelog.server.events.dialect import Dialect, Sync
from oncelog.server.events.hub import PendingReply, is_event
from oncelog.server.events.service import EventsService
from oncelog.server.reply_queue import ReplyQueue
from oncelog.server.send_queue import SendQueue

logger: Final = logging.getLogger("oncelog.doors")

CATCH_UP_RECORDS: Final = 500
RANGES_MAX: Final = 4096
"""Ranges of consecutive positions that one connection keeps: 64 KiB. The lower half is forgotten beyond it."""


class SubscriptionMode(Enum):
    """See above."""

    IDLE = "idle"
    PAUSED = "paused"
    CATCHING_UP = "catching"
    LIVE = "live"
    ENDED = "ended"


class _Cycle(Struct, frozen=True):
    """A paging that goes on."""

    partitions: tuple[str, ...]
    following: int
    upto: int


class OwnPositions:
    """Positions of the events that one connection submitted, so that they are not broadcast to it (EV-14).

    Ranges of positions, in ascending order. Bounded: `known_after` is the highest position that was forgotten.
    """

    __slots__ = ("_firsts", "_lasts", "known_after")

    def __init__(self) -> None:
        self._firsts = array("q")
        self._lasts = array("q")
        self.known_after = 0

    def add(self, position: int) -> None:
        """Add a position. Most are higher than all before."""
        last_positions = self._lasts
        if not last_positions or position > last_positions[-1] + 1:
            at = len(last_positions)
        elif position == last_positions[-1] + 1:
            last_positions[-1] = position
            return
        elif position > self.known_after and position not in self:
            at = bisect_left(last_positions, position)
        else:
            return
        self._firsts.insert(at, position)
        last_positions.insert(at, position)
        if len(last_positions) > RANGES_MAX:
            half = len(last_positions) // 2
            self.known_after = last_positions[half - 1]
            del self._firsts[:half], last_positions[:half]

    def __contains__(self, position: int) -> bool:
        at = bisect_left(self._lasts, position)
        return at < len(self._lasts) and self._firsts[at] <= position


class Subscriber:
    """The reading side of one connection."""

    def __init__(
        self,
        service: EventsService,
        replies: ReplyQueue,
        send_queue: SendQueue,
        on_error: Callable[[Exception], None],
        on_abort: Callable[[], None],
        on_untracked: Callable[[], None],
    ) -> None:
        self.mode = SubscriptionMode.IDLE
        self.partitions: tuple[str, ...] = ()
        self.send_queue = send_queue
        self.replies = replies
        self.dialect: Dialect = service.native
        self._service = service
        self._hub = service.hub
        self._on_error = on_error
        self._on_abort = on_abort
        self._on_untracked = on_untracked
        self._delivered = 0
        self._cycle: _Cycle | None = None
        self._held_replies: list[tuple[int, int, PendingReply]] = []
        self._held_order = count()
        self._own_positions = OwnPositions()
        self.add_own = self._own_positions.add
        """As `EventReader` says."""
        self._holds_replies = False
        """Paused or catching: answers that would overtake broadcasts are held."""
        self._is_reading = False
        self._catch_up_task: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_paging(self) -> bool:
        """Whether a cycle is open."""
        return self._cycle is not None

    # --- the place of an answer (see `EventReader`)

    def place(self, number: int, reply: PendingReply) -> None:
        """As `EventReader` says."""
        if self.mode is SubscriptionMode.ENDED:
            return
        if reply.placed_at is not None:
            if reply.placed_at >= number:
                return
            if reply.is_placed:
                self.replies.unplace(reply)
        reply.placed_at = number
        if not self._holds_replies or not self._hold_reply(number, reply):
            self.replies.place(reply)

    def place_after_previous(self, number: int, reply: PendingReply) -> None:
        """As `EventReader` says."""
        if self.mode is SubscriptionMode.ENDED:
            return
        reply.placed_at = number
        if not self._holds_replies or not self._hold_reply(number, reply):
            self.replies.place_after_previous(reply)

    def _hold_reply(self, number: int, reply: PendingReply) -> bool:
        """Hold an answer that would overtake broadcasts."""
        if number <= self._delivered:
            return False
        heapq.heappush(self._held_replies, (number, next(self._held_order), reply))
        self._watch_cycle()
        return True

    def abort(self) -> None:
        """As `EventReader` says."""
        self._on_abort()

    def _release_replies(self, upto: int) -> None:
        """Held answers whose turn has come. One that has moved on since stands there a second time, further back."""
        while self._held_replies and self._held_replies[0][0] <= upto:
            number, _, reply = heapq.heappop(self._held_replies)
            if reply.placed_at == number:
                self.replies.place(reply)

    # --- pages

    async def send_page(self, sync: Sync, msg_id: bytes, check_allowed: Callable[[], None]) -> None:
        """Sends a page. If it cannot be read the scope is as it was, and goes on where it stood.

        `check_allowed` is asked once more when it has been read: rights may have been taken away meanwhile. Raises
        what it raises, and ApiError.
        """
        await self.send_queue.drain()
        was_delivering = self._pause()
        cycle = self._cycle
        is_continued = cycle is not None and (cycle.partitions, cycle.following) == (sync.partitions, sync.since)
        self._is_reading = True
        try:
            upto = cycle.upto if cycle is not None and is_continued else self._hub.position
            page = await self._service.load_page(sync, upto, self.dialect)
            check_allowed()
        except BaseException:
            self._is_reading = False
            if was_delivering:
                self._start_catch_up()
            else:
                self._watch_cycle()
            raise
        self._is_reading = False
        if self.mode is SubscriptionMode.ENDED:
            return
        self.partitions = sync.partitions
        # What the rest of the cycle will bring has not been delivered: if nobody goes on with it, it still will be.
        self._delivered = page.next
        self._release_replies(self._delivered)
        parts = self._service.encode_page(sync, page, self.dialect)
        self.send_queue.put(self.dialect.encode_frame(b"sync_response", parts, self._service.clock.wall_ms(), msg_id))
        self._hub.schedule_flush(self)
        if page.has_more:
            self._cycle = _Cycle(sync.partitions, page.next, max(page.upto, sync.since))
            self._watch_cycle()
        else:
            self._start_catch_up()

    def _pause(self) -> bool:
        """Stops broadcasts. True if there were any, or would have been."""
        self._stop_timer()
        was_delivering = self.mode is not SubscriptionMode.PAUSED
        if self.mode is SubscriptionMode.ENDED:
            return False
        if self._catch_up_task is not None:
            self._catch_up_task.cancel()
            self._catch_up_task = None
        elif was_delivering:
            self._hub.leave(self)
            self._delivered = self._hub.position
        self.mode, self._holds_replies = SubscriptionMode.PAUSED, True
        return was_delivering

    # --- catching up

    def _start_catch_up(self) -> None:
        self._cycle = None
        if self.mode is SubscriptionMode.ENDED:
            return
        if self._is_caught_up():
            self._go_live()
            return
        self.mode, self._holds_replies = SubscriptionMode.CATCHING_UP, True
        self._catch_up_task = asyncio.get_running_loop().create_task(self._catch_up())

    def _is_caught_up(self) -> bool:
        """Not if it is ahead either: a reader that comes from another server may have read what the hub has not."""
        return self._delivered == self._hub.position or not self.partitions

    def _go_live(self) -> None:
        """From here on the hub delivers. Nothing may be awaited between the look at its position and this."""
        self._catch_up_task = None
        if self.mode is SubscriptionMode.ENDED:
            return
        self._delivered = max(self._delivered, self._hub.position)
        self._release_replies(self._delivered)
        self._holds_replies = False
        self.mode = SubscriptionMode.LIVE if self.partitions else SubscriptionMode.IDLE
        self._hub.join(self)
        self._hub.schedule_flush(self)

    async def _catch_up(self) -> None:
        """What was committed while the cycle was open, in order, the answers of its own in their places."""
        try:
            while not self._is_caught_up():
                if self._delivered > self._hub.position:
                    await self._hub.wait_for_position(self._delivered)
                elif self._delivered < self._own_positions.known_after:
                    self._catch_up_task = None
                    self._on_untracked()
                    return
                else:
                    await self._catch_up_page()
            self._go_live()
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must not wait for ever
            self._catch_up_task = None
            self._on_error(error)

    async def _catch_up_page(self) -> None:
        page = await self._service.log.read(
            partitions=self.partitions, after=self._delivered, upto=self._hub.position, limit=CATCH_UP_RECORDS
        )
        now_ms = self._service.clock.wall_ms()
        for record in filter(is_event, page.records):
            self._release_replies(record.position - 1)
            frame = None if record.position in self._own_positions else self.dialect.encode_broadcast(record, now_ms)
            if frame is not None:
                self.send_queue.put(frame)
                self._service.counts.deliveries += 1
        self._delivered = page.cursor.position
        self._release_replies(self._delivered)
        await self.send_queue.drain()

    # --- a cycle that nobody goes on with

    def _watch_cycle(self) -> None:
        """An answer must not wait for ever for pages that its client does not ask for."""
        if self._held_replies and self._cycle is not None and self._idle_timer is None and not self._is_reading:
            idle_s = self._service.limits.cycle_idle_ms / 1000
            self._idle_timer = asyncio.get_running_loop().call_later(idle_s, self._abandon_cycle)

    def _abandon_cycle(self) -> None:
        """What the rest of the pages would have brought is broadcast in its place: no gap, and in order."""
        self._idle_timer = None
        if self._cycle is not None and self.mode is SubscriptionMode.PAUSED:
            self._start_catch_up()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    # --- the end

    def stop(self) -> None:
        """Gets nothing more."""
        if self.mode is SubscriptionMode.LIVE:
            self._hub.leave(self)
        self.mode = SubscriptionMode.ENDED
        self._stop_timer()
        if self._catch_up_task is not None:
            self._catch_up_task.cancel()
        self._held_replies.clear()
