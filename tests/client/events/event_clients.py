"""Clients of the Events API for tests, with short pauses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from deadlines import WAIT_S, soon, until
from oncelog.client import Client, ClientLimits, Committed, Event, Outcome
from oncelog.errors import LostError

LIMITS: Final = ClientLimits(
    pause_ms_min=1,
    pause_ms_max=20,
    refused_pause_ms_min=1,
    refused_pause_ms_max=20,
    retry_after_ms_max=20,
    connect_timeout_ms=60_000,
    answer_timeout_ms=60_000,
)
UNREACHABLE_URL: Final = "http://127.0.0.1:9"
"""No server listens on this port."""


def client_of(url: str, store: Path | str = ":memory:", partitions: Any = ("a",), **options: Any) -> Client:
    """Return a client with short pauses."""
    return Client(url, path=store, partitions=partitions, **{"limits": LIMITS, **options})


def numbered_draft(number: int) -> dict[str, Any]:
    return {"type": "counted", "number": number}


async def take(events: AsyncIterator[Event], count: int) -> list[int]:
    """Return the committed ids of the next `count` events."""
    async with asyncio.timeout(WAIT_S):
        return [(await anext(events)).committed_id for _ in range(count)]


async def outcome(client: Client, *arguments: Any, **options: Any) -> Outcome:
    """Submit an event and return its outcome."""
    return await soon((await client.submit(*arguments, **options)).outcome())


async def committed(client: Client, *arguments: Any, **options: Any) -> int:
    """Submit an event, expect a commit, and return the committed id."""
    found = await outcome(client, *arguments, **options)
    assert isinstance(found, Committed), found
    return found.committed_id


async def wait_until_live(client: Client) -> None:
    await soon(client.until_live())


async def wait_until_settled(client: Client) -> None:
    await soon(client.until_settled())


async def restart_connection(client: Client) -> None:
    """Drop the client's connection, and wait until the client opens the next one."""
    client._connector.restart()
    await until(lambda: not client._connector._restart_event.is_set())


class SilentSocket:
    """Records sent frames and delivers the frames that the test puts into `frames`."""

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
    """Connects immediately, without a server."""

    def __init__(self) -> None:
        self.sockets: list[SilentSocket] = []
        self.is_closed = False

    async def connect(self) -> SilentSocket:
        self.sockets.append(SilentSocket())
        return self.sockets[-1]

    async def close(self) -> None:
        self.is_closed = True
