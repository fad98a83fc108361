"""Cache of answers: a retry of one of the newest writes is answered without the store.

An answer enters when its write is durable, never before. It is given only while nobody, on whatever knowledge, could
say that the identity has been forgotten: by age alone, which is stricter than any eviction. What its proof is made
from is kept beside it, block by block; the proof is made when it is asked for.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct

from oncelog.core.policy import Forget, Policy
from oncelog.core.proof import Block, MerkleTree, Proof, prove_from_tree
from oncelog.core.values import KeyIdentity, Receipt, Remembered
from oncelog.storage.store import BatchResult

SHRINK_DIVISOR: Final = 64
"""By this part of all it is made smaller at a time."""


class Attestation(Struct, frozen=True):
    """The block that a record stands in, the proof of it, the salt of its body, and who wrote it."""

    block: Block
    proof: Proof
    salt: bytes
    actor: str


class _CachedBlock(Struct, frozen=True, gc=False):
    """Of tuples alone: a look for objects in cycles goes through every list again, and leaves out such tuples."""

    block: Block
    tree: MerkleTree
    salts: tuple[bytes, ...]
    actors: tuple[str, ...]


class AnswerCache:
    """At most so many answers; the least recently used one goes first."""

    def __init__(self, entries_max: int, ttl_ms: int) -> None:
        self._entries_max = entries_max
        self._ttl_ms = ttl_ms
        self._answers: dict[KeyIdentity, Remembered] = {}
        self._blocks: dict[tuple[int, int], _CachedBlock] = {}
        self._leaves = 0
        self.log_time_ms = 0
        """The newest that is known. A clock that was set back does not make what the log has forgotten known again."""
        self.erasures = 0
        """How many there have been, as far as is known."""

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing here that an erasure would have to take away."""
        return not self._answers and not self._blocks

    def __contains__(self, identity: KeyIdentity) -> bool:
        return identity in self._answers

    def get(self, policy: Policy, identity: KeyIdentity, now_ms: int) -> Remembered | None:
        """What is remembered of an identity, if it is here and certainly not forgotten."""
        remembered = self._answers.pop(identity, None)
        if remembered is None:
            return None
        age_ms = max(now_ms, self.log_time_ms) - remembered.receipt.log_time_ms
        retention = policy.retention
        if age_ms >= self._ttl_ms or (retention.forget is not Forget.NEVER and age_ms >= retention.ttl_ms):
            return None
        self._answers[identity] = remembered  # at the end: the most recently used
        return remembered

    def find_attestation(self, receipt: Receipt, now_ms: int | None = None) -> Attestation | None:
        """What proves a record, if its block was committed here, is still kept, and nothing was erased since.

        With a time, None also for a record that is older than the time to live of answers.
        """
        cached = self._blocks.get((receipt.lane, receipt.height))
        if cached is None:
            return None
        if now_ms is not None and max(now_ms, self.log_time_ms) - receipt.log_time_ms >= self._ttl_ms:
            return None
        index = receipt.position - cached.block.first_position
        return Attestation(cached.block, prove_from_tree(cached.tree, index), cached.salts[index], cached.actors[index])

    def put(self, identity: KeyIdentity, remembered: Remembered) -> None:
        """Keeps an answer whose write is durable."""
        self._answers.pop(identity, None)
        self._answers[identity] = remembered
        self._shrink()

    def put_batch(self, result: BatchResult) -> None:
        """Keeps the answers of a batch that has been committed."""
        for head in result.changes.heads.values():
            self.log_time_ms = max(self.log_time_ms, head.log_time_ms)
        if not self._entries_max or result.erasures < self.erasures:
            return  # what was decided before an erasure may have been erased by it
        self._answers.update(result.changes.keys)
        for block, salts, actors in _iterate_blocks(result):
            tree = tuple(map(tuple, result.sealed.trees[block.lane]))
            self._blocks[block.lane, block.height] = _CachedBlock(block, tree, tuple(salts), tuple(actors))
            self._leaves += block.count
        self._shrink()

    def clear(self) -> None:
        """Forgets all of them: something has been erased."""
        self._answers.clear()
        self._blocks.clear()  # with the salts, of which nothing may be left either
        self._leaves = 0

    def _shrink(self) -> None:
        too_many = len(self._answers) - self._entries_max
        if too_many > 0:
            # Some more, so that it is seldom: to find the oldest a dict goes over all that have been taken before.
            for identity in list(islice(self._answers, too_many + self._entries_max // SHRINK_DIVISOR)):
                del self._answers[identity]
        if self._leaves > self._entries_max:
            target_entries = self._entries_max - self._entries_max // SHRINK_DIVISOR
            for place in list(islice(self._blocks, len(self._blocks) - 1)):
                if self._leaves <= target_entries:
                    break
                self._leaves -= self._blocks.pop(place).block.count


def _iterate_blocks(result: BatchResult) -> Iterator[tuple[Block, Sequence[bytes], Sequence[str]]]:
    """Of each block the salts and actors of its records, in order."""
    blocks, records = result.sealed.blocks, result.changes.records
    if len(blocks) == 1:
        yield blocks[0], result.salts, [record.actor for record in records]
        return
    salts: dict[int, list[bytes]] = {block.lane: [] for block in blocks}
    actors: dict[int, list[str]] = {block.lane: [] for block in blocks}
    for record, salt in zip(records, result.salts, strict=True):
        salts[record.lane].append(salt)
        actors[record.lane].append(record.actor)
    yield from ((block, salts[block.lane], actors[block.lane]) for block in blocks)
