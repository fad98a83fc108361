"""Waits with a deadline."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from time import monotonic, sleep
from typing import Any, Final, TypeVar

T = TypeVar("T")

WAIT_S: Final = 300
"""Guards against a hang: no single wait of a test takes that long, even on a busy machine."""
POLL_S_MIN: Final = 0.001
POLL_S_MAX: Final = 0.02


async def soon(waited_for: Awaitable[T]) -> T:
    """Return the result, or raise TimeoutError after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        return await waited_for


async def turns(count: int = 25) -> None:
    """Let the other tasks run for some iterations of the event loop.

    After 25 of them, all tasks that need neither time nor threads wait for something else.
    """
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], state: Callable[[], object] | None = None) -> Any:
    """Poll until the condition is true, for a change by another task, thread or process that has no event.

    The condition is a function or a coroutine function; returns its result. On a timeout, fails with the state, or
    else with the variables that the condition uses.
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
    """Poll as `until` does, and block the thread."""
    poll = _Poll(condition, state)
    while not (found := condition()):
        sleep(poll.next_pause_s())
    return found


class _Poll:
    """Pauses of one wait: each is a tenth of the time waited so far, within limits.

    The deadline is independent of the event loop, whose clock a test may advance.
    """

    def __init__(self, condition: Callable[[], Any], state: Callable[[], object] | None) -> None:
        self._condition = condition
        self._state = state
        self._began = monotonic()

    def next_pause_s(self) -> float:
        """Return the pause before the next poll. Raises AssertionError at the deadline."""
        waited_s = monotonic() - self._began
        assert waited_s < WAIT_S, f"not true after {WAIT_S} s: {self._describe()}"
        return min(max(POLL_S_MIN, waited_s / 10), POLL_S_MAX)

    def _describe(self) -> object:
        if self._state is not None:
            return self._state()
        is_function = inspect.isfunction(self._condition)
        return inspect.getclosurevars(self._condition).nonlocals if is_function else self._condition
