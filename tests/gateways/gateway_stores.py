"""Logs on one database, in this process and through a proxy, and what is in the database by plain SQL."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

import oncelog
from oncelog.core.values import Committed, Replayed, Submission, Verdict
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log, open_log
from oncelog.errors import StoreUnavailableError
from oncelog.testing.postgres_proxy import PostgresProxy

WAIT_S = 60
"""Nothing that a test waits for takes that long."""
RUN_S = 200

T = TypeVar("T")


def event(number: int, partition: str = "a", **members: Any) -> Submission:
    return oncelog.event(UUID(int=number), {"type": "counted", "number": number}, [partition], **members)


def limits(**changed: int) -> Limits:
    """Those of a gateway in a hurry."""
    return Limits(**{"postgres_lane_ms": 500, "postgres_commit_ms": 5_000, "postgres_connect_ms": 2_000, **changed})


@asynccontextmanager
async def proxied(address: str, **changed: int) -> AsyncIterator[tuple[PostgresProxy, Log]]:
    """A log whose sessions go through a proxy."""
    async with PostgresProxy(address) as proxy, open_log(proxy.address, limits=limits(**changed)) as log:
        yield proxy, log


async def fetched(address: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """By plain SQL, on a session of its own."""
    connection = await asyncpg.connect(address)
    try:
        return [tuple(row) for row in await connection.fetch(statement, *parameters)]
    finally:
        await connection.close()


async def positions(address: str) -> dict[int, list[int]]:
    """The number of each event, and where it is in lane 0."""
    found: dict[int, list[int]] = {}
    for key, position in await fetched(address, "SELECT key, position FROM oncelog_records WHERE lane = 0"):
        found.setdefault(int.from_bytes(key, "big"), []).append(position)
    return found


def place(verdict: Verdict) -> int:
    """The position in an answer of success."""
    assert isinstance(verdict, Committed | Replayed), verdict
    assert verdict.receipt is not None
    return verdict.receipt.position


async def until(condition: Callable[[], Any]) -> Any:
    """What the condition gives once it gives something; it may be a coroutine function."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.01)


async def insisted(call: Callable[[], Awaitable[T]]) -> T:
    """As a client does it: again, until there is an answer."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                await asyncio.sleep(0.01)


def run(main: Any) -> Any:
    """Runs a test's coroutine in a loop of its own."""
    return asyncio.run(asyncio.wait_for(main, RUN_S))
