"""`once` around an empty function: replays and first runs."""

import asyncio
import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import oncelog
from bench.disk import directory
from bench.measure import Effort, Measurement
from oncelog import canonical

CALLERS: Final = 64
ORDER: Final = {"customer": "customer-17", "amount": 4200, "currency": "EUR"}


class Ours:
    """An async and a blocking function, each with a log in a file."""

    def __init__(self, place: Path) -> None:
        self._numbers = itertools.count()
        self._runner = asyncio.Runner()
        self._log = oncelog.open(place / "async.db")
        self._blocking = oncelog.open_blocking(place / "blocking.db")
        self._runner.run(self._log.__aenter__())
        self._blocking.__enter__()

        @oncelog.once(self._log, name="empty")
        async def empty(order: dict[str, Any]) -> dict[str, int]:
            return {"order": order["id"]}

        @oncelog.once(self._blocking, name="empty")
        def empty_blocking(order: dict[str, Any]) -> dict[str, int]:
            return {"order": order["id"]}

        self._empty = empty
        self._empty_blocking = empty_blocking

    def close(self) -> None:
        self._blocking.close()
        self._runner.run(self._log.close())
        self._runner.close()

    def replay(self, count: int) -> int:
        return self._runner.run(self._replay(count))

    async def _replay(self, count: int) -> int:
        for _ in range(count):
            await self._empty(order(-1))
        return count

    def replay_blocking(self, count: int) -> int:
        for _ in range(count):
            self._empty_blocking(order(-1))
        return count

    def first(self, count: int) -> int:
        """Call the function with new keys. All callers run concurrently."""
        return self._runner.run(self._first(count))

    async def _first(self, count: int) -> int:
        waiting = iter(range(count))

        async def caller() -> int:
            return sum([len(await self._empty(order(next(self._numbers)))) for _ in waiting])

        return sum(await asyncio.gather(*[caller() for _ in range(CALLERS)]))


def order(number: int) -> dict[str, Any]:
    """Return a unique argument that resembles an order."""
    return ORDER | {"id": number}


@contextmanager
def ours() -> Iterator[Ours]:
    """Yield the functions, with files in a temporary directory."""
    with directory() as place:
        contender = Ours(place)
        try:
            yield contender
        finally:
            contender.close()


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Yield all measurements in the order of the table."""
    replays, firsts = (20, 64) if effort.is_quick else (2000, 4096)
    with ours() as contender, directory() as place:
        for name, replay in (("async", contender.replay), ("blocking", contender.replay_blocking)):
            yield Measurement(
                f"replay of once, {name} function",
                partial(replay, replays),
                partial(_hash_each, replays),
                "canonical + sha256 of the arguments",
                count=replays,
                target_us=60,
                rounds=20,
            )
        yield Measurement(
            f"first run of once, {CALLERS} callers",
            partial(contender.first, firsts),
            partial(_insert_each, place / "bare.db", min(firsts, 200)),
            "a row inserted and updated, both durable, one by one",
            agree=lambda mine, theirs: (mine, theirs) == (firsts, min(firsts, 200)),
            count=firsts,
            baseline_count=min(firsts, 200),
            rounds=6,
        )


def _hash_each(count: int) -> int:
    for _ in range(count):
        sha256(canonical(order(-1))).digest()
    return count


def _insert_each(path: Path, count: int) -> int:
    """Insert a row before each call and update it afterwards, as a hand-written solution does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS calls (key INTEGER PRIMARY KEY, result TEXT)")
        for _ in range(count):
            (key,) = connection.execute("INSERT INTO calls (result) VALUES (NULL) RETURNING key").fetchone()
            connection.execute("UPDATE calls SET result = '{}' WHERE key = ?", (key,))
    return count
