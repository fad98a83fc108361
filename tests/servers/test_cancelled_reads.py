"""After a read is cancelled, the statement still completes on the server, and the log keeps the session."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from deadlines import until
from oncelog.storage.postgres import notify
from oncelog.storage.postgres.store import READERS
from servers.shared_logs import LONG_MS, event, fetch_rows, open_proxied_log

WAITING = """
    SELECT a.pid FROM pg_stat_activity AS a JOIN pg_locks AS l ON l.pid = a.pid
    WHERE NOT l.granted AND l.relation = 'oncelog_records'::regclass ORDER BY a.pid
"""
THERE = "SELECT pid FROM pg_stat_activity WHERE pid = ANY($1::integer[]) ORDER BY pid"


@asynccontextmanager
async def lock_records(address: str) -> AsyncIterator[None]:
    """Lock the records table, so that reads wait."""
    connection = await asyncpg.connect(address)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE oncelog_records")
            yield
    finally:
        await connection.close()


async def test_cancelled_reads_keep_their_sessions(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "POLL_MS", LONG_MS)  # keep the listening session
    async with open_proxied_log(database) as (proxy, log):
        await log.submit(event(1))
        await until(lambda: log._store._notifier._connection)  # type: ignore[attr-defined]
        async with lock_records(database):
            reads = [asyncio.create_task(log.read()) for _ in range(READERS)]
            pids = await until(lambda: waiting_readers(database))
            for read in reads:
                read.cancel()
            await asyncio.wait(reads)
            assert all(read.cancelled() for read in reads)
            # A cancel request would have reached the proxy before the session of this query.
            assert await fetch_rows(proxy.address, WAITING) == pids
            assert proxy.cancel_requests == 0
        accepted = proxy.accepted_count
        pages = await asyncio.gather(*[log.read() for _ in range(2 * READERS)])
        assert [len(page.records) for page in pages] == [1] * (2 * READERS)
        assert await fetch_rows(database, THERE, [pid for (pid,) in pids]) == pids
        assert proxy.accepted_count == accepted  # The existing sessions were reused.
    assert proxy.cancel_requests == 0


async def waiting_readers(address: str) -> list[tuple[int]]:
    """Return the sessions of the readers once all of them are waiting, or an empty list."""
    found = await fetch_rows(address, WAITING)
    return [(pid,) for (pid,) in found] if len(found) == READERS else []


async def test_close_waits_for_a_cancelled_read(database: str) -> None:
    async with open_proxied_log(database) as (proxy, log):
        await log.submit(event(1))
        async with lock_records(database):
            read = asyncio.create_task(log.read())
            await until(lambda: fetch_rows(database, WAITING))
            read.cancel()
            closing = asyncio.create_task(log.close())
            await asyncio.wait([read])
            await fetch_rows(proxy.address, "SELECT 1")
            assert not closing.done()
        await closing
        assert proxy.cancel_requests == 0
