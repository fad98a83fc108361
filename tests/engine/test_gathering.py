"""Who was answered together comes back together: for whom the next batch waits."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from oncelog.engine import gathering
from oncelog.engine.gathering import (
    BUSY,
    ENOUGH_ITEMS,
    RETURNING_BUSY_MIN,
    RETURNING_MIN,
    RETURNING_S,
    WAIT_S,
    Gathering,
)


class Queue:
    """So many wait."""

    def __init__(self) -> None:
        self.length = 0
        self.gathering = Gathering(lambda: self.length, lambda: self.length >= ENOUGH_ITEMS)

    def come(self, count: int) -> None:
        for _ in range(count):
            self.length += 1
            if self.gathering.is_waiting:
                self.gathering.arrived()

    def settle(self, items: int, behind: int = 0) -> None:
        self.length = behind
        self.gathering.settled(items)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr("oncelog.engine.gathering.time.perf_counter", lambda: now[0])
    return now


@pytest.fixture
def computed_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The same for what the thread has computed."""
    computed = [1000.0]
    monkeypatch.setattr("oncelog.engine.gathering.time.thread_time", lambda: computed[0])
    return computed


def busy_queue(now_s: list[float], computed_s: list[float], answered: int, behind: int, part: float = BUSY) -> Queue:
    """After a batch during which the thread has computed for more than this part of the time."""
    queue = Queue()
    queue.settle(answered)
    now_s[0] += 0.01
    computed_s[0] += 0.01 * part * 1.01
    queue.settle(answered, behind)
    return queue


def test_who_was_there_while_nobody_else_came_is_in_step() -> None:
    queue = Queue()
    seen = [queue.gathering.are_in_step]
    for answered, behind in ((256, 0), (128, 128), (1, 0)):
        queue.settle(answered, behind)
        seen.append(queue.gathering.are_in_step)
    assert seen == [False, True, False, True]


def test_the_first_write_of_all_waits_for_nobody() -> None:
    queue = Queue()
    queue.come(1)
    assert not queue.gathering.is_wanted


@pytest.mark.parametrize(
    ("answered", "behind", "come", "is_wanted"),
    [
        (256, 0, 1, True),
        (256, 0, 63, True),
        (256, 0, 64, False),  # a quarter of them is enough not to wait
        (100, 156, 0, False),  # as many came while the others were made durable
        (RETURNING_MIN, 0, 1, True),
        (RETURNING_MIN - 1, 0, 1, False),
        (1, 0, 1, False),
    ],
)
def test_who_comes_back_first_waits(now_s: list[float], answered: int, behind: int, come: int, is_wanted: bool) -> None:
    queue = Queue()
    queue.settle(answered, behind)
    queue.come(come)
    assert queue.gathering.is_wanted is is_wanted
    now_s[0] += RETURNING_S * 1.01  # and long after the others waits for nobody
    assert not queue.gathering.is_wanted


@pytest.mark.parametrize(
    ("answered", "behind", "is_wanted"),
    [
        (20, 20, True),
        (500, ENOUGH_ITEMS - 1, True),
        (500, ENOUGH_ITEMS, False),
        (0, 32, False),  # all of them are there
        (RETURNING_BUSY_MIN - 1, 1, True),
        (RETURNING_BUSY_MIN - 2, 1, False),  # too few to wait for
    ],
)
def test_a_busy_thread_waits_for_more(
    now_s: list[float], computed_s: list[float], answered: int, behind: int, is_wanted: bool
) -> None:
    queue = busy_queue(now_s, computed_s, answered, behind)
    assert queue.gathering.is_wanted is is_wanted


def test_who_has_time_to_spare_does_not_wait_for_more(now_s: list[float], computed_s: list[float]) -> None:
    assert not busy_queue(now_s, computed_s, 20, 20, part=0.9 * BUSY).gathering.is_wanted


def test_a_busy_thread_goes_on_when_enough_are_there(
    monkeypatch: pytest.MonkeyPatch, now_s: list[float], computed_s: list[float]
) -> None:
    monkeypatch.setattr(gathering, "SILENT_BUSY_S", 1000)

    async def main() -> None:
        queue = busy_queue(now_s, computed_s, 30, 20)
        waiting = asyncio.ensure_future(queue.gathering.wait(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        queue.come(29)  # one less than there were
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.come(1)
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


@pytest.mark.parametrize("part", [0.4, 0.6])
def test_a_busy_thread_that_computes_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, now_s: list[float], computed_s: list[float], part: float
) -> None:
    """It sends the answers to those who will come, and hears of nobody meanwhile."""
    monkeypatch.setattr(gathering, "SILENT_BUSY_S", 1000)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        later: list[Callable[[], object]] = []

        def call_later(_: float, call: Callable[..., object], *arguments: object) -> asyncio.Handle:
            later.append(partial(call, *arguments))
            return asyncio.Handle(call, arguments, loop)

        monkeypatch.setattr(loop, "call_later", call_later)
        queue = busy_queue(now_s, computed_s, 30, 20)
        waiting = asyncio.ensure_future(queue.gathering.wait(loop))
        await asyncio.sleep(0)
        computed_s[0] += part * 1000
        later.pop()()  # the time is over, and nobody has come
        for _ in range(5):
            await asyncio.sleep(0)
        assert waiting.done() is (part < 0.5)
        queue.come(30)
        await asyncio.wait_for(waiting, None)

    asyncio.run(main())


def test_a_busy_thread_does_not_wait_for_long(now_s: list[float], computed_s: list[float]) -> None:
    queue = busy_queue(now_s, computed_s, 30, 20)
    now_s[0] += RETURNING_S + WAIT_S
    assert queue.gathering.is_wanted_still
    now_s[0] += WAIT_S / 100
    assert not queue.gathering.is_wanted_still


def test_it_ends_when_half_of_them_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "SILENT_S", 1000)

    async def main() -> None:
        queue = Queue()
        queue.settle(100)
        queue.come(1)
        waiting = asyncio.ensure_future(queue.gathering.wait(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        queue.come(48)
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.come(1)
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())


def test_it_ends_when_no_more_come() -> None:
    async def main() -> None:
        queue = Queue()
        queue.settle(100)
        queue.come(1)
        await asyncio.wait_for(queue.gathering.wait(asyncio.get_running_loop()), 60)
        queue.come(1)  # nobody waits any more, and nobody is told

    asyncio.run(main())


def test_who_come_one_by_one_are_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("oncelog.engine.gathering.time.perf_counter", lambda: now[0])

    async def main() -> None:
        queue = Queue()
        queue.settle(100_000)
        queue.come(1)
        waiting = asyncio.ensure_future(queue.gathering.wait(asyncio.get_running_loop()))
        looks = 0
        while not waiting.done():
            queue.come(1)
            now[0] += 0.001
            looks += 1
            await asyncio.sleep(0.001)
        assert looks < 100

    asyncio.run(asyncio.wait_for(main(), 60))
