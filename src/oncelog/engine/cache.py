"""Complete answers in memory: a retry of one of the newest writes is answered without the store.

An answer enters when its write is durable, never before. It is given only while nobody, on whatever knowledge, could
say that the identity has been forgotten: by age alone, which is stricter than any eviction. What its proof is made
from is kept beside it, block by block; the proof is made when it is asked for.
"""

from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

from oncelog.core.policy import Forget, Policy
from oncelog.core.proof import Block, Proof, prove
from oncelog.core.values import KeyIdentity, Remembered
from oncelog.stores.protocol import Decided


class CompleteAnswer(Struct, frozen=True):
    """What was answered, with the block it stands in and the proof of it."""

    remembered: Remembered
    block: Block
    proof: Proof


class AnswerCache:
    """At most so many answers; the least recently used one goes first."""

    def __init__(self, entries_max: int, ttl_ms: int) -> None:
        self._entries_max = entries_max
        self._ttl_ms = ttl_ms
        self._answers: dict[KeyIdentity, Remembered] = {}
        self._blocks: dict[tuple[int, int], tuple[Block, Sequence[bytes]]] = {}
        self._leaves = 0
        self.log_time_ms = 0
        """The newest that is known. A clock that was set back does not make what the log has forgotten known again."""
        self.erasures = 0
        """How many there have been, as far as is known."""

    def __len__(self) -> int:
        return len(self._answers)

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

    def complete(self, policy: Policy, identity: KeyIdentity, now_ms: int) -> CompleteAnswer | None:
        """The same with its proof, if its block was committed here and is not too long ago."""
        remembered = self.get(policy, identity, now_ms)
        if remembered is None:
            return None
        receipt = remembered.receipt
        block, leaves = self._blocks.get((receipt.lane, receipt.height), (None, ()))
        if block is None:
            return None
        return CompleteAnswer(remembered, block, prove(leaves, receipt.position - block.first_position))

    def put(self, identity: KeyIdentity, remembered: Remembered) -> None:
        """Keeps an answer whose write is durable."""
        self._answers.pop(identity, None)
        self._answers[identity] = remembered
        self._shrink()

    def put_all(self, decided: Decided) -> None:
        """Keeps the answers of a batch that has been committed."""
        for head in decided.changes.heads.values():
            self.log_time_ms = max(self.log_time_ms, head.log_time_ms)
        if not self._entries_max or decided.erasures < self.erasures:
            return  # what was decided before an erasure may have been erased by it
        self._answers.update(decided.changes.keys)
        for block in decided.sealed.blocks:
            self._blocks[block.lane, block.height] = (block, decided.sealed.leaves[block.lane])
            self._leaves += block.count
        self._shrink()

    def clear(self) -> None:
        """Forgets all of them: something has been erased."""
        self._answers.clear()

    def _shrink(self) -> None:
        too_many = len(self._answers) - self._entries_max
        for identity in list(islice(self._answers, too_many)) if too_many > 0 else ():
            del self._answers[identity]
        while self._leaves > self._entries_max and len(self._blocks) > 1:
            block, _ = self._blocks.pop(next(iter(self._blocks)))
            self._leaves -= block.count
