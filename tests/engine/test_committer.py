"""The committer: natural group commit, equal writes in flight, a full queue, and stores that fail."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from engine.watched import WatchedLog, nothing, positions, run, turns
from oncelog import (
    ClockJumpedError,
    ClosedError,
    Committed,
    Mode,
    Reason,
    Refused,
    Replayed,
    SetMember,
    StoreUnavailableError,
    Submission,
)
from oncelog.core.operations import SetEntity
from oncelog.core.values import Request
from oncelog.engine.gathering import HALVED_MIN, Gathering
from oncelog.testing.contract.writes import (
    CHANNEL,
    DAY_MS,
    HOUR_MS,
    committed,
    event,
    key,
    message,
    refused,
    replayed,
    transaction,
)


def keys(batch: Sequence[Any]) -> list[int]:
    return [int.from_bytes(item.key, "big") for item in batch]


class _BrokenError(Exception):
    """Not the store's own: something in one request makes its commit fail."""


# --- group commit ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-10", "CO-11")
def test_what_gathers_during_a_commit_is_the_next_batch() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.hold_commits()
            first = log.submitting(event(1))
            await log.gate.reached.wait()
            others = log.submitting(*map(event, range(2, 12)))
            await turns()
            assert not any(task.done() for task in first + others)  # nothing is told before it is durable
            log.gate.open()
            verdicts = await asyncio.gather(*first, *others)
            assert [committed(verdict).position for verdict in verdicts] == list(range(1, 12))
            assert [len(batch) for batch in log.store.batches] == [1, 10]
            assert {committed(verdict).height for verdict in verdicts[1:]} == {2}

    run(main())


@pytest.mark.rule("CO-10")
def test_a_lone_submission_commits_at_once_and_those_of_one_turn_together() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            assert committed(await log.submit(event(1))).position == 1
            await asyncio.gather(*log.submitting(event(2), event(3)))
            assert [len(batch) for batch in log.store.batches] == [1, 2]

    run(main())


@pytest.mark.rule("CO-30")
def test_a_batch_is_bounded_by_items_and_by_bytes_but_no_request_is_divided() -> None:
    async def main() -> None:
        async with WatchedLog(batch_items_max=3, batch_bytes_max=10) as log:
            log.hold_commits()
            tasks = log.submitting(*map(event, range(1, 8)))
            many = asyncio.ensure_future(log.submit_many([event(number) for number in range(8, 13)]))
            large = log.submitting(event(13, "x" * 9), event(14, "yy"), event(15, "z"))
            await log.gate.reached.wait()
            log.gate.open()
            await asyncio.gather(*tasks, many, *large)
            batches = [keys(batch) for batch in log.store.batches]
            assert batches == [[1, 2, 3], [4, 5, 6], [7], [8, 9, 10, 11, 12], [13], [14, 15]]

    run(main())


# --- equal submissions in flight -----------------------------------------------------------------------


@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("is_under_way", [False, True])
def test_equal_submissions_in_flight_commit_once(is_under_way: bool) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.hold_commits()
            first = log.submitting(event(1))
            if is_under_way:
                await log.gate.reached.wait()
            others = log.submitting(event(1), event(1))
            await turns()
            log.gate.open()
            receipt = committed(await first[0])
            assert [replayed(await other) for other in others] == [Replayed(receipt)] * 2
            assert sum(map(len, log.store.batches)) == 1
            assert positions((await log.read()).records) == [1]

    run(main())


@pytest.mark.rule("CO-14", "EV-5")
def test_an_unequal_submission_under_the_same_key_is_decided_on_its_own() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.hold_commits()
            tasks = log.submitting(event(1, "x"), event(1, "y"), event(1, "x", expected_position=7))
            await turns()
            log.gate.open()
            first, other, expecting = await asyncio.gather(*tasks)
            refused(other, Reason.IDENTITY_REUSED)
            # Known before its expectation is looked at.
            assert replayed(expecting).receipt == committed(first)

    run(main())


@pytest.mark.rule("CO-14")
def test_what_is_refused_is_refused_for_all_that_wait_for_it() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.hold_commits()
            tasks = log.submitting(event(1, expected_position=9), event(1, expected_position=9))
            await turns()
            log.gate.open()
            for verdict in await asyncio.gather(*tasks):
                assert refused(verdict, Reason.UNEXPECTED_POSITION).current == 0

    run(main())


@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("cancelled", [[0], [1], [0, 1, 2]])
def test_a_caller_that_gives_up_harms_nobody(cancelled: list[int]) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.hold_commits()
            tasks = log.submitting(event(1), event(1), event(1))
            await log.gate.reached.wait()
            for index in cancelled:
                tasks[index].cancel()
            await turns()
            log.gate.open()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for index, outcome in enumerate(outcomes):
                assert isinstance(outcome, asyncio.CancelledError) == (index in cancelled)
            await turns()
            # It was accepted, so it is committed, though nobody waits for it any more.
            assert isinstance(await log.submit(event(1)), Replayed)
            assert positions((await log.read()).records) == [1]

    run(main())


@pytest.mark.rule("CO-14")
def test_a_caller_that_gives_up_in_the_queue_does_not_hold_its_room_for_ever() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=2) as log:
            for number in range(1, 20):
                log.hold_commits()
                tasks = log.submitting(event(number), event(number))
                await log.gate.reached.wait()
                for task in tasks:
                    task.cancel()
                log.gate.open()
                await asyncio.gather(*tasks, return_exceptions=True)
                await turns()
            verdicts = await asyncio.gather(*log.submitting(event(98), event(99)))
            assert [type(verdict) for verdict in verdicts] == [Committed, Committed]

    run(main())


@pytest.mark.rule("CO-14", "CO-32")
def test_equal_submissions_count_in_the_queue_too() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=2) as log:
            log.hold_commits()
            # One and its equal wait in the queue, two have joined the first, two ask, and for two there is no room.
            tasks = log.submitting(*[event(1)] * 8)
            await turns()
            assert [task.done() for task in tasks] == [False] * 6 + [True] * 2
            log.gate.open()
            verdicts = await asyncio.gather(*tasks)
            receipt = committed(verdicts[0])
            assert verdicts[1:6] == [Replayed(receipt)] * 5
            for verdict in verdicts[6:]:
                assert refused(verdict, Reason.BUSY).retry_after_ms > 0

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-14")
def test_duplicates_through_two_logs_on_one_store_commit_once(tmp_path: Path) -> None:
    async def main() -> None:
        path = log_at(tmp_path / "log.db")
        async with oncelog.open(path) as one, oncelog.open(path) as other:
            writes = [event(number) for number in range(1, 31)]
            both = await asyncio.gather(*(log.submit(write) for write in writes for log in (one, other)))
            for mine, theirs in zip(both[::2], both[1::2], strict=True):
                assert {type(mine), type(theirs)} == {Committed, Replayed}
                assert isinstance(mine, Committed | Replayed)
                assert isinstance(theirs, Committed | Replayed)
                assert mine.receipt == theirs.receipt
            assert len((await one.read()).records) == 30

    run(main())


# --- a full queue --------------------------------------------------------------------------------------


@pytest.mark.rule("CO-32")
@pytest.mark.parametrize(("limits", "body"), [({"queue_items_max": 2}, "x"), ({"queue_bytes_max": 20}, "x" * 10)])
def test_a_full_queue_answers_new_writes_as_busy_and_recovers(limits: dict[str, Any], body: str) -> None:
    async def main() -> None:
        async with WatchedLog(**limits) as log:
            log.hold_commits()
            accepted = log.submitting(event(1, body), event(2, body))
            await log.gate.reached.wait()
            many = asyncio.create_task(log.submit_many([event(4, body), event(5, body)]))
            await turns()
            unknown = log.submitting(event(3, body))
            log.gate.open()
            assert refused(await unknown[0], Reason.BUSY).retry_after_ms > 0
            assert [refused(verdict, Reason.BUSY).retry_after_ms > 0 for verdict in await many] == [True, True]
            assert [committed(await task).position for task in accepted] == [1, 2]
            # And then there is room again.
            verdicts = await asyncio.gather(*log.submitting(event(3, body), event(4, body)))
            assert [committed(verdict).position for verdict in verdicts] == [3, 4]
            assert positions((await log.read()).records) == [1, 2, 3, 4]

    run(main())


@pytest.mark.rule("CO-32")
def test_side_state_is_busy_at_once_when_the_queue_is_full_and_the_rest_is_judged_by_the_decision() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=6, cache_entries_max=0) as log:
            receipts = [committed(await log.submit(transaction(0, 1)))]
            await log.submit(SetMember(CHANNEL, "user:ann"))
            receipts.append(committed(await log.submit(message(1))))
            log.hold_commits()
            accepted = log.submitting(*(event(number) for number in range(1, 7)))
            await log.gate.reached.wait()
            refused(await log.submit(SetMember(CHANNEL, "user:bob")), Reason.BUSY)
            asked = log.submitting(
                transaction(0, 1), message(1), transaction(0, 2), message(2), message(1, actor="user:eve")
            )
            await turns()
            log.gate.open()
            by_number, by_key, new, also_new, stranger = await asyncio.gather(*asked)
            assert [by_number, by_key] == [Replayed(receipt) for receipt in receipts]
            refused(new, Reason.BUSY)
            refused(also_new, Reason.BUSY)
            refused(stranger, Reason.NOT_A_MEMBER)
            await asyncio.gather(*accepted)

    run(main())


@pytest.mark.rule("CO-32")
def test_several_items_that_are_known_are_answered_though_the_queue_is_full() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=3, cache_entries_max=0) as log:
            receipt = committed(await log.submit(event(1)))
            log.hold_commits()
            accepted = log.submitting(event(2), event(3), event(4))
            await log.gate.reached.wait()
            many = asyncio.create_task(log.submit_many([event(1), event(5)]))
            await turns()
            log.gate.open()
            known, new = await many
            assert known == Replayed(receipt)
            refused(new, Reason.BUSY)
            await asyncio.gather(*accepted)
            assert positions((await log.read()).records) == [1, 2, 3, 4]

    run(main())


@pytest.mark.rule("CO-15", "CO-32")
def test_while_the_queue_is_full_what_is_known_is_answered_from_memory() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=1) as log:
            receipt = committed(await log.submit(event(1)))
            log.hold_commits()
            accepted = log.submitting(event(2))
            await log.gate.reached.wait()
            assert await log.submit(event(1)) == Replayed(receipt)  # while the commit is still held
            refused(await log.submit(event(1, "other")), Reason.IDENTITY_REUSED)
            log.gate.open()
            await accepted[0]

    run(main())


@pytest.mark.rule("CO-15", "CO-32")
def test_while_the_queue_is_full_what_is_known_is_answered_from_the_store() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=3, cache_entries_max=0) as log:
            receipt = committed(await log.submit(event(1)))
            log.hold_commits()
            accepted = log.submitting(event(2), event(4), event(5))
            await log.gate.reached.wait()
            retries = log.submitting(event(1), event(1, "other"), event(3))
            await turns()
            log.gate.open()
            known, reused, new = await asyncio.gather(*retries)
            assert known == Replayed(receipt)
            refused(reused, Reason.IDENTITY_REUSED)
            assert refused(new, Reason.BUSY).retry_after_ms > 0
            assert [committed(await task).position for task in accepted] == [2, 3, 4]
            assert positions((await log.read()).records) == [1, 2, 3, 4]

    run(main())


@pytest.mark.rule("CO-17", "CO-32")
def test_a_full_queue_answers_what_the_store_has_not_forgotten() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
            await log.submit(transaction(1, 1))
            log.clock.advance(DAY_MS)
            log.hold_commits()
            accepted = log.submitting(event(2))
            await log.gate.reached.wait()
            retry = log.submitting(transaction(1, 1))
            await turns()
            log.gate.open()
            # Memory is not sure of it any more. But no eviction has been there, so the store still knows it.
            assert isinstance(await retry[0], Replayed)
            await accepted[0]

    run(main())


@pytest.mark.rule("CO-32")
def test_inquiries_are_bounded_too_and_a_store_that_fails_tells_them() -> None:
    async def main() -> None:
        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is gone")

        async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
            log.hold_commits()
            accepted = log.submitting(event(1))
            await log.gate.reached.wait()
            inquiry = log.submitting(event(2))
            await turns()
            refused(await log.submit(event(3)), Reason.BUSY)  # as many may ask as may wait
            log.store.before_commit = fail
            log.gate.open()
            with pytest.raises(StoreUnavailableError, match="the disk is gone"):
                await inquiry[0]
            committed(await accepted[0])

    run(main())


# --- members only --------------------------------------------------------------------------------------


@pytest.mark.rule("CO-22")
def test_a_removed_member_who_retries_is_not_answered_from_memory() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            receipt = committed(await log.submit(message(1)))
            assert await log.submit(message(1)) == Replayed(receipt)
            await log.submit(SetMember(CHANNEL, "user:ann", present=False))
            refused(await log.submit(message(1)), Reason.NOT_A_MEMBER)
            refused(await log.submit(message(1, actor="user:eve")), Reason.NOT_A_MEMBER)

    run(main())


@pytest.mark.rule("CO-22")
def test_a_removed_member_is_not_told_the_outcome_of_an_equal_write_in_flight() -> None:
    """The first is decided while Ann is a member; she is removed before the second is sent."""

    async def main() -> None:
        async with WatchedLog() as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))

            async def remove_ann(_: object) -> None:
                log.store.after_commit = remove_nobody
                await log.store.inner.commit([Request((SetMember(CHANNEL, "user:ann", present=False),))])
                second.extend(log.submitting(message(1)))
                await turns()

            async def remove_nobody(_: object) -> None:
                pass

            second: list[asyncio.Task[Any]] = []
            log.store.after_commit = remove_ann
            committed(await log.submit(message(1)))
            refused(await second[0], Reason.NOT_A_MEMBER)

    run(main())


# --- limits --------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30")
def test_a_body_beyond_its_limit_is_refused_by_field_and_limit() -> None:
    async def main() -> None:
        async with WatchedLog(body_bytes_max=4) as log:
            verdict = refused(await log.submit(event(1, "12345")), Reason.MALFORMED)
            assert verdict.field == "body"
            assert "4" in verdict.message
            both = await log.submit_many([event(2, "1234"), event(3, "12345")])
            assert [refused(verdict, Reason.MALFORMED).field for verdict in both] == ["body", "body"]
            assert not log.store.batches
            committed(await log.submit(event(4, "1234")))

    run(main())


@pytest.mark.rule("CO-30")
def test_a_request_beyond_its_limit_is_refused_by_field_and_limit() -> None:
    async def main() -> None:
        async with WatchedLog(request_items_max=2) as log:
            verdicts = await log.submit_many([event(1), event(2), event(3)])
            assert [refused(verdict, Reason.MALFORMED).field for verdict in verdicts] == ["items"] * 3
            assert "2" in refused(verdicts[0], Reason.MALFORMED).message
            assert not log.store.batches
            assert await log.submit_many([]) == []

    run(main())


@pytest.mark.rule("CO-30")
def test_one_request_larger_than_the_queue_is_taken_when_it_is_alone() -> None:
    async def main() -> None:
        async with WatchedLog(queue_items_max=2, queue_bytes_max=5) as log:
            verdicts = await log.submit_many([event(number) for number in range(1, 6)])
            assert [committed(verdict).position for verdict in verdicts] == [1, 2, 3, 4, 5]
            too_large = await log.submit_many([event(number) for number in range(6, 12)])
            for verdict in too_large:
                assert refused(verdict, Reason.MALFORMED).message == "items must come to at most 5 bytes, not 6"

    run(main())


# --- one that is at fault ------------------------------------------------------------------------------


def _fails_with(bad: int) -> Any:
    async def check(batch: Sequence[Request]) -> None:
        if any(item.key == key(bad) for request in batch for item in request.items if isinstance(item, Submission)):
            raise _BrokenError(f"{bad} cannot be written")

    return check


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("bad", [1, 4, 7])
def test_one_that_makes_its_commit_fail_fails_alone(bad: int) -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.store.before_commit = _fails_with(bad)
            tasks = log.submitting(*map(event, range(1, 8)))
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(outcomes.pop(bad - 1), _BrokenError)
            assert all(isinstance(outcome, Committed) for outcome in outcomes)
            records = (await log.read()).records
            assert keys(records) == [number for number in range(1, 8) if number != bad]
            assert positions(records) == list(range(1, 7))
            assert committed(await log.submit(event(8))).position == 7

    run(main())


@pytest.mark.rule("CO-33")
def test_a_request_that_is_no_request_fails_alone() -> None:
    """Its field is of a type that no code here could compare: it is the caller's fault, and only the caller's."""

    async def main() -> None:
        async with WatchedLog() as log:
            log.hold_commits()
            good = log.submitting(event(1))
            await log.gate.reached.wait()
            odd: Any = 17
            bad = asyncio.ensure_future(log.submit_many([event(2, partitions=(odd,))]))
            more = log.submitting(event(3))
            await turns()
            log.gate.open()
            outcomes = await asyncio.gather(*good, bad, *more, return_exceptions=True)
            assert isinstance(outcomes[1], Exception | list)
            if isinstance(outcomes[1], list):
                refused(outcomes[1][0], Reason.MALFORMED)
            assert [committed(outcomes[index]).position for index in (0, 2)] == [1, 2]  # type: ignore[arg-type]

    run(main())


def test_a_store_that_fails_again_and_again_is_logged_once_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            log.store.before_commit = fail
            for number in range(1, 4):
                with pytest.raises(StoreUnavailableError):
                    await log.submit(event(number))
            log.store.before_commit = nothing
            await log.submit(event(1))
            await log.submit(event(2))

    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        run(main())
    assert [record.message for record in caplog.records] == [
        "a batch of 1 requests was not committed: the disk is full",
        "batches are committed again, after 3 that were not",
    ]


@pytest.mark.rule("CO-16", "CO-33")
def test_a_failing_store_fails_its_whole_batch_and_nothing_is_divided() -> None:
    async def main() -> None:
        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is full")

        async with WatchedLog() as log:
            log.store.before_commit = fail
            outcomes = await asyncio.gather(*log.submitting(*map(event, range(1, 6))), return_exceptions=True)
            assert [str(outcome) for outcome in outcomes] == ["the disk is full"] * 5
            assert all(isinstance(outcome, StoreUnavailableError) for outcome in outcomes)
            assert len(log.store.batches) == 1
            log.hold_commits()
            log.gate.open()
            verdicts = await asyncio.gather(*log.submitting(*map(event, range(1, 6))))
            assert [committed(verdict).position for verdict in verdicts] == [1, 2, 3, 4, 5]

    run(main())


@pytest.mark.rule("CO-17")
def test_after_a_clock_jump_known_writes_are_answered_and_new_ones_refused_with_it() -> None:
    async def main() -> None:
        async with WatchedLog(cache_entries_max=0) as log:
            receipt = committed(await log.submit(event(1)))
            log.clock.jump(DAY_MS)
            outcomes = await asyncio.gather(*log.submitting(event(1), event(2), event(3)), return_exceptions=True)
            assert outcomes[0] == Replayed(receipt)
            assert isinstance(outcomes[1], ClockJumpedError)
            assert isinstance(outcomes[2], ClockJumpedError)
            await log.confirm_clock()
            assert committed(await log.submit(event(2))).position == 2

    run(main())


# --- the application's validation ----------------------------------------------------------------------


@pytest.mark.rule("EV-10", "CO-18")
def test_what_validation_raises_is_the_refusal_and_it_runs_for_new_ids_only() -> None:
    asked: list[int] = []
    is_strict = False

    def validate(submission: Submission) -> str | None:
        asked.append(int.from_bytes(submission.key, "big"))
        if submission.body == b"raises":
            raise ValueError("the total is missing")
        if submission.body == b"raises in silence":
            raise KeyError
        return "too late for that" if is_strict else None

    async def main() -> None:
        nonlocal is_strict
        async with WatchedLog(validate=validate, cache_entries_max=0) as log:
            receipt = committed(await log.submit(event(1)))
            tasks = log.submitting(event(2, "raises"), event(3), event(4, "raises in silence"))
            raised, fine, silent = await asyncio.gather(*tasks)
            assert refused(raised, Reason.INVALID).message == "the total is missing"
            assert refused(silent, Reason.INVALID).message == "KeyError"
            assert committed(fine).position == 2
            is_strict = True
            assert await log.submit(event(1)) == Replayed(receipt)
            assert refused(await log.submit(event(5)), Reason.INVALID).message == "too late for that"
            assert asked == [1, 2, 3, 4, 5]

    run(main())


# --- closing, and stores that die ----------------------------------------------------------------------


@pytest.mark.rule("CO-11")
def test_closing_finishes_what_was_accepted_and_takes_nothing_more() -> None:
    async def main() -> None:
        log = WatchedLog(batch_items_max=2)
        async with log:
            log.hold_commits()
            tasks = log.submitting(*map(event, range(1, 8)))
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
            assert [committed(await task).position for task in tasks] == [1, 2, 3, 4, 5, 6, 7]
        with pytest.raises(ClosedError):
            await log.submit(event(9))
        await log.close()

    run(main())


class _Dead(BaseException):
    """What ends a thread or a process, not only a call."""


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("error", [asyncio.CancelledError, _Dead])
def test_a_store_that_dies_leaves_no_caller_waiting(error: type[BaseException]) -> None:
    async def main() -> None:
        async with WatchedLog(batch_items_max=4, queue_items_max=8) as log:

            async def die_when_divided(batch: Sequence[Request]) -> None:
                await log.gate(batch)
                raise _BrokenError("so that the batch is divided") if len(batch) == 4 else error

            log.gate.shut()
            log.store.before_commit = die_when_divided
            tasks = log.submitting(*map(event, range(1, 9)))
            await log.gate.reached.wait()
            tasks += log.submitting(event(9))  # and one that asks, because the queue is full
            await turns()
            log.gate.open()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [ClosedError] * 9

    run(main())


@pytest.mark.rule("CO-16", "CO-32")
def test_a_store_that_dies_while_it_is_asked_leaves_no_caller_waiting() -> None:
    async def main() -> None:
        async def die(_: object) -> None:
            raise asyncio.CancelledError

        async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
            log.hold_commits()
            accepted = log.submitting(event(1))
            await log.gate.reached.wait()
            asking = log.submitting(event(2))
            await turns()
            log.store.before_commit = die
            log.gate.open()
            committed(await accepted[0])
            with pytest.raises(ClosedError, match="submit again"):
                await asking[0]
            log.store.before_commit = nothing
            assert committed(await log.submit(event(3))).position == 2

    run(main())


# --- the outcome is unknown ------------------------------------------------------------------------------


@pytest.mark.rule("CO-16", "EV-15")
def test_a_commit_whose_verdict_was_lost_is_replayed_and_delivered_once() -> None:
    async def main() -> None:
        async def lose_the_verdict(_: object) -> None:
            raise StoreUnavailableError("the answer was lost")

        async with WatchedLog(poll_ms=1) as log, log.follow() as records:
            await log.submit(event(1))
            assert (await anext(records)).position == 1
            log.store.after_commit = lose_the_verdict
            with pytest.raises(StoreUnavailableError, match="the answer was lost"):
                await log.submit(event(2))
            log.store.after_commit = _nothing
            verdict = replayed(await log.submit(event(2)))
            assert verdict.receipt is not None
            assert verdict.receipt.position == 2
            assert isinstance(await log.submit(event(2)), Replayed)
            await log.submit(event(3))
            assert [(await anext(records)).position for _ in range(2)] == [2, 3]

    run(main())


async def _nothing(_: object) -> None:
    pass


@BOTH_STORES
@pytest.mark.rule("CO-14", "CO-15")
def test_many_callers_with_many_retries_commit_each_write_once(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main())


@pytest.mark.rule("CO-14", "EV-8")
def test_requests_of_every_mode_share_a_batch_and_keep_their_meaning() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
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
            assert refused(every[0], Reason.NOT_PROCESSED).index == 1
            assert refused(until_refused[2], Reason.NOT_PROCESSED).index == 1
            assert keys((await log.read()).records) == [1, 2, 3]

    run(main())


# --- what fresh eyes found -------------------------------------------------------------------------------


@pytest.mark.rule("CO-33")
def test_what_is_no_item_is_an_error_and_not_silence() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            for wrong in (None, {"type": "order.placed"}, "text", 1, object()):
                with pytest.raises(TypeError, match="must be a Submission or another item"):
                    await log.submit(wrong)  # type: ignore[arg-type]
                with pytest.raises(TypeError, match="must be a Submission or another item"):
                    await log.submit_many([event(1), wrong])  # type: ignore[list-item]
            verdicts = await log.submit_many(event(number) for number in (1, 2))  # type: ignore[arg-type]
            assert [committed(verdict).position for verdict in verdicts] == [1, 2]

    run(main())


@pytest.mark.rule("CO-30")
def test_what_operations_hold_counts_as_the_body_does() -> None:
    async def main() -> None:
        async with WatchedLog(body_bytes_max=100) as log:
            large = transaction(1, 1, SetEntity("k", bytes(100)))
            assert refused(await log.submit(large), Reason.MALFORMED).message.startswith("body must have at most 100")

    run(main())


@pytest.mark.rule("CO-30", "CO-32")
def test_questions_are_bounded_by_their_bytes_too() -> None:
    async def main() -> None:
        async with WatchedLog(queue_bytes_max=100) as log:
            log.hold_commits()
            accepted = log.submitting(event(1, "x" * 90))
            await log.gate.reached.wait()
            asked = log.submitting(*(event(number, "x" * 40) for number in range(2, 6)))
            await turns()
            assert [task.done() for task in asked] == [False, False, True, True]
            log.gate.open()
            for verdict in await asyncio.gather(*asked):
                refused(verdict, Reason.BUSY)
            await accepted[0]

    run(main())


@pytest.mark.rule("CO-15")
def test_a_request_that_is_known_in_memory_does_not_need_the_store() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            writes = [event(number) for number in (1, 2, 3)]
            receipts = [committed(verdict) for verdict in await log.submit_many(writes)]
            before = len(log.store.batches)
            assert await log.submit_many(writes) == [Replayed(receipt) for receipt in receipts]
            assert len(log.store.batches) == before

    run(main())


@pytest.mark.rule("CO-17")
def test_behind_a_clock_jump_a_batch_is_asked_about_once() -> None:
    async def main() -> None:
        async with WatchedLog(cache_entries_max=0) as log:
            receipt = committed(await log.submit(event(1)))
            log.clock.jump(25 * HOUR_MS)
            before = len(log.store.batches)
            outcomes = await asyncio.gather(
                *log.submitting(*(event(number) for number in range(1, 51))), return_exceptions=True
            )
            assert outcomes[0] == Replayed(receipt)
            assert {type(outcome) for outcome in outcomes[1:]} == {ClockJumpedError}
            assert len(log.store.batches) == before + 2
            known, new = await log.submit_many([event(1), event(99)])
            assert known == Replayed(receipt)
            assert "clock jumped" in refused(new, Reason.BUSY).message

    run(main())


def test_one_caller_of_many_items_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = waits_of(monkeypatch)

    async def main() -> None:
        async with WatchedLog() as log:
            for first in range(0, 1000, 100):
                await log.submit_many([event(first + number) for number in range(64)])
                await log.submit_many([event(first + 64 + number) for number in range(20)])

    run(main())
    assert waited == []


@pytest.mark.parametrize("limits", [{"queue_items_max": 20}, {"batch_items_max": 20}, {"queue_bytes_max": 4000}])
def test_a_batch_waits_for_no_more_than_may_come(monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]) -> None:
    waited = waits_of(monkeypatch)

    async def main() -> None:
        async with WatchedLog(**limits) as log:
            for first in range(0, 200, 20):
                await asyncio.gather(*log.submitting(*(event(first + number, "x" * 100) for number in range(20))))

    run(main())
    assert waited == []


def test_many_who_were_answered_together_are_committed_in_two_halves_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever the machine does meanwhile: they come back at once, and a commit takes no time.
    monkeypatch.setattr("oncelog.engine.gathering.RETURNING_S", 1000)
    monkeypatch.setattr("oncelog.engine.gathering.time.thread_time", time.perf_counter)

    async def main() -> None:
        sizes: list[int] = []
        async with WatchedLog() as log:
            log._committer.on_batch = lambda items, _: sizes.append(items)

            async def submitter(first: int) -> None:
                for number in range(5):
                    await log.submit(event(1000 * first + number))

            await asyncio.gather(*map(submitter, range(2 * HALVED_MIN)))
        assert sizes[:2] == [2 * HALVED_MIN] * 2
        assert sizes[2:] == [HALVED_MIN] * 6

    run(main())


def test_fewer_are_not_divided() -> None:
    async def main() -> None:
        sizes: list[int] = []
        async with WatchedLog() as log:
            log._committer.on_batch = lambda items, _: sizes.append(items)
            for first in range(3):
                await asyncio.gather(*log.submitting(*(event(1000 * first + one) for one in range(HALVED_MIN - 1))))
        assert sizes == [HALVED_MIN - 1] * 3

    run(main())


def waits_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were there when a batch waited for more. The thread has never time to spare."""
    waited: list[int] = []

    async def wait(gathering: Gathering, _: asyncio.AbstractEventLoop) -> None:
        waited.append(gathering._queued())

    monkeypatch.setattr(Gathering, "wait", wait)
    monkeypatch.setattr("oncelog.engine.gathering.BUSY", -1)
    return waited
