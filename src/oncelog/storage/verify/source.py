"""Interfaces of a verification: the source of rows, and the collectors of records."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from oncelog.core.policy import Policy
from oncelog.core.values import LaneHead, Record, Settings
from oncelog.storage.leaps import LaneGaps
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.statement import SharedQuery
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.verify.findings import StepProgress

RowTuple = tuple[Any, ...]
T = TypeVar("T")


class LogRules(Struct, frozen=True):
    """What the log was made with and has been told."""

    settings: Settings
    policies: Mapping[str, Policy]
    leaps: tuple[int, ...] = ()
    """The numbers above which it continued after restores."""
    gaps: Mapping[int, LaneGaps] = {}
    """What these leaps have passed over in each lane."""


class RecordCollector(Protocol):
    """Gathers what the records say, to hold it against the tables that are made from them."""

    def add(self, record: Record) -> None:
        """Called for every record in the order of places, once its own columns have been checked."""


class KeyVerifier(RecordCollector, Protocol):
    """What a database finds identities by."""

    def check(self, rules: LogRules) -> Iterator[StepProgress]:
        """Every identity is found, at its place; and none was stored again while it was remembered."""

    def get_counts(self) -> Mapping[str, int]:
        """What was looked at, as `VerificationSummary` has it."""


class VerificationSource(Protocol):
    """A log inside one read transaction. Rows come one by one: no table fits into memory.

    Statements go by the names that they have in every database's `queries.sql`.
    """

    metadata: LogMetadata

    @property
    def keys(self) -> KeyVerifier:
        """By what identities are found."""

    def check_structure(self) -> Iterator[StepProgress]:
        """Check files, tables and indexes in the way of this database. Raises InconsistencyError."""

    def load_heads(self) -> dict[int, LaneHead]:
        """Of all lanes that have one."""

    def run_query(self, query: SharedQuery[T], *arguments: Any) -> T:
        """Return the result of a shared query."""

    def iterate_rows(self, statement: str) -> Iterator[RowTuple]:
        """What a statement gives, in its order."""

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """A table of side state: lane, key and values, in the order of lane and key."""

    def iterate_evidence(self) -> Iterator[RowTuple]:
        """All records in the order of places, as `rows.evidence_of` takes them, wherever they claim to be."""

    def fetch_first(self, statement: str, *parameters: Any) -> RowTuple | None:
        """The first row of a statement; None if it gives none, or this database has no need of it."""
