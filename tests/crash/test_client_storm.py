"""Clients, network and server fail repeatedly. Even so, every client receives every event exactly once."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import aiohttp
import pytest

from cli import server_process as processes
from crash.applications import (
    DEATHS,
    SURVIVES,
    Application,
    PlannedKill,
    check_outcomes,
    check_received,
    read_log,
    select_partitions,
)
from crash.client_load import ALL, FOLLOWED, plan_submissions
from crash.store_history import say
from databases import BOTH_STORES, is_postgres
from deadlines import soon, until
from oncelog.testing.proxy import Faults, FaultyProxy, Incident
from server.running_server import SocketClient

pytestmark = BOTH_STORES


@dataclass(frozen=True)
class Size:
    """The size of the storm."""

    server_kills: int
    client_kills: int
    events: int
    """Number of events that each client submits."""
    lives: int
    """Number of processes of the application that is killed while events are delivered to it."""


SMALL = Size(server_kills=4, client_kills=4, events=48, lives=8)
POSTGRES = Size(server_kills=2, client_kills=2, events=32, lives=4)
"""One kind of store is enough, because clients do not depend on it."""
SOAK = Size(server_kills=120, client_kills=90, events=1200, lives=150)
FAULTS = Faults(
    refuse_rate=0.1,
    cut_rate=0.06,
    stall_rate=0.02,
    stall_ms_max=300,
    answer_ms_max=300,
    delay_ms_max=8,
    duplicate_rate=0.1,
)
SOAK_FAULTS = replace(FAULTS, refuse_rate=0.05, cut_rate=0.03, stall_rate=0.008, stall_ms_max=5000)
"""Some stalls last until the client's timeout."""
WAITING = 20
"""Number of events that exist when an application starts, and number of events that arrive while it runs."""
LOST = (aiohttp.ClientError, ConnectionError, AssertionError, TypeError, TimeoutError)
"""Errors of a client whose server is killed: no answer, or a closed connection instead of a text message."""


@asynccontextmanager
async def connect_directly(url: str) -> AsyncIterator[SocketClient]:
    """Connect to the server directly, without the proxy."""
    async with aiohttp.ClientSession() as session:
        client = SocketClient(await soon(session.ws_connect(url + "/v1/events")))
        await client.connect("observer")
        yield client


class Progress:
    """Tracks the newest position of the log with a client that follows all partitions."""

    def __init__(self) -> None:
        self.head = 0
        self.is_up = asyncio.Event()
        """Whether the server is expected to answer."""
        self._moved = asyncio.Condition()

    async def follow(self, served: processes.ServerProcess) -> None:
        """Follow until cancelled."""
        while True:
            await self.is_up.wait()
            try:
                async with connect_directly(served.url) as client:
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


def get_size(*, is_soak: bool) -> Size:
    """Return the size of the storm in this run."""
    if is_soak:
        return SOAK
    return POSTGRES if is_postgres() else SMALL


class Storm:
    """Kills clients and the server at certain log positions. The seed determines the victims and the positions."""

    def __init__(self, directory: Path, served: processes.ServerProcess, seed: int, size: Size, faults: Faults) -> None:
        self._served = served
        self._chance = Random(seed)
        self._progress = Progress()
        self.server_kills = 0
        self.proxy = FaultyProxy("127.0.0.1", 0, seed=seed, faults=faults)
        self.applications = [
            Application(directory, name, seed, size.events, partitions) for name, partitions in FOLLOWED.items()
        ]
        self.plans = {name: plan_submissions(seed, name, size.events) for name in FOLLOWED}
        plan = [one for plan in self.plans.values() for one in plan]
        self.shared = frozenset(one.id for one in plan if one.is_shared)
        self.total = 1 + len({one.id for one in plan if one.expected_committed_id is None})
        kills: list[Callable[[], Coroutine[Any, Any, None]]] = []
        kills += [self._kill_server] * size.server_kills
        kills += [self._kill_client] * size.client_kills
        self._chance.shuffle(kills)
        # The log reaches these positions even while a client is down.
        moments = sorted(self._chance.randint(2, self.total * 7 // 10) for _ in kills)
        self._schedule = list(zip(moments, kills, strict=True))

    @property
    def client_kills(self) -> int:
        return sum(one.kills for one in self.applications)

    def describe(self) -> str:
        """Describe the state of all components. The description is printed if the storm fails or hangs."""
        lines = [f"{self._progress.head} of {self.total} events; {self.server_kills} kills of the server; {self.proxy}"]
        for one in self.applications:
            waiting = f"{len(one.accepted())} accepted, {len(one.outbox())} without an outcome"
            lines.append(f"{one.name}: {one.kills} kills, {waiting}, end of its log:\n{one.log()[-500:]}")
        return "\n".join(lines)

    async def run(self) -> None:
        """Run from the first event until all applications have exited."""
        async with self.proxy, asyncio.TaskGroup() as tasks:
            await self._submit_first()
            self._find_server()
            following = tasks.create_task(self._progress.follow(self._served))
            for one in self.applications:
                tasks.create_task(one.live(self.proxy.url, self._deaths()))
            for moment, kill in self._schedule:
                await self._progress.reaches(moment)
                await kill()
            self._let_all_start()
            await self._progress.reaches(self.total)
            await self._await_incidents()
            self.proxy.calm()
            await self._end()
            following.cancel()

    async def _submit_first(self) -> None:
        """Submit an event, so that a submission that expects an empty log is stale."""
        async with connect_directly(self._served.url) as client:
            await client.submit({"id": str(UUID(int=1)), "partitions": ALL, "event": {"type": "first"}})

    def _find_server(self) -> None:
        self.proxy.target = ("127.0.0.1", self._served.port)
        self._progress.is_up.set()

    def _deaths(self) -> Iterator[PlannedKill]:
        """Choose which of the first processes of an application kill themselves in a transaction."""
        for _ in range(6):
            is_planned = self._chance.random() < 0.3
            after, before = self._chance.randint(1, self.total // 8), self._chance.choice(DEATHS)
            yield PlannedKill(after, before) if is_planned else SURVIVES
        while True:
            yield SURVIVES

    async def _kill_server(self) -> None:
        """Kill the server and restart it after a client has tried to connect."""
        self._progress.is_up.clear()
        await asyncio.to_thread(self._served.kill)
        self.server_kills += 1
        if self._chance.random() < 0.2:
            await self._kill_client()  # while the server is down
        unreachable = self.proxy.done[Incident.UNREACHABLE]
        await until(lambda: self.proxy.done[Incident.UNREACHABLE] > unreachable)
        await asyncio.to_thread(self._served.start)
        self._find_server()

    async def _kill_client(self) -> None:
        """Kill a client. It restarts immediately, or when the next client is killed."""
        self._let_all_start()
        is_away = self._chance.random() < 0.3
        order = self._chance.sample(self.applications, len(self.applications))
        await until(lambda: any(one.is_alive for one in order))
        victim = next(one for one in order if one.is_alive)
        if is_away:
            victim.may_start.clear()
        await victim.kill()

    async def _await_incidents(self) -> None:
        """Make clients reconnect until every kind of incident has happened."""
        while any(not self.proxy.done[one] for one in Incident):
            connections = self.proxy.accepted_count
            await self._kill_client()
            self._let_all_start()
            await until(lambda before=connections: self.proxy.accepted_count > before)  # type: ignore[misc]

    def _let_all_start(self) -> None:
        for one in self.applications:
            one.may_start.set()

    async def _end(self) -> None:
        """Wait until all clients have settled, and send each the position of its last event."""
        for one in self.applications:
            await one.settled.wait()
        log = await asyncio.to_thread(read_log, self._served.store)
        for one in self.applications:
            one.finish_at(select_partitions(log, one.partitions)[-1].committed_id)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[processes.ServerProcess]:
    with processes.serving(tmp_path) as found:
        yield found


@pytest.mark.rule("EV-14", "EV-15", "EV-17", "CO-13")
async def test_every_client_in_a_storm_receives_each_event_once(
    tmp_path: Path, served: processes.ServerProcess, seed: int, is_soak: bool
) -> None:
    began = time.perf_counter()
    size = get_size(is_soak=is_soak)
    storm = Storm(tmp_path, served, seed, size, SOAK_FAULTS if is_soak else FAULTS)
    try:
        await storm.run()
    except BaseException:
        say(storm.describe())
        raise
    assert served.stop() == 0
    happened = storm.proxy.done
    say(f"{storm.total} events, {storm.server_kills} kills of the server, {storm.client_kills} of clients")
    say(f"{storm.proxy.accepted_count} connections: {', '.join(f'{n} {one}' for one, n in sorted(happened.items()))}")
    say(f"{time.perf_counter() - began:.1f} s")

    log = await asyncio.to_thread(read_log, served.store)
    assert [row.committed_id for row in log] == list(range(1, storm.total + 1))
    assert len({row.id for row in log}) == storm.total
    sequences: dict[tuple[str, ...], list[list[tuple[int, str]]]] = defaultdict(list)
    for one in storm.applications:
        check_outcomes(one, storm.plans[one.name], log)
        check_received(one, log, storm.shared)
        sequences[tuple(one.partitions)].append([(row.committed_id, row.id) for row in one.given()])
    assert all(sequence == same[0] for same in sequences.values() for sequence in same)
    verified = processes.oncelog("verify", served.store)
    assert verified.returncode == 0, verified.stdout

    assert storm.server_kills == size.server_kills
    assert storm.client_kills >= size.client_kills
    assert [one for one in Incident if not happened[one]] == []


@pytest.mark.rule("EV-17")
async def test_application_killed_during_delivery_receives_each_event_once(
    tmp_path: Path, served: processes.ServerProcess, seed: int, is_soak: bool
) -> None:
    chance = Random(seed)
    lives = get_size(is_soak=is_soak).lives
    ways = cycle([*DEATHS, None])
    """The application dies in a transaction before one of these statements, or from an external signal."""
    application = Application(tmp_path, "anna", seed, 0, ["all"])
    numbers = iter(range(1, 10**9))

    def event() -> dict[str, Any]:
        number = next(numbers)
        return {"id": str(UUID(int=number)), "partitions": ["all"], "event": {"type": "t", "number": number}}

    async with connect_directly(served.url) as client:
        for before in islice(ways, lives):
            await client.submit(*[event() for _ in range(WAITING)])
            moment = chance.randint(1, 2 * WAITING - 5)
            if before is None:
                running = asyncio.create_task(application.live_once(served.url, kill_after=moment))
            else:
                running = asyncio.create_task(application.live_once(served.url, PlannedKill(moment, before)))
            await application.begun.wait()
            for _ in range(WAITING):
                await client.submit(event())
            assert not await running
    log = await asyncio.to_thread(read_log, served.store)
    last = asyncio.create_task(application.live_once(served.url))
    await application.settled.wait()
    application.finish_at(log[-1].committed_id)
    assert await last

    assert application.kills == lives
    assert len(log) == 2 * WAITING * lives
    check_received(application, log)
