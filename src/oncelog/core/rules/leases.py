"""Leases: the right of one caller to work on a key, until it expires or is released.

Every lease has a holder token, which only the caller that claimed the lease knows, and a fencing number that is unique
in its lane. A lease expires by log time (`_is_active`). An expired lease still belongs to its holder until another
caller claims the key, so that slow work is not lost unnecessarily. The lease is forgotten LEASE_MEMORY_MS later
(`is_forgotten`), even if its row is still stored.
"""

from typing import Final

from msgspec.structs import replace

from oncelog.core.batch_state import BatchState, LaneDraft
from oncelog.core.canonical import canonical
from oncelog.core.limits import LEASE_MEMORY_MS
from oncelog.core.policy import OnReuse
from oncelog.core.rules.audit import LEASE_RELEASED, append_act
from oncelog.core.rules.duplicates import answer_known
from oncelog.core.rules.quotas import check_quota, count_in_stream
from oncelog.core.values import (
    NOT_KNOWN,
    Applied,
    Claim,
    Granted,
    KeyIdentity,
    Lease,
    Reason,
    RecordAct,
    Refused,
    Release,
    Renew,
    Replayed,
    Submission,
    key_identity,
)

_NO_LEASE: Final = Lease(fence=0, holder="", until_ms=0, fingerprint=b"")


def claim(item: Claim, state: BatchState) -> Granted | Replayed | Refused:
    """For a known key, return the answer that its record determines. For a new key, grant a lease unless another caller
    has an active one.
    """
    lane = state.get_policy_lane(item.policy, item.scope)
    remembered = state.keys.get(key_identity(item))
    answer = None if remembered is None else answer_known(item, remembered, lane)
    return answer or _grant(item, lane, state)


def _grant(item: Claim, lane: LaneDraft, state: BatchState) -> Granted | Refused:
    identity = key_identity(item)
    lease = _find_lease(identity, lane, state)
    if lease is not None:
        if 0 < item.waited_for <= lease.failed_fence:
            return Refused(Reason.RUN_FAILED, "the awaited run failed", current=lease.failed_fence, value=lease.failure)
        is_the_same = lease.holder == item.holder and not _has_other_content(lease, item)
        if _is_active(lease, lane) and not is_the_same:
            return _refuse_busy(lease, item, lane)
        if is_the_same:
            return _extend(replace(lease, fingerprint=item.fingerprint), item, lane, state)
    if item.known_only:
        return NOT_KNOWN
    if (refused := check_quota(item, state)) is not None:
        return refused
    count_in_stream(item.scope, state, takes_token=True)
    lane.fence += 1
    until_ms = lane.log_time_ms + item.lease_ms
    # Keep the failure of an earlier lease for the callers that waited for it.
    granted = replace(
        lease or _NO_LEASE, fence=lane.fence, holder=item.holder, until_ms=until_ms, fingerprint=item.fingerprint
    )
    return _put_lease(identity, granted, lane, state)


def renew(item: Renew, state: BatchState) -> Granted | Refused:
    """Extend a lease that the caller still holds."""
    lane = state.get_policy_lane(item.policy, item.scope)
    lease = _find_lease(key_identity(item), lane, state)
    if lease is None or not _is_held(lease, item):
        return _refuse_lost(item.fence, lease)
    return _extend(lease, item, lane, state)


def _extend(lease: Lease, item: Claim | Renew, lane: LaneDraft, state: BatchState) -> Granted:
    """Extend a lease. A repeated claim never shortens it."""
    until_ms = max(lease.until_ms, lane.log_time_ms + item.lease_ms)
    return _put_lease(key_identity(item), replace(lease, until_ms=until_ms), lane, state)


def release(item: Release, state: BatchState) -> Applied:
    """Release a lease. Does nothing if another caller has taken over."""
    lane = state.get_policy_lane(item.policy, item.scope)
    lease = _find_lease(key_identity(item), lane, state)
    if lease is None or not _is_held(lease, item):
        return Applied(changed=False)
    released = replace(lease, holder="", until_ms=lane.log_time_ms)
    if item.failure is not None:
        released = replace(released, failed_fence=lease.fence, failure=item.failure)
    _put_lease(key_identity(item), released, lane, state)
    if item.actor:
        act = RecordAct(
            act=LEASE_RELEASED,
            actor=item.actor,
            scope=item.scope,
            target=item.key.hex(),
            details=canonical({"fence": lease.fence, "policy": item.policy.name}),
        )
        append_act(act, lane, state)
    return Applied(changed=True)


def check_lease(submission: Submission, lane: LaneDraft, state: BatchState) -> Refused | None:
    """Return None if the submission may complete its key: under the caller's lease, or with no active lease."""
    lease = _find_lease(key_identity(submission), lane, state)
    if submission.fence:
        if lease is None or not _is_held(lease, submission):
            return _refuse_lost(submission.fence, lease)
        return _refuse_busy(lease, submission, lane) if _has_other_content(lease, submission) else None
    if lease is not None and _is_active(lease, lane):
        return _refuse_busy(lease, submission, lane)
    return None


def clear_lease(submission: Submission, state: BatchState) -> None:
    """Remove the lease of a key that is being committed."""
    identity = key_identity(submission)
    if state.leases.get(identity) is not None:
        state.leases.put(identity, None)


def _find_lease(identity: KeyIdentity, lane: LaneDraft, state: BatchState) -> Lease | None:
    lease = state.leases.get(identity)
    return None if lease is None or is_forgotten(lease, lane.log_time_ms) else lease


def is_forgotten(lease: Lease, log_time_ms: int) -> bool:
    """Return whether a lease ended more than LEASE_MEMORY_MS ago and is treated as absent."""
    return log_time_ms > lease.until_ms + LEASE_MEMORY_MS


def _is_active(lease: Lease, lane: LaneDraft) -> bool:
    return bool(lease.holder) and lane.log_time_ms < lease.until_ms


def _is_held(lease: Lease, item: Renew | Release | Submission) -> bool:
    """Return whether the caller holds the lease, or is an operator that releases it. A released lease has no holder.

    Holder and fence must both match: a competing caller learns the fence of the lease that it waits for, but never its
    holder.
    """
    is_operator = isinstance(item, Release) and item.actor != ""
    return bool(lease.holder) and lease.fence == item.fence and (is_operator or lease.holder == item.holder)


def _has_other_content(lease: Lease, item: Claim | Submission) -> bool:
    """Return whether the current lease is for a write with different content and the policy refuses that."""
    return lease.fingerprint != item.fingerprint and item.policy.on_reuse is OnReuse.REFUSE


def _put_lease(identity: KeyIdentity, lease: Lease, lane: LaneDraft, state: BatchState) -> Granted:
    state.leases.put(identity, lease)
    lane.is_touched = True
    return Granted(lease.fence, lease.until_ms)


def _refuse_busy(lease: Lease, item: Claim | Submission, lane: LaneDraft) -> Refused:
    if _has_other_content(lease, item):
        return Refused(
            Reason.IDENTITY_REUSED, "a write with different content is in progress under this identity", "key"
        )
    return Refused(
        Reason.IN_FLIGHT,
        "another caller is working on this key",
        current=lease.fence,
        retry_after_ms=lease.until_ms - lane.log_time_ms,
    )


def _refuse_lost(fence: int, lease: Lease | None) -> Refused:
    return Refused(
        Reason.LEASE_LOST,
        f"lease {fence} has been taken over or released",
        field="fence",
        current=lease.fence if lease else 0,
    )
