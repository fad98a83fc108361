"""The PostgreSQL proxy injects the requested faults at the requested moments."""

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from deadlines import until
from oncelog.testing.postgres_proxy import CommitFault, Incident, MessageSplitter, PostgresFaults, PostgresProxy
from servers.shared_logs import fetch_rows

CREATE_TABLE = "CREATE TABLE made (number integer)"


async def begin_and_insert(proxy: PostgresProxy, number: int) -> Any:
    """Open a session with an uncommitted insert of a number."""
    connection = await asyncpg.connect(proxy.address)
    await connection.execute("BEGIN")
    await connection.execute("INSERT INTO made VALUES ($1)", number)
    return connection


@pytest.mark.parametrize("fate", [CommitFault.CUT_BEFORE, CommitFault.CUT_AT_ANSWER, CommitFault.CUT_IN_ANSWER])
async def test_commit_is_cut_at_the_requested_moment(database: str, fate: CommitFault) -> None:
    await fetch_rows(database, CREATE_TABLE)
    async with PostgresProxy(database) as proxy:
        connection = await begin_and_insert(proxy, 1)
        proxy.commit_faults.append(fate)
        with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
            await connection.execute("COMMIT")
        assert proxy.done[fate] == 1
        connection = await begin_and_insert(proxy, 2)
        assert await connection.execute("COMMIT") == "COMMIT"
        await connection.close()
        assert proxy.done[Incident.PASSED] == 1
        await until(lambda: proxy.open_count == 0)
    expected = [(2,)] if fate is CommitFault.CUT_BEFORE else [(1,), (2,)]
    assert await fetch_rows(database, "SELECT number FROM made ORDER BY number") == expected


async def test_commit_cut_after_sending_is_committed(database: str) -> None:
    await fetch_rows(database, CREATE_TABLE)
    async with PostgresProxy(database) as proxy:
        connection = await begin_and_insert(proxy, 1)
        proxy.commit_faults.append(CommitFault.CUT_AFTER)
        with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
            await connection.execute("COMMIT")
        assert await until(lambda: fetch_rows(database, "SELECT number FROM made")) == [(1,)]


async def test_stalled_commit_is_committed_without_an_answer(database: str) -> None:
    await fetch_rows(database, CREATE_TABLE)
    async with PostgresProxy(database) as proxy:
        connection = await begin_and_insert(proxy, 1)
        proxy.commit_faults.append(CommitFault.STALLED)
        committing = asyncio.create_task(connection.execute("COMMIT"))
        assert await until(lambda: fetch_rows(database, "SELECT number FROM made")) == [(1,)]
        assert not committing.done()
        assert not connection.is_closed()
        proxy.calm()
        with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
            await committing


@pytest.mark.parametrize("is_query", [False, True])
async def test_query_or_its_answer_can_be_held(database: str, is_query: bool) -> None:
    await fetch_rows(database, CREATE_TABLE)
    async with PostgresProxy(database) as proxy:
        connection = await begin_and_insert(proxy, 1)
        held = proxy.hold("COMMIT", is_query=is_query)
        committing = asyncio.create_task(connection.execute("COMMIT"))
        await held.wait_reached()
        assert len(await fetch_rows(database, "SELECT number FROM made")) == (not is_query)
        assert not committing.done()
        held.release()
        assert await committing == "COMMIT"
        await connection.close()


async def test_cancel_requests_are_counted_and_forwarded(database: str) -> None:
    async with PostgresProxy(database) as proxy:
        connection = await asyncpg.connect(proxy.address)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.execute("SELECT pg_sleep(60)"), 0.1)
        await until(lambda: proxy.cancel_requests == 1)
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()


async def test_server_can_be_unreachable_and_sessions_can_be_stalled(database: str) -> None:
    async with PostgresProxy(database) as proxy:
        proxy.is_unreachable = True
        with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
            await asyncpg.connect(proxy.address)
        proxy.is_unreachable = False
        proxy.stalled_sessions = 1
        deaf = await asyncpg.connect(proxy.address)
        asked = asyncio.create_task(deaf.fetchval("SELECT 1"))
        hearing = await asyncpg.connect(proxy.address)
        assert await hearing.fetchval("SELECT 1") == 1
        assert not asked.done()
        proxy.stall_all()
        asked_too = asyncio.create_task(hearing.execute("SELECT 17"))
        answered = "SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT 17' AND state = 'idle'"
        await until(lambda: fetch_rows(database, answered))
        proxy.cut_all()
        for task in (asked, asked_too):
            with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                await task


async def test_incidents_are_determined_by_the_seed(database: str) -> None:
    async def count_incidents(seed: int) -> list[Counter[str]]:
        """Run 20 transactions in new sessions, and return the incident counts after each transaction."""
        faults = PostgresFaults(commit_rate=0.5)
        async with PostgresProxy(database, seed=seed, faults=faults) as proxy:
            found = []
            for number in range(1, 21):
                connection = await asyncpg.connect(proxy.address)
                committing = asyncio.create_task(connection.execute("COMMIT"))
                await until(lambda number=number: proxy.done.total() == number)  # type: ignore[misc]
                found.append(proxy.done.copy())
                connection.terminate()
                await asyncio.wait([committing])
                committing.exception()
            return found

    first = await count_incidents(7)
    assert await count_incidents(7) == first
    assert await count_incidents(8) != first
    assert len(first[-1]) > 3


def test_messages_are_split_regardless_of_chunk_boundaries() -> None:
    one, other = b"Q\0\0\0\x0bCOMMIT\0", b"X\0\0\0\x04"
    stream = one + other + one
    for size in range(1, len(stream) + 1):
        messages = MessageSplitter(has_started=True)
        found = [
            message for start in range(0, len(stream), size) for message in messages.feed(stream[start : start + size])
        ]
        assert found == [one, other, one]


def test_answer_to_an_encryption_request_is_one_byte() -> None:
    messages = MessageSplitter(has_started=True)
    messages.awaits_one_byte = True
    assert messages.feed(b"NX\0\0\0\x04") == [b"N", b"X\0\0\0\x04"]
    messages.awaits_one_byte = True
    with pytest.raises(RuntimeError, match="speaks TLS"):
        messages.feed(b"S")
