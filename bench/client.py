"""The client library against a real server: submissions with the outbox on, and catching up into a local store.

The baseline for submissions is the load generator of `ws_load`, which stores nothing, decodes very little and has many
requests in flight.
"""

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

import oncelog
from bench.disk import directory
from bench.measure import Effort
from bench.report import Finding, Report, Table, findings_table
from bench.server import PAGE, Serving, serving
from bench.server_report import Series
from bench.turns import SliceOf, in_turn, print_progress
from bench.wire import EVENTS, PARTITIONS, Slice, Watch, uuids
from bench.writers import FILL_ITEMS, fill
from bench.ws_load import Load, catch_up, connected, events_of
from oncelog.client import Client, Committed, Event

SHARE_MIN: Final = 0.7
CATCH_UP_PER_S_MIN: Final = 50_000
HOW_TO_READ: Final = """\
`share` is the best rate of the client divided by the best rate of the faster load generator. All contenders run in turn
on one server in one run. Only shares can be compared between machines."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads."""

    rounds: int = 6
    slice_s: float = 3
    submitters: int = 1000
    """Number of tasks that submit events one after the other and wait for each outcome."""
    connections: int = 64
    in_flight: int = 16
    batch: int = 100
    stored: int = 1_000_000


QUICK_SIZES: Final = Sizes(rounds=1, slice_s=0.3, submitters=20, connections=4, in_flight=4, batch=10, stored=3000)


def run(effort: Effort) -> Report:
    """Run both parts, each with a separate server."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        series = runner.run(_submissions(sizes))
        pages, handed_over = runner.run(_catching_up(sizes))
    return _report(series, pages, handed_over, judged=not effort.is_quick)


# --- submissions -------------------------------------------------------------------------------------


async def _submissions(sizes: Sizes) -> dict[str, Series]:
    with directory() as place, serving(place, place / "submissions.db") as server:
        url = f"http://{server.host}:{server.port}"
        async with (
            Client(url, path=place / "client.db", partitions=["without-writes"]) as client,
            connected(server.host, server.port, sizes.connections) as connections,
        ):
            await client.until_live()

            async def single(seconds: float) -> Slice:
                return await Load(connections, 1).keep_busy(server.pid, sizes.in_flight, seconds)

            async def batches(seconds: float) -> Slice:
                return await Load(connections[:1], sizes.batch).keep_busy(server.pid, 4, seconds)

            loads: dict[str, SliceOf] = {
                "the client, outbox on": partial(_by_the_client, client, server, sizes.submitters),
                f"load generator, single events on {sizes.connections} connections": single,
                f"load generator, batches of {sizes.batch} on one connection": batches,
            }
            return await in_turn(loads, sizes.rounds, sizes.slice_s)


async def _by_the_client(client: Client, server: Serving, submitters: int, seconds: float) -> Slice:
    """Submit events as dicts, as an application does. An event is counted when its outcome has been stored."""
    waiting = zip(uuids(), itertools.cycle(EVENTS), itertools.cycle([[name] for name in PARTITIONS]), strict=False)
    waited: list[float] = []
    watch = Watch(server.pid)
    until = watch.began + seconds

    async def submitter() -> None:
        began = time.perf_counter()
        while began < until:
            id_text, event, partitions = next(waiting)
            pending = await client.submit(event, partitions, id=id_text)
            outcome = await pending.outcome()
            if type(outcome) is not Committed:
                raise ValueError(f"a new event was answered with {outcome}")
            now = time.perf_counter()
            waited.append(now - began)
            began = now

    async with asyncio.TaskGroup() as tasks:
        for _ in range(submitters):
            tasks.create_task(submitter())
    return watch.slice(len(waited), waited)


# --- catching up -------------------------------------------------------------------------------------


async def _catching_up(sizes: Sizes) -> tuple[Slice, Slice]:
    """Read the pages alone, then catch up with an empty client that fills an application table."""
    with directory() as place:
        print_progress(f"storing {sizes.stored} events …")
        async with oncelog.open(place / "stored.db") as log:
            for start in range(0, sizes.stored, FILL_ITEMS):
                size = min(FILL_ITEMS, sizes.stored - start)
                events = itertools.islice(itertools.cycle(EVENTS), size)
                await fill(
                    log, [oncelog.event(one, event, ["all"]) for one, event in zip(uuids(), events, strict=False)]
                )
        with serving(place, place / "stored.db") as server:
            print_progress("pages without a client …")
            pages = await _pages(server)
            print_progress("the client catches up …")
            handed_over = await _caught_up(server, place / "application.db", sizes.stored)
    return pages, handed_over


async def _pages(server: Serving) -> Slice:
    async with connected(server.host, server.port, 1) as connections:
        watch = Watch(server.pid)
        count = 0
        async for page in catch_up(connections[0], ["all"], PAGE):
            count += events_of(page)
        return watch.slice(count, [])


async def _caught_up(server: Serving, path: Path, stored: int) -> Slice:
    def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS tasks (number INTEGER PRIMARY KEY, id TEXT, type TEXT, title TEXT)"
        )
        rows = [(one.committed_id, one.id, one.type, (one.event or {})["payload"]["title"]) for one in events]
        connection.executemany("INSERT INTO tasks VALUES (?, ?, ?, ?)", rows)

    watch = Watch(server.pid)
    async with Client(f"http://{server.host}:{server.port}", path=path, partitions=["all"], apply=apply) as client:
        await client.until_live()
        result = watch.slice(stored, [])
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT id), max(number) FROM tasks").fetchone()
    connection.close()
    if found != (stored, stored, stored):
        raise ValueError(f"of {stored} events, the application has {found}")
    return result


# --- the report --------------------------------------------------------------------------------------


def _report(series: dict[str, Series], pages: Slice, handed_over: Slice, *, judged: bool) -> Report:
    ours, *generators = series.values()
    fastest = max(generators, key=lambda one: one.best)
    share, median_share = ours.ratios(fastest)
    rows = [
        (
            name,
            f"{one.best:.0f}",
            f"{one.median:.0f}",
            f"{one.slices[-1].client_cpu:.2f}",
            f"{one.slices[-1].server_cpu:.2f}",
        )
        for name, one in series.items()
    ]
    rows += [
        (name, f"{one.per_s:.0f}", "", f"{one.client_cpu:.2f}", f"{one.server_cpu:.2f}")
        for name, one in (("pages, without a client", pages), ("the client catches up", handed_over))
    ]
    found = [
        Finding("share", share, "×", f"≥ {SHARE_MIN}×", share >= SHARE_MIN, fails_run=True),
        Finding("share, median of rounds", median_share, "×", "", is_met=True),
        Finding(
            "catching up into a local store, events/s",
            handed_over.per_s,
            "",
            f"≥ {CATCH_UP_PER_S_MIN}",
            handed_over.per_s >= CATCH_UP_PER_S_MIN,
        ),
    ]
    is_met = not judged or all(one.is_met for one in found if one.fails_run)
    table = Table(("name", "per second", "median", "client CPU", "server CPU"), rows)
    return Report([table, findings_table(found, judged=judged)], HOW_TO_READ, is_met)
