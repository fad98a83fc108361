"""What readers of a log hold in their hands: cursors, pages, proofs."""

from typing import Self

from msgspec import Struct

from oncelog.core.proof import Block, Proof
from oncelog.core.values import Record


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


class Reading(Struct, frozen=True):
    """A page of records, and how to go on."""

    records: list[Record]
    cursor: Cursor
    """Read on after this. Behind the last page it is the bound, also where no record matched."""
    upto: int
    """The bound: pass it on with the cursor, and paging ends however fast the log grows."""
    has_more: bool
    newest: int


class Proven(Struct, frozen=True):
    """A record's place in its block. `oncelog.verify(record, salt, proof, block)` checks it."""

    record: Record
    salt: bytes
    """Empty for an erased record: check `verify_header` with the body hash instead."""
    body_hash: bytes
    proof: Proof
    block: Block


def order_of(stream: str | None, lane: int) -> str:
    """What a cursor says of the order it is of."""
    if stream is not None:
        return f"stream/{stream}"
    return f"lane/{lane}" if lane else ""
