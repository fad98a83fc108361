"""Values that a client takes from its application and gives to it: limits, events, outcomes, and its status."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from oncelog.client.runtime.values import MIB, BaseEntry, BaseStatus, ConnectionLimits, Settled
from oncelog.deprecation import alias_property

Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""As a server's numbers are: others are no server's."""


class ClientLimits(ConnectionLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_events_max: int = 100_000
    """Submissions without an outcome. Beyond it `submit` raises LimitExceededError."""
    outbox_bytes_max: int = 256 * MIB
    """Of all of them together; they are kept in memory too."""
    body_bytes_max: int = MIB
    """Of one event in its canonical form. The default limit of a server is 4 MiB for a frame."""
    hand_over_events_max: int = 1000
    """Events that are handed over in one transaction."""
    taking_timeout_ms: int = 1000
    """If handlers and loops leave no room for further events for this time, the outbox is sent before they are."""


class Event(Struct, frozen=True):
    """A committed event, own or foreign, as it is on the wire."""

    id: str
    client_id: str
    partitions: tuple[str, ...]
    committed_id: Number
    """Its place in the one order, the same for every reader."""
    event: dict[str, Any] | None
    """None if it has been erased."""
    status_updated_at: Number
    """When it was committed, in milliseconds since 1970, by the log's time."""
    erased: bool = False
    actor: str = ""
    """The principal that wrote it, assigned by the server (`user:ada`). Empty if the server does not show it."""

    @property
    def type(self) -> str:
        """Of the event; empty if it has been erased."""
        return "" if self.event is None else str(self.event.get("type", ""))


class Fault(Struct, frozen=True):
    """What is wrong with a submission."""

    field: str
    message: str
    current_committed_id: int | None = None
    """Where another one was expected."""


class Committed(Struct, frozen=True):
    """The outcome of a submission that has its place in the order, whoever sent it first."""

    committed_id: int
    status_updated_at: int


class Refused(Struct, frozen=True):
    """The outcome of a submission that was refused for good."""

    reason: str
    errors: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"{self.reason}", *(f"{error.field}: {error.message}" for error in self.errors)])


Outcome = Committed | Refused


class RefusedEvent(Struct, frozen=True):
    """A refused submission, kept until the application has seen to it (`forget_refused`)."""

    id: str
    partitions: tuple[str, ...]
    event: dict[str, Any]
    outcome: Refused
    rejected_at_ms: int
    """By the clock of this machine."""


class SetAside(Struct, frozen=True):
    """An event that a handler could not take, kept until it is handed over again."""

    handler: str
    event: Event
    error: str


class Status(BaseStatus, frozen=True, kw_only=True):
    """For a user interface."""

    set_aside: int = 0
    """Events that a handler could not take."""
    cursor: int = 0
    """Everything up to this number has been handed over."""
    server_last_committed_id: int = 0
    """The highest number the client has heard of."""

    rejected = alias_property("Status.rejected", "refused")


class HistoryChange(Struct, frozen=True):
    """The server's log is not the one that this client has followed: a backup was restored, or the log was cut.

    What was handed over up to `cursor` may be gone there, and other events may have its numbers.
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
    """The event in its canonical form."""
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
