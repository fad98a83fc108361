"""Logs on one database, direct or through a proxy, and plain SQL queries on the database."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg

import oncelog
from deadlines import WAIT_S, until
from oncelog.core.values import Committed, Replayed, Submission, Verdict
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log, open_log
from oncelog.errors import StoreUnavailableError
from oncelog.testing.postgres_proxy import PostgresProxy

T = TypeVar("T")

LONG_MS: Final = 1_000_000
"""Longer than any test. A test of a timeout shortens only that timeout."""


def event(number: int, partition: str = "a", **members: Any) -> Submission:
    return oncelog.event(UUID(int=number), {"type": "counted", "number": number}, [partition], **members)


def limits(**changed: int) -> Limits:
    """Return limits with timeouts of `LONG_MS`, except for the `changed` ones."""
    timeouts = ("postgres_connect_ms", "postgres_lane_ms", "postgres_commit_ms", "postgres_patience_ms")
    return Limits(**{**dict.fromkeys(timeouts, LONG_MS), **changed})


@asynccontextmanager
async def open_proxied_log(address: str, **changed: int) -> AsyncIterator[tuple[PostgresProxy, Log]]:
    """Open a log whose sessions connect through a proxy."""
    if changed:  # The short timeouts may be too short for creating the log.
        async with open_log(address, limits=limits()):
            pass
    async with PostgresProxy(address) as proxy:
        log = await retry_until_available(lambda: open_log(proxy.address, limits=limits(**changed)).__aenter__())
        try:
            yield proxy, log
        finally:
            await log.close()


async def fetch_rows(address: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run a statement in a separate session and return its rows."""
    connection = await asyncpg.connect(address)
    try:
        return [tuple(row) for row in await connection.fetch(statement, *parameters)]
    finally:
        await connection.close()


async def fetch_rows_from_primary(addresses: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run a statement on the primary of a cluster. Wait until there is a primary, because the servers may be
    restarting.
    """

    async def rows() -> tuple[list[tuple[Any, ...]]] | None:
        try:
            connection = await asyncpg.connect(addresses, target_session_attrs="read-write")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return None
        try:
            return ([tuple(row) for row in await connection.fetch(statement, *parameters)],)
        finally:
            await connection.close()

    found: list[tuple[Any, ...]]
    (found,) = await until(rows)
    return found


async def positions(address: str) -> dict[int, list[int]]:
    """Return the positions in lane 0 by event number."""
    found: dict[int, list[int]] = {}
    for key, position in await fetch_rows(address, "SELECT key, position FROM oncelog_records WHERE lane = 0"):
        found.setdefault(int.from_bytes(key, "big"), []).append(position)
    return found


def position_of(verdict: Verdict) -> int:
    """Assert that a verdict is successful, and return its position."""
    assert isinstance(verdict, Committed | Replayed), verdict
    assert verdict.receipt is not None
    return verdict.receipt.position


async def retry_until_available(call: Callable[[], Awaitable[T]]) -> T:
    """Retry a call, as a client does, until the store is available."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                await asyncio.sleep(0.01)
