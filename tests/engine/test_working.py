"""Work under leases, over a store that fails: a result that was made is not lost for want of a disk."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from engine.watched import WatchedLog, nothing, run, until
from oncelog.core.policy import RUNS
from oncelog.core.values import Claim, Granted, Release, Renew, Request, Submission
from oncelog.engine.results import Result
from oncelog.engine.work import Holding, Work
from oncelog.errors import BusyError, ClosedError, LeaseLostError, StoreUnavailableError
from oncelog.stores.protocol import Decided
from oncelog.testing.contract.writes import event, key

WORK = Work(policy=RUNS, scope="campaign/1", key=key(1), fingerprint=b"f", lease_ms=30_000)


async def holding_of(log: WatchedLog, work: Work = WORK) -> Holding:
    begun = await log.works.begin(work)
    assert isinstance(begun, Holding)
    return begun


def is_of(batch: Sequence[Request], kind: type) -> bool:
    return any(isinstance(item, kind) for request in batch for item in request.items)


@pytest.mark.rule("RU-7", "CO-16")
def test_a_result_is_tried_again_while_the_disk_fails() -> None:
    async def main() -> None:
        failures = 3

        async def fail(batch: Sequence[Request]) -> None:
            nonlocal failures
            if is_of(batch, Submission) and failures:
                failures -= 1
                raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            holding = await holding_of(log)
            log.store.before_commit = fail
            result = await log.works.complete(holding, b"done")
            assert failures == 0
            assert await log.works.begin(WORK) == result

    run(main())


@pytest.mark.rule("RU-7", "CO-15")
def test_a_result_whose_outcome_was_lost_is_the_callers_own() -> None:
    async def main() -> None:
        async def lose(decided: Decided) -> None:
            log.store.after_commit = nothing
            raise StoreUnavailableError("the answer was lost")

        async with WatchedLog() as log:
            holding = await holding_of(log)
            log.store.after_commit = lose
            result = await log.works.complete(holding, b"done")
            assert (result.body, result.receipt.sequence) == (b"done", 1)

    run(main())


def test_a_result_that_cannot_be_kept_for_the_time_of_a_lease_is_told() -> None:
    async def main() -> None:
        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            brief = Work(policy=RUNS, scope="campaign/1", key=key(2), fingerprint=b"f", lease_ms=20)
            holding = await holding_of(log, brief)
            waiting = asyncio.ensure_future(log.works.begin(brief))
            await asyncio.sleep(0)
            log.store.before_commit = fail
            with pytest.raises(StoreUnavailableError):
                await log.works.complete(holding, b"done")
            with pytest.raises(StoreUnavailableError):
                await waiting  # it takes over, and meets the same disk

    run(main())


def test_closing_does_not_wait_for_a_disk_that_fails() -> None:
    async def main() -> None:
        tries = 0

        async def fail(batch: Sequence[Request]) -> None:
            nonlocal tries
            if is_of(batch, Submission):
                tries += 1
                raise StoreUnavailableError("the disk is full")

        log = WatchedLog()
        async with log:
            holding = await holding_of(log)
            log.store.before_commit = fail
            completing = asyncio.ensure_future(log.works.complete(holding, b"done"))
            await until(lambda: tries > 0)
        with pytest.raises((StoreUnavailableError, ClosedError)):
            await completing

    run(main())


def test_a_lease_that_cannot_be_given_back_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def fail(batch: Sequence[Request]) -> None:
            if is_of(batch, Release):
                raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            brief = Work(policy=RUNS, scope="campaign/1", key=key(5), fingerprint=b"f", lease_ms=10)
            holding = await holding_of(log, brief)
            log.store.before_commit = fail
            await log.works.give_back(holding)
            assert "will end by itself" in caplog.text
            log.clock.advance(brief.lease_ms)
            await holding_of(log, brief)

    with caplog.at_level(logging.WARNING, "oncelog.work"):
        run(main())


@pytest.mark.rule("RU-7")
def test_renewing_goes_on_after_it_failed() -> None:
    async def main() -> None:
        renewals = 0

        async def fail(batch: Sequence[Request]) -> None:
            nonlocal renewals
            if is_of(batch, Renew):
                renewals += 1
                if renewals == 1:
                    raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            log.store.before_commit = fail
            brief = Work(policy=RUNS, scope="campaign/1", key=key(3), fingerprint=b"f", lease_ms=4)
            holding = await holding_of(log, brief)
            await until(lambda: renewals >= 3)
            await log.works.complete(holding, b"done")
            assert not log.works.leases

    run(main())


def test_too_many_at_once_are_told_to_come_again() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=1) as log:
            log.hold_commits()
            first, second = log.submitting(event(1), event(2))
            await log.gate.reached.wait()
            with pytest.raises(BusyError) as raised:
                await asyncio.gather(
                    *[
                        log.works.begin(Work(policy=RUNS, scope="s", key=key(number), fingerprint=b"f", waits=False))
                        for number in range(1, 4)
                    ]
                )
            assert raised.value.retry_after_ms > 0
            log.gate.open()
            await asyncio.gather(first, second)

    run(main())


def test_who_waits_while_the_log_is_closed_is_told() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await holding_of(log)
            waiting = asyncio.ensure_future(log.works.begin(WORK))
            await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await waiting

    run(main())


def test_claims_are_not_repeated_for_those_who_wait_here() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            holding = await holding_of(log)
            waiting = [asyncio.ensure_future(log.works.begin(WORK)) for _ in range(50)]
            await asyncio.sleep(0)
            result = await log.works.complete(holding, b"done")
            assert await asyncio.gather(*waiting) == [result] * 50
            claims = [item for batch in log.store.batches for item in batch if isinstance(item, Claim)]
            assert len(claims) == 1

    run(main())


@pytest.mark.rule("RU-7")
def test_who_waits_here_is_told_when_the_lease_was_lost() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            brief = Work(policy=RUNS, scope="campaign/1", key=key(4), fingerprint=b"f", lease_ms=4)
            holding = await holding_of(log, brief)
            waiting = asyncio.ensure_future(log.works.begin(brief))
            await asyncio.sleep(0)
            # Another process takes over, as far as the log can tell.
            log.clock.advance(brief.lease_ms)
            taken_over = await log.submit(
                Claim(policy=RUNS, scope="campaign/1", key=key(4), fingerprint=b"f", holder="other")
            )
            assert isinstance(taken_over, Granted)
            await until(lambda: holding.is_lost)
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
            assert isinstance(result, Result)
            assert result.body == b"done"
            with pytest.raises(LeaseLostError):
                await log.works.complete(holding, b"done")  # though it says the same

    run(main())


def test_a_claim_that_was_cancelled_before_the_log_is_closed_is_given_back() -> None:
    async def main() -> None:
        log = WatchedLog()
        async with log:
            log.hold_commits()
            claiming = asyncio.ensure_future(log.works.begin(WORK))
            await log.gate.reached.wait()
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)
            closing = asyncio.ensure_future(log.close())
            await asyncio.sleep(0)
            log.gate.open()
            await closing
        assert [type(item) for batch in log.store.batches for item in batch] == [Claim, Claim, Release]

    run(main())


def test_a_lease_is_given_back_when_the_queue_has_room_again() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=1) as log:
            holding = await holding_of(log)
            log.hold_commits()
            (writing,) = log.submitting(event(1))
            await log.gate.reached.wait()
            giving = asyncio.ensure_future(log.works.give_back(holding))
            await asyncio.sleep(0)
            log.gate.open()
            await giving
            await writing
            await holding_of(log)  # at once: the clock stands still

    run(main())
