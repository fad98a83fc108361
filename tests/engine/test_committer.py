"""The committer: group commit, failing stores, and closing."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import turns
from engine.observable_store import WatchedLog, do_nothing, positions
from oncelog import (
    ClockJumpedError,
    ClosedError,
    Committed,
    Mode,
    Reason,
    Refused,
    Replayed,
    StoreUnavailableError,
    Submission,
)
from oncelog.core.values import Request
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.writes import DAY_MS, HOUR_MS, event, key


def keys(batch: Sequence[Any]) -> list[int]:
    return [int.from_bytes(item.key, "big") for item in batch]


class _BrokenError(Exception):
    """An error in one request, not in the store."""


# --- group commit ----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-10", "CO-11")
async def test_submissions_during_a_commit_form_the_next_batch(log: WatchedLog) -> None:
    log.hold_commits()
    first = log.submit_concurrently(event(1))
    await log.gate.reached.wait()
    others = log.submit_concurrently(*map(event, range(2, 12)))
    await turns()
    assert not any(task.done() for task in first + others)  # no verdict before the commit is durable
    log.gate.open()
    verdicts = await asyncio.gather(*first, *others)
    assert [assert_committed(verdict).position for verdict in verdicts] == list(range(1, 12))
    assert [len(batch) for batch in log.store.batches] == [1, 10]
    assert {assert_committed(verdict).height for verdict in verdicts[1:]} == {2}


@pytest.mark.rule("CO-10")
async def test_lone_submission_commits_alone_and_submissions_of_one_loop_iteration_commit_together(
    log: WatchedLog,
) -> None:
    assert assert_committed(await log.submit(event(1))).position == 1
    await asyncio.gather(*log.submit_concurrently(event(2), event(3)))
    assert [len(batch) for batch in log.store.batches] == [1, 2]


@pytest.mark.rule("CO-30")
async def test_batch_is_bounded_by_items_and_bytes_without_splitting_requests() -> None:
    async with WatchedLog(batch_items_max=3, batch_bytes_max=10) as log:
        log.hold_commits()
        tasks = log.submit_concurrently(*map(event, range(1, 8)))
        many = asyncio.ensure_future(log.submit_many([event(number) for number in range(8, 13)]))
        large = log.submit_concurrently(event(13, "x" * 9), event(14, "yy"), event(15, "z"))
        await log.gate.reached.wait()
        log.gate.open()
        await asyncio.gather(*tasks, many, *large)
        batches = [keys(batch) for batch in log.store.batches]
        assert batches == [[1, 2, 3], [4, 5, 6], [7], [8, 9, 10, 11, 12], [13], [14, 15]]


# --- failing commits -------------------------------------------------------------------------------------


def _fail_if_contained(bad: int) -> Any:
    async def check(batch: Sequence[Request]) -> None:
        if any(item.key == key(bad) for request in batch for item in request.items if isinstance(item, Submission)):
            raise _BrokenError(f"{bad} cannot be written")

    return check


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("bad", [1, 4, 7])
async def test_submission_that_fails_its_commit_fails_alone(log: WatchedLog, bad: int) -> None:
    log.store.before_commit = _fail_if_contained(bad)
    tasks = log.submit_concurrently(*map(event, range(1, 8)))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes.pop(bad - 1), _BrokenError)
    assert all(isinstance(outcome, Committed) for outcome in outcomes)
    records = (await log.read()).records
    assert keys(records) == [number for number in range(1, 8) if number != bad]
    assert positions(records) == list(range(1, 7))
    assert assert_committed(await log.submit(event(8))).position == 7


@pytest.mark.rule("CO-33")
async def test_malformed_request_fails_alone(log: WatchedLog) -> None:
    """The request contains a value of a type that cannot be compared. Only its caller gets the error."""
    log.hold_commits()
    good = log.submit_concurrently(event(1))
    await log.gate.reached.wait()
    odd: Any = 17
    bad = asyncio.ensure_future(log.submit_many([event(2, partitions=(odd,))]))
    more = log.submit_concurrently(event(3))
    await turns()
    log.gate.open()
    outcomes = await asyncio.gather(*good, bad, *more, return_exceptions=True)
    assert isinstance(outcomes[1], Exception | list)
    if isinstance(outcomes[1], list):
        assert_refused(outcomes[1][0], Reason.MALFORMED)
    assert [assert_committed(outcomes[index]).position for index in (0, 2)] == [1, 2]  # type: ignore[arg-type]


async def test_repeated_store_failure_is_logged_once_and_at_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "oncelog.engine"):

        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            log.store.before_commit = fail
            for number in range(1, 4):
                with pytest.raises(StoreUnavailableError):
                    await log.submit(event(number))
            log.store.before_commit = do_nothing
            await log.submit(event(1))
            await log.submit(event(2))
    assert [record.message for record in caplog.records] == [
        "a batch of 1 requests was not committed: the disk is full",
        "batches commit again, after 3 failures",
    ]


@pytest.mark.rule("CO-16", "CO-33")
async def test_store_failure_fails_the_whole_batch_without_bisection(log: WatchedLog) -> None:
    async def fail(_: object) -> None:
        raise StoreUnavailableError("the disk is full")

    log.store.before_commit = fail
    outcomes = await asyncio.gather(*log.submit_concurrently(*map(event, range(1, 6))), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["the disk is full"] * 5
    assert all(isinstance(outcome, StoreUnavailableError) for outcome in outcomes)
    assert len(log.store.batches) == 1
    log.hold_commits()
    log.gate.open()
    verdicts = await asyncio.gather(*log.submit_concurrently(*map(event, range(1, 6))))
    assert [assert_committed(verdict).position for verdict in verdicts] == [1, 2, 3, 4, 5]


@pytest.mark.rule("CO-17")
async def test_clock_jump_refuses_new_writes_and_answers_known_ones() -> None:
    async with WatchedLog(cache_entries_max=0) as log:
        receipt = assert_committed(await log.submit(event(1)))
        log.clock.jump(DAY_MS)
        outcomes = await asyncio.gather(*log.submit_concurrently(event(1), event(2), event(3)), return_exceptions=True)
        assert outcomes[0] == Replayed(receipt)
        assert isinstance(outcomes[1], ClockJumpedError)
        assert isinstance(outcomes[2], ClockJumpedError)
        await log.confirm_clock()
        assert assert_committed(await log.submit(event(2))).position == 2


@pytest.mark.rule("CO-17")
async def test_batch_behind_a_clock_jump_is_looked_up_in_one_transaction() -> None:
    async with WatchedLog(cache_entries_max=0) as log:
        receipt = assert_committed(await log.submit(event(1)))
        log.clock.jump(25 * HOUR_MS)
        before = len(log.store.batches)
        outcomes = await asyncio.gather(
            *log.submit_concurrently(*(event(number) for number in range(1, 51))), return_exceptions=True
        )
        assert outcomes[0] == Replayed(receipt)
        assert {type(outcome) for outcome in outcomes[1:]} == {ClockJumpedError}
        assert len(log.store.batches) == before + 2
        known, new = await log.submit_many([event(1), event(99)])
        assert known == Replayed(receipt)
        assert "clock jumped" in assert_refused(new, Reason.BUSY).message


# --- validation ------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-10", "CO-18")
async def test_validation_error_is_the_refusal_and_known_ids_are_not_validated() -> None:
    asked: list[int] = []
    is_strict = False

    def validate(submission: Submission) -> str | None:
        asked.append(int.from_bytes(submission.key, "big"))
        if submission.body == b"raises":
            raise ValueError("the total is missing")
        if submission.body == b"raises without a message":
            raise KeyError
        return "too late for that" if is_strict else None

    async with WatchedLog(validate=validate, cache_entries_max=0) as log:
        receipt = assert_committed(await log.submit(event(1)))
        tasks = log.submit_concurrently(event(2, "raises"), event(3), event(4, "raises without a message"))
        raised, fine, silent = await asyncio.gather(*tasks)
        assert assert_refused(raised, Reason.INVALID).message == "the total is missing"
        assert assert_refused(silent, Reason.INVALID).message == "KeyError"
        assert assert_committed(fine).position == 2
        is_strict = True
        assert await log.submit(event(1)) == Replayed(receipt)
        assert assert_refused(await log.submit(event(5)), Reason.INVALID).message == "too late for that"
        assert asked == [1, 2, 3, 4, 5]


# --- closing, and stores that crash ----------------------------------------------------------------------


@pytest.mark.rule("CO-11")
async def test_closing_commits_accepted_writes_and_refuses_new_ones() -> None:
    log = WatchedLog(batch_items_max=2)
    async with log:
        log.hold_commits()
        tasks = log.submit_concurrently(*map(event, range(1, 8)))
        await log.gate.reached.wait()
        closing = asyncio.ensure_future(log.close())
        await turns()
        assert not closing.done()
        with pytest.raises(ClosedError):
            await log.submit(event(9))
        with pytest.raises(ClosedError):
            await log.submit_many([event(9)])
        log.gate.open()
        await closing
        assert [assert_committed(await task).position for task in tasks] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ClosedError):
        await log.submit(event(9))
    await log.close()


class _CrashError(BaseException):
    """An error that stops a thread or a process, not only a call."""


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("error", [asyncio.CancelledError, _CrashError])
async def test_callers_get_an_error_when_the_store_crashes_during_bisection(error: type[BaseException]) -> None:
    async with WatchedLog(batch_items_max=4, queue_items_max=8) as log:

        async def die_after_bisection(batch: Sequence[Request]) -> None:
            await log.gate(batch)
            raise _BrokenError("cause a bisection") if len(batch) == 4 else error

        log.gate.shut()
        log.store.before_commit = die_after_bisection
        tasks = log.submit_concurrently(*map(event, range(1, 9)))
        await log.gate.reached.wait()
        tasks += log.submit_concurrently(event(9))  # becomes an inquiry, because the queue is full
        await turns()
        log.gate.open()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ClosedError] * 9


@pytest.mark.rule("CO-16", "CO-32")
async def test_inquiries_get_an_error_when_the_store_crashes() -> None:
    async def die(_: object) -> None:
        raise asyncio.CancelledError

    async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
        log.hold_commits()
        accepted = log.submit_concurrently(event(1))
        await log.gate.reached.wait()
        asking = log.submit_concurrently(event(2))
        await turns()
        log.store.before_commit = die
        log.gate.open()
        assert_committed(await accepted[0])
        with pytest.raises(ClosedError, match="submit again"):
            await asking[0]
        log.store.before_commit = do_nothing
        assert assert_committed(await log.submit(event(3))).position == 2


# --- lost verdicts ---------------------------------------------------------------------------------------


@pytest.mark.rule("CO-16", "EV-15")
async def test_commit_with_lost_verdict_is_replayed_and_delivered_once() -> None:
    async def lose_verdict(_: object) -> None:
        raise StoreUnavailableError("the answer was lost")

    async with WatchedLog(poll_ms=1) as log, log.follow() as records:
        await log.submit(event(1))
        assert (await anext(records)).position == 1
        log.store.after_commit = lose_verdict
        with pytest.raises(StoreUnavailableError, match="the answer was lost"):
            await log.submit(event(2))
        log.store.after_commit = _nothing
        verdict = assert_replayed(await log.submit(event(2)))
        assert verdict.receipt is not None
        assert verdict.receipt.position == 2
        assert isinstance(await log.submit(event(2)), Replayed)
        await log.submit(event(3))
        assert [(await anext(records)).position for _ in range(2)] == [2, 3]


async def _nothing(_: object) -> None:
    pass


@BOTH_STORES
@pytest.mark.rule("CO-14", "CO-15")
async def test_concurrent_retries_commit_each_write_once(tmp_path: Path) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        writes = [event(number, partitions=("p",)) for number in range(1, 101)]
        verdicts = await asyncio.gather(*(log.submit(write) for write in writes * 5))
        told: dict[int, set[int]] = {}
        for write, verdict in zip(writes * 5, verdicts, strict=True):
            assert isinstance(verdict, Committed | Replayed)
            assert verdict.receipt is not None
            told.setdefault(int.from_bytes(write.key, "big"), set()).add(verdict.receipt.position)
        assert sum(isinstance(verdict, Committed) for verdict in verdicts) == 100
        assert all(len(places) == 1 for places in told.values())
        assert positions((await log.read(partition="p")).records) == list(range(1, 101))


@pytest.mark.rule("CO-14", "EV-8")
async def test_requests_of_different_modes_share_a_batch(log: WatchedLog) -> None:
    bad = event(9, expected_position=99)
    each, until_refused, every = await asyncio.gather(
        log.submit_many([event(1), bad, event(2)]),
        log.submit_many([event(3), bad, event(4)], Mode.UNTIL_REFUSED),
        log.submit_many([event(5), bad, event(6)], Mode.ALL),
    )
    assert len(log.store.batches) == 1
    assert [type(verdict) for verdict in each] == [Committed, Refused, Committed]
    assert [type(verdict) for verdict in until_refused] == [Committed, Refused, Refused]
    assert [type(verdict) for verdict in every] == [Refused, Refused, Refused]
    assert assert_refused(every[0], Reason.NOT_PROCESSED).index == 1
    assert assert_refused(until_refused[2], Reason.NOT_PROCESSED).index == 1
    assert keys((await log.read()).records) == [1, 2, 3]
