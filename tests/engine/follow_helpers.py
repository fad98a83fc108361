"""Helpers for tests that follow a log."""

import asyncio

import oncelog
from deadlines import turns
from oncelog import Record, Settings
from oncelog.engine.read_results import Follower
from oncelog.engine.subscription import Subscription

ONE_LANE = Settings(lanes=1)
NO_POLL_MS = 3_600_000
"""Prevents polls for commits by other processes during the test."""


async def take(records: Follower, count: int) -> list[Record]:
    return [await anext(records) for _ in range(count)]


async def is_quiet(records: Follower) -> bool:
    """Whether no more records arrive. The check closes the follower."""
    more = asyncio.ensure_future(anext(records))
    await turns(50)
    is_waiting = not more.done()
    more.cancel()
    await asyncio.gather(more, return_exceptions=True)
    return is_waiting


def subscriptions(log: oncelog.Log) -> list[Subscription]:
    return [one for tailer in log._tailers._tailers.values() for one in tailer._subscriptions]


def is_slow(subscription: Subscription) -> bool:
    return subscription.is_slow


def numbers(records: list[Record]) -> list[int]:
    return [int.from_bytes(record.key, "big") for record in records]
