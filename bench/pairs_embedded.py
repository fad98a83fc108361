"""Run one sample of an embedded load and print the CPU time per event in microseconds.

`bench.pairs` runs this module with different source trees on the path. It therefore uses only APIs that older trees
have.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop

import oncelog
from bench.disk import directory
from bench.embedded import read_pages, retry_at_once, retry_each
from bench.writers import events, fill, prepared, submit_all
from oncelog.engine.limits import Limits

REPEATS: Final = 5
"""Repetitions of loads without a commit, because the resolution of CPU time is coarse."""

Load = Callable[[Path, int], Coroutine[Any, Any, float]]
"""Processes a number of events on a new file, and returns the CPU time per event in microseconds."""


async def _commit(path: Path, count: int) -> float:
    submissions = prepared(count, random.Random(1))
    async with oncelog.open(path) as log:
        began_s = time.process_time()
        await submit_all(log, submissions)
        return _per_event_us(began_s, count)


async def _retry_from_cache(path: Path, count: int) -> float:
    known = list(events(count // REPEATS, random.Random(1)))
    async with oncelog.open(path) as log:
        await fill(log, [oncelog.event(*one) for one in known])
        began_s = time.process_time()
        for _ in range(REPEATS):
            await retry_each(log, known)
        return _per_event_us(began_s, REPEATS * len(known))


async def _retry_from_store(path: Path, count: int) -> float:
    submissions = prepared(count, random.Random(1))
    async with oncelog.open(path, limits=Limits(cache_entries_max=0)) as log:
        await fill(log, submissions)
        began_s = time.process_time()
        for _ in range(REPEATS):
            await retry_at_once(log, submissions)
        return _per_event_us(began_s, REPEATS * count)


async def _read(path: Path, count: int) -> float:
    async with oncelog.open(path) as log:
        await fill(log, prepared(count, random.Random(1)))
        began_s = time.process_time()
        for _ in range(REPEATS):
            await read_pages(log, None)
        return _per_event_us(began_s, REPEATS * count)


def _per_event_us(began_s: float, count: int) -> float:
    return (time.process_time() - began_s) / count * 1e6


LOADS: Final[dict[str, Load]] = {
    "commits": _commit,
    "retries from the cache": _retry_from_cache,
    "retries from the store": _retry_from_store,
    "reading": _read,
}


def main() -> None:
    """Measure the load that the arguments specify."""
    load, count = LOADS[sys.argv[1]], int(sys.argv[2])
    with directory() as place, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(runner.run(load(place / "log.db", count)))


if __name__ == "__main__":
    main()
