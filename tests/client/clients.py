"""Clients for tests: with short pauses, and waits that end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from oncelog.client import Client, ClientLimits, Event
from oncelog.errors import LostError

T = TypeVar("T")

WAIT_S: Final = 60
RUN_S: Final = 200
LIMITS: Final = ClientLimits(
    pause_ms_min=1, pause_ms_max=20, refused_pause_ms_min=1, connect_timeout_ms=20_000, answer_timeout_ms=20_000
)
NOWHERE: Final = "http://127.0.0.1:9"
"""Nobody listens there."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine in a loop of its own."""
    return asyncio.run(asyncio.wait_for(main, RUN_S))


def client_of(url: str, store: Path | str = ":memory:", partitions: Any = ("a",), **options: Any) -> Client:
    """A client that waits for nothing long."""
    return Client(url, store=store, partitions=partitions, **{"limits": LIMITS, **options})


def counted(number: int) -> dict[str, Any]:
    return {"type": "counted", "number": number}


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what happens in tasks of the client's, and is told to nobody."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def turns(count: int = 20) -> None:
    """Lets others have their turns: enough for all that needs no I/O."""
    for _ in range(count):
        await asyncio.sleep(0)


async def take(events: AsyncIterator[Event], count: int) -> list[int]:
    """The numbers of the next events."""
    async with asyncio.timeout(WAIT_S):
        return [(await anext(events)).committed_id for _ in range(count)]


class SilentSocket:
    """Takes all that is sent, and says what a test says."""

    def __init__(self) -> None:
        self.close_code: int | None = None
        self.sent: list[bytes] = []
        self.frames: asyncio.Queue[str | None] = asyncio.Queue()
        self.is_closed = False

    async def send(self, data: bytes) -> None:
        self.sent.append(data)

    async def receive(self) -> str:
        frame = await self.frames.get()
        if frame is None:
            raise LostError("cut")
        return frame

    async def close(self) -> None:
        self.is_closed = True


class SilentTransport:
    """Connects at once, to nobody."""

    def __init__(self) -> None:
        self.sockets: list[SilentSocket] = []
        self.is_closed = False

    async def connect(self) -> SilentSocket:
        self.sockets.append(SilentSocket())
        return self.sockets[-1]

    async def close(self) -> None:
        self.is_closed = True
