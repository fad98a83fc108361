"""Caches that answer retries of recent writes and repeated calls without accessing the store.

An entry is added only once its write is durable. A cache serves an entry only while the log certainly remembers its
key. It decides by the entry's age alone, which is stricter than any eviction.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct

from oncelog.core.policy import FOREVER, Forget, Policy, Retention
from oncelog.core.proof import Attestation, Block, MerkleTree, prove_from_tree
from oncelog.core.values import KeyIdentity, Receipt, Remembered
from oncelog.engine import logger
from oncelog.errors import LogReplacedError
from oncelog.storage.clock import Clock
from oncelog.storage.store import BatchResult, Store

SHRINK_DIVISOR: Final = 64
"""A full answer cache drops one of this many entries at a time, the oldest first."""
ERASURES_POLL_MS: Final = 1000
"""Interval between polls for erasures by other processes, while a cache has entries."""
_RESULT_OVERHEAD_BYTES: Final = 600
"""Approximate memory use of a result without its body."""


class _CachedBlock(Struct, frozen=True, gc=False):
    """A block with the data for its proofs. It uses tuples because the garbage collector stops tracking them, unlike
    lists."""

    block: Block
    tree: MerkleTree
    salts: tuple[bytes, ...]
    actors: tuple[str, ...]


class _RetentionCache:
    """Base class of both caches: decides whether an entry may still be served."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self.log_time_ms = 0
        """Newest known log time, so that forgotten keys remain forgotten even if the clock is set back."""

    def advance(self, log_time_ms: int) -> None:
        """Record a newer log time."""
        self.log_time_ms = max(self.log_time_ms, log_time_ms)

    def _is_expired(self, retention: Retention, receipt: Receipt, now_ms: int) -> bool:
        age_ms = max(now_ms, self.log_time_ms) - receipt.log_time_ms
        return age_ms >= self._ttl_ms or (retention.forget is not Forget.NEVER and age_ms >= retention.ttl_ms)


class AnswerCache(_RetentionCache):
    """Answers by identity, at most `entries_max`. The least recently used answer is evicted first.

    Proof data is cached by block. `find_attestation` builds a proof from it.
    """

    def __init__(self, entries_max: int, ttl_ms: int) -> None:
        super().__init__(ttl_ms)
        self._entries_max = entries_max
        self.answers: dict[KeyIdentity, Remembered] = {}
        """Oldest first. The committer tests membership in this dict directly, because a method call costs more."""
        self._blocks: dict[tuple[int, int], _CachedBlock] = {}
        self._leaves = 0
        self.erasures = 0
        """How many erasures the log has had, as far as this process knows."""

    @property
    def is_empty(self) -> bool:
        """Whether the cache holds neither answers nor proof data. An erasure need not clear an empty cache."""
        return not self.answers and not self._blocks

    def get(self, policy: Policy, identity: KeyIdentity, now_ms: int) -> Remembered | None:
        """Return the answer for an identity, or None if it is not cached or the log may have forgotten it."""
        remembered = self.answers.pop(identity, None)
        if remembered is None or self._is_expired(policy.retention, remembered.receipt, now_ms):
            return None
        self.answers[identity] = remembered  # move it to the end, as the most recently used
        return remembered

    def find_attestation(self, receipt: Receipt, now_ms: int | None = None) -> Attestation | None:
        """Return the attestation of a record whose block this process committed, if it is still cached.

        If `now_ms` is given, also return None for a record that is older than the answers' time to live.
        """
        cached = self._blocks.get((receipt.lane, receipt.height))
        if cached is None or (now_ms is not None and self._is_expired(FOREVER, receipt, now_ms)):
            return None
        index = receipt.position - cached.block.first_position
        return Attestation(cached.block, prove_from_tree(cached.tree, index), cached.salts[index], cached.actors[index])

    def put(self, identity: KeyIdentity, remembered: Remembered) -> None:
        """Add the answer to a durable write."""
        self.answers.pop(identity, None)
        self.answers[identity] = remembered
        self._shrink()

    def put_batch(self, result: BatchResult) -> None:
        """Add the answers of a committed batch."""
        for head in result.changes.heads.values():
            self.advance(head.log_time_ms)
        if not self._entries_max or result.erasures < self.erasures:
            return  # the erasure may have removed bodies that are in these answers
        self.answers.update(result.changes.keys)
        for block, salts, actors in _iterate_blocks(result):
            tree = tuple(map(tuple, result.sealed.trees[block.lane]))
            self._blocks[block.lane, block.height] = _CachedBlock(block, tree, tuple(salts), tuple(actors))
            self._leaves += block.count
        self._shrink()

    def clear(self) -> None:
        """Drop all entries after an erasure."""
        self.answers.clear()
        self._blocks.clear()  # with the salts, which must not outlive the erased bodies
        self._leaves = 0

    def _shrink(self) -> None:
        too_many = len(self.answers) - self._entries_max
        if too_many > 0:
            # Drop more entries than necessary, so that this happens rarely: finding the oldest entry scans all deleted
            # slots of the dict.
            for identity in list(islice(self.answers, too_many + self._entries_max // SHRINK_DIVISOR)):
                del self.answers[identity]
        if self._leaves > self._entries_max:
            target_entries = self._entries_max - self._entries_max // SHRINK_DIVISOR
            for place in list(islice(self._blocks, len(self._blocks) - 1)):
                if self._leaves <= target_entries:
                    break
                self._leaves -= self._blocks.pop(place).block.count


def _iterate_blocks(result: BatchResult) -> Iterator[tuple[Block, Sequence[bytes], Sequence[str]]]:
    """Yield each block with the salts and actors of its records, in order."""
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


class WorkResult(Struct, frozen=True):
    """The stored result of a piece of work: its receipt and body."""

    policy: Policy
    receipt: Receipt
    fingerprint: bytes
    body: bytes


class ResultCache(_RetentionCache):
    """Results of work, at most `bytes_max` bytes. The least recently used result is evicted first.

    Any thread may call `get`.
    """

    def __init__(self, clock: Clock, bytes_max: int, ttl_ms: int) -> None:
        super().__init__(ttl_ms)
        self._clock = clock
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._results: OrderedDict[KeyIdentity, WorkResult] = OrderedDict()
        self._bytes = 0
        self.generation = 0
        """Incremented by every `clear`, so that a result that was read before a `clear` is not added after it."""

    def get(self, policy: Policy, identity: KeyIdentity) -> WorkResult | None:
        """Return the result for an identity, or None if it is not cached or the log may have forgotten it."""
        with self._lock:
            result = self._results.get(identity)
            if result is None or (result.policy is not policy and result.policy != policy):
                return None  # the log refuses a second policy with the same name
            if self._is_expired(policy.retention, result.receipt, self._clock.wall_ms()):
                self._drop(identity)
                return None
            self._results.move_to_end(identity)
            return result

    def put(self, identity: KeyIdentity, result: WorkResult, generation: int) -> None:
        """Add a durable result. `generation` is the value from before the result was read or written."""
        size = len(result.body) + _RESULT_OVERHEAD_BYTES
        with self._lock:
            self.advance(result.receipt.log_time_ms)
            if generation != self.generation or size > self._bytes_max:
                return
            if identity in self._results:
                self._drop(identity)
            self._results[identity] = result
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._results)))

    def clear(self) -> None:
        """Drop all entries after an erasure."""
        with self._lock:
            self._results.clear()
            self._bytes = 0
            self.generation += 1

    def _drop(self, identity: KeyIdentity) -> None:
        self._bytes -= len(self._results.pop(identity).body) + _RESULT_OVERHEAD_BYTES


class CacheUpdater:
    """Polls the store for other processes' erasures and log time, and updates a log's caches."""

    def __init__(
        self, store: Store, answers: AnswerCache, results: ResultCache, drop_buffered: Callable[[], None]
    ) -> None:
        """Each `clear` calls `drop_buffered`, because subscribers must not receive erased bodies either."""
        self._store = store
        self._answers = answers
        self._results = results
        self._drop_buffered = drop_buffered
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start polling the store, because a cache has an entry."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll())

    def put_result(self, identity: KeyIdentity, result: WorkResult, generation: int) -> None:
        """Add a result as `ResultCache.put` does, and start polling the store."""
        self._results.put(identity, result, generation)
        self.start()

    def stop(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()

    def clear(self) -> None:
        """Drop cached answers, results and buffered records, because bodies were erased."""
        self._answers.clear()
        self._results.clear()
        self._drop_buffered()

    async def _poll(self) -> None:
        level = logging.WARNING
        while True:
            await asyncio.sleep(ERASURES_POLL_MS / 1000)
            try:
                erasures = await self._store.erasures()
                heads = await self._store.heads()
            except LogReplacedError as error:
                logger.log(level, "cached answers are dropped: %s", error)
                level = logging.DEBUG  # only the first is a warning
                self.clear()
                continue
            except Exception:  # callers of `submit` get the error
                logger.log(level, "polling the log for erasures failed", exc_info=True)
                level = logging.DEBUG  # one warning per outage
                continue
            level = logging.WARNING
            newest_ms = max((head.log_time_ms for head in heads.values()), default=0)
            self._answers.advance(newest_ms)
            self._results.advance(newest_ms)
            if erasures != self._answers.erasures:
                self._answers.erasures = erasures
                self.clear()
