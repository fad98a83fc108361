"""A reader of what happens, who is told of each thing once, and of losing some rather than of nothing."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from oncelog.errors import OncelogError

T = TypeVar("T")


class BoundedStream(Generic[T]):
    """`async for one in stream`: everything from the moment on that it was made. `aclose` ends it."""

    def __init__(
        self,
        forget: Callable[[Any], None],
        *,
        count_max: tuple[str, int],
        bytes_max: tuple[str, int] | None = None,
        lost: Callable[[str, int], OncelogError],
        wants: Callable[[T], bool] = lambda _one: True,
        bytes_of: Callable[[T], int] = lambda _one: 0,
    ) -> None:
        """Limits with their names. Beyond one the reader gets the error that `lost` makes of it."""
        self._forget = forget
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._lost = lost
        self._wants = wants
        self._bytes_of = bytes_of
        self._waiting: deque[T] = deque()
        self._bytes = 0
        self._error: OncelogError | None = None
        self._is_over = False
        self._arrived = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        one = self._waiting.popleft()
        self._bytes -= self._bytes_of(one)
        return one

    async def aclose(self) -> None:
        """No more is wanted."""
        self._end(None)

    def put(self, things: Iterable[T]) -> None:
        """Told in this order."""
        for one in things:
            if not self._is_over and self._wants(one):
                self._waiting.append(one)
                self._bytes += self._bytes_of(one)
                if len(self._waiting) > self._count_max[1]:
                    self.lose(*self._count_max)
                elif self._bytes_max is not None and self._bytes > self._bytes_max[1]:
                    self.lose(*self._bytes_max)
        self._arrived.set()

    def lose(self, limit_name: str, limit: int) -> None:
        """There are more than may wait: none of them is given any more, since the reader must look anew anyway."""
        self._end(self._lost(limit_name, limit))

    def finish(self, error: OncelogError | None) -> None:
        """The client is closed; what came before it is still given."""
        waiting = self._waiting
        self._end(error)
        self._waiting = waiting

    def _end(self, error: OncelogError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._forget(self)
        self._waiting = deque()
        self._arrived.set()
