"""How far a reader has come."""

from typing import Self

from msgspec import Struct


class Cursor(Struct, frozen=True):
    """How far a reader has come, in which history and in which order.

    Keep it as text: `str(cursor)`, `Cursor.parse(text)`. Wherever a cursor is asked for, its text is taken too.
    """

    position: int
    epoch: str
    order: str = ""
    """Empty for lane 0 and its partitions, else the lane or the stream."""

    def __str__(self) -> str:
        return f"{self.epoch}:{self.order}:{self.position}" if self.order else f"{self.epoch}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor that `str` gave. Raises ValueError for anything else."""
        epoch, _, rest = text.partition(":")
        order, _, position = rest.rpartition(":")
        if not epoch or not position.isdecimal() or not position.isascii():
            raise ValueError(f"a cursor is EPOCH:POSITION, not {text[:100]!r}")
        return cls(int(position), epoch, order)
