"""A stream of updates for one reader, with a bounded buffer for a reader that falls behind."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from oncelog.errors import OncelogError, UpdatesLostError

T = TypeVar("T")


class BoundedStream(Generic[T]):
    """Yields all items added since the stream was created: `async for item in stream`. `aclose` ends it."""

    def __init__(
        self,
        streams: list[Any],
        *,
        count_max: tuple[str, int],
        bytes_max: tuple[str, int] | None = None,
        accepts: Callable[[T], bool] = lambda _one: True,
        get_size: Callable[[T], int] = lambda _one: 0,
    ) -> None:
        """Add the stream to `streams`. If buffered items exceed a limit, the stream raises UpdatesLostError."""
        self._streams = streams
        streams.append(self)
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._accepts = accepts
        self._get_size = get_size
        self._buffer: deque[T] = deque()
        self._bytes = 0
        self._error: OncelogError | None = None
        self._is_over = False
        self._arrival = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._buffer:
            if self._is_over:
                raise self._error or StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        item = self._buffer.popleft()
        self._bytes -= self._get_size(item)
        return item

    async def aclose(self) -> None:
        """End the stream."""
        self._end(None)

    def put(self, items: Iterable[T]) -> None:
        """Add items for the reader."""
        for item in items:
            if not self._is_over and self._accepts(item):
                self._buffer.append(item)
                self._bytes += self._get_size(item)
                if len(self._buffer) > self._count_max[1]:
                    self.overflow(*self._count_max)
                elif self._bytes_max is not None and self._bytes > self._bytes_max[1]:
                    self.overflow(*self._bytes_max)
        self._arrival.set()

    def overflow(self, limit_name: str, limit: int) -> None:
        """Drop all items and end the stream with UpdatesLostError. The reader has to reload its state."""
        self._end(UpdatesLostError(limit_name, limit))

    def finish(self, error: OncelogError | None) -> None:
        """End the stream after its buffered items, because the client is closed or has failed."""
        buffer = self._buffer
        self._end(error)
        self._buffer = buffer

    def _end(self, error: OncelogError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._streams.remove(self)
        self._buffer = deque()
        self._arrival.set()
