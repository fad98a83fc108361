"""The portal: blocking calls into a loop on another thread, and what becomes of them when one side gives up."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from oncelog.portal import Portal


async def _double(number: int, *, plus: int = 0) -> int:
    await asyncio.sleep(0)
    return 2 * number + plus


async def _fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


class _Interrupted(BaseException):
    """As KeyboardInterrupt, but pytest does not take it for one."""


class _Forever:
    """A call that waits until it is cancelled, and takes its time to end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.has_ended = False

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            self.has_ended = True


class _InterruptedOnce(Future[Any]):
    """Waiting for it is interrupted as by Ctrl-C: once, and not before the call that is waited for is under way."""

    when: ClassVar[list[threading.Event]] = []

    def result(self, timeout: float | None = None) -> Any:
        if self.when:
            under_way = self.when.pop()
            under_way.wait()
            raise _Interrupted
        return super().result(timeout)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """What is put in here interrupts the next wait as soon as it is set.

    Not a signal: one that comes just before a thread begins to wait is seen only when that wait is over.
    """
    monkeypatch.setattr("oncelog.portal.Future", _InterruptedOnce)
    monkeypatch.setattr(_InterruptedOnce, "when", [])
    return _InterruptedOnce.when


def test_a_call_gives_its_result_and_passes_its_arguments() -> None:
    portal = Portal()
    try:
        assert portal.call(_double, 3, plus=1) == 7
    finally:
        portal.close()


@pytest.mark.parametrize("error", [ValueError("wrong"), StopAsyncIteration("the end"), TimeoutError("late")])
def test_what_a_call_raises_is_raised_here(error: BaseException) -> None:
    portal = Portal()
    try:
        with pytest.raises(type(error), match=str(error)):
            portal.call(_fail, error)
        assert portal.call(_double, 1) == 2
    finally:
        portal.close()


def test_a_call_that_cancels_itself_says_so() -> None:
    portal = Portal()
    try:
        with pytest.raises(CancelledError):
            portal.call(_fail, asyncio.CancelledError())
        assert portal.call(_double, 1) == 2
    finally:
        portal.close()


def test_many_threads_call_at_once() -> None:
    portal = Portal()
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda number: portal.call(_double, number), range(400))) == list(range(0, 800, 2))
    finally:
        portal.close()


def test_an_interrupted_call_is_cancelled_and_has_ended_when_the_interrupt_is_seen(
    interrupted: list[threading.Event],
) -> None:
    portal = Portal()
    try:
        call = _Forever()
        interrupted.append(call.begun)
        with pytest.raises(_Interrupted):
            portal.call(call)
        assert call.has_ended
        assert portal.call(_double, 4) == 8
    finally:
        portal.close()


class _Numbers:
    """1, 2, 3, and then nothing for a long time."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.is_closed = False

    async def stream(self, last: int, is_endless: bool) -> AsyncIterator[int]:
        try:
            for number in range(1, last + 1):
                yield number
            if is_endless:
                self.waits.set()
                await asyncio.get_running_loop().create_future()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self.is_closed = True


def test_iteration_ends_with_the_iterator() -> None:
    portal = Portal()
    numbers = _Numbers()
    try:
        assert list(portal.iterate(numbers.stream(3, is_endless=False))) == [1, 2, 3]
        assert numbers.is_closed
    finally:
        portal.close()


def test_leaving_the_loop_closes_the_iterator() -> None:
    portal = Portal()
    numbers = _Numbers()
    try:
        for number in portal.iterate(numbers.stream(3, is_endless=True)):
            if number == 2:
                break
        assert numbers.is_closed
    finally:
        portal.close()


def test_an_interrupted_iteration_is_closed(interrupted: list[threading.Event]) -> None:
    portal = Portal()
    numbers = _Numbers()
    try:
        iterator = portal.iterate(numbers.stream(1, is_endless=True))
        assert next(iterator) == 1
        interrupted.append(numbers.waits)
        with pytest.raises(_Interrupted):
            next(iterator)
        assert numbers.is_closed
        assert portal.call(_double, 4) == 8
    finally:
        portal.close()


def test_an_iterator_without_aclose_is_fine() -> None:
    class Two:
        def __init__(self) -> None:
            self.left = 2

        def __aiter__(self) -> "Two":
            return self

        async def __anext__(self) -> int:
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return self.left

    portal = Portal()
    try:
        assert list(portal.iterate(Two())) == [1, 0]
    finally:
        portal.close()


def test_closing_cancels_what_is_under_way_and_leaves_nobody_waiting() -> None:
    portal = Portal()
    calls = [_Forever() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(portal.call, call) for call in calls]
        for call in calls:
            call.begun.wait()
        portal.close()
        assert [str(one.exception(timeout=10)) for one in waiting] == ["the portal is closed"] * 4
    assert all(call.has_ended for call in calls)


def test_closing_under_load_gives_every_call_an_end() -> None:
    """Whatever the moment at which a call meets the closing: it has a result, or an error, and never hangs."""
    for _ in range(20):
        portal = Portal()
        has_begun = threading.Event()

        def keep_calling(portal: Portal = portal, has_begun: threading.Event = has_begun) -> int:
            done = 0
            with suppress(RuntimeError):
                while True:
                    portal.call(_double, done)
                    done += 1
                    has_begun.set()
            return done

        with ThreadPoolExecutor(4) as threads:
            calling = [threads.submit(keep_calling) for _ in range(4)]
            has_begun.wait()
            portal.close()
            assert sum(one.result(timeout=10) for one in calling) >= 1


def test_an_iteration_whose_portal_was_closed_ends_quietly() -> None:
    portal = Portal()
    numbers = _Numbers()
    iterator = portal.iterate(numbers.stream(3, is_endless=False))
    assert next(iterator) == 1
    portal.close()
    assert numbers.is_closed  # by the loop, on its way out
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)


def test_closing_twice_is_closing_once_and_a_call_after_it_says_so() -> None:
    portal = Portal("short-lived")
    portal.close()
    portal.close()
    with pytest.raises(RuntimeError, match="the portal is closed"):
        portal.call(_double, 1)
    assert "short-lived" not in [thread.name for thread in threading.enumerate()]


def test_what_a_closed_portal_raises_can_be_chosen() -> None:
    portal = Portal(closed=lambda: EOFError("shut"))
    call = _Forever()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(portal.call, call)
        call.begun.wait()
        portal.close()
        assert isinstance(waiting.exception(timeout=10), EOFError)
    with pytest.raises(EOFError, match="shut"):
        portal.call(_double, 1)


def test_a_call_from_the_loops_own_thread_is_refused() -> None:
    portal = Portal()

    async def calls_back() -> None:
        portal.call(_double, 1)

    try:
        with pytest.raises(RuntimeError, match="wait for itself"):
            portal.call(calls_back)
    finally:
        portal.close()
