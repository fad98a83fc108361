"""State of one chat, without I/O: its messages, its outbox, and the changes to save and report.

All messages up to `complete_to` have arrived, so readers may see them. The next message raises `complete_to` by one.
The last page of a sync raises it to the end of the page: sequences missing from the page do not exist, so a gap
does not hold messages back. A message that arrives before its predecessor is stored (`ahead`) and shows that the
predecessor is missing. If the missing message does not arrive soon, the client syncs the chat, because the message may
have been lost.

While a sync has further pages, `complete_to` does not change, so readers never see part of a sync.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, field

from oncelog.client.chat.codec import MessageBatch
from oncelog.client.chat.values import Member, Message, OutboxMessage, SettledMessage, Update
from oncelog.errors import ProtocolError


class QueuedMessage(Struct):
    """A message in the outbox."""

    entry: OutboxMessage
    attempts: int = 0
    """How many times the message was sent without an answer."""


class SavedChat(NamedTuple):
    """State of a chat that the store saves and the client then reports."""

    chat_id: str
    is_member: bool
    complete_to: int
    fetched_to: int
    received_to: int
    generation: int
    """How many times the history has been reset since the client was opened. Not stored in the file."""


class ChatState:
    """State of one chat. Only the protocol modifies it."""

    __slots__ = (
        "acked_to", "ahead", "asked_heard_to", "chat_id", "complete_to", "fetched_to", "generation", "heard_to",
        "in_flight", "is_catching_up", "is_member", "is_synced", "queue", "received_to", "role", "sync_id",
    )  # fmt: skip

    def __init__(
        self, chat_id: str, *, is_member: bool = True, complete_to: int = 0, fetched_to: int = 0, received_to: int = 0
    ) -> None:
        self.chat_id = chat_id
        self.is_member = is_member
        self.role: str | None = None
        """The user's role, from the list of chats and `membership` frames. Not stored."""
        self.complete_to = complete_to
        """All messages up to this sequence have arrived."""
        self.fetched_to = fetched_to
        """Last sequence of the pages that an unfinished sync has received."""
        self.received_to = received_to
        """The application has received all messages up to this sequence."""
        self.generation = 0
        """How many times the history has been reset since the client was opened."""
        self.heard_to = complete_to
        """Highest sequence that the server has reported."""
        self.asked_heard_to = 0
        """`heard_to` at the time of the last page request."""
        self.acked_to = 0
        """Highest sequence that one of the user's devices has acknowledged to the server."""
        self.ahead: set[int] = set()
        """Sequences after `complete_to` that have arrived over this connection."""
        self.queue: dict[str, QueuedMessage] = {}
        """Outbox messages by id, in outbox order."""
        self.in_flight: set[str] = set()
        """Ids of sent messages that are not answered yet."""
        self.is_synced = False
        """Whether a sync has finished over this connection. Until then the client sends no messages to the chat."""
        self.is_catching_up = True
        self.sync_id: str | None = None

    def disconnect(self) -> None:
        """Discard the state that belonged to the closed connection."""
        self.ahead.clear()
        self.in_flight.clear()
        self.is_synced, self.is_catching_up, self.sync_id = False, True, None

    def reset(self) -> None:
        """Begin a new history and keep the outbox."""
        self.complete_to = self.fetched_to = self.received_to = self.heard_to = self.acked_to = 0
        self.generation += 1
        self.ahead.clear()
        self.is_catching_up = True

    def to_saved(self) -> SavedChat:
        """Return the state to save."""
        return SavedChat(
            self.chat_id, self.is_member, self.complete_to, self.fetched_to, self.received_to, self.generation
        )

    @property
    def is_gapped(self) -> bool:
        """Whether any message up to `heard_to` is missing."""
        return self.is_synced and self.is_member and self.heard_to > self.complete_to

    @property
    def has_unacknowledged(self) -> bool:
        """Whether the application has received messages that the client has not acknowledged to the server."""
        return self.is_member and self.received_to > self.acked_to

    def add_message(self, message: Message, ahead_max: int) -> bool:
        """Add a live message. Return False if it need not be saved: it is a duplicate, or a sync will refetch it."""
        number = message.sequence
        self.heard_to = max(self.heard_to, number)
        if number <= self.complete_to or number in self.ahead:
            return False
        if len(self.ahead) >= ahead_max and number != self.complete_to + 1:
            return False
        self.ahead.add(number)
        self._advance()
        return True

    def apply_page(self, batch: MessageBatch) -> Sequence[Message]:
        """Apply a sync page and return the messages to save. Raises ProtocolError."""
        last = self.fetched_to
        for message in batch.messages:
            if message.sequence <= last or message.chat_id != self.chat_id:
                raise ProtocolError(f"a page after {self.fetched_to} has message {message.sequence} after {last}")
            last = message.sequence
        if batch.next_sequence < last or (batch.has_more and batch.next_sequence == self.fetched_to):
            raise ProtocolError(f"a page after {self.fetched_to} continues at {batch.next_sequence}")
        self.fetched_to = batch.next_sequence
        self.heard_to = max(self.heard_to, self.fetched_to)
        if not batch.has_more:
            self.complete_to = max(self.complete_to, self.fetched_to)
            self.is_catching_up, self.is_synced = False, True
            self.ahead = {number for number in self.ahead if number > self.complete_to}
            self._advance()
            # If the server reported a sequence before the request and the page lacks it, the sequence does not exist.
            heard_since = self.heard_to if self.heard_to > self.asked_heard_to else 0
            self.heard_to = max(self.complete_to, heard_since, max(self.ahead, default=0))
        return batch.messages

    def _advance(self) -> None:
        if self.is_catching_up:
            return
        while self.complete_to + 1 in self.ahead:
            self.complete_to += 1
            self.ahead.discard(self.complete_to)
        self.fetched_to = self.complete_to


class ChangeSet(Struct):
    """Changes to save and report, in the order of the fields."""

    reset_chats: list[str] = field(default_factory=list)
    """Chats whose messages and watermarks the store removes first."""
    user_and_epoch: tuple[str, str] | None = None
    """New user and epoch, or None if neither has changed."""
    messages: list[Message] = field(default_factory=list)
    chats: dict[str, SavedChat] = field(default_factory=dict)
    settled: list[SettledMessage] = field(default_factory=list)
    watermarks: list[tuple[str, str, int | None]] = field(default_factory=list)
    """Chat, user and acknowledged sequence, or None for a member that has left."""
    members: dict[str, tuple[Member, ...]] = field(default_factory=dict)
    """All members with their watermarks, by chat."""
    updates: list[Update] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)

    def save_chat(self, chat: ChatState) -> None:
        """Add the current state of a chat."""
        self.chats[chat.chat_id] = chat.to_saved()

    def reset_chat(self, chat: ChatState) -> None:
        """Reset a chat and drop its unsaved changes, except the outcomes of messages, which remain valid."""
        chat.reset()
        self.reset_chats.append(chat.chat_id)
        self.messages = [message for message in self.messages if message.chat_id != chat.chat_id]
        self.watermarks = [message for message in self.watermarks if message[0] != chat.chat_id]
        self.members.pop(chat.chat_id, None)
        self.save_chat(chat)
