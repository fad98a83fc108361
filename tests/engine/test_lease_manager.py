"""Work under leases on a failing store: the computed result is not lost."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from deadlines import until
from engine.observable_store import LoopClock, WatchedLog, count_leases, do_nothing
from oncelog.core.policy import RUNS
from oncelog.core.values import Claim, Granted, Release, Renew, Request, Submission
from oncelog.engine.answer_cache import WorkResult
from oncelog.engine.held_lease import HeldLease, Work
from oncelog.errors import BusyError, ClosedError, LeaseLostError, StoreUnavailableError
from oncelog.storage.store import BatchResult
from oncelog.testing.contract.writes import event, key

WORK = Work(policy=RUNS, scope="campaign/1", key=key(1), fingerprint=b"f", lease_ms=30_000)


async def holding_of(log: WatchedLog, work: Work = WORK) -> HeldLease:
    begun = await log.leases.begin(work)
    assert isinstance(begun, HeldLease)
    return begun


def contains_kind(batch: Sequence[Request], kind: type) -> bool:
    return any(isinstance(item, kind) for request in batch for item in request.items)


@pytest.mark.rule("RU-7", "CO-16")
async def test_result_is_retried_while_the_disk_fails(log: WatchedLog) -> None:
    failures = 3

    async def fail(batch: Sequence[Request]) -> None:
        nonlocal failures
        if contains_kind(batch, Submission) and failures:
            failures -= 1
            raise StoreUnavailableError("the disk is full")

    holding = await holding_of(log)
    log.store.before_commit = fail
    result = await log.leases.complete(holding, b"done")
    assert failures == 0
    assert await log.leases.begin(WORK) == result


@pytest.mark.rule("RU-7", "CO-15")
async def test_result_with_lost_verdict_is_returned_to_its_caller(log: WatchedLog) -> None:
    async def lose_verdict(decided: BatchResult) -> None:
        log.store.after_commit = do_nothing
        raise StoreUnavailableError("the answer was lost")

    holding = await holding_of(log)
    log.store.after_commit = lose_verdict
    result = await log.leases.complete(holding, b"done")
    assert (result.body, result.receipt.sequence) == (b"done", 1)


async def test_result_that_cannot_be_stored_during_a_lease_period_raises(log: WatchedLog) -> None:
    async def fail(_: object) -> None:
        raise StoreUnavailableError("the disk is full")

    brief = Work(policy=RUNS, scope="campaign/1", key=key(2), fingerprint=b"f", lease_ms=20)
    holding = await holding_of(log, brief)
    waiting = asyncio.ensure_future(log.leases.begin(brief))
    await asyncio.sleep(0)
    log.store.before_commit = fail
    with pytest.raises(StoreUnavailableError):
        await log.leases.complete(holding, b"done")
    with pytest.raises(StoreUnavailableError):
        await waiting  # the second caller takes over, and its claim fails on the same disk


async def test_closing_does_not_wait_for_a_failing_disk() -> None:
    tries = 0

    async def fail(batch: Sequence[Request]) -> None:
        nonlocal tries
        if contains_kind(batch, Submission):
            tries += 1
            raise StoreUnavailableError("the disk is full")

    log = WatchedLog()
    async with log:
        holding = await holding_of(log)
        log.store.before_commit = fail
        completing = asyncio.ensure_future(log.leases.complete(holding, b"done"))
        await until(lambda: tries > 0)
    with pytest.raises((StoreUnavailableError, ClosedError)):
        await completing


async def test_lease_that_cannot_be_released_expires(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oncelog.work"):

        async def fail(batch: Sequence[Request]) -> None:
            if contains_kind(batch, Release):
                raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            brief = Work(policy=RUNS, scope="campaign/1", key=key(5), fingerprint=b"f", lease_ms=10)
            holding = await holding_of(log, brief)
            log.store.before_commit = fail
            await log.leases.release(holding)
            await until(lambda: "was not released and will expire" in caplog.text)
            log.clock.advance(brief.lease_ms)
            await holding_of(log, brief)


@pytest.mark.rule("RU-7")
async def test_lease_renewal_continues_after_a_failure(log: WatchedLog) -> None:
    renewals = 0

    async def fail(batch: Sequence[Request]) -> None:
        nonlocal renewals
        if contains_kind(batch, Renew):
            renewals += 1
            if renewals == 1:
                raise StoreUnavailableError("the disk is full")

    log.store.before_commit = fail
    brief = Work(policy=RUNS, scope="campaign/1", key=key(3), fingerprint=b"f", lease_ms=4)
    holding = await holding_of(log, brief)
    await until(lambda: renewals >= 3)
    await log.leases.complete(holding, b"done")
    assert not count_leases(log)


async def test_full_queue_refuses_claims_with_retry_after() -> None:
    async with WatchedLog(queue_items_max=1) as log:
        log.hold_commits()
        first, second = log.submit_concurrently(event(1), event(2))
        await log.gate.reached.wait()
        with pytest.raises(BusyError) as raised:
            await asyncio.gather(
                *[
                    log.leases.begin(Work(policy=RUNS, scope="s", key=key(number), fingerprint=b"f", waits=False))
                    for number in range(1, 4)
                ]
            )
        assert raised.value.retry_after_ms > 0
        log.gate.open()
        await asyncio.gather(first, second)


async def test_closing_the_log_ends_waiting_callers_with_an_error() -> None:
    async with WatchedLog() as log:
        await holding_of(log)
        waiting = asyncio.ensure_future(log.leases.begin(WORK))
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await waiting


async def test_waiting_callers_of_one_process_share_one_claim(log: WatchedLog) -> None:
    holding = await holding_of(log)
    waiting = [asyncio.ensure_future(log.leases.begin(WORK)) for _ in range(50)]
    await asyncio.sleep(0)
    result = await log.leases.complete(holding, b"done")
    assert await asyncio.gather(*waiting) == [result] * 50
    claims = [item for batch in log.store.batches for item in batch if isinstance(item, Claim)]
    assert len(claims) == 1


@pytest.mark.rule("RU-7")
async def test_waiting_caller_gets_the_result_of_another_process_after_a_lost_lease(
    log: WatchedLog, loop_clock: LoopClock
) -> None:
    work = Work(policy=RUNS, scope="campaign/1", key=key(4), fingerprint=b"f", lease_ms=600_000)
    holding = await holding_of(log, work)
    waiting = asyncio.ensure_future(log.leases.begin(work))
    await asyncio.sleep(0)
    # The lease expires before it is renewed, and another process takes over.
    log.clock.advance(work.lease_ms)
    taken_over = await log.submit(Claim(policy=RUNS, scope="campaign/1", key=key(4), fingerprint=b"f", holder="other"))
    assert isinstance(taken_over, Granted)
    await loop_clock.advance_until(lambda: holding.is_lost, work.lease_ms / 1000)  # the renewal fails
    done = Submission(
        policy=RUNS,
        scope="campaign/1",
        key=key(4),
        fingerprint=b"f",
        body=b"done",
        holder="other",
        fence=taken_over.fence,
    )
    await log.submit(done)
    result = await waiting
    assert isinstance(result, WorkResult)
    assert result.body == b"done"
    with pytest.raises(LeaseLostError):
        await log.leases.complete(holding, b"done")  # although the bodies are equal


async def test_cancelled_claim_is_released_before_the_log_closes() -> None:
    log = WatchedLog()
    async with log:
        log.hold_commits()
        claiming = asyncio.ensure_future(log.leases.begin(WORK))
        await log.gate.reached.wait()
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        closing = asyncio.ensure_future(log.close())
        await asyncio.sleep(0)
        log.gate.open()
        await closing
    assert [type(item) for batch in log.store.batches for item in batch] == [Claim, Claim, Release]


async def test_lease_is_released_when_the_queue_has_room_again() -> None:
    async with WatchedLog(queue_items_max=1) as log:
        holding = await holding_of(log)
        log.hold_commits()
        (writing,) = log.submit_concurrently(event(1))
        await log.gate.reached.wait()
        giving = asyncio.ensure_future(log.leases.release(holding))
        await asyncio.sleep(0)
        log.gate.open()
        await giving
        await writing
        await holding_of(log)  # immediately, because the clock does not advance
