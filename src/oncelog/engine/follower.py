"""An iterator that can be closed: by `async with`, by `aclose`, or by being left to the event loop."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from oncelog.core.values import Record


class Follower:
    """Records as they come. Where a loop ends before the log does, close it: `async with log.follow(…) as records`."""

    def __init__(self, records: AsyncGenerator[Record, None]) -> None:
        self._records = records

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        return await anext(self._records)

    async def aclose(self) -> None:
        """Ends it."""
        await self._records.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
