"""The queue of the committer: equal submissions in flight, a full queue, and limits."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import turns
from engine.observable_store import WatchedLog, positions
from oncelog import (
    Committed,
    Reason,
    Replayed,
    SetMember,
    StoreUnavailableError,
)
from oncelog.core.operations import SetEntity
from oncelog.core.values import Request
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.writes import CHANNEL, DAY_MS, event, message, transaction

# --- equal submissions in flight -------------------------------------------------------------------------


@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("is_under_way", [False, True])
async def test_equal_submissions_in_flight_commit_once(log: WatchedLog, is_under_way: bool) -> None:
    log.hold_commits()
    first = log.submit_concurrently(event(1))
    if is_under_way:
        await log.gate.reached.wait()
    others = log.submit_concurrently(event(1), event(1))
    await turns()
    log.gate.open()
    receipt = assert_committed(await first[0])
    assert [assert_replayed(await other) for other in others] == [Replayed(receipt)] * 2
    assert sum(map(len, log.store.batches)) == 1
    assert positions((await log.read()).records) == [1]


@pytest.mark.rule("CO-14", "EV-5")
async def test_different_submission_under_an_equal_key_is_decided_separately(log: WatchedLog) -> None:
    log.hold_commits()
    tasks = log.submit_concurrently(event(1, "x"), event(1, "y"), event(1, "x", expected_position=7))
    await turns()
    log.gate.open()
    first, other, expecting = await asyncio.gather(*tasks)
    assert_refused(other, Reason.IDENTITY_REUSED)
    # A known key is answered before its expectation is checked.
    assert assert_replayed(expecting).receipt == assert_committed(first)


@pytest.mark.rule("CO-14")
async def test_refusal_is_answered_to_all_equal_submissions_in_flight(log: WatchedLog) -> None:
    log.hold_commits()
    tasks = log.submit_concurrently(event(1, expected_position=9), event(1, expected_position=9))
    await turns()
    log.gate.open()
    for verdict in await asyncio.gather(*tasks):
        assert assert_refused(verdict, Reason.UNEXPECTED_POSITION).current == 0


@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("cancelled", [[0], [1], [0, 1, 2]])
async def test_cancelled_caller_does_not_affect_other_callers(log: WatchedLog, cancelled: list[int]) -> None:
    log.hold_commits()
    tasks = log.submit_concurrently(event(1), event(1), event(1))
    await log.gate.reached.wait()
    for index in cancelled:
        tasks[index].cancel()
    await turns()
    log.gate.open()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for index, outcome in enumerate(outcomes):
        assert isinstance(outcome, asyncio.CancelledError) == (index in cancelled)
    await turns()
    # An accepted write is committed even without a waiting caller.
    assert isinstance(await log.submit(event(1)), Replayed)
    assert positions((await log.read()).records) == [1]


@pytest.mark.rule("CO-14")
async def test_cancelled_caller_frees_its_slot_in_the_queue() -> None:
    async with WatchedLog(queue_items_max=2) as log:
        for number in range(1, 20):
            log.hold_commits()
            tasks = log.submit_concurrently(event(number), event(number))
            await log.gate.reached.wait()
            for task in tasks:
                task.cancel()
            log.gate.open()
            await asyncio.gather(*tasks, return_exceptions=True)
            await turns()
        verdicts = await asyncio.gather(*log.submit_concurrently(event(98), event(99)))
        assert [type(verdict) for verdict in verdicts] == [Committed, Committed]


@pytest.mark.rule("CO-14", "CO-32")
async def test_equal_submissions_in_flight_count_towards_the_queue_limit() -> None:
    async with WatchedLog(queue_items_max=2) as log:
        log.hold_commits()
        # The first is queued, two join it, two become inquiries, and two exceed the limit of inquiries.
        tasks = log.submit_concurrently(*[event(1)] * 8)
        await turns()
        assert [task.done() for task in tasks] == [False] * 6 + [True] * 2
        log.gate.open()
        verdicts = await asyncio.gather(*tasks)
        receipt = assert_committed(verdicts[0])
        assert verdicts[1:6] == [Replayed(receipt)] * 5
        for verdict in verdicts[6:]:
            assert assert_refused(verdict, Reason.BUSY).retry_after_ms > 0


@BOTH_STORES
@pytest.mark.rule("CO-14")
async def test_duplicates_through_two_logs_on_one_store_commit_once(tmp_path: Path) -> None:
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


# --- a full queue ----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-32")
@pytest.mark.parametrize(("limits", "body"), [({"queue_items_max": 2}, "x"), ({"queue_bytes_max": 20}, "x" * 10)])
async def test_full_queue_answers_new_writes_as_busy_and_recovers(limits: dict[str, Any], body: str) -> None:
    async with WatchedLog(**limits) as log:
        log.hold_commits()
        accepted = log.submit_concurrently(event(1, body), event(2, body))
        await log.gate.reached.wait()
        many = asyncio.create_task(log.submit_many([event(4, body), event(5, body)]))
        await turns()
        unknown = log.submit_concurrently(event(3, body))
        log.gate.open()
        assert assert_refused(await unknown[0], Reason.BUSY).retry_after_ms > 0
        assert [assert_refused(verdict, Reason.BUSY).retry_after_ms > 0 for verdict in await many] == [True, True]
        assert [assert_committed(await task).position for task in accepted] == [1, 2]
        # Then the queue has room again.
        verdicts = await asyncio.gather(*log.submit_concurrently(event(3, body), event(4, body)))
        assert [assert_committed(verdict).position for verdict in verdicts] == [3, 4]
        assert positions((await log.read()).records) == [1, 2, 3, 4]


@pytest.mark.rule("CO-32")
async def test_full_queue_refuses_side_state_and_passes_submissions_to_plan() -> None:
    async with WatchedLog(queue_items_max=6, cache_entries_max=0) as log:
        receipts = [assert_committed(await log.submit(transaction(0, 1)))]
        await log.submit(SetMember(CHANNEL, "user:ann"))
        receipts.append(assert_committed(await log.submit(message(1))))
        log.hold_commits()
        accepted = log.submit_concurrently(*(event(number) for number in range(1, 7)))
        await log.gate.reached.wait()
        assert_refused(await log.submit(SetMember(CHANNEL, "user:bob")), Reason.BUSY)
        asked = log.submit_concurrently(
            transaction(0, 1), message(1), transaction(0, 2), message(2), message(1, actor="user:eve")
        )
        await turns()
        log.gate.open()
        by_number, by_key, new, also_new, stranger = await asyncio.gather(*asked)
        assert [by_number, by_key] == [Replayed(receipt) for receipt in receipts]
        assert_refused(new, Reason.BUSY)
        assert_refused(also_new, Reason.BUSY)
        assert_refused(stranger, Reason.NOT_A_MEMBER)
        await asyncio.gather(*accepted)


@pytest.mark.rule("CO-32")
async def test_full_queue_answers_known_items_of_a_request() -> None:
    async with WatchedLog(queue_items_max=3, cache_entries_max=0) as log:
        receipt = assert_committed(await log.submit(event(1)))
        log.hold_commits()
        accepted = log.submit_concurrently(event(2), event(3), event(4))
        await log.gate.reached.wait()
        many = asyncio.create_task(log.submit_many([event(1), event(5)]))
        await turns()
        log.gate.open()
        known, new = await many
        assert known == Replayed(receipt)
        assert_refused(new, Reason.BUSY)
        await asyncio.gather(*accepted)
        assert positions((await log.read()).records) == [1, 2, 3, 4]


@pytest.mark.rule("CO-15", "CO-32")
async def test_full_queue_answers_known_writes_from_memory() -> None:
    async with WatchedLog(queue_items_max=1) as log:
        receipt = assert_committed(await log.submit(event(1)))
        log.hold_commits()
        accepted = log.submit_concurrently(event(2))
        await log.gate.reached.wait()
        assert await log.submit(event(1)) == Replayed(receipt)  # the commit is still blocked
        reused = log.submit_concurrently(
            event(1, "other")
        )  # The store decides, because another scope may contain an event with this id.
        log.gate.open()
        assert_refused(await reused[0], Reason.IDENTITY_REUSED)
        await accepted[0]


@pytest.mark.rule("CO-15", "CO-32")
async def test_full_queue_answers_known_writes_from_the_store() -> None:
    async with WatchedLog(queue_items_max=3, cache_entries_max=0) as log:
        receipt = assert_committed(await log.submit(event(1)))
        log.hold_commits()
        accepted = log.submit_concurrently(event(2), event(4), event(5))
        await log.gate.reached.wait()
        retries = log.submit_concurrently(event(1), event(1, "other"), event(3))
        await turns()
        log.gate.open()
        known, reused, new = await asyncio.gather(*retries)
        assert known == Replayed(receipt)
        assert_refused(reused, Reason.IDENTITY_REUSED)
        assert assert_refused(new, Reason.BUSY).retry_after_ms > 0
        assert [assert_committed(await task).position for task in accepted] == [2, 3, 4]
        assert positions((await log.read()).records) == [1, 2, 3, 4]


@pytest.mark.rule("CO-17", "CO-32")
async def test_full_queue_answers_keys_that_are_not_evicted_yet() -> None:
    async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
        await log.submit(transaction(1, 1))
        log.clock.advance(DAY_MS)
        log.hold_commits()
        accepted = log.submit_concurrently(event(2))
        await log.gate.reached.wait()
        retry = log.submit_concurrently(transaction(1, 1))
        await turns()
        log.gate.open()
        # The cache does not answer after the retention time. No eviction has happened, so the store still does.
        assert isinstance(await retry[0], Replayed)
        await accepted[0]


@pytest.mark.rule("CO-32")
async def test_inquiries_are_bounded_and_fail_with_the_store() -> None:
    async def fail(_: object) -> None:
        raise StoreUnavailableError("the disk is gone")

    async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
        log.hold_commits()
        accepted = log.submit_concurrently(event(1))
        await log.gate.reached.wait()
        inquiry = log.submit_concurrently(event(2))
        await turns()
        assert_refused(await log.submit(event(3)), Reason.BUSY)  # as many inquiries as queued writes
        log.store.before_commit = fail
        log.gate.open()
        with pytest.raises(StoreUnavailableError, match="the disk is gone"):
            await inquiry[0]
        assert_committed(await accepted[0])


@pytest.mark.rule("CO-30", "CO-32")
async def test_inquiries_are_bounded_by_bytes() -> None:
    async with WatchedLog(queue_bytes_max=100) as log:
        log.hold_commits()
        accepted = log.submit_concurrently(event(1, "x" * 90))
        await log.gate.reached.wait()
        asked = log.submit_concurrently(*(event(number, "x" * 40) for number in range(2, 6)))
        await turns()
        assert [task.done() for task in asked] == [False, False, True, True]
        log.gate.open()
        for verdict in await asyncio.gather(*asked):
            assert_refused(verdict, Reason.BUSY)
        await accepted[0]


@pytest.mark.rule("CO-15")
async def test_request_known_in_memory_does_not_reach_the_store(log: WatchedLog) -> None:
    writes = [event(number) for number in (1, 2, 3)]
    receipts = [assert_committed(verdict) for verdict in await log.submit_many(writes)]
    before = len(log.store.batches)
    assert await log.submit_many(writes) == [Replayed(receipt) for receipt in receipts]
    assert len(log.store.batches) == before


# --- members only ----------------------------------------------------------------------------------------


@pytest.mark.rule("CO-22")
async def test_retry_of_a_removed_member_is_not_answered_from_memory(log: WatchedLog) -> None:
    await log.submit(SetMember(CHANNEL, "user:ann"))
    receipt = assert_committed(await log.submit(message(1)))
    assert await log.submit(message(1)) == Replayed(receipt)
    await log.submit(SetMember(CHANNEL, "user:ann", present=False))
    assert_refused(await log.submit(message(1)), Reason.NOT_A_MEMBER)
    assert_refused(await log.submit(message(1, actor="user:eve")), Reason.NOT_A_MEMBER)


@pytest.mark.rule("CO-22")
async def test_removed_member_does_not_receive_the_outcome_of_an_equal_write_in_flight(log: WatchedLog) -> None:
    """Ann is a member when the first write is decided. She is removed before the second is sent."""
    await log.submit(SetMember(CHANNEL, "user:ann"))

    async def remove_ann(_: object) -> None:
        log.store.after_commit = remove_no_one
        await log.store.inner.commit([Request((SetMember(CHANNEL, "user:ann", present=False),))])
        second.extend(log.submit_concurrently(message(1)))
        await turns()

    async def remove_no_one(_: object) -> None:
        pass

    second: list[asyncio.Task[Any]] = []
    log.store.after_commit = remove_ann
    assert_committed(await log.submit(message(1)))
    assert_refused(await second[0], Reason.NOT_A_MEMBER)


# --- limits ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30")
async def test_body_above_the_limit_is_refused_with_field_and_limit() -> None:
    async with WatchedLog(body_bytes_max=4) as log:
        verdict = assert_refused(await log.submit(event(1, "12345")), Reason.MALFORMED)
        assert verdict.field == "body"
        assert "4" in verdict.message
        both = await log.submit_many([event(2, "1234"), event(3, "12345")])
        assert [assert_refused(verdict, Reason.MALFORMED).field for verdict in both] == ["body", "body"]
        assert not log.store.batches
        assert_committed(await log.submit(event(4, "1234")))


@pytest.mark.rule("CO-30")
async def test_request_with_too_many_items_is_refused_with_field_and_limit() -> None:
    async with WatchedLog(request_items_max=2) as log:
        verdicts = await log.submit_many([event(1), event(2), event(3)])
        assert [assert_refused(verdict, Reason.MALFORMED).field for verdict in verdicts] == ["items"] * 3
        assert "2" in assert_refused(verdicts[0], Reason.MALFORMED).message
        assert not log.store.batches
        assert await log.submit_many([]) == []


@pytest.mark.rule("CO-30")
async def test_request_larger_than_the_queue_is_accepted_when_the_queue_is_empty() -> None:
    async with WatchedLog(queue_items_max=2, queue_bytes_max=5) as log:
        verdicts = await log.submit_many([event(number) for number in range(1, 6)])
        assert [assert_committed(verdict).position for verdict in verdicts] == [1, 2, 3, 4, 5]
        too_large = await log.submit_many([event(number) for number in range(6, 12)])
        for verdict in too_large:
            assert assert_refused(verdict, Reason.MALFORMED).message == "items must total at most 5 bytes, not 6"


@pytest.mark.rule("CO-30")
async def test_values_of_operations_count_towards_the_body_limit() -> None:
    async with WatchedLog(body_bytes_max=100) as log:
        large = transaction(1, 1, SetEntity("k", bytes(100)))
        assert assert_refused(await log.submit(large), Reason.MALFORMED).message.startswith(
            "body must have at most 100"
        )


@pytest.mark.rule("CO-33")
async def test_submitting_an_unknown_type_raises_type_error(log: WatchedLog) -> None:
    for wrong in (None, {"type": "order.placed"}, "text", 1, object()):
        with pytest.raises(TypeError, match="must be a Submission or another Item"):
            await log.submit(wrong)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="must be a Submission or another Item"):
            await log.submit_many([event(1), wrong])  # type: ignore[arg-type]
    verdicts = await log.submit_many(event(number) for number in (1, 2))  # type: ignore[call-overload]
    assert [assert_committed(verdict).position for verdict in verdicts] == [1, 2]
