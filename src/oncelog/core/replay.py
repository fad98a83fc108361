"""Replay: apply a committed record to side state again, using the functions that decided it.

A record determines its effects if its body is stored and contains the operations or the delta that match its
fingerprint and key. An erased body, or one in an application-specific form, does not determine effects: only the client
sequence is replayed.
"""

import msgspec
from msgspec.structs import replace

from oncelog.core.batch_state import BatchState
from oncelog.core.deltas import OP_FINGERPRINTS, decode_stored_delta
from oncelog.core.identity import request_hash
from oncelog.core.operations import SetEntity
from oncelog.core.policy import Policy
from oncelog.core.rules.compaction import build_horizon_delete
from oncelog.core.rules.effects import compute_effects
from oncelog.core.rules.sequences import advance_client, check_client_sequence
from oncelog.core.transactions import decode_operations
from oncelog.core.values import Record, Refused, Replayed, Submission
from oncelog.errors import CanonicalError


def rebuild_submission(record: Record, policy: Policy) -> Submission:
    """Rebuild the submission of a record, with the effects that its body determines."""
    submission = Submission(
        policy=policy,
        scope=record.scope,
        key=record.key,
        fingerprint=record.fingerprint,
        actor=record.actor,
        client=record.client,
        client_sequence=record.client_sequence,
    )
    if record.erased:
        return submission
    try:
        if policy.entities:
            operations = decode_operations(record)
            return replace(submission, operations=operations if request_hash(operations) == record.fingerprint else ())
        if policy.rows:
            delta = decode_stored_delta(record.body)
            is_own = delta.delta_id == record.key and OP_FINGERPRINTS[delta.op] == record.fingerprint
            # If a delta lost to a tombstone horizon, the body is the DELETE at the horizon.
            if is_own or delta == build_horizon_delete(delta.hlc, delta.table, delta.row_id):
                return replace(submission, delta=delta)
    except (CanonicalError, msgspec.MsgspecError, UnicodeError):
        pass
    return submission


def has_effects(submission: Submission) -> bool:
    """Return whether the effects of a replayed submission are known."""
    return bool(submission.operations) or submission.delta is not None


def list_set_keys(record: Record, policy: Policy) -> list[str] | None:
    """Return the keys of the entities that a record sets, or None if its body does not determine them."""
    submission = rebuild_submission(record, policy)
    if not submission.operations:
        return None
    return list({operation.key: None for operation in submission.operations if isinstance(operation, SetEntity)})


def drop_conditions(submission: Submission) -> Submission:
    """Return the submission without conditions, for a scope in which the state of some entities is unknown."""
    operations = [
        replace(operation, condition=None) if isinstance(operation, SetEntity) else operation
        for operation in submission.operations
    ]
    return replace(submission, operations=tuple(operations))


def replay_record(
    record: Record, submission: Submission, eviction_time_ms: int, state: BatchState
) -> Refused | Replayed | None:
    """Apply a record to the batch state, at its log time and after its lane's preceding eviction.

    Return None, or the answer that the write would have received instead of a commit.
    """
    policy = submission.policy
    lane = state.get_policy_lane(policy, record.scope)
    lane.log_time_ms, lane.eviction_time_ms = record.log_time_ms, eviction_time_ms
    if policy.client_sequence:
        answer = check_client_sequence(submission, lane, state)
        if answer is not None:
            return answer
        advance_client(submission, record.remembered, state)
    if has_effects(submission):
        effects = compute_effects(submission, record.sequence, record.log_time_ms, state)
        if isinstance(effects, Refused):
            return effects
        effects.apply(state)
    return None
