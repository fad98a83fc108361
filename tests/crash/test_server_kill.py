"""A server is repeatedly killed under load: each acknowledged event is stored once, and all readers get it once."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import pytest

from cli import server_process as processes
from crash.store_history import say
from databases import BOTH_STORES, is_postgres
from deadlines import soon
from server.running_server import SocketClient, numbers

ROUNDS = 10
SOAK_ROUNDS = 100
POSTGRES_ROUNDS = 4
"""A few rounds are enough for the server, because other tests cover kills during store operations."""
CONNECTIONS = 16
READERS = 3
PARTITIONS = ("a", "b", "c")
LOST = (aiohttp.ClientError, ConnectionError, AssertionError, TimeoutError)
"""Errors of a client whose server is killed: no answer, or a closed connection."""


class Load:
    """Clients that retry forever: they resend unanswered events with the same ids."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.acknowledged: dict[str, int] = {}
        self.waiting: dict[int, dict[str, Any] | None] = dict.fromkeys(range(CONNECTIONS))
        self._acknowledgement = asyncio.Event()
        self._numbers = iter(range(1, 10**9))

    async def reach(self, count: int) -> None:
        """Wait until this number of events has been acknowledged."""
        while len(self.acknowledged) < count:
            self._acknowledgement.clear()
            await self._acknowledgement.wait()

    def next_event(self) -> dict[str, Any]:
        number = next(self._numbers)
        partitions = self.chance.sample(PARTITIONS, self.chance.randint(1, 2))
        return {"id": str(UUID(int=number)), "partitions": partitions, "event": {"type": "t", "number": number}}

    async def client(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        """Submit until the server is gone."""
        try:
            client = await open_socket(session, url, f"client-{number}")
            while True:
                event = self.waiting[number] = self.waiting[number] or self.next_event()
                (result,) = await client.submit(event)
                assert result["status"] == "committed"
                first = self.acknowledged.setdefault(event["id"], result["committed_id"])
                assert first == result["committed_id"]
                self.waiting[number] = None
                self._acknowledgement.set()
        except LOST as error:
            if isinstance(error, AssertionError) and "CLOS" not in str(error):
                raise


class Reader:
    """Follows one partition, and resumes at the cursor after a restart of the server."""

    def __init__(self, partition: str) -> None:
        self.partition = partition
        self.cursor = 0
        self.seen: list[tuple[int, str]] = []

    async def follow(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read until the server is gone."""
        try:
            client = await open_socket(session, url, f"reader-{self.partition}")
            await self.catch_up(client)
            while True:
                message = await client.receive()
                assert message["type"] == "event_broadcast"
                self._take(message["payload"])
        except LOST as error:
            if isinstance(error, AssertionError) and "CLOS" not in str(error):
                raise

    async def catch_up(self, client: SocketClient) -> None:
        has_more = True
        while has_more:
            page = await client.sync(self.partition, since=self.cursor, limit=100)
            for event in page["events"]:
                self._take(event)
            self.cursor, has_more = page["next_since_committed_id"], page["has_more"]

    def _take(self, event: dict[str, Any]) -> None:
        assert event["committed_id"] > self.cursor or not self.seen
        assert not self.seen or event["committed_id"] > self.seen[-1][0]
        self.seen.append((event["committed_id"], event["id"]))
        self.cursor = event["committed_id"]


async def open_socket(session: aiohttp.ClientSession, url: str, client_id: str) -> SocketClient:
    client = SocketClient(await soon(session.ws_connect(url + "/v1/events")))
    await client.connect(client_id)
    return client


async def load_and_kill(served: processes.ServerProcess, load: Load, readers: list[Reader], more: int) -> None:
    """Run all clients and readers until `more` events are acknowledged, then kill the server."""
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for number in range(CONNECTIONS):
            tasks.create_task(load.client(session, served.url, number))
        for reader in readers:
            tasks.create_task(reader.follow(session, served.url))
        await load.reach(len(load.acknowledged) + more)
        served.process.kill()


async def settle(served: processes.ServerProcess, load: Load, readers: list[Reader]) -> dict[int, dict[str, Any]]:
    """Resend the events in doubt, let all readers catch up, and return all events by position."""
    async with aiohttp.ClientSession() as session:
        client = await open_socket(session, served.url, "last")
        for event in load.waiting.values():
            if event is not None:
                (result,) = await client.submit(event)
                load.acknowledged[event["id"]] = result["committed_id"]
        for reader in readers:
            await reader.catch_up(await open_socket(session, served.url, "reader"))
        everything: dict[int, dict[str, Any]] = {}
        cursor, has_more = 0, True
        while has_more:
            page = await client.sync(*PARTITIONS, since=cursor, limit=1000)
            everything.update((event["committed_id"], event) for event in page["events"])
            assert numbers(page["events"]) == sorted(numbers(page["events"]))
            cursor, has_more = page["next_since_committed_id"], page["has_more"]
        return everything


@pytest.fixture
def served(tmp_path: Path) -> Iterator[processes.ServerProcess]:
    with processes.serving(tmp_path) as found:
        yield found


@BOTH_STORES
@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-14", "EV-3", "EV-4", "EV-13", "EV-15")
async def test_server_killed_under_load_keeps_every_acknowledged_event_once(
    served: processes.ServerProcess, seed: int, is_soak: bool
) -> None:
    load = Load(seed)
    readers = [Reader(partition) for partition in PARTITIONS[:READERS]]
    rounds = SOAK_ROUNDS if is_soak else POSTGRES_ROUNDS if is_postgres() else ROUNDS
    for number in range(rounds):
        if number:
            served.start()
        await load_and_kill(served, load, readers, load.chance.randint(1, 200))
        served.kill()
        assert any(load.waiting.values()), "the kill left no event in doubt"
    served.start()
    everything = await settle(served, load, readers)
    say(f"{rounds} kills, {len(load.acknowledged)} acknowledged, {len(everything)} events")
    assert sorted(everything) == list(range(1, len(everything) + 1))
    by_id = {event["id"]: position for position, event in everything.items()}
    assert len(by_id) == len(everything)
    assert by_id == load.acknowledged
    for reader in readers:
        expected = [
            (position, event["id"])
            for position, event in sorted(everything.items())
            if reader.partition in event["partitions"]
        ]
        assert reader.seen == expected
    assert served.stop() == 0
    verified = processes.oncelog("verify", served.store)
    assert verified.returncode == 0, verified.stdout
