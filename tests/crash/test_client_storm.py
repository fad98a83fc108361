"""Clients, their network and their server in a storm: all end with the same events, each once, and nothing is lost."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import aiohttp
import pytest

from cli import served as processes
from crash.applications import Application, Row, demand_given, demand_outcomes, log_of, of_partitions
from crash.client_load import ALL, FOLLOWED, plan_of
from crash.observing import say
from databases import BOTH_STORES, is_postgres
from doors.serving import SocketClient, soon
from oncelog.testing.proxy import Faults, FaultyProxy, Incident

pytestmark = BOTH_STORES

SERVER_KILLS = 20
CLIENT_KILLS = 15
EVENTS = 200
"""That each client submits."""
SOAK_FACTOR = 6
"""So many times as much of all three."""
POSTGRES_PART = 4
"""The part of all this that is enough there: clients are the same whatever the server has its log in."""
FAULTS = Faults(
    cut_rate=0.03, stall_rate=0.008, stall_ms_max=300, answer_ms_max=300, delay_ms_max=8, duplicate_rate=0.1
)
SOAK_FAULTS = replace(FAULTS, stall_ms_max=3000)
"""Some stalls last until the client gives up on the server."""
LIVES = 30
SOAK_LIVES = 150
WAITING = 30
"""Events that an application finds when its life begins, and again as many that come while it lives."""
RUN_S = 900
LOST = (aiohttp.ClientError, ConnectionError, AssertionError, TypeError, TimeoutError)
"""What one meets whose server is killed: no answer, or the end of the connection where a text should be."""


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[SocketClient]:
    """To the server, past the proxy."""
    async with aiohttp.ClientSession() as session:
        client = SocketClient(await soon(session.ws_connect(url + "/v1/events")))
        await client.connect("observer")
        yield client


class Progress:
    """How far the log has come, by one who follows all of it."""

    def __init__(self) -> None:
        self.head = 0
        self.is_up = asyncio.Event()
        """Whether the server is to be expected to answer."""
        self._moved = asyncio.Condition()

    async def follow(self, served: processes.Served) -> None:
        """Until it is cancelled."""
        while True:
            await self.is_up.wait()
            try:
                async with connected(served.url) as client:
                    await self._follow(client)
            except LOST:
                pass

    async def _follow(self, client: SocketClient) -> None:
        has_more = True
        while has_more:
            page = await client.sync(*ALL, since=self.head)
            await self._move(page["next_since_committed_id"])
            has_more = page["has_more"]
        while True:
            await self._move(json.loads(await client.socket.receive_str())["payload"]["committed_id"])

    async def _move(self, head: int) -> None:
        self.head = head
        async with self._moved:
            self._moved.notify_all()

    async def reaches(self, head: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.head >= head)


def scaled(count: int, *, is_soak: bool) -> int:
    """How many there are in this run."""
    if is_soak:
        return count * SOAK_FACTOR
    return count // POSTGRES_PART if is_postgres() else count


class Storm:
    """Whom it strikes, and when, follows from the seed and from how far the log has come."""

    def __init__(self, directory: Path, served: processes.Served, seed: int, *, is_soak: bool) -> None:
        events = scaled(EVENTS, is_soak=is_soak)
        self._served = served
        self._chance = Random(seed)
        self._progress = Progress()
        self.server_kills = 0
        self.proxy = FaultyProxy("127.0.0.1", 0, seed=seed, faults=SOAK_FAULTS if is_soak else FAULTS)
        self.applications = [
            Application(directory, name, seed, events, partitions) for name, partitions in FOLLOWED.items()
        ]
        self.plans = {name: plan_of(seed, name, events) for name in FOLLOWED}
        plan = [one for plan in self.plans.values() for one in plan]
        self.shared = frozenset(one.id for one in plan if one.is_shared)
        self.total = 1 + len({one.id for one in plan if one.expected_committed_id is None})
        kills: list[Callable[[], Coroutine[Any, Any, None]]] = []
        kills += [self._kill_server] * scaled(SERVER_KILLS, is_soak=is_soak)
        kills += [self._kill_client] * scaled(CLIENT_KILLS, is_soak=is_soak)
        self._chance.shuffle(kills)
        # So far the log comes by itself if one of the clients is away.
        moments = sorted(self._chance.randint(2, self.total * 7 // 10) for _ in kills)
        self._schedule = list(zip(moments, kills, strict=True))

    @property
    def client_kills(self) -> int:
        return sum(one.kills for one in self.applications)

    def told(self) -> str:
        """For whoever has to find out why it does not end."""
        lines = [f"{self._progress.head} of {self.total} events; {self.server_kills} kills of the server; {self.proxy}"]
        for one in self.applications:
            waiting = f"{len(one.accepted())} accepted, {len(one.outbox())} without an outcome"
            lines.append(f"{one.name}: {one.kills} kills, {waiting}, last said:\n{one.log()[-500:]}")
        return "\n".join(lines)

    async def run(self) -> None:
        """From the first event until all applications have ended."""
        async with self.proxy, asyncio.TaskGroup() as tasks:
            await self._submit_first()
            self._find_server()
            following = tasks.create_task(self._progress.follow(self._served))
            for one in self.applications:
                tasks.create_task(one.live(self.proxy.url, self._dies()))
            for moment, kill in self._schedule:
                await self._progress.reaches(moment)
                await kill()
            self._let_all_start()
            await self._progress.reaches(self.total)
            self.proxy.calm()
            await self._end()
            following.cancel()

    async def _submit_first(self) -> None:
        """From now on it is stale to expect an empty log."""
        async with connected(self._served.url) as client:
            await client.submit({"id": str(UUID(int=1)), "partitions": ALL, "event": {"type": "first"}})

    def _find_server(self) -> None:
        host, _, port = self._served.url.removeprefix("http://").rpartition(":")
        self.proxy.target = (host, int(port))
        self._progress.is_up.set()

    def _dies(self) -> Iterator[int]:
        """Some of an application's first lives end in a transaction."""
        for _ in range(6):
            yield self._chance.randint(1, self.total // 8) if self._chance.random() < 0.3 else 0
        while True:
            yield 0

    async def _kill_server(self) -> None:
        self._progress.is_up.clear()
        await asyncio.to_thread(self._served.kill)
        self.server_kills += 1
        if self._chance.random() < 0.2:
            await self._kill_client()  # while there is no server
        await asyncio.to_thread(self._served.start)
        self._find_server()

    async def _kill_client(self) -> None:
        """It comes back at once, or stays away until the next one is killed."""
        self._let_all_start()
        is_away = self._chance.random() < 0.3
        order = self._chance.sample(self.applications, len(self.applications))
        victim = next(one for one in order if one.is_alive)
        if is_away:
            victim.may_start.clear()
        await victim.kill()

    def _let_all_start(self) -> None:
        for one in self.applications:
            one.may_start.set()

    async def _end(self) -> None:
        """When all have settled nothing more is committed, and it is known how far each of them has to come."""
        for one in self.applications:
            await one.settled.wait()
        log = await asyncio.to_thread(log_of, self._served.store)
        for one in self.applications:
            one.come_to(of_partitions(log, one.partitions)[-1].committed_id)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[processes.Served]:
    with processes.serving(tmp_path) as found:
        yield found


@pytest.mark.rule("EV-14", "EV-15", "EV-17", "CO-13")
def test_clients_in_a_storm_end_with_the_same_events_each_once(
    tmp_path: Path, served: processes.Served, seed: int, is_soak: bool
) -> None:
    began = time.perf_counter()
    storm = Storm(tmp_path, served, seed, is_soak=is_soak)
    try:
        asyncio.run(asyncio.wait_for(storm.run(), RUN_S))
    except TimeoutError:
        pytest.fail(storm.told())
    assert served.stop() == 0
    happened = storm.proxy.done
    say(f"{storm.total} events, {storm.server_kills} kills of the server, {storm.client_kills} of clients")
    say(f"{storm.proxy.accepted_count} connections: {', '.join(f'{n} {one}' for one, n in sorted(happened.items()))}")
    say(f"{time.perf_counter() - began:.1f} s")

    log = log_of(served.store)
    assert [row.committed_id for row in log] == list(range(1, storm.total + 1))
    assert len({row.id for row in log}) == storm.total
    sequences: dict[tuple[str, ...], list[list[tuple[int, str]]]] = defaultdict(list)
    for one in storm.applications:
        demand_outcomes(one, storm.plans[one.name], log)
        demand_given(one, log, storm.shared)
        sequences[tuple(one.partitions)].append([(row.committed_id, row.id) for row in one.given()])
    assert all(sequence == same[0] for same in sequences.values() for sequence in same)
    verified = processes.oncelog("verify", served.store)
    assert verified.returncode == 0, verified.stdout

    assert storm.server_kills >= scaled(SERVER_KILLS, is_soak=is_soak)
    assert storm.client_kills >= scaled(CLIENT_KILLS, is_soak=is_soak)
    assert [one for one in Incident if not happened[one]] == []


@pytest.mark.rule("EV-17")
def test_an_application_killed_while_it_is_given_events_has_each_once(
    tmp_path: Path, served: processes.Served, seed: int, is_soak: bool
) -> None:
    chance = Random(seed)
    lives = SOAK_LIVES if is_soak else scaled(LIVES, is_soak=False)
    application = Application(tmp_path, "anna", seed, 0, ["all"])
    numbers = iter(range(1, 10**9))

    def event() -> dict[str, Any]:
        number = next(numbers)
        return {"id": str(UUID(int=number)), "partitions": ["all"], "event": {"type": "t", "number": number}}

    async def one_life(client: SocketClient) -> None:
        await client.submit(*[event() for _ in range(WAITING)])
        moment = chance.randint(1, 2 * WAITING - 5)
        how = {chance.choice(("die_after", "kill_after")): moment}
        life = asyncio.create_task(application.live_once(served.url, **how))
        await application.begun.wait()
        for _ in range(WAITING):
            await client.submit(event())
        assert not await life

    async def main() -> list[Row]:
        async with connected(served.url) as client:
            for _ in range(lives):
                await one_life(client)
        log = await asyncio.to_thread(log_of, served.store)
        life = asyncio.create_task(application.live_once(served.url))
        await application.settled.wait()
        application.come_to(log[-1].committed_id)
        assert await life
        return log

    log = asyncio.run(asyncio.wait_for(main(), RUN_S))
    assert application.kills == lives
    assert len(log) == 2 * WAITING * lives
    demand_given(application, log)
