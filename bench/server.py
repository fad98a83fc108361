"""The server over its WebSocket: single events compared with NATS and PostgreSQL, idle connections, batches,
subscribers, catching up.

`make peers` installs the peers. bench/README.md lists the differences between them.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import uvloop

import oncelog
from bench.disk import directory
from bench.measure import Effort
from bench.peer_nats import Nats, nats_server
from bench.peer_postgres import Postgres, postgres_server
from bench.processes import allow_files, process
from bench.report import Report
from bench.server_report import CROWDED, Attribution, Figures, Series, report_of
from bench.turns import SliceOf, in_turn, print_progress
from bench.wire import EVENTS, PARTITIONS, Slice, Watch, uuids
from bench.writers import FILL_ITEMS, fill
from bench.ws_fan_out import fan_out
from bench.ws_idle import WRITTEN, check_slow_reader_is_closed, open_idle_connections
from bench.ws_load import Connection, Load, catch_up, check_once, connected, events_of
from oncelog import Committed, Log, Submission
from oncelog.server.latency_report import LatencyReport

UNLIMITED: Final = ("--set", "limits.requests_per_second_max=0", "--set", "limits.frames_per_second_max=0")
"""Rate limits are off, because one caller of the benchmark represents many."""
COMMAND: Final = [sys.executable, "-m", "oncelog", "serve", "--development", "--port", "0", "--store"]
"""Command that starts a server. The path of the store is appended."""
ADDRESS: Final = r"(?:https?|wss?)://([0-9.]+|localhost):([0-9]+)(?=[\s/\"])"
BATCH: Final = 100
PAGE: Final = 1000
AT_ONCE: Final = 50
"""Number of partitions in a sync, out of a hundred. The API accepts up to 64."""
READERS: Final = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads."""

    connections: int = 64
    in_flight: int = 16
    rounds: int = 6
    slice_s: float = 3
    paced_rounds: int = 5
    paced_s: float = 4
    callers: int = 16
    """Number of callers that submit batches."""
    writers: int = 16
    """Number of connections that write while others are idle. Each has `in_flight` requests."""
    crowd_rounds: int = 10
    crowd_s: float = 2
    idle: int = 1000
    outbox_frames_max: int = 10_000
    """Number of frames that a stuck reader may fall behind (the server's default)."""
    subscribers: int = 1000
    broadcasts: int = 400
    window: int = 100
    """Number of broadcasts in flight."""
    lone_broadcasts: int = 50
    stored: int = 200_000


QUICK_SIZES: Final = Sizes(
    connections=4,
    in_flight=4,
    rounds=1,
    slice_s=0.3,
    paced_rounds=1,
    paced_s=0.5,
    callers=2,
    writers=4,
    crowd_rounds=1,
    crowd_s=0.3,
    idle=50,
    outbox_frames_max=500,
    subscribers=50,
    broadcasts=20,
    window=5,
    lone_broadcasts=5,
    stored=4000,
)


@dataclass(frozen=True)
class Serving:
    """A running server."""

    host: str
    port: int
    pid: int


def run(effort: Effort) -> Report:
    """Run all five parts, each with separate servers."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    allow_files(2 * max(sizes.subscribers, sizes.idle) + 1000)
    figures = Figures(sizes.connections, sizes.in_flight)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_single_events(sizes, figures))
        runner.run(_idle(sizes, figures))
        runner.run(_batches(sizes, figures))
        _broadcasts(sizes, figures)
        runner.run(_catching_up(sizes, figures))
    return report_of(figures, judged=not effort.is_quick)


@contextmanager
def serving(place: Path, store: Path | str, *settings: str) -> Iterator[Serving]:
    """Run an Oncelog server on a file or a database."""
    chosen = [word for setting in settings for word in ("--set", setting)]
    output = place / f"{store.stem if isinstance(store, Path) else 'gateway'}.log"
    with process([*COMMAND, str(store), *UNLIMITED, *chosen], output, ADDRESS) as (pid, said):
        yield Serving(said[1], int(said[2]), pid)


# --- single events -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """An Oncelog server and connections to it, with the same interface as the peers."""

    server: Serving
    connections: list[Connection]
    in_flight: int
    name: str = field(default="Oncelog", init=False)

    async def load(self, seconds: float) -> Slice:
        return await Load(self.connections, 1).keep_busy(self.server.pid, self.in_flight, seconds)

    async def half_load(self, seconds: float) -> tuple[Slice, Slice]:
        """Measure full load and then, immediately afterwards, half load, because the machine's speed changes."""
        full = await self.load(seconds / 2)
        return full, await Load(self.connections, 1).pace(self.server.pid, full.per_s / 2, seconds)


@asynccontextmanager
async def _ours(place: Path, connections: int, in_flight: int) -> AsyncIterator[Ours]:
    with serving(place, place / "single.db") as server:
        async with connected(server.host, server.port, connections) as clients:
            await check_once(clients[0])
            yield Ours(server, clients, in_flight)


async def _single_events(sizes: Sizes, figures: Figures) -> None:
    with directory() as ours_place:
        async with _ours(ours_place, sizes.connections, sizes.in_flight) as ours:
            await _beside_peers(ours, sizes, figures)
            # The peers are stopped, because their background work would slow down Oncelog.
            print_progress("Oncelog at half of its load …")
            figures.half_load = [await ours.half_load(sizes.paced_s) for _ in range(sizes.paced_rounds)]
    print_progress("where the time goes at half load …")
    figures.attribution = await _attribution(sizes, median(half.per_s for _, half in figures.half_load))


async def _attribution(sizes: Sizes, per_s: float) -> Attribution:
    """Run half load on a new server that writes a latency report.

    The other servers do not, because the measurement itself takes time.
    """
    with directory() as place:
        report = place / "latency.json"
        with serving(place, place / "attribution.db", f"latency_report={report}") as server:
            async with connected(server.host, server.port, sizes.connections) as clients:
                measured = await Load(clients, 1).pace(server.pid, per_s, sizes.paced_rounds * sizes.paced_s)
        # The server has written the report when it stopped.
        return Attribution(measured, msgspec.json.decode(report.read_bytes(), type=LatencyReport).since_start)


async def _beside_peers(ours: Ours, sizes: Sizes, figures: Figures) -> None:
    with directory() as nats_place, directory() as postgres_place:
        async with (
            nats_server(nats_place, sizes.connections, sizes.in_flight) as nats,
            postgres_server(postgres_place, sizes.connections) as postgres,
        ):
            await nats.check_once()
            await postgres.check_once()
            print_progress("forms of the write on PostgreSQL …")
            figures.ways = await postgres.choose(sizes.slice_s)
            figures.way = postgres.choice
            contenders: tuple[Ours | Nats | Postgres, ...] = (ours, nats, postgres)
            loads = {contender.name: contender.load for contender in contenders}
            figures.single = await in_turn(loads, sizes.rounds, sizes.slice_s)
            await nats.check_all()
            await postgres.check_all()


# --- idle connections --------------------------------------------------------------------------------


async def _idle(sizes: Sizes, figures: Figures) -> None:
    """Run the same load on one server, with and without idle connections."""
    fallen_behind = f"limits.outbox_frames_max={sizes.outbox_frames_max}"
    with directory() as place, serving(place, place / "idle.db", fallen_behind) as server:
        async with connected(server.host, server.port, sizes.writers) as writers:

            async def without_idle_connections(seconds: float) -> Slice:
                return await Load(writers, 1, [WRITTEN]).keep_busy(server.pid, sizes.in_flight, seconds)

            async def with_idle_connections(seconds: float) -> Slice:
                async with open_idle_connections(server.host, server.port, sizes.idle) as stuck:
                    result = await without_idle_connections(seconds)
                    await check_slow_reader_is_closed(
                        server.host, server.port, server.pid, writers, stuck, result.events
                    )
                return result

            loads: dict[str, SliceOf] = {"alone": without_idle_connections, CROWDED: with_idle_connections}
            figures.idle, figures.writers = sizes.idle, sizes.writers
            series = await in_turn(loads, sizes.crowd_rounds, sizes.crowd_s)
            figures.crowd = {name: series[name] for name in (CROWDED, "alone")}


# --- batches -----------------------------------------------------------------------------------------


async def _batches(sizes: Sizes, figures: Figures) -> None:
    """Submit batches over the WebSocket and in this process, with the same number of callers."""
    with directory() as place, serving(place, place / "batches.db") as server:
        async with (
            connected(server.host, server.port, sizes.callers) as connections,
            oncelog.open(place / "in-process.db") as log,
            oncelog.open(place / "prepared.db") as other,
        ):

            async def over_the_wire(seconds: float) -> Slice:
                return await Load(connections, BATCH).keep_busy(server.pid, 1, seconds)

            loads: dict[str, SliceOf] = {
                "over the WebSocket": over_the_wire,
                "in process": partial(_in_process, log, sizes.callers, _made()),
                "in process, prepared beforehand": partial(_prepared, other, sizes.callers),
            }
            figures.batches = await in_turn(loads, sizes.rounds, sizes.slice_s)


def _made() -> Iterator[Submission]:
    """Yield submissions that are built from dicts, as an application builds them."""
    return map(oncelog.event, uuids(), itertools.cycle(EVENTS), ([one] for one in itertools.cycle(PARTITIONS)))


async def _prepared(log: Log, callers: int, seconds: float) -> Slice:
    """Before the measurement, build enough submissions for a fast machine."""
    ready = list(itertools.islice(_made(), round(40_000 * seconds) // BATCH * BATCH))
    return await _in_process(log, callers, iter(ready), seconds)


async def _in_process(log: Log, callers: int, submissions: Iterator[Submission], seconds: float) -> Slice:
    """Submit until the time is up or the submissions run out."""
    waited: list[float] = []
    watch = Watch(None)
    until = watch.began + seconds

    async def caller() -> None:
        while (began := time.perf_counter()) < until and (batch := list(itertools.islice(submissions, BATCH))):
            for verdict in await log.submit_many(batch):
                if type(verdict) is not Committed:
                    raise ValueError(f"a new event was answered with {verdict}")
            waited.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
    return watch.slice(BATCH * len(waited), waited)


# --- subscribers -------------------------------------------------------------------------------------


def _broadcasts(sizes: Sizes, figures: Figures) -> None:
    with directory() as place, serving(place, place / "broadcasts.db") as server:
        print_progress(f"{sizes.subscribers} subscribers connect …")
        with fan_out(server.host, server.port, server.pid, sizes.subscribers) as subscribers:
            slices = []
            for number in range(sizes.rounds + 1):
                print_progress(f"broadcasts, {f'round {number} of {sizes.rounds}' if number else 'warm-up'} …")
                slices.append(subscribers.run(sizes.broadcasts if number else sizes.window, sizes.window))
            figures.subscribers, figures.window = sizes.subscribers, sizes.window
            figures.broadcasts = Series(slices[1:])
            figures.lone_broadcasts = Series([subscribers.run(sizes.lone_broadcasts, 1)])
            subscribers.check_all()


# --- catching up -------------------------------------------------------------------------------------


async def _catching_up(sizes: Sizes, figures: Figures) -> None:
    """Read two logs: one with all events in one partition, and one with the same number of events in a hundred
    partitions.
    """
    one, hundred = PARTITIONS[:1], PARTITIONS
    shapes: tuple[tuple[str, Sequence[str], dict[str, tuple[int, list[Sequence[str]]]]], ...] = (
        ("one.db", one, {"one partition": (1, [one]), f"one partition, {READERS} readers": (READERS, [one])}),
        (
            "hundred.db",
            hundred,
            {
                "100 partitions, one after the other": (1, [[name] for name in hundred]),
                f"100 partitions, {AT_ONCE} per sync": (1, [hundred[:AT_ONCE], hundred[AT_ONCE:]]),
            },
        ),
    )
    for file, partitions, ways in shapes:
        with directory() as place:
            print_progress(f"storing {sizes.stored} events, {len(partitions)} partitions …")
            await _store(place / file, partitions, sizes.stored)
            with serving(place, place / file) as server:
                async with connected(server.host, server.port, READERS) as connections:
                    loads: dict[str, SliceOf] = {}
                    for name, (readers, cycles) in ways.items():
                        await _check_all(connections[0], cycles, sizes.stored)
                        loads[name] = partial(_pages, server, connections[:readers], cycles, sizes.stored)
                    figures.catching_up |= await in_turn(loads, sizes.rounds, sizes.slice_s)


async def _store(path: Path, partitions: Sequence[str], count: int) -> None:
    chance = random.Random(1)
    async with oncelog.open(path) as log:
        for start in range(0, count, FILL_ITEMS):
            size = min(FILL_ITEMS, count - start)
            names = [[partitions[number % len(partitions)]] for number in range(start, start + size)]
            await fill(log, list(map(oncelog.event, uuids(), chance.choices(EVENTS, k=size), names)))


async def _pages(
    server: Serving, connections: Sequence[Connection], cycles: list[Sequence[str]], stored: int, _seconds: float
) -> Slice:
    """Read everything over each connection, page by page."""
    watch = Watch(server.pid)
    waited: list[float] = []

    async def reader(connection: Connection) -> int:
        events, began = 0, time.perf_counter()
        for partitions in cycles:
            async for page in catch_up(connection, partitions, PAGE):
                events += events_of(page)
                now = time.perf_counter()
                waited.append(now - began)
                began = now
        return events

    counts = await asyncio.gather(*map(reader, connections))
    result = watch.slice(sum(counts), waited)
    if counts != [stored] * len(connections):
        raise ValueError(f"of {stored} events, readers received {counts}")
    return result


async def _check_all(connection: Connection, cycles: list[Sequence[str]], stored: int) -> None:
    """Raise ValueError unless a reader gets every event once, complete, and in ascending order in each cycle."""
    seen: set[str] = set()
    for partitions in cycles:
        last = 0
        async for page in catch_up(connection, partitions, PAGE):
            answer: dict[str, Any] = msgspec.json.decode(page)
            for event in answer["payload"]["events"]:
                if (
                    event["committed_id"] <= last
                    or event["event"] not in EVENTS
                    or not set(event["partitions"]) <= set(partitions)
                ):
                    raise ValueError(f"wrong event after {last}: {event}")
                last = event["committed_id"]
                seen.add(event["id"])
    if len(seen) != stored:
        raise ValueError(f"of {stored} events, a reader received {len(seen)}")
