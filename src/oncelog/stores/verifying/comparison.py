"""Stored side state, compared with the side state that the records rebuild.

Both sides are read in one order, side by side. What an erased record may have set or deleted is not checkable: it is
counted, and never reported as damage.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from oncelog.core.operations import Entity
from oncelog.core.values import ClientEntry
from oncelog.stores.absence import Absence
from oncelog.stores.side_state import Table
from oncelog.stores.verifying.findings import Progress, SideStateError
from oncelog.stores.verifying.indexes import REPORT_ROWS, in_order
from oncelog.stores.verifying.outcome import Outcome, State
from oncelog.stores.verifying.replay import name_of
from oncelog.stores.verifying.row_comparison import RowComparison
from oncelog.stores.verifying.scratch import REBUILT, Scratch
from oncelog.stores.verifying.source import Row, Source

FINDINGS_MAX: Final = 100
"""Findings that are reported by name; all are counted."""


class Comparison:
    """Compares the tables one after the other, and counts."""

    def __init__(self, source: Source, scratch: Scratch, *, with_effects: bool = True) -> None:
        self._source = source
        self._scratch = scratch
        self._tables = [table for table in REBUILT if with_effects or table.name == "clients"]
        self._is_absent = Absence(source.rows("policies"), source.heads())
        self._compare: Mapping[str, Callable[[Row, Any, Any], Outcome]] = {
            "clients": self._compare_clients,
            "entities": self._compare_entities,
            "relationships": self._compare_relationships,
            "rows": RowComparison(source, scratch),
        }
        self._total = 0
        self._findings: list[str] = []
        self._lane: int | None = None
        self.same = {table.name: 0 for table in self._tables}
        self.unknown = {table.name: 0 for table in self._tables}

    def run(self) -> Iterator[Progress]:
        """Compare all tables. Raises SideStateError with what differs."""
        for table in self._tables:
            yield from self._compare_table(table)
        if self._total:
            raise SideStateError(self._findings, self._total, self._lane)

    def _compare_table(self, table: Table) -> Iterator[Progress]:
        width = 1 + len(table.keys)
        compare = self._compare[table.name]
        total = self._scratch.count(table)
        yield Progress(table.name, 0, total)
        for done, (key, stored, rebuilt) in enumerate(self._side_by_side(table, width), 1):
            if stored is not None and stored == rebuilt:
                outcome: Outcome = State.SAME
            else:
                outcome = compare(
                    key,
                    None if stored is None else table.value_of(stored),
                    None if rebuilt is None or rebuilt == (None,) else table.value_of(rebuilt),
                )
            self._count(table.name, key, outcome)
            if done % REPORT_ROWS == 0:
                yield Progress(table.name, min(done, total), total)

    def _side_by_side(self, table: Table, width: int) -> Iterator[tuple[Row, Row | None, Row | None]]:
        """Return each key with its stored and its rebuilt columns."""
        rebuilt_rows = self._scratch.rows_of(table)
        rebuilt = next(rebuilt_rows, None)
        for stored in in_order(self._source.rows_of(table), width, f"the table oncelog_{table.name}"):
            while rebuilt is not None and rebuilt[:width] < stored[:width]:
                yield rebuilt[:width], None, rebuilt[width:]
                rebuilt = next(rebuilt_rows, None)
            if rebuilt is not None and rebuilt[:width] == stored[:width]:
                yield stored[:width], stored[width:], rebuilt[width:]
                rebuilt = next(rebuilt_rows, None)
            else:
                yield stored[:width], stored[width:], None
        while rebuilt is not None:
            yield rebuilt[:width], None, rebuilt[width:]
            rebuilt = next(rebuilt_rows, None)

    def _count(self, name: str, key: Row, outcome: Outcome) -> None:
        if outcome is State.SAME:
            self.same[name] += 1
        elif outcome is State.UNKNOWN:
            self.unknown[name] += 1
        elif outcome is not State.ABSENT:
            self._total += 1
            if self._lane is None:
                self._lane = key[0]
            if len(self._findings) < FINDINGS_MAX:
                self._findings.append(f"{_described(name, key)} {outcome}")

    # --- clients

    def _compare_clients(self, key: Row, stored: ClientEntry | None, rebuilt: ClientEntry | None) -> Outcome:
        if rebuilt is None:
            return "has an entry, but no record"
        if stored is None:
            if self._is_absent(key, rebuilt):
                return State.ABSENT
            return f"has no entry, though it got to sequence {rebuilt.sequence}"
        return (
            f"has an entry (sequence {stored.sequence}) that is not that of its newest record "
            f"(sequence {rebuilt.sequence})"
        )

    # --- entities

    def _compare_entities(self, key: Row, stored: Entity | None, rebuilt: Entity | None) -> Outcome:
        lane, scope, name = key
        if stored is None:
            assert rebuilt is not None  # noqa: S101 - one of them is there
            if self._is_absent(key, rebuilt):
                return State.ABSENT
            if self._scratch.has_unknown(lane, scope, rebuilt.version):
                return State.UNKNOWN
            return f"is missing: the record with sequence {rebuilt.version} set it"
        if stored.erased and not self._scratch.is_erased(lane, scope, stored.version):
            return f"is marked as erased, and the record with sequence {stored.version} is not"
        if stored.erased and stored.value:
            return "is marked as erased, and has a value"
        newest = self._scratch.removed_at(lane, scope, name_of(name)) if rebuilt is None else rebuilt.version
        if stored.version > newest and self._scratch.is_unknown(lane, scope, stored.version):
            return State.UNKNOWN
        if rebuilt is None:
            return f"has version {stored.version}, and no record set it{_deleted(newest)}"
        if stored.version != rebuilt.version:
            return f"has version {stored.version}, and the records make it version {rebuilt.version}"
        if stored.value != rebuilt.value:
            return f"has another value than the record with sequence {rebuilt.version} set"
        return (
            f"expires at {stored.expires_at_ms}, and the record with sequence {rebuilt.version} "
            f"says {rebuilt.expires_at_ms}"
        )

    # --- relationships

    def _compare_relationships(self, key: Row, stored: int | None, rebuilt: int | None) -> Outcome:
        lane, scope, *parts = key
        if stored is None:
            assert rebuilt is not None  # noqa: S101 - one of them is there
            if self._scratch.has_unknown(lane, scope, rebuilt):
                return State.UNKNOWN
            return f"is missing: the record with sequence {rebuilt} created it"
        if rebuilt is not None and stored > rebuilt and self._scratch.has_unknown(lane, scope, rebuilt):
            return State.UNKNOWN  # one of these may have deleted it, and a later record created it again
        removed = self._scratch.removed_at(lane, scope, name_of(*parts))
        if stored > removed and self._scratch.is_unknown(lane, scope, stored):
            return State.UNKNOWN
        if rebuilt is not None:
            return f"has version {stored}, and the record with sequence {rebuilt} created it"
        return f"has version {stored}, and no record created it{_deleted(removed)}"


def _deleted(sequence: int) -> str:
    return f" since sequence {sequence} deleted it" if sequence else ""


def _described(name: str, key: Row) -> str:
    lane, *parts = key
    match name:
        case "clients":
            policy, scope, client = parts
            return f"lane {lane}: client {client!r} of {policy} {scope!r}"
        case "entities":
            return f"lane {lane}: entity {parts[1]!r} of {parts[0]!r}"
        case "relationships":
            scope, resource, relation, subject = parts
            return f"lane {lane}: relationship {resource!r} {relation!r} {subject!r} of {scope!r}"
    scope, table, row_id = parts
    return f"lane {lane}: row {row_id!r} of table {table!r} of {scope!r}"
