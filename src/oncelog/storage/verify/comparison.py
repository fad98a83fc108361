"""Stored side state, compared with the side state that the records rebuild.

Both sides are read in one order, side by side. What an erased record may have set or deleted is not checkable: it is
counted, and never reported as damage.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from oncelog.core.operations import Entity
from oncelog.core.values import ClientEntry
from oncelog.storage.expiry import ExpiryCheck
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.verify.findings import SideStateError, StepProgress
from oncelog.storage.verify.indexes import REPORT_ROWS
from oncelog.storage.verify.replay import join_key
from oncelog.storage.verify.row_comparison import ComparisonOutcome, ComparisonState, RowComparison
from oncelog.storage.verify.scratch_database import REBUILT_TABLES, ScratchDatabase
from oncelog.storage.verify.source import LogState, VerificationSource, pair_rows

FINDINGS_MAX: Final = 100
"""Findings that are reported by name; all are counted."""
_KEY_FORMATS: Final = {
    "clients": "client {3!r} of {1} {2!r}",
    "entities": "entity {2!r} of {1!r}",
    "relationships": "relationship {2!r} {3!r} {4!r} of {1!r}",
    "rows": "row {3!r} of table {2!r} of {1!r}",
}
"""How findings name an entry of each table, by its key with the lane."""


class SideStateComparison:
    """Compares the tables one after the other, and counts."""

    def __init__(
        self, source: VerificationSource, state: LogState, scratch: ScratchDatabase, *, with_effects: bool = True
    ) -> None:
        self._source = source
        self._scratch = scratch
        self._tables = [table for table in REBUILT_TABLES if with_effects or table.name == "clients"]
        self._is_expired = ExpiryCheck(source.view.iterate_rows("policies"), state.heads)
        self._compare: Mapping[str, Callable[[RowTuple, Any, Any], ComparisonOutcome]] = {
            "clients": self._compare_clients,
            "entities": self._compare_entities,
            "relationships": self._compare_relationships,
            "rows": RowComparison(source, scratch),
        }
        self._total = 0
        self._findings: list[str] = []
        self._lane: int | None = None
        self.same_counts = {table.name: 0 for table in self._tables}
        self.unknown_counts = {table.name: 0 for table in self._tables}

    def run(self) -> Iterator[StepProgress]:
        """Compare all tables. Raises SideStateError with what differs."""
        for table in self._tables:
            yield from self._compare_table(table)
        if self._total:
            raise SideStateError(self._findings, self._total, self._lane)

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
            self.same_counts[name] += 1
        elif outcome is ComparisonState.UNKNOWN:
            self.unknown_counts[name] += 1
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
            return f"has no entry, though it got to sequence {rebuilt.sequence}"
        return (
            f"has an entry (sequence {stored.sequence}) that is not that of its newest record "
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
            return f"is marked as erased, and the record with sequence {stored.version} is not"
        if stored.erased and stored.value:
            return "is marked as erased, and has a value"
        newest = self._scratch.find_deletion(lane, scope, join_key(name)) if rebuilt is None else rebuilt.version
        if stored.version > newest and self._scratch.is_unknown(lane, scope, stored.version):
            return ComparisonState.UNKNOWN
        if rebuilt is None:
            return f"has version {stored.version}, and no record set it{_describe_deletion(newest)}"
        if stored.version != rebuilt.version:
            return f"has version {stored.version}, and the records make it version {rebuilt.version}"
        if stored.value != rebuilt.value:
            return f"has another value than the record with sequence {rebuilt.version} set"
        return (
            f"expires at {stored.expires_at_ms}, and the record with sequence {rebuilt.version} "
            f"says {rebuilt.expires_at_ms}"
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
            return ComparisonState.UNKNOWN  # one of these may have deleted it, and a later record created it again
        removed = self._scratch.find_deletion(lane, scope, join_key(*parts))
        if stored > removed and self._scratch.is_unknown(lane, scope, stored):
            return ComparisonState.UNKNOWN
        if rebuilt is not None:
            return f"has version {stored}, and the record with sequence {rebuilt} created it"
        return f"has version {stored}, and no record created it{_describe_deletion(removed)}"


def _describe_deletion(sequence: int) -> str:
    return f" since sequence {sequence} deleted it" if sequence else ""
