"""The invariants accept every history that `plan` produces, and detect every kind of damage to it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.invariants import INVARIANTS, Answer, History, ObservedRead, ObservedSync, find_violations
from core.item_builders import DAY_MS, Log, event, key, message, transaction
from oncelog.core.policy import AUDIT_POLICY
from oncelog.core.values import (
    Acknowledge,
    Committed,
    KeyIdentity,
    Member,
    Mode,
    Reason,
    Record,
    Refused,
    Replayed,
    Roster,
    SetMember,
    Submission,
    Verdict,
    key_identity,
)


def identity_of(number: int) -> KeyIdentity:
    return ("events", "", "", key(number))


def run(writes: list[Submission], log: Log | None = None) -> History:
    """Submit all writes, read all records and return the recorded history."""
    log = log or Log()
    for scope in ("chat/1", "chat/2"):
        log(SetMember(scope, "user:ann"))
    answers = [Answer(key_identity(write), write.fingerprint, log(write), write.client_sequence) for write in writes]
    for scope, last in log.snapshot.streams.items():
        if scope.startswith("chat/"):
            log(Acknowledge(scope, "user:ann", last))
    seen = [(record.position, ("events", "", "", record.key)) for record in log.records if record.lane == 0]
    return History(
        records=list(log.records),
        settings=log.snapshot.settings,
        answers=answers,
        readings=[ObservedRead("reader", 0, 0, len(seen), seen)],
        syncs=[ObservedSync("ann", scope, 0, last, range(1, last + 1)) for scope, last in log.snapshot.streams.items()],
        acknowledged=dict(log.snapshot.acknowledged),
        members=dict(log.snapshot.members),
        rosters=dict(log.snapshot.rosters),
        keys=dict(log.snapshot.keys),
        streams=dict(log.snapshot.streams),
        positions={lane: head.position for lane, head in log.snapshot.heads.items()},
    )


def build_history() -> History:
    writes = [event(1), event(2, partitions=("p",)), event(1), event(2, "other"), event(3)]
    writes += [message(1), message(2), message(1), message(1, scope="chat/2"), transaction(1, 1), transaction(None, 2)]
    return run(writes)


@pytest.mark.rule("CH-13", "CO-10", "CO-11", "CO-12", "CO-13", "CO-14")
def test_valid_history_has_no_violations() -> None:
    assert find_violations(build_history()) == []
    assert find_violations(History(records=[])) == []


@pytest.mark.rule("CH-13", "CO-10", "CO-11", "CO-12", "CO-14")
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("xy"), st.sampled_from("emtno")), max_size=30))
def test_generated_histories_have_no_violations(writes: list[tuple[int, str, str]]) -> None:
    kinds: dict[str, Callable[[int, str], Submission]] = {
        "e": event,
        "m": message,
        "t": lambda number, content: transaction(number, number, content=content),
        "n": lambda number, content: transaction(None, number, content=content),
        "o": lambda number, content: transaction(number + 10, number, content=content),
    }
    assert find_violations(run([kinds[kind](number, content) for number, content, kind in writes])) == []


@pytest.mark.rule("CH-5", "CH-13", "LG-16")
def test_reuse_of_an_expired_key_is_not_a_violation() -> None:
    log = Log(eviction_interval=1)
    early = run([message(1), transaction(1, 1)], log)
    assert find_violations(early) == []
    log.now_ms += 8 * DAY_MS
    history = run([transaction(1, 1, client="c2"), message(1), transaction(1, 1)], log)
    assert len(list_submissions(history.records)) == 5
    assert find_violations(history) == []
    assert violated_invariants(replace(history, records=[replace(one, log_time_ms=5) for one in history.records])) >= {
        "idempotency_guarantee"
    }


def list_submissions(records: Sequence[Record]) -> list[Record]:
    """Return the records without the audit records of added members."""
    return [record for record in records if record.policy != AUDIT_POLICY]


def violated_invariants(history: History) -> set[str]:
    return {violation.invariant for violation in find_violations(history)}


def damaged_history(**changes: Any) -> History:
    return replace(build_history(), **changes)


def test_invariant_names_are_unique() -> None:
    assert len({getattr(invariant, "__name__", "") for invariant in INVARIANTS}) == len(INVARIANTS) == 11


@pytest.mark.rule("CH-19")
@pytest.mark.parametrize(
    "change",
    [
        {"rosters": {}},
        {"members": {}},
        {"members": {("chat/1", "user:ann"): Member(1), ("chat/2", "user:ann"): Member(1, is_owner=True)}},
        {"members": {("chat/1", "user:ann"): Member(2, is_owner=True), ("chat/2", "user:ann"): Member(1, True)}},
        {
            "members": {("chat/1", "user:ann"): Member(1), ("chat/2", "user:ann"): Member(1)},
            "rosters": {"chat/1": Roster(1, 0, 1), "chat/2": Roster(1, None, 1)},
        },
    ],
)
def test_stream_without_owner_or_with_a_wrong_roster_is_found(change: dict[str, Any]) -> None:
    assert violated_invariants(damaged_history(**change)) == {"streams_have_owners"}


@pytest.mark.rule("CH-13")
def test_sequence_gap_or_repetition_is_found() -> None:
    records = [replace(one, sequence=1) if one.policy == "chat" else one for one in build_history().records]
    assert "sequence_monotonic" in violated_invariants(damaged_history(records=records))


@pytest.mark.rule("CO-17")
def test_decreasing_log_time_is_found() -> None:
    records = [replace(one, log_time_ms=5) if one.position == 3 else one for one in build_history().records]
    assert "log_time_never_goes_back" in violated_invariants(damaged_history(records=records))


@pytest.mark.rule("CH-2", "CH-13")
def test_stream_in_two_lanes_is_found() -> None:
    records = [
        replace(one, lane=9) if (one.policy, one.sequence) == ("chat", 2) else one for one in build_history().records
    ]
    assert "sequence_monotonic" in violated_invariants(damaged_history(records=records))


@pytest.mark.rule("LG-6", "CO-14")
def test_repeated_client_sequence_is_found() -> None:
    history = build_history()
    (numbered,) = [one for one in history.records if one.client_sequence == 2]
    for again in (replace(numbered, position=3, sequence=3), replace(numbered, position=3, sequence=3, key=key(8))):
        assert "idempotency_guarantee" in violated_invariants(damaged_history(records=[*history.records, again]))


@pytest.mark.rule("CH-13", "CO-14")
def test_two_records_under_one_key_are_found() -> None:
    records = build_history().records
    twice = [*records, replace(list_submissions(records)[0], position=4)]
    assert "idempotency_guarantee" in violated_invariants(damaged_history(records=twice))
    assert "idempotency_guarantee" in violated_invariants(damaged_history(policies={}))


@pytest.mark.rule("CH-13")
def test_incomplete_sync_is_found() -> None:
    assert violated_invariants(damaged_history(syncs=[ObservedSync("ann", "chat/1", 0, 2, [2])])) == {
        "sync_completeness"
    }
    assert violated_invariants(damaged_history(syncs=[ObservedSync("ann", "chat/1", 1, 2, [2])])) == set()
    assert violated_invariants(damaged_history(syncs=[ObservedSync("ann", "chat/1", 0, 1, [1])])) == set()


@pytest.mark.rule("CH-13")
def test_inconsistent_delivery_state_is_found() -> None:
    assert violated_invariants(damaged_history(acknowledged={("chat/1", "user:ann"): 3})) == {
        "delivery_state_consistency"
    }
    assert violated_invariants(damaged_history(acknowledged={("chat/none", "user:ann"): 1})) == {
        "delivery_state_consistency"
    }


@pytest.mark.rule("CO-10")
def test_partial_commit_is_found() -> None:
    history = build_history()
    assert history.keys is not None
    assert history.streams is not None
    assert history.positions is not None
    known = next(iter(history.keys))
    other_place = replace(history.keys[known], fingerprint=b"other")
    changes: list[dict[str, Any]] = [
        {"keys": {one: what for one, what in history.keys.items() if one != known}},
        {"keys": {**history.keys, ("events", "", "", key(99)): history.keys[known]}},
        {"keys": {**history.keys, known: other_place}},
        {"streams": {**history.streams, "chat/1": 3}},
        {"streams": {}},
        {"positions": {**history.positions, 0: 2}},
        {"keys": {one: what for one, what in history.keys.items() if one[0] != "chat"}},
        {"keys": {one: what for one, what in history.keys.items() if one[0] != "ledger"}},
    ]
    for change in changes:
        assert violated_invariants(damaged_history(**change)) == {"commits_are_whole"}, change


@pytest.mark.rule("CO-10")
@pytest.mark.parametrize("lost", [0, 1])
def test_missing_record_is_found_despite_a_correct_head(lost: int) -> None:
    events = [record for record in build_history().records if record.lane == 0]
    missing = [record for record in build_history().records if record != events[lost]]
    assert "commits_are_whole" in violated_invariants(
        damaged_history(records=missing, keys=None, answers=[], readings=[])
    )
    messages = [replace(one, sequence=3) if one.sequence == 2 else one for one in build_history().records]
    assert "commits_are_whole" in violated_invariants(damaged_history(records=messages, streams=None))


@pytest.mark.rule("CO-11")
def test_answer_without_receipt_needs_a_client_sequence() -> None:
    nowhere = [Answer(identity_of(77), b"x", Replayed(None))]
    assert violated_invariants(damaged_history(answers=nowhere)) == {"answers_are_durable"}
    assert (
        violated_invariants(
            damaged_history(answers=[Answer(("ledger", "org/1", "c1", key(77)), b"x", Replayed(None), 1)])
        )
        == set()
    )


@pytest.mark.rule("CO-11")
def test_answer_without_record_is_found() -> None:
    history = build_history()
    lost = [record for record in history.records if record.key != key(3) or record.policy != "events"]
    assert "answers_are_durable" in violated_invariants(damaged_history(records=lost))
    receipt = list_submissions(history.records)[0].receipt
    moved = Answer(identity_of(1), b"x", Committed(replace(receipt, log_time_ms=7)))
    assert violated_invariants(damaged_history(answers=[moved])) == {"answers_are_durable"}


@pytest.mark.rule("CO-12")
def test_reused_number_is_found() -> None:
    history = build_history()
    other = Answer(identity_of(9), b"x", Committed(history.records[0].receipt))
    assert "numbers_are_never_reused" in violated_invariants(damaged_history(answers=[*history.answers, other]))
    remembered_otherwise = ObservedRead("before the crash", 0, 2, 3, [(3, identity_of(8))])
    assert violated_invariants(damaged_history(readings=[remembered_otherwise])) == {"numbers_are_never_reused"}
    message_twice = [
        replace(one, sequence=1, key=key(50 + one.position)) if one.policy == "chat" else one for one in history.records
    ]
    assert "numbers_are_never_reused" in violated_invariants(
        damaged_history(records=message_twice, keys=None, answers=[])
    )


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("seen", [[1, 3], [1, 2], [1, 2, 2, 3], [2, 1, 3], [1, 2, 3, 4], []])
def test_event_missed_by_a_reader_is_found(seen: list[int]) -> None:
    reading = ObservedRead("reader", 0, 0, 3, [(position, identity_of(position)) for position in seen])
    assert "readers_miss_nothing" in violated_invariants(damaged_history(readings=[reading]))


@pytest.mark.rule("CO-13")
def test_partition_reader_is_checked_against_its_partition() -> None:
    assert (
        violated_invariants(damaged_history(readings=[ObservedRead("reader", 0, 0, 3, [(2, identity_of(2))], "p")]))
        == set()
    )
    assert violated_invariants(damaged_history(readings=[ObservedRead("reader", 0, 2, 3, [], "p")])) == set()
    assert violated_invariants(damaged_history(readings=[ObservedRead("reader", 0, 0, 3, [], "p")])) == {
        "readers_miss_nothing"
    }


@pytest.mark.rule("CO-14")
def test_two_outcomes_of_one_identity_are_found() -> None:
    history = build_history()
    reused: Verdict = Refused(Reason.IDENTITY_REUSED, "")
    success: Verdict = Committed(list_submissions(history.records)[0].receipt)
    first = Answer(identity_of(1), b"x", success)
    assert violated_invariants(damaged_history(answers=[first])) == set()
    assert violated_invariants(damaged_history(answers=[Answer(identity_of(1), b"other", success)])) == {
        "one_outcome_each_identity"
    }
    differs: list[Verdict] = [
        reused,
        Refused(Reason.SEQUENCE_REUSED, ""),
        Replayed(list_submissions(history.records)[0].receipt, mismatch=True),
    ]
    for verdict in differs:
        told = Answer(identity_of(1), b"x", verdict)
        assert violated_invariants(damaged_history(answers=[first, told])) == {"one_outcome_each_identity"}
        assert violated_invariants(damaged_history(answers=[told])) == set(), "correct before the first commit"
    assert violated_invariants(damaged_history(answers=[first, first])) == {"one_outcome_each_identity"}
    (hello, *_) = [one for one in history.records if one.policy == "chat"]
    identity = ("chat", hello.scope, "", hello.key)
    for mismatch, wrong in ((True, set()), (False, {"one_outcome_each_identity"})):
        told = Answer(identity, b"other", Replayed(hello.receipt, mismatch=mismatch))
        assert violated_invariants(damaged_history(answers=[told])) == wrong


@pytest.mark.rule("CO-14", "LG-13")
def test_retry_by_client_sequence_does_not_bind_its_key() -> None:
    log = Log()
    first, by_number, other = transaction(1, 1), transaction(2, 1), transaction(2, 2, content="y")
    answers = [
        Answer(key_identity(one), one.fingerprint, log(one), one.client_sequence) for one in (first, by_number, other)
    ]
    assert [type(answer.verdict) for answer in answers] == [Committed, Replayed, Committed]
    assert find_violations(History(records=list(log.records), answers=answers)) == []


@pytest.mark.rule("CO-14")
def test_wrong_refusal_before_the_commit_is_found() -> None:
    log = Log()
    first, second = event(1, "x"), event(1, "y")
    verdicts = log.submit_request(first, second, mode=Mode.ALL)
    answers = [
        *(
            Answer(key_identity(one), one.fingerprint, verdict)
            for one, verdict in zip((first, second), verdicts, strict=True)
        ),
        Answer(key_identity(second), second.fingerprint, log(second)),
    ]
    assert find_violations(History(records=list(log.records), answers=answers)) == []


@pytest.mark.rule("LG-15", "CH-5", "CH-13")
@pytest.mark.parametrize(
    ("make", "ttl_ms", "is_free_at_ttl"), [(message, 7 * DAY_MS, True), (lambda n: transaction(n, n), DAY_MS, False)]
)
def test_retention_limits_equal_those_of_plan(
    make: Callable[[int], Submission], ttl_ms: int, is_free_at_ttl: bool
) -> None:
    """Build two records of one key by hand, and check for which time differences the second one is allowed."""
    for distance_ms, is_free in ((ttl_ms - 1, False), (ttl_ms, is_free_at_ttl), (ttl_ms + 1, True)):
        log = Log(eviction_interval=2)
        run([make(1)], log)
        (first,) = list_submissions(log.records)
        first = replace(first, position=1)
        later_ms = first.log_time_ms + distance_ms
        evicting = replace(first, position=2, sequence=2, key=key(2), client="c2", log_time_ms=later_ms)
        second = replace(first, position=3, sequence=3, log_time_ms=later_ms)
        history = History(records=[first, evicting, second], settings=log.snapshot.settings)
        assert ("idempotency_guarantee" in violated_invariants(history)) == (not is_free), distance_ms
