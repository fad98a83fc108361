"""Duplicates: answers to items with a stored key.

An item with equal content gets the original receipt. Other content under the same key is refused or answered as a
mismatch, depending on the policy.

The id of an event is unique in a scope: that of its tenant (`Tenant.own_ids`) or that of the whole log
(`Tenants.list_event_scopes`). The scope changes when a tenant gets separate ids, and a server may still use the
previous scope. An event is therefore looked up in every scope in which it may have been committed; it is known if the
content is equal. A new event is committed in its current scope only. All other scopes, such as those of projects,
belong to the application; their events are looked up in that scope only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from oncelog.core.batch_state import BatchState, LaneDraft
from oncelog.core.policy import EVENTS, OnReuse
from oncelog.core.tenants import Tenants
from oncelog.core.values import (
    Claim,
    KeyIdentity,
    Reason,
    Refused,
    Remembered,
    Replayed,
    Request,
    Submission,
    enumerate_items,
)

RETRY_AFTER_MS: Final = 1000
"""A server with outdated tenants needs a reload, which takes seconds."""


def answer_known(item: Submission | Claim, remembered: Remembered, lane: LaneDraft) -> Replayed | Refused | None:
    """Return the answer to a stored key, or None if the log has forgotten the key."""
    if not lane.remembers(item.policy.retention, remembered.receipt.log_time_ms):
        return None
    return answer_known_key(item, remembered)


def answer_in_other_scope(submission: Submission, tenants: Tenants, state: BatchState) -> Replayed | Refused | None:
    """Answer an event that was committed in another scope of its id, and refuse a new event in a wrong scope.

    Equal content has equal partitions, so it is the same event. Other content may be the event of another tenant.
    """
    for identity in _iterate_other_identities(submission, tenants):
        remembered = state.keys.get(identity)
        if remembered is not None and remembered.fingerprint == submission.fingerprint:
            return Replayed(remembered.receipt, erased=remembered.erased)
    return _check_event_scope(submission, tenants)


def answer_known_key(item: Submission | Claim, remembered: Remembered) -> Replayed | Refused:
    """Return the answer to a remembered key. It depends only on the stored entry, so that caches can compute it.

    The caller has checked that the item is valid, that the sender may see the answer (as a member, if the policy
    requires it), and that the key is within its retention at the log time of the lane.
    """
    mismatch = remembered.fingerprint != item.fingerprint
    if mismatch and item.policy.on_reuse is OnReuse.REFUSE:
        return Refused(
            Reason.IDENTITY_REUSED,
            "this identity was used for a write with different content; nothing was written",
            field="key",
        )
    return Replayed(remembered.receipt, mismatch, remembered.erased)


def _iterate_other_identities(submission: Submission, tenants: Tenants) -> Iterator[KeyIdentity]:
    """Yield the identities under which an event may have been committed, except for its current one."""
    if submission.policy.name == EVENTS.name and submission.scope in tenants.event_scopes:
        for scope in tenants.list_event_scopes(submission.partitions):
            if scope != submission.scope:
                yield EVENTS.name, scope, "", submission.key


def collect_event_identities(
    batch: Sequence[Request], tenants: Tenants, faults: Mapping[int, Refused]
) -> set[KeyIdentity]:
    """Return the other identities of all events of a batch, for its read set."""
    if not tenants.event_scopes:
        return set()
    return {
        identity
        for index, item in enumerate_items(batch)
        if isinstance(item, Submission) and index not in faults
        for identity in _iterate_other_identities(item, tenants)
    }


def _check_event_scope(submission: Submission, tenants: Tenants) -> Refused | None:
    """Refuse a new event whose id belongs in another scope.

    Otherwise two servers with different tenants could commit it at the same time under different identities.
    """
    if submission.policy.name != EVENTS.name or submission.scope not in tenants.event_scopes:
        return None
    scope = tenants.get_event_scope(submission.partitions)
    if scope == submission.scope:
        return None
    message = f"the id of this event belongs in the scope {scope!r}, not {submission.scope!r}: reload the server"
    return Refused(Reason.WRONG_SCOPE, message, field="scope", retry_after_ms=RETRY_AFTER_MS)
