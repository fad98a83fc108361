"""What the client gives its application: events, outcomes, and how it stands."""

from enum import Enum
from typing import Annotated, Any

from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""As a server's numbers are: others are no server's."""


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


class Rejected(Struct, frozen=True):
    """The outcome of a submission that was refused for good."""

    reason: str
    errors: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join([f"{self.reason}", *(f"{error.field}: {error.message}" for error in self.errors)])


Outcome = Committed | Rejected


class Rejection(Struct, frozen=True):
    """A submission that was rejected, kept until the application has seen to it (`forget_rejected`)."""

    id: str
    partitions: tuple[str, ...]
    event: dict[str, Any]
    outcome: Rejected
    rejected_at_ms: int
    """By the clock of this machine."""


class SetAside(Struct, frozen=True):
    """An event that a handler could not take, kept until it is handed over again."""

    handler: str
    event: Event
    error: str


class ConnectionState(Enum):
    """How the client stands to its server."""

    OFFLINE = "offline"
    """Not connected; it tries again by itself. Submissions are taken, and kept."""
    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    """Connected; what was committed before is on its way."""
    LIVE = "live"
    """Everything there is has arrived, and what comes arrives as it is committed."""
    REFUSED = "refused"
    """The server does not let it in: a token, or a grant. It tries again, more slowly."""
    HISTORY_CHANGED = "history_changed"
    """The server's log is another one than before (a restored backup). It waits for `start_over`."""
    CLOSED = "closed"


class Status(Struct, frozen=True):
    """For a user interface."""

    state: ConnectionState
    pending: int
    """Submissions without an outcome."""
    rejected: int
    """Rejected ones that the application has not seen to."""
    set_aside: int
    """Events that a handler could not take."""
    cursor: int
    """Everything up to this number has been handed over."""
    server_last_committed_id: int
    """The highest number the client has heard of."""
    last_error: str | None = None
    """Why it is not connected, or what the server says of submissions that it does not take for now; else None."""

    @property
    def is_connected(self) -> bool:
        """Whether the server is there."""
        return self.state in (ConnectionState.CATCHING_UP, ConnectionState.LIVE)


class HistoryChange(Struct, frozen=True):
    """The server's log is not the one that this client has followed: a backup was restored, or the log was cut.

    What was handed over up to `cursor` may be gone there, and other events may have its numbers.
    """

    known_epoch: str
    epoch: str
    cursor: int
    server_last_committed_id: int
    message: str


class OutboxEntry(Struct, frozen=True, gc=False):
    """A submission in the outbox."""

    number: int
    """Its place in the outbox: they are sent in this order."""
    id: str
    key: bytes
    partitions: tuple[str, ...]
    body: bytes
    """The event in its canonical form."""
    fingerprint: bytes
    expected_committed_id: int | None = None


class SettledEntry(Struct, frozen=True, gc=False):
    """What became of an entry."""

    entry: OutboxEntry
    outcome: Outcome
