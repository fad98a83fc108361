"""The Deltas API: pushes of a hundred deltas over HTTP, new and known, on a small log and on one with a million."""

import asyncio
import itertools
import random
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import uvloop

import oncelog
from bench.disk import directory
from bench.http_caller import Caller, keep_calling
from bench.measure import Effort
from bench.report import Finding, Report, findings_table
from bench.server import Serving, serving
from bench.server_report import Series, table
from bench.turns import print_progress
from bench.wire import Slice
from oncelog.core.deltas import build_submission, decode_push, deltas_scope, to_row_delta

GATEWAY: Final = "shop"
CLIENT: Final = "till-1"
BATCH: Final = 100
ROWS: Final = 100_000
CALLERS: Final = 8
FILL: Final = 1000
NEW_PER_S: Final = 15_000
KNOWN_PER_S: Final = 90_000
GROWTH_RATIO: Final = 0.8
WARM_UP: Final = 0.3
"""Length of the warm-up before each measurement, as a fraction of a slice. A newly started server is slower."""
PREPARED_PER_S: Final = 40_000
"""Deltas built before a slice, per second of the slice. The slice ends early if they run out."""

HOW_TO_READ: Final = """\
A server and its client, one process with one thread, share this machine. A push has {batch} deltas of about 300 bytes,
each with three columns of one of {rows} rows, chosen at random. {callers} callers send pushes that were built and
hashed before the measurement, and each waits for its answer, which arrives when the push is synced to the disk.
`per second` counts deltas.

The contenders run one after the other in every round, each for a slice of time: a fresh copy of a log with {small}
deltas, and a log with {large} deltas and more. `known` repeats pushes that were committed directly before, in the same
batches, on one server, after the other contenders. `per second` is the best round and `median` the median round.

The targets per second depend on the machine, so they are only shown. A missed ratio fails a run."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads."""

    rounds: int = 6
    slice_s: float = 2
    small: int = 10_000
    large: int = 1_000_000


QUICK_SIZES: Final = Sizes(rounds=1, slice_s=0.3, small=1000, large=3000)


def run(effort: Effort) -> Report:
    """Measure new deltas on both logs in turn, then known ones."""
    sizes = QUICK_SIZES if effort.is_quick else Sizes()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        series = runner.run(_measured(sizes))
    small, large, known = _names(sizes)
    best, _ = series[large].ratios(series[small])
    again = series[known].best
    findings = [
        Finding(
            "new deltas over HTTP", series[small].best, " per second", f"≥ {NEW_PER_S}", series[small].best >= NEW_PER_S
        ),
        Finding(
            f"with {sizes.large} stored / with {sizes.small}",
            best,
            "×",
            f"≥ {GROWTH_RATIO}×",
            best >= GROWTH_RATIO,
            fails_run=True,
        ),
        Finding("known deltas over HTTP", again, " per second", f"≥ {KNOWN_PER_S}", again >= KNOWN_PER_S),
    ]
    judged = not effort.is_quick
    is_met = not judged or all(one.is_met for one in findings if one.fails_run)
    how_to_read = HOW_TO_READ.format(batch=BATCH, rows=ROWS, callers=CALLERS, small=sizes.small, large=sizes.large)
    tables = (table("deltas in pushes of 100", series, compared=False), findings_table(findings, judged=judged))
    return Report(tables, how_to_read, is_met)


def _names(sizes: Sizes) -> tuple[str, str, str]:
    return f"{sizes.small} stored", f"{sizes.large} stored", "known"


# --- deltas as a client sends them ---------------------------------------------------------------------


def pushes(count: int, chance: random.Random, numbers: Iterator[int]) -> Iterator[bytes]:
    """Yield push bodies with `count` deltas each, in canonical form, as the client library sends them."""
    for _ in range(0, count, BATCH):
        wall_ms = time.time_ns() // 1_000_000
        deltas = ",".join([_delta(wall_ms, next(numbers), chance.randrange(ROWS)) for _ in range(BATCH)])
        yield f'{{"deltas":[{deltas}]}}'.encode()


def _delta(wall_ms: int, number: int, row: int) -> str:
    hlc = wall_ms << 16 | number % 65_536
    before = f'{{"clientId":"{CLIENT}","columns":[{{"column":"name","value":"Product {number}"}},'
    before += f'{{"column":"price","value":{number % 100}.5}},{{"column":"stock","value":{number % 1000}}}]'
    behind = f'"rowId":"row-{row}","table":"products"}}'
    delta_id = sha256(f'{before},"hlc":"{hlc}",{behind}'.encode()).hexdigest()
    return f'{before},"deltaId":"{delta_id}","hlc":"{hlc}","op":"UPDATE",{behind}'


class Pusher(Caller):
    """A caller that takes its pushes from a shared queue."""

    path = f"/v1/sync/{GATEWAY}/push"

    def __init__(self, bodies: deque[bytes]) -> None:
        super().__init__()
        self._bodies = bodies

    def body(self) -> bytes | None:
        return self._bodies.popleft() if self._bodies else None


@asynccontextmanager
async def pushers(server: Serving, bodies: deque[bytes], wanted: bytes) -> AsyncIterator[list[Caller]]:
    """Yield the connected callers."""
    loop = asyncio.get_running_loop()
    made: list[Caller] = []
    try:
        for _ in range(CALLERS):
            _, pusher = await loop.create_connection(lambda: Pusher(bodies), server.host, server.port)
            pusher.wanted = wanted
            made.append(pusher)
        yield made
    finally:
        for caller in made:
            caller.close()


async def _push(server: Serving, bodies: list[bytes], seconds: float, wanted: bytes) -> Slice:
    waiting = deque(bodies)
    async with pushers(server, waiting, wanted) as callers:
        return await keep_calling(callers, server.pid, seconds, BATCH)


# --- the parts -------------------------------------------------------------------------------------------


async def _measured(sizes: Sizes) -> dict[str, Series]:
    chance, numbers = random.Random(7), itertools.count(1)
    small, large, known = _names(sizes)
    slices: dict[str, list[Slice]] = {small: [], large: [], known: []}

    def some(seconds: float) -> list[bytes]:
        return list(pushes(round(PREPARED_PER_S * seconds), chance, numbers))

    async def new(server: Serving) -> Slice:
        await _push(server, some(sizes.slice_s), WARM_UP * sizes.slice_s, _all_are("committed"))
        return await _push(server, some(sizes.slice_s), sizes.slice_s, _all_are("committed"))

    with directory() as place:
        await _fill(place / "small.db", sizes.small, chance, numbers)
        await _fill(place / "large.db", sizes.large, chance, numbers)
        with serving(place, place / "large.db") as filled:
            for number in range(sizes.rounds):
                print_progress(f"round {number + 1} of {sizes.rounds} …")
                shutil.copy(place / "small.db", place / f"copy-{number}.db")
                with serving(place, place / f"copy-{number}.db") as fresh:
                    slices[small].append(await new(fresh))
                slices[large].append(await new(filled))
        with serving(place, place / "known.db") as server:
            for number in range(sizes.rounds):
                print_progress(f"known deltas, round {number + 1} of {sizes.rounds} …")
                slices[known].append(await _again(server, list(pushes(20_000, chance, numbers)), sizes.slice_s))
    return {name: Series(ones) for name, ones in slices.items()}


async def _again(server: Serving, bodies: list[bytes], seconds: float) -> Slice:
    await _push(server, bodies, 60, _all_are("committed"))
    rounds = max(1, round(PREPARED_PER_S * 5 * seconds / BATCH / len(bodies)))
    return await _push(server, bodies * rounds, seconds, _all_are("duplicates"))


def _all_are(what: str) -> bytes:
    return b'"%b":%d,' % (what.encode(), BATCH)


async def _fill(path: Path, count: int, chance: random.Random, numbers: Iterator[int]) -> None:
    print_progress(f"storing {count} deltas …")
    scope = deltas_scope(GATEWAY)
    async with oncelog.open(path) as log:
        for _ in range(0, count, FILL):
            items = []
            for body in pushes(FILL, chance, numbers):
                pushed = decode_push(body)
                for one, key, kept in zip(pushed.deltas, pushed.keys, pushed.bodies, strict=True):
                    items.append(build_submission(scope, to_row_delta(one, key, ""), kept, actor="user:developer"))
            await log.submit_many(items, oncelog.Mode.ALL)
