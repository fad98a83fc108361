"""Internal records: records that Oncelog writes about the log itself. They are not submitted.

Restore records (rules/leaps.py), audit records (rules/audit.py) and fold records (rules/compaction.py) are internal.
They have a position in their lane and are part of its hash chain. They have no sequence, client or partition, so
readers of a stream or partition do not receive them. Readers of a lane recognise them by their policy.

A restore skips a range of numbers (a leap). The resulting gap is valid only directly before a restore record.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from oncelog.core.policy import INTERNAL_POLICIES
from oncelog.core.values import Record

RESTORE_ACTOR: Final = "system:restore"

Gap = tuple[int, int]
"""Numbers skipped by a leap: (last number before the gap, first number after it)."""


def is_internal(record: Record) -> bool:
    """Return whether Oncelog wrote the record about the log itself."""
    return record.policy in INTERNAL_POLICIES


def find_first_fault(*checks: tuple[bool, str]) -> str | None:
    """Return the description of the first fault that is present, or None."""
    return next((fault for is_present, fault in checks if is_present), None)


def check_internal_record(record: Record) -> str | None:
    """Describe a fault in the fields that all internal records share, or return None for a valid record."""
    kind = record.policy
    is_fingerprint_valid = record.erased or record.fingerprint == sha256(record.body).digest()
    return find_first_fault(
        (bool(record.client or record.partitions), f"a {kind} record has a client or a partition"),
        (record.sequence > 0 or record.client_sequence > 0, f"a {kind} record has a sequence"),
        (not is_fingerprint_valid, f"a {kind} record has a fingerprint that does not match its body"),
    )


def check_restore_record(record: Record) -> str | None:
    """Describe the fault of a restore record, or return None for a valid one. The caller has checked its place in the
    block."""
    position, height = record.position, record.height
    fault = find_first_fault(
        (position != height, f"a restore record has position {position} but height {height}; they must be equal"),
        (
            record.actor != RESTORE_ACTOR,
            f"a restore record has the actor {record.actor!r}, not {RESTORE_ACTOR!r}",
        ),
        (bool(record.scope or record.key), "a restore record has a scope, a key, or both"),
    )
    return fault or check_internal_record(record)


def find_gap(gaps: Iterable[Gap], number: int) -> Gap | None:
    """Return the gap that contains a number, or None."""
    return next((gap for gap in gaps if gap[0] < number < gap[1]), None)


def count_missing_numbers(gaps: Iterable[Gap], after: int, upto: int) -> int:
    """Count the skipped numbers above `after` up to and including `upto`."""
    return sum(max(0, min(upto, behind - 1) - max(after, before)) for before, behind in gaps)


def find_last_eviction(upto: int, interval: int, gaps: Sequence[Gap]) -> int:
    """Return the highest position up to `upto` that triggers an eviction, or 0 if there is none.

    Evictions happen at multiples of the interval that are not in a gap. `gaps` contains the lane's gaps in ascending
    order.
    """
    evicting = upto // interval * interval
    for before, behind in reversed(gaps):
        if before < evicting < behind:
            evicting = before // interval * interval
    return evicting
