"""A write in the outbox, and callers that wait for its outcome."""

import asyncio
from typing import Generic, TypeVar

OutcomeType = TypeVar("OutcomeType")


class BasePending(Generic[OutcomeType]):
    """A write in the outbox. Made by a client."""

    __slots__ = ("_outcome", "_waiter")

    def __init__(self) -> None:
        self._outcome: OutcomeType | Exception | None = None
        self._waiter: asyncio.Event | None = None

    def check_accepted(self) -> None:
        """Raises why it did not get into the outbox, if so. For the client alone."""
        if isinstance(self._outcome, Exception):
            raise self._outcome

    def settle(self, outcome: OutcomeType | Exception) -> None:
        """Tell callers that wait. For the client alone."""
        self._outcome = outcome
        if self._waiter is not None:
            self._waiter.set()

    def _get_result(self) -> OutcomeType | None:
        return None if isinstance(self._outcome, Exception) else self._outcome

    async def _wait_for_outcome(self) -> OutcomeType:
        while self._outcome is None:
            if self._waiter is None:
                self._waiter = asyncio.Event()
            await self._waiter.wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome
