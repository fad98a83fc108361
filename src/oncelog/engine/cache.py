"""Complete answers in memory: a retry of one of the newest writes is answered without the store.

An answer enters when its write is durable, never before. It is given only while nobody, on whatever knowledge, could
say that the identity has been forgotten: by age alone, which is stricter than any eviction.
"""

from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

from oncelog.core.policy import Forget, Policy
from oncelog.core.proof import Block, Proof, prove
from oncelog.core.values import KeyIdentity, Remembered
from oncelog.stores.protocol import Decided


class CachedAnswer(Struct, gc=False):
    """What was answered, and what its proof can be made from."""

    remembered: Remembered
    block: Block | None = None
    """None where the answer came from the store."""
    leaves: Sequence[bytes] = ()
    """Of the whole block, shared by all its answers."""

    @property
    def proof(self) -> Proof | None:
        """That the record stands in the block."""
        if self.block is None:
            return None
        return prove(self.leaves, self.remembered.receipt.position - self.block.first_position)


class AnswerCache:
    """At most so many answers; the least recently used one goes first."""

    def __init__(self, entries_max: int, ttl_ms: int) -> None:
        self._entries_max = entries_max
        self._ttl_ms = ttl_ms
        self._answers: dict[KeyIdentity, CachedAnswer] = {}
        self.log_time_ms = 0
        """The newest of any batch. A clock that was set back does not make what the log has forgotten known again."""

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, identity: KeyIdentity) -> bool:
        return identity in self._answers

    def get(self, policy: Policy, identity: KeyIdentity, now_ms: int) -> CachedAnswer | None:
        """The answer to an identity, if it is here and certainly still remembered."""
        answer = self._answers.pop(identity, None)
        if answer is None:
            return None
        now_ms = max(now_ms, self.log_time_ms)
        age_ms = now_ms - answer.remembered.receipt.log_time_ms
        if age_ms >= self._ttl_ms or not is_certainly_remembered(policy, answer.remembered, now_ms):
            return None
        self._answers[identity] = answer  # at the end: the most recently used
        return answer

    def put(self, identity: KeyIdentity, answer: CachedAnswer) -> None:
        """Keeps an answer whose write is durable."""
        answers = self._answers
        answers.pop(identity, None)
        answers[identity] = answer
        self._shrink()

    def put_all(self, decided: Decided) -> None:
        """Keeps the answers of a batch that has been committed."""
        for head in decided.changes.heads.values():
            self.log_time_ms = max(self.log_time_ms, head.log_time_ms)
        if not self._entries_max:
            return
        blocks = {block.lane: block for block in decided.sealed.blocks}
        leaves, answers = decided.sealed.leaves, self._answers
        for identity, remembered in decided.changes.keys.items():
            if remembered is not None:
                lane = remembered.receipt.lane
                answers.pop(identity, None)
                answers[identity] = CachedAnswer(remembered, blocks[lane], leaves[lane])
        self._shrink()

    def _shrink(self) -> None:
        too_many = len(self._answers) - self._entries_max
        for identity in list(islice(self._answers, too_many)) if too_many > 0 else ():
            del self._answers[identity]

    def clear(self) -> None:
        """Forgets all of them: something has been erased."""
        self._answers.clear()


def is_certainly_remembered(policy: Policy, remembered: Remembered, now_ms: int) -> bool:
    """Whether no eviction up to now can have forgotten it. What is in doubt is for the store to decide."""
    retention = policy.retention
    return retention.forget is Forget.NEVER or now_ms - remembered.receipt.log_time_ms < retention.ttl_ms
