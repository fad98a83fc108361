"""The proxy for sessions with PostgreSQL does what it says, at the moment it says."""

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from gateways.gateway_stores import WAIT_S, fetched, run, until
from oncelog.testing.postgres_proxy import Fate, Incident, Messages, PostgresFaults, PostgresProxy

MADE = "CREATE TABLE made (number integer)"


async def begun(proxy: PostgresProxy, number: int) -> Any:
    """A session that has written a number, and not committed it."""
    connection = await asyncpg.connect(proxy.address)
    await connection.execute("BEGIN")
    await connection.execute("INSERT INTO made VALUES ($1)", number)
    return connection


@pytest.mark.parametrize("fate", [Fate.CUT_BEFORE, Fate.CUT_AT_ANSWER, Fate.CUT_IN_ANSWER])
def test_a_commit_has_its_fate(database: str, fate: Fate) -> None:
    async def main() -> None:
        await fetched(database, MADE)
        async with PostgresProxy(database) as proxy:
            connection = await begun(proxy, 1)
            proxy.fates.append(fate)
            with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                await connection.execute("COMMIT")
            assert proxy.done[fate] == 1
            connection = await begun(proxy, 2)
            assert await connection.execute("COMMIT") == "COMMIT"
            await connection.close()
            assert proxy.done[Incident.PASSED] == 1
            await until(lambda: proxy.open_count == 0)
        expected = [(2,)] if fate is Fate.CUT_BEFORE else [(1,), (2,)]
        assert await fetched(database, "SELECT number FROM made ORDER BY number") == expected

    run(main())


def test_a_commit_that_is_cut_at_once_is_made_all_the_same(database: str) -> None:
    async def main() -> None:
        await fetched(database, MADE)
        async with PostgresProxy(database) as proxy:
            connection = await begun(proxy, 1)
            proxy.fates.append(Fate.CUT_AFTER)
            with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                await connection.execute("COMMIT")
            assert await until(lambda: fetched(database, "SELECT number FROM made")) == [(1,)]

    run(main())


def test_a_commit_can_be_left_without_an_answer(database: str) -> None:
    async def main() -> None:
        await fetched(database, MADE)
        async with PostgresProxy(database) as proxy:
            connection = await begun(proxy, 1)
            proxy.fates.append(Fate.STALLED)
            committing = asyncio.create_task(connection.execute("COMMIT"))
            assert await until(lambda: fetched(database, "SELECT number FROM made")) == [(1,)]
            assert not committing.done()
            assert not connection.is_closed()
            proxy.calm()
            with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                await committing

    run(main())


@pytest.mark.parametrize("is_query", [False, True])
def test_a_query_or_its_answer_is_held_back(database: str, is_query: bool) -> None:
    async def main() -> None:
        await fetched(database, MADE)
        async with PostgresProxy(database) as proxy:
            connection = await begun(proxy, 1)
            held = proxy.hold("COMMIT", is_query=is_query)
            committing = asyncio.create_task(connection.execute("COMMIT"))
            async with asyncio.timeout(WAIT_S):
                await held.reached()
            assert len(await fetched(database, "SELECT number FROM made")) == (not is_query)
            assert not committing.done()
            held.let_go()
            assert await committing == "COMMIT"
            await connection.close()

    run(main())


def test_requests_to_cancel_are_counted_and_passed_on(database: str) -> None:
    async def main() -> None:
        async with PostgresProxy(database) as proxy:
            connection = await asyncpg.connect(proxy.address)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connection.execute("SELECT pg_sleep(60)"), 0.1)
            await until(lambda: proxy.cancel_requests == 1)
            assert await connection.fetchval("SELECT 1") == 1
            await connection.close()

    run(main())


def test_a_server_can_be_out_of_reach_and_sessions_deaf(database: str) -> None:
    async def main() -> None:
        async with PostgresProxy(database) as proxy:
            proxy.is_shut = True
            with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                await asyncpg.connect(proxy.address)
            proxy.is_shut = False
            proxy.deaf_sessions = 1
            deaf = await asyncpg.connect(proxy.address)
            asked = asyncio.create_task(deaf.fetchval("SELECT 1"))
            hearing = await asyncpg.connect(proxy.address)
            assert await hearing.fetchval("SELECT 1") == 1
            assert not asked.done()
            proxy.stall_all()
            asked_too = asyncio.create_task(hearing.execute("SELECT 17"))
            answered = "SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT 17' AND state = 'idle'"
            await until(lambda: fetched(database, answered))
            proxy.cut_all()
            for task in (asked, asked_too):
                with pytest.raises((asyncpg.ConnectionDoesNotExistError, OSError)):
                    await task

    run(main())


def test_what_happens_follows_from_the_seed(database: str) -> None:
    async def fates(seed: int) -> list[Counter[str]]:
        """What had happened after each of some transactions, on sessions of their own."""
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

    async def main() -> None:
        first = await fates(7)
        assert await fates(7) == first
        assert await fates(8) != first
        assert len(first[-1]) > 3

    run(main())


def test_messages_are_found_however_their_bytes_come() -> None:
    one, other = b"Q\0\0\0\x0bCOMMIT\0", b"X\0\0\0\x04"
    stream = one + other + one
    for size in range(1, len(stream) + 1):
        messages = Messages(has_begun=True)
        found = [
            message for start in range(0, len(stream), size) for message in messages.feed(stream[start : start + size])
        ]
        assert found == [one, other, one]


def test_the_answer_to_a_request_for_encryption_is_one_byte() -> None:
    messages = Messages(has_begun=True)
    messages.awaits_one_byte = True
    assert messages.feed(b"NX\0\0\0\x04") == [b"N", b"X\0\0\0\x04"]
    messages.awaits_one_byte = True
    with pytest.raises(RuntimeError, match="speaks TLS"):
        messages.feed(b"S")
