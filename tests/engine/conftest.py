from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import oncelog
from engine.observable_store import Open, WatchedLog, loop_clock
from oncelog import Log
from oncelog.testing.clock import ManualClock

__all__ = ["loop_clock"]


@pytest.fixture
def open_log(place: str) -> Open:
    """Return a function that opens a log on a manual clock."""

    def open_at_place(clock: ManualClock | None = None, **more: Any) -> Log:
        return oncelog.open(place, clock=clock or ManualClock(), **more)

    return open_at_place


@pytest_asyncio.fixture
async def log() -> AsyncIterator[WatchedLog]:
    """An open log in memory with default limits."""
    async with WatchedLog() as opened:
        yield opened
