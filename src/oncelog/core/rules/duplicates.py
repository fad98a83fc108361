"""Duplicates: the answer of an item whose key is stored already.

Equal content is answered with the original receipt. Other content under the same key is refused, or answered as a
mismatch, as the policy says.
"""

from oncelog.core.batch_state import BatchState, LaneDraft
from oncelog.core.policy import OnReuse
from oncelog.core.rules.event_ids import check_event_scope, iterate_other_identities
from oncelog.core.tenants import Tenants
from oncelog.core.values import Claim, Reason, Refused, Remembered, Replayed, Submission


def answer_known(item: Submission | Claim, remembered: Remembered, lane: LaneDraft) -> Replayed | Refused | None:
    """Return the answer of a stored key, or None if the log does not remember the key any more."""
    if not lane.remembers(item.policy.retention, remembered.receipt.log_time_ms):
        return None
    return answer_known_key(item, remembered)


def answer_in_other_scope(submission: Submission, tenants: Tenants, state: BatchState) -> Replayed | Refused | None:
    """Answer an event that was committed in another scope of its id, and refuse a new one in a wrong scope.

    Equal content has equal partitions, so it is the same event. Other content may be another tenant's.
    """
    for identity in iterate_other_identities(submission, tenants):
        remembered = state.keys.get(identity)
        if remembered is not None and remembered.fingerprint == submission.fingerprint:
            return Replayed(remembered.receipt, erased=remembered.erased)
    return check_event_scope(submission, tenants)


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
