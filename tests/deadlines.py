"""Waits with a deadline."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from time import monotonic, sleep
from typing import Any, Final, TypeVar

T = TypeVar("T")

WAIT_S: Final = 300
"""Timeout that guards against hangs. No single wait in a test takes this long, even on a busy machine."""
POLL_S_MIN: Final = 0.001
POLL_S_MAX: Final = 0.02


async def soon(waited_for: Awaitable[T]) -> T:
    """Await and return the result. Raise TimeoutError after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        return await waited_for


async def turns(count: int = 25) -> None:
    """Run the other tasks for `count` iterations of the event loop.

    The default is enough for all tasks that do not wait for a timer or a thread.
    """
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], state: Callable[[], object] | None = None) -> Any:
    """Poll until the condition is true, and return its result.

    Use it for changes in tasks, threads or processes that set no event. The condition is a function or a coroutine
    function. A timeout raises AssertionError with the state, or by default with the variables that the condition uses.
    """
    poll = _Poll(condition, state)
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(poll.next_pause_s())


def wait_until(condition: Callable[[], Any], state: Callable[[], object] | None = None) -> Any:
    """Poll like `until`, but block the thread."""
    poll = _Poll(condition, state)
    while not (found := condition()):
        sleep(poll.next_pause_s())
    return found


class _Poll:
    """Pauses between polls: each is a tenth of the time waited so far, within limits.

    The deadline is independent of the event loop, whose clock a test may advance.
    """

    def __init__(self, condition: Callable[[], Any], state: Callable[[], object] | None) -> None:
        self._condition = condition
        self._state = state
        self._began = monotonic()

    def next_pause_s(self) -> float:
        """Return the pause before the next poll, or raise AssertionError after the deadline."""
        waited_s = monotonic() - self._began
        assert waited_s < WAIT_S, f"not true after {WAIT_S} s: {self._describe()}"
        return min(max(POLL_S_MIN, waited_s / 10), POLL_S_MAX)

    def _describe(self) -> object:
        if self._state is not None:
            return self._state()
        is_function = inspect.isfunction(self._condition)
        return inspect.getclosurevars(self._condition).nonlocals if is_function else self._condition
