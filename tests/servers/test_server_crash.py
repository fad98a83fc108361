"""After PostgreSQL is killed and restarted, no acknowledged event is lost and all clients continue."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import aiohttp
import pytest

from cli.server_process import ServerProcess
from crash.store_history import say
from deadlines import until
from oncelog.engine.log import Log, open_log
from oncelog.engine.tailer import FAILED_POLLS_MAX
from oncelog.testing.postgres import DURABLE_SETTINGS, PostgresServer, create_schema, postgres_server
from server.running_server import SocketClient, item
from servers.server_processes import running_servers
from servers.shared_logs import fetch_rows, limits, positions

CLIENTS = 8
CRASHES = 2
SOAK_CRASHES = 40
POLL_MS = 5
OUTAGE_S = 0.75
"""Long enough for more consecutive failed polls than a tailer tolerates without reporting an error."""
LOST = (aiohttp.ClientError, OSError, TimeoutError, KeyError, AssertionError)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    directory = Path(tempfile.mkdtemp(prefix="oncelog-crash-"))
    try:
        with postgres_server(directory, DURABLE_SETTINGS, is_own=True) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Load:
    """Clients that retry forever."""

    def __init__(self, found: list[ServerProcess], seed: int) -> None:
        self.acknowledged: dict[int, int] = {}
        self.refused = 0
        self.is_done = False
        self._servers = found
        self._chance = Random(seed)
        self._numbers = iter(range(1, 10**9))

    async def client(self, session: aiohttp.ClientSession) -> None:
        while not self.is_done:
            number = next(self._numbers)
            while number not in self.acknowledged:
                server = self._chance.choice(self._servers)
                with suppress(*LOST):
                    async with session.post(server.url + "/v1/events", json={"events": [item(number)]}) as response:
                        (result,) = (await response.json())["results"]
                    assert result["status"] == "committed"
                    self.acknowledged[number] = result["committed_id"]
                    continue
                self.refused += 1
                await asyncio.sleep(0.02)


class Reader:
    """Reads through the library or from a server. Neither reader reports an error during an outage."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.is_following = False

    async def by_library(self, log: Log) -> None:
        async with log.follow() as records:
            self.is_following = True
            async for record in records:
                self.seen.append(record.position)

    async def by_socket(self, session: aiohttp.ClientSession, server: ServerProcess) -> None:
        client = SocketClient(await session.ws_connect(server.url + "/v1/events"))
        await client.connect("reader")
        page = await client.sync("a")
        self.seen += [event["committed_id"] for event in page["events"]]
        self.is_following = True
        async for message in client.socket:
            self.seen.append(message.json()["payload"]["committed_id"])


@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-16")
async def test_every_acknowledged_event_is_stored_once_after_database_crashes(
    server: PostgresServer, seed: int, is_soak: bool
) -> None:
    crashes = SOAK_CRASHES if is_soak else CRASHES
    address = await create_schema(server.address)
    async with (
        running_servers(address, address, poll_ms=POLL_MS) as found,
        aiohttp.ClientSession() as session,
        open_log(address, limits=limits(poll_ms=POLL_MS)) as log,
    ):
        await crash_repeatedly(server, found, session, log, crashes, seed)


async def crash_repeatedly(
    server: PostgresServer,
    found: list[ServerProcess],
    session: aiohttp.ClientSession,
    log: Log,
    crashes: int,
    seed: int,
) -> None:
    load = Load(found, seed)
    readers = [Reader(), *(Reader() for _ in found)]
    reading = [asyncio.create_task(readers[0].by_library(log))]
    reading += [
        asyncio.create_task(one.by_socket(session, other)) for one, other in zip(readers[1:], found, strict=True)
    ]
    await until(lambda: all(one.is_following for one in readers) or any(task.done() for task in reading))
    clients = [asyncio.create_task(load.client(session)) for _ in range(CLIENTS)]
    chance = Random(seed)
    for crash in range(crashes):
        enough = len(load.acknowledged) + chance.randint(20, 60)
        await until(lambda enough=enough: len(load.acknowledged) >= enough)  # type: ignore[misc]
        await asyncio.to_thread(server.kill)
        if not crash:
            await asyncio.sleep(OUTAGE_S)
            assert OUTAGE_S * 1000 / POLL_MS > FAILED_POLLS_MAX
        await asyncio.to_thread(server.start)
    enough = len(load.acknowledged) + 30
    await until(lambda: len(load.acknowledged) >= enough)
    load.is_done = True
    await asyncio.gather(*clients)
    await check_history(log, load, readers)
    assert not any(task.done() for task in reading), reading
    for task in reading:
        task.cancel()
    say(f"{crashes} crashes, {len(load.acknowledged)} acknowledged, {load.refused} retried")


async def check_history(log: Log, load: Load, readers: list[Reader]) -> None:
    address = log._store._address  # type: ignore[attr-defined]
    ((head,),) = await fetch_rows(address, "SELECT position FROM oncelog_lanes WHERE lane = 0")
    assert await positions(address) == {number: [position] for number, position in load.acknowledged.items()}
    assert sorted(load.acknowledged.values()) == list(range(1, head + 1))
    for reader in readers:
        await until(lambda reader=reader: len(reader.seen) >= head)  # type: ignore[misc]
        assert reader.seen == list(range(1, head + 1))
