"""After a COMMIT without an answer, the log determines the outcome and reports it to all callers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import asyncpg
import pytest

from crash.load import iterate_round, members
from deadlines import until
from engine.observable_store import LoopClock
from oncelog.core.policy import AUDIT_POLICY, RUNS
from oncelog.core.values import Applied, Claim, Committed, Granted, Item, Replayed, Request, SetCursor, Verdict
from oncelog.engine.log import Log, open_log
from oncelog.errors import StoreUnavailableError
from oncelog.testing.postgres_proxy import CommitFault, Incident, PostgresFaults, PostgresProxy
from servers.shared_logs import (
    LONG_MS,
    event,
    fetch_rows,
    limits,
    open_proxied_log,
    position_of,
    positions,
    retry_until_available,
)

CUTS = (CommitFault.CUT_BEFORE, CommitFault.CUT_AFTER, CommitFault.CUT_AT_ANSWER, CommitFault.CUT_IN_ANSWER)
COMMITTED_FATES = (CommitFault.CUT_AT_ANSWER, CommitFault.CUT_IN_ANSWER)
"""Faults after which the transaction has certainly been committed."""


@asynccontextmanager
async def lock_lane(address: str) -> AsyncIterator[Any]:
    """Lock lane 0 in a separate session."""
    connection = await asyncpg.connect(address)
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("SELECT 1 FROM oncelog_lanes WHERE lane = 0 FOR UPDATE")
        yield
        await transaction.rollback()
    finally:
        await connection.close()


@pytest.mark.rule("CO-10", "CO-12", "CO-16")
@pytest.mark.parametrize("fate", CUTS)
async def test_commit_with_a_lost_answer_happens_once_and_is_acknowledged(database: str, fate: CommitFault) -> None:
    async with open_proxied_log(database) as (proxy, log):
        passed = proxy.done[Incident.PASSED]
        proxy.commit_faults.append(fate)
        first = await log.submit(event(1))
        assert isinstance(first, Committed)
        assert proxy.done[fate] == 1
        if fate in COMMITTED_FATES:  # There is one further COMMIT, for the outcome query, but no repeated batch.
            assert proxy.done[Incident.PASSED] == passed + 1
        if fate is CommitFault.CUT_BEFORE:
            assert proxy.done[Incident.PASSED] == passed + 2
        assert position_of(await log.submit(event(2))) == 2
        assert proxy.cancel_requests == 0
    async with open_log(database) as other:
        assert await other.submit(event(1)) == Replayed(first.receipt)
    assert await positions(database) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("fate", CUTS)
async def test_multi_lane_batch_with_a_lost_answer_is_committed_once(database: str, fate: CommitFault) -> None:
    async with open_proxied_log(database) as (proxy, log):
        await asyncio.gather(*[log.submit(member) for member in members()])
        for round_number in range(3):
            writes = list(iterate_round(round_number))
            proxy.commit_faults.append(fate)
            verdicts = await asyncio.gather(*[log.submit(one) for one in writes])
            assert all(isinstance(verdict, Committed) for verdict in verdicts)
        assert proxy.done[fate] == 3
    rows = await fetch_rows(database, "SELECT lane, position FROM oncelog_records ORDER BY lane, position")
    heads = await fetch_rows(database, "SELECT lane, position FROM oncelog_lanes ORDER BY lane")
    assert rows == [(lane, position) for lane, newest in heads for position in range(1, newest + 1)]
    internal = await fetch_rows(database, "SELECT count(*) FROM oncelog_records WHERE policy = $1", AUDIT_POLICY)
    assert len(rows) == 3 * len(list(iterate_round(0))) + internal[0][0]


def claim(holder: str) -> Claim:
    return Claim(policy=RUNS, scope="campaign", key=bytes(16), fingerprint=b"", holder=holder, lease_ms=60_000)


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("fate", CUTS)
async def test_side_state_with_a_lost_answer_is_written_with_the_same_result(database: str, fate: CommitFault) -> None:
    """No block identifies side state. It is therefore written again, which must not change the result."""

    async def submit_with_fault(proxy: PostgresProxy, log: Log, item: Item) -> Verdict:
        proxy.commit_faults.append(fate)
        return await log.submit(item)

    async with open_proxied_log(database) as (proxy, log):
        assert await log.submit(event(1))
        granted = await submit_with_fault(proxy, log, claim("ann"))
        assert isinstance(granted, Granted)
        assert granted.fence == 1
        assert isinstance(await submit_with_fault(proxy, log, SetCursor("reader", 1)), Applied)
        assert [(one.name, one.cursor) for one in await log.consumers()] == [("reader", 1)]
        assert proxy.done[fate] == 2
    assert await fetch_rows(database, "SELECT holder, fence FROM oncelog_leases") == [("ann", 1)]


@pytest.mark.rule("CO-12", "CO-16")
async def test_commit_happens_once_even_if_outcome_queries_fail_repeatedly(database: str) -> None:
    async with open_proxied_log(database) as (proxy, log):
        for number, fates in enumerate([CUTS, CUTS[::-1], COMMITTED_FATES * 2, (CommitFault.CUT_BEFORE,) * 4], 1):
            proxy.commit_faults.extend(fates)
            assert position_of(await log.submit(event(number))) == number
            assert not proxy.commit_faults
    assert await positions(database) == {number: [number] for number in range(1, 5)}


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("fate", [CommitFault.CUT_BEFORE, CommitFault.CUT_AT_ANSWER])
async def test_unreachable_database_is_a_retryable_error(database: str, fate: CommitFault) -> None:
    async with open_proxied_log(database, postgres_patience_ms=300) as (proxy, log):
        begins = proxy.hold("BEGIN")
        submitted = asyncio.create_task(log.submit(event(1)))
        await begins.wait_reached()
        proxy.commit_faults.append(fate)
        proxy.is_unreachable = True
        begins.release()
        with pytest.raises(StoreUnavailableError, match="submit again under the same identity"):
            await submitted
        with pytest.raises(StoreUnavailableError):
            await log.submit(event(2))
        with pytest.raises(StoreUnavailableError):
            await log.submit(event(1))
        proxy.is_unreachable = False
        kind = Replayed if fate is CommitFault.CUT_AT_ANSWER else Committed
        again = await retry_until_available(partial(log.submit, event(1)))
        assert isinstance(again, kind)
        assert isinstance(await retry_until_available(partial(log.submit, event(1))), Replayed)
        assert position_of(await retry_until_available(partial(log.submit, event(2)))) == 2
    assert await positions(database) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-16")
async def test_log_cut_at_every_commit_reports_unavailable(database: str) -> None:
    async with open_proxied_log(database, postgres_patience_ms=300) as (proxy, log):
        proxy.faults = PostgresFaults(commit_rate=1)
        proxy.commit_faults.extend([CommitFault.CUT_AT_ANSWER] * 100)
        with pytest.raises(StoreUnavailableError, match="submit again under the same identity"):
            await log.submit(event(1))
        proxy.calm()
        assert isinstance(await retry_until_available(partial(log.submit, event(1))), Replayed)
    assert await positions(database) == {1: [1]}


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("is_released", [False, True], ids=["never", "late"])
async def test_timed_out_commit_is_abandoned_and_its_outcome_queried(
    database: str, loop_clock: LoopClock, is_released: bool
) -> None:
    async with open_proxied_log(database) as (proxy, log):
        answer = proxy.hold("COMMIT")
        submitted = asyncio.create_task(log.submit(event(1)))
        await answer.wait_reached()
        loop_clock.advance(LONG_MS / 1000)
        if is_released:  # The lane is released after the client has closed its socket.
            await asyncio.wait([submitted])
            answer.release()
        assert isinstance(await submitted, Committed)
        assert proxy.cancel_requests == 0
        assert position_of(await log.submit(event(2))) == 2
    assert await positions(database) == {1: [1], 2: [2]}


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("statement", ["BEGIN", "COMMIT"])
async def test_cancelled_caller_does_not_cancel_the_statement(database: str, statement: str) -> None:
    async with open_proxied_log(database) as (proxy, log):
        answer = proxy.hold(statement)
        submitted = asyncio.create_task(log._store.commit([Request((event(1),))]))
        await answer.wait_reached()
        submitted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitted
        answer.release()
        assert position_of(await log.submit(event(2))) == 2  # The first event was committed.
        assert proxy.cancel_requests == 0
    assert proxy.cancel_requests == 0
    assert await positions(database) == {1: [1], 2: [2]}


async def test_close_during_a_commit_waits_for_it(database: str) -> None:
    async with PostgresProxy(database) as proxy:
        log = open_log(proxy.address, limits=limits())
        async with log:
            answer = proxy.hold("COMMIT")
            submitted = asyncio.create_task(log.submit(event(1)))
            await answer.wait_reached()
            closing = asyncio.create_task(log.close())
            await asyncio.sleep(0)
            assert not closing.done()
            answer.release()
            await closing
        assert position_of(await submitted) == 1
        assert proxy.cancel_requests == 0
        await until(lambda: proxy.open_count == 0)


@pytest.mark.rule("CO-16")
async def test_write_to_a_locked_lane_raises_until_the_lane_is_free(database: str) -> None:
    async with open_proxied_log(database, postgres_lane_ms=200) as (_, log):
        async with lock_lane(database):
            for number in (1, 2):
                with pytest.raises(StoreUnavailableError):
                    await log.submit(event(number))
        assert position_of(await retry_until_available(partial(log.submit, event(1)))) == 1


@pytest.mark.rule("CO-16")
async def test_commit_outcome_is_queried_until_the_lane_is_free(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first queries time out while they wait for the lane. They must not leave a failed transaction behind."""
    caplog.set_level(logging.DEBUG, "oncelog.postgres")
    async with open_proxied_log(database, postgres_lane_ms=200) as (proxy, log):
        commits = proxy.hold("COMMIT")
        submitted = asyncio.create_task(log.submit(event(1)))
        await commits.wait_reached()
        async with lock_lane(database):
            proxy.cut_all()
            await until(lambda: caplog.text.count("retrying on another session after LockNotAvailableError") >= 3)
        assert isinstance(await submitted, Committed)
        assert position_of(await log.submit(event(2))) == 2
        assert "InFailedSQLTransactionError" not in caplog.text


@pytest.mark.rule("CO-16")
async def test_session_without_answers_is_replaced(database: str) -> None:
    hurry = {"postgres_lane_ms": 100, "postgres_connect_ms": 500, "postgres_commit_ms": 5_000}
    async with open_proxied_log(database, **hurry) as (proxy, log):
        assert position_of(await log.submit(event(1))) == 1
        assert len((await log.read()).records) == 1
        proxy.stall_all()
        proxy.stalled_sessions = 2  # The next two sessions also stall after they begin.
        submitted = asyncio.create_task(log.submit(event(2)))
        records = (await log.read()).records
        assert position_of(await submitted) == 2
        assert [record.position for record in records] in ([1], [1, 2])
        assert proxy.stalled_sessions == 0
        assert proxy.cancel_requests == 0
