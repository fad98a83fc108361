"""What became of an identity, and why: the answer to the first question that anybody asks who looks into a log."""

from enum import Enum
from typing import Final

from msgspec import Struct

from oncelog.core.leases import is_forgotten
from oncelog.core.policy import Forget, Policy
from oncelog.core.values import Lease, Receipt, Record
from oncelog.stores.protocol import Standing

NEVER_COMMITTED: Final = "no record: it was never committed here, or it was refused, and that leaves nothing behind"


class Status(Enum):
    """Where an identity stands."""

    COMMITTED = "committed"
    """Its write is in the log, and a retry gets its answer."""
    FORGOTTEN = "forgotten"
    """Its write is in the log, but the identity has been forgotten since: it would be taken as new."""
    LEASED = "leased"
    """Somebody works on it."""
    UNKNOWN = "unknown"
    """There is nothing under it."""


class Outcome(Struct, frozen=True):
    """What became of an identity."""

    status: Status
    why: str
    record: Record | None = None
    receipt: Receipt | None = None
    lease: Lease | None = None


def outcome_of(policy: Policy, standing: Standing) -> Outcome:
    """Puts what a store knows into words."""
    record, lease = standing.record, standing.lease
    log_time_ms = max(standing.head.log_time_ms, standing.time_ms)
    if record is not None:
        receipt = record.receipt
        place = f"sequence {record.sequence} of {record.scope!r}" if record.sequence else f"position {record.position}"
        erased = ", and its content has been erased since" if record.erased else ""
        if policy.retention.remembers(record.log_time_ms, log_time_ms, standing.head.eviction_time_ms):
            return Outcome(Status.COMMITTED, f"committed as {place}{erased}", record, receipt, lease)
        forgotten = _forgotten(policy)
        return Outcome(Status.FORGOTTEN, f"committed as {place}{erased}, {forgotten}", record, receipt, lease)
    if lease is not None and not is_forgotten(lease, log_time_ms):
        return Outcome(Status.LEASED, _lease_in_words(lease, log_time_ms), lease=lease)
    return Outcome(Status.UNKNOWN, NEVER_COMMITTED)


def _forgotten(policy: Policy) -> str:
    how = "after" if policy.retention.forget is Forget.AT_AGE else "by an eviction after"
    return f"but forgotten {how} {policy.retention.ttl_ms} ms (policy {policy.name}): a retry would be a new write"


def _lease_in_words(lease: Lease, log_time_ms: int) -> str:
    if not lease.holder:
        failed = "failed" if lease.failed_fence == lease.fence else "was given up"
        return f"no record: work on it under lease {lease.fence} {failed}, and nobody has taken it over yet"
    if log_time_ms < lease.until_ms:
        return (
            f"no record yet: work on it goes on under lease {lease.fence}, for {lease.until_ms - log_time_ms} ms more"
        )
    return (
        f"no record: lease {lease.fence} ended {log_time_ms - lease.until_ms} ms ago, and nobody has taken it over yet"
    )
