"""Connections that should not slow down a server's writers: idle ones, and a reader that has stopped reading.

The server must close the stuck reader. A new connection with its cursor must get all events.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from http.client import HTTPConnection
from typing import Any, Final

import msgspec

from bench.wire import EVENTS, PARTITIONS
from bench.ws_load import ANSWER_S, Connection, Load, catch_up, connected

WRITTEN: Final = PARTITIONS[0]
UNWRITTEN: Final = "without-writes"
PAGE: Final = 1000
FILL_BATCH: Final = 100
FILL_S: Final = 0.2
GIVEN_UP_S: Final = 60
WS_CONNECTIONS: Final = 'oncelog_connections{kind="ws"}'
SLOW_READERS_CLOSED: Final = 'oncelog_slow_readers_total{step="closed"}'
LAST_POSITION: Final = 'oncelog_last_committed_position{lane="0"}'


class StuckReader:
    """Follows the written partition, but reads nothing before `rest`."""

    def __init__(self, connection: Connection, since: int, closed_before: int) -> None:
        self.since = since
        self.closed_before = closed_before
        """Number of slow readers that the server had closed before."""
        self._connection = connection
        self._texts: list[bytes] = []
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def follow(self) -> None:
        await follow(self._connection, WRITTEN, self.since)
        self._connection.on_text = self._texts.append
        self._connection.on_lost = self._ignore_loss
        self._connection.pause()

    async def rest(self) -> list[dict[str, Any]]:
        """Return the events that were in transit when the server closed the connection."""
        self._connection.resume()
        await asyncio.wait_for(self._gone, ANSWER_S)
        return [msgspec.json.decode(text)["payload"] for text in self._texts]

    def _ignore_loss(self, _: Exception) -> None:
        if not self._gone.done():
            self._gone.set_result(None)


async def follow(connection: Connection, partition: str, since: int) -> None:
    """Read an empty page, and follow the partition from there."""
    answer = await connection.ask("sync", {"partitions": [partition], "since_committed_id": since, "limit": 1})
    if answer["payload"]["events"] or answer["payload"]["has_more"]:
        raise ValueError(f"a reader that has all events received {answer}")


@asynccontextmanager
async def open_idle_connections(host: str, port: int, count: int) -> AsyncIterator[StuckReader]:
    """Open a stuck reader and idle connections. All are closed when the block ends.

    Raises ValueError if an idle connection received data or was closed by the server.
    """
    before = metric(host, port, WS_CONNECTIONS)
    disturbed: list[bytes | Exception] = []
    async with connected(host, port, count) as idle, connected(host, port, 1) as (reader,):
        for connection in idle:
            await follow(connection, UNWRITTEN, 0)
            connection.on_text = connection.on_lost = disturbed.append
        stuck = StuckReader(reader, metric(host, port, LAST_POSITION), metric(host, port, SLOW_READERS_CLOSED))
        await stuck.follow()
        yield stuck
    if disturbed:
        raise ValueError(f"idle connections received {disturbed[:3]}")
    await _until(host, port, WS_CONNECTIONS, before)


async def check_slow_reader_is_closed(
    host: str, port: int, server: int, writers: Sequence[Connection], stuck: StuckReader, written: int
) -> None:
    """Write until the server closes the stuck reader. Check that a new connection gets all events after its cursor.

    Raises ValueError if events are missing, TimeoutError if the reader stays connected.
    """
    until = time.perf_counter() + GIVEN_UP_S
    while metric(host, port, SLOW_READERS_CLOSED) == stuck.closed_before:
        if time.perf_counter() > until:
            raise TimeoutError(f"a reader that has not read {written} events is still connected")
        written += (await Load(writers, FILL_BATCH, [WRITTEN]).keep_busy(server, 1, FILL_S)).events
    events = await stuck.rest()
    cursor = events[-1]["committed_id"] if events else stuck.since
    async with connected(host, port, 1) as (back,):
        async for page in catch_up(back, [WRITTEN], PAGE, cursor):
            events += msgspec.json.decode(page)["payload"]["events"]
    check_all(events, stuck.since, written)


def check_all(events: Sequence[dict[str, Any]], since: int, written: int) -> None:
    """Raise ValueError unless the events have consecutive numbers after `since`."""
    numbers = [event["committed_id"] for event in events]
    if numbers != list(range(since + 1, since + written + 1)):
        raise ValueError(f"of {written} events after {since}, a reader received {len(numbers)}, or in another order")
    if any(event["event"] not in EVENTS or event["partitions"] != [WRITTEN] for event in events):
        raise ValueError("a reader received other events than were written")


def metric(host: str, port: int, name: str) -> int:
    """Return a metric of the server."""
    with closing(HTTPConnection(host, port, timeout=ANSWER_S)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return int(float(values[name]))


async def _until(host: str, port: int, name: str, value: int) -> None:
    until = time.perf_counter() + ANSWER_S
    while (found := metric(host, port, name)) != value:
        if time.perf_counter() > until:
            raise TimeoutError(f"{name} is {found}, not {value}")
        await asyncio.sleep(0.02)
