"""The decision function: duplicates, conflicts, order, leases and quotas of a batch.

`plan` takes a batch, the stored state that the batch needs, and a time, and returns verdicts and changes. It does no
I/O, reads no clock and draws no random numbers, so the same input gives the same output on every engine, in a replay
and in a simulation. Outcomes are values.

A submission is checked in the same order under every policy:

    shape · membership · identity · sequence and lease · expected position · conditions · clock drift ·
    the application's validation · limits on new writes

The identity check answers a known write and skips the later checks. A retry of a committed write therefore gets its
answer even if its expectation is stale, the validation has become stricter, or a limit has been reached.

Items are decided in order. Each sees the state that the previous items left (`BatchState`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.batch_state import Admission, BatchState, LaneDraft
from oncelog.core.hlc import check_drift
from oncelog.core.rules.audit import record_act
from oncelog.core.rules.compaction import drop_tombstones, fold_rows
from oncelog.core.rules.duplicates import answer_in_other_scope, answer_known
from oncelog.core.rules.effects import compute_effects
from oncelog.core.rules.leaps import decide_leap
from oncelog.core.rules.leases import check_lease, claim, clear_lease, release, renew
from oncelog.core.rules.members import acknowledge, check_member, open_stream, set_cursor, set_member
from oncelog.core.rules.quotas import check_quota, count_write, restate_refusal, take_tokens
from oncelog.core.rules.sequences import advance_client, check_client_sequence
from oncelog.core.validation import check_item, check_request
from oncelog.core.values import (
    NOT_KNOWN,
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

_EACH: Final = Mode.EACH  # constants because Python 3.11 is slow to look up an enum member
_ALL: Final = Mode.ALL
_ANY_REASON: Final = frozenset(Reason)
LIMIT_REASONS: Final = frozenset({Reason.RATE_LIMITED, Reason.QUOTA_EXCEEDED, Reason.NOT_KNOWN})
"""Refusals by the last check. The write itself is valid, and a later retry may be accepted."""

Validate = Callable[[Submission], str | None]
"""The application's check of new writes. It returns None or a description of the fault, must be pure and must not
raise."""
I = TypeVar("I", bound=Item)  # noqa: E741 - I for item


class Plan(Struct, frozen=True):
    """The verdicts, grouped by request, and the changes to save before any verdict is returned."""

    verdicts: list[list[Verdict]]
    changes: Changes


def plan(
    batch: Sequence[Request],
    snapshot: Snapshot,
    now_ms: int,
    validate: Validate | None = None,
    faults: Mapping[int, Refused] | None = None,
) -> Plan:
    """Decide a batch. `now_ms` is the proposed log time.

    `snapshot` must include all keys in the read set of the batch (`build_read_set`).

    `faults` are the refusals that `build_read_set` found. If given, `plan` does not validate the items again.
    """
    state = BatchState(snapshot, now_ms, faults)
    verdicts: list[list[Verdict]] = []
    first = 0
    for request in batch:
        verdicts.append(_decide_request(request, first, state, validate))
        first += len(request.items)
    if state.leap_above and len(state.records) > snapshot.settings.lanes + 1:
        raise ValueError(
            "a leap must be the only item in its batch, because a restore record must be alone in its block"
        )
    return Plan(verdicts, state.collect_changes())


def _decide_request(request: Request, first: int, state: BatchState, validate: Validate | None) -> list[Verdict]:
    if request.mode is not _EACH or request.is_admitted_whole:
        refused = check_request(request)
        if refused is not None:
            return [refused] * len(request.items)
    is_limited = request.is_admitted_whole and (state.tenants is not None or any(map(_has_limit, request.items)))
    if request.mode is _ALL or is_limited:
        return _decide_atomically(request, first, state, validate)
    return _decide_items(request, first, state, validate)


def _decide_items(request: Request, first: int, state: BatchState, validate: Validate | None) -> list[Verdict]:
    """Decide the items of a request. `first` is the index of its first item in the batch."""
    verdicts: list[Verdict] = []
    for index, item in enumerate(request.items):
        verdict = _decide(item, first + index, state, validate)
        verdicts.append(verdict)
        if type(verdict) is Refused and request.mode is not _EACH:
            return verdicts + [refuse_skipped(index)] * (len(request.items) - index - 1)
    return verdicts


def _decide_atomically(request: Request, first: int, state: BatchState, validate: Validate | None) -> list[Verdict]:
    """Decide a request, and undo it on a refusal.

    With `Mode.ALL`, any refusal undoes the request. A refusal by a limit undoes a request that is admitted as a whole.
    """
    state.savepoint()
    admission = state.admission = Admission() if request.is_admitted_whole else None
    verdicts = _decide_items(request, first, state, validate)
    state.admission = None
    undoing = _ANY_REASON if request.mode is _ALL else LIMIT_REASONS
    refused = next(
        (index for index, verdict in enumerate(verdicts) if isinstance(verdict, Refused) and verdict.reason in undoing),
        None,
    )
    if refused is None and admission is not None and admission.refusal is not None:
        admitted = [index for index, verdict in enumerate(verdicts) if isinstance(verdict, Committed)]
        admitted = admitted or [index for index, verdict in enumerate(verdicts) if _is_change(verdict)]
        refused = admitted[-1]
        verdicts[refused] = admission.refusal
    if refused is None:
        state.release()
        return verdicts
    state.rollback()
    verdicts[refused] = restate_refusal(verdicts[refused], state)
    skipped = refuse_skipped(refused)
    return [verdict if index == refused else skipped for index, verdict in enumerate(verdicts)]


def _has_limit(item: Item) -> bool:
    """Return whether a limit other than a quota may refuse a new item."""
    if isinstance(item, Submission):
        return item.known_only or item.rate is not None or item.stream_rate is not None
    return isinstance(item, Claim | OpenStream | SetMember) and item.known_only


def _is_change(verdict: Verdict) -> bool:
    return isinstance(verdict, Granted) or (isinstance(verdict, Applied) and verdict.changed)


def refuse_skipped(index: int) -> Refused:
    """Return the verdict for items that are skipped because the item at this index was refused."""
    return Refused(Reason.NOT_PROCESSED, f"item {index} was refused", index=index)


def _decide(item: Item, index: int, state: BatchState, validate: Validate | None) -> Verdict:
    faults = state.faults
    refused = check_item(item) if faults is None else faults.get(index) if faults else None
    if refused is not None:
        return refused
    if isinstance(item, Submission):
        return _decide_submission(item, state, validate)
    return _RULES[type(item)](item, state)


def _rule(
    kind: type[I], decide: Callable[[I, BatchState], Verdict]
) -> tuple[type, Callable[[Any, BatchState], Verdict]]:
    """Pair an item type with its decision function, so that the type checker can check that they match."""
    return kind, decide


_RULES: Final[Mapping[type, Callable[[Any, BatchState], Verdict]]] = dict(
    (
        _rule(Claim, claim),
        _rule(Renew, renew),
        _rule(Release, release),
        _rule(OpenStream, open_stream),
        _rule(SetMember, set_member),
        _rule(Acknowledge, acknowledge),
        _rule(SetCursor, set_cursor),
        _rule(DropTombstones, drop_tombstones),
        _rule(FoldRows, fold_rows),
        _rule(Leap, decide_leap),
        _rule(RecordAct, record_act),
    )
)
"""Decision functions by item type, for all items except submissions."""


def _decide_submission(submission: Submission, state: BatchState, validate: Validate | None) -> Verdict:
    policy = submission.policy
    if policy.members_only and (refused := check_member(submission.scope, submission.actor, state)) is not None:
        return refused
    lane = state.get_policy_lane(policy, submission.scope)
    identity = key_identity(submission)
    remembered = state.keys.get(identity) if submission.key else None
    answer = None if remembered is None else answer_known(submission, remembered, lane)
    if state.tenants is not None and state.tenants.event_scopes and not isinstance(answer, Replayed):
        answer = answer_in_other_scope(submission, state.tenants, state) or answer
    if answer is None and policy.client_sequence:
        answer = check_client_sequence(submission, lane, state)
    if answer is None and policy.leased:
        answer = check_lease(submission, lane, state)
    if answer is not None:
        return answer
    last = state.streams.get(submission.scope) or 0 if lane.number else 0  # lane 0 has no streams
    if (refused := _check_expectation(submission, lane.position, last)) is not None:
        return refused
    sequence = _next_sequence(submission.scope, last, state) if lane.number else 0
    if policy.entities or policy.rows:
        return _decide_effects(submission, identity, sequence, lane, state, validate)
    refused = _check_content(submission, lane, validate) or _check_limits(submission, state)
    return refused or _commit(submission, identity, sequence, lane, state)


def _decide_effects(
    submission: Submission,
    identity: KeyIdentity,
    sequence: int,
    lane: LaneDraft,
    state: BatchState,
    validate: Validate | None,
) -> Verdict:
    effects = compute_effects(submission, sequence, lane.log_time_ms, state)
    if isinstance(effects, Refused):
        return effects
    # The application validates the client's delta. Limits count the stored body.
    stored = submission if effects.body is None else replace(submission, body=effects.body)
    growth = 0 if state.tenants is None else effects.compute_growth(state)
    refused = _check_content(submission, lane, validate) or _check_limits(stored, state, growth)
    if refused is not None:
        return refused
    effects.apply(state)
    return _commit(stored, identity, sequence, lane, state, growth)


def _next_sequence(scope: str, last: int, state: BatchState) -> int:
    floor = (state.floors.get(scope) or 0) if state.has_floors else 0
    return max(last, floor) + 1 if floor else last + 1


# --- checks, in their order --------------------------------------------------------------------------


def _check_expectation(submission: Submission, position: int, last_sequence: int) -> Refused | None:
    if submission.expected_position is not None and submission.expected_position != position:
        return _refuse_expectation("position", submission.expected_position, position)
    if submission.expected_sequence is not None and submission.expected_sequence != last_sequence:
        return _refuse_expectation("sequence", submission.expected_sequence, last_sequence)
    return None


def _refuse_expectation(kind: str, expected: int, current: int) -> Refused:
    message = f"the newest {kind} is {current}, not {expected}"
    return Refused(Reason.UNEXPECTED_POSITION, message, f"expected_{kind}", current)


def _check_content(submission: Submission, lane: LaneDraft, validate: Validate | None) -> Refused | None:
    """Check the clock drift, then call the application's validation."""
    drift = None if submission.delta is None else check_drift(submission.delta.hlc, lane.log_time_ms)
    if drift is not None:
        message = f"the clock is {drift.ahead_ms} ms ahead of the log's clock; at most {drift.limit_ms} ms are accepted"
        return Refused(Reason.CLOCK_DRIFT, message, field="hlc", current=lane.log_time_ms)
    objection = None if validate is None else validate(submission)
    return None if objection is None else Refused(Reason.INVALID, objection, field="body")


def _check_limits(submission: Submission, state: BatchState, growth: int = 0) -> Refused | None:
    """Check the limits on new writes. `growth` is how many bytes the write adds to its stream's side state."""
    if submission.known_only and not submission.fence:  # completing leased work is exempt: the claim was checked
        return NOT_KNOWN
    refused = None if state.tenants is None else check_quota(submission, state, growth)
    if refused is not None or (submission.rate is None and submission.stream_rate is None):
        return refused
    return take_tokens(submission, state)  # last, because it takes tokens that a later refusal would waste


# --- commit ------------------------------------------------------------------------------------------


def _commit(
    submission: Submission, identity: KeyIdentity, sequence: int, lane: LaneDraft, state: BatchState, growth: int = 0
) -> Committed:
    policy = submission.policy
    number, position, log_time_ms, height = lane.number, lane.advance_position(), lane.log_time_ms, lane.height
    receipt = Receipt(number, position, sequence, log_time_ms, height, submission.client_sequence)
    remembered = Remembered(receipt, submission.fingerprint)
    if submission.key:
        state.keys.put(identity, remembered)
    if sequence:
        state.streams.put(submission.scope, sequence)
        if state.has_floors and state.floors.get(submission.scope) is not None:
            state.floors.put(submission.scope, None)
    if policy.client_sequence:
        advance_client(submission, remembered, state)
    if policy.leased:
        clear_lease(submission, state)
    if state.tenants is not None:
        count_write(submission, state.tenants, state, growth)
    state.append(
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
        ),
        lane,
    )
    return Committed(receipt)
