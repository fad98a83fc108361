"""Values of the write protocol: pending writes, the possible answers to a call, and the content of a save."""

from typing import NamedTuple
from uuid import UUID

from msgspec import Struct

from oncelog.client.ledger.values import Outcome, Refused, Written
from oncelog.client.runtime.values import BaseEntry, Settled
from oncelog.core.operations import Operation
from oncelog.errors import LostError, ServerRefusedError


class QueuedWrite(BaseEntry, frozen=False, eq=False, gc=True):  # type: ignore[misc] # msgspec allows it
    """A write without an outcome. The server does not see its number."""

    key: bytes
    operations: tuple[Operation, ...]
    body: bytes
    made_at_ms: int
    sequence: int = 0
    saved_sequence: int = 0
    """Sequence in the file, or 0 until the write is saved."""
    sent_sequence: int = 0
    """Equal to `sequence` if the write may have been sent under its current sequence."""
    highest_sequence: int = 0
    """Highest sequence under which the write was sent, or 0. A delayed copy of the request may carry it."""
    lowest_unknown: int | None = None
    """Lowest sequence under which the write was sent without an answer, or None if every call was answered."""
    is_probe: bool = False
    """Whether the server has already used the write's sequence. Writes behind it wait until its outcome is known."""
    call: "WriteCall | None" = None
    gapped_turn: int = -1
    denied: ServerRefusedError | None = None
    is_reported: bool = False
    outcome: "Outcome | Exception | None" = None
    """The outcome that was reported."""

    def __str__(self) -> str:
        return str(UUID(bytes=self.key))

    @property
    def identity(self) -> bytes:
        """The idempotency key of the write."""
        return self.key

    @property
    def equality_key(self) -> bytes:
        """The encoded operations."""
        return self.body

    @property
    def size(self) -> int:
        """Size of the operations in bytes."""
        return len(self.body)

    @property
    def is_certain(self) -> bool:
        """Whether every call was answered. Only an unanswered call can have committed a write that is still pending."""
        return self.lowest_unknown is None

    def mark_unknown(self, sequence: int) -> None:
        """Record that the outcome of a call under this sequence is unknown."""
        self.lowest_unknown = min(sequence, self.lowest_unknown or sequence)

    def lowest_possible(self, sequence: int) -> int:
        """Return the lowest sequence under which the server may have committed the write if the client crashes now."""
        in_flight = self.call.sequence if self.call is not None else sequence
        return min(sequence, in_flight, self.lowest_unknown or sequence)

    def __repr__(self) -> str:
        return f"QueuedWrite({self.number}, {self.key.hex()[:8]}, sequence={self.sequence}, sent={self.sent_sequence})"


class WriteCall(NamedTuple):
    """A call that sends a write under a sequence. `last` is the highest sequence known to be committed at that time."""

    entry: QueuedWrite
    sequence: int
    last: int


# --- answers -----------------------------------------------------------------------------------------


class ProofFailure(Struct, frozen=True):
    """The server reports the write as committed, but its proof does not verify."""

    error: Exception
    sequence: int


class SequenceGap(Struct, frozen=True):
    """The server answered SEQUENCE_GAP."""

    last: int


class SequenceTaken(Struct, frozen=True):
    """A different write has the sequence: the server answered SEQUENCE_REUSED or returned that write."""

    last: int


WriteAnswer = Written | Refused | ProofFailure | SequenceGap | SequenceTaken | LostError | ServerRefusedError


# --- outcomes and saves ------------------------------------------------------------------------------


SettledWrite = Settled[QueuedWrite, Outcome | Exception | None]
"""A write and its outcome: an error if the server refused to process it, or None if the application withdrew it."""


class SavedEntry(NamedTuple):
    """A pending write as the file stores it."""

    entry: QueuedWrite
    sequence: int
    lowest: int
    """Lowest sequence under which the server may have committed the write."""


class ScopeState(NamedTuple):
    """Sequences of a scope, as the file stores them."""

    last: int = 0
    """Highest sequence known to be committed."""
    freed: int = 0
    """Highest sequence of a refused or withdrawn write. A delayed copy of that write may still commit under it."""
    highest: int = 0
    """Highest sequence that the client has ever given a write."""


class StoreChanges(NamedTuple):
    """Content of one save: pending writes, writes with an outcome, and the sequences of the scope."""

    entries: list[SavedEntry]
    settled: list[SettledWrite]
    state: ScopeState

    @property
    def must_be_durable(self) -> bool:
        """Whether the save must survive a power failure.

        Losing a `Written` is harmless, because the client then resends the write.
        """
        return bool(self.entries) or any(not isinstance(settled.outcome, Written) for settled in self.settled)


class ForgottenClient(NamedTuple):
    """The server reports a lower sequence for this client than before: `server_last` instead of `last`."""

    last: int
    server_last: int
