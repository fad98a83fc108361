"""Events built like those of an application, and many tasks that submit them."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import oncelog
from bench.sample_event import EVENT, TASK
from oncelog import Committed, Log, Submission

SUBMITTERS: Final = 256
FILL_ITEMS: Final = 1000
PARTITIONS: Final = [f"building-{number}" for number in range(10)]


class Event(NamedTuple):
    """The arguments of `oncelog.event`."""

    id: UUID
    event: dict[str, Any]
    partitions: list[str]


def events(count: int, chance: random.Random) -> Iterator[Event]:
    """Yield events of about 300 bytes, with random UUIDs, spread over the partitions."""
    for number in range(count):
        event = EVENT | {"payload": TASK | {"priority": number % 10}}
        yield Event(UUID(bytes=chance.randbytes(16), version=4), event, [PARTITIONS[number % len(PARTITIONS)]])


def prepared(count: int, chance: random.Random) -> list[Submission]:
    """Return the events as submissions, in canonical form and with fingerprints."""
    return [oncelog.event(*event) for event in events(count, chance)]


async def submit_all(log: Log, submissions: Sequence[Submission]) -> int:
    """Submit with many tasks, each of which submits its next event after an answer. Return the number of events.

    Raises ValueError if an event is not new.
    """
    waiting = iter(submissions)

    async def submitter() -> None:
        for submission in waiting:
            _check_committed(await log.submit(submission))

    await _by_many(submitter)
    return len(submissions)


async def submit_all_timed(log: Log, submissions: Sequence[Submission]) -> list[float]:
    """Submit with many tasks, and return the latencies in seconds."""
    waiting = iter(submissions)
    seconds: list[float] = []

    async def submitter() -> None:
        for submission in waiting:
            began = time.perf_counter()
            verdict = await log.submit(submission)
            seconds.append(time.perf_counter() - began)
            _check_committed(verdict)

    await _by_many(submitter)
    return seconds


async def _by_many(submitter: Callable[[], Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SUBMITTERS):
            tasks.create_task(submitter())


async def fill(log: Log, submissions: Sequence[Submission]) -> None:
    """Submit in large requests."""
    for start in range(0, len(submissions), FILL_ITEMS):
        for verdict in await log.submit_many(submissions[start : start + FILL_ITEMS]):
            _check_committed(verdict)


def _check_committed(verdict: object) -> None:
    if type(verdict) is not Committed:
        raise ValueError(f"a new event was answered with {verdict}")
