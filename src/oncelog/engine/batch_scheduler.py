"""Decides when the next group commit begins: immediately, or after a short wait for more callers.

Clients whose writes were answered by one commit tend to submit again together. Without a wait, the first of these
submissions would form a batch alone, and the others would queue behind it. The scheduler therefore waits until half of
the callers have returned, while submissions keep arriving. A single submission, or one that arrives much later, commits
immediately: the idle path has no timer.

The items of a transaction share its fixed cost, so small batches cost the event loop's thread more time per item. While
that thread is busy, the scheduler waits until the batch has as many callers as the previous one, or is large enough.

When one transaction holds the writes of all callers, the thread is idle while the disk syncs. The scheduler then splits
the callers into two halves (pipelining): while one half is made durable, the other half is answered and submits again.
The additional transaction pays off only on a fast disk; on a slow disk all callers remain in one batch.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

RETURNING_CALLERS_MIN: Final = 16
"""A batch waits only if the previous commit had at least this many callers."""
RETURN_WINDOW_S: Final = 0.01
"""Time after a commit during which the caller of a new submission counts as a returning caller."""
IDLE_GAP_S: Final = 0.001
"""Idle gap that ends the wait."""
IDLE_GAP_BUSY_S: Final = 0.002
"""Idle gap while the thread is busy, when callers arrive at longer intervals."""
WAIT_S_MAX: Final = 0.01
"""Maximum wait of a batch."""
BUSY_CPU_FRACTION: Final = 0.7
"""CPU share above which the thread counts as busy."""
BATCH_ITEMS_TARGET: Final = 64
"""Batch size at which the fixed cost of a transaction is spread over enough items."""
PIPELINE_CALLERS_MIN: Final = 2 * BATCH_ITEMS_TARGET
"""Pipelining starts with this many callers, so that each half reaches `BATCH_ITEMS_TARGET`."""
FAST_COMMIT_RATIO: Final = 3
"""A commit is fast if it leaves the thread idle for less than this multiple of the time it takes to send the answers.

A fast commit spends most of its time writing, not syncing, so half as many items take about half the time.
"""
IDLE_FRACTION_MAX: Final = 0.35
"""Pipelining ends when the thread is idle for more than this fraction of a pipelined commit."""


class BatchScheduler:
    """Schedules the batches of one committer."""

    def __init__(self, count_queued: Callable[[], int], has_full_batch: Callable[[], bool]) -> None:
        """`count_queued` returns how many callers are queued. `has_full_batch` ends the wait of a busy thread."""
        self._count_queued = count_queued
        self._has_full_batch = has_full_batch
        self._finished_s = 0.0
        self._expected_callers = 0
        """How many callers the last batch answered, plus those that were queued at that moment."""
        self._started_s = self._started_cpu_s = self._reply_s = 0.0
        self._can_pipeline = False
        """Whether the last commit was fast and no submission arrived during it."""
        self._pipelined_batches = 0
        """How many consecutive batches were pipelined; 0 while all callers are in one batch."""
        self._is_leaving_pipeline = False
        """Whether the next batch waits for both halves."""
        self._is_busy = False
        self._finished_cpu_s = math.inf
        """CPU time of this thread when the last batch ended. Infinite before the first one, so that the thread does not
        count as busy."""
        self.wakeup: asyncio.Future[None] | None = None
        """Set while `wait` is active. The committer then calls `notify_arrival` for each new submission."""

    def start_batch(self) -> None:
        """Start measuring: a batch is about to be committed."""
        self._started_s, self._started_cpu_s = time.perf_counter(), time.thread_time()
        self._reply_s = self._started_s - self._finished_s

    def finish_batch(self, callers: int) -> None:
        """Finish measuring a batch. The committer has just answered this many callers."""
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
        # Ignore the first pipelined commit: no answers are sent during it, so the thread is idle.
        self._is_leaving_pipeline = self._pipelined_batches > 1 and idle_s > IDLE_FRACTION_MAX * committing_s
        self._pipelined_batches = (
            self._pipelined_batches + 1 if self._pipelined_batches and queued and not self._is_leaving_pipeline else 0
        )

    def should_pipeline(self, waiting: int) -> bool:
        """Return whether the next batch should include only half of the waiting callers."""
        if (
            waiting < PIPELINE_CALLERS_MIN
            or not self._can_pipeline
            or time.perf_counter() - self._finished_s > RETURN_WINDOW_S
        ):
            return False
        self._pipelined_batches = 1
        return True

    def notify_arrival(self) -> None:
        """End the wait if the new submission completes the batch."""
        if self.wakeup is not None and self._has_enough_callers:
            _wake(self.wakeup)

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
        """Whether the wait is still below its maximum. Without a maximum, new callers could extend the wait
        indefinitely."""
        return time.perf_counter() - self._finished_s <= RETURN_WINDOW_S + WAIT_S_MAX

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until enough callers have returned or no more arrive."""
        queued = 0
        while queued < self._count_queued() and not self._has_enough_callers and self.is_within_window:
            queued = self._count_queued()
            self.wakeup = wakeup = loop.create_future()
            timer = loop.call_later(IDLE_GAP_BUSY_S if self._is_busy else IDLE_GAP_S, _wake, wakeup)
            try:
                await wakeup
            finally:
                self.wakeup = None
                timer.cancel()
            # The loop runs timers before it reads sockets. Let it read the submissions that arrived in the meantime.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
