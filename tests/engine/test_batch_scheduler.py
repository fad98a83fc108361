"""Batches wait for clients that were answered by one commit and are about to submit again together."""

import asyncio
from typing import NamedTuple

import pytest

from oncelog.engine import batch_scheduler
from oncelog.engine.batch_scheduler import (
    BATCH_ITEMS_TARGET,
    BUSY_CPU_FRACTION,
    FAST_COMMIT_RATIO,
    IDLE_FRACTION_MAX,
    PIPELINE_CALLERS_MIN,
    RETURN_WINDOW_S,
    RETURNING_CALLERS_MIN,
    WAIT_S_MAX,
    BatchScheduler,
)


class Queue:
    """A queue of callers."""

    def __init__(self) -> None:
        self.length = 0
        self.gathering = BatchScheduler(lambda: self.length, lambda: self.length >= BATCH_ITEMS_TARGET)

    def come(self, count: int) -> None:
        for _ in range(count):
            self.length += 1
            if self.gathering.wakeup is not None:
                self.gathering.notify_arrival()

    def settle(self, items: int, behind: int = 0) -> None:
        self.length = behind
        self.gathering.finish_batch(items)


class FakeTime(NamedTuple):
    """Replacement for the `time` module."""

    now_s: list[float]
    computed_s: list[float]

    def perf_counter(self) -> float:
        return self.now_s[0]

    def thread_time(self) -> float:
        return self.computed_s[0]


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall time, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(batch_scheduler, "time", FakeTime(now, [1000.0]))
    return now


@pytest.fixture
def computed_s(monkeypatch: pytest.MonkeyPatch, now_s: list[float]) -> list[float]:
    """The thread's processor time, which the test sets."""
    computed = [1000.0]
    monkeypatch.setattr(batch_scheduler, "time", FakeTime(now_s, computed))
    return computed


def busy_queue(
    now_s: list[float], computed_s: list[float], answered: int, behind: int, part: float = BUSY_CPU_FRACTION
) -> Queue:
    """Return a queue after a batch during which the thread computed for more than a given part of the time."""
    queue = Queue()
    queue.settle(answered)
    now_s[0] += 0.01
    computed_s[0] += 0.01 * part * 1.01
    queue.settle(answered, behind)
    return queue


class Rounds:
    """Simulates rounds in which callers are answered and submit again."""

    def __init__(self, now_s: list[float], computed_s: list[float]) -> None:
        self.queue = Queue()
        self.gathering = self.queue.gathering
        self._now_s = now_s
        self._computed_s = computed_s

    def commit(self, callers: int, answering_s: float, committing_s: float, idle_s: float, behind: int = 0) -> None:
        """Commit a batch some time after the previous one. The thread is idle for a part of that time."""
        self._now_s[0] += answering_s
        self._computed_s[0] += answering_s
        self.gathering.start_batch()
        self._now_s[0] += committing_s
        self._computed_s[0] += committing_s - idle_s
        self.queue.settle(callers, behind)


@pytest.mark.parametrize(
    ("answering_s", "idle_s", "behind", "waiting", "is_halved"),
    [
        (0.002, 0.001, 0, PIPELINE_CALLERS_MIN, True),
        (0.002, 0.001, 0, PIPELINE_CALLERS_MIN - 1, False),  # too few callers
        (
            0.002,
            0.001,
            1,
            PIPELINE_CALLERS_MIN,
            False,
        ),  # a caller that has arrived meanwhile is in the next batch anyway
        (
            0.002,
            0.002 * FAST_COMMIT_RATIO * 1.01,
            0,
            PIPELINE_CALLERS_MIN,
            False,
        ),  # slow disk: two commits would take longer than one and the answers
        (
            RETURN_WINDOW_S * 1.01,
            0.001,
            0,
            PIPELINE_CALLERS_MIN,
            False,
        ),  # these callers were not answered by the previous commit
    ],
)
def test_batch_is_pipelined_when_all_callers_wait_for_one_quick_commit(
    now_s: list[float],
    computed_s: list[float],
    answering_s: float,
    idle_s: float,
    behind: int,
    waiting: int,
    is_halved: bool,
) -> None:
    rounds = Rounds(now_s, computed_s)
    rounds.commit(256, 1, 0.004, 0.001)
    rounds.commit(256, answering_s, 0.004, idle_s, behind)
    assert rounds.gathering.should_pipeline(waiting) is is_halved
    now_s[0] += RETURN_WINDOW_S * 1.01  # too long after the others
    assert not rounds.gathering.should_pipeline(waiting)


def test_pipelining_stops_if_the_disk_is_slow(now_s: list[float], computed_s: list[float]) -> None:
    rounds = Rounds(now_s, computed_s)
    for _ in range(2):
        rounds.commit(256, 0.002, 0.004, 0.001)
    assert rounds.gathering.should_pipeline(256)
    wanted = []
    for idle_s in (
        0.004,
        0.004 * IDLE_FRACTION_MAX * 0.9,
        0.004 * IDLE_FRACTION_MAX * 1.1,
    ):  # The first pipelined commit answers no caller.
        rounds.commit(128, 0.0, 0.004, idle_s, behind=128)
        wanted.append(rounds.gathering.should_wait)  # the queued half is committed, or waits for the other
    rounds.queue.come(128)
    wanted.append(rounds.gathering.should_wait)  # all callers have returned
    assert wanted == [False, False, True, False]
    rounds.commit(256, 0.001, 0.008, 0.001 * FAST_COMMIT_RATIO * 1.01)
    assert not rounds.gathering.should_pipeline(256)


def test_first_write_does_not_wait() -> None:
    queue = Queue()
    queue.come(1)
    assert not queue.gathering.should_wait


@pytest.mark.parametrize(
    ("answered", "behind", "come", "is_wanted"),
    [
        (256, 0, 1, True),
        (256, 0, 63, True),
        (256, 0, 64, False),  # a quarter of the callers is enough
        (100, 156, 0, False),  # enough arrived during the commit
        (RETURNING_CALLERS_MIN, 0, 1, True),
        (RETURNING_CALLERS_MIN - 1, 0, 1, False),
        (1, 0, 1, False),
    ],
)
def test_first_returning_caller_waits_for_the_others(
    now_s: list[float], answered: int, behind: int, come: int, is_wanted: bool
) -> None:
    queue = Queue()
    queue.settle(answered, behind)
    queue.come(come)
    assert queue.gathering.should_wait is is_wanted
    now_s[0] += RETURN_WINDOW_S * 1.01  # too long after the others
    assert not queue.gathering.should_wait


@pytest.mark.parametrize(
    ("answered", "behind", "is_wanted"),
    [
        (20, 20, True),
        (500, BATCH_ITEMS_TARGET - 1, True),
        (500, BATCH_ITEMS_TARGET, False),
        (0, 32, False),  # all callers have returned
        (RETURNING_CALLERS_MIN - 4, 2, False),  # too few to wait for
    ],
)
def test_busy_thread_waits_for_a_larger_batch(
    now_s: list[float], computed_s: list[float], answered: int, behind: int, is_wanted: bool
) -> None:
    queue = busy_queue(now_s, computed_s, answered, behind)
    assert queue.gathering.should_wait is is_wanted


def test_idle_thread_does_not_wait_for_a_larger_batch(now_s: list[float], computed_s: list[float]) -> None:
    assert not busy_queue(now_s, computed_s, 20, 20, part=0.9 * BUSY_CPU_FRACTION).gathering.should_wait


async def test_busy_thread_stops_waiting_when_all_callers_returned(
    monkeypatch: pytest.MonkeyPatch, now_s: list[float], computed_s: list[float]
) -> None:
    monkeypatch.setattr(batch_scheduler, "IDLE_GAP_BUSY_S", 1000)
    queue = busy_queue(now_s, computed_s, 30, 20)
    waiting = asyncio.ensure_future(queue.gathering.wait(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    queue.come(29)  # one fewer than before
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.come(1)
    await waiting


def test_busy_thread_waits_for_a_limited_time(now_s: list[float], computed_s: list[float]) -> None:
    queue = busy_queue(now_s, computed_s, 30, 20)
    now_s[0] += RETURN_WINDOW_S + WAIT_S_MAX
    assert queue.gathering.is_within_window
    now_s[0] += WAIT_S_MAX / 100
    assert not queue.gathering.is_within_window


@pytest.mark.usefixtures("now_s")
async def test_wait_ends_when_half_of_the_callers_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_scheduler, "IDLE_GAP_S", 1000)
    queue = Queue()
    queue.settle(100)
    queue.come(1)
    waiting = asyncio.ensure_future(queue.gathering.wait(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    queue.come(48)
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.come(1)
    await waiting


async def test_wait_ends_after_an_idle_gap() -> None:
    queue = Queue()
    queue.settle(100)
    queue.come(1)
    await queue.gathering.wait(asyncio.get_running_loop())
    queue.come(1)  # the wait has ended


async def test_wait_for_a_trickle_of_callers_is_limited(now_s: list[float]) -> None:
    queue = Queue()
    queue.settle(100_000)
    queue.come(1)
    waiting = asyncio.ensure_future(queue.gathering.wait(asyncio.get_running_loop()))
    looks = 0
    while not waiting.done():
        queue.come(1)
        now_s[0] += 0.001
        looks += 1
        await asyncio.sleep(0.001)
    assert looks < 100
