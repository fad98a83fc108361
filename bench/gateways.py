"""A log on PostgreSQL: single events compared with hand-written SQL, several processes, and a growing log."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import asyncpg
import uvloop

import oncelog
from bench.disk import directory
from bench.growth import PARTS, SLICES, WINDOW_EVENTS, Speed, speed_of
from bench.measure import Effort
from bench.peer_postgres import Postgres, open_hand_written_log
from bench.processes import server_cpu_s
from bench.report import Finding, Report, Table, findings_table
from bench.server import Ours, serving
from bench.server_report import Series, table
from bench.turns import in_turn, print_progress
from bench.wire import Slice, Watch
from bench.writers import FILL_ITEMS, SUBMITTERS, fill, prepared, submit_all_timed
from bench.ws_load import check_once, connected
from oncelog import Log
from oncelog.core.identity import compute_lane
from oncelog.testing.postgres import DURABLE_SETTINGS, PostgresServer, create_schema, postgres_server

GATEWAYS: Final = 4
CALLERS: Final = 256
"""Callers per process."""
SERVER: Final = {**DURABLE_SETTINGS, "shared_buffers": "512MB", "max_wal_size": "4GB"}
"""Replaces defaults of PostgreSQL that are meant for very small machines. Other settings keep their defaults."""
BARE: Final = """\
CREATE TABLE bare (position bigint PRIMARY KEY, key bytea NOT NULL, body bytea NOT NULL)"""
BARE_INSERT: Final = "INSERT INTO bare SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[])"

HOW_TO_READ: Final = """\
One PostgreSQL over a local socket, with fsync, full page writes and synchronous commit on, shares this machine with the
Oncelog processes and their clients. All contenders of a table run one after the other in every round, each for a slice
of time. `per second` is the best round and `median` the median round. `ratio` is the best round of Oncelog divided by
that of the other contender.

Single events: a request is one event of about 300 bytes with a random UUID. One server has {connections} WebSockets
with {in_flight} requests in flight on each. By hand: {connections} callers with a connection each, in the fastest
hand-written form (bench/peer_postgres.py). It detects a duplicate by its id alone, and has no index by partition, no
proofs and no notification of readers. The server CPU of Oncelog does not include PostgreSQL.

Processes: one or {gateways} processes use the library without a server, and submit to streams of different lanes. Each
has {callers} callers, and each caller waits for its answer. The table has the CPU of the processes and of PostgreSQL.

Growth: as in growth.md, on this server. `bare` appends the same number of rows to a separate table with one index in
ascending order, in transactions of {submitters} rows, in slices between those of the log. `normalised` divides the
change of the log by the change of `bare`."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads."""

    connections: int = 64
    in_flight: int = 16
    rounds: int = 6
    slice_s: float = 3
    ways_s: float = 2


QUICK_SIZES: Final = Sizes(connections=4, in_flight=4, rounds=1, slice_s=0.3, ways_s=0.2)


def run(effort: Effort) -> Report:
    """Run all three parts, each with a separate database."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with _database() as server:
            single, way = runner.run(_single_events(server, sizes))
        with _database() as server:
            several = runner.run(_several(server, sizes))
        with _database() as server:
            windows = runner.run(_Growth(server, effort.records).run())
    findings = list(_findings(single, several, windows))
    tables = (
        table(f"single events (by hand: {way})", single),
        Table(
            ("processes on different lanes", "per second", "median", "CPU of processes", "CPU of PostgreSQL"),
            [_gateway_cells(name, series) for name, series in several.items()],
        ),
        Table(
            ("stored", "events/s", "p50 ms", "p99 ms", "bare events/s"), [_window_cells(window) for window in windows]
        ),
        findings_table(findings, judged=not effort.is_quick),
    )
    how_to_read = HOW_TO_READ.format(
        connections=sizes.connections,
        in_flight=sizes.in_flight,
        callers=CALLERS,
        gateways=GATEWAYS,
        submitters=SUBMITTERS,
    )
    is_met = effort.is_quick or all(one.is_met for one in findings if one.fails_run)
    return Report(tables, how_to_read, is_met)


@contextmanager
def _database() -> Iterator[PostgresServer]:
    with directory() as place, postgres_server(place, SERVER) as server:
        yield server


# --- single events -----------------------------------------------------------------------------------


async def _single_events(server: PostgresServer, sizes: Sizes) -> tuple[dict[str, Series], str]:
    with directory() as place, serving(place, await create_schema(server.socket_address or server.address)) as gateway:
        async with (
            connected(gateway.host, gateway.port, sizes.connections) as clients,
            open_hand_written_log(server, sizes.connections) as postgres,
        ):
            await check_once(clients[0])
            await postgres.check_once()
            print_progress("hand-written forms …")
            await postgres.choose(sizes.ways_s)
            contenders: tuple[Ours | Postgres, ...] = (Ours(gateway, clients, sizes.in_flight), postgres)
            loads = {contender.name: contender.load for contender in contenders}
            series = await in_turn(loads, sizes.rounds, sizes.slice_s)
            await postgres.check_all()
            return series, postgres.choice


# --- several processes -------------------------------------------------------------------------------


class _Gateway:
    """A process that submits to one stream."""

    def __init__(self, address: str, stream: str, callers: int) -> None:
        command = [sys.executable, "-m", "bench.gateway_worker", address, stream, str(callers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def __enter__(self) -> "_Gateway":
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def begin(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def end(self) -> int:
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process has ended early")
        return line


async def _several(server: PostgresServer, sizes: Sizes) -> dict[str, Series]:
    address = await create_schema(server.socket_address or server.address)
    async with oncelog.open(address) as log:
        streams = _streams_of_different_lanes(log.settings.lanes)
    with ExitStack() as stack:
        alone = [stack.enter_context(_Gateway(address, "alone", CALLERS))]
        four = [stack.enter_context(_Gateway(address, stream, CALLERS)) for stream in streams]

        async def busy(gateways: Sequence[_Gateway], seconds: float) -> Slice:
            watch = Watch(server.process.pid)
            before_s = sum(server_cpu_s(gateway.pid) for gateway in gateways)
            for gateway in gateways:
                gateway.begin(seconds)
            counts = [await asyncio.to_thread(gateway.end) for gateway in gateways]
            seen = watch.slice(sum(counts), [seconds])
            cpu_s = sum(server_cpu_s(gateway.pid) for gateway in gateways) - before_s
            return replace(seen, client_cpu=cpu_s / seen.seconds)

        loads = {
            f"{GATEWAYS} processes": lambda seconds: busy(four, seconds),
            "one process": lambda seconds: busy(alone, seconds),
        }
        return await in_turn(loads, sizes.rounds, sizes.slice_s)


def _streams_of_different_lanes(lanes: int) -> list[str]:
    found: dict[int, str] = {}
    for number in range(1000):
        found.setdefault(compute_lane(f"stream {number}", lanes), f"stream {number}")
    return list(found.values())[:GATEWAYS]


# --- growth ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Figures of one window."""

    stored: int
    ours: Speed
    bare: float


class _Growth:
    """One log, and the bare table."""

    def __init__(self, server: PostgresServer, records: int) -> None:
        self._server = server
        self._records = records
        self._chance = random.Random(1)
        self._slice_events = max(1, min(WINDOW_EVENTS, records // 10) // SLICES)
        self._stored = self._bare_position = 0

    async def run(self) -> list[Window]:
        windows = []
        async with (
            oncelog.open(await create_schema(self._server.socket_address or self._server.address)) as log,
            _session(self._server.socket_address or self._server.address) as bare,
        ):
            await bare.execute(BARE)
            for part in PARTS:
                await self._fill(log, round(self._records * part))
                windows.append(await self._window(log, bare))
        return windows

    async def _fill(self, log: Log, upto: int) -> None:
        while self._stored < upto:
            step = min(100 * FILL_ITEMS, upto - self._stored)
            print_progress(f"{self._stored} stored …")
            await fill(log, prepared(step, self._chance))
            self._stored += step

    async def _window(self, log: Log, bare: Any) -> Window:
        stored = self._stored
        print_progress(f"commits with {stored} stored …")
        ours_s = bare_s = 0.0
        waited: list[float] = []
        for _ in range(SLICES):
            submissions = prepared(self._slice_events, self._chance)
            began = time.perf_counter()
            waited += await submit_all_timed(log, submissions)
            ours_s += time.perf_counter() - began
            bare_s += await self._append(bare, submissions)
        self._stored += len(waited)
        return Window(stored, speed_of(len(waited) / ours_s, waited), len(waited) / bare_s)

    async def _append(self, bare: Any, submissions: Sequence[oncelog.Submission]) -> float:
        began = time.perf_counter()
        for start in range(0, len(submissions), SUBMITTERS):
            rows = submissions[start : start + SUBMITTERS]
            positions = list(range(self._bare_position, self._bare_position + len(rows)))
            self._bare_position += len(rows)
            await bare.execute(BARE_INSERT, positions, [row.key for row in rows], [row.body for row in rows])
        return time.perf_counter() - began


@asynccontextmanager
async def _session(address: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(address)
    try:
        yield connection
    finally:
        await connection.close()


def _gateway_cells(name: str, series: Series) -> tuple[str, ...]:
    cpu = fmean(one.client_cpu for one in series.slices), fmean(one.server_cpu for one in series.slices)
    return (name, f"{series.best:.0f}", f"{series.median:.0f}", *(f"{one:.2f}" for one in cpu))


def _window_cells(window: Window) -> tuple[str, ...]:
    ours = window.ours
    return (
        str(window.stored),
        f"{ours.events_per_s:.0f}",
        f"{ours.p50_ms:.2f}",
        f"{ours.p99_ms:.2f}",
        f"{window.bare:.0f}",
    )


def _findings(single: dict[str, Series], several: dict[str, Series], windows: Sequence[Window]) -> Iterator[Finding]:
    ours, theirs = single.values()
    ratio, _ = ours.ratios(theirs)
    yield Finding("single events, one server / by hand", ratio, "×", "≥ 6×", ratio >= 6, fails_run=True)
    four, one = several.values()
    ratio, _ = four.ratios(one)
    yield Finding(f"{GATEWAYS} processes / one, on different lanes", ratio, "×", "> 1×", ratio > 1, fails_run=True)
    first, last = windows[0], windows[-1]
    change = last.ours.events_per_s / first.ours.events_per_s
    normalised = change / (last.bare / first.bare)
    between = f"{last.stored} / {first.stored}"
    yield Finding(f"events/s, {between}, normalised", normalised, "×", "≥ 0.8×", normalised >= 0.8, fails_run=True)
    yield Finding(f"events/s, {between}, raw", change, "×", "≥ 0.8×", change >= 0.8)
