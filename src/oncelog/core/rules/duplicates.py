"""Duplicates: the answer of an item whose key is stored already.

Equal content is answered with the original receipt. Other content under the same key is refused, or answered as a
mismatch, as the policy says.

The id of an event is unique in a scope: that of its tenant (`Tenant.own_ids`), or that of the whole log
(`Tenants.list_event_scopes`). The scope changes when a tenant gets separate ids, and a server may still use the
previous one. So an event is looked up in every scope that it may have been committed in, and is known if the content is
equal. A new event is committed in its present scope only. Other scopes, as those of projects, are the application's:
their events are looked up there and nowhere else.
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
"""A server whose settings are older than the log's tenants needs a reload, which takes seconds."""


def answer_known(item: Submission | Claim, remembered: Remembered, lane: LaneDraft) -> Replayed | Refused | None:
    """Return the answer of a stored key, or None if the log does not remember the key any more."""
    if not lane.remembers(item.policy.retention, remembered.receipt.log_time_ms):
        return None
    return answer_known_key(item, remembered)


def answer_in_other_scope(submission: Submission, tenants: Tenants, state: BatchState) -> Replayed | Refused | None:
    """Answer an event that was committed in another scope of its id, and refuse a new one in a wrong scope.

    Equal content has equal partitions, so it is the same event. Other content may be another tenant's.
    """
    for identity in _iterate_other_identities(submission, tenants):
        remembered = state.keys.get(identity)
        if remembered is not None and remembered.fingerprint == submission.fingerprint:
            return Replayed(remembered.receipt, erased=remembered.erased)
    return _check_event_scope(submission, tenants)


def answer_known_key(item: Submission | Claim, remembered: Remembered) -> Replayed | Refused:
    """Return the answer of a key that the log remembers. It depends on the stored entry alone, so caches give it too.

    The caller has checked that the item is well formed, that the sender may have the answer (is a member, where only
    members write), and that the key is not older than its retention by the lane's log time.
    """
    mismatch = remembered.fingerprint != item.fingerprint
    if mismatch and item.policy.on_reuse is OnReuse.REFUSE:
        return Refused(
            Reason.IDENTITY_REUSED,
            "this identity was used for a write with other content; nothing was written",
            field="key",
        )
    return Replayed(remembered.receipt, mismatch, remembered.erased)


def _iterate_other_identities(submission: Submission, tenants: Tenants) -> Iterator[KeyIdentity]:
    """Yield the identities under which an event may have been committed, apart from its present one."""
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
    """Refuse a new event whose id belongs into another scope.

    Two servers that know different tenants would otherwise commit it at the same time under different identities.
    """
    if submission.policy.name != EVENTS.name or submission.scope not in tenants.event_scopes:
        return None
    scope = tenants.get_event_scope(submission.partitions)
    if scope == submission.scope:
        return None
    message = f"the id of this event belongs into the scope {scope!r}, not {submission.scope!r}: reload the server"
    return Refused(Reason.WRONG_SCOPE, message, field="scope", retry_after_ms=RETRY_AFTER_MS)
