"""The one decision: what becomes of each item of a batch, and what to save for it.

`plan` sees a batch, what the store remembers about it, and a time. It does no I/O, reads no clock and draws no random
number: the same input gives the same output on every engine, in a replay and in a simulation. Outcomes are values.

A submission is checked in one order, whatever its policy:

    shape · membership · identity · sequence and lease · expected position · conditions · clock drift ·
    application's validation · limits of new writes

A known identity is answered at its check and nothing below it is looked at again: a retry of a committed write gets
its answer though its expectation is stale by now, the validation stricter or the limits used up.

Items are decided one after the other, each on what the ones before it leave behind (`desk`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.admission import Admission
from oncelog.core.audit import record_act
from oncelog.core.consumers import set_cursor
from oncelog.core.desk import Desk, LaneDesk
from oncelog.core.effects import effects_of
from oncelog.core.event_ids import other_identities, wrong_scope
from oncelog.core.folds import fold_rows
from oncelog.core.hlc import drift_of
from oncelog.core.leaps import leap
from oncelog.core.leases import claim, lease_in_the_way, release, renew, settle
from oncelog.core.members import acknowledge, not_a_member, open_stream, set_member
from oncelog.core.merge import RowDelta
from oncelog.core.policy import OnReuse
from oncelog.core.quotas import beyond_quota, count_write, of_request
from oncelog.core.rates import held_back, take
from oncelog.core.sequences import advance, not_the_next
from oncelog.core.shape import malformed, malformed_request
from oncelog.core.tenants import Tenants
from oncelog.core.tombstones import drop_tombstones
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Changes,
    Claim,
    Committed,
    DropTombstones,
    FoldRows,
    Granted,
    Item,
    KeyIdentity,
    Leap,
    Mode,
    OpenStream,
    OtherItem,
    Reason,
    Receipt,
    Record,
    RecordAct,
    Refused,
    Release,
    Remembered,
    Renew,
    Replayed,
    Request,
    SetCursor,
    SetMember,
    Snapshot,
    Submission,
    Verdict,
    key_identity,
)

_EACH: Final = Mode.EACH  # Python 3.11 takes long to find an enum's member
_ALL: Final = Mode.ALL
_ANY_REASON: Final = frozenset(Reason)
_LIMITS: Final = frozenset({Reason.RATE_LIMITED, Reason.QUOTA_EXCEEDED})
"""Refusals of the last check: nothing is wrong with the write."""

Validate = Callable[[Submission], str | None]
"""An application's own check of a new write: None, or what is wrong with it. Must be pure, and must not raise."""
_SideStateItem = Claim | Renew | Release | OpenStream | SetMember | Acknowledge | SetCursor | DropTombstones | FoldRows


class Plan(Struct, frozen=True):
    """One verdict an item, request by request, and all that must be saved before any of them is told."""

    verdicts: list[list[Verdict]]
    changes: Changes


def plan(
    batch: Sequence[Request],
    snapshot: Snapshot,
    now_ms: int,
    validate: Validate | None = None,
    faults: Mapping[int, Refused] | None = None,
) -> Plan:
    """Decides a batch. `snapshot` must hold what `footprint` names; `now_ms` is the time it is proposed at.

    `faults` are those that the batch's footprint found, so that shapes are checked once.
    """
    desk = Desk(snapshot, now_ms, faults)
    verdicts = [_decide_request(request, desk, validate) for request in batch]
    if desk.leap and len(desk.records) > snapshot.settings.lanes + 1:
        raise ValueError("a leap must be the only item of its batch: a restore record is the only one of its block")
    return Plan(verdicts, desk.changes())


def _decide_request(request: Request, desk: Desk, validate: Validate | None) -> list[Verdict]:
    if request.mode is not _EACH or request.is_admitted_whole:
        refused = malformed_request(request)
        if refused is not None:
            return [refused] * len(request.items)
    if request.mode is _ALL or (request.is_admitted_whole and _has_limits(request, desk)):
        return _decide_undoable(request, desk, validate)
    return _decide_items(request, desk, validate)


def _decide_items(request: Request, desk: Desk, validate: Validate | None) -> list[Verdict]:
    if request.mode is _EACH:
        return [_decide(item, desk, validate) for item in request.items]
    return _until_refused(request.items, desk, validate)


def _until_refused(items: Sequence[Item], desk: Desk, validate: Validate | None) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for index, item in enumerate(items):
        verdicts.append(_decide(item, desk, validate))
        if isinstance(verdicts[-1], Refused):
            return verdicts + [_skipped(index)] * (len(items) - index - 1)
    return verdicts


def _decide_undoable(request: Request, desk: Desk, validate: Validate | None) -> list[Verdict]:
    """Decide a request that one refusal can undo: any refusal with `Mode.ALL`, one of a limit if admitted whole."""
    mark = desk.mark()
    admission = desk.admission = Admission() if request.is_admitted_whole else None
    verdicts = _decide_items(request, desk, validate)
    desk.admission = None
    undoing = _ANY_REASON if request.mode is _ALL else _LIMITS
    refused = next(
        (index for index, one in enumerate(verdicts) if isinstance(one, Refused) and one.reason in undoing), None
    )
    if refused is None and admission is not None and admission.refused is not None:
        admitted = [index for index, one in enumerate(verdicts) if isinstance(one, Committed)]
        admitted = admitted or [index for index, one in enumerate(verdicts) if _is_change(one)]
        refused = admitted[-1]
        verdicts[refused] = admission.refused
    if refused is None:
        desk.keep()
        return verdicts
    desk.undo(mark)
    verdicts[refused] = of_request(verdicts[refused], desk)
    others = len(verdicts) - refused - 1
    return [_skipped(refused)] * refused + verdicts[refused : refused + 1] + [_skipped(refused)] * others


def _has_limits(request: Request, desk: Desk) -> bool:
    """Return whether a limit could refuse a new item of the request."""
    if desk.tenants is not None:
        return True
    for item in request.items:
        if isinstance(item, Submission):
            if item.retry_after_ms > 0 or item.rate is not None or item.stream_rate is not None:
                return True
        elif isinstance(item, Claim | OpenStream | SetMember) and item.retry_after_ms > 0:
            return True
    return False


def _is_change(verdict: Verdict) -> bool:
    return isinstance(verdict, Granted) or (isinstance(verdict, Applied) and verdict.changed)


def _skipped(index: int) -> Refused:
    return Refused(Reason.NOT_PROCESSED, f"item {index} was refused", index=index)


def _decide(item: Item, desk: Desk, validate: Validate | None) -> Verdict:
    faults = desk.faults
    refused = malformed(item) if faults is None else faults.get(id(item))
    if refused is not None:
        return refused
    if isinstance(item, Submission):
        return _decide_submission(item, desk, validate)
    return _decide_other(item, desk)


def _decide_other(item: OtherItem, desk: Desk) -> Verdict:
    match item:
        case Claim():
            return _decide_claim(item, desk)
        case Renew():
            return renew(item, desk.lane(item.policy, item.scope), desk)
        case Release():
            return release(item, desk.lane(item.policy, item.scope), desk)
        case OpenStream():
            return open_stream(item, desk)
        case SetMember():
            return set_member(item, desk)
        case Acknowledge():
            return acknowledge(item, desk)
        case SetCursor():
            return set_cursor(item, desk)
        case _:
            return _decide_maintenance(item, desk)


def _decide_maintenance(item: DropTombstones | FoldRows | Leap | RecordAct, desk: Desk) -> Verdict:
    match item:
        case DropTombstones():
            return drop_tombstones(item, desk)
        case FoldRows():
            return fold_rows(item, desk)
        case Leap():
            return leap(item, desk)
        case RecordAct():
            return record_act(item, desk)


def _decide_claim(item: Claim, desk: Desk) -> Granted | Replayed | Refused:
    lane = desk.lane(item.policy, item.scope)
    remembered = desk.keys.get(key_identity(item))
    return (None if remembered is None else _known(item, remembered, lane)) or claim(item, lane, desk)


def _decide_submission(submission: Submission, desk: Desk, validate: Validate | None) -> Verdict:
    policy = submission.policy
    if policy.members_only:
        refused = not_a_member(submission.scope, submission.actor, desk)
        if refused is not None:
            return refused
    lane = desk.lane(policy, submission.scope)
    identity = key_identity(submission)
    remembered = desk.keys.get(identity) if submission.key else None
    answer = None if remembered is None else _known(submission, remembered, lane)
    if desk.tenants is not None and desk.tenants.event_scopes and not isinstance(answer, Replayed):
        answer = _known_in_other_scope(submission, desk.tenants, desk) or answer
    if answer is None and policy.client_sequence:
        answer = not_the_next(submission, lane, desk)
    if answer is None and policy.leased:
        answer = lease_in_the_way(submission, lane, desk)
    if answer is not None:
        return answer
    last = desk.streams.get(submission.scope) or 0 if lane.number else 0  # streams are not in lane 0
    refused = _not_expected(submission, lane.position, last)
    if refused is not None:
        return refused
    sequence = _next_sequence(submission.scope, last, desk) if lane.number else 0
    if policy.entities or policy.rows:
        return _decide_effects(submission, identity, sequence, lane, desk, validate)
    refused = _check_content(submission, lane, validate) or _check_limits(submission, lane, desk)
    return refused or _commit(submission, identity, sequence, lane, desk)


def _decide_effects(
    submission: Submission,
    identity: KeyIdentity,
    sequence: int,
    lane: LaneDesk,
    desk: Desk,
    validate: Validate | None,
) -> Verdict:
    effects = effects_of(submission, sequence, lane.log_time_ms, desk)
    if isinstance(effects, Refused):
        return effects
    # The application validates the delta of the client; limits count the body that is stored.
    stored = submission if effects.body is None else replace(submission, body=effects.body)
    growth = 0 if desk.tenants is None else effects.growth(desk)
    refused = _check_content(submission, lane, validate) or _check_limits(stored, lane, desk, growth)
    if refused is not None:
        return refused
    effects.apply(desk)
    return _commit(stored, identity, sequence, lane, desk, growth)


def _next_sequence(scope: str, last: int, desk: Desk) -> int:
    floor = (desk.floors.get(scope) or 0) if desk.has_floors else 0
    return max(last, floor) + 1 if floor else last + 1


# --- the checks, in their order ----------------------------------------------------------------------


def _known(item: Submission | Claim, remembered: Remembered, lane: LaneDesk) -> Replayed | Refused | None:
    """None if it has been forgotten."""
    if not lane.remembers(item.policy.retention, remembered.receipt.log_time_ms):
        return None
    return known_answer(item, remembered)


def _known_in_other_scope(submission: Submission, tenants: Tenants, desk: Desk) -> Replayed | Refused | None:
    """Answer an event that was committed in another scope of its id, and refuse a new one in a wrong scope.

    Equal content has equal partitions, so it is the same event. Other content may be another tenant's.
    """
    for identity in other_identities(submission, tenants):
        remembered = desk.keys.get(identity)
        if remembered is not None and remembered.fingerprint == submission.fingerprint:
            return Replayed(remembered.receipt, erased=remembered.erased)
    return wrong_scope(submission, tenants)


def known_answer(item: Submission | Claim, remembered: Remembered) -> Replayed | Refused:
    """The answer of a known identity. All it takes is what is remembered of it, so that a cache can give it too.

    The caller must know that the item is well formed, that its sender may have the answer (where only members may
    write: still is one), and that the identity has not been forgotten by the lane's log time.
    """
    mismatch = remembered.fingerprint != item.fingerprint
    if mismatch and item.policy.on_reuse is OnReuse.REFUSE:
        return Refused(
            Reason.IDENTITY_REUSED,
            "this identity was used for a write with other content; nothing was written",
            field="key",
        )
    return Replayed(remembered.receipt, mismatch, remembered.erased)


def _not_expected(submission: Submission, position: int, last_sequence: int) -> Refused | None:
    if submission.expected_position is not None and submission.expected_position != position:
        return _unexpected("expected_position", submission.expected_position, position)
    if submission.expected_sequence is not None and submission.expected_sequence != last_sequence:
        return _unexpected("expected_sequence", submission.expected_sequence, last_sequence)
    return None


def _unexpected(field: str, expected: int, current: int) -> Refused:
    return Refused(
        Reason.UNEXPECTED_POSITION, f"expected {expected} as the newest, but it is {current}", field, current
    )


def _check_content(submission: Submission, lane: LaneDesk, validate: Validate | None) -> Refused | None:
    """Check the clock drift, then ask the application's validation."""
    if submission.delta is not None and (refused := _drifted(submission.delta, lane)) is not None:
        return refused
    return None if validate is None else _objected(submission, validate)


def _check_limits(submission: Submission, lane: LaneDesk, desk: Desk, growth: int = 0) -> Refused | None:
    """Check the limits of new writes. `growth` is what the write adds to the side state of its stream."""
    if submission.retry_after_ms > 0 and (refused := held_back(submission)) is not None:
        return refused
    if desk.tenants is not None:
        refused = beyond_quota(submission, desk, growth)
        if refused is not None:
            return refused
    if submission.rate is not None or submission.stream_rate is not None:
        return take(submission, lane, desk)  # the last check of all: what passes it is committed
    return None


def _drifted(delta: RowDelta, lane: LaneDesk) -> Refused | None:
    drift = drift_of(delta.hlc, lane.log_time_ms)
    if drift is None:
        return None
    return Refused(
        Reason.CLOCK_DRIFT,
        f"the clock is {drift.ahead_ms} ms ahead of the log's; at most {drift.limit_ms} ms are accepted",
        field="hlc",
        current=lane.log_time_ms,
    )


def _objected(submission: Submission, validate: Validate) -> Refused | None:
    objection = validate(submission)
    return None if objection is None else Refused(Reason.INVALID, objection, field="body")


# --- the commit --------------------------------------------------------------------------------------


def _commit(
    submission: Submission, identity: KeyIdentity, sequence: int, lane: LaneDesk, desk: Desk, growth: int = 0
) -> Committed:
    policy = submission.policy
    number, position, log_time_ms, height = lane.number, lane.next_position(), lane.log_time_ms, lane.height
    receipt = Receipt(number, position, sequence, log_time_ms, height, submission.client_sequence)
    remembered = Remembered(receipt, submission.fingerprint)
    if submission.key:
        desk.keys.put(identity, remembered)
    if sequence:
        desk.streams.put(submission.scope, sequence)
        if desk.has_floors and desk.floors.get(submission.scope) is not None:
            desk.floors.put(submission.scope, None)
    if policy.client_sequence:
        advance(submission, remembered, desk)
    if policy.leased:
        settle(submission, desk)
    if desk.tenants is not None:
        count_write(submission, desk, growth)
    desk.records.append(
        Record(
            number,
            position,
            sequence,
            log_time_ms,
            height,
            policy.name,
            submission.scope,
            submission.key,
            submission.fingerprint,
            submission.actor,
            submission.client,
            submission.client_sequence,
            submission.partitions,
            submission.body,
        )
    )
    if position % desk.settings.eviction_interval == 0:
        # The record at an evicting position applies first: what it renewed is not evicted by it.
        lane.eviction_time_ms = log_time_ms
    return Committed(receipt)
