"""The portal: blocking calls into an event loop on another thread, and the effect of stopping either side."""

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
    """Like KeyboardInterrupt, but pytest does not handle it."""


class _Forever:
    """A call that waits until it is cancelled, and then needs several loop iterations to finish."""

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
    """A future whose wait is interrupted once, as if by Ctrl-C, after the call has begun."""

    when: ClassVar[list[threading.Event]] = []

    def result(self, timeout: float | None = None) -> Any:
        if self.when:
            under_way = self.when.pop()
            under_way.wait()
            raise _Interrupted
        return super().result(timeout)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """Events that interrupt waits. The next wait is interrupted when the event that was appended to the list is set.

    Signals are unsuitable, because a signal that arrives just before a thread begins to wait is handled only after the
    wait.
    """
    monkeypatch.setattr("oncelog.portal.Future", _InterruptedOnce)
    monkeypatch.setattr(_InterruptedOnce, "when", [])
    return _InterruptedOnce.when


def test_call_passes_arguments_and_returns_the_result() -> None:
    portal = Portal()
    try:
        assert portal.call(_double, 3, plus=1) == 7
    finally:
        portal.close()


def test_call_passes_an_argument_named_like_a_portal_argument() -> None:
    async def halve(timeout_s: float) -> float:
        return timeout_s / 2

    portal = Portal()
    try:
        assert portal.call(halve, timeout_s=5.0) == 2.5
    finally:
        portal.close()


def test_run_calls_a_plain_function_in_the_thread_of_the_loop() -> None:
    portal = Portal("of the loop")
    try:
        assert portal.run(lambda: threading.current_thread().name) == "of the loop"
        assert portal.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            portal.run(divmod, 7, 0)
    finally:
        portal.close()


def test_call_that_exceeds_its_timeout_is_cancelled_before_the_error_is_raised() -> None:
    portal = Portal()
    try:
        call = _Forever()
        with pytest.raises(TimeoutError):
            portal.call_with_timeout(0.01, call)
        assert call.has_ended
        assert portal.call_with_timeout(None, _double, 3, plus=1) == 7
    finally:
        portal.close()


@pytest.mark.parametrize("error", [ValueError("wrong"), StopAsyncIteration("the end"), TimeoutError("late")])
def test_exception_of_a_call_is_raised_in_the_caller(error: BaseException) -> None:
    portal = Portal()
    try:
        with pytest.raises(type(error), match=str(error)):
            portal.call(_fail, error)
        assert portal.call(_double, 1) == 2
    finally:
        portal.close()


def test_call_that_cancels_itself_raises_cancelled_error() -> None:
    portal = Portal()
    try:
        with pytest.raises(CancelledError):
            portal.call(_fail, asyncio.CancelledError())
        assert portal.call(_double, 1) == 2
    finally:
        portal.close()


def test_many_threads_call_concurrently() -> None:
    portal = Portal()
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda number: portal.call(_double, number), range(400))) == list(range(0, 800, 2))
    finally:
        portal.close()


def test_interrupted_call_is_cancelled_before_the_interrupt_is_raised(
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
    """Yields numbers, and optionally waits forever afterwards."""

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


def test_interrupted_iteration_closes_the_iterator(interrupted: list[threading.Event]) -> None:
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


def test_iterator_without_aclose_is_accepted() -> None:
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


def test_close_cancels_running_calls_and_ends_their_waits() -> None:
    portal = Portal()
    calls = [_Forever() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(portal.call, call) for call in calls]
        for call in calls:
            call.begun.wait()
        portal.close()
        assert [str(one.exception()) for one in waiting] == ["the portal is closed"] * 4
    assert all(call.has_ended for call in calls)


def test_close_under_load_ends_every_call() -> None:
    """A call that runs concurrently with `close` returns or raises, and never hangs."""
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
            assert sum(one.result() for one in calling) >= 1


def test_iteration_after_close_raises_runtime_error() -> None:
    portal = Portal()
    numbers = _Numbers()
    iterator = portal.iterate(numbers.stream(3, is_endless=False))
    assert next(iterator) == 1
    portal.close()
    assert numbers.is_closed  # The loop closes the iterator when it stops.
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)


def test_close_is_idempotent_and_later_calls_raise() -> None:
    portal = Portal("short-lived")
    portal.close()
    portal.close()
    with pytest.raises(RuntimeError, match="the portal is closed"):
        portal.call(_double, 1)
    assert "short-lived" not in [thread.name for thread in threading.enumerate()]


def test_error_of_a_closed_portal_is_configurable() -> None:
    portal = Portal(build_closed_error=lambda: EOFError("shut"))
    call = _Forever()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(portal.call, call)
        call.begun.wait()
        portal.close()
        assert isinstance(waiting.exception(), EOFError)
    with pytest.raises(EOFError, match="shut"):
        portal.call(_double, 1)


def test_call_from_the_thread_of_the_loop_is_refused() -> None:
    portal = Portal()

    async def call_back() -> None:
        portal.call(_double, 1)

    try:
        with pytest.raises(RuntimeError, match="would deadlock"):
            portal.call(call_back)
    finally:
        portal.close()
