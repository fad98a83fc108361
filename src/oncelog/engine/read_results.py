"""Results of reading a log: pages, followers, cursors and proofs."""

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from msgspec import Struct

from oncelog.core.proof import Block, Proof, encode_record_header, hash_leaf, prove
from oncelog.core.values import Record
from oncelog.cursor import Cursor
from oncelog.storage.store import Consumer, Evidence

__all__ = ["Compacted", "Cursor", "Follower", "Proven", "Reading", "format_order"]


class Reading(Struct, frozen=True):
    """A page of records, and how to go on."""

    records: list[Record]
    cursor: Cursor
    """Read on after this. Behind the last page it is the bound, also where no record matched."""
    upto: int
    """The bound: pass it on with the cursor, and paging ends however fast the log grows."""
    has_more: bool
    newest: int


class Follower:
    """Async iterator over records. Close it where a loop ends before the log: `async with log.follow(…) as records`."""

    def __init__(self, records: AsyncGenerator[Record, None]) -> None:
        self._records = records

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        return await anext(self._records)

    async def aclose(self) -> None:
        """Close the iterator."""
        await self._records.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Proven(Struct, frozen=True):
    """A record's place in its block. `oncelog.verify(record, salt, proof, block)` checks it."""

    record: Record
    salt: bytes
    """Empty for an erased record: check `verify_header` with the body hash instead."""
    body_hash: bytes
    proof: Proof
    block: Block


def prove_position(block: Block, evidence: Sequence[Evidence], position: int) -> Proven | None:
    """Return the proof of the record at a position of a block; None if the block does not contain the position."""
    index = position - block.first_position
    if not 0 <= index < len(evidence):
        return None
    leaves = [hash_leaf(encode_record_header(member.record), member.body_hash) for member in evidence]
    found = evidence[index]
    return Proven(found.record, found.salt, found.body_hash, prove(leaves, index), block)


class Compacted(Struct, frozen=True):
    """How far a stream has been compacted."""

    deltas: int
    """Whose bodies were dropped now."""
    upto: int
    """The sequence up to which nothing has a body any more."""
    has_more: bool = False
    """It stopped early, at its limit: there is more to compact."""
    dropped: int = 0
    """Deleted rows that were dropped now, with their tombstones."""
    next_row: tuple[str, str] | None = None
    """Table and row id after which to look for more deleted rows (`after_row`); None if all rows were read."""
    held_by: Consumer | None = None
    """The named consumer that has read least, if it holds back deleted rows that are old enough."""


def format_order(stream: str | None, lane: int) -> str:
    """What a cursor says of the order it is of."""
    if stream is not None:
        return f"stream/{stream}"
    return f"lane/{lane}" if lane else ""
