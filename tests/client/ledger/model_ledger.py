"""Model of the ledger server for one client in one scope, and of a store that survives crashes.

The model decides as `core.plan` does: by key first, then by sequence, then by conditions.
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
"""Key of entities whose condition holds at random: other clients change them all the time."""


def operations_of(name: str, *, is_conditional: bool = False) -> tuple[Operation, ...]:
    condition = Condition(Must.EXIST) if is_conditional else None
    return (SetEntity(CONDITIONAL if is_conditional else "entity", name.encode(), None, condition),)


class Asked(NamedTuple):
    """A write on the wire."""

    key: bytes
    sequence: int
    operations: tuple[Operation, ...]


class ModelLedger:
    """The committed writes, and the keys and sequences that the server remembers."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.last = 0
        self.last_key = b""
        self.log: list[Asked] = []
        self._keys: dict[bytes, Asked] = {}
        self._sequences: dict[int, Asked] = {}

    def write(self, asked: Asked) -> WriteAnswer:
        """Return the answer as `Wire` passes it to the protocol."""
        known = self._keys.get(asked.key)
        if known is not None:
            if known.operations != asked.operations:
                return Refused(RefusalCode.IDEMPOTENCY_KEY_REUSED, "reused")
            return Written("tx", known.sequence, is_replay=True)
        if asked.sequence > self.last + 1:
            return SequenceGap(self.last)
        if asked.sequence <= self.last:
            return self._old(asked)
        if self._has_failed(asked):
            return Refused(RefusalCode.KEY_NOT_FOUND, "not found")
        self.last, self.last_key = asked.sequence, asked.key
        self.log.append(asked)
        self._keys[asked.key] = self._sequences[asked.sequence] = asked
        return Written("tx", asked.sequence)

    def _old(self, asked: Asked) -> WriteAnswer:
        known = self._sequences.get(asked.sequence)
        if known is None:
            return Written(None, asked.sequence, is_replay=True)
        if known.operations != asked.operations:
            return SequenceTaken(self.last)
        # The server treats it as a retry of that sequence. `Wire` recognises the other write by its key.
        return SequenceTaken(known.sequence)

    def _has_failed(self, asked: Asked) -> bool:
        operation = asked.operations[0]
        return isinstance(operation, SetEntity) and operation.key == CONDITIONAL and self.chance.random() < 0.5

    def state(self) -> ClientState:
        return ClientState(self.last, 0, self.last_key)

    def forget(self) -> None:
        """Evict the client, as after 24 hours."""
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
