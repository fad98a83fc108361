"""The shape of an item against its policy. Doors check what their wire says; this is what the core relies on."""

from oncelog.core.limits import LEASE_MS_MAX, SEQUENCE_MAX
from oncelog.core.policy import Order, Policy
from oncelog.core.values import (
    Acknowledge,
    Claim,
    Item,
    Reason,
    Refused,
    Release,
    Renew,
    SetMember,
    Submission,
)


def malformed(item: Item) -> Refused | None:
    """None if the item can be decided; else the field at fault."""
    match item:
        case Submission():
            return _malformed_submission(item)
        case Claim() | Renew():
            return _malformed_lease(item, item.lease_ms)
        case Release():
            return _malformed_lease(item, LEASE_MS_MAX)
        case SetMember() | Acknowledge():
            return None if item.scope and item.member else _refused("member", "scope and member must be named")


def _malformed_submission(submission: Submission) -> Refused | None:
    policy = submission.policy
    if policy.client_sequence:
        if not submission.client:
            return _refused("client", "must be named")
        if not 1 <= submission.client_sequence <= SEQUENCE_MAX:
            return _refused("client_sequence", f"must be from 1 to {SEQUENCE_MAX}")
    elif submission.client_sequence:
        return _refused("client_sequence", f"has no meaning under the policy {policy.name!r}")
    if submission.key or not policy.client_sequence:
        refused = _malformed_key(submission.key, policy)
        if refused is not None:
            return refused
    if policy.order is Order.STREAM:
        if not submission.scope:
            return _refused("scope", "must name the stream")
    elif submission.expected_sequence is not None:
        return _refused("expected_sequence", "a write outside of streams has no sequence; expect a position")
    return _malformed_effects(submission, policy)


def _malformed_effects(submission: Submission, policy: Policy) -> Refused | None:
    if policy.entities is not bool(submission.operations):
        return _refused("operations", "must hold at least one" if policy.entities else _no_meaning(policy))
    if policy.rows is (submission.delta is None):
        return _refused("delta", "is missing" if policy.rows else _no_meaning(policy))
    if submission.fence and not policy.leased:
        return _refused("fence", _no_meaning(policy))
    return None


def _malformed_key(key: bytes, policy: Policy) -> Refused | None:
    shortest, longest = policy.key_bytes
    if not shortest <= len(key) <= longest:
        length = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        return _refused("key", f"must have {length} bytes, not {len(key)}")
    if not policy.zero_key and not any(key):
        return _refused("key", "must not be all zero")
    return None


def _malformed_lease(item: Claim | Renew | Release, lease_ms: int) -> Refused | None:
    policy = item.policy
    if not policy.leased:
        return _refused("policy", f"the policy {policy.name!r} has no leases")
    if not item.scope:
        return _refused("scope", "must name the stream")
    if not 1 <= lease_ms <= LEASE_MS_MAX:
        return _refused("lease_ms", f"must be from 1 to {LEASE_MS_MAX}, not {lease_ms}")
    if isinstance(item, Claim) and not item.holder:
        return _refused("holder", "must name the caller")
    return _malformed_key(item.key, policy)


def _no_meaning(policy: Policy) -> str:
    return f"has no meaning under the policy {policy.name!r}"


def _refused(field: str, message: str) -> Refused:
    return Refused(Reason.MALFORMED, f"{field} {message}", field)
