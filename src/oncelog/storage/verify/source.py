"""Interfaces of a verification to the database and to collectors of records, and comparisons of sorted tables."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Final, Protocol

from msgspec import Struct

from oncelog.core.policy import Policy
from oncelog.core.values import LaneHead, Record, Settings
from oncelog.storage.inspect.inspector import LogView, RowTuple
from oncelog.storage.metadata import LaneGaps
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.verify.findings import InconsistencyError, StepProgress, VerificationSummary

_PROBLEMS_MAX: Final = 10
_NAME_CHARACTERS_MAX: Final = 200


class LogState(Struct, frozen=True):
    """Settings, policies, leaps and heads of a log, with which the checks compare the records."""

    settings: Settings
    policies: Mapping[str, Policy]
    leaps: tuple[int, ...] = ()
    """Numbers above which the log continued after restores."""
    gaps: Mapping[int, LaneGaps] = {}
    """Numbers that these leaps passed over in each lane."""
    heads: Mapping[int, LaneHead] = {}


class RecordCollector(Protocol):
    """Collects the contents of records, which a check compares with the tables that are derived from them."""

    def add(self, record: Record) -> None:
        """Add the next record in the order of places. Its columns have been checked."""


class VerificationSource(ABC):
    """The log that is verified, with checks that depend on the database: those of its structure and its key index.

    It collects the keys of the records that `iterate_evidence` returns.
    """

    view: LogView

    @abstractmethod
    def check_structure(self) -> Iterator[StepProgress]:
        """Check files, tables and indexes. Raises InconsistencyError."""

    @abstractmethod
    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """Yield the rows of a table of side state: lane, key and values, in the order of lane and key."""

    @abstractmethod
    def iterate_evidence(self) -> Iterator[RowTuple]:
        """Yield all records for `decode_evidence` in the order of places, even if their lane is wrong."""

    @abstractmethod
    def add(self, record: Record) -> None:
        """As `RecordCollector`."""

    @abstractmethod
    def check_keys(self, state: LogState, summary: VerificationSummary) -> Iterator[StepProgress]:
        """Check that each identity is found at its place, and was not stored again while it was remembered."""

    def get_log_time(self, lane: int, position: int) -> int:
        """Return the log time of the record at a place; 0 without a record."""
        row = self.view.fetch_first("log_time_at", lane, position)
        return row[0] if row else 0

    def iterate_sorted(self, table: SideStateTable) -> Iterator[RowTuple]:
        """As `iterate_table`. Raises InconsistencyError for a row that is out of order, which no lookup would find."""
        return check_order(self.iterate_table(table), 1 + len(table.keys), f"the table oncelog_{table.name}")


def check_order(rows: Iterator[RowTuple], width: int, label: str) -> Iterator[RowTuple]:
    """Yield rows. Raises InconsistencyError unless their keys, of `width` columns, ascend."""
    before: RowTuple | None = None
    for row in rows:
        if before is not None and row[:width] <= before:
            raise InconsistencyError(f"{label} is out of order at {row[:width]!r}")
        before = row[:width]
        yield row


def pair_rows(
    left: Iterator[RowTuple], right: Iterator[RowTuple], width: int
) -> Iterator[tuple[RowTuple, RowTuple | None, RowTuple | None]]:
    """Join two tables in the order of their keys, of `width` columns. Yields each key with the other columns of both.

    A table without the key has None.
    """
    sides = ((row, 0) for row in left), ((row, 1) for row in right)
    by_key = partial(_get_key, width)
    for key, rows in groupby(heapq.merge(*sides, key=by_key), key=by_key):
        found: list[RowTuple | None] = [None, None]
        for row, side in rows:
            found[side] = row[width:]
        yield key, found[0], found[1]


def _get_key(width: int, row_of_side: tuple[RowTuple, int]) -> RowTuple:
    return row_of_side[0][:width]


def check_definitions(wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise InconsistencyError with the names of all definitions that are missing, surplus or different."""
    problems = [
        f"the {_format_name(name)} {_describe_problem(name in wanted, name in found)}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if problems:
        more = f"; and {len(problems) - _PROBLEMS_MAX} more" if len(problems) > _PROBLEMS_MAX else ""
        raise InconsistencyError("; ".join(problems[:_PROBLEMS_MAX]) + more)


def _format_name(name: str) -> str:
    short = name[:_NAME_CHARACTERS_MAX]
    return short if short.isprintable() else ascii(short)[1:-1]


def _describe_problem(is_wanted: bool, is_found: bool) -> str:
    if not is_found:
        return "is missing"
    return "is not as Oncelog makes it" if is_wanted else "is not one of Oncelog's"
