"""When the next group commit begins: at once, unless others are on their way.

Who was answered together comes back together, and the first one back would take a whole transaction for itself while
the others wait. So it waits for half of them, for as long as they keep coming. Who comes alone, or long after them,
waits for nobody: there is no timer on the idle path.

What a transaction costs beside its items is paid by all that come in it. While the thread of the event loop has no time
to spare, few in each would leave less of it for everybody: then they wait for all who were there last time, or until
enough has come.

And when all that there are have come in one transaction, the thread has nothing to do while it is made durable. Then
they are divided: one half is made durable while the other is answered and comes back, by turns from then on.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

RETURNING_MIN: Final = 16
"""Below so many nobody waits for anybody,"""
RETURNING_BUSY_MIN: Final = 4
"""or below so many where the thread is busy: over gRPC calls come in one by one, and who is on the way is not seen."""
RETURNING_S: Final = 0.01
"""Who comes later after the last commit than this has not come back from it."""
SILENT_S: Final = 0.001
"""A wait ends when nobody has come for so long,"""
SILENT_BUSY_S: Final = 0.002
"""or for so long where the thread is busy: it takes longer from one to the next, and a thread that computes for more
than half of this is not silent, but answers those who will come,"""
WAIT_S: Final = 0.01
"""and so long after that in any case."""
BUSY: Final = 0.5
"""A thread that computes for more than this part of the time has none to spare: others take their share of its core,"""
ENOUGH_ITEMS: Final = 64
"""and so many share what a transaction costs well enough."""
HALVED_MIN: Final = 2 * ENOUGH_ITEMS
"""So many are committed in two halves, if they would all wait for one commit."""


class Gathering:
    """Of one committer. `queued` says how many callers wait, and `has_enough` whether no more are worth waiting for."""

    def __init__(self, queued: Callable[[], int], has_enough: Callable[[], bool]) -> None:
        self._queued = queued
        self._has_enough = has_enough
        self._settled_s = 0.0
        self._returning = 0
        """So many waited when the last batch was settled, in it and behind it."""
        self.are_in_step = False
        """Nobody came while the last batch was made durable: all who are there were in it."""
        self._is_busy = False
        self._computed_s = math.inf
        """The processor time of this thread by then: of the first batch nothing can be said."""
        self._enough: asyncio.Future[None] | None = None
        self.is_waiting = False
        """Somebody does: those who come are to be told by `arrived`."""

    def settled(self, callers: int) -> None:
        """A batch of so many has been answered."""
        now_s, computed_s = time.perf_counter(), time.thread_time()
        self._is_busy = computed_s - self._computed_s > BUSY * (now_s - self._settled_s)
        self._settled_s, self._computed_s = now_s, computed_s
        queued = self._queued()
        self._returning = callers + queued
        self.are_in_step = not queued

    def arrived(self) -> None:
        """Another one has come."""
        if self._enough is not None and self._is_enough:
            _let_go(self._enough)

    @property
    def _is_enough(self) -> bool:
        if self._is_busy:
            return self._queued() >= self._returning or self._has_enough()
        return self._queued() * 2 >= self._returning

    @property
    def is_wanted(self) -> bool:
        """Whether the next batch should `wait`."""
        if self._returning < (RETURNING_BUSY_MIN if self._is_busy else RETURNING_MIN):
            return False
        is_first = not self._is_enough if self._is_busy else self._queued() * 4 < self._returning
        return is_first and time.perf_counter() - self._settled_s <= RETURNING_S

    @property
    def is_wanted_still(self) -> bool:
        """Not for ever: those who come one by one may be others."""
        return time.perf_counter() - self._settled_s <= RETURNING_S + WAIT_S

    def _is_silent(self, seen: int, computed_s: float) -> bool:
        """Nobody has come, and a busy thread has not been kept from hearing of them."""
        if seen < self._queued():
            return False
        return not self._is_busy or time.thread_time() - computed_s <= SILENT_BUSY_S / 2

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns when enough of them are there, or no more come."""
        seen, computed_s = 0, math.inf
        while not self._is_silent(seen, computed_s) and not self._is_enough and self.is_wanted_still:
            seen, computed_s = self._queued(), time.thread_time()
            self._enough = enough = loop.create_future()
            self.is_waiting = True
            timer = loop.call_later(SILENT_BUSY_S if self._is_busy else SILENT_S, _let_go, enough)
            try:
                await enough
            finally:
                self._enough = None
                self.is_waiting = False
                timer.cancel()
            # A timer comes before what has arrived meanwhile, and a loop that was busy reading is not silence.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def _let_go(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
