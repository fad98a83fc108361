"""How `plan` handles members, expected positions, the order of checks and malformed items."""

from typing import get_args

import pytest
from msgspec.structs import replace

from core.item_builders import (
    Log,
    assert_committed,
    assert_refused,
    assert_replayed,
    claim,
    delta,
    event,
    key,
    many_columns,
    message,
    release,
    renewal,
    result,
    transaction,
)
from oncelog.core.limits import LEASE_MS_MAX, ROW_BYTES_MAX
from oncelog.core.merge import Op
from oncelog.core.operations import Condition, DeleteEntity, Must, Relate, SetEntity
from oncelog.core.plan import _RULES, plan
from oncelog.core.policy import EVENTS, FOREVER, OnReuse, Order, Policy
from oncelog.core.read_set import ReadSet, build_read_set
from oncelog.core.validation import _CHECKS
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Committed,
    Item,
    LaneHead,
    Member,
    Mode,
    OpenStream,
    OtherItem,
    Rate,
    Reason,
    Refused,
    Request,
    SetCursor,
    SetMember,
    Settings,
    Snapshot,
    Submission,
)

# --- members and acknowledgements --------------------------------------------------------------------


@pytest.mark.rule("CH-9", "CO-22")
def test_non_member_gets_one_answer_for_existing_and_missing_streams() -> None:
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
    assert_refused(stranger[0], Reason.NOT_A_MEMBER)
    assert log(SetMember("chat/1", "user:ann")) == Applied(changed=False)
    assert log(SetMember("chat/1", "user:ann", present=False)) == Applied(changed=True)
    assert log(SetMember("chat/1", "user:ann", present=False)) == Applied(changed=False)
    assert_refused(log(message(1)), Reason.NOT_A_MEMBER)


@pytest.mark.rule("CH-9")
def test_opened_stream_accepts_only_members() -> None:
    log = Log()
    first, second = log.submit_request(OpenStream("chat/1", "user:ann"), OpenStream("chat/1", "user:bob"))
    assert first == Applied(changed=True)
    assert_refused(second, Reason.NOT_A_MEMBER)
    assert log.snapshot.streams == {"chat/1": 0}
    assert log(OpenStream("chat/1", "user:ann")) == Applied(changed=False)
    assert_refused(log(SetMember("chat/1", "user:bob", actor="user:bob")), Reason.NOT_A_MEMBER)
    assert log(SetMember("chat/1", "user:bob", actor="user:ann")) == Applied(changed=True)
    assert_refused(log(SetMember("chat/1", "user:ann", present=False, actor="user:bob")), Reason.NOT_AN_OWNER)
    assert log(SetMember("chat/1", "user:ann", present=False, actor="user:ann")) == Applied(changed=True)
    assert_refused(log(SetMember("chat/1", "user:eve", actor="user:ann")), Reason.NOT_A_MEMBER)
    assert log(SetMember("chat/1", "user:bob", present=False, actor="user:bob")) == Applied(changed=True)
    for name in ("user:ann", "user:bob", "user:eve"):  # a stream without members cannot be opened again
        assert_refused(log(OpenStream("chat/1", name)), Reason.NOT_A_MEMBER)
    log(SetMember("chat/2", "user:ann"))
    assert_refused(log(OpenStream("chat/2", "user:eve")), Reason.NOT_A_MEMBER)


@pytest.mark.rule("CH-9")
def test_stream_is_not_opened_when_its_request_is_refused() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    items = (OpenStream("chat/2", "user:eve"), SetMember("chat/1", "user:eve", actor="user:eve"))
    verdicts = log.submit_request(*items, mode=Mode.ALL)
    assert_refused(verdicts[1], Reason.NOT_A_MEMBER)
    assert log.snapshot.streams == {"chat/1": 0}
    assert log.snapshot.members == {("chat/1", "user:ann"): Member(1, is_owner=True)}


@pytest.mark.rule("CH-8")
def test_acknowledgement_only_moves_forward_within_the_stream() -> None:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    for number in (1, 2, 3):
        log(message(number))
    assert log(Acknowledge("chat/1", "user:ann", 0)) == Applied(changed=False)
    assert log(Acknowledge("chat/1", "user:ann", 2)) == Applied(changed=True)
    assert log(Acknowledge("chat/1", "user:ann", 1)) == Applied(changed=False)
    assert log(Acknowledge("chat/1", "user:ann", 2)) == Applied(changed=False)
    assert assert_refused(log(Acknowledge("chat/1", "user:ann", 4)), Reason.INVALID_ACKNOWLEDGEMENT).current == 3
    assert_refused(log(Acknowledge("chat/1", "user:ann", -1)), Reason.INVALID_ACKNOWLEDGEMENT)
    assert log.snapshot.acknowledged == {("chat/1", "user:ann"): 2}


# --- the order of checks -----------------------------------------------------------------------------


@pytest.mark.rule("CO-19")
def test_expected_position_must_be_the_newest() -> None:
    log = Log()
    assert_committed(log(event(1, expected_position=0)))
    assert_committed(log(event(2, expected_position=1)))
    for wrong in (0, 1, 3):
        assert assert_refused(log(event(3, expected_position=wrong)), Reason.UNEXPECTED_POSITION).current == 2
    first, second = log.submit_separately(event(3, expected_position=2), event(4, expected_position=2))
    assert assert_committed(first).position == 3
    assert assert_refused(second, Reason.UNEXPECTED_POSITION).current == 3
    log(result(1))
    stale = replace(result(2), expected_sequence=0)
    assert assert_refused(log(stale), Reason.UNEXPECTED_POSITION).current == 1
    assert_committed(log(replace(stale, expected_sequence=1)))


@pytest.mark.rule("CO-18", "CO-15", "EV-10")
def test_known_write_is_replayed_despite_stricter_checks() -> None:
    log = Log()
    asked: list[bytes] = []

    def refuse(submission: Submission) -> str:
        asked.append(submission.key)
        return "no longer allowed"

    receipt = assert_committed(log(event(1, expected_position=0)))
    known_only = event(1, expected_position=0, known_only=True)
    assert assert_replayed(log(known_only, refuse)).receipt == receipt
    assert not asked
    assert assert_refused(log(event(2), refuse), Reason.INVALID).message == "no longer allowed"
    assert asked == [key(2)]
    assert_refused(log(event(2, known_only=True)), Reason.NOT_KNOWN)


@pytest.mark.rule("CO-18")
def test_checks_run_in_the_documented_order() -> None:
    """Each submission fails a certain check and all later ones. The first failed check decides the verdict."""
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
            "known_only": True,
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
        known_only=False,
    )
    assert_committed(log(known))

    def object_to_all(_: Submission) -> str:
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
        assert_refused(log(submission(**changes), object_to_all), reason)
    assert_refused(log(submission(**changes)), Reason.NOT_KNOWN)
    assert_committed(log(submission(**{**changes, "known_only": False})))


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
def test_malformed_item_is_refused_with_its_field_and_changes_nothing(item: Item, field: str) -> None:
    decided = plan([Request((event(7), item, event(8)))], Snapshot(), 1)
    first, wrong, last = decided.verdicts[0]
    failure = assert_refused(wrong, Reason.MALFORMED)
    assert failure.field == field
    assert failure.message
    assert [assert_committed(first).position, assert_committed(last).position] == [1, 2]
    assert decided.changes.heads == {0: LaneHead(position=2, log_time_ms=1, height=1, revision=1)}
    needs = build_read_set([Request((item,))], Settings())
    assert needs == ReadSet(faults={0: failure}), "malformed items are not in the read set"
    assert plan([Request((item,))], Snapshot(), 1, faults=needs.faults).verdicts == [[failure]]


def test_read_set_faults_refuse_their_items_in_every_request_and_mode() -> None:
    bad = replace(event(2), partitions=("\0",))
    batch = [Request((event(1),)), Request((event(3), bad, bad)), Request((event(4), bad), Mode.UNTIL_REFUSED)]
    read_set = build_read_set(batch, Settings())
    assert list(read_set.faults) == [2, 3, 5]
    verdicts = plan(batch, Snapshot(), 1, faults=read_set.faults).verdicts
    assert verdicts == plan(batch, Snapshot(), 1).verdicts
    assert [[isinstance(verdict, Refused) for verdict in each] for each in verdicts] == [
        [False],
        [False, True, True],
        [False, True],
    ]


def test_text_as_request_mode_is_refused() -> None:
    log = Log()
    for mode in ("all", "each", None):
        verdicts = log.submit([Request((event(1), event(2)), mode)], 5)[0]  # type: ignore[arg-type]
        assert [assert_refused(one, Reason.MALFORMED).field for one in verdicts] == ["mode", "mode"]
    assert not log.records


@pytest.mark.rule("CO-30", "DE-5")
def test_row_above_the_column_limit_is_refused() -> None:
    log = Log()
    assert_committed(log(delta(1, 1, **many_columns(1000))))
    assert_refused(log(delta(2, 2, one_more="1")), Reason.TOO_MANY_COLUMNS)
    assert_committed(log(delta(3, 3, c0="2")))
    assert_committed(log(delta(4, 4, op=Op.DELETE)))
    assert_committed(log(delta(5, 5, one_more="1")))


@pytest.mark.rule("CO-30", "DE-5")
def test_row_above_the_byte_limit_is_refused() -> None:
    log = Log()
    long = "1" * (ROW_BYTES_MAX // 2)
    assert_committed(log(delta(1, 1, a=long, b=long)))
    assert_refused(log(delta(2, 2, c="1")), Reason.ROW_TOO_LARGE)
    assert_committed(log(delta(3, 3, b="1")))
    assert_committed(log(delta(4, 4, c="1")))


@pytest.mark.rule("CO-17")
def test_every_change_increments_the_revision_of_its_lane() -> None:
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


def test_plan_is_deterministic_and_does_not_modify_the_snapshot() -> None:
    batch = [Request((event(1), event(1), event(2))), Request((result(1), message(1), transaction(1, 1)))]
    snapshot = Snapshot()
    assert plan(batch, snapshot, 5) == plan(batch, snapshot, 5)
    assert snapshot == Snapshot(), "the snapshot is not modified"


def test_subclass_of_str_is_refused_as_scope() -> None:
    class Name(str):
        __slots__ = ()

    for scope in ("notes/1", Name("notes/1")):
        (verdict,) = plan([Request((replace(result(1), scope=scope),))], Snapshot(), 0).verdicts[0]
        assert isinstance(verdict, Committed if type(scope) is str else Refused)


def test_every_item_type_has_checks_and_a_rule() -> None:
    items = {*get_args(OtherItem)}
    assert items == {*_RULES} == {*_CHECKS}
