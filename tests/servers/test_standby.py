"""While COMMIT waits for a missing standby, a log does not report data that exists on only one server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import asyncpg
import pytest

import oncelog
from deadlines import WAIT_S, turns, until
from engine.observable_store import LoopClock
from oncelog.core.values import Item, Replayed, Verdict
from oncelog.engine.log import Log, open_log
from oncelog.errors import StoreUnavailableError
from oncelog.testing.postgres_proxy import PostgresProxy
from servers.shared_logs import LONG_MS, event, fetch_rows, limits, position_of, positions, retry_until_available
from servers.standbys import END_IDLE, GATEWAY, Operator, open_session, standby_away

COMMIT_MS = 300
PATIENCE_MS = 200
COMMAND_S = 1_000
"""Timeout of every command, including the commands before the one that waits."""
SESSIONS_MAX = 3
RETRY_MS = 20_000
STEP_S = 4
PAUSE_S = 0.005


def open_log_with_short_timeouts(address: str, **changed: int) -> Log:
    chosen = {"postgres_commit_ms": COMMIT_MS, "postgres_patience_ms": PATIENCE_MS, **changed}
    return open_log(address, limits=limits(**chosen))


@asynccontextmanager
async def open_test_log(address: str, **changed: int) -> AsyncIterator[Log]:
    """Open a log with short timeouts, and retry until it opens."""
    log = await retry_until_available(lambda: open_log_with_short_timeouts(address, **changed).__aenter__())
    try:
        yield log
    finally:
        await log.close()


async def expect_unavailable(call: Awaitable[Any]) -> None:
    """Assert that a call fails with a retryable error."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StoreUnavailableError):
            await call


async def submit_until_available(log: Log, item: Item) -> Verdict:
    return await retry_until_available(lambda: log.submit(item))


@pytest.mark.rule("CO-11", "CO-16")
async def test_commit_waiting_for_a_standby_is_not_acknowledged(address: str) -> None:
    async with open_test_log(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.wait_for_waiting_session()
            await expect_unavailable(submitted)
            await expect_unavailable(log.submit(event(1)))
            assert await positions(address) == {}
        for _ in range(2):
            assert position_of(await submit_until_available(log, event(1))) == 1
        assert position_of(await submit_until_available(log, event(2))) == 2
    assert await positions(address) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-11", "CO-16")
async def test_commit_with_cancelled_wait_is_not_acknowledged(address: str) -> None:
    """The server answers COMMIT and shows the data. Only a warning reveals that no standby has the data."""
    async with open_test_log(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.cancel(await operator.wait_for_waiting_session())
            await until(lambda: positions(address))
            await expect_unavailable(submitted)
            await expect_unavailable(log.submit(event(1)))
        assert position_of(await submit_until_available(log, event(1))) == 1
        assert position_of(await submit_until_available(log, event(2))) == 2
    assert await positions(address) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-11", "CO-16")
async def test_commit_is_not_acknowledged_when_every_wait_is_cancelled(address: str) -> None:
    """The cancelled waits include those of the outcome queries and of the barrier of each new session."""
    async with open_test_log(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.cancel_until(submitted)
            await expect_unavailable(submitted)
        assert position_of(await submit_until_available(log, event(1))) == 1
    assert await positions(address) == {1: [1]}


@pytest.mark.rule("CO-11", "CO-16")
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["waiting", "cancelled"])
async def test_waiting_commit_is_acknowledged_when_the_standby_returns(address: str, is_cancelled: bool) -> None:
    async with open_test_log(address, postgres_patience_ms=LONG_MS) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            first = await operator.wait_for_waiting_session()
            if is_cancelled:
                await operator.cancel(first)
                await until(lambda: positions(address))
            # The query for the outcome also waits.
            await until(lambda: is_second_waiting(operator, first, submitted))
            assert not submitted.done()
        assert position_of(await submitted) == 1
        assert position_of(await submit_until_available(log, event(1))) == 1
    assert await positions(address) == {1: [1]}


async def is_second_waiting(operator: Operator, first: int, submitted: "asyncio.Task[Verdict]") -> bool:
    return submitted.done() or bool(set(await operator.waiting_sessions()) - {first})


@pytest.mark.rule("CO-11")
async def test_new_session_does_not_return_data_without_a_standby(address: str) -> None:
    """The commit is visible to all sessions, because its own session was terminated."""
    async with open_test_log(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.wait_for_waiting_session()
            await operator.end_sessions()
            assert await positions(address) == {1: [1]}
            calls = (submitted, log.read(), log.submit(event(1)), open_and_read(address))
            await asyncio.gather(*map(expect_unavailable, calls))
        records = await open_and_read(address, postgres_patience_ms=LONG_MS)
        assert [record.position for record in records] == [1]
        async with open_test_log(address, postgres_patience_ms=LONG_MS) as other:
            assert isinstance(await submit_until_available(other, event(1)), Replayed)
        assert position_of(await submit_until_available(log, event(1))) == 1
    assert await positions(address) == {1: [1]}


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("is_open", [False, True], ids=["new log", "open log"])
async def test_session_with_a_cancelled_barrier_returns_no_data(address: str, is_open: bool) -> None:
    """A session with a cancelled barrier sees data that no standby has, and must not return it."""
    async with open_test_log(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.wait_for_waiting_session()
            await operator.end_sessions()
            assert await positions(address) == {1: [1]}
            await expect_unavailable(submitted)
            reading = asyncio.create_task(read(log) if is_open else open_and_read(address))
            await operator.cancel_until(reading)
            await expect_unavailable(reading)
        assert position_of(await submit_until_available(log, event(1))) == 1
        assert [record.position for record in await retry_until_available(lambda: read(log))] == [1]


async def read(log: Log) -> list[Any]:
    return list((await log.read()).records)


async def open_and_read(address: str, **changed: int) -> list[Any]:
    async with open_log_with_short_timeouts(address, **changed) as other:
        return await read(other)


@pytest.mark.rule("CO-11")
async def test_retrying_log_has_few_waiting_sessions(address: str, loop_clock: LoopClock) -> None:
    most = 0

    async def wait_until_failed(*calls: Awaitable[Any]) -> None:
        """Whenever a session of the log is waiting, advance the clock, until all calls have failed."""
        nonlocal most
        tries = asyncio.gather(*calls, return_exceptions=True)
        while not tries.done():
            waiting = await operator.waiting_sessions()
            most = max(most, len(waiting))
            if sessions_of(log) & set(waiting):
                loop_clock.advance(STEP_S)
            await asyncio.sleep(PAUSE_S)
        assert all(isinstance(outcome, StoreUnavailableError) for outcome in await tries)

    async with open_test_log(address, postgres_commit_ms=RETRY_MS, postgres_patience_ms=RETRY_MS) as log:
        async with standby_away(address) as operator:
            await wait_until_failed(log.submit(event(1)))
            await operator.end_sessions(END_IDLE)  # From now on, reads also need a new session.
            for number in range(8):
                await wait_until_failed(log.submit(event(1 + number % 4)), log.read())
        for number in range(1, 5):
            await submit_until_available(log, event(number))
        assert 1 <= most <= SESSIONS_MAX
    found = await positions(address)
    assert sorted(found) == [1, 2, 3, 4]
    assert sorted(found.values()) == [[1], [2], [3], [4]]


def sessions_of(log: Log) -> set[int]:
    """Return the process ids of the writer's session and of sessions that wait at their barrier."""
    store: Any = log._store
    found = [store._writer._connection, *store._sessions._at_barrier.values()]
    return {one.get_server_pid() for one in found if one is not None and not one.is_closed()}


# --- transactions shared with the caller

Lend = Callable[[], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def single_connection(address: str, command_timeout: float | None) -> AsyncIterator[Lend]:
    """Lend a single connection, which its owner still uses after a failed call."""
    async with open_session(address, GATEWAY, command_timeout=command_timeout) as connection:
        yield lambda: nullcontext(connection)


@asynccontextmanager
async def pooled_connection(address: str, command_timeout: float | None) -> AsyncIterator[Lend]:
    """Lend a pooled connection for each call."""
    settings = {"application_name": GATEWAY}
    pool = await asyncpg.create_pool(
        address, min_size=1, max_size=1, command_timeout=command_timeout, server_settings=settings
    )
    try:
        yield pool.acquire
    finally:
        pool.terminate()


class Bookings:
    """A `once` function of the caller that inserts a row and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    async def book(self, lend: Lend, key: str = "a") -> int:
        async with lend() as connection:

            @oncelog.once(oncelog.share(connection), key=lambda: key, name="booking")
            async def book() -> int:
                self.runs += 1
                await connection.execute("INSERT INTO bookings VALUES ($1)", self.runs)
                return self.runs

            return await book()


async def count_visible_rows(address: str) -> list[tuple[int, int]]:
    """Return the numbers of visible rows of the caller and records of the log."""
    statement = "SELECT (SELECT count(*) FROM bookings), (SELECT count(*) FROM oncelog_records)"
    return [(int(bookings), int(records)) for bookings, records in await fetch_rows(address, statement)]


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("lending", [single_connection, pooled_connection])
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "command_timeout"])
async def test_shared_transaction_that_waits_for_a_standby_is_not_cancelled_on_the_server(
    address: str,
    loop_clock: LoopClock,
    lending: Callable[..., AbstractAsyncContextManager[Lend]],
    is_cancelled: bool,
) -> None:
    bookings = Bookings()
    await fetch_rows(address, "CREATE TABLE bookings (number int)")
    async with PostgresProxy(address) as proxy, lending(proxy.address, None) as other:
        # The first call declares the policy in a separate commit.
        assert await bookings.book(other, "before") == 1
        async with lending(proxy.address, None if is_cancelled else COMMAND_S) as lend:
            async with standby_away(address) as operator:
                called = asyncio.create_task(bookings.book(lend))
                pid = await operator.wait_for_waiting_session()
                if is_cancelled:
                    called.cancel()
                    await outcome_of(called)
                else:
                    loop_clock.advance(1.5 * COMMAND_S)
                    await turns()
                # A cancel request would have reached the proxy before the session of this query.
                assert await count_visible_rows(proxy.address) == [(1, 1)]
                assert proxy.cancel_requests == 0
                assert await operator.waiting_sessions() == [pid]
            outcome = await outcome_of(called)
            if not is_cancelled:
                assert outcome == 2 or isinstance(outcome, StoreUnavailableError)
        assert await bookings.book(other) == 2
        assert bookings.runs == 2
        assert proxy.cancel_requests == 0
    assert await count_visible_rows(address) == [(2, 2)]


async def outcome_of(task: "asyncio.Task[int]") -> int | BaseException:
    """Return the result or the exception of a task."""
    async with asyncio.timeout(WAIT_S):
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome
