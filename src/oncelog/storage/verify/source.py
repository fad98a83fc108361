"""Interfaces that each database and each check of a verification implements, and functions that compare sorted tables.

`VerificationSource` reads the log from its database. A `RecordCollector` receives the records of the log.
"""

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
    """A log's settings, policies, leaps and heads, with which the checks compare the records."""

    settings: Settings
    policies: Mapping[str, Policy]
    leaps: tuple[int, ...] = ()
    """Numbers above which numbering resumed after restores."""
    gaps: Mapping[int, LaneGaps] = {}
    """Numbers that these leaps skipped in each lane."""
    heads: Mapping[int, LaneHead] = {}


class RecordCollector(Protocol):
    """Collects the contents of records, for a check that compares them with the tables derived from the records."""

    def add(self, record: Record) -> None:
        """Add a record. The caller passes the records ordered by lane and position, after checking their columns."""


class VerificationSource(ABC):
    """The log being verified, with the checks that depend on the database: structure and key index.

    The source collects the keys of the records that `iterate_evidence` yields.
    """

    view: LogView

    @abstractmethod
    def check_structure(self) -> Iterator[StepProgress]:
        """Check the file, tables and indexes. Raises InconsistencyError."""

    @abstractmethod
    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """Yield the rows of a side-state table: lane, key and values, ordered by lane and key."""

    @abstractmethod
    def iterate_evidence(self) -> Iterator[RowTuple]:
        """Yield the rows of all records, in the format that `decode_evidence` expects, ordered by lane and position.

        Includes records with an invalid lane or position.
        """

    @abstractmethod
    def add(self, record: Record) -> None:
        """See `RecordCollector`."""

    @abstractmethod
    def check_keys(self, state: LogState, summary: VerificationSummary) -> Iterator[StepProgress]:
        """Check the lookup of records by identity.

        A lookup of each identity must find its record. A later record may repeat an identity only if the log had
        forgotten it by then.
        """

    def get_log_time(self, lane: int, position: int) -> int:
        """Return the log time of the record at a place, or 0 if no record exists there."""
        row = self.view.fetch_first("log_time_at", lane, position)
        return row[0] if row else 0

    def iterate_sorted(self, table: SideStateTable) -> Iterator[RowTuple]:
        """Like `iterate_table`.

        Raises InconsistencyError for a row that is out of order, because lookups would not find it.
        """
        return check_order(self.iterate_table(table), 1 + len(table.keys), f"the table oncelog_{table.name}")


def check_order(rows: Iterator[RowTuple], width: int, label: str) -> Iterator[RowTuple]:
    """Yield rows. Raises InconsistencyError unless their keys, the first `width` columns, are in ascending order."""
    before: RowTuple | None = None
    for row in rows:
        if before is not None and row[:width] <= before:
            raise InconsistencyError(f"{label} is out of order at {row[:width]!r}")
        before = row[:width]
        yield row


def pair_rows(
    left: Iterator[RowTuple], right: Iterator[RowTuple], width: int
) -> Iterator[tuple[RowTuple, RowTuple | None, RowTuple | None]]:
    """Join two tables that are ordered by their keys of `width` columns. Yields each key with the other columns of
    both.

    A table that lacks the key yields None instead of columns.
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
    """Raise InconsistencyError that lists all definitions that are missing, surplus or different."""
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
    return "differs from Oncelog's definition" if is_wanted else "does not belong to Oncelog"
