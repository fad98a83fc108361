"""When the next group commit begins: at once, unless further callers are expected. `committer` forms the batch.

Clients whose writes were answered by one commit tend to submit again together. Without a wait, the first of them would
get a transaction of its own while the others queue. So a batch waits for half of them, for as long as they keep
arriving. A lone submission, or one that comes much later, commits at once: there is no timer on the idle path.

A transaction has a fixed cost, which its items share. While the thread of the event loop is busy, small batches would
leave it less time. Then a batch waits for as many callers as the previous one had, or until it is large enough.

When one transaction holds the writes of all callers, the thread is idle while it is made durable. Then the batch is
split in two halves (pipelining): one is made durable while the other is answered and submits again. The additional
transaction pays off only on a fast disk; on a slow one the callers stay in one batch.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

RETURNING_CALLERS_MIN: Final = 16
"""With fewer callers no batch waits."""
RETURN_WINDOW_S: Final = 0.01
"""A submission that arrives later after a commit does not count as a caller that returns from it."""
IDLE_GAP_S: Final = 0.001
"""Idle gap that ends the wait."""
IDLE_GAP_BUSY_S: Final = 0.002
"""Idle gap while the thread is busy: callers then arrive at longer intervals."""
WAIT_S_MAX: Final = 0.01
"""Longest wait."""
BUSY_CPU_FRACTION: Final = 0.7
"""A thread that computes for more than this part of the time has none to spare,"""
BATCH_ITEMS_TARGET: Final = 64
"""and so many share what a transaction costs well enough."""
PIPELINE_CALLERS_MIN: Final = 2 * BATCH_ITEMS_TARGET
"""So many are committed in two halves, if they would all wait for one commit."""
FAST_COMMIT_RATIO: Final = 3
"""A commit that leaves the thread idle for less than so many times the time of answering is a quick one: most of it is
writing, and takes half of that for half as many."""
IDLE_FRACTION_MAX: Final = 0.35
"""Halves during whose commits the thread has nothing to do for more than this part of the time are better together."""


class BatchScheduler:
    """Of one committer. `has_full_batch` says whether more callers than the `count_queued` are worth waiting for."""

    def __init__(self, count_queued: Callable[[], int], has_full_batch: Callable[[], bool]) -> None:
        self._count_queued = count_queued
        self._has_full_batch = has_full_batch
        self._finished_s = 0.0
        self._expected_callers = 0
        """So many waited when the last batch was settled, in it and behind it."""
        self._started_s = self._started_cpu_s = self._reply_s = 0.0
        self._can_pipeline = False
        """Nobody came while the last batch was made durable, and that was quick."""
        self._pipelined_batches = 0
        """How many of them have been committed by turns."""
        self._is_leaving_pipeline = False
        """Two halves are to come together again."""
        self._is_busy = False
        self._finished_cpu_s = math.inf
        """The processor time of this thread by then: of the first batch nothing can be said."""
        self._wakeup: asyncio.Future[None] | None = None
        self.is_waiting = False
        """Whether `wait` is active: the committer then calls `notify_arrival` for each new submission."""

    def start_batch(self) -> None:
        """A batch is about to be committed."""
        self._started_s, self._started_cpu_s = time.perf_counter(), time.thread_time()
        self._reply_s = self._started_s - self._finished_s

    def finish_batch(self, callers: int) -> None:
        """A batch of so many has been answered."""
        now_s, computed_s = time.perf_counter(), time.thread_time()
        committing_s = now_s - self._started_s
        idle_s = committing_s - (computed_s - self._started_cpu_s)
        self._is_busy = computed_s - self._finished_cpu_s > BUSY_CPU_FRACTION * (now_s - self._finished_s)
        self._finished_s, self._finished_cpu_s = now_s, computed_s
        queued = self._count_queued()
        self._expected_callers = callers + queued
        self._can_pipeline = (
            not queued and idle_s < FAST_COMMIT_RATIO * self._reply_s and self._reply_s <= RETURN_WINDOW_S
        )
        # During the first of them there is nobody to be answered.
        self._is_leaving_pipeline = self._pipelined_batches > 1 and idle_s > IDLE_FRACTION_MAX * committing_s
        self._pipelined_batches = (
            self._pipelined_batches + 1 if self._pipelined_batches and queued and not self._is_leaving_pipeline else 0
        )

    def should_pipeline(self, waiting: int) -> bool:
        """Whether only half of those who wait should be committed next."""
        if (
            waiting < PIPELINE_CALLERS_MIN
            or not self._can_pipeline
            or time.perf_counter() - self._finished_s > RETURN_WINDOW_S
        ):
            return False
        self._pipelined_batches = 1
        return True

    def notify_arrival(self) -> None:
        """Another one has come."""
        if self._wakeup is not None and self._has_enough_callers:
            _wake(self._wakeup)

    @property
    def _has_enough_callers(self) -> bool:
        if self._is_leaving_pipeline:
            return self._count_queued() >= self._expected_callers
        if self._is_busy:
            return self._count_queued() >= self._expected_callers or self._has_full_batch()
        return self._count_queued() * 2 >= self._expected_callers

    @property
    def should_wait(self) -> bool:
        """Whether the next batch should `wait`."""
        if self._expected_callers < RETURNING_CALLERS_MIN:
            return False
        is_first = (
            not self._has_enough_callers
            if self._is_busy or self._is_leaving_pipeline
            else self._count_queued() * 4 < self._expected_callers
        )
        return is_first and time.perf_counter() - self._finished_s <= RETURN_WINDOW_S

    @property
    def is_within_window(self) -> bool:
        """Not for ever: those who come one by one may be others."""
        return time.perf_counter() - self._finished_s <= RETURN_WINDOW_S + WAIT_S_MAX

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns when enough of them are there, or no more come."""
        queued = 0
        while queued < self._count_queued() and not self._has_enough_callers and self.is_within_window:
            queued = self._count_queued()
            self._wakeup = wakeup = loop.create_future()
            self.is_waiting = True
            timer = loop.call_later(IDLE_GAP_BUSY_S if self._is_busy else IDLE_GAP_S, _wake, wakeup)
            try:
                await wakeup
            finally:
                self._wakeup = None
                self.is_waiting = False
                timer.cancel()
            # A timer comes before what has arrived meanwhile, and a loop that was busy reading is not silence.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
