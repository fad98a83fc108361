"""One chat as the client has it, without I/O: what has arrived, what may be shown, and what waits to be sent.

`complete_to` is the line between the two: everything up to it has arrived, so it may be shown, and nothing will come
in between any more. It moves in two ways. A message that is the next one moves it by one. And behind the last page of a
sync it moves to where the server says that the page ends: numbers that the sync has not brought do not exist, so a gap
does not hold anything back. What arrives beyond the next one is kept (`ahead`), and tells that something is missing; if
that is not there soon, a sync is due. So no message is lost that was not delivered live, or comes late.

While a catch-up is not at its end the line stays where it is, so that it is not shown half done.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, field

from oncelog.client.chat.codec import MessageBatch
from oncelog.client.chat.values import HistoryChange, Member, Message, OutboxMessage, SettledMessage, Update
from oncelog.errors import ProtocolError


class QueuedMessage(Struct):
    """A message in the outbox."""

    entry: OutboxMessage
    attempts: int = 0
    """How often it was sent without an answer."""


class SavedChat(NamedTuple):
    """Numbers of a chat, as they are saved and then reported."""

    chat_id: str
    is_member: bool
    complete_to: int
    fetched_to: int
    received_to: int
    generation: int
    """Not in the file."""


class ChatState:
    """Mutable; the protocol alone changes it."""

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
        """Own role, by the server's list and `membership` frames. Not stored."""
        self.complete_to = complete_to
        """Everything up to here has arrived."""
        self.fetched_to = fetched_to
        """So far has a catch-up come that is not at its end."""
        self.received_to = received_to
        """The application has received everything up to here."""
        self.generation = 0
        """How often its history has begun again since the client was opened."""
        self.heard_to = complete_to
        """The highest number that we have heard of."""
        self.asked_heard_to = 0
        """The same when the last page was asked for."""
        self.acked_to = 0
        """The server has been told so, by this device or another one."""
        self.ahead: set[int] = set()
        """What has arrived beyond `complete_to`, over this connection."""
        self.queue: dict[str, QueuedMessage] = {}
        """Messages in the outbox, by id, in their order."""
        self.in_flight: set[str] = set()
        """Ids of messages that were sent and not answered."""
        self.is_synced = False
        """Whether a catch-up has come to its end over this connection. Nothing is sent before."""
        self.is_catching_up = True
        self.sync_id: str | None = None

    def disconnect(self) -> None:
        """The connection is gone."""
        self.ahead.clear()
        self.in_flight.clear()
        self.is_synced, self.is_catching_up, self.sync_id = False, True, None

    def start_sync(self, sync_id: str) -> None:
        """A page of a catch-up is on its way."""
        self.sync_id, self.is_catching_up, self.asked_heard_to = sync_id, True, self.heard_to

    def reset(self) -> None:
        """Its history is another one. The outbox stays."""
        self.complete_to = self.fetched_to = self.received_to = self.heard_to = self.acked_to = 0
        self.generation += 1
        self.ahead.clear()
        self.is_catching_up = True

    def to_saved(self) -> SavedChat:
        """Return the numbers to save."""
        return SavedChat(
            self.chat_id, self.is_member, self.complete_to, self.fetched_to, self.received_to, self.generation
        )

    @property
    def is_gapped(self) -> bool:
        """Something is missing before what we have heard of."""
        return self.is_synced and self.is_member and self.heard_to > self.complete_to

    @property
    def has_unacknowledged(self) -> bool:
        """Whether the application has received messages that are to be acknowledged to the server."""
        return self.is_member and self.received_to > self.acked_to

    def add_message(self, message: Message, ahead_max: int) -> bool:
        """A message that came by itself. False if it need not be kept: it was there, or comes again."""
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
        """A page of a catch-up. Gives what is to be kept. Raises ProtocolError."""
        last = self.fetched_to
        for message in batch.messages:
            if message.sequence <= last or message.chat_id != self.chat_id:
                raise ProtocolError(f"a page after {self.fetched_to} has message {message.sequence} behind {last}")
            last = message.sequence
        if batch.next_sequence < last or (batch.has_more and batch.next_sequence == self.fetched_to):
            raise ProtocolError(f"a page after {self.fetched_to} goes on at {batch.next_sequence}")
        self.fetched_to = batch.next_sequence
        self.heard_to = max(self.heard_to, self.fetched_to)
        if not batch.has_more:
            self.complete_to = max(self.complete_to, self.fetched_to)
            self.is_catching_up, self.is_synced = False, True
            self.ahead = {number for number in self.ahead if number > self.complete_to}
            self._advance()
            # What was only said to be there before the page was asked for is not there, if the page has not brought it.
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
    """In the order of the fields."""

    is_reset: bool = False
    """All that is here of any history is to be removed first."""
    reset_chats: list[str] = field(default_factory=list)
    user_and_epoch: tuple[str, str] | None = None
    """The user and the epoch."""
    messages: list[Message] = field(default_factory=list)
    chats: dict[str, SavedChat] = field(default_factory=dict)
    settled: list[SettledMessage] = field(default_factory=list)
    watermarks: list[tuple[str, str, int | None]] = field(default_factory=list)
    """Chat, user, and how far; None for somebody who has left."""
    members: dict[str, tuple[Member, ...]] = field(default_factory=dict)
    """All watermarks of a chat, as the server has them."""
    updates: list[Update] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)

    def save_chat(self, chat: ChatState) -> None:
        """Its numbers are to be saved."""
        self.chats[chat.chat_id] = chat.to_saved()

    def reset(self, change: HistoryChange) -> None:
        """What was gathered of the old history is not kept. Outcomes are: they were true when they came."""
        self.is_reset = True
        self.messages, self.watermarks, self.members = [], [], {}
        self.updates.append(change)

    def reset_chat(self, chat: ChatState, change: HistoryChange) -> None:
        """The same for one chat."""
        self.reset_chats.append(chat.chat_id)
        self.messages = [message for message in self.messages if message.chat_id != chat.chat_id]
        self.watermarks = [message for message in self.watermarks if message[0] != chat.chat_id]
        self.members.pop(chat.chat_id, None)
        self.updates.append(change)
        self.save_chat(chat)
