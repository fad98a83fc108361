"""Who was answered together comes back together: for whom the next batch waits."""

import asyncio

import pytest

from oncelog.engine import gathering
from oncelog.engine.gathering import (
    BUSY,
    ENOUGH_ITEMS,
    HALVED_MIN,
    IDLE,
    QUICK,
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


class Rounds:
    """Callers who are answered and come back, again and again: seconds by the hand."""

    def __init__(self, now_s: list[float], computed_s: list[float]) -> None:
        self.queue = Queue()
        self.gathering = self.queue.gathering
        self._now_s = now_s
        self._computed_s = computed_s

    def commit(self, callers: int, answering_s: float, committing_s: float, idle_s: float, behind: int = 0) -> None:
        """So long after the last one another is committed, for a part of which the thread has nothing to do."""
        self._now_s[0] += answering_s
        self._computed_s[0] += answering_s
        self.gathering.begins()
        self._now_s[0] += committing_s
        self._computed_s[0] += committing_s - idle_s
        self.queue.settle(callers, behind)


@pytest.mark.parametrize(
    ("answering_s", "idle_s", "behind", "waiting", "is_halved"),
    [
        (0.002, 0.001, 0, HALVED_MIN, True),
        (0.002, 0.001, 0, HALVED_MIN - 1, False),  # too few
        (0.002, 0.001, 1, HALVED_MIN, False),  # somebody has come meanwhile: he is in the next one anyway
        (
            0.002,
            0.002 * QUICK * 1.01,
            0,
            HALVED_MIN,
            False,
        ),  # a slow disk: two commits would take longer than one and the answers
        (RETURNING_S * 1.01, 0.001, 0, HALVED_MIN, False),  # they have not come back from the one before
    ],
)
def test_who_all_wait_for_one_commit_are_divided(
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
    assert rounds.gathering.halved(waiting) is is_halved
    now_s[0] += RETURNING_S * 1.01  # who comes long after the others is not one of them
    assert not rounds.gathering.halved(waiting)


def test_two_halves_come_together_again_where_the_disk_is_slow(now_s: list[float], computed_s: list[float]) -> None:
    rounds = Rounds(now_s, computed_s)
    for _ in range(2):
        rounds.commit(256, 0.002, 0.004, 0.001)
    assert rounds.gathering.halved(256)
    wanted = []
    for idle_s in (0.004, 0.004 * IDLE * 0.9, 0.004 * IDLE * 1.1):  # during the first there is nobody to be answered
        rounds.commit(128, 0.0, 0.004, idle_s, behind=128)
        wanted.append(rounds.gathering.is_wanted)  # by turns: those who are there are committed, or wait for the others
    rounds.queue.come(128)
    wanted.append(rounds.gathering.is_wanted)  # who are there now
    assert wanted == [False, False, True, False]
    rounds.commit(256, 0.001, 0.008, 0.001 * QUICK * 1.01)
    assert not rounds.gathering.halved(256)


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
        (RETURNING_MIN - 4, 2, False),  # too few to wait for
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
