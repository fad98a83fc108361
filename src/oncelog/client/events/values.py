"""Values of the events client: limits, events, outcomes and status."""

from typing import Any

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseEntry, BaseStatus, ConnectionLimits, Number, Settled
from oncelog.deprecation import alias_property


class ClientLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits and times of an events client."""

    outbox_events_max: int = 100_000
    """Submissions without an outcome. If the outbox is full, `submit` raises LimitExceededError."""
    outbox_bytes_max: int = 256 * MIB
    """Size of their bodies, which are also in memory."""
    body_bytes_max: int = MIB
    """Size of an event in canonical form. The default limit of a server is 4 MiB for a frame."""
    hand_over_events_max: int = 1000
    """Events that the client delivers in one transaction."""
    taking_timeout_ms: int = 1000
    """If the client has no room for further events for this time, it sends the outbox before it requests them."""


class Event(Struct, frozen=True):
    """A committed event of this or another client, as it is on the wire."""

    id: str
    client_id: str
    partitions: tuple[str, ...]
    committed_id: Number
    """Place in the order of all events, equal for all readers."""
    event: dict[str, Any] | None
    """None if it has been erased."""
    status_updated_at: Number
    """Log time of the commit, in milliseconds since 1970."""
    erased: bool = False
    actor: str = ""
    """Principal that wrote the event (`user:ada`), assigned by the server. Empty if the server does not show it."""

    @property
    def type(self) -> str:
        """Type of the event; empty if it has been erased."""
        return "" if self.event is None else str(self.event.get("type", ""))


class Fault(Struct, frozen=True):
    """A fault of a submission."""

    field: str
    message: str
    current_committed_id: int | None = None
    """Committed id that the server has instead of the expected one."""


class Committed(Struct, frozen=True):
    """Outcome of a committed submission, also if another connection has sent it first."""

    committed_id: int
    status_updated_at: int


class Refused(Struct, frozen=True):
    """Outcome of a refused submission."""

    reason: str
    errors: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"{self.reason}", *(f"{error.field}: {error.message}" for error in self.errors)])


Outcome = Committed | Refused


class RefusedEvent(Struct, frozen=True):
    """A refused submission. The client keeps it until `forget_refused`."""

    id: str
    partitions: tuple[str, ...]
    event: dict[str, Any]
    outcome: Refused
    rejected_at_ms: int
    """Time of the refusal, by the clock of this machine."""


class SetAside(Struct, frozen=True):
    """An event for which a handler has raised an error. The client keeps it until it is delivered again."""

    handler: str
    event: Event
    error: str


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of an events client for a user interface."""

    set_aside: int = 0
    """Events that are set aside."""
    cursor: int = 0
    """All events up to this committed id are delivered."""
    server_last_committed_id: int = 0
    """Highest committed id that the server has reported."""

    rejected = alias_property("Status.rejected", "refused")


class HistoryChange(Struct, frozen=True):
    """The server has another history than the client has followed: a backup was restored, or the log was cut.

    The history may lack events up to `cursor` that the client has delivered, and other events may have their ids.
    """

    known_epoch: str
    epoch: str
    cursor: int
    server_last_committed_id: int
    message: str


class OutboxEntry(BaseEntry, frozen=True, gc=False):
    """A submission in the outbox."""

    id: str
    partitions: tuple[str, ...]
    body: bytes
    """Event in canonical form."""
    fingerprint: bytes
    expected_committed_id: int | None = None

    def __str__(self) -> str:
        return f"event {self.id}"

    @property
    def identity(self) -> str:
        """The id of the event."""
        return self.id

    @property
    def equality_key(self) -> tuple[bytes, int | None]:
        """Fingerprint and expectation."""
        return self.fingerprint, self.expected_committed_id

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body)


SettledEntry = Settled[OutboxEntry, Outcome]
