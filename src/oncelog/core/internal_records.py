"""Internal records: records that Oncelog writes about the log itself. They do not come from submissions.

A leap passes over numbers; such a gap is valid before a restore record only.

Restore records (rules/leaps.py), audit records (rules/audit.py) and fold records (rules/compaction.py) are internal.
They have a position in their lane and are part of its hash chain. They have no sequence, no client and no partition, so
that readers of a stream or of a partition do not get them. A reader of a lane recognises them by their policy.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from oncelog.core.policy import INTERNAL_POLICIES
from oncelog.core.values import Record

RESTORE_ACTOR: Final = "system:restore"

Gap = tuple[int, int]
"""Numbers of one order that a leap has passed over: the last one before them, and the first one after them."""


def is_internal(record: Record) -> bool:
    """Return whether Oncelog itself wrote the record."""
    return record.policy in INTERNAL_POLICIES


def check_internal_record(record: Record) -> str | None:
    """Describe the fault of an internal record in what all kinds of them have in common; None without a fault."""
    kind = record.policy
    if record.client or record.partitions:
        return f"a record of {kind} has a client or a partition"
    if record.sequence or record.client_sequence:
        return f"a record of {kind} has a sequence"
    if not record.erased and record.fingerprint != sha256(record.body).digest():
        return f"a record of {kind} has another fingerprint than its body"
    return None


def check_restore_record(record: Record) -> str | None:
    """Describe the fault of a restore record whose place in its block is already checked."""
    if record.position != record.height:
        return f"a restore record at position {record.position} has height {record.height}, not the same number"
    if record.actor != RESTORE_ACTOR:
        return f"a restore record has the actor {record.actor!r}, not {RESTORE_ACTOR!r}"
    if record.scope or record.key:
        return "a restore record has a scope, a key, or both"
    return check_internal_record(record)


def find_gap(gaps: Iterable[Gap], number: int) -> Gap | None:
    """Return the gap that contains a number, or None."""
    return next((gap for gap in gaps if gap[0] < number < gap[1]), None)


def count_missing_numbers(gaps: Iterable[Gap], after: int, upto: int) -> int:
    """Count the numbers above `after` and up to `upto` that leaps have passed over."""
    return sum(max(0, min(upto, behind - 1) - max(after, before)) for before, behind in gaps)


def find_last_eviction(upto: int, interval: int, gaps: Sequence[Gap]) -> int:
    """Return the highest position up to `upto` that evicts: a multiple of the interval at which a record stands.

    Return 0 without one. `gaps` are those of the lane, in ascending order.
    """
    evicting = upto // interval * interval
    for before, behind in reversed(gaps):
        if before < evicting < behind:
            evicting = before // interval * interval
    return evicting
