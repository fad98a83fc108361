"""A clock that advances only when all tasks wait for it, so that simulated seconds take no time."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

from deadlines import turns

T = TypeVar("T")


class VirtualClock:
    """Time in seconds, with timers and `sleep`."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._order = count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when_s, next(self._order), action))

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.call_at(self._now_s + seconds, woken.set)
        await woken.wait()

    async def run(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
        """Advance the time from timer to timer until the work is done."""
        task = asyncio.ensure_future(work)
        await turns(3)
        while not task.done():
            assert self._timers, "the work waits for an event that no timer causes"
            self._now_s, _, action = heapq.heappop(self._timers)
            action()
            await turns(3)
        return task.result()
