"""Server processes that share one database."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from cli.server_process import DEVELOPMENT, ServerProcess

HURRY: Final = {
    "postgres_lane_ms": 1_500, "postgres_commit_ms": 2_000, "postgres_connect_ms": 10_000,
    "postgres_patience_ms": 10_000,
}  # fmt: skip
"""Timeouts shorter than the defaults, so that they expire during a test."""
START_TRIES: Final = 10


@asynccontextmanager
async def running_servers(*addresses: str, **limits: int) -> AsyncIterator[list[ServerProcess]]:
    """Start one server for each address concurrently. At the end of the block, kill all servers."""
    arguments = [*DEVELOPMENT, *(f"--set=limits.{name}={value}" for name, value in {**HURRY, **limits}.items())]
    found = [ServerProcess(address, arguments, start_tries=START_TRIES) for address in addresses]
    try:
        await asyncio.gather(*(asyncio.to_thread(one.start) for one in found))
        yield found
    finally:
        for one in found:
            await asyncio.to_thread(one.end)
