"""The writes of a scope that have no outcome yet, what can be answered to one, and what becomes of it."""

import asyncio
from typing import NamedTuple

from msgspec import Struct

from oncelog.client.ledger.values import Outcome, Refused, Written
from oncelog.core.operations import Operation
from oncelog.errors import LostError, ServerRefusedError


class QueuedWrite(Struct, eq=False):
    """A write without an outcome."""

    number: int
    """Place in the order of the callers. The server does not see it."""
    key: bytes
    operations: tuple[Operation, ...]
    body: bytes
    made_at_ms: int
    sequence: int = 0
    saved_sequence: int = 0
    """Sequence in the file; 0 before the write is saved."""
    sent_sequence: int = 0
    """Sequence under which the write may have been sent, as long as it has that sequence."""
    highest_sequence: int = 0
    """Highest sequence that the write was sent under. A delayed copy of the request may carry it."""
    lowest_unknown: int | None = None
    """Lowest sequence under which the write was sent and not answered. None: every answer is known."""
    was_sent: bool = False
    is_recovered: bool = False
    """An earlier run of the client submitted the write."""
    is_probe: bool = False
    """The server had passed its sequence: the writes behind it wait until it is known whether it was committed."""
    call: "WriteCall | None" = None
    gapped_turn: int = -1
    denied: ServerRefusedError | None = None
    waiter: "asyncio.Future[Outcome | None] | None" = None
    """Callers that wait for the outcome."""
    is_reported: bool = False
    outcome: "Outcome | Exception | None" = None
    """Reported outcome."""

    @property
    def is_certain(self) -> bool:
        """Whether every call was answered. Only a call without an answer can have committed the write unnoticed."""
        return self.lowest_unknown is None

    def mark_unknown(self, sequence: int) -> None:
        """Record that a call under this sequence has no known outcome."""
        self.lowest_unknown = min(sequence, self.lowest_unknown or sequence)

    def lowest_possible(self, sequence: int) -> int:
        """Return the lowest sequence that may turn out to be committed if the client crashes while it has this one."""
        in_flight = self.call.sequence if self.call is not None else sequence
        return min(sequence, in_flight, self.lowest_unknown or sequence)

    def __repr__(self) -> str:
        return f"QueuedWrite({self.number}, {self.key.hex()[:8]}, sequence={self.sequence}, sent={self.sent_sequence})"


class WriteCall(NamedTuple):
    """A write to be sent, as it is now. `last` is what was known to be committed."""

    entry: QueuedWrite
    sequence: int
    last: int


# --- answers -----------------------------------------------------------------------------------------


class ProofFailure(Struct, frozen=True):
    """The server says that the write is committed, but its proof does not verify."""

    error: Exception
    sequence: int


class SequenceGap(Struct, frozen=True):
    """SEQUENCE_GAP."""

    last: int


class SequenceTaken(Struct, frozen=True):
    """Another write has the sequence: SEQUENCE_REUSED, or an answer about another write."""

    last: int


WriteAnswer = Written | Refused | ProofFailure | SequenceGap | SequenceTaken | LostError | ServerRefusedError


# --- outcomes and saves ------------------------------------------------------------------------------


class SettledWrite(NamedTuple):
    """A write and its outcome: an error where it was not looked at, None where the application has let go of it."""

    entry: QueuedWrite
    outcome: Outcome | Exception | None


class SavedEntry(NamedTuple):
    """A pending write as the file stores it."""

    entry: QueuedWrite
    sequence: int
    lowest: int
    """Lowest sequence under which the server may have committed the write."""


class ScopeState(NamedTuple):
    """Sequences of a scope, as the file stores them."""

    last: int = 0
    """Highest sequence that is known to be committed."""
    freed: int = 0
    """Highest sequence of a write that was given up. A delayed copy of that write may still commit under it."""
    highest: int = 0
    """Highest sequence that a write ever had."""


class StoreChanges(NamedTuple):
    """Content of one save: pending writes, writes that got their outcome, and the sequences of the scope."""

    entries: list[SavedEntry]
    settled: list[SettledWrite]
    state: ScopeState

    @property
    def must_be_durable(self) -> bool:
        """Whether it has to survive a loss of power. That one was written may be forgotten: then it is asked again."""
        return bool(self.entries) or any(not isinstance(settled.outcome, Written) for settled in self.settled)


class ForgottenClient(NamedTuple):
    """The server knows less of us than it did."""

    last: int
    server_last: int
