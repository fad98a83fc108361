"""Values of the chat client: limits, messages, outcomes, updates and status."""

from enum import Enum
from typing import ClassVar, Final

from msgspec import Struct

from oncelog.client.runtime.values import MIB, BaseEntry, BaseStatus, ConnectionLimits, Number, Settled

EXPIRED: Final = "EXPIRED"
"""Code of the client for a message that was in the outbox for longer than a server remembers ids."""
TEXT_PLAIN: Final = "text/plain"
PAGE_MESSAGES_MAX: Final = 500
_DAY_MS: Final = 86_400_000


class ChatLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits and times of a chat client."""

    _server_maximums: ClassVar = {"page_messages": PAGE_MESSAGES_MAX}

    outbox_messages_max: int = 10_000
    """Messages without an outcome. If the outbox is full, `send` raises LimitExceededError."""
    content_bytes_max: int = 4096
    """Size of the content of one message. The default limit of a server is the same."""
    in_flight_max: int = 1
    """Messages of one chat that are sent before the first of them is answered. With more than one, own messages may
    change their order when the server refuses one of them temporarily."""
    remembered_ms: int = 7 * _DAY_MS - 3_600_000
    """Age from which the client does not send a message of the outbox: a server forgets ids after seven days."""
    page_messages: int = 100
    """Messages of one page of a sync."""
    syncs_max: int = 8
    """Chats that the client syncs at a time."""
    ahead_max: int = 1000
    """Messages of one chat that the client stores while an earlier one is missing. A sync brings further ones again."""
    gap_wait_ms: int = 100
    """Time that a missing message may be late before the client syncs the chat."""
    ack_wait_ms: int = 50
    """Time for which the client collects acknowledgements before it sends them."""
    check_ms: int = 60_000
    """Interval at which a live client compares its state with the list of chats of the server."""
    updates_max: int = 10_000
    """Updates that wait for one reader of `updates`. With more, the reader gets UpdatesLostError."""
    frames_max: int = 1000
    """Messages that wait to be saved. With more, the client stops reading, and the server may close the connection."""
    message_bytes_max: int = 16 * MIB
    """Largest answer or frame of the server."""
    close_timeout_ms: int = 1000
    """Time for which `close` tries to send the last acknowledgements."""


class Message(Struct, frozen=True):
    """A committed message, as it is on the wire."""

    message_id: str
    chat_id: str
    sequence: Number
    """Place in the chat, equal for all readers."""
    sender_id: str
    client_message_id: str
    content: str | None
    """None if the message has been erased."""
    created_at: str
    """Log time of the commit: ISO 8601, UTC, milliseconds."""
    content_type: str | None = TEXT_PLAIN
    """None if the message has been erased."""


class Sent(Struct, frozen=True):
    """Outcome of a committed message, also if an earlier attempt has committed it."""

    message_id: str
    sequence: int
    created_at: str
    duplicate: bool = False
    """An earlier attempt had committed it."""
    content_mismatch: bool = False
    """The chat has another message under the same id, and keeps it: an id must not be used twice."""


class Refused(Struct, frozen=True):
    """Outcome of a message that the client does not send again, because of the server or its age (`EXPIRED`)."""

    code: str
    message: str
    was_tried: bool = False
    """An earlier attempt had no answer, so the message may be in the chat."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


Outcome = Sent | Refused


class OutboxMessage(BaseEntry, frozen=True, gc=False):
    """A message in the outbox. The client sends the messages of a chat in the order of their numbers."""

    client_message_id: str
    chat_id: str
    content: str
    content_type: str
    accepted_at_ms: int
    """By the clock of this machine."""

    def __str__(self) -> str:
        return f"message {self.client_message_id}"

    @property
    def identity(self) -> tuple[str, str]:
        """Return chat and id."""
        return self.chat_id, self.client_message_id

    @property
    def equality_key(self) -> tuple[str, str]:
        """Return content and media type."""
        return self.content, self.content_type


SettledMessage = Settled[OutboxMessage, Outcome]


class RefusedMessage(Struct, frozen=True):
    """A refused message. The client keeps it until `send_again` or `forget_refused`."""

    client_message_id: str
    chat_id: str
    content: str
    content_type: str
    accepted_at_ms: int
    outcome: Refused


def to_refused_message(entry: OutboxMessage, outcome: Refused) -> RefusedMessage:
    """Return a refused message of the outbox, as the application sees it."""
    return RefusedMessage(
        entry.client_message_id, entry.chat_id, entry.content, entry.content_type, entry.accepted_at_ms, outcome
    )


class Mark(Enum):
    """State of a message in a user interface."""

    PENDING = "pending"
    """Own message without an outcome."""
    SENT = "sent"
    """Committed."""
    DELIVERED = "delivered"
    """Own message that all other members have acknowledged."""
    REFUSED = "refused"
    """Own message that was refused."""


class Line(Struct, frozen=True):
    """A message in a user interface, also an own message that is not committed yet."""

    client_message_id: str
    sender_id: str
    content: str | None
    content_type: str | None
    mark: Mark
    message: Message | None = None
    """None before the commit."""
    refusal: Refused | None = None


class ChatSummary(Struct, frozen=True):
    """State of a chat in the client."""

    chat_id: str
    is_member: bool
    last_sequence: int
    """Highest sequence that the server has mentioned."""
    complete_to: int
    """All messages up to this sequence have arrived."""
    received_to: int
    """The application has received all messages up to this sequence."""
    pending: int
    """Own messages in the outbox."""
    role: str | None = None
    """Role of the user, `OWNER` or `MEMBER`. None before the server lists the chat, and from a server without roles."""


OWNER: Final = "owner"
"""Role of a member that may add and remove members and name owners."""
MEMBER: Final = "member"


class Member(Struct, frozen=True):
    """A member of a chat."""

    user_id: str
    last_acked_sequence: Number = 0
    role: str | None = None
    """`OWNER` or `MEMBER`; None from a server without roles."""


class ChatDetails(Struct, frozen=True):
    """State of a chat on the server."""

    chat_id: str
    last_sequence: Number
    members: tuple[Member, ...]


class ListedChat(Struct, frozen=True):
    """A chat of the user in the list of the server."""

    chat_id: str
    last_sequence: Number
    last_acked_sequence: Number = 0
    role: str | None = None


# --- updates


class Arrived(Struct, frozen=True):
    """Messages up to `sequence` have arrived."""

    chat_id: str
    sequence: int


class Progress(Struct, frozen=True):
    """An own message has its outcome."""

    chat_id: str
    client_message_id: str
    outcome: Outcome


class Delivery(Struct, frozen=True):
    """A member has acknowledged all messages up to a sequence."""

    chat_id: str
    user_id: str
    last_acked_sequence: int


class Membership(Struct, frozen=True):
    """A member was added to a chat, left it or got another role.

    Updates about the user of the client report new chats.
    """

    chat_id: str
    user_id: str
    present: bool
    role: str | None = None
    """New role. None for a member that has left, and from a server without roles."""


class HistoryChange(Struct, frozen=True):
    """The server has another history, for example after a restore. The client has removed the messages of the old one.

    It loads all chats again from their first message, or only the chat `chat_id` if that is not None.
    """

    known_epoch: str
    epoch: str
    chat_id: str | None = None


Update = Arrived | Progress | Delivery | Membership | HistoryChange


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of a chat client for a user interface."""

    user_id: str = ""
    """User id that the server has reported; empty before the first connection."""
    epoch: str = ""
    history_change: HistoryChange | None = None
    """Last change since the client was opened."""
