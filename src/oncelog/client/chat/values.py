"""Values that a chat client takes from its application and gives to it: limits, messages, outcomes, and its status."""

from enum import Enum
from typing import Final

from msgspec import Struct

from oncelog.client.events.values import Number
from oncelog.client.runtime.values import MIB, BaseEntry, BaseStatus, ConnectionLimits, Settled, check_at_most

EXPIRED: Final = "EXPIRED"
"""The code of a message that lay in the outbox for longer than a server remembers ids. No server has said so."""
TEXT_PLAIN: Final = "text/plain"
PAGE_MESSAGES_MAX: Final = 500
_DAY_MS: Final = 86_400_000


class ChatLimits(ConnectionLimits, frozen=True, kw_only=True):
    """What a client holds at most, and how long it waits."""

    outbox_messages_max: int = 10_000
    """Messages without an outcome. Beyond it `send` raises LimitExceededError, and nothing is taken."""
    content_bytes_max: int = 4096
    """Of one message. The default limit of a server is the same."""
    in_flight_max: int = 1
    """Messages of one chat that are under way at a time. With more than one, one's own messages may change their order
    where the server sends one of them away for a while."""
    remembered_ms: int = 7 * _DAY_MS - 3_600_000
    """Age from which a message in the outbox is not sent: a server forgets ids after seven days."""
    page_messages: int = 100
    """Messages that are asked for at a time."""
    syncs_max: int = 8
    """Chats that are caught up with at a time."""
    ahead_max: int = 1000
    """Messages of one chat that are kept while those before them are missing. More come again with the sync."""
    gap_wait_ms: int = 100
    """How late a missing message may be before a sync requests it."""
    ack_wait_ms: int = 50
    """How long acknowledgements gather before they are sent."""
    check_ms: int = 60_000
    """How often a live client asks whether it has heard of everything."""
    updates_max: int = 10_000
    """Updates that wait for one reader of `updates`. Beyond it the reader gets UpdatesLostError."""
    frames_max: int = 1000
    """Frames that wait to be kept. Beyond it no more are read, and the server may close the connection."""
    message_bytes_max: int = 16 * MIB
    """Of one answer or frame of the server."""
    close_timeout_ms: int = 1000
    """How long `close` tries to have the last acknowledgements sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most(self, "page_messages", PAGE_MESSAGES_MAX)


class Message(Struct, frozen=True):
    """A message that has its place in its chat, as it is on the wire."""

    message_id: str
    chat_id: str
    sequence: Number
    """Its place in the chat, the same for every reader."""
    sender_id: str
    client_message_id: str
    content: str | None
    """None if it has been erased."""
    created_at: str
    """When it was committed, by the log's time: ISO 8601, UTC, milliseconds."""
    content_type: str | None = TEXT_PLAIN
    """None if it has been erased."""


class Sent(Struct, frozen=True):
    """The outcome of a message that has its place in the chat, whichever attempt brought it there."""

    message_id: str
    sequence: int
    created_at: str
    duplicate: bool = False
    """An earlier attempt had brought it there."""
    content_mismatch: bool = False
    """Another message is there under the same id, and stays as it is: ids must not be used twice."""


class Refused(Struct, frozen=True):
    """The outcome of a message that is not sent again: the server says no, or it has become too old (`EXPIRED`)."""

    code: str
    message: str
    was_tried: bool = False
    """An earlier attempt had no answer, so it may be in the chat all the same."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


Outcome = Sent | Refused


class OutboxMessage(BaseEntry, frozen=True, gc=False):
    """A message in the outbox. Those of one chat are sent in the order of their numbers."""

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
        """Chat and id."""
        return self.chat_id, self.client_message_id

    @property
    def equality_key(self) -> tuple[str, str]:
        """What two submissions of one message must have in common."""
        return self.content, self.content_type


SettledMessage = Settled[OutboxMessage, Outcome]


class RefusedMessage(Struct, frozen=True):
    """A message that was refused, kept until the application has seen to it (`send_again`, `forget_refused`)."""

    client_message_id: str
    chat_id: str
    content: str
    content_type: str
    accepted_at_ms: int
    outcome: Refused


def to_refused_message(entry: OutboxMessage, outcome: Refused) -> RefusedMessage:
    """Return a refused entry of the outbox, as the application sees it."""
    return RefusedMessage(
        entry.client_message_id, entry.chat_id, entry.content, entry.content_type, entry.accepted_at_ms, outcome
    )


class Mark(Enum):
    """What is known about a message, as a user interface marks it."""

    PENDING = "pending"
    """Own, and on its way."""
    SENT = "sent"
    """It has its place in the chat."""
    DELIVERED = "delivered"
    """Own, and every other member has acknowledged it."""
    REFUSED = "refused"
    """Own, and not sent."""


class Line(Struct, frozen=True):
    """A message as it is to be shown: others' and own ones, also those that have no place yet."""

    client_message_id: str
    sender_id: str
    content: str | None
    content_type: str | None
    mark: Mark
    message: Message | None = None
    """None before it has its place."""
    refusal: Refused | None = None


class ChatSummary(Struct, frozen=True):
    """A chat as it is here."""

    chat_id: str
    is_member: bool
    last_sequence: int
    """The highest number that we have heard of."""
    complete_to: int
    """Everything up to here has arrived."""
    received_to: int
    """The application has received everything up to here."""
    pending: int
    """Own messages in the outbox."""
    role: str | None = None
    """Own role, `OWNER` or `MEMBER`. None until the server has listed the chat, and from a server without roles."""


OWNER: Final = "owner"
"""Role of a member that adds and removes members and names owners."""
MEMBER: Final = "member"


class Member(Struct, frozen=True):
    """A member of a chat."""

    user_id: str
    last_acked_sequence: Number = 0
    role: str | None = None
    """`OWNER` or `MEMBER`; None from a server without roles."""


class ChatDetails(Struct, frozen=True):
    """A chat as the server has it."""

    chat_id: str
    last_sequence: Number
    members: tuple[Member, ...]


class ListedChat(Struct, frozen=True):
    """One of our chats, as the server lists it."""

    chat_id: str
    last_sequence: Number
    last_acked_sequence: Number = 0
    role: str | None = None


# --- what is told by `updates`


class Arrived(Struct, frozen=True):
    """There are messages to be shown, up to `sequence`."""

    chat_id: str
    sequence: int


class Progress(Struct, frozen=True):
    """What has become of an own message."""

    chat_id: str
    client_message_id: str
    outcome: Outcome


class Delivery(Struct, frozen=True):
    """A member has received everything up to here."""

    chat_id: str
    user_id: str
    last_acked_sequence: int


class Membership(Struct, frozen=True):
    """A member was added to a chat, left it or got another role.

    The own user is reported too, so a new chat becomes known.
    """

    chat_id: str
    user_id: str
    present: bool
    role: str | None = None
    """The role from now on; None of a member that left, and from a server without roles."""


class HistoryChange(Struct, frozen=True):
    """The server's history is another one than before (a restored backup): what was here of it has been removed.

    All chats are read anew from their first message on. `chat_id` is not None if it is that chat's alone.
    """

    known_epoch: str
    epoch: str
    chat_id: str | None = None


Update = Arrived | Progress | Delivery | Membership | HistoryChange


class Status(BaseStatus, frozen=True, kw_only=True):
    """For a user interface."""

    user_id: str = ""
    """Who we are, as the server says; empty before the first connection."""
    epoch: str = ""
    history_change: HistoryChange | None = None
    """The last one since the client was opened."""
