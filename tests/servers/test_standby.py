"""COMMITs wait for a missing standby: a log does not report data that only one server has."""

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
from servers.shared_logs import LONG_MS, event, fetched, insisted, limits, place, positions
from servers.standbys import END_IDLE, GATEWAY, Operator, connected, standby_away

COMMIT_MS = 300
PATIENCE_MS = 200
COMMAND_S = 1_000
"""Limit of each command, also of those before the one that waits."""
SESSIONS_MAX = 3
RETRY_MS = 20_000
STEP_S = 4
PAUSE_S = 0.005


def hurried(address: str, **changed: int) -> Log:
    chosen = {"postgres_commit_ms": COMMIT_MS, "postgres_patience_ms": PATIENCE_MS, **changed}
    return open_log(address, limits=limits(**chosen))


@asynccontextmanager
async def gateway(address: str, **changed: int) -> AsyncIterator[Log]:
    """Open a log with short timeouts, if necessary with several tries."""
    log = await insisted(lambda: hurried(address, **changed).__aenter__())
    try:
        yield log
    finally:
        await log.close()


async def unavailable(call: Awaitable[Any]) -> None:
    """The call ends with an error that can be retried."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StoreUnavailableError):
            await call


async def answered(log: Log, item: Item) -> Verdict:
    return await insisted(lambda: log.submit(item))


@pytest.mark.rule("CO-11", "CO-16")
async def test_commit_waiting_for_a_standby_is_not_acknowledged(address: str) -> None:
    async with gateway(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.first_waiting()
            await unavailable(submitted)
            await unavailable(log.submit(event(1)))
            assert await positions(address) == {}
        for _ in range(2):
            assert place(await answered(log, event(1))) == 1
        assert place(await answered(log, event(2))) == 2
    assert await positions(address) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-11", "CO-16")
async def test_commit_with_cancelled_wait_is_not_acknowledged(address: str) -> None:
    """The server answers COMMIT and shows the data; only a warning says that no standby has it."""
    async with gateway(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.cancel(await operator.first_waiting())
            await until(lambda: positions(address))
            await unavailable(submitted)
            await unavailable(log.submit(event(1)))
        assert place(await answered(log, event(1))) == 1
        assert place(await answered(log, event(2))) == 2
    assert await positions(address) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-11", "CO-16")
async def test_commit_is_not_acknowledged_when_every_wait_is_cancelled(address: str) -> None:
    """The queries that find out the outcome, and the barrier of each new session, are cancelled too."""
    async with gateway(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.cancel_until(submitted)
            await unavailable(submitted)
        assert place(await answered(log, event(1))) == 1
    assert await positions(address) == {1: [1]}


@pytest.mark.rule("CO-11", "CO-16")
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["waiting", "cancelled"])
async def test_waiting_commit_is_acknowledged_when_the_standby_is_back(address: str, is_cancelled: bool) -> None:
    async with gateway(address, postgres_patience_ms=LONG_MS) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            first = await operator.first_waiting()
            if is_cancelled:
                await operator.cancel(first)
                await until(lambda: positions(address))
            # The query for the outcome waits too.
            await until(lambda: is_another_waiting(operator, first, submitted))
            assert not submitted.done()
        assert place(await submitted) == 1
        assert place(await answered(log, event(1))) == 1
    assert await positions(address) == {1: [1]}


async def is_another_waiting(operator: Operator, first: int, submitted: "asyncio.Task[Verdict]") -> bool:
    return submitted.done() or bool(set(await operator.waiting()) - {first})


@pytest.mark.rule("CO-11")
async def test_new_session_does_not_return_data_without_a_standby(address: str) -> None:
    """The commit is visible to all sessions, because its own session has ended."""
    async with gateway(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.first_waiting()
            await operator.end_sessions()
            assert await positions(address) == {1: [1]}
            calls = (submitted, log.read(), log.submit(event(1)), opened_and_read(address))
            await asyncio.gather(*map(unavailable, calls))
        records = await opened_and_read(address, postgres_patience_ms=LONG_MS)
        assert [record.position for record in records] == [1]
        async with gateway(address, postgres_patience_ms=LONG_MS) as other:
            assert isinstance(await answered(other, event(1)), Replayed)
        assert place(await answered(log, event(1))) == 1
    assert await positions(address) == {1: [1]}


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("is_open", [False, True], ids=["new log", "open log"])
async def test_barrier_with_cancelled_wait_is_not_passed(address: str, is_open: bool) -> None:
    """A session whose barrier was cancelled sees data without a standby, and must not return it."""
    async with gateway(address) as log:
        async with standby_away(address) as operator:
            submitted = asyncio.create_task(log.submit(event(1)))
            await operator.first_waiting()
            await operator.end_sessions()
            assert await positions(address) == {1: [1]}
            await unavailable(submitted)
            reading = asyncio.create_task(read(log) if is_open else opened_and_read(address))
            await operator.cancel_until(reading)
            await unavailable(reading)
        assert place(await answered(log, event(1))) == 1
        assert [record.position for record in await insisted(lambda: read(log))] == [1]


async def read(log: Log) -> list[Any]:
    return list((await log.read()).records)


async def opened_and_read(address: str, **changed: int) -> list[Any]:
    async with hurried(address, **changed) as other:
        return await read(other)


@pytest.mark.rule("CO-11")
async def test_log_that_retries_has_few_waiting_sessions(address: str, loop_clock: LoopClock) -> None:
    most = 0

    async def wait_in_vain(*calls: Awaitable[Any]) -> None:
        """Advance the time while a session of the log waits, until all calls have failed."""
        nonlocal most
        tries = asyncio.gather(*calls, return_exceptions=True)
        while not tries.done():
            waiting = await operator.waiting()
            most = max(most, len(waiting))
            if sessions_of(log) & set(waiting):
                loop_clock.advance(STEP_S)
            await asyncio.sleep(PAUSE_S)
        assert all(isinstance(outcome, StoreUnavailableError) for outcome in await tries)

    async with gateway(address, postgres_commit_ms=RETRY_MS, postgres_patience_ms=RETRY_MS) as log:
        async with standby_away(address) as operator:
            await wait_in_vain(log.submit(event(1)))
            await operator.end_sessions(END_IDLE)  # from now on reads need a new session too
            for number in range(8):
                await wait_in_vain(log.submit(event(1 + number % 4)), log.read())
        for number in range(1, 5):
            await answered(log, event(number))
        assert 1 <= most <= SESSIONS_MAX
    found = await positions(address)
    assert sorted(found) == [1, 2, 3, 4]
    assert sorted(found.values()) == [[1], [2], [3], [4]]


def sessions_of(log: Log) -> set[int]:
    """Return the process ids of the writer's session and of the session at its barrier."""
    store: Any = log._store
    found = [store._writer._connection, *store._sessions._at_barrier.values()]
    return {one.get_server_pid() for one in found if one is not None and not one.is_closed()}


# --- transactions that are shared with the caller

Lend = Callable[[], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def alone(address: str, command_timeout: float | None) -> AsyncIterator[Lend]:
    """Lend one connection, which its owner keeps after a failed call."""
    async with connected(address, GATEWAY, command_timeout=command_timeout) as connection:
        yield lambda: nullcontext(connection)


@asynccontextmanager
async def of_a_pool(address: str, command_timeout: float | None) -> AsyncIterator[Lend]:
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
    """A function of the caller that writes rows and counts its runs."""

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


async def shown(address: str) -> list[tuple[int, int]]:
    """Return the number of visible rows of the caller and of the log."""
    statement = "SELECT (SELECT count(*) FROM bookings), (SELECT count(*) FROM oncelog_records)"
    return [(int(bookings), int(records)) for bookings, records in await fetched(address, statement)]


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("lending", [alone, of_a_pool])
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "command_timeout"])
async def test_shared_transaction_waiting_for_a_standby_is_not_cancelled_on_the_server(
    address: str,
    loop_clock: LoopClock,
    lending: Callable[..., AbstractAsyncContextManager[Lend]],
    is_cancelled: bool,
) -> None:
    bookings = Bookings()
    await fetched(address, "CREATE TABLE bookings (number int)")
    async with PostgresProxy(address) as proxy, lending(proxy.address, None) as other:
        # This declares the policy, in a separate commit.
        assert await bookings.book(other, "before") == 1
        async with lending(proxy.address, None if is_cancelled else COMMAND_S) as lend:
            async with standby_away(address) as operator:
                called = asyncio.create_task(bookings.book(lend))
                pid = await operator.first_waiting()
                if is_cancelled:
                    called.cancel()
                    await ended(called)
                else:
                    loop_clock.advance(1.5 * COMMAND_S)
                    await turns()
                # A cancel request would have reached the proxy before this session.
                assert await shown(proxy.address) == [(1, 1)]
                assert proxy.cancel_requests == 0
                assert await operator.waiting() == [pid]
            outcome = await ended(called)
            if not is_cancelled:
                assert outcome == 2 or isinstance(outcome, StoreUnavailableError)
        assert await bookings.book(other) == 2
        assert bookings.runs == 2
        assert proxy.cancel_requests == 0
    assert await shown(address) == [(2, 2)]


async def ended(task: "asyncio.Task[int]") -> int | BaseException:
    """Return the result or the exception of a task."""
    async with asyncio.timeout(WAIT_S):
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome
