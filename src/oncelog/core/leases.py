"""Leases: one caller at a time works on a key, and who lost the lease cannot complete.

Every lease has a fencing number, drawn from its lane and never drawn again. A lease that has ended still belongs to
its holder until another caller claims the key: work that took too long is not thrown away for nothing. After
LEASE_MEMORY_MS more it is forgotten, by log time, whether or not its row is still on disk.
"""

from oncelog.core.desk import Desk, LaneDesk
from oncelog.core.limits import LEASE_MEMORY_MS
from oncelog.core.policy import OnReuse
from oncelog.core.values import (
    Applied,
    Claim,
    Granted,
    KeyIdentity,
    Lease,
    Reason,
    Refused,
    Release,
    Renew,
    Submission,
)


def lease_identity(item: Claim | Renew | Release | Submission) -> KeyIdentity:
    """A lease is found by the key it is for."""
    return (item.policy.name, item.scope, "", item.key)


def claim(item: Claim, lane: LaneDesk, desk: Desk) -> Granted | Refused:
    """Grants a lease on a key that is not known, unless another caller holds one that has not ended."""
    identity = lease_identity(item)
    lease = _lease(identity, lane, desk)
    if lease is not None:
        if _is_running(lease, lane) and (lease.holder != item.holder or _differs(lease, item)):
            return _busy(lease, item, lane)
        if lease.holder == item.holder:
            return _grant(identity, item, lease.fence, lane, desk)
        if lease.failure and item.waited_for == lease.fence:
            return Refused(
                Reason.RUN_FAILED,
                "the run that was waited for failed",
                current=lease.fence,
                value=lease.failure,
            )
    lane.fence += 1
    return _grant(identity, item, lane.fence, lane, desk)


def renew(item: Renew, lane: LaneDesk, desk: Desk) -> Granted | Refused:
    """Prolongs a lease that is still the caller's."""
    identity = lease_identity(item)
    lease = _lease(identity, lane, desk)
    if lease is None or lease.fence != item.fence or not lease.holder:
        return _lost(item.fence, lease)
    until_ms = max(lease.until_ms, lane.log_time_ms + item.lease_ms)
    desk.leases.put(identity, Lease(lease.fence, lease.holder, until_ms, lease.fingerprint))
    return Granted(lease.fence, until_ms)


def release(item: Release, lane: LaneDesk, desk: Desk) -> Applied:
    """Gives a lease back. One that was already lost is not there to be given back."""
    identity = lease_identity(item)
    lease = _lease(identity, lane, desk)
    if lease is None or lease.fence != item.fence or not lease.holder:
        return Applied(changed=False)
    desk.leases.put(identity, Lease(lease.fence, "", lane.log_time_ms, lease.fingerprint, item.failure))
    return Applied(changed=True)


def lease_in_the_way(submission: Submission, lane: LaneDesk, desk: Desk) -> Refused | None:
    """None if the submission may complete its key: under its own lease, or where nobody holds one."""
    lease = _lease(lease_identity(submission), lane, desk)
    if submission.fence:
        if lease is None or lease.fence != submission.fence or not lease.holder:
            return _lost(submission.fence, lease)
        return None
    if lease is not None and _is_running(lease, lane):
        return _busy(lease, submission, lane)
    return None


def settle(submission: Submission, desk: Desk) -> None:
    """The key is known from now on: its lease has done its work."""
    identity = lease_identity(submission)
    if desk.leases.get(identity) is not None:
        desk.leases.put(identity, None)


def _lease(identity: KeyIdentity, lane: LaneDesk, desk: Desk) -> Lease | None:
    lease = desk.leases.get(identity)
    if lease is None or lane.log_time_ms > lease.until_ms + LEASE_MEMORY_MS:
        return None
    return lease


def _is_running(lease: Lease, lane: LaneDesk) -> bool:
    return bool(lease.holder) and lane.log_time_ms < lease.until_ms


def _grant(identity: KeyIdentity, item: Claim, fence: int, lane: LaneDesk, desk: Desk) -> Granted:
    until_ms = lane.log_time_ms + item.lease_ms
    desk.leases.put(identity, Lease(fence, item.holder, until_ms, item.fingerprint))
    return Granted(fence, until_ms)


def _differs(lease: Lease, item: Claim | Submission) -> bool:
    """Whether the work under way is for another write, and the policy refuses that."""
    return item.policy.on_reuse is OnReuse.REFUSE and lease.fingerprint != item.fingerprint


def _busy(lease: Lease, item: Claim | Submission, lane: LaneDesk) -> Refused:
    if _differs(lease, item):
        return Refused(
            Reason.IDENTITY_REUSED, "work on a write with other content is under way for this identity", "key"
        )
    return Refused(
        Reason.IN_FLIGHT,
        "another caller works on this key",
        current=lease.fence,
        retry_after_ms=lease.until_ms - lane.log_time_ms,
    )


def _lost(fence: int, lease: Lease | None) -> Refused:
    return Refused(
        Reason.LEASE_LOST,
        f"lease {fence} has been taken over or given back",
        field="fence",
        current=lease.fence if lease else 0,
    )
