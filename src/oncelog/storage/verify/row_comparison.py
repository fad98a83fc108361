"""Compares rows of the Deltas API with the rows that the deltas of the log produce.

Two acts change rows without a delta: compaction drops deltas' bodies, and then tombstones. A row that is built of
deltas without a body is not checkable as a whole. Its stamps still are: each is that of a delta of the log, and no
delta that still has its body is missing in the row.
"""

from enum import Enum

from oncelog.core.merge import NEVER, Row, Stamp, merge
from oncelog.core.rules.compaction import FoldedRow, build_horizon_delete, is_horizon_delete, row_digest
from oncelog.storage.inspect.inspector import RowTuple as Columns
from oncelog.storage.side_state import HORIZONS
from oncelog.storage.verify.scratch_database import ScratchDatabase
from oncelog.storage.verify.source import VerificationSource


class ComparisonState(Enum):
    """Outcome of comparing an entry with its rebuilt value, without damage."""

    SAME = "same"
    ABSENT = "absent"
    """It expired, was forgotten or was dropped: its row may be there or not."""
    UNKNOWN = "unknown"
    """Records determine it whose content is not known."""


ComparisonOutcome = ComparisonState | str
"""A text describes how the stored entry differs."""


class RowComparison:
    """Compares one row."""

    def __init__(self, source: VerificationSource, scratch: ScratchDatabase) -> None:
        self._scratch = scratch
        self._horizons = {columns[1]: int(columns[2]) for columns in source.iterate_table(HORIZONS)}
        """One clock reading for each gateway that has dropped tombstones."""

    def __call__(self, key: Columns, stored: Row | None, rebuilt: Row | None) -> ComparisonOutcome:
        """Compare a row whose columns in the two tables differ. It is stored, rebuilt, or in a fold."""
        lane, scope, table, row_id = key
        horizon = self._horizons.get(scope, -1)
        fold = self._scratch.find_fold(lane, scope, table, row_id)
        if fold is not None:
            outcome = self._compare_fold(lane, scope, stored, fold, horizon)
            if outcome is not None:
                return outcome
        if stored is None:
            return ComparisonState.UNKNOWN if rebuilt is None else self._compare_missing(lane, scope, rebuilt, horizon)
        expected = rebuilt or Row()
        if is_horizon_delete(stored.deleted, table, row_id) and stored.deleted[0] <= horizon:
            expected = merge(expected, build_horizon_delete(stored.deleted[0], table, row_id))
            if not stored.exists and not expected.exists and stored.written <= stored.deleted:
                # Deltas that lost to the horizon leave their stamps, and no body that names their clocks.
                stored = Row(stored.columns, expected.written, stored.deleted)
        if stored == expected:
            return ComparisonState.SAME
        is_complete = fold is None and rebuilt is None and not self._scratch.has_unfolded(lane, scope)
        if is_complete or not self._scratch.has_unknown(lane, scope):
            return _describe_difference(stored, expected, is_rebuilt=rebuilt is not None)
        return (
            _find_lost_delta(stored, expected)
            or self._find_foreign_stamp(key, stored, expected)
            or ComparisonState.UNKNOWN
        )

    def _compare_fold(
        self, lane: int, scope: str, stored: Row | None, fold: tuple[int, FoldedRow], horizon: int
    ) -> ComparisonOutcome | None:
        """Compare a row with the digest that compaction committed; None if unknown deltas may have changed it since."""
        sequence, fold_digest = fold
        if row_digest(stored) == fold_digest.digest:
            return ComparisonState.ABSENT if stored is None else ComparisonState.SAME
        if stored is None and fold_digest.deleted_hlc is not None and int(fold_digest.deleted_hlc) <= horizon:
            return ComparisonState.ABSENT  # a dropped tombstone
        if self._scratch.has_unfolded(lane, scope, sequence):
            return None
        difference = "is missing: compaction" if stored is None else "differs from the state that compaction"
        return f"{difference} committed with a digest after sequence {sequence}"

    def _compare_missing(self, lane: int, scope: str, rebuilt: Row, horizon: int) -> ComparisonOutcome:
        if rebuilt.deleted[0] <= horizon and not rebuilt.exists:
            return ComparisonState.ABSENT  # a dropped tombstone
        if max(rebuilt.written, rebuilt.deleted)[0] <= horizon and self._scratch.has_unknown(lane, scope):
            return ComparisonState.UNKNOWN  # a delta without a body may have deleted it
        return "is missing"

    def _find_foreign_stamp(self, key: Columns, stored: Row, expected: Row) -> str | None:
        """Return the fault of a row with a stamp that is of no delta of the log."""
        lane, scope, table, row_id = key
        for stamp in _collect_stamps(stored) - _collect_stamps(expected) - {NEVER}:
            if self._scratch.is_unknown_delta(lane, scope, stamp[2]) or is_horizon_delete(stamp, table, row_id):
                continue
            return f"has the stamp of a delta {stamp[2].hex()} that the log does not have"
        return None


def _collect_stamps(row: Row) -> set[Stamp]:
    return {row.written, row.deleted, *(stamp for _, stamp in row.columns.values())}


def _describe_difference(stored: Row, expected: Row, *, is_rebuilt: bool) -> str:
    if not is_rebuilt:
        return "is stored, and no delta made it"
    for name in sorted({*stored.columns, *expected.columns}):
        if stored.columns.get(name) != expected.columns.get(name):
            return f"has another column {name!r} than its deltas make"
    return "has another time of its newest write or DELETE than its deltas make"


def _find_lost_delta(stored: Row, expected: Row) -> str | None:
    """Return the fault of a row that lacks a delta whose body the log has."""
    for name, (value, stamp) in expected.columns.items():
        if stamp <= stored.deleted:
            continue
        found = stored.columns.get(name)
        if found is None or found[1] < stamp or (found[1] == stamp and found[0] != value):
            return f"has another column {name!r} than the delta {stamp[2].hex()} wrote"
    if expected.deleted > stored.deleted:
        return f"lacks the DELETE {expected.deleted[2].hex()}"
    if expected.written > stored.written and expected.written > stored.deleted:
        return f"lacks the write {expected.written[2].hex()}"
    return None
