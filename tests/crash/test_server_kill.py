"""A server that is killed under load, again and again: what it has acknowledged is there, once, for everybody."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import pytest

from cli import served as processes
from crash.observing import say
from databases import BOTH_STORES, is_postgres
from doors.serving import SocketClient, numbers, soon

ROUNDS = 20
SOAK_ROUNDS = 100
POSTGRES_ROUNDS = 6
"""What a kill does to a store is the subject of tests of its own: these are to show that the door is the same."""
CONNECTIONS = 16
READERS = 3
PARTITIONS = ("a", "b", "c")
RUN_S = 900
LOST = (aiohttp.ClientError, ConnectionError, AssertionError, TimeoutError)
"""What a client meets whose server is killed: no answer, or the end of the connection where one should be."""


class Load:
    """Sixteen clients that never give up: an event without an answer is sent again, under its id."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.acknowledged: dict[str, int] = {}
        self.waiting: dict[int, dict[str, Any] | None] = dict.fromkeys(range(CONNECTIONS))
        self._numbers = iter(range(1, 10**9))

    def next_event(self) -> dict[str, Any]:
        number = next(self._numbers)
        partitions = self.chance.sample(PARTITIONS, self.chance.randint(1, 2))
        return {"id": str(UUID(int=number)), "partitions": partitions, "event": {"type": "t", "number": number}}

    async def client(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        """Until the server is gone."""
        try:
            client = await connected(session, url, f"client-{number}")
            while True:
                event = self.waiting[number] = self.waiting[number] or self.next_event()
                (result,) = await client.submit(event)
                assert result["status"] == "committed"
                told = self.acknowledged.setdefault(event["id"], result["committed_id"])
                assert told == result["committed_id"]
                self.waiting[number] = None
        except LOST as error:
            if isinstance(error, AssertionError) and "CLOS" not in str(error):
                raise


class Reader:
    """Follows one partition, and goes on after the server is back where it stood."""

    def __init__(self, partition: str) -> None:
        self.partition = partition
        self.cursor = 0
        self.seen: list[tuple[int, str]] = []

    async def follow(self, session: aiohttp.ClientSession, url: str) -> None:
        """Until the server is gone."""
        try:
            client = await connected(session, url, f"reader-{self.partition}")
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


async def connected(session: aiohttp.ClientSession, url: str, client_id: str) -> SocketClient:
    client = SocketClient(await soon(session.ws_connect(url + "/v1/events")))
    await client.connect(client_id)
    return client


async def one_round(served: processes.Served, load: Load, readers: list[Reader], enough: int) -> None:
    """All of them at work, until so many more are acknowledged; then the kill."""
    before = len(load.acknowledged)
    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.ensure_future(load.client(session, served.url, number)) for number in range(CONNECTIONS)]
        tasks += [asyncio.ensure_future(reader.follow(session, served.url)) for reader in readers]
        while len(load.acknowledged) < before + enough:
            await asyncio.sleep(0)
            assert not any(task.done() and task.exception() for task in tasks), tasks
        served.process.kill()
        await asyncio.gather(*tasks)


async def settled(served: processes.Served, load: Load, readers: list[Reader]) -> dict[int, dict[str, Any]]:
    """What is in doubt is sent once more, everybody catches up; gives all there is."""
    async with aiohttp.ClientSession() as session:
        client = await connected(session, served.url, "last")
        for event in load.waiting.values():
            if event is not None:
                (result,) = await client.submit(event)
                load.acknowledged[event["id"]] = result["committed_id"]
        for reader in readers:
            await reader.catch_up(await connected(session, served.url, "reader"))
        everything: dict[int, dict[str, Any]] = {}
        cursor, has_more = 0, True
        while has_more:
            page = await client.sync(*PARTITIONS, since=cursor, limit=1000)
            everything.update((event["committed_id"], event) for event in page["events"])
            assert numbers(page["events"]) == sorted(numbers(page["events"]))
            cursor, has_more = page["next_since_committed_id"], page["has_more"]
        return everything


@pytest.fixture
def served(tmp_path: Path) -> Iterator[processes.Served]:
    with processes.serving(tmp_path) as found:
        yield found


@BOTH_STORES
@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-14", "EV-3", "EV-4", "EV-13", "EV-15")
def test_a_server_killed_under_load_loses_nothing_and_repeats_nothing(
    served: processes.Served, seed: int, is_soak: bool
) -> None:
    load = Load(seed)
    readers = [Reader(partition) for partition in PARTITIONS[:READERS]]
    rounds = SOAK_ROUNDS if is_soak else POSTGRES_ROUNDS if is_postgres() else ROUNDS

    async def main() -> None:
        for number in range(rounds):
            if number:
                served.start()
            await one_round(served, load, readers, load.chance.randint(1, 200))
            served.kill()
        served.start()
        everything = await settled(served, load, readers)
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

    asyncio.run(asyncio.wait_for(main(), RUN_S))
    assert served.stop() == 0
    verified = processes.oncelog("verify", served.store)
    assert verified.returncode == 0, verified.stdout
