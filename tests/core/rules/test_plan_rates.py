"""Rates limit the new writes of an actor. test_plan_model.py generates histories with rates."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.item_builders import Log, assert_committed, assert_refused, assert_replayed, event, message, result
from oncelog.core.identity import compute_lane
from oncelog.core.limits import RATE_MAX
from oncelog.core.policy import RUNS
from oncelog.core.read_set import ReadSet, build_read_set
from oncelog.core.rules.quotas import FULL_AFTER_US_MAX, is_full
from oncelog.core.values import (
    Bucket,
    Claim,
    Committed,
    Granted,
    Mode,
    Rate,
    Reason,
    Request,
    SetMember,
    Settings,
    Submission,
    Verdict,
)

TWO = Rate(2, burst=2)


def build_rated_event(number: int, rate: Any = TWO, actor: str = "user:ann", **more: Any) -> Submission:
    return event(number, actor=actor, rate=rate, **more)


def waits_ms(verdict: Verdict) -> int:
    return assert_refused(verdict, Reason.RATE_LIMITED).retry_after_ms


# --- burst and refill --------------------------------------------------------------------------------


@pytest.mark.rule("CO-30")
def test_burst_is_accepted_immediately_and_refills_one_by_one() -> None:
    log = Log()
    assert [type(log(build_rated_event(number))) for number in (1, 2)] == [Committed, Committed]
    late = assert_refused(log(build_rated_event(3)), Reason.RATE_LIMITED)
    assert (late.retry_after_ms, late.message) == (
        500,
        "the rate limit for new writes is exceeded; try again in 500 ms",
    )
    log.now_ms += 499
    assert waits_ms(log(build_rated_event(3))) == 1
    log.now_ms += 1
    assert_committed(log(build_rated_event(3)))
    assert waits_ms(log(build_rated_event(4))) == 500
    log.now_ms += 10_000
    first, second, third = log.submit_request(build_rated_event(4), build_rated_event(5), build_rated_event(6))
    assert [assert_committed(first).position, assert_committed(second).position] == [4, 5]
    assert waits_ms(third) == 500


def test_burst_may_differ_from_the_rate_per_second() -> None:
    log = Log()
    assert [type(log(build_rated_event(number, Rate(1, burst=3)))) for number in range(1, 4)] == [Committed] * 3
    assert waits_ms(log(build_rated_event(4, Rate(1, burst=3)))) == 1000
    assert_committed(log(build_rated_event(11, Rate(1000, burst=1), actor="user:bob")))
    assert waits_ms(log(build_rated_event(12, Rate(1000, burst=1), actor="user:bob"))) == 1


def test_cost_of_a_write_is_rounded_up() -> None:
    """A write costs slightly more than a third of a second, so that the rate is never exceeded."""
    log = Log()
    three = Rate(3, burst=3)
    for number in range(1, 4):
        assert_committed(log(build_rated_event(number, three)))
    assert log.snapshot.rates == {("", "user:ann"): Bucket(log.now_ms * 1000 + 3 * 333_334)}
    log.now_ms += 1000
    assert [
        type(one).__name__
        for one in log.submit_separately(*[build_rated_event(number, three) for number in range(4, 8)])
    ] == [
        "Committed",
        "Committed",
        "Refused",
        "Refused",
    ]
    log.now_ms += 1
    assert_committed(log(build_rated_event(7, three)))


def test_rate_uses_log_time() -> None:
    log = Log()
    log.submit_request(build_rated_event(1), build_rated_event(2))
    log.now_ms -= 60_000
    assert waits_ms(log(build_rated_event(3))) == 500
    log(event(9, actor="user:bob"))
    assert waits_ms(log(build_rated_event(3))) == 500


def test_full_bucket_equals_a_missing_one() -> None:
    log = Log()
    log.submit_request(build_rated_event(1), build_rated_event(2))
    (bucket,) = log.snapshot.rates.values()
    assert (is_full(bucket, log.now_ms + 999), is_full(bucket, log.now_ms + 1000)) == (False, True)
    log.now_ms += 1000
    with_it = [
        type(one) for one in log.submit_request(build_rated_event(3), build_rated_event(4), build_rated_event(5))
    ]
    other = Log()
    other.now_ms = log.now_ms
    assert with_it == [
        type(one) for one in other.submit_request(build_rated_event(3), build_rated_event(4), build_rated_event(5))
    ]


# --- scope of a rate -----------------------------------------------------------------------------------


@pytest.mark.rule("CO-15", "CO-18")
def test_known_write_is_replayed_and_costs_nothing_when_the_rate_is_used_up() -> None:
    log = Log()
    receipt = assert_committed(log(build_rated_event(1)))
    for _ in range(5):
        assert assert_replayed(log(build_rated_event(1))).receipt == receipt
    assert_refused(log(replace(build_rated_event(1), fingerprint=b"other")), Reason.IDENTITY_REUSED)
    assert_committed(log(build_rated_event(2)))
    assert waits_ms(log(build_rated_event(3))) == 500
    assert assert_replayed(log(build_rated_event(1))).receipt == receipt
    first, twin, _ = log.submit_separately(
        build_rated_event(4, actor="user:bob"),
        build_rated_event(4, actor="user:bob"),
        build_rated_event(5, actor="user:bob"),
    )
    assert assert_replayed(twin).receipt == assert_committed(first)
    assert log.snapshot.rates["", "user:bob"] == Bucket(log.now_ms * 1000 + 1_000_000)


@pytest.mark.rule("CO-18")
def test_rate_is_the_last_check_and_refused_writes_cost_nothing() -> None:
    log = Log()
    one = Rate(1, burst=1)
    assert_refused(log(build_rated_event(1, one, expected_position=7)), Reason.UNEXPECTED_POSITION)
    assert_refused(log(build_rated_event(1, one), lambda _: "no"), Reason.INVALID)
    assert_refused(log(build_rated_event(1, one, known_only=True)), Reason.NOT_KNOWN)
    assert not log.snapshot.rates
    assert_committed(log(build_rated_event(1, one)))
    before = log.snapshot.rates["", "user:ann"]
    assert_refused(log(build_rated_event(2, one, expected_position=7)), Reason.UNEXPECTED_POSITION)
    assert_refused(log(build_rated_event(2, one), lambda _: "no"), Reason.INVALID)
    assert_refused(log(build_rated_event(2, one, known_only=True)), Reason.NOT_KNOWN)
    assert waits_ms(log(build_rated_event(2, one))) == 1000
    assert log.snapshot.rates["", "user:ann"] == before


def test_rates_are_per_actor_and_writes_without_rate_cost_nothing() -> None:
    log = Log()
    for number in range(10):
        assert_committed(log(event(number + 1, actor="user:ann")))
    assert not log.snapshot.rates
    log.submit_request(build_rated_event(21), build_rated_event(22))
    assert_refused(log(build_rated_event(23)), Reason.RATE_LIMITED)
    assert_committed(log(build_rated_event(24, actor="user:bob")))
    assert_committed(log(event(25, actor="user:ann")))


def test_event_rate_is_per_log_and_other_rates_are_per_stream() -> None:
    log = Log()
    for scope in ("chat/1", "chat/2"):
        log(SetMember(scope, "user:ann"))
    assert_committed(log(replace(build_rated_event(1), scope="project/1")))
    assert_committed(log(replace(build_rated_event(1), scope="project/2")))
    assert_refused(log(build_rated_event(1)), Reason.RATE_LIMITED)
    for number, scope in enumerate(("chat/1", "chat/2"), 10):
        assert_committed(log(message(number, scope=scope, rate=Rate(1, burst=1))))
        assert_refused(log(message(number + 5, scope=scope, rate=Rate(1, burst=1))), Reason.RATE_LIMITED)
    assert log.snapshot.rates.keys() == {("", "user:ann"), ("chat/1", "user:ann"), ("chat/2", "user:ann")}


def test_completion_under_a_lease_costs_nothing() -> None:
    log = Log()
    one = Rate(1, burst=1)
    assert_committed(log(replace(result(1), rate=one)))
    claim = Claim(policy=RUNS, scope="campaign/1", key=result(2).key, fingerprint=b"", holder="h")
    assert log(claim) == Granted(1, log.now_ms + 30_000)
    before = dict(log.snapshot.rates)
    assert_committed(log(replace(result(2, holder="h", fence=1), rate=one)))
    assert log.snapshot.rates == before
    assert_refused(log(replace(result(3), rate=one)), Reason.RATE_LIMITED)


# --- requests --------------------------------------------------------------------------------------------


def test_refused_request_costs_nothing() -> None:
    log = Log()
    log(event(9, "a"))
    verdicts = log.submit_request(build_rated_event(1), build_rated_event(2), event(9, "b"), mode=Mode.ALL)
    assert [assert_refused(one, Reason.NOT_PROCESSED).index for one in verdicts[:2]] == [2, 2]
    assert not log.snapshot.rates
    assert_committed(log(build_rated_event(1)))
    kept = dict(log.snapshot.rates)
    verdicts = log.submit_request(build_rated_event(2), build_rated_event(3), mode=Mode.ALL)
    assert_refused(verdicts[0], Reason.NOT_PROCESSED)
    assert waits_ms(verdicts[1]) == 500
    assert log.snapshot.rates == kept
    assert_committed(log(build_rated_event(2)))


def test_request_above_the_rate_is_accepted_in_part() -> None:
    log = Log()
    verdicts = log.submit_request(*[build_rated_event(number) for number in range(1, 6)])
    assert [type(one).__name__ for one in verdicts] == ["Committed"] * 2 + ["Refused"] * 3
    verdicts = log.submit_request(
        build_rated_event(1), build_rated_event(9), build_rated_event(2), mode=Mode.UNTIL_REFUSED
    )
    assert_replayed(verdicts[0])
    assert waits_ms(verdicts[1]) == 500
    assert_refused(verdicts[2], Reason.NOT_PROCESSED)


@pytest.mark.rule("EV-8")
def test_request_is_admitted_as_a_whole_or_commits_nothing() -> None:
    log = Log()
    log(build_rated_event(1))
    kept, head = dict(log.snapshot.rates), log.snapshot.heads[0]
    verdicts = log.submit_request(
        build_rated_event(1), build_rated_event(2), build_rated_event(3), is_admitted_whole=True
    )
    assert [assert_refused(one, Reason.NOT_PROCESSED).index for one in verdicts[:2]] == [2, 2]
    assert waits_ms(verdicts[2]) == 500
    assert (log.snapshot.rates, log.snapshot.heads[0]) == (kept, head)
    log.now_ms += 499
    assert (
        waits_ms(
            log.submit_request(
                build_rated_event(1), build_rated_event(2), build_rated_event(3), is_admitted_whole=True
            )[2]
        )
        == 1
    )
    log.now_ms += 1
    known, *new = log.submit_request(
        build_rated_event(1), build_rated_event(2), build_rated_event(3), is_admitted_whole=True
    )
    assert assert_replayed(known).receipt is not None
    assert [assert_committed(one).position for one in new] == [2, 3]
    assert [
        type(one).__name__
        for one in log.submit_request(
            build_rated_event(1), build_rated_event(2), build_rated_event(3), is_admitted_whole=True
        )
    ] == ["Replayed"] * 3


@pytest.mark.rule("EV-8")
def test_request_larger_than_the_burst_waits_for_a_full_bucket_and_repays() -> None:
    log = Log()
    many = [build_rated_event(number) for number in range(11, 16)]
    log(build_rated_event(1))
    assert waits_ms(log.submit_request(*many, is_admitted_whole=True)[-1]) == 500
    log.now_ms += 500
    assert [assert_committed(one).position for one in log.submit_request(*many, is_admitted_whole=True)] == [
        2,
        3,
        4,
        5,
        6,
    ]
    assert waits_ms(log(build_rated_event(2))) == 2000
    assert (
        waits_ms(
            log.submit_request(
                build_rated_event(2), build_rated_event(3), build_rated_event(4), is_admitted_whole=True
            )[-1]
        )
        == 2500
    )
    log.now_ms += 2000
    assert_committed(log(build_rated_event(2)))


@pytest.mark.rule("EV-8", "EV-9")
def test_rejected_items_of_an_admitted_request_keep_their_own_verdicts() -> None:
    log = Log()
    log(event(9, "a"))
    wrong, new = log.submit_request(
        event(9, "b", actor="user:ann", rate=TWO), build_rated_event(1), is_admitted_whole=True
    )
    assert_refused(wrong, Reason.IDENTITY_REUSED)
    assert_committed(new)
    new, wrong, behind = log.submit_request(
        build_rated_event(2),
        event(9, "b", actor="user:ann", rate=TWO),
        build_rated_event(3),
        mode=Mode.UNTIL_REFUSED,
        is_admitted_whole=True,
    )
    assert_committed(new)
    assert_refused(wrong, Reason.IDENTITY_REUSED)
    assert_refused(behind, Reason.NOT_PROCESSED)


@pytest.mark.rule("EV-8")
def test_requests_of_one_batch_are_admitted_one_by_one() -> None:
    log = Log()
    requests = [Request((build_rated_event(n), build_rated_event(n + 1)), is_admitted_whole=True) for n in (1, 3)]
    first, second = log.submit([*requests, Request((event(8),))], log.now_ms)[:2]
    assert [assert_committed(one).position for one in first] == [1, 2]
    assert waits_ms(second[1]) == 1000
    assert log.snapshot.heads[0].position == 3


# --- read set and validation -----------------------------------------------------------------------------


def test_read_set_contains_a_rate_only_if_there_is_one() -> None:
    lane = compute_lane("chat/1", Settings().lanes)
    chat = message(1, rate=TWO)
    needs = build_read_set([Request((build_rated_event(1), event(2, actor="user:bob"), chat))], Settings())
    assert needs.rates == {("", "user:ann"), ("chat/1", "user:ann")}
    assert needs.lanes == {0, lane}
    assert build_read_set([Request((event(1),))], Settings()).rates == ReadSet().rates == set()


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize(
    "rate",
    [
        Rate(0, 1),
        Rate(1, 0),
        Rate(-1, 1),
        Rate(RATE_MAX + 1, 1),
        Rate(1, RATE_MAX + 1),
        Rate(1.5, 1),  # type: ignore[arg-type]
        Rate(True, 1),
        (1, 1),
        1,
    ],
)
def test_invalid_rate_is_malformed(rate: Any) -> None:
    log = Log()
    wrong = assert_refused(log(build_rated_event(1, rate)), Reason.MALFORMED)
    assert (wrong.field, wrong.message.split()[:2]) == ("rate", ["rate", "must"])
    assert build_read_set([Request((build_rated_event(1, rate),))], Settings()).rates == set()


def test_slowest_rate_with_largest_burst_stays_within_its_bound() -> None:
    log = Log()
    widest = Rate(1, burst=RATE_MAX)
    full_at_us = log.now_ms * 1000 + FULL_AFTER_US_MAX
    log.snapshot.rates["", "user:ann"] = Bucket(full_at_us - 1_000_000)  # type: ignore[index]
    assert_committed(log(build_rated_event(1, widest)))
    assert log.snapshot.rates == {("", "user:ann"): Bucket(full_at_us)}
    assert waits_ms(log(build_rated_event(2, widest))) == 1000


# --- random writes ---------------------------------------------------------------------------------------

rates = st.builds(Rate, st.integers(1, 2000) | st.just(RATE_MAX), st.integers(1, 8))
pauses_ms = st.lists(st.integers(-5, 30) | st.sampled_from([0, 0, 0, 333, 334, 500, 1000, 1001, 5000]), max_size=60)


@given(rates, pauses_ms)
def test_no_interval_exceeds_the_rate(rate: Rate, pauses: Sequence[int]) -> None:
    """A refused write is accepted at the reported retry time and not earlier."""
    log = Log()
    times: list[int] = []
    for number, pause_ms in enumerate(pauses, 1):
        log.now_ms += pause_ms
        verdict = log(build_rated_event(number, rate))
        if not isinstance(verdict, Committed):
            log.now_ms = max(log.now_ms, log.snapshot.heads[0].log_time_ms) + waits_ms(verdict) - 1
            assert waits_ms(log(build_rated_event(number, rate))) == 1
            log.now_ms += 1
            verdict = log(build_rated_event(number, rate))
        times.append(assert_committed(verdict).log_time_ms)
    for first, start_ms in enumerate(times):
        for count, end_ms in enumerate(times[first:], 1):
            assert (count - rate.burst) * 1000 <= (end_ms - start_ms) * rate.per_second
