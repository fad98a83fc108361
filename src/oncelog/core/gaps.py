"""Gaps: numbers that a leap has passed over. They are valid before a restore record only (core/rules/leaps.py)."""

from collections.abc import Iterable, Sequence
from typing import Final

from oncelog.core.internal_records import check_internal_record
from oncelog.core.policy import RESTORE_POLICY
from oncelog.core.values import Record

__all__ = [
    "RESTORE_ACTOR",
    "RESTORE_POLICY",
    "Gap",
    "check_restore_record",
    "count_missing_numbers",
    "find_gap",
    "find_last_eviction",
]

RESTORE_ACTOR: Final = "system:restore"

Gap = tuple[int, int]
"""Numbers of one order that a leap has passed over: the last one before them, and the first one after them."""


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
