"""When the next group commit begins: at once, unless others are on their way.

Who was answered together comes back together, and the first one back would take a whole transaction for itself while
the others wait. So it waits for half of them, for as long as they keep coming. Who comes alone, or long after them,
waits for nobody: there is no timer on the idle path.

What a transaction costs beside its items is paid by all that come in it. While the thread of the event loop has no time
to spare, few in each would leave less of it for everybody: then they wait for all who were there last time, or until
enough has come.

And when all that there are have come in one transaction, the thread has nothing to do while it is made durable. Then
they are divided: one half is made durable while the other is answered and comes back, by turns from then on. That is
worth a transaction more only where the disk is quick: on a slower one they stay together, and come together again.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

RETURNING_MIN: Final = 16
"""Below so many nobody waits for anybody."""
RETURNING_S: Final = 0.01
"""Who comes later after the last commit than this has not come back from it."""
SILENT_S: Final = 0.001
"""A wait ends when nobody has come for so long,"""
SILENT_BUSY_S: Final = 0.002
"""or for so long where the thread is busy: it takes longer from one to the next,"""
WAIT_S: Final = 0.01
"""and so long after that in any case."""
BUSY: Final = 0.7
"""A thread that computes for more than this part of the time has none to spare,"""
ENOUGH_ITEMS: Final = 64
"""and so many share what a transaction costs well enough."""
HALVED_MIN: Final = 2 * ENOUGH_ITEMS
"""So many are committed in two halves, if they would all wait for one commit."""
QUICK: Final = 3
"""A commit that leaves the thread idle for less than so many times the time of answering is a quick one: most of it is
writing, and takes half of that for half as many."""
IDLE: Final = 0.35
"""Halves during whose commits the thread has nothing to do for more than this part of the time are better together."""


class Gathering:
    """Of one committer. `queued` says how many callers wait, and `has_enough` whether no more are worth waiting for."""

    def __init__(self, queued: Callable[[], int], has_enough: Callable[[], bool]) -> None:
        self._queued = queued
        self._has_enough = has_enough
        self._settled_s = 0.0
        self._returning = 0
        """So many waited when the last batch was settled, in it and behind it."""
        self._began_s = self._began_computed_s = self._answering_s = 0.0
        self._are_in_step = False
        """Nobody came while the last batch was made durable, and that was quick."""
        self._halves = 0
        """How many of them have been committed by turns."""
        self._is_joining = False
        """Two halves are to come together again."""
        self._is_busy = False
        self._computed_s = math.inf
        """The processor time of this thread by then: of the first batch nothing can be said."""
        self._enough: asyncio.Future[None] | None = None
        self.is_waiting = False
        """Somebody does: those who come are to be told by `arrived`."""

    def begins(self) -> None:
        """A batch is about to be committed."""
        self._began_s, self._began_computed_s = time.perf_counter(), time.thread_time()
        self._answering_s = self._began_s - self._settled_s

    def settled(self, callers: int) -> None:
        """A batch of so many has been answered."""
        now_s, computed_s = time.perf_counter(), time.thread_time()
        committing_s = now_s - self._began_s
        idle_s = committing_s - (computed_s - self._began_computed_s)
        self._is_busy = computed_s - self._computed_s > BUSY * (now_s - self._settled_s)
        self._settled_s, self._computed_s = now_s, computed_s
        queued = self._queued()
        self._returning = callers + queued
        self._are_in_step = not queued and idle_s < QUICK * self._answering_s and self._answering_s <= RETURNING_S
        # During the first of them there is nobody to be answered.
        self._is_joining = self._halves > 1 and idle_s > IDLE * committing_s
        self._halves = self._halves + 1 if self._halves and queued and not self._is_joining else 0

    def halved(self, waiting: int) -> bool:
        """Whether only half of those who wait should be committed next."""
        if waiting < HALVED_MIN or not self._are_in_step or time.perf_counter() - self._settled_s > RETURNING_S:
            return False
        self._halves = 1
        return True

    def arrived(self) -> None:
        """Another one has come."""
        if self._enough is not None and self._is_enough:
            _let_go(self._enough)

    @property
    def _is_enough(self) -> bool:
        if self._is_joining:
            return self._queued() >= self._returning
        if self._is_busy:
            return self._queued() >= self._returning or self._has_enough()
        return self._queued() * 2 >= self._returning

    @property
    def is_wanted(self) -> bool:
        """Whether the next batch should `wait`."""
        if self._returning < RETURNING_MIN:
            return False
        is_first = not self._is_enough if self._is_busy or self._is_joining else self._queued() * 4 < self._returning
        return is_first and time.perf_counter() - self._settled_s <= RETURNING_S

    @property
    def is_wanted_still(self) -> bool:
        """Not for ever: those who come one by one may be others."""
        return time.perf_counter() - self._settled_s <= RETURNING_S + WAIT_S

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns when enough of them are there, or no more come."""
        seen = 0
        while seen < self._queued() and not self._is_enough and self.is_wanted_still:
            seen = self._queued()
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
