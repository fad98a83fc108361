"""Outcome of an identity for `Log.lookup`: committed, forgotten, leased or unknown, with a readable reason."""

from enum import Enum
from typing import Final

from msgspec import Struct

from oncelog.core.policy import Forget, Policy
from oncelog.core.rules.leases import is_forgotten
from oncelog.core.values import Lease, Receipt, Record
from oncelog.storage.store import KeyStatus

NEVER_COMMITTED: Final = "no record: it was never committed here, or it was refused, which leaves no trace"


class Status(Enum):
    """Status of an identity."""

    COMMITTED = "committed"
    """The write is in the log, and a retry gets its answer."""
    FORGOTTEN = "forgotten"
    """The write is in the log, but the identity has been forgotten: a retry is a new write."""
    LEASED = "leased"
    """A caller holds or held a lease on the identity and has not stored a result."""
    UNKNOWN = "unknown"
    """The log has neither a record nor a lease for the identity."""


class Outcome(Struct, frozen=True):
    """Status of an identity, a readable reason, and its record."""

    status: Status
    why: str
    record: Record | None = None
    receipt: Receipt | None = None
    lease: Lease | None = None


def describe_outcome(policy: Policy, key_status: KeyStatus) -> Outcome:
    """Describe the stored state of a key."""
    record, lease = key_status.record, key_status.lease
    log_time_ms = max(key_status.head.log_time_ms, key_status.time_ms)
    if record is not None:
        receipt = record.receipt
        place = f"sequence {record.sequence} of {record.scope!r}" if record.sequence else f"position {record.position}"
        erased = ", and its content has been erased since" if record.erased else ""
        if policy.retention.remembers(record.log_time_ms, log_time_ms, key_status.head.eviction_time_ms):
            return Outcome(Status.COMMITTED, f"committed as {place}{erased}", record, receipt, lease)
        forgotten = _describe_forgotten(policy, record, key_status)
        return Outcome(Status.FORGOTTEN, f"committed as {place}{erased}, {forgotten}", record, receipt, lease)
    if lease is not None and not is_forgotten(lease, log_time_ms):
        return Outcome(Status.LEASED, _describe_lease(lease, log_time_ms), lease=lease)
    return Outcome(Status.UNKNOWN, NEVER_COMMITTED)


def describe_stored(record: Record, found: Outcome | None) -> Outcome:
    """Return the outcome of a stored record. `found` is its identity's outcome, or None if the record has no key."""
    if found is None:
        why = "committed without a key: it is identified only by its client's sequence"
        return Outcome(Status.COMMITTED, why, record, record.receipt)
    if found.record is not None and found.record.receipt == record.receipt:
        return found
    why = "committed, but forgotten: a later write was committed under the same key"
    if found.record is not None:
        why += f", at position {found.record.position}"
    return Outcome(Status.FORGOTTEN, why, record, record.receipt)


def _describe_forgotten(policy: Policy, record: Record, key_status: KeyStatus) -> str:
    age = f"{policy.retention.ttl_ms} ms (policy {policy.name})"
    if policy.retention.forget is Forget.AT_AGE:
        return f"but its key was forgotten after {age}: a retry is a new write"
    evicted = f"but its key was evicted after {age}"
    if not record.client_sequence:
        return f"{evicted}: a retry is a new write"
    return f"{evicted}{_describe_sequence_retry(policy, record.client_sequence, key_status)}"


def _describe_sequence_retry(policy: Policy, sequence: int, key_status: KeyStatus) -> str:
    """Describe the answer to a retry whose key is unknown, which depends on its client sequence
    (`core.rules.sequences`)."""
    entry = key_status.client_entry
    if entry is not None and not policy.retention.remembers(entry.last_seen_ms, 0, key_status.head.eviction_time_ms):
        entry = None
    last = 0 if entry is None else entry.sequence
    as_new = f"a retry with client sequence {last + 1} is a new write"
    if sequence > last:
        return f", and so was its client (whose last sequence is now {last}): {as_new}, a higher one is refused"
    return (
        f": a retry with client sequence {sequence} is answered as already committed if it equals the client's newest "
        f"write with that sequence, and refused otherwise; {as_new}"
    )


def _describe_lease(lease: Lease, log_time_ms: int) -> str:
    if not lease.holder:
        failed = "failed" if lease.failed_fence == lease.fence else "was released"
        return f"no record: the work under lease {lease.fence} {failed}, and no caller has taken it over yet"
    left_ms = lease.until_ms - log_time_ms
    if left_ms > 0:
        return f"no record yet: the work runs under lease {lease.fence}, which expires in {left_ms} ms"
    return f"no record: lease {lease.fence} expired {-left_ms} ms ago, and no caller has taken it over yet"
