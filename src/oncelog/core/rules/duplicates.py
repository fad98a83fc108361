"""Duplicates: answers to items whose key is already stored.

An item with equal content gets the original receipt. Different content under the same key is refused or answered as a
mismatch, depending on the policy.

An event id is unique in a scope: the event's tenant (`Tenant.own_ids`) or the whole log. The scope changes when a
tenant gets separate ids, and a server may still use the previous scope. An event is therefore looked up in every scope
in which it may have been committed (`Tenants.list_event_scopes`), and is known if the content is equal. A new event is
committed only in its current scope. All other scopes, such as those of projects, belong to the application: events in
such a scope are looked up only there.
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
"""A server with outdated tenants must reload them, which takes seconds."""


def answer_known(item: Submission | Claim, remembered: Remembered, lane: LaneDraft) -> Replayed | Refused | None:
    """Return the answer to a stored key, or None if the log has forgotten the key."""
    if not lane.remembers(item.policy.retention, remembered.receipt.log_time_ms):
        return None
    return answer_known_key(item, remembered)


def answer_in_other_scope(submission: Submission, tenants: Tenants, state: BatchState) -> Replayed | Refused | None:
    """Answer an event whose id was committed in a different scope, and refuse a new event in the wrong scope.

    Equal content implies equal partitions, so it is the same event. Different content may be an event of another
    tenant.
    """
    for identity in _iterate_other_identities(submission, tenants):
        remembered = state.keys.get(identity)
        if remembered is not None and remembered.fingerprint == submission.fingerprint:
            return Replayed(remembered.receipt, erased=remembered.erased)
    return _check_event_scope(submission, tenants)


def answer_known_key(item: Submission | Claim, remembered: Remembered) -> Replayed | Refused:
    """Return the answer to a remembered key. It depends only on the stored entry, so caches can compute it too.

    The caller has checked that the item is valid, that the sender may see the answer (as a member, if the policy
    requires it), and that the key is still retained at the log time of the lane.
    """
    mismatch = remembered.fingerprint != item.fingerprint
    if mismatch and item.policy.on_reuse is OnReuse.REFUSE:
        return Refused(
            Reason.IDENTITY_REUSED,
            "this identity was used for a write with different content; nothing was written; use a new id for a new "
            "write",
            field="key",
        )
    return Replayed(remembered.receipt, mismatch, remembered.erased)


def _iterate_other_identities(submission: Submission, tenants: Tenants) -> Iterator[KeyIdentity]:
    """Yield the identities, other than its current one, under which an event may have been committed."""
    if submission.policy.name == EVENTS.name and submission.scope in tenants.event_scopes:
        for scope in tenants.list_event_scopes(submission.partitions):
            if scope != submission.scope:
                yield EVENTS.name, scope, "", submission.key


def collect_event_identities(
    batch: Sequence[Request], tenants: Tenants, faults: Mapping[int, Refused]
) -> set[KeyIdentity]:
    """Return the other possible identities of all events in a batch, for its read set."""
    if not tenants.event_scopes:
        return set()
    return {
        identity
        for index, item in enumerate_items(batch)
        if isinstance(item, Submission) and index not in faults
        for identity in _iterate_other_identities(item, tenants)
    }


def _check_event_scope(submission: Submission, tenants: Tenants) -> Refused | None:
    """Refuse a new event whose id belongs in a different scope.

    Otherwise two servers that know different tenants could commit it at the same time under different identities.
    """
    if submission.policy.name != EVENTS.name or submission.scope not in tenants.event_scopes:
        return None
    scope = tenants.get_event_scope(submission.partitions)
    if scope == submission.scope:
        return None
    message = f"the event's id belongs in the scope {scope!r}, not {submission.scope!r}; reload the server's settings"
    return Refused(Reason.WRONG_SCOPE, message, field="scope", retry_after_ms=RETRY_AFTER_MS)
