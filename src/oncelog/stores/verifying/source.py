"""What a verification reads, and what it hands to those who keep books on it."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct

from oncelog.core.policy import Policy
from oncelog.core.values import LaneHead, Record, Settings
from oncelog.stores.about import About
from oncelog.stores.leaps import LaneGaps
from oncelog.stores.protocol import Consumer
from oncelog.stores.side_state import Table
from oncelog.stores.verifying.findings import Progress

Row = tuple[Any, ...]


class Rules(Struct, frozen=True):
    """What the log was made with and has been told."""

    settings: Settings
    policies: Mapping[str, Policy]
    leaps: tuple[int, ...] = ()
    """The numbers above which it continued after restores."""
    gaps: Mapping[int, LaneGaps] = {}
    """What these leaps have passed over in each lane."""


class Books(Protocol):
    """Gathers what the records say, to hold it against the tables that are made from them."""

    def take(self, record: Record) -> None:
        """Called for every record in the order of places, once its own columns have been checked."""


class Keys(Books, Protocol):
    """What a database finds identities by."""

    def check(self, rules: Rules) -> Iterator[Progress]:
        """Every identity is found, at its place; and none was stored again while it was remembered."""

    def figures(self) -> Mapping[str, int]:
        """What was looked at, as `Passed` has it."""


class Source(Protocol):
    """A log inside one read transaction. Rows come one by one: no table fits into memory.

    Statements go by the names that they have in every database's `queries.sql`.
    """

    about: About

    @property
    def keys(self) -> Keys:
        """By what identities are found."""

    def check_structure(self) -> Iterator[Progress]:
        """Check files, tables and indexes in the way of this database. Raises ContradictionError."""

    def heads(self) -> dict[int, LaneHead]:
        """Of all lanes that have one."""

    def leaps(self) -> tuple[int, ...]:
        """The numbers above which the log continued after restores."""

    def gaps(self) -> Mapping[int, LaneGaps]:
        """What these leaps have passed over in each lane that has a head."""

    def rows(self, statement: str) -> Iterator[Row]:
        """What a statement gives, in its order."""

    def rows_of(self, table: Table) -> Iterator[Row]:
        """A table of side state: lane, key and values, in the order of lane and key."""

    def evidence(self) -> Iterator[Row]:
        """All records in the order of places, as `rows.evidence_of` takes them, wherever they claim to be."""

    def first(self, statement: str, *parameters: Any) -> Row | None:
        """The first row of a statement; None if it gives none, or this database has no need of it."""

    def consumers(self) -> list[Consumer]:
        """All of them, with how far each is behind."""
