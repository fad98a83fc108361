"""Cursors: how far a reader has read."""

from typing import Self

from msgspec import Struct


class Cursor(Struct, frozen=True):
    """How far a reader has read, in one epoch of a log and one order of its records.

    Store a cursor as text: `str(cursor)` writes it and `Cursor.parse(text)` reads it. Parameters that take a cursor
    also accept its text.
    """

    position: int
    epoch: str
    order: str = ""
    """Empty for lane 0 and its partitions, otherwise the name of the lane or stream."""

    def __str__(self) -> str:
        return f"{self.epoch}:{self.order}:{self.position}" if self.order else f"{self.epoch}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of `str`. Raises ValueError for any other text."""
        epoch, _, rest = text.partition(":")
        order, _, position = rest.rpartition(":")
        if not epoch or not position.isdecimal() or not position.isascii():
            raise ValueError(f"a cursor must be EPOCH:POSITION, not {text[:100]!r}")
        return cls(int(position), epoch, order)
