"""Compares stored side state with the side state that is rebuilt from the records.

The comparison reads both sides in the same order. Entries that an erased record may have set or deleted cannot be
checked. They are counted, but never reported as damage.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

from oncelog.core.merge import NEVER, Row, Stamp, merge
from oncelog.core.operations import Entity
from oncelog.core.rules.compaction import FoldedRow, build_horizon_delete, is_horizon_delete, row_digest
from oncelog.core.values import ClientEntry
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.queries.expiry import ExpiryCheck
from oncelog.storage.side_state import HORIZONS, SideStateTable
from oncelog.storage.verify.findings import InconsistencyError, StepProgress, VerificationSummary
from oncelog.storage.verify.indexes import REPORT_ROWS
from oncelog.storage.verify.replay import REBUILT_TABLES, ScratchDatabase, join_key
from oncelog.storage.verify.source import LogState, VerificationSource, pair_rows


class ComparisonState(Enum):
    """Outcome of a comparison that found no damage in an entry."""

    SAME = "same"
    ABSENT = "absent"
    """The entry expired, was forgotten or was dropped. Its row may or may not exist."""
    UNKNOWN = "unknown"
    """The entry depends on records whose content is not known."""


ComparisonOutcome = ComparisonState | str
"""A str describes how the stored entry differs."""


FINDINGS_MAX: Final = 100
"""How many findings are reported by name. All of them are counted."""
_KEY_FORMATS: Final = {
    "clients": "client {3!r} of {1} {2!r}",
    "entities": "entity {2!r} of {1!r}",
    "relationships": "relationship {2!r} {3!r} {4!r} of {1!r}",
    "rows": "row {3!r} of table {2!r} of {1!r}",
}
"""Format strings for findings, by table. Their arguments are an entry's lane and key."""


class SideStateComparison:
    """Compares the tables one after another, and counts the entries."""

    def __init__(
        self,
        source: VerificationSource,
        state: LogState,
        scratch: ScratchDatabase,
        summary: VerificationSummary,
        *,
        with_effects: bool = True,
    ) -> None:
        self._source = source
        self._scratch = scratch
        self._tables = [table for table in REBUILT_TABLES if with_effects or table.name == "clients"]
        self._is_expired = ExpiryCheck(source.view.iterate_rows("policies"), state.heads)
        self._compare: Mapping[str, Callable[[RowTuple, Any, Any], ComparisonOutcome]] = {
            "clients": self._compare_clients,
            "entities": self._compare_entities,
            "relationships": self._compare_relationships,
            "rows": self._compare_rows,
        }
        self._horizons = {columns[1]: int(columns[2]) for columns in source.iterate_table(HORIZONS)}
        """Tombstone horizon, a clock reading, of each gateway that has dropped tombstones."""
        self._total = 0
        self._findings: list[str] = []
        self._lane: int | None = None
        self._same_counts = summary.same = {table.name: 0 for table in self._tables}
        self._unknown_counts = summary.not_checkable = {table.name: 0 for table in self._tables}

    def run(self) -> Iterator[StepProgress]:
        """Compare all tables. Raises InconsistencyError that lists the entries that differ."""
        for table in self._tables:
            yield from self._compare_table(table)
        if self._total:
            message = f"{self._total} entries differ from the records. The first: {self._findings[0]}"
            raise InconsistencyError(message, self._lane, None, tuple(self._findings), self._total)

    def _compare_table(self, table: SideStateTable) -> Iterator[StepProgress]:
        compare = self._compare[table.name]
        total = self._scratch.count_rows(table)
        yield StepProgress(table.name, 0, total)
        pairs = pair_rows(self._source.iterate_sorted(table), self._scratch.iterate_table(table), 1 + len(table.keys))
        for done, (key, stored, rebuilt) in enumerate(pairs, 1):
            if stored is not None and stored == rebuilt:
                outcome: ComparisonOutcome = ComparisonState.SAME
            else:
                outcome = compare(
                    key,
                    None if stored is None else table.decode_value(stored),
                    None if rebuilt is None or rebuilt == (None,) else table.decode_value(rebuilt),
                )
            self._count_outcome(table.name, key, outcome)
            if done % REPORT_ROWS == 0:
                yield StepProgress(table.name, min(done, total), total)

    def _count_outcome(self, name: str, key: RowTuple, outcome: ComparisonOutcome) -> None:
        if outcome is ComparisonState.SAME:
            self._same_counts[name] += 1
        elif outcome is ComparisonState.UNKNOWN:
            self._unknown_counts[name] += 1
        elif outcome is not ComparisonState.ABSENT:
            self._total += 1
            if self._lane is None:
                self._lane = key[0]
            if len(self._findings) < FINDINGS_MAX:
                self._findings.append(f"lane {key[0]}: {_KEY_FORMATS[name].format(*key)} {outcome}")

    # --- clients

    def _compare_clients(
        self, key: RowTuple, stored: ClientEntry | None, rebuilt: ClientEntry | None
    ) -> ComparisonOutcome:
        if rebuilt is None:
            return "has an entry, but no record"
        if stored is None:
            if self._is_expired(key, rebuilt):
                return ComparisonState.ABSENT
            return f"has no entry, but its newest record has sequence {rebuilt.sequence}"
        return (
            f"has an entry (sequence {stored.sequence}) that does not match its newest record "
            f"(sequence {rebuilt.sequence})"
        )

    # --- entities

    def _compare_entities(self, key: RowTuple, stored: Entity | None, rebuilt: Entity | None) -> ComparisonOutcome:
        lane, scope, name = key
        if stored is None:
            assert rebuilt is not None  # noqa: S101 - one of them is there
            if self._is_expired(key, rebuilt):
                return ComparisonState.ABSENT
            if self._scratch.has_unknown(lane, scope, rebuilt.version):
                return ComparisonState.UNKNOWN
            return f"is missing: the record with sequence {rebuilt.version} set it"
        if stored.erased and not self._scratch.is_erased(lane, scope, stored.version):
            return f"is marked as erased, but the record with sequence {stored.version} is not"
        if stored.erased and stored.value:
            return "is marked as erased, but has a value"
        newest = self._scratch.find_deletion(lane, scope, join_key(name)) if rebuilt is None else rebuilt.version
        if stored.version > newest and self._scratch.is_unknown(lane, scope, stored.version):
            return ComparisonState.UNKNOWN
        if rebuilt is None:
            return f"has version {stored.version}, but no record set it{_describe_deletion(newest)}"
        if stored.version != rebuilt.version:
            return f"has version {stored.version}, but version {rebuilt.version} according to the records"
        if stored.value != rebuilt.value:
            return f"has a value that differs from the record with sequence {rebuilt.version}"
        return (
            f"expires at {stored.expires_at_ms}, but at {rebuilt.expires_at_ms} according to the record with sequence "
            f"{rebuilt.version}"
        )

    # --- relationships

    def _compare_relationships(self, key: RowTuple, stored: int | None, rebuilt: int | None) -> ComparisonOutcome:
        lane, scope, *parts = key
        if stored is None:
            assert rebuilt is not None  # noqa: S101 - one of them is there
            if self._scratch.has_unknown(lane, scope, rebuilt):
                return ComparisonState.UNKNOWN
            return f"is missing: the record with sequence {rebuilt} created it"
        if rebuilt is not None and stored > rebuilt and self._scratch.has_unknown(lane, scope, rebuilt):
            return ComparisonState.UNKNOWN  # an unknown record may have deleted it, and a later one created it again
        removed = self._scratch.find_deletion(lane, scope, join_key(*parts))
        if stored > removed and self._scratch.is_unknown(lane, scope, stored):
            return ComparisonState.UNKNOWN
        if rebuilt is not None:
            return f"has version {stored}, but the record with sequence {rebuilt} created it"
        return f"has version {stored}, but no record created it{_describe_deletion(removed)}"

    # --- rows

    def _compare_rows(self, key: RowTuple, stored: Row | None, rebuilt: Row | None) -> ComparisonOutcome:
        """Compare a Deltas API row with the row that the log's deltas produce.

        Compaction changes rows without a delta: it first drops the bodies of deltas, and later drops tombstones. A row
        produced by deltas without bodies cannot be checked as a whole. However, each of its stamps must belong to a
        delta in the log, and the row must contain every delta that still has a body. A row may exist only in a fold.
        """
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
                # A write older than the horizon's deletion still updates `written`. The replay cannot rebuild that
                # stamp once compaction has dropped the body.
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
        """Compare a row with the digest that compaction committed.

        Returns None if unknown deltas may have changed it since.
        """
        sequence, fold_digest = fold
        if row_digest(stored) == fold_digest.digest:
            return ComparisonState.ABSENT if stored is None else ComparisonState.SAME
        if stored is None and fold_digest.deleted_hlc is not None and int(fold_digest.deleted_hlc) <= horizon:
            return ComparisonState.ABSENT  # a dropped tombstone
        if self._scratch.has_unfolded(lane, scope, sequence):
            return None
        if stored is None:
            return f"is missing, but compaction committed its digest after sequence {sequence}"
        return f"differs from the digest that compaction committed after sequence {sequence}"

    def _compare_missing(self, lane: int, scope: str, rebuilt: Row, horizon: int) -> ComparisonOutcome:
        if rebuilt.deleted[0] <= horizon and not rebuilt.exists:
            return ComparisonState.ABSENT  # a dropped tombstone
        if max(rebuilt.written, rebuilt.deleted)[0] <= horizon and self._scratch.has_unknown(lane, scope):
            return ComparisonState.UNKNOWN  # a delta without a body may have deleted it
        return "is missing"

    def _find_foreign_stamp(self, key: RowTuple, stored: Row, expected: Row) -> str | None:
        """Return a description of the fault if a row has a stamp that no delta in the log has."""
        lane, scope, table, row_id = key
        for stamp in _collect_stamps(stored) - _collect_stamps(expected) - {NEVER}:
            if self._scratch.is_unknown_delta(lane, scope, stamp[2]) or is_horizon_delete(stamp, table, row_id):
                continue
            return f"has the stamp of the delta {stamp[2].hex()}, which the log does not have"
        return None


def _collect_stamps(row: Row) -> set[Stamp]:
    return {row.written, row.deleted, *(stamp for _, stamp in row.columns.values())}


def _describe_difference(stored: Row, expected: Row, *, is_rebuilt: bool) -> str:
    if not is_rebuilt:
        return "is stored, but no delta created it"
    for name in sorted({*stored.columns, *expected.columns}):
        if stored.columns.get(name) != expected.columns.get(name):
            return f"differs from its deltas in the column {name!r}"
    return "differs from its deltas in the time of its newest write or DELETE"


def _find_lost_delta(stored: Row, expected: Row) -> str | None:
    """Return a description of the fault if a row lacks a delta whose body the log has."""
    for name, (value, stamp) in expected.columns.items():
        if stamp <= stored.deleted:
            continue
        found = stored.columns.get(name)
        if found is None or found[1] < stamp or (found[1] == stamp and found[0] != value):
            return f"differs from the delta {stamp[2].hex()} in the column {name!r}"
    if expected.deleted > stored.deleted:
        return f"lacks the DELETE {expected.deleted[2].hex()}"
    if expected.written > stored.written and expected.written > stored.deleted:
        return f"lacks the write {expected.written[2].hex()}"
    return None


def _describe_deletion(sequence: int) -> str:
    return f" since the record with sequence {sequence} deleted it" if sequence else ""
