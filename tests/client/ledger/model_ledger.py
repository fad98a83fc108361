"""Models of the ledger server, for one client in one scope, and of a store that survives crashes.

The server model decides in the order of `core.plan`: by key, then by sequence, then by conditions.
"""

from random import Random
from typing import NamedTuple

from oncelog.client.ledger.entries import (
    QueuedWrite,
    ScopeState,
    SequenceGap,
    SequenceTaken,
    StoreChanges,
    WriteAnswer,
)
from oncelog.client.ledger.values import ClientState, RefusalCode, Refused, Written
from oncelog.core.operations import Condition, Must, Operation, SetEntity

CONDITIONAL = "conditional"
"""Key of an entity whose condition holds or fails at random, as if other clients changed the entity."""


def operations_of(name: str, *, is_conditional: bool = False) -> tuple[Operation, ...]:
    condition = Condition(Must.EXIST) if is_conditional else None
    return (SetEntity(CONDITIONAL if is_conditional else "entity", name.encode(), None, condition),)


class SentWrite(NamedTuple):
    """A write that the client has sent."""

    key: bytes
    sequence: int
    operations: tuple[Operation, ...]


class ModelLedger:
    """Committed writes, and the keys and sequences that the server remembers."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.last = 0
        self.last_key = b""
        self.log: list[SentWrite] = []
        self._keys: dict[bytes, SentWrite] = {}
        self._sequences: dict[int, SentWrite] = {}

    def write(self, write: SentWrite) -> WriteAnswer:
        """Return the answer in the form that the transport passes to the protocol."""
        known = self._keys.get(write.key)
        if known is not None:
            if known.operations != write.operations:
                return Refused(RefusalCode.IDEMPOTENCY_KEY_REUSED, "reused")
            return Written("tx", known.sequence, is_replay=True)
        if write.sequence > self.last + 1:
            return SequenceGap(self.last)
        if write.sequence <= self.last:
            return self._answer_known_sequence(write)
        if self._fails_condition(write):
            return Refused(RefusalCode.KEY_NOT_FOUND, "not found")
        self.last, self.last_key = write.sequence, write.key
        self.log.append(write)
        self._keys[write.key] = self._sequences[write.sequence] = write
        return Written("tx", write.sequence)

    def _answer_known_sequence(self, write: SentWrite) -> WriteAnswer:
        known = self._sequences.get(write.sequence)
        if known is None:
            return Written(None, write.sequence, is_replay=True)
        if known.operations != write.operations:
            return SequenceTaken(self.last)
        # The server treats the write as a retry of that sequence. The transport detects the different key.
        return SequenceTaken(known.sequence)

    def _fails_condition(self, write: SentWrite) -> bool:
        operation = write.operations[0]
        return isinstance(operation, SetEntity) and operation.key == CONDITIONAL and self.chance.random() < 0.5

    def state(self) -> ClientState:
        return ClientState(self.last, 0, self.last_key)

    def forget(self) -> None:
        """Evict the client, as the server does after 24 hours."""
        self.last, self.last_key = 0, b""
        self._keys.clear()
        self._sequences.clear()


class ModelFile:
    """Content of a store on disk."""

    def __init__(self) -> None:
        self.state = ScopeState()
        self.rows: dict[int, tuple[bytes, int, int, tuple[Operation, ...], bytes, int]] = {}

    def save(self, changes: StoreChanges) -> None:
        for entry, sequence, lowest in changes.entries:
            self.rows[entry.number] = (entry.key, sequence, lowest, entry.operations, entry.body, entry.made_at_ms)
        for settled in changes.settled:
            self.rows.pop(settled.entry.number, None)
        self.state = changes.state

    def entries(self) -> list[QueuedWrite]:
        found = []
        for number, (key, sequence, lowest, operations, body, made_at_ms) in sorted(self.rows.items()):
            entry = QueuedWrite(number, key, operations, body, made_at_ms)
            entry.sequence = sequence
            entry.mark_unknown(lowest)
            found.append(entry)
        return found
