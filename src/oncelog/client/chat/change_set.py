"""What is to be kept, and then told: gathered by the protocol, saved in one transaction, and published behind it."""

from msgspec import Struct, field

from oncelog.client.chat.chat_state import ChatState
from oncelog.client.chat.values import HistoryChange, Member, Message, OutboxMessage, Outcome, Update

ChatRow = tuple[str, bool, int, int, int]


class SettledMessage(Struct, frozen=True, gc=False):
    """What became of an entry of the outbox."""

    entry: OutboxMessage
    outcome: Outcome


class ChangeSet(Struct):
    """In the order of the fields."""

    is_reset: bool = False
    """All that is here of any history is to be removed first."""
    reset_chats: list[str] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)
    """Of the chats whose history begins again."""
    user_and_epoch: tuple[str, str] | None = None
    """The user and the epoch."""
    messages: list[Message] = field(default_factory=list)
    chats: dict[str, ChatRow] = field(default_factory=dict)
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
        self.chats[chat.chat_id] = (
            chat.chat_id, chat.is_member, chat.complete_to, chat.fetched_to, chat.received_to
        )  # fmt: skip

    def reset(self, change: HistoryChange) -> None:
        """What was gathered of the old history is not kept. Outcomes are: they were true when they came."""
        self.is_reset = True
        self.messages, self.watermarks, self.members = [], [], {}
        self.updates.append(change)

    def restart_chat(self, chat: ChatState) -> None:
        """Its numbers are to be saved, and its readers are to be told."""
        self.generations[chat.chat_id] = chat.generation
        self.save_chat(chat)

    def reset_chat(self, chat: ChatState, change: HistoryChange) -> None:
        """The same for one chat."""
        self.reset_chats.append(chat.chat_id)
        self.messages = [message for message in self.messages if message.chat_id != chat.chat_id]
        self.watermarks = [message for message in self.watermarks if message[0] != chat.chat_id]
        self.members.pop(chat.chat_id, None)
        self.updates.append(change)
        self.restart_chat(chat)
