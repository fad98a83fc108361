"""Cache of results of work: a repeated call is answered without the store, on any thread.

A result enters when it is durable. It is given only while it is certainly not forgotten, as with `engine.answer_cache`.
"""

import threading
from collections import OrderedDict
from typing import Final

from msgspec import Struct

from oncelog.core.policy import Forget, Policy
from oncelog.core.values import KeyIdentity, Receipt
from oncelog.storage.clock import Clock

_ENTRY_BYTES: Final = 600
"""What an entry takes beside its body, roughly."""


class WorkResult(Struct, frozen=True):
    """What a piece of work left: the place it got, and what it said."""

    policy: Policy
    receipt: Receipt
    fingerprint: bytes
    body: bytes


class ResultCache:
    """So many bytes at most; the least recently used one goes first. Any thread may ask."""

    def __init__(self, clock: Clock, bytes_max: int, ttl_ms: int) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._ttl_ms = ttl_ms
        self._lock = threading.Lock()
        self._results: OrderedDict[KeyIdentity, WorkResult] = OrderedDict()
        self._bytes = 0
        self._log_time_ms = 0
        self.generation = 0
        """Goes up with every `clear`: what was read before one must not be put after it."""

    def get(self, policy: Policy, identity: KeyIdentity) -> WorkResult | None:
        """What is remembered of an identity, if it is here and certainly not forgotten."""
        with self._lock:
            result = self._results.get(identity)
            if result is None or (result.policy is not policy and result.policy != policy):
                return None  # of another policy under the same name: that is for the log to refuse
            age_ms = max(self._clock.wall_ms(), self._log_time_ms) - result.receipt.log_time_ms
            retention = policy.retention
            if age_ms >= self._ttl_ms or (retention.forget is not Forget.NEVER and age_ms >= retention.ttl_ms):
                self._drop(identity)
                return None
            self._results.move_to_end(identity)
            return result

    def put(self, identity: KeyIdentity, result: WorkResult, generation: int) -> None:
        """Keeps what is durable. `generation` is the one from before it was read or written."""
        size = len(result.body) + _ENTRY_BYTES
        with self._lock:
            self._log_time_ms = max(self._log_time_ms, result.receipt.log_time_ms)
            if generation != self.generation or size > self._bytes_max:
                return
            if identity in self._results:
                self._drop(identity)
            self._results[identity] = result
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._results)))

    def advance(self, log_time_ms: int) -> None:
        """The log's time has come so far: a clock that was set back does not make what is forgotten known again."""
        with self._lock:
            self._log_time_ms = max(self._log_time_ms, log_time_ms)

    def clear(self) -> None:
        """Forgets all of them: something has been erased."""
        with self._lock:
            self._results.clear()
            self._bytes = 0
            self.generation += 1

    def _drop(self, identity: KeyIdentity) -> None:
        self._bytes -= len(self._results.pop(identity).body) + _ENTRY_BYTES
