"""Values of the chat client: limits, messages, outcomes, updates and status."""

from enum import Enum
from typing import ClassVar, Final

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

EXPIRED: Final = "EXPIRED"
"""Client-side refusal code for a message that was in the outbox for longer than a server remembers ids."""
TEXT_PLAIN: Final = "text/plain"
PAGE_MESSAGES_MAX: Final = 500
_DAY_MS: Final = 86_400_000


class ChatLimits(ConnectionLimits, frozen=True, kw_only=True):
    """Limits and timeouts of a chat client."""

    _server_maximums: ClassVar = {"page_messages": PAGE_MESSAGES_MAX}

    outbox_messages_max: int = 10_000
    """Messages without an outcome. When the outbox is full, `send` raises LimitExceededError."""
    content_bytes_max: int = 4096
    """Size of one message's content. The server's default limit is the same."""
    in_flight_max: int = 1
    """Unanswered messages that the client may send per chat. If this is above 1, the server may commit the user's
    messages in a different order after it temporarily refuses one."""
    remembered_ms: int = 7 * _DAY_MS - 3_600_000
    """The client does not send outbox messages older than this, because a server forgets ids after seven days."""
    page_messages: int = 100
    """Messages per page of a sync."""
    syncs_max: int = 8
    """Chats that the client syncs at the same time."""
    ahead_max: int = 1000
    """Messages of one chat that the client stores while an earlier one is missing. It drops further ones,
    and the next sync fetches them again."""
    gap_wait_ms: int = 100
    """How long the client waits for a missing message before it syncs the chat."""
    ack_wait_ms: int = 50
    """How long the client collects acknowledgements before it sends them."""
    check_ms: int = 60_000
    """Interval at which a live client compares its state with the server's list of chats."""
    updates_max: int = 10_000
    """Updates queued for one reader of `updates`. If there are more, the reader gets UpdatesLostError."""
    frames_max: int = 1000
    """Messages waiting to be saved. Above this the client stops reading, and the server may close the connection."""
    message_bytes_max: int = 16 * MIB
    """Largest answer or frame that the client accepts from the server."""
    close_timeout_ms: int = 1000
    """How long `close` tries to send the last acknowledgements."""


class Message(Struct, frozen=True):
    """A committed message, as sent on the wire."""

    message_id: str
    chat_id: str
    sequence: Number
    """Position in the chat, the same for every reader."""
    sender_id: str
    client_message_id: str
    content: str | None
    """None if the message has been erased."""
    created_at: str
    """Log time of the commit, in ISO 8601 format, UTC, with milliseconds."""
    content_type: str | None = TEXT_PLAIN
    """None if the message has been erased."""


class Sent(BaseCommitted, frozen=True):
    """Outcome of a message that the server committed, now or on an earlier attempt."""

    message_id: str
    sequence: int
    created_at: str
    duplicate: bool = False
    """Whether an earlier attempt had committed the message."""
    content_mismatch: bool = False
    """Whether the chat already had a different message with this id and kept it. An id must not be used twice."""


class Refused(BaseRefused, frozen=True):
    """Outcome of a message that the client will not retry: the server refused it, or it is too old (`EXPIRED`)."""

    code: str
    message: str
    was_tried: bool = False
    """Whether an earlier attempt got no answer. If so, the message may be in the chat."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def _get_code_and_message(self) -> tuple[str, str]:
        return self.code, self.message


Outcome = Sent | Refused


class OutboxMessage(BaseEntry, frozen=True, gc=False):
    """A message in the outbox. The client sends the messages of a chat in order of their numbers."""

    client_message_id: str
    chat_id: str
    content: str
    content_type: str
    accepted_at_ms: int
    """Time of acceptance, by this machine's clock."""

    def __str__(self) -> str:
        return f"message {self.client_message_id}"

    @property
    def identity(self) -> tuple[str, str]:
        """Chat and message id."""
        return self.chat_id, self.client_message_id

    @property
    def equality_key(self) -> tuple[str, str]:
        """Content and media type."""
        return self.content, self.content_type


SettledMessage = Settled[OutboxMessage, Outcome]


class RefusedMessage(Struct, frozen=True):
    """A refused message. The client keeps it until the application calls `send_again` or `forget_refused`."""

    client_message_id: str
    chat_id: str
    content: str
    content_type: str
    accepted_at_ms: int
    outcome: Refused


def to_refused_message(entry: OutboxMessage, outcome: Refused) -> RefusedMessage:
    """Convert an outbox message and its refusal to the value that the application sees."""
    return RefusedMessage(
        entry.client_message_id, entry.chat_id, entry.content, entry.content_type, entry.accepted_at_ms, outcome
    )


class Mark(Enum):
    """State of a message in a user interface."""

    PENDING = "pending"
    """The user's message has no outcome yet."""
    SENT = "sent"
    """The message is committed."""
    DELIVERED = "delivered"
    """All other members have acknowledged the user's message."""
    REFUSED = "refused"
    """The user's message was refused."""


class Line(Struct, frozen=True):
    """A message in a user interface, either committed or sent by the user and not committed yet."""

    client_message_id: str
    sender_id: str
    content: str | None
    content_type: str | None
    mark: Mark
    message: Message | None = None
    """The committed message, or None before the commit."""
    refusal: Refused | None = None


class ChatSummary(Struct, frozen=True):
    """The client's view of a chat."""

    chat_id: str
    is_member: bool
    last_sequence: int
    """Highest sequence that the server has reported."""
    complete_to: int
    """All messages up to this sequence have arrived."""
    received_to: int
    """The application has received all messages up to this sequence."""
    pending: int
    """Number of messages in the outbox."""
    role: str | None = None
    """The user's role, `OWNER` or `MEMBER`. None until the server lists the chat, or if the server has no roles."""


OWNER: Final = "owner"
"""Role of a member that may add members, remove members and set their roles."""
MEMBER: Final = "member"


class Member(Struct, frozen=True):
    """A member of a chat."""

    user_id: str
    last_acked_sequence: Number = 0
    role: str | None = None
    """`OWNER` or `MEMBER`, or None if the server has no roles."""


class ChatDetails(Struct, frozen=True):
    """State of a chat on the server."""

    chat_id: str
    last_sequence: Number
    members: tuple[Member, ...]


class ListedChat(Struct, frozen=True):
    """A chat in the server's list of the user's chats."""

    chat_id: str
    last_sequence: Number
    last_acked_sequence: Number = 0
    role: str | None = None


# --- updates


class Arrived(Struct, frozen=True):
    """All messages up to `sequence` have arrived."""

    chat_id: str
    sequence: int


class Progress(Struct, frozen=True):
    """The outcome of one of the user's messages is known."""

    chat_id: str
    client_message_id: str
    outcome: Outcome


class Delivery(Struct, frozen=True):
    """A member has acknowledged all messages up to a sequence."""

    chat_id: str
    user_id: str
    last_acked_sequence: int


class Membership(Struct, frozen=True):
    """A member was added to a chat, left it, or was given a different role.

    When the client's own user is added to a chat, this update is the first that names the chat.
    """

    chat_id: str
    user_id: str
    present: bool
    role: str | None = None
    """New role. None for a member that has left, or if the server has no roles."""


class HistoryChange(BaseHistoryChange, frozen=True):
    """The server has a different history, for example after a restore. The client has removed the old messages.

    It reloads all chats from their first message, or only one chat if `chat_id` is not None.
    """

    chat_id: str | None = None


Update = Arrived | Progress | Delivery | Membership | HistoryChange


class Status(BaseStatus, frozen=True, kw_only=True):
    """Status of a chat client for a user interface."""

    user_id: str = ""
    """User id that the server has reported. Empty before the first connection."""
    epoch: str = ""
    history_change: HistoryChange | None = None
    """Most recent history change since the client was opened."""
