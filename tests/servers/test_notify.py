"""Logs on one database wake each other with NOTIFY. A log without a listening session polls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deadlines import until
from oncelog.engine.log import Log, open_log
from oncelog.storage.postgres import notify
from oncelog.testing.postgres_proxy import Incident, PostgresProxy
from servers.shared_logs import event, fetch_rows, limits, position_of

NEVER_MS = 3_600_000


class Follower:
    """Follows a log and queues the received positions."""

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
async def follow(address: str, poll_ms: int, **changed: int) -> AsyncIterator[tuple[Log, Follower]]:
    """Open and follow a log with the given poll interval. Afterwards, the follower has caught up and the log is
    listening.
    """
    async with open_log(address, limits=limits(poll_ms=poll_ms, **changed)) as log:
        found = Follower(log)
        task = asyncio.create_task(found.run())
        try:
            await until(lambda: log._tailers._tailers and listening_session(log))
            yield log, found
        finally:
            task.cancel()


def listening_session(log: Log) -> int | None:
    """Return the process id of the listening session, or None."""
    connection: Any = log._store._notifier._connection  # type: ignore[attr-defined]
    return None if connection is None else int(connection.get_server_pid())


@pytest.mark.rule("CO-13")
async def test_commit_wakes_followers_of_other_logs(database: str) -> None:
    async with open_log(database, limits=limits()) as writer, follow(database, NEVER_MS) as (_, reader):
        for number in range(1, 21):
            assert position_of(await writer.submit(event(number))) == number
            assert await reader.next() == number
        await asyncio.gather(*[writer.submit(event(number)) for number in range(21, 221)])
        assert [await reader.next() for _ in range(200)] == list(range(21, 221))


@pytest.mark.rule("CO-13")
async def test_log_without_listening_session_finds_records_by_polling(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "POLL_MS", NEVER_MS)
    async with open_log(database, limits=limits()) as writer, follow(database, 20) as (log, reader):
        monkeypatch.setattr(notify, "RECONNECT_PAUSE_S", NEVER_MS / 1000)
        await fetch_rows(database, "SELECT pg_terminate_backend($1)", listening_session(log))
        await until(lambda: listening_session(log) is None)
        for number in range(1, 6):
            await writer.submit(event(number))
            assert await reader.next() == number
        assert listening_session(log) is None


@pytest.mark.rule("CO-13")
async def test_terminated_listening_session_is_replaced(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RECONNECT_PAUSE_S", 0.01)
    monkeypatch.setattr(notify, "POLL_MS", NEVER_MS)
    async with open_log(database, limits=limits()) as writer, follow(database, NEVER_MS) as (log, reader):
        for number in range(1, 4):
            pid = listening_session(log)
            await fetch_rows(database, "SELECT pg_terminate_backend($1)", pid)
            await writer.submit(event(2 * number))  # No session is notified, so a new session polls first.
            assert await reader.next() == 2 * number - 1
            await until(lambda gone=pid: listening_session(log) not in (None, gone))  # type: ignore[misc]
            await writer.submit(event(2 * number + 1))
            assert await reader.next() == 2 * number


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("sends_notify", [False, True], ids=["idle", "notifying"])
async def test_listening_session_without_answers_is_replaced(
    database: str, monkeypatch: pytest.MonkeyPatch, sends_notify: bool
) -> None:
    """The connection remains open, but messages from the server are lost, including answers to NOTIFY."""
    monkeypatch.setattr(notify, "POLL_MS", 300)
    monkeypatch.setattr(notify, "RECONNECT_PAUSE_S", 0.01)
    hurry = {"postgres_lane_ms": 500, "postgres_connect_ms": 500, "postgres_commit_ms": 5_000}
    async with (
        PostgresProxy(database) as proxy,
        open_log(database, limits=limits()) as writer,
        follow(proxy.address, NEVER_MS, **hurry) as (log, reader),
    ):
        proxy.stall_all()
        if sends_notify:
            log._store._notifier.notify()  # type: ignore[attr-defined]
        assert position_of(await writer.submit(event(1))) == 1
        assert await reader.next() == 1
        assert proxy.cancel_requests == 0


@pytest.mark.rule("CO-13")
async def test_failed_notification_is_sent_by_the_next_session(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the notification, followers of other logs would see the record only after the next commit or poll."""
    monkeypatch.setattr(notify, "RECONNECT_PAUSE_S", 0.01)
    monkeypatch.setattr(notify, "POLL_MS", NEVER_MS)
    async with (
        follow(database, NEVER_MS) as (_, reader),
        PostgresProxy(database) as proxy,
        open_log(proxy.address, limits=limits()) as writer,
    ):
        assert position_of(await writer.submit(event(1))) == 1
        assert await reader.next() == 1
        pid = await until(lambda: listening_session(writer))
        proxy.is_unreachable = True
        refused = proxy.done[Incident.REFUSED]
        await fetch_rows(database, "SELECT pg_terminate_backend($1)", pid)
        await until(lambda: proxy.done[Incident.REFUSED] > refused)  # The log has tried to reconnect.
        assert position_of(await writer.submit(event(2))) == 2
        assert listening_session(writer) is None
        proxy.is_unreachable = False
        assert await reader.next() == 2
