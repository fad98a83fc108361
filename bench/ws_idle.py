"""Those who should cost a server nothing while others write: connections that are idle, and a reader that has stopped.

The reader must be given up, and whoever comes back with its cursor must get everything.
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
NOBODYS: Final = "nobody-writes-here"
PAGE: Final = 1000
FILL_BATCH: Final = 100
FILL_S: Final = 0.2
GIVEN_UP_S: Final = 60
WS_CONNECTIONS: Final = 'oncelog_connections{kind="ws"}'
SLOW_READERS_CLOSED: Final = 'oncelog_slow_readers_total{step="closed"}'
LAST_POSITION: Final = 'oncelog_last_committed_position{lane="0"}'


class StuckReader:
    """Follows the partition that is written from now on, and reads nothing until `rest`."""

    def __init__(self, connection: Connection, since: int, closed_before: int) -> None:
        self.since = since
        self.closed_before = closed_before
        """Readers that the server has given up until now."""
        self._connection = connection
        self._texts: list[bytes] = []
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def follow(self) -> None:
        await follow(self._connection, WRITTEN, self.since)
        self._connection.on_text = self._texts.append
        self._connection.on_lost = self._lost
        self._connection.pause()

    async def rest(self) -> list[dict[str, Any]]:
        """The events that were on their way to it when the server gave it up."""
        self._connection.resume()
        await asyncio.wait_for(self._gone, ANSWER_S)
        return [msgspec.json.decode(text)["payload"] for text in self._texts]

    def _lost(self, _: Exception) -> None:
        if not self._gone.done():
            self._gone.set_result(None)


async def follow(connection: Connection, partition: str, since: int) -> None:
    """An empty page, and from then on what is committed."""
    answer = await connection.ask("sync", {"partitions": [partition], "since_committed_id": since, "limit": 1})
    if answer["payload"]["events"] or answer["payload"]["has_more"]:
        raise ValueError(f"a reader that has everything got {answer}")


@asynccontextmanager
async def crowd(host: str, port: int, count: int) -> AsyncIterator[StuckReader]:
    """So many idle connections, and the reader. All have gone when the block has ended. Raises ValueError if one of
    those who are idle was sent something, or sent away.
    """
    before = metric(host, port, WS_CONNECTIONS)
    disturbed: list[bytes | Exception] = []
    async with connected(host, port, count) as idle, connected(host, port, 1) as (reader,):
        for connection in idle:
            await follow(connection, NOBODYS, 0)
            connection.on_text = connection.on_lost = disturbed.append
        stuck = StuckReader(reader, metric(host, port, LAST_POSITION), metric(host, port, SLOW_READERS_CLOSED))
        await stuck.follow()
        yield stuck
    if disturbed:
        raise ValueError(f"idle connections got {disturbed[:3]}")
    await _until(host, port, WS_CONNECTIONS, before)


async def demand_given_up(
    host: str, port: int, server: int, writers: Sequence[Connection], stuck: StuckReader, written: int
) -> None:
    """The reader is closed as a slow one: at the latest when enough was written that it has not read. Then a new
    connection reads what is behind its cursor, and nothing is missing. Raises ValueError if not.
    """
    until = time.perf_counter() + GIVEN_UP_S
    while metric(host, port, SLOW_READERS_CLOSED) == stuck.closed_before:
        if time.perf_counter() > until:
            raise TimeoutError(f"a reader that has not read {written} events is still there")
        written += (await Load(writers, FILL_BATCH, [WRITTEN]).keep_busy(server, 1, FILL_S)).events
    events = await stuck.rest()
    cursor = events[-1]["committed_id"] if events else stuck.since
    async with connected(host, port, 1) as (back,):
        async for page in catch_up(back, [WRITTEN], PAGE, cursor):
            events += msgspec.json.decode(page)["payload"]["events"]
    demand_all(events, stuck.since, written)


def demand_all(events: Sequence[dict[str, Any]], since: int, written: int) -> None:
    """Every number behind `since`, once, in order. Raises ValueError if not."""
    numbers = [event["committed_id"] for event in events]
    if numbers != list(range(since + 1, since + written + 1)):
        raise ValueError(f"of {written} events behind {since} a reader got {len(numbers)}, or in another order")
    if any(event["event"] not in EVENTS or event["partitions"] != [WRITTEN] for event in events):
        raise ValueError("a reader got other events than were written")


def metric(host: str, port: int, name: str) -> int:
    """What a server says of itself."""
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
