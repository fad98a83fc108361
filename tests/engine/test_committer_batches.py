"""How the committer waits for batches and pipelines large ones."""

import asyncio
from typing import Any

import pytest

from engine.observable_store import WatchedLog
from oncelog.engine import batch_scheduler
from oncelog.engine.batch_scheduler import PIPELINE_CALLERS_MIN, BatchScheduler
from oncelog.testing.contract.writes import (
    event,
)


async def test_single_caller_with_many_items_does_not_wait_for_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = record_waits(monkeypatch)
    async with WatchedLog() as log:
        for first in range(0, 1000, 100):
            await log.submit_many([event(first + number) for number in range(64)])
            await log.submit_many([event(first + 64 + number) for number in range(20)])
    assert waited == []


@pytest.mark.parametrize("limits", [{"queue_items_max": 20}, {"batch_items_max": 20}, {"queue_bytes_max": 4000}])
async def test_batch_does_not_wait_for_more_than_the_limits_allow(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    waited = record_waits(monkeypatch)
    async with WatchedLog(**limits) as log:
        for first in range(0, 200, 20):
            await asyncio.gather(*log.submit_concurrently(*(event(first + number, "x" * 100) for number in range(20))))
    assert waited == []


async def test_large_batches_are_pipelined_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_scheduler, "time", SteppingTime())
    sizes: list[int] = []
    async with WatchedLog() as log:
        log.watch_batches(lambda batch: sizes.append(batch.items))

        async def submitter(first: int) -> None:
            for number in range(5):
                await log.submit(event(1000 * first + number))

        await asyncio.gather(*map(submitter, range(2 * PIPELINE_CALLERS_MIN)))
    assert sizes[:2] == [2 * PIPELINE_CALLERS_MIN] * 2
    assert sizes[2:] == [PIPELINE_CALLERS_MIN] * 6


class SteppingTime:
    """Replacement for the `time` module. Each reading advances the clock by one microsecond of CPU time."""

    def __init__(self) -> None:
        self._now_us = 1_000_000_000

    def perf_counter(self) -> float:
        self._now_us += 1
        return self._now_us / 1_000_000

    def thread_time(self) -> float:
        return self.perf_counter()


async def test_small_batches_are_not_pipelined() -> None:
    sizes: list[int] = []
    async with WatchedLog() as log:
        log.watch_batches(lambda batch: sizes.append(batch.items))
        for first in range(3):
            await asyncio.gather(
                *log.submit_concurrently(*(event(1000 * first + one) for one in range(PIPELINE_CALLERS_MIN - 1)))
            )
    assert sizes == [PIPELINE_CALLERS_MIN - 1] * 3


def record_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the queue length of each batch that waits for more items. The thread is always busy."""
    waited: list[int] = []
    monkeypatch.setattr(batch_scheduler, "time", SteppingTime())

    async def wait(scheduler: BatchScheduler, _: asyncio.AbstractEventLoop) -> None:
        waited.append(scheduler._count_queued())

    monkeypatch.setattr(BatchScheduler, "wait", wait)
    monkeypatch.setattr("oncelog.engine.batch_scheduler.BUSY_CPU_FRACTION", -1)
    return waited
