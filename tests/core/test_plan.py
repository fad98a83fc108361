"""`plan`, rule by rule: identity, order, requests, entities, rows and retention."""

import pytest
from msgspec.structs import replace

from core.item_builders import (
    DAY_MS,
    Log,
    assert_committed,
    assert_refused,
    assert_replayed,
    claim,
    delta,
    event,
    key,
    message,
    result,
    transaction,
)
from oncelog.core.merge import Op
from oncelog.core.operations import Condition, Entity, Must, Relate, SetEntity, Unrelate
from oncelog.core.plan import plan
from oncelog.core.rules.duplicates import answer_known_key
from oncelog.core.values import (
    Mode,
    Reason,
    Request,
    SetMember,
    key_identity,
)

# --- identity ----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-3", "EV-4", "CO-15")
def test_retry_is_replayed_and_writes_nothing() -> None:
    log = Log()
    receipt = assert_committed(log(event(1)))
    assert (receipt.lane, receipt.position, receipt.log_time_ms, receipt.height) == (0, 1, 1_000_000, 1)
    assert assert_committed(log(event(2))).position == 2
    log.now_ms += 5000
    again = plan([Request((event(1, client="another"),))], log.snapshot, log.now_ms)
    assert assert_replayed(again.verdicts[0][0]).receipt == receipt
    changes = again.changes
    assert not any(getattr(changes, name) for name in changes.__struct_fields__)
    assert changes.is_empty


@pytest.mark.rule("EV-5", "LG-12")
def test_known_identity_with_other_content_is_refused() -> None:
    log = Log()
    log(event(1, "x"))
    assert assert_refused(log(event(1, "y")), Reason.IDENTITY_REUSED).field == "key"
    log(transaction(1, 1, content="x"))
    assert_refused(log(transaction(1, 2, content="y")), Reason.IDENTITY_REUSED)
    assert [record.position for record in log.records] == [1, 1]


@pytest.mark.rule("CO-14")
def test_equal_identities_in_one_group_commit_are_committed_once() -> None:
    log = Log()
    first, second, other, conflict = log.submit_separately(event(1), event(1), event(2), event(1, "y"))
    assert assert_replayed(second).receipt == assert_committed(first)
    assert assert_committed(other).position == 2
    assert_refused(conflict, Reason.IDENTITY_REUSED)


@pytest.mark.rule("CH-4", "DE-4")
def test_retry_with_other_content_reports_a_mismatch_if_the_first_write_wins() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    receipt = assert_committed(log(message(1, "hello")))
    assert not assert_replayed(log(message(1, "hello"))).mismatch
    answer = assert_replayed(log(message(1, "goodbye")))
    assert answer.receipt == receipt
    assert answer.mismatch
    assert [record.body for record in log.records if record.sequence] == [b"hello"]
    inserted = assert_committed(log(delta(1, op=Op.INSERT, a="1")))
    assert assert_replayed(log(delta(1, op=Op.DELETE))) == assert_replayed(log(delta(1, op=Op.UPDATE)))
    assert assert_replayed(log(delta(1, op=Op.INSERT, a="1"))).receipt == inserted


@pytest.mark.rule("CO-41")
def test_retry_of_an_erased_record_reports_the_erasure() -> None:
    log = Log()
    receipt = assert_committed(log(event(1)))
    identity = ("events", "", "", key(1))
    keys = {identity: replace(log.snapshot.keys[identity], erased=True)}
    verdicts = plan([Request((event(1),))], replace(log.snapshot, keys=keys), log.now_ms).verdicts
    assert assert_replayed(verdicts[0][0]).erased
    assert assert_replayed(verdicts[0][0]).receipt == receipt
    log(transaction(1, 1))
    number = ("ledger", "org/1", "c1", 1)
    sequences = {number: replace(log.snapshot.sequences[number], erased=True)}
    verdicts = plan([Request((transaction(None, 1),))], replace(log.snapshot, sequences=sequences), log.now_ms).verdicts
    assert assert_replayed(verdicts[0][0]).erased


@pytest.mark.rule("CO-15", "CO-41")
@pytest.mark.parametrize("erased", [False, True])
@pytest.mark.parametrize("content", ["x", "y"])
def test_answer_to_a_known_key_equals_the_plan(content: str, erased: bool) -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    log.submit_separately(event(1, "x"), message(1, "x"), result(1))
    log.snapshot.keys = {name: replace(it, erased=erased) for name, it in log.snapshot.keys.items()}
    for item in (event(1, content), message(1, content), replace(claim(1, "a"), fingerprint=content.encode())):
        assert answer_known_key(item, log.snapshot.keys[key_identity(item)]) == log(item)


@pytest.mark.rule("RU-8", "LG-7", "CH-3")
def test_scopes_do_not_share_identities() -> None:
    log = Log()
    for scope in ("campaign/1", "campaign/2"):
        assert assert_committed(log(result(1, scope=scope))).sequence == 1
    for scope in ("org/1", "org/1/vault/1", "org/1/vault/2"):
        assert assert_committed(log(transaction(1, 1, scope=scope))).sequence == 1
    assert assert_committed(log(transaction(1, 1, client="c2"))).sequence == 2
    log(SetMember("chat/1", "user:ann"))
    log(SetMember("chat/1", "user:bob"))
    first = assert_committed(log(message(1)))
    assert assert_replayed(log(message(1, actor="user:bob"))).receipt == first


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-2", "RU-6")
def test_each_stream_has_its_own_dense_sequence() -> None:
    log = Log()
    for scope in ("campaign/1", "campaign/2"):
        assert [assert_committed(log(result(number, scope=scope))).sequence for number in (1, 2, 3)] == [1, 2, 3]
    assert log.snapshot.streams == {"campaign/1": 3, "campaign/2": 3}
    assert [record.sequence for record in log.records if record.scope == "campaign/2"] == [1, 2, 3]


@pytest.mark.rule("CO-12", "CO-17")
def test_log_time_never_goes_back_and_refused_writes_leave_no_gap() -> None:
    log = Log()
    times = []
    for number, now_ms in enumerate([5_000, 9_000, 2_000, 9_001], start=1):
        log.now_ms = now_ms
        times.append(assert_committed(log(event(number))).log_time_ms)
        assert_refused(log(event(number, "other")), Reason.IDENTITY_REUSED)
    assert times == [5_000, 9_000, 9_000, 9_001]
    assert [record.position for record in log.records] == [1, 2, 3, 4]
    assert log.snapshot.heads[0].log_time_ms == 9_001


def test_group_commit_is_one_block_per_lane() -> None:
    log = Log()
    log.submit_separately(event(1), event(2), result(1))
    log.submit_separately(event(3), result(1))
    assert [(block.lane == 0, block.height, block.count) for block in log.blocks] == [
        (True, 1, 2),
        (False, 1, 1),
        (True, 2, 1),
    ]
    assert [record.height for record in log.records if record.lane == 0] == [1, 1, 2]


# --- requests ----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-8")
def test_items_of_a_request_are_independent_by_default() -> None:
    log = Log()
    log(event(1))
    first, second, third = log.submit_request(event(2), event(1, "other"), event(3))
    assert_refused(second, Reason.IDENTITY_REUSED)
    assert [assert_committed(first).position, assert_committed(third).position] == [2, 3]


@pytest.mark.rule("DE-6", "DE-8")
def test_refused_request_in_mode_all_changes_nothing() -> None:
    log = Log(eviction_interval=1)
    log(delta(1, op=Op.INSERT, a="1"))
    before = [dict(getattr(log.snapshot, name)) for name in ("heads", "keys", "streams", "rows")]
    ahead = delta(4, hlc=(log.now_ms + 5001) << 16, a="9")
    verdicts = log.submit_request(
        delta(2, 1, a="2"), delta(1, a="1"), delta(3, 2, b="3"), ahead, delta(5), mode=Mode.ALL
    )
    assert assert_refused(verdicts[3], Reason.CLOCK_DRIFT).field == "hlc"
    for index in (0, 1, 2, 4):
        assert assert_refused(verdicts[index], Reason.NOT_PROCESSED).index == 3
    assert [dict(getattr(log.snapshot, name)) for name in ("heads", "keys", "streams", "rows")] == before
    assert [
        assert_committed(one).sequence for one in log.submit_request(delta(2, 1, a="2"), delta(3, 2), mode=Mode.ALL)
    ] == [
        2,
        3,
    ]


@pytest.mark.rule("DE-6")
def test_refused_request_does_not_affect_others_in_its_group_commit() -> None:
    log = Log()
    ahead = delta(9, hlc=(log.now_ms + 9999) << 16)
    requests = [
        Request((delta(1, a="1"),), Mode.ALL),
        Request((delta(2, 5, a="2"), ahead), Mode.ALL),
        Request((delta(3, 3, b="3"), delta(2, 5, a="2")), Mode.ALL),
    ]
    first, second, third = log.submit(requests, log.now_ms)
    assert assert_committed(first[0]).sequence == 1
    assert_refused(second[0], Reason.NOT_PROCESSED)
    assert [assert_committed(one).sequence for one in third] == [2, 3]
    assert log.snapshot.rows["gateway/1", "todos", "r1"].values == {"a": b"2", "b": b"3"}
    assert [record.position for record in log.records] == [1, 2, 3]


@pytest.mark.rule("EV-18")
def test_mode_until_refused_commits_the_items_before_the_refusal() -> None:
    log = Log()
    log(event(1))
    verdicts = log.submit_request(event(2), event(1, "other"), event(3), event(4), mode=Mode.UNTIL_REFUSED)
    assert assert_committed(verdicts[0]).position == 2
    assert_refused(verdicts[1], Reason.IDENTITY_REUSED)
    assert [assert_refused(one, Reason.NOT_PROCESSED).index for one in verdicts[2:]] == [1, 1]
    assert len(log.records) == 2


# --- entities ----------------------------------------------------------------------------------------


@pytest.mark.rule("LG-2")
def test_failed_conditions_report_reason_version_and_value() -> None:
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
        failure = assert_refused(verdict, reason)
        assert (failure.field, failure.current, failure.value, failure.index) == (name, version, value, 1)
    met = [
        SetEntity("a", b"4", condition=Condition(Must.EXIST)),
        SetEntity("b", b"5", condition=Condition(Must.HAVE_VALUE, value=b"2")),
        SetEntity("c", b"6", condition=Condition(Must.NOT_EXIST)),
        SetEntity("c", b"7", condition=Condition(Must.HAVE_VERSION, version=4)),
    ]
    assert assert_committed(log(transaction(4, 4, *met))).sequence == 4
    assert log.snapshot.entities["org/1", "c"] == Entity(b"7", 4)


@pytest.mark.rule("LG-3")
def test_failed_condition_uses_no_sequence_and_is_not_stored() -> None:
    log = Log()
    guarded = SetEntity("a", b"1", condition=Condition(Must.EXIST))
    assert_refused(log(transaction(1, 1, guarded)), Reason.KEY_NOT_FOUND)
    assert not log.records
    assert not log.snapshot.clients
    log(transaction(2, 1, SetEntity("a", b"0")))
    assert assert_committed(log(transaction(1, 2, guarded))).client_sequence == 2


@pytest.mark.rule("LG-2")
def test_expired_entity_is_absent() -> None:
    log = Log()
    log(transaction(1, 1, SetEntity("a", b"1", expires_at_ms=log.now_ms + 10)))
    log.now_ms += 9
    absent = transaction(2, 2, SetEntity("a", b"2", condition=Condition(Must.NOT_EXIST)))
    assert_refused(log(absent), Reason.KEY_EXISTS)
    log.now_ms += 1
    assert_committed(log(absent))


@pytest.mark.rule("LG-2")
def test_relationships_are_idempotent() -> None:
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
    assert_refused(log(replace(transaction(5, 5), operations=())), Reason.MALFORMED)


# --- rows --------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-4", "DE-7")
def test_known_delta_changes_nothing() -> None:
    log = Log()
    log(delta(1, 10, a="new"))
    log(delta(2, 5, a="old", b="old"))
    row = log.snapshot.rows["gateway/1", "todos", "r1"]
    assert row.values == {"a": b"new", "b": b"old"}
    for number in (1, 2):
        assert assert_replayed(log(delta(number, 99, a="again"))).receipt is not None
    assert log.snapshot.rows["gateway/1", "todos", "r1"] is row
    assert len(log.records) == 2


@pytest.mark.rule("DE-4", "DE-8", "CO-18")
def test_drift_of_new_deltas_is_checked_against_log_time() -> None:
    log = Log()
    exactly = (log.now_ms + 5000) << 16
    assert_committed(log(delta(1, exactly + 65_535, a="1")))
    assert_refused(log(delta(2, (log.now_ms + 5001) << 16, a="1")), Reason.CLOCK_DRIFT)
    log.now_ms -= 4000
    assert assert_replayed(log(delta(1, exactly + 65_535, a="1"))).receipt is not None
    assert_committed(log(delta(3, exactly, a="1")))


# --- retention ---------------------------------------------------------------------------------------


@pytest.mark.rule("CH-5", "CO-17")
def test_message_id_expires_after_seven_days_of_log_time() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    first = assert_committed(log(message(1)))
    log.now_ms += 7 * DAY_MS - 1
    assert assert_replayed(log(message(1))).receipt == first
    log.now_ms += 1
    assert assert_committed(log(message(1))).sequence == 2
    assert assert_replayed(log(message(1))).receipt != first
    log.now_ms -= 30 * DAY_MS
    assert assert_committed(log(message(2))).log_time_ms == first.log_time_ms + 7 * DAY_MS


@pytest.mark.rule("CO-17")
def test_events_deltas_and_runs_never_expire() -> None:
    log = Log(eviction_interval=1)
    writes = [event(1), delta(1, a="1"), result(1)]
    first = [assert_committed(log(write)) for write in writes]
    log.now_ms += 50 * 366 * DAY_MS
    assert [assert_replayed(log(write)).receipt for write in writes] == first
