"""What one connection reads: requested pages, then broadcasts, in the order that EV-12 to EV-15 define.

A subscriber's scope is the partitions of its last `sync`. A subscriber is in one of these modes:

    idle      no `sync` yet
    paused    a sync cycle is open: the subscriber holds broadcasts, and replies that would overtake them
    catching  the cycle is complete: the subscriber reads the records committed meanwhile from the store and sends them
    live      the hub puts records directly into the send queue
    ended     the connection is closed

The subscriber has delivered all records of its scope up to `_delivered`. It never broadcasts an event to the connection
that submitted it: the reply takes the event's place in the order. `OwnPositions` keeps the positions of these events
for as long as the connection lives, up to a limit. If a catch-up would begin before the oldest kept position, the
server closes the connection. The client then syncs again on a new connection and loses nothing.
"""

import asyncio
import heapq
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

CATCH_UP_RECORDS: Final = 500
RANGES_MAX: Final = 4096
"""Maximum number of ranges of consecutive positions per connection (64 KiB). Above it, the lower half is dropped."""


class SubscriptionMode(Enum):
    """Mode of a subscriber. The module docstring describes the modes."""

    IDLE = "idle"
    PAUSED = "paused"
    CATCHING_UP = "catching"
    LIVE = "live"
    ENDED = "ended"


class _Cycle(Struct, frozen=True):
    """An open sync cycle."""

    partitions: tuple[str, ...]
    following: int
    upto: int


class OwnPositions:
    """Positions of the events that one connection submitted, which are not broadcast to it (EV-14).

    The positions are stored as ascending ranges, up to a limit. `known_after` is the highest dropped position.
    """

    __slots__ = ("_firsts", "_lasts", "known_after")

    def __init__(self) -> None:
        self._firsts = array("q")
        self._lasts = array("q")
        self.known_after = 0

    def add(self, position: int) -> None:
        """Add a position, which is usually higher than all previous ones."""
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
    """Delivers pages and broadcasts to one connection."""

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
        self.abort = on_abort
        """See `EventReader`."""
        self._on_untracked = on_untracked
        self._delivered = 0
        self._cycle: _Cycle | None = None
        self._held_replies: list[tuple[int, int, PendingReply]] = []
        self._held_order = count()
        self._own_positions = OwnPositions()
        self.add_own = self._own_positions.add
        """See `EventReader`."""
        self._holds_replies = False
        """Whether replies that would overtake broadcasts are held back (in the modes paused and catching)."""
        self._is_reading = False
        self._catch_up_task: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_paging(self) -> bool:
        """Whether a sync cycle is open."""
        return self._cycle is not None

    # --- places of replies (see `EventReader`)

    def place(self, number: int, reply: PendingReply) -> None:
        """See `EventReader`."""
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
        """See `EventReader`."""
        if self.mode is SubscriptionMode.ENDED:
            return
        reply.placed_at = number
        if not self._holds_replies or not self._hold_reply(number, reply):
            self.replies.place_after_previous(reply)

    def _hold_reply(self, number: int, reply: PendingReply) -> bool:
        """Hold a reply back if it would overtake broadcasts. Returns whether it is held."""
        if number <= self._delivered:
            return False
        heapq.heappush(self._held_replies, (number, next(self._held_order), reply))
        self._watch_cycle()
        return True

    def _release_replies(self, upto: int) -> None:
        """Place the held replies up to a position. Skips entries of replies that have moved to a later entry."""
        while self._held_replies and self._held_replies[0][0] <= upto:
            number, _, reply = heapq.heappop(self._held_replies)
            if reply.placed_at == number:
                self.replies.place(reply)

    # --- pages

    async def send_page(self, sync: Sync, msg_id: bytes, check_allowed: Callable[[], None]) -> None:
        """Send a page. If the read fails, scope and delivery do not change.

        `check_allowed` runs after the read, because the rights may have changed meanwhile. Raises its errors, or
        ApiError.
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
        # The rest of the cycle has not been delivered. If the client abandons the cycle, the catch-up delivers it.
        self._delivered = page.next
        self._release_replies(self._delivered)
        parts = self._service.encode_page(sync, page, self.dialect)
        self.send_queue.put(self.dialect.encode_frame(b"sync_response", parts, self._service.clock.wall_ms(), msg_id))
        self._hub.coalescer.schedule(self)
        if page.has_more:
            self._cycle = _Cycle(sync.partitions, page.next, max(page.upto, sync.since))
            self._watch_cycle()
        else:
            self._start_catch_up()

    def _pause(self) -> bool:
        """Stop broadcasts. Returns whether the subscriber was live or catching up."""
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
        """Return whether the subscriber has reached the hub's position.

        A reader that was connected to a different server before may be ahead of the hub.
        """
        return self._delivered == self._hub.position or not self.partitions

    def _go_live(self) -> None:
        """Hand the delivery over to the hub. The caller must not await between checking the position and this call."""
        self._catch_up_task = None
        if self.mode is SubscriptionMode.ENDED:
            return
        self._delivered = max(self._delivered, self._hub.position)
        self._release_replies(self._delivered)
        self._holds_replies = False
        self.mode = SubscriptionMode.LIVE if self.partitions else SubscriptionMode.IDLE
        self._hub.join(self)
        self._hub.coalescer.schedule(self)

    async def _catch_up(self) -> None:
        """Send the records committed during the cycle, in order, with the held replies in their places."""
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
        except Exception as error:  # noqa: BLE001 - after any error the client must not wait indefinitely
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

    # --- abandoned cycles

    def _watch_cycle(self) -> None:
        """Start a timer while replies are held, because the client may never request the remaining pages."""
        if self._held_replies and self._cycle is not None and self._idle_timer is None and not self._is_reading:
            idle_s = self._service.limits.cycle_idle_ms / 1000
            self._idle_timer = asyncio.get_running_loop().call_later(idle_s, self._abandon_cycle)

    def _abandon_cycle(self) -> None:
        """Deliver the remaining pages as broadcasts, in order and without a gap."""
        self._idle_timer = None
        if self._cycle is not None and self.mode is SubscriptionMode.PAUSED:
            self._start_catch_up()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    # --- the end

    def stop(self) -> None:
        """Stop the delivery."""
        if self.mode is SubscriptionMode.LIVE:
            self._hub.leave(self)
        self.mode = SubscriptionMode.ENDED
        self._stop_timer()
        if self._catch_up_task is not None:
            self._catch_up_task.cancel()
        self._held_replies.clear()
