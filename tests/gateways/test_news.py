"""Logs on one database wake each other with NOTIFY; a log without a listening session polls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateways.gateway_stores import event, fetched, limits, place, until
from oncelog.engine.log import Log, open_log
from oncelog.stores.postgres import news
from oncelog.testing.postgres_proxy import Incident, PostgresProxy

NEVER_MS = 3_600_000
LISTENING = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND query LIKE '%' || $1 || '%'"


class Following:
    """A follower of a log and a queue of the positions that it received."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._arrived: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> None:
        async with self._log.follow() as records:
            async for record in records:
                self._arrived.put_nowait(record.position)

    async def next(self) -> int:
        return await self._arrived.get()


@asynccontextmanager
async def following(address: str, poll_ms: int, **changed: int) -> AsyncIterator[tuple[Log, Following]]:
    """Follow a log that polls at this interval. It has caught up, and listens."""
    async with open_log(address, limits=limits(poll_ms=poll_ms, **changed)) as log:
        found = Following(log)
        task = asyncio.create_task(found.run())
        try:
            await until(lambda: len(log._tailers._tailers) and listening(address, log))
            yield log, found
        finally:
            task.cancel()


async def listening(address: str, log: Log) -> list[Any]:
    """Return the sessions that listen."""
    return [pid for (pid,) in await fetched(address, LISTENING, log.epoch)]


@pytest.mark.rule("CO-13")
async def test_commit_wakes_followers_of_another_log(database: str) -> None:
    async with open_log(database, limits=limits()) as writer, following(database, NEVER_MS) as (_, reader):
        for number in range(1, 21):
            assert place(await writer.submit(event(number))) == number
            assert await reader.next() == number
        await asyncio.gather(*[writer.submit(event(number)) for number in range(21, 221)])
        assert [await reader.next() for _ in range(200)] == list(range(21, 221))


@pytest.mark.rule("CO-13")
async def test_log_without_listening_session_finds_records_by_polling(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_log(database, limits=limits()) as writer, following(database, 20) as (log, reader):
        monkeypatch.setattr(news, "PAUSE_S", NEVER_MS / 1000)
        (pid,) = await listening(database, log)
        await fetched(database, "SELECT pg_terminate_backend($1)", pid)
        await until(lambda: _is_away(database, log))
        for number in range(1, 6):
            await writer.submit(event(number))
            assert await reader.next() == number
        assert await listening(database, log) == []


async def _is_away(address: str, log: Log) -> bool:
    return not await listening(address, log)


@pytest.mark.rule("CO-13")
async def test_terminated_listening_session_is_replaced(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "PAUSE_S", 0.01)
    async with open_log(database, limits=limits()) as writer, following(database, NEVER_MS) as (log, reader):
        for number in range(1, 4):
            (pid,) = await listening(database, log)
            await fetched(database, "SELECT pg_terminate_backend($1)", pid)
            await writer.submit(event(2 * number))  # no session hears of it; a new one polls first
            assert await reader.next() == 2 * number - 1
            await until(lambda gone=pid: _is_another(database, log, gone))  # type: ignore[misc]
            await writer.submit(event(2 * number + 1))
            assert await reader.next() == 2 * number


async def _is_another(address: str, log: Log, gone: int) -> bool:
    found = await listening(address, log)
    return bool(found) and gone not in found


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("tells", [False, True], ids=["idle", "notifying"])
async def test_listening_session_without_answers_is_replaced(
    database: str, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """Its connection stays open, but the server's messages are lost. A NOTIFY on it gets no answer either."""
    monkeypatch.setattr(news, "LOOK_MS", 300)
    monkeypatch.setattr(news, "PAUSE_S", 0.01)
    async with (
        PostgresProxy(database) as proxy,
        open_log(database, limits=limits()) as writer,
        following(proxy.address, NEVER_MS, postgres_connect_ms=500) as (log, reader),
    ):
        proxy.stall_all()
        if tells:
            log._store._news.tell()  # type: ignore[attr-defined]
        assert place(await writer.submit(event(1))) == 1
        assert await reader.next() == 1
        assert proxy.cancel_requests == 0


@pytest.mark.rule("CO-13")
async def test_failed_notification_is_sent_by_the_next_session(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it followers of other logs would see the record only after the next commit or poll."""
    monkeypatch.setattr(news, "PAUSE_S", 0.01)
    monkeypatch.setattr(news, "LOOK_MS", NEVER_MS)
    async with (
        following(database, NEVER_MS) as (_, reader),
        PostgresProxy(database) as proxy,
        open_log(proxy.address, limits=limits()) as writer,
    ):
        assert place(await writer.submit(event(1))) == 1
        assert await reader.next() == 1
        telling = writer._store._news  # type: ignore[attr-defined]
        pid = telling._connection.get_server_pid()
        proxy.is_shut = True
        refused = proxy.done[Incident.REFUSED]
        await fetched(database, "SELECT pg_terminate_backend($1)", pid)
        await until(lambda: proxy.done[Incident.REFUSED] > refused)  # it tries to connect again
        assert place(await writer.submit(event(2))) == 2
        assert telling._connection is None
        proxy.is_shut = False
        assert await reader.next() == 2
