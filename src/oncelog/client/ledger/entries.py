"""The writes of a scope that have no outcome yet, what can be answered to one, and what becomes of it."""

from typing import NamedTuple

from msgspec import Struct

from oncelog.client.ledger.values import Outcome, Refused, Written
from oncelog.core.operations import Operation
from oncelog.errors import ServerRefusedError


class QueuedWrite:
    """A write without an outcome."""

    __slots__ = (
        "body",
        "call",
        "denied",
        "gapped_turn",
        "highest_sequence",
        "is_probe",
        "is_recovered",
        "key",
        "lowest_unknown",
        "made_at_ms",
        "number",
        "operations",
        "saved_sequence",
        "sent_sequence",
        "sequence",
        "was_sent",
    )

    def __init__(
        self, number: int, key: bytes, operations: tuple[Operation, ...], body: bytes, made_at_ms: int
    ) -> None:
        self.number = number
        """Its place in the callers' order. Nobody else sees it."""
        self.key = key
        self.operations = operations
        self.body = body
        self.made_at_ms = made_at_ms
        self.sequence = 0
        self.saved_sequence = 0
        """What the file has; 0 before it is there."""
        self.sent_sequence = 0
        """Its number, if it may have been sent under it."""
        self.highest_sequence = 0
        """Highest sequence that the write was sent under. A delayed copy of the request may carry it."""
        self.lowest_unknown: int | None = None
        """Lowest sequence under which the write was sent and not answered. None: every answer is known."""
        self.was_sent = False
        self.is_recovered = False
        self.is_probe = False
        """Its number had been passed when the server was asked: who stands behind it waits until it is known."""
        self.call: WriteCall | None = None
        self.gapped_turn = -1
        self.denied: ServerRefusedError | None = None

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
        return f"Entry({self.number}, {self.key.hex()[:8]}, sequence={self.sequence}, sent={self.sent_sequence})"


class WriteCall(NamedTuple):
    """A write to be sent, as it is now. `last` is what was known to be committed."""

    entry: QueuedWrite
    sequence: int
    last: int


# --- answers -----------------------------------------------------------------------------------------


class CommittedWrite(Struct, frozen=True):
    """It is in the ledger, under its own key."""

    written: Written


class ProofFailure(Struct, frozen=True):
    """The server says so, but what it says does not verify."""

    error: Exception
    sequence: int


class WriteRefusal(Struct, frozen=True):
    """Nothing was written."""

    refused: Refused


class SequenceGap(Struct, frozen=True):
    """SEQUENCE_GAP."""

    last: int


class SequenceTaken(Struct, frozen=True):
    """Another write has the number: SEQUENCE_REUSED, or an answer that is not about ours."""

    last: int


class NoReply(Struct, frozen=True):
    """No answer, or none that says what became of it."""

    reason: str = ""
    retry_after_ms: int = 0


class AccessDenial(Struct, frozen=True):
    """The server did not look at it, and says why."""

    error: ServerRefusedError


WriteAnswer = CommittedWrite | ProofFailure | WriteRefusal | SequenceGap | SequenceTaken | NoReply | AccessDenial


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
