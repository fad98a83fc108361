"""Results of reads: pages, followers, cursors and proofs."""

from collections.abc import AsyncGenerator, Sequence
from typing import Self

from msgspec import Struct

from oncelog.core.proof import Block, Evidence, Proven, encode_record_header, hash_leaf, prove
from oncelog.core.values import Record
from oncelog.cursor import Cursor
from oncelog.storage.store import Consumer

__all__ = ["Compacted", "Cursor", "Follower", "Proven", "Reading", "format_order"]


class Reading(Struct, frozen=True):
    """A page of records, and the cursor from which the next page continues."""

    records: list[Record]
    cursor: Cursor
    """Start of the next page. After the last page it is `upto`, even if no record matched."""
    upto: int
    """Position at which paging ends. Pass it with the cursor, so that paging ends even if the log grows."""
    has_more: bool
    newest: int


class Follower:
    """Async iterator over records. If the loop may end early, close it: `async with log.follow(…) as records`."""

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

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def prove_position(block: Block, evidence: Sequence[Evidence], position: int) -> Proven | None:
    """Prove the record at a position. Returns None if the block does not contain the position."""
    index = position - block.first_position
    if not 0 <= index < len(evidence):
        return None
    leaves = [hash_leaf(encode_record_header(member.record), member.body_hash) for member in evidence]
    found = evidence[index]
    return Proven(found.record, found.salt, found.body_hash, prove(leaves, index), block)


class Compacted(Struct, frozen=True):
    """Result of compacting a stream."""

    deltas: int
    """How many delta bodies this call dropped."""
    upto: int
    """Sequence up to which all delta bodies have been dropped."""
    has_more: bool = False
    """Whether the call stopped at its limit."""
    dropped: int = 0
    """How many tombstones of deleted rows this call dropped."""
    next_row: tuple[str, str] | None = None
    """Table and row id from which the next call should continue (`after_row`), or None if all rows were read."""
    held_by: Consumer | None = None
    """The named consumer that is furthest behind, if it prevents deleted rows from being dropped."""


def format_order(stream: str | None, lane: int) -> str:
    """Return the name of an order in a cursor: empty for lane 0."""
    if stream is not None:
        return f"stream/{stream}"
    return f"lane/{lane}" if lane else ""
