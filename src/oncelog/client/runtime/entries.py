"""A write in the outbox of a client, and its outcome."""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct


class BaseEntry(Struct, frozen=True, gc=False):
    """A write in the outbox."""

    number: int
    """Place in the outbox: writes are sent in this order. 0 before the write has a place."""

    def __str__(self) -> str:
        """Name of the write in errors and logs."""
        raise NotImplementedError

    @property
    def identity(self) -> Hashable:
        """Equal for two submissions of one write."""
        raise NotImplementedError

    @property
    def equality_key(self) -> Hashable:
        """What two submissions of one write must have in common."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Bytes that count against the limit of the outbox; 0 if there is none."""
        return 0


Entry = TypeVar("Entry", bound=BaseEntry)
OutcomeType = TypeVar("OutcomeType")


class Settled(NamedTuple, Generic[Entry, OutcomeType]):
    """A write and its outcome."""

    entry: Entry
    outcome: OutcomeType
