"""A reader of changes, who is told of each once, and of losing some rather than of nothing."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from oncelog.client.deltas.errors import ChangesLostError
from oncelog.client.deltas.limits import DeltasLimits
from oncelog.client.deltas.values import Change
from oncelog.errors import OncelogError


class ChangeStream:
    """`async for change in stream`: every change from the moment on that it was made. `aclose` ends it."""

    def __init__(self, table: str | None, limits: DeltasLimits, forget: Callable[["ChangeStream"], None]) -> None:
        self._table = table
        self._limits = limits
        self._forget = forget
        self._changes: deque[Change] = deque()
        self._bytes = 0
        self._error: OncelogError | None = None
        self._is_over = False
        self._arrived = asyncio.Event()

    def __aiter__(self) -> "ChangeStream":
        return self

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        change = self._changes.popleft()
        self._bytes -= change.bytes
        return change

    async def aclose(self) -> None:
        """No more is wanted."""
        self._end(None)

    def put(self, changes: Iterable[Change]) -> None:
        """Told in this order."""
        for change in changes:
            if self._table in (None, change.table) and not self._is_over:
                self._changes.append(change)
                self._bytes += change.bytes
                if len(self._changes) > self._limits.changes_max:
                    self.lose("changes_max", self._limits.changes_max)
                elif self._bytes > self._limits.changes_bytes_max:
                    self.lose("changes_bytes_max", self._limits.changes_bytes_max)
        self._arrived.set()

    def lose(self, limit_name: str, limit: int) -> None:
        """There are more than may wait: none of them is given any more, since the reader must look anew anyway."""
        self._end(ChangesLostError(limit_name, limit))

    def finish(self, error: OncelogError | None) -> None:
        """The client is closed; what came before it is still given."""
        waiting = self._changes
        self._end(error)
        self._changes = waiting

    def _end(self, error: OncelogError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._forget(self)
        self._changes = deque()
        self._arrived.set()
