"""Values of the events client: limits, events, outcomes and status."""

from typing import Any

from msgspec import Struct

from oncelog.client.runtime.values import (
    MIB,
    BaseCommitted,
    BaseEntry,
    BaseHistoryChange,
    BaseRefused,
    BaseStatus,
    ConnectionLimits,
    Number,
    Settled,
)
from oncelog.deprecation import alias_property


class ClientLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits and timeouts of an events client."""

    outbox_events_max: int = 100_000
    """Submissions without an outcome. When the outbox is full, `submit` raises LimitExceededError."""
    outbox_bytes_max: int = 256 * MIB
    """Total size of the event bodies in the outbox, which the client also keeps in memory."""
    body_bytes_max: int = MIB
    """Size of an event in canonical form. By default a server accepts frames of up to 4 MiB."""
    hand_over_events_max: int = 1000
    """Events that the client delivers in one transaction."""
    taking_timeout_ms: int = 1000
    """If the client has had no room for further events for this long, it sends the outbox before it requests them."""


class Event(Struct, frozen=True):
    """A committed event of this or another client, as sent on the wire."""

    id: str
    client_id: str
    partitions: tuple[str, ...]
    committed_id: Number
    """Position in the global order of events, the same for every reader."""
    event: dict[str, Any] | None
    """Content of the event, or None if it has been erased."""
    status_updated_at: Number
    """Log time of the commit, in milliseconds since 1970."""
    erased: bool = False
    actor: str = ""
    """Principal that wrote the event (`user:ada`), assigned by the server. Empty if the server does not reveal it."""

    @property
    def type(self) -> str:
        """Type of the event, or an empty string if the event has none or has been erased."""
        return "" if self.event is None else str(self.event.get("type", ""))


class Fault(Struct, frozen=True):
    """One problem with a submission."""

    field: str
    message: str
    current_committed_id: int | None = None
    """Actual committed id, if the submission expected a different one."""


class Committed(BaseCommitted, frozen=True):
    """Outcome of a committed submission, even if it was first sent over an earlier connection."""

    committed_id: int
    status_updated_at: int


class Refused(BaseRefused, frozen=True):
    """Outcome of a refused submission."""

    reason: str
    errors: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join([self.reason, *self._list_faults()])

    def _list_faults(self) -> list[str]:
        return [f"{error.field}: {error.message}" for error in self.errors]

    def _get_code_and_message(self) -> tuple[str, str]:
        return self.reason, "; ".join(self._list_faults()) or "the server gives no details"


Outcome = Committed | Refused


class RefusedEvent(Struct, frozen=True):
    """A refused submission. The client keeps it until the application calls `forget_refused`."""

    id: str
    partitions: tuple[str, ...]
    event: dict[str, Any]
    outcome: Refused
    rejected_at_ms: int
    """Time of the refusal, by this machine's clock."""


class SetAside(Struct, frozen=True):
    """An event for which a handler raised an error. The client keeps it until it is redelivered or forgotten."""

    handler: str
    event: Event
    error: str


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of an events client for a user interface."""

    set_aside: int = 0
    """How many events are set aside."""
    cursor: int = 0
    """All events up to this committed id have been delivered."""
    server_last_committed_id: int = 0
    """Highest committed id that the server has reported."""

    rejected = alias_property("Status.rejected", "refused")


class HistoryChange(BaseHistoryChange, frozen=True):
    """The server's history differs from the one that the client followed, after a restore or a truncation of the log.

    The new history may lack events up to `cursor` that the client has delivered, or contain different ones instead.
    """

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
        """Fingerprint and expected committed id."""
        return self.fingerprint, self.expected_committed_id

    @property
    def size(self) -> int:
        """Size of the body in bytes."""
        return len(self.body)


SettledEntry = Settled[OutboxEntry, Outcome]
