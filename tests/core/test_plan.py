"""The one decision, rule by rule. test_plan_model.py compares it with an independent model on generated histories."""

from typing import Any

import pytest
from msgspec.structs import replace

from core.writes import (
    DAY_MS,
    HOUR_MS,
    Log,
    committed,
    delta,
    event,
    key,
    message,
    refused,
    replayed,
    result,
    transaction,
)
from oncelog.core.footprint import Footprint, footprint
from oncelog.core.limits import LEASE_MEMORY_MS, LEASE_MS_MAX, ROW_BYTES_MAX
from oncelog.core.merge import Op
from oncelog.core.operations import Condition, DeleteEntity, Entity, Must, Relate, SetEntity, Unrelate
from oncelog.core.plan import known_answer, plan
from oncelog.core.policy import EVENTS, FOREVER, RUNS, OnReuse, Order, Policy, kept_for
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Claim,
    Committed,
    Granted,
    Item,
    LaneHead,
    Mode,
    OpenStream,
    Rate,
    Reason,
    Refused,
    Release,
    Renew,
    Request,
    SetCursor,
    SetMember,
    Settings,
    Snapshot,
    Submission,
    key_identity,
)

# --- identity ----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-3", "EV-4", "CO-15")
def test_a_retry_gets_the_first_answer_and_writes_nothing() -> None:
    log = Log()
    receipt = committed(log(event(1)))
    assert (receipt.lane, receipt.position, receipt.log_time_ms, receipt.height) == (0, 1, 1_000_000, 1)
    assert committed(log(event(2))).position == 2
    log.now_ms += 5000
    again = plan([Request((event(1, client="another"),))], log.snapshot, log.now_ms)
    assert replayed(again.verdicts[0][0]).receipt == receipt
    changes = again.changes
    assert not any(getattr(changes, name) for name in changes.__struct_fields__)
    assert changes.is_empty


@pytest.mark.rule("EV-5", "LG-12")
def test_other_content_under_a_known_identity_is_refused() -> None:
    log = Log()
    log(event(1, "x"))
    assert refused(log(event(1, "y")), Reason.IDENTITY_REUSED).field == "key"
    log(transaction(1, 1, content="x"))
    refused(log(transaction(1, 2, content="y")), Reason.IDENTITY_REUSED)
    assert [record.position for record in log.records] == [1, 1]


@pytest.mark.rule("CO-14")
def test_two_of_one_identity_in_one_group_commit_commit_once() -> None:
    log = Log()
    first, second, other, conflict = log.apart(event(1), event(1), event(2), event(1, "y"))
    assert replayed(second).receipt == committed(first)
    assert committed(other).position == 2
    refused(conflict, Reason.IDENTITY_REUSED)


@pytest.mark.rule("CH-4", "DE-4")
def test_where_the_first_content_wins_a_retry_with_other_content_is_told_so() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    receipt = committed(log(message(1, "hello")))
    assert not replayed(log(message(1, "hello"))).mismatch
    answer = replayed(log(message(1, "goodbye")))
    assert answer.receipt == receipt
    assert answer.mismatch
    assert [record.body for record in log.records] == [b"hello"]
    inserted = committed(log(delta(1, op=Op.INSERT, a="1")))
    assert replayed(log(delta(1, op=Op.DELETE))) == replayed(log(delta(1, op=Op.UPDATE)))
    assert replayed(log(delta(1, op=Op.INSERT, a="1"))).receipt == inserted


@pytest.mark.rule("CO-41")
def test_a_retry_of_what_was_erased_is_told_so() -> None:
    log = Log()
    receipt = committed(log(event(1)))
    identity = ("events", "", "", key(1))
    keys = {identity: replace(log.snapshot.keys[identity], erased=True)}
    verdicts = plan([Request((event(1),))], replace(log.snapshot, keys=keys), log.now_ms).verdicts
    assert replayed(verdicts[0][0]).erased
    assert replayed(verdicts[0][0]).receipt == receipt
    log(transaction(1, 1))
    number = ("ledger", "org/1", "c1", 1)
    sequences = {number: replace(log.snapshot.sequences[number], erased=True)}
    verdicts = plan([Request((transaction(None, 1),))], replace(log.snapshot, sequences=sequences), log.now_ms).verdicts
    assert replayed(verdicts[0][0]).erased


@pytest.mark.rule("CO-15", "CO-41")
@pytest.mark.parametrize("erased", [False, True])
@pytest.mark.parametrize("content", ["x", "y"])
def test_what_is_remembered_is_enough_for_the_answer(content: str, erased: bool) -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    log.apart(event(1, "x"), message(1, "x"), result(1))
    log.snapshot.keys = {name: replace(it, erased=erased) for name, it in log.snapshot.keys.items()}
    for item in (event(1, content), message(1, content), replace(claim(1, "a"), fingerprint=content.encode())):
        assert known_answer(item, log.snapshot.keys[key_identity(item)]) == log(item)


@pytest.mark.rule("RU-8", "LG-7", "CH-3")
def test_scopes_do_not_share_identities() -> None:
    log = Log()
    for scope in ("campaign/1", "campaign/2"):
        assert committed(log(result(1, scope=scope))).sequence == 1
    for scope in ("org/1", "org/1/vault/1", "org/1/vault/2"):
        assert committed(log(transaction(1, 1, scope=scope))).sequence == 1
    assert committed(log(transaction(1, 1, client="c2"))).sequence == 2
    log(SetMember("chat/1", "user:ann"))
    log(SetMember("chat/1", "user:bob"))
    first = committed(log(message(1)))
    assert replayed(log(message(1, actor="user:bob"))).receipt == first


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-2", "RU-6")
def test_each_stream_has_its_own_dense_sequence() -> None:
    log = Log()
    for scope in ("campaign/1", "campaign/2"):
        assert [committed(log(result(number, scope=scope))).sequence for number in (1, 2, 3)] == [1, 2, 3]
    assert log.snapshot.streams == {"campaign/1": 3, "campaign/2": 3}
    assert [record.sequence for record in log.records if record.scope == "campaign/2"] == [1, 2, 3]


@pytest.mark.rule("CO-12", "CO-17")
def test_log_time_never_goes_back_and_refused_writes_leave_no_gap() -> None:
    log = Log()
    times = []
    for number, now_ms in enumerate([5_000, 9_000, 2_000, 9_001], start=1):
        log.now_ms = now_ms
        times.append(committed(log(event(number))).log_time_ms)
        refused(log(event(number, "other")), Reason.IDENTITY_REUSED)
    assert times == [5_000, 9_000, 9_000, 9_001]
    assert [record.position for record in log.records] == [1, 2, 3, 4]
    assert log.snapshot.heads[0].log_time_ms == 9_001


def test_a_group_commit_is_one_block_in_each_lane_it_writes() -> None:
    log = Log()
    log.apart(event(1), event(2), result(1))
    log.apart(event(3), result(1))
    assert [(block.lane == 0, block.height, block.count) for block in log.blocks] == [
        (True, 1, 2),
        (False, 1, 1),
        (True, 2, 1),
    ]
    assert [record.height for record in log.records if record.lane == 0] == [1, 1, 2]


# --- requests ----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-8")
def test_items_are_independent_unless_the_request_says_otherwise() -> None:
    log = Log()
    log(event(1))
    first, second, third = log.together(event(2), event(1, "other"), event(3))
    refused(second, Reason.IDENTITY_REUSED)
    assert [committed(first).position, committed(third).position] == [2, 3]


@pytest.mark.rule("DE-6", "DE-8")
def test_all_or_nothing_leaves_nothing_behind() -> None:
    log = Log(eviction_interval=1)
    log(delta(1, op=Op.INSERT, a="1"))
    before = [dict(getattr(log.snapshot, name)) for name in ("heads", "keys", "streams", "rows")]
    ahead = delta(4, hlc=(log.now_ms + 5001) << 16, a="9")
    verdicts = log.together(delta(2, 1, a="2"), delta(1, a="1"), delta(3, 2, b="3"), ahead, delta(5), mode=Mode.ALL)
    assert refused(verdicts[3], Reason.CLOCK_DRIFT).field == "hlc"
    for index in (0, 1, 2, 4):
        assert refused(verdicts[index], Reason.NOT_PROCESSED).index == 3
    assert [dict(getattr(log.snapshot, name)) for name in ("heads", "keys", "streams", "rows")] == before
    assert [committed(one).sequence for one in log.together(delta(2, 1, a="2"), delta(3, 2), mode=Mode.ALL)] == [2, 3]


@pytest.mark.rule("DE-6")
def test_a_request_that_came_to_nothing_does_not_disturb_its_neighbours() -> None:
    log = Log()
    ahead = delta(9, hlc=(log.now_ms + 9999) << 16)
    requests = [
        Request((delta(1, a="1"),), Mode.ALL),
        Request((delta(2, 5, a="2"), ahead), Mode.ALL),
        Request((delta(3, 3, b="3"), delta(2, 5, a="2")), Mode.ALL),
    ]
    first, second, third = log.submit(requests, log.now_ms)
    assert committed(first[0]).sequence == 1
    refused(second[0], Reason.NOT_PROCESSED)
    assert [committed(one).sequence for one in third] == [2, 3]
    assert log.snapshot.rows["gateway/1", "todos", "r1"].values == {"a": b"2", "b": b"3"}
    assert [record.position for record in log.records] == [1, 2, 3]


@pytest.mark.rule("EV-18")
def test_until_refused_keeps_what_stands_before() -> None:
    log = Log()
    log(event(1))
    verdicts = log.together(event(2), event(1, "other"), event(3), event(4), mode=Mode.UNTIL_REFUSED)
    assert committed(verdicts[0]).position == 2
    refused(verdicts[1], Reason.IDENTITY_REUSED)
    assert [refused(one, Reason.NOT_PROCESSED).index for one in verdicts[2:]] == [1, 1]
    assert len(log.records) == 2


# --- client sequences --------------------------------------------------------------------------------


@pytest.mark.rule("LG-4", "LG-5", "LG-6", "LG-9")
def test_a_client_numbers_its_writes_without_gaps() -> None:
    log = Log()
    assert refused(log(transaction(1, 2)), Reason.SEQUENCE_GAP).current == 0
    assert refused(log(transaction(1, 0)), Reason.MALFORMED).field == "client_sequence"
    assert committed(log(transaction(1, 1))).client_sequence == 1
    assert committed(log(transaction(2, 2))).client_sequence == 2
    assert refused(log(transaction(9, 4)), Reason.SEQUENCE_GAP).current == 2
    entry = log.snapshot.clients["ledger", "org/1", "c1"]
    assert (entry.sequence, entry.last_seen_ms, entry.last_key, entry.last_fingerprint) == (2, 1_000_000, key(2), b"x")


@pytest.mark.rule("LG-4", "LG-11")
def test_a_known_key_is_answered_by_its_key_whatever_number_it_comes_with() -> None:
    log = Log()
    first = committed(log(transaction(1, 1)))
    second = committed(log(transaction(2, 2)))
    for sequence in (1, 2, 3, 77):
        assert replayed(log(transaction(1, sequence))).receipt == first
    assert replayed(log(transaction(2, 1))).receipt == second


@pytest.mark.rule("LG-6", "LG-13")
def test_an_old_number_is_a_retry_or_a_mistake_but_never_new() -> None:
    log = Log()
    first = committed(log(transaction(1, 1, content="one")))
    committed(log(transaction(2, 2, content="two")))
    assert replayed(log(transaction(None, 1, content="one"))).receipt == first
    assert replayed(log(transaction(7, 1, content="one"))).receipt == first
    assert refused(log(transaction(7, 1, content="two")), Reason.SEQUENCE_REUSED).current == 2
    refused(log(transaction(None, 2, content="one")), Reason.SEQUENCE_REUSED)
    assert len(log.records) == 2


@pytest.mark.rule("LG-13")
def test_a_write_may_come_without_a_key_and_be_retried_by_its_number() -> None:
    log = Log()
    receipt = committed(log(transaction(None, 1)))
    assert replayed(log(transaction(None, 1))).receipt == receipt
    assert committed(log(transaction(None, 2))).client_sequence == 2
    assert not log.snapshot.keys


@pytest.mark.rule("LG-13", "LG-15")
def test_an_old_number_whose_record_was_evicted_is_known_to_have_committed() -> None:
    log = Log(eviction_interval=1)
    log(transaction(1, 1))
    log.now_ms += DAY_MS
    log(transaction(2, 2))
    log.now_ms += 1
    log(transaction(3, 3))
    assert replayed(log(transaction(1, 1))).receipt is None
    assert replayed(log(transaction(9, 1, content="other"))).receipt is None
    assert replayed(log(transaction(2, 2))).receipt is not None


@pytest.mark.rule("LG-15")
def test_eviction_is_strict_and_happens_at_its_positions_only() -> None:
    def last_of(eviction_interval: int, later_ms: int) -> int:
        """What a write of the client's next number is told after others have written."""
        log = Log(eviction_interval=eviction_interval)
        log(transaction(1, 1))
        log.now_ms += later_ms
        log(transaction(1, 1, client="c2"))
        return refused(log(transaction(99, 9)), Reason.SEQUENCE_GAP).current

    assert last_of(1, DAY_MS) == 1, "exactly the time to live is not older than it"
    assert last_of(1, DAY_MS + 1) == 0
    assert last_of(2, DAY_MS + 1) == 0, "position 2 evicts"
    assert last_of(3, DAY_MS + 1) == 1, "no eviction before position 3"


@pytest.mark.rule("LG-15")
def test_the_record_at_an_evicting_position_applies_first() -> None:
    log = Log(eviction_interval=2)
    log(transaction(1, 1))
    log.now_ms += 2 * DAY_MS
    assert committed(log(transaction(2, 2))).position == 2
    assert committed(log(transaction(3, 3))).client_sequence == 3
    assert refused(log(transaction(1, 7)), Reason.SEQUENCE_GAP).current == 3, "the old key is gone, the client is not"


@pytest.mark.rule("LG-15")
def test_a_batch_that_crosses_an_eviction_decides_as_single_writes_do() -> None:
    together, single = Log(eviction_interval=2), Log(eviction_interval=2)
    for log in (together, single):
        log(transaction(1, 1))
        log.now_ms += 2 * DAY_MS
    writes = [transaction(1, 1, client="c2"), transaction(2, 2), transaction(1, 1), transaction(3, 2, client="c2")]
    in_one = together.apart(*writes)
    one_by_one = [single(write) for write in writes]
    assert [type(one) for one in in_one] == [type(one) for one in one_by_one]
    refused(in_one[1], Reason.SEQUENCE_GAP)
    assert committed(in_one[2]).position == 3
    assert together.snapshot.clients == single.snapshot.clients
    assert together.snapshot.heads.keys() == single.snapshot.heads.keys()


@pytest.mark.rule("LG-16")
def test_an_evicted_client_is_a_client_never_seen_and_a_clock_that_goes_back_evicts_nothing() -> None:
    log = Log(eviction_interval=1)
    log(transaction(1, 1))
    log(transaction(2, 2))
    log.now_ms -= 3 * DAY_MS
    log(transaction(1, 1, client="c2"))
    assert replayed(log(transaction(1, 1))).receipt is not None
    log.now_ms += 7 * DAY_MS
    log(transaction(2, 2, client="c2"))
    assert refused(log(transaction(3, 3)), Reason.SEQUENCE_GAP).current == 0
    assert committed(log(transaction(1, 1))).client_sequence == 1, "the documented limit: a late retry is a new request"


@pytest.mark.rule("LG-17")
def test_a_batch_is_one_transaction_with_one_number() -> None:
    log = Log()
    writes = [SetEntity(f"k{number}", b"v") for number in range(5)]
    receipt = committed(log(transaction(1, 1, *writes)))
    assert (receipt.position, receipt.client_sequence, len(log.snapshot.entities)) == (1, 1, 5)
    failing = [SetEntity("k9", b"v"), SetEntity("k0", b"w", condition=Condition(Must.NOT_EXIST))]
    refused(log(transaction(2, 2, *failing)), Reason.KEY_EXISTS)
    assert ("org/1", "k9") not in log.snapshot.entities
    refused(log(transaction(2, 3, *failing)), Reason.SEQUENCE_GAP)
    assert committed(log(transaction(2, 2, DeleteEntity("k0")))).client_sequence == 2


# --- entities ----------------------------------------------------------------------------------------


@pytest.mark.rule("LG-2")
def test_conditions_and_what_their_failures_say() -> None:
    log = Log()
    log(transaction(1, 1, SetEntity("a", b"1")))
    log(transaction(2, 2, SetEntity("b", b"2")))
    log(transaction(3, 3, SetEntity("a", b"3", condition=Condition(Must.HAVE_VERSION, version=1))))
    cases = [
        ("a", Condition(Must.NOT_EXIST), Reason.KEY_EXISTS, 3, b"3"),
        ("z", Condition(Must.EXIST), Reason.KEY_NOT_FOUND, 0, None),
        ("z", Condition(Must.HAVE_VERSION, version=1), Reason.KEY_NOT_FOUND, 0, None),
        ("z", Condition(Must.HAVE_VALUE, value=b""), Reason.KEY_NOT_FOUND, 0, None),
        ("a", Condition(Must.HAVE_VERSION, version=1), Reason.VERSION_MISMATCH, 3, b"3"),
        ("b", Condition(Must.HAVE_VALUE, value=b"3"), Reason.VALUE_MISMATCH, 2, b"2"),
    ]
    for name, condition, reason, version, value in cases:
        verdict = log(transaction(4, 4, SetEntity("fine", b""), SetEntity(name, b"new", condition=condition)))
        failure = refused(verdict, reason)
        assert (failure.field, failure.current, failure.value, failure.index) == (name, version, value, 1)
    met = [
        SetEntity("a", b"4", condition=Condition(Must.EXIST)),
        SetEntity("b", b"5", condition=Condition(Must.HAVE_VALUE, value=b"2")),
        SetEntity("c", b"6", condition=Condition(Must.NOT_EXIST)),
        SetEntity("c", b"7", condition=Condition(Must.HAVE_VERSION, version=4)),
    ]
    assert committed(log(transaction(4, 4, *met))).sequence == 4
    assert log.snapshot.entities["org/1", "c"] == Entity(b"7", 4)


@pytest.mark.rule("LG-3")
def test_a_failed_condition_consumes_nothing_and_is_not_remembered() -> None:
    log = Log()
    guarded = SetEntity("a", b"1", condition=Condition(Must.EXIST))
    refused(log(transaction(1, 1, guarded)), Reason.KEY_NOT_FOUND)
    assert not log.records
    assert not log.snapshot.clients
    log(transaction(2, 1, SetEntity("a", b"0")))
    assert committed(log(transaction(1, 2, guarded))).client_sequence == 2


@pytest.mark.rule("LG-2")
def test_an_expired_entity_is_absent() -> None:
    log = Log()
    log(transaction(1, 1, SetEntity("a", b"1", expires_at_ms=log.now_ms + 10)))
    log.now_ms += 9
    absent = transaction(2, 2, SetEntity("a", b"2", condition=Condition(Must.NOT_EXIST)))
    refused(log(absent), Reason.KEY_EXISTS)
    log.now_ms += 1
    committed(log(absent))


@pytest.mark.rule("LG-2")
def test_relationships_are_made_and_unmade_once() -> None:
    log = Log()
    identity = ("org/1", "doc:1", "reader", "user:ann")
    relate, unrelate = Relate(*identity[1:]), Unrelate(*identity[1:])
    log(transaction(1, 1, relate))
    log(transaction(2, 2, relate))
    assert log.snapshot.relationships == {identity: 1}
    log(transaction(3, 3, unrelate, unrelate))
    assert not log.snapshot.relationships
    log(transaction(4, 4, unrelate, relate))
    assert log.snapshot.relationships == {identity: 4}
    refused(log(replace(transaction(5, 5), operations=())), Reason.MALFORMED)


# --- rows --------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-4", "DE-7")
def test_a_known_delta_changes_nothing_whether_it_won_or_lost() -> None:
    log = Log()
    log(delta(1, 10, a="new"))
    log(delta(2, 5, a="old", b="old"))
    row = log.snapshot.rows["gateway/1", "todos", "r1"]
    assert row.values == {"a": b"new", "b": b"old"}
    for number in (1, 2):
        assert replayed(log(delta(number, 99, a="again"))).receipt is not None
    assert log.snapshot.rows["gateway/1", "todos", "r1"] is row
    assert len(log.records) == 2


@pytest.mark.rule("DE-4", "DE-8", "CO-18")
def test_drift_is_judged_by_log_time_and_only_for_new_deltas() -> None:
    log = Log()
    exactly = (log.now_ms + 5000) << 16
    committed(log(delta(1, exactly + 65_535, a="1")))
    refused(log(delta(2, (log.now_ms + 5001) << 16, a="1")), Reason.CLOCK_DRIFT)
    log.now_ms -= 4000
    assert replayed(log(delta(1, exactly + 65_535, a="1"))).receipt is not None
    committed(log(delta(3, exactly, a="1")))


# --- retention ---------------------------------------------------------------------------------------


@pytest.mark.rule("CH-5", "CO-17")
def test_a_message_id_is_new_again_after_seven_days_of_log_time() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    first = committed(log(message(1)))
    log.now_ms += 7 * DAY_MS - 1
    assert replayed(log(message(1))).receipt == first
    log.now_ms += 1
    assert committed(log(message(1))).sequence == 2
    assert replayed(log(message(1))).receipt != first
    log.now_ms -= 30 * DAY_MS
    assert committed(log(message(2))).log_time_ms == first.log_time_ms + 7 * DAY_MS


@pytest.mark.rule("CO-17")
def test_events_deltas_and_runs_are_remembered_for_ever() -> None:
    log = Log(eviction_interval=1)
    writes = [event(1), delta(1, a="1"), result(1)]
    first = [committed(log(write)) for write in writes]
    log.now_ms += 50 * 366 * DAY_MS
    assert [replayed(log(write)).receipt for write in writes] == first


# --- leases ------------------------------------------------------------------------------------------


def claim(number: int, holder: str, **more: int) -> Claim:
    return Claim(policy=RUNS, scope="campaign/1", key=key(number), fingerprint=b"", holder=holder, **more)


def many_columns(count: int) -> Any:
    return {f"c{number}": "1" for number in range(count)}


def renewal(number: int, fence: int, holder: str = "a", lease_ms: int = 30_000) -> Renew:
    return Renew(policy=RUNS, scope="campaign/1", key=key(number), holder=holder, fence=fence, lease_ms=lease_ms)


def release(number: int, fence: int, failure: bytes | None = None, holder: str = "a") -> Release:
    return Release(policy=RUNS, scope="campaign/1", key=key(number), holder=holder, fence=fence, failure=failure)


def done(number: int, holder: str, fence: int, body: str = "done") -> Submission:
    return result(number, body, holder=holder, fence=fence)


@pytest.mark.rule("RU-6", "RU-7")
def test_one_caller_runs_and_the_others_get_its_event() -> None:
    log = Log()
    granted, busy = log.apart(claim(1, "a"), claim(1, "b"))
    assert granted == Granted(fence=1, until_ms=log.now_ms + 30_000)
    waiting = refused(busy, Reason.IN_FLIGHT)
    assert (waiting.current, waiting.retry_after_ms) == (1, 30_000)
    receipt = committed(log(done(1, "a", 1)))
    assert receipt.sequence == 1
    assert not log.snapshot.leases
    assert replayed(log(claim(1, "b"))).receipt == receipt
    assert replayed(log(done(1, "a", 1, "again"))).receipt == receipt


@pytest.mark.rule("RU-7")
def test_another_takes_over_when_the_lease_ends_and_the_first_cannot_complete() -> None:
    log = Log()
    log(claim(1, "a"))
    log.now_ms += 29_999
    refused(log(claim(1, "b")), Reason.IN_FLIGHT)
    log.now_ms += 1
    assert log(claim(1, "b")) == Granted(fence=2, until_ms=log.now_ms + 30_000)
    assert refused(log(done(1, "a", 1, "late")), Reason.LEASE_LOST).current == 2
    refused(log(renewal(1, 1)), Reason.LEASE_LOST)
    assert log(release(1, 1)) == Applied(changed=False)
    committed(log(done(1, "b", 2, "second")))
    assert [record.body for record in log.records] == [b"second"]


@pytest.mark.rule("RU-7")
def test_a_lease_is_renewed_and_late_work_counts_while_nobody_took_over() -> None:
    log = Log()
    log(claim(1, "a"))
    log.now_ms += 20_000
    assert log(renewal(1, 1)) == Granted(1, log.now_ms + 30_000)
    assert log(renewal(1, 1, lease_ms=1)) == Granted(1, log.now_ms + 30_000), "renewing never shortens"
    log.now_ms += HOUR_MS
    committed(log(done(1, "a", 1)))
    log(claim(2, "a"))
    log.now_ms += 30_000 + LEASE_MEMORY_MS
    assert log(renewal(2, 2)) == Granted(2, log.now_ms + 30_000)
    log.now_ms += 30_000 + LEASE_MEMORY_MS + 1
    refused(log(done(2, "a", 2)), Reason.LEASE_LOST)


@pytest.mark.rule("RU-7")
def test_who_waited_for_a_run_that_failed_is_told_and_the_next_call_runs_again() -> None:
    log = Log()
    log(claim(1, "a"))
    assert log(release(1, 1, b"boom")) == Applied(changed=True)
    assert log(release(1, 1, b"boom")) == Applied(changed=False)
    failed = refused(log(claim(1, "b", waited_for=1)), Reason.RUN_FAILED)
    assert (failed.value, failed.current) == (b"boom", 1)
    refused(log(done(1, "a", 1)), Reason.LEASE_LOST)
    assert log(claim(1, "c")) == Granted(2, log.now_ms + 30_000)
    assert log(claim(1, "c")) == Granted(2, log.now_ms + 30_000), "a claim that is sent twice is granted once"
    failed = refused(log(claim(1, "b", waited_for=1)), Reason.RUN_FAILED)
    assert failed.value == b"boom", "also when another caller runs again already"
    refused(log(claim(1, "b", waited_for=2)), Reason.IN_FLIGHT)
    assert log(release(1, 2, b"", holder="c")) == Applied(changed=True)
    assert refused(log(claim(1, "b", waited_for=2)), Reason.RUN_FAILED).value == b""


@pytest.mark.rule("RU-7")
def test_a_claim_that_is_sent_again_never_shortens_its_lease() -> None:
    log = Log()
    log(claim(1, "a"))
    log(renewal(1, 1, lease_ms=300_000))
    assert log(claim(1, "a")) == Granted(1, log.now_ms + 300_000)


@pytest.mark.rule("RU-7")
def test_work_that_was_given_up_did_not_fail() -> None:
    log = Log()
    log(claim(1, "a"))
    assert log(release(1, 1)) == Applied(changed=True)
    assert log(claim(1, "b", waited_for=1)) == Granted(2, log.now_ms + 30_000)


@pytest.mark.rule("RU-7")
def test_who_is_told_a_fence_cannot_use_it() -> None:
    log = Log()
    log(claim(1, "a"))
    fence = refused(log(claim(1, "b")), Reason.IN_FLIGHT).current
    refused(log(done(1, "b", fence)), Reason.LEASE_LOST)
    refused(log(renewal(1, fence, holder="b")), Reason.LEASE_LOST)
    assert log(release(1, fence, holder="b")) == Applied(changed=False)
    committed(log(done(1, "a", fence)))


@pytest.mark.rule("RU-7", "CO-15")
def test_limits_hold_back_a_claim_but_not_the_work_it_let_in() -> None:
    log = Log()
    held_back = replace(claim(1, "a"), retry_after_ms=500)
    assert refused(log(held_back), Reason.RATE_LIMITED).retry_after_ms == 500
    log(claim(1, "a"))
    assert log(held_back) == Granted(1, log.now_ms + 30_000)
    receipt = committed(log(replace(done(1, "a", 1), retry_after_ms=500)))
    assert replayed(log(held_back)).receipt == receipt


@pytest.mark.rule("RU-7")
def test_fencing_numbers_are_never_given_out_again() -> None:
    log = Log(lanes=1)
    fences = []
    for number in range(3):
        granted = log(claim(number, "a"))
        assert isinstance(granted, Granted)
        fences.append(granted.fence)
        log(release(number, granted.fence))
    again = log(claim(0, "b"))
    assert isinstance(again, Granted)
    assert [*fences, again.fence] == [1, 2, 3, 4]
    before = log.snapshot.heads[1]
    verdicts = log.together(claim(7, "a"), claim(0, "c"), mode=Mode.ALL)
    refused(verdicts[0], Reason.NOT_PROCESSED)
    assert log.snapshot.heads[1] == before


@pytest.mark.rule("RU-7", "RU-11")
def test_a_lease_keeps_its_content() -> None:
    header = Policy(
        name="http",
        key_bytes=(1, 255),
        order=Order.STREAM,
        on_reuse=OnReuse.REFUSE,
        retention=kept_for(hours=24),
        leased=True,
    )
    log = Log()

    def request(content: bytes, holder: str) -> Claim:
        return Claim(policy=header, scope="user:ann", key=b"k", fingerprint=content, holder=holder)

    log(request(b"x", "a"))
    refused(log(request(b"y", "b")), Reason.IDENTITY_REUSED)
    refused(log(request(b"y", "a")), Reason.IDENTITY_REUSED)
    refused(log(request(b"x", "b")), Reason.IN_FLIGHT)
    changed = Submission(policy=header, scope="user:ann", key=b"k", fingerprint=b"y", holder="a", fence=1)
    refused(log(changed), Reason.IDENTITY_REUSED)
    unleased = Submission(policy=header, scope="user:ann", key=b"k", fingerprint=b"x")
    refused(log(unleased), Reason.IN_FLIGHT)
    log.now_ms += 30_000
    granted = log(request(b"y", "a"))
    assert isinstance(granted, Granted)
    assert granted.fence == 2, "other work gets a number of its own"
    log.now_ms += 30_000
    committed(log(unleased))
    refused(log(request(b"y", "b")), Reason.IDENTITY_REUSED)
    assert replayed(log(request(b"x", "b"))).receipt is not None


# --- members and acknowledgements --------------------------------------------------------------------


@pytest.mark.rule("CH-9", "CO-22")
def test_a_stranger_learns_nothing() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    log(message(1))
    stranger = [
        log(message(1, actor="user:eve")),
        log(message(2, actor="user:eve")),
        log(message(2, actor="user:eve", scope="chat/none")),
        log(Acknowledge("chat/1", "user:eve", 1)),
        log(Acknowledge("chat/none", "user:eve", 1)),
    ]
    assert all(answer == stranger[0] for answer in stranger)
    refused(stranger[0], Reason.NOT_A_MEMBER)
    assert log(SetMember("chat/1", "user:ann")) == Applied(changed=False)
    assert log(SetMember("chat/1", "user:ann", present=False)) == Applied(changed=True)
    assert log(SetMember("chat/1", "user:ann", present=False)) == Applied(changed=False)
    refused(log(message(1)), Reason.NOT_A_MEMBER)


@pytest.mark.rule("CH-9")
def test_a_stream_is_opened_by_one_and_then_it_is_for_members() -> None:
    log = Log()
    first, second = log.together(OpenStream("chat/1", "user:ann"), OpenStream("chat/1", "user:bob"))
    assert first == Applied(changed=True)
    refused(second, Reason.NOT_A_MEMBER)
    assert log.snapshot.streams == {"chat/1": 0}
    assert log(OpenStream("chat/1", "user:ann")) == Applied(changed=False)
    refused(log(SetMember("chat/1", "user:bob", actor="user:bob")), Reason.NOT_A_MEMBER)
    assert log(SetMember("chat/1", "user:bob", actor="user:ann")) == Applied(changed=True)
    assert log(SetMember("chat/1", "user:ann", present=False, actor="user:bob")) == Applied(changed=True)
    refused(log(SetMember("chat/1", "user:eve", actor="user:ann")), Reason.NOT_A_MEMBER)
    assert log(SetMember("chat/1", "user:bob", present=False, actor="user:bob")) == Applied(changed=True)
    for name in ("user:ann", "user:bob", "user:eve"):  # nobody is left, and nobody takes it over
        refused(log(OpenStream("chat/1", name)), Reason.NOT_A_MEMBER)
    log(SetMember("chat/2", "user:ann"))
    refused(log(OpenStream("chat/2", "user:eve")), Reason.NOT_A_MEMBER)


@pytest.mark.rule("CH-9")
def test_a_stream_that_could_not_be_opened_with_its_members_is_not_opened() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    items = (OpenStream("chat/2", "user:eve"), SetMember("chat/1", "user:eve", actor="user:eve"))
    verdicts = log.together(*items, mode=Mode.ALL)
    refused(verdicts[1], Reason.NOT_A_MEMBER)
    assert (log.snapshot.streams, log.snapshot.members) == ({"chat/1": 0}, {("chat/1", "user:ann"): True})


@pytest.mark.rule("CH-8")
def test_an_acknowledgement_moves_forward_and_stays_within_the_stream() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    for number in (1, 2, 3):
        log(message(number))
    assert log(Acknowledge("chat/1", "user:ann", 0)) == Applied(changed=False)
    assert log(Acknowledge("chat/1", "user:ann", 2)) == Applied(changed=True)
    assert log(Acknowledge("chat/1", "user:ann", 1)) == Applied(changed=False)
    assert log(Acknowledge("chat/1", "user:ann", 2)) == Applied(changed=False)
    assert refused(log(Acknowledge("chat/1", "user:ann", 4)), Reason.INVALID_ACKNOWLEDGEMENT).current == 3
    refused(log(Acknowledge("chat/1", "user:ann", -1)), Reason.INVALID_ACKNOWLEDGEMENT)
    assert log.snapshot.acknowledged == {("chat/1", "user:ann"): 2}


# --- the order of checks -----------------------------------------------------------------------------


@pytest.mark.rule("CO-19")
def test_an_expected_position_must_be_the_newest() -> None:
    log = Log()
    committed(log(event(1, expected_position=0)))
    committed(log(event(2, expected_position=1)))
    for wrong in (0, 1, 3):
        assert refused(log(event(3, expected_position=wrong)), Reason.UNEXPECTED_POSITION).current == 2
    first, second = log.apart(event(3, expected_position=2), event(4, expected_position=2))
    assert committed(first).position == 3
    assert refused(second, Reason.UNEXPECTED_POSITION).current == 3
    log(result(1))
    stale = replace(result(2), expected_sequence=0)
    assert refused(log(stale), Reason.UNEXPECTED_POSITION).current == 1
    committed(log(replace(stale, expected_sequence=1)))


@pytest.mark.rule("CO-18", "CO-15", "EV-10")
def test_a_known_write_is_answered_whatever_has_become_stricter() -> None:
    log = Log()
    asked: list[bytes] = []

    def strict(submission: Submission) -> str:
        asked.append(submission.key)
        return "no longer allowed"

    receipt = committed(log(event(1, expected_position=0)))
    held_back = event(1, expected_position=0, retry_after_ms=500)
    assert replayed(log(held_back, strict)).receipt == receipt
    assert not asked
    assert refused(log(event(2), strict), Reason.INVALID).message == "no longer allowed"
    assert asked == [key(2)]
    assert refused(log(event(2, retry_after_ms=500)), Reason.RATE_LIMITED).retry_after_ms == 500


@pytest.mark.rule("CO-18")
def test_the_checks_come_in_the_documented_order() -> None:
    """Each submission fails every check from one on; the first of them decides."""
    all_at_once = Policy(
        name="all",
        key_bytes=(1, 16),
        order=Order.STREAM,
        on_reuse=OnReuse.REFUSE,
        retention=FOREVER,
        client_sequence=True,
        members_only=True,
        entities=True,
    )

    def submission(**changes: object) -> Submission:
        fails_everything = {
            "policy": all_at_once,
            "scope": "s",
            "key": b"",
            "fingerprint": b"other",
            "actor": "user:eve",
            "client": "c1",
            "client_sequence": 5,
            "expected_sequence": 7,
            "operations": (SetEntity("k", b"", condition=Condition(Must.EXIST)),),
            "retry_after_ms": 9,
        }
        return Submission(**{**fails_everything, **changes})  # type: ignore[arg-type]

    log = Log()
    log(SetMember("s", "user:ann"))
    known = submission(
        key=b"known",
        fingerprint=b"first",
        actor="user:ann",
        client_sequence=1,
        expected_sequence=0,
        operations=(SetEntity("a", b""),),
        retry_after_ms=0,
    )
    committed(log(known))

    def objects(_: Submission) -> str:
        return "objection"

    steps: list[tuple[dict[str, object], Reason]] = [
        ({"client": ""}, Reason.MALFORMED),
        ({"client": "c1", "key": b"known"}, Reason.NOT_A_MEMBER),
        ({"actor": "user:ann"}, Reason.IDENTITY_REUSED),
        ({"key": b"new"}, Reason.SEQUENCE_GAP),
        ({"client_sequence": 2}, Reason.UNEXPECTED_POSITION),
        ({"expected_sequence": 1}, Reason.KEY_NOT_FOUND),
        ({"operations": (SetEntity("k", b""),)}, Reason.INVALID),
    ]
    changes: dict[str, object] = {}
    for change, reason in steps:
        changes.update(change)
        refused(log(submission(**changes), objects), reason)
    refused(log(submission(**changes)), Reason.RATE_LIMITED)
    committed(log(submission(**{**changes, "retry_after_ms": 0})))


@pytest.mark.rule("CO-33", "LG-14")
@pytest.mark.parametrize(
    ("item", "field"),
    [
        (replace(event(1), key=b""), "key"),
        (replace(event(1), key=bytes(15)), "key"),
        (replace(event(1), key=bytes(17)), "key"),
        (replace(event(1), client_sequence=1), "client_sequence"),
        (replace(event(1), expected_sequence=1), "expected_sequence"),
        (replace(event(1), operations=(DeleteEntity("a"),)), "operations"),
        (replace(event(1), delta=delta(1).delta), "delta"),
        (replace(event(1), fence=1), "fence"),
        (replace(result(1), scope=""), "scope"),
        (replace(delta(1), delta=None), "delta"),
        (replace(delta(1), key=bytes(16)), "key"),
        (transaction(0, 1), "key"),
        (replace(transaction(1, 1), key=b"short"), "key"),
        (replace(transaction(1, 1), client=""), "client"),
        (transaction(1, 2**64), "client_sequence"),
        (transaction(1, -1), "client_sequence"),
        (replace(transaction(1, 1), operations=()), "operations"),
        (replace(claim(1, "a"), policy=EVENTS), "policy"),
        (replace(claim(1, "a"), scope=""), "scope"),
        (claim(1, ""), "holder"),
        (renewal(1, 1, holder=""), "holder"),
        (release(1, 1, holder=""), "holder"),
        (claim(1, "a", lease_ms=0), "lease_ms"),
        (claim(1, "a", lease_ms=LEASE_MS_MAX + 1), "lease_ms"),
        (renewal(1, 1, lease_ms=-5), "lease_ms"),
        (replace(release(1, 1), key=b""), "key"),
        (SetMember("", "user:ann"), "scope"),
        (SetMember("chat/1", ""), "member"),
        (SetMember("chat/1", "user:ann", actor="\0"), "actor"),
        (OpenStream("", "user:ann"), "scope"),
        (OpenStream("chat/1", ""), "member"),
        (message(1, stream_rate=Rate(0, 1)), "stream_rate"),
        (message(1, actor="", stream_rate=Rate(1, 1)), "actor"),
        (event(1, actor="user:ann", stream_rate=Rate(1, 1)), "stream_rate"),
        (Acknowledge("chat/1", "", 1), "member"),
        (SetCursor("", 0), "consumer"),
        (SetCursor("c" * 513, 0), "consumer"),
        (SetCursor("c\0", 0), "consumer"),
        (SetCursor("c", 0, "s" * 513), "scope"),
        (SetCursor("c", 0, "\ud800"), "scope"),
        (SetCursor("c", True), "cursor"),
        (SetCursor("c", 0.0), "cursor"),  # type: ignore[arg-type]
        (SetCursor("c", "0"), "cursor"),  # type: ignore[arg-type]
        (replace(event(1), scope="\ud800"), "scope"),
        (replace(event(1), actor="a\0b"), "actor"),
        (replace(event(1), client="x" * 513), "client"),
        (replace(event(1), partitions=("p\ud800",)), "partitions"),
        (replace(event(1), partitions=("p" * 257,)), "partitions"),
        (replace(event(1), partitions=tuple(map(str, range(65)))), "partitions"),
        (replace(event(1), fingerprint=bytes(65)), "fingerprint"),
        (replace(result(1), scope="campaign/\udfff"), "scope"),
        (SetMember("\ud800", "user:ann"), "scope"),
        (claim(1, "\ud800"), "holder"),
        (transaction(1, 1, SetEntity("\ud800", b"")), "operations"),
        (transaction(1, 1, SetEntity("k" * 1025, b"")), "operations"),
        (transaction(1, 1, Relate("a", "b\0", "c")), "operations"),
        (transaction(1, 1, *[DeleteEntity("k")] * 10_001), "operations"),
        (transaction(1, 1, SetEntity("k", b"", condition=Condition("not_exist"))), "operations"),  # type: ignore[arg-type]
        (transaction(1, 1, SetEntity("k", b"", 2**63)), "operations"),
        (transaction(1, 1, SetEntity("k", b"", -1)), "operations"),
        (replace(claim(1, "a"), fingerprint=bytes(65)), "fingerprint"),
        (release(1, 1, bytes(4097)), "failure"),
        (replace(delta(1), key=key(2, 32)), "key"),
        (delta(1, hlc=-1), "delta"),
        (delta(1, hlc=2**64), "delta"),
        (replace(delta(1), delta=replace(delta(1).delta, op="DELETE")), "delta"),  # type: ignore[type-var]
        (delta(1, **many_columns(1001)), "delta"),
    ],
)
def test_what_has_the_wrong_shape_is_refused_with_its_field_and_changes_nothing(item: Item, field: str) -> None:
    decided = plan([Request((event(7), item, event(8)))], Snapshot(), 1)
    first, wrong, last = decided.verdicts[0]
    failure = refused(wrong, Reason.MALFORMED)
    assert failure.field == field
    assert failure.message
    assert [committed(first).position, committed(last).position] == [1, 2]
    assert decided.changes.heads == {0: LaneHead(position=2, log_time_ms=1, height=1, revision=1)}
    needs = footprint([Request((item,))], Settings())
    assert needs == Footprint(faults={id(item): failure}), "a store is not asked for what it cannot look for"
    assert plan([Request((item,))], Snapshot(), 1, faults=needs.faults).verdicts == [[failure]]


def test_a_text_in_place_of_a_mode_is_refused() -> None:
    log = Log()
    for mode in ("all", "each", None):
        verdicts = log.submit([Request((event(1), event(2)), mode)], 5)[0]  # type: ignore[arg-type]
        assert [refused(one, Reason.MALFORMED).field for one in verdicts] == ["mode", "mode"]
    assert not log.records


@pytest.mark.rule("CO-30", "DE-5")
def test_a_row_has_a_limit_of_columns() -> None:
    log = Log()
    committed(log(delta(1, 1, **many_columns(1000))))
    refused(log(delta(2, 2, one_more="1")), Reason.TOO_MANY_COLUMNS)
    committed(log(delta(3, 3, c0="2")))
    committed(log(delta(4, 4, op=Op.DELETE)))
    committed(log(delta(5, 5, one_more="1")))


@pytest.mark.rule("CO-30", "DE-5")
def test_a_row_has_a_limit_of_bytes() -> None:
    log = Log()
    long = "1" * (ROW_BYTES_MAX // 2)
    committed(log(delta(1, 1, a=long, b=long)))
    refused(log(delta(2, 2, c="1")), Reason.ROW_TOO_LARGE)
    committed(log(delta(3, 3, b="1")))
    committed(log(delta(4, 4, c="1")))


@pytest.mark.rule("CO-17")
def test_every_change_in_a_lane_is_seen_in_its_head() -> None:
    log = Log(lanes=1)
    changes: list[Item] = [
        SetMember("campaign/1", "user:ann"),
        result(1),
        Acknowledge("campaign/1", "user:ann", 1),
        SetCursor("c", 1, "campaign/1"),
        SetCursor("c", 0, "campaign/1", rewind=True),
        SetCursor("c", None, "campaign/1"),
        claim(2, "a"),
        claim(2, "a"),
        renewal(2, 1),
        release(2, 1),
    ]
    for revision, change in enumerate(changes, start=1):
        log.now_ms += 10
        log(change)
        head = log.snapshot.heads[1]
        assert (head.revision, head.log_time_ms) == (revision, log.now_ms), change
    unchanging: list[Item] = [
        result(1),
        SetMember("campaign/1", "user:ann"),
        Acknowledge("campaign/1", "user:ann", 1),
        SetCursor("c", None, "campaign/1"),
    ]
    for item in unchanging:
        log.now_ms += 10
        log(item)
        assert log.snapshot.heads[1] == head


def test_the_same_input_gives_the_same_output() -> None:
    batch = [Request((event(1), event(1), event(2))), Request((result(1), message(1), transaction(1, 1)))]
    snapshot = Snapshot()
    assert plan(batch, snapshot, 5) == plan(batch, snapshot, 5)
    assert snapshot == Snapshot(), "what the store remembers is only read"


def test_a_text_that_only_equals_one_is_refused_whatever_came_before() -> None:
    class Name(str):
        __slots__ = ()

    for scope in ("notes/1", Name("notes/1")):
        (verdict,) = plan([Request((replace(result(1), scope=scope),))], Snapshot(), 0).verdicts[0]
        assert isinstance(verdict, Committed if type(scope) is str else Refused)
