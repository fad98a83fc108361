"""The outbox of a chat client: messages waiting for their outcomes, and the state that the client's tasks share."""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from uuid import UUID, uuid4

from oncelog.client.chat.chat_state import ChangeSet, SavedChat
from oncelog.client.chat.protocol import ChatProtocol
from oncelog.client.chat.sender import logger
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import (
    TEXT_PLAIN,
    ChatLimits,
    Delivery,
    HistoryChange,
    OutboxMessage,
    Outcome,
    Refused,
    RefusedMessage,
    Sent,
    Update,
    to_refused_message,
)
from oncelog.client.runtime.client import ProtocolRuntime
from oncelog.client.runtime.outbox import BaseOutbox, BasePending
from oncelog.core.canonical import is_storable, nfc
from oncelog.core.chat import CHAT_ID_CHARACTERS_MAX, CONTENT_TYPE_CHARACTERS_MAX
from oncelog.deprecation import alias_method
from oncelog.errors import CanonicalError

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTENT_TYPE: Final = re.compile(r"[!-.0-~]+/[ -~]+", re.ASCII)


def now_ms() -> int:
    """Return the monotonic time in milliseconds."""
    return time.monotonic_ns() // 1_000_000


class ChatRuntime(ProtocolRuntime[ChatStore, ChatLimits, ChatProtocol]):
    """Runtime of a chat client, with the saved state that its tasks share."""

    def __init__(self, store: ChatStore, limits: ChatLimits, random_source: random.Random | None) -> None:
        super().__init__("chat", logger, store, limits, random_source)
        self.progress: dict[str, SavedChat] = {}
        """State of each chat as saved in the file."""
        self.watermarks: dict[str, dict[str, int]] = {}
        """Acknowledged sequence of each member, for the chats whose members were requested."""
        self.history_change: HistoryChange | None = None

    def publish_changes(self, changes: ChangeSet) -> None:
        """Report saved changes to readers of updates and to waiting callers."""
        for chat_id, saved in changes.chats.items():
            if chat_id in self.progress and self.progress[chat_id].generation != saved.generation:
                self.watermarks.pop(chat_id, None)
            self.progress[chat_id] = saved
        changes.updates += self._update_watermarks(changes)
        for update in changes.updates:
            if isinstance(update, HistoryChange):
                self.history_change = update
        self.publish(changes.updates)

    def mark_received(self, chat_id: str, sequence: int, generation: int) -> None:
        """Record that the application has received all messages up to a sequence in a generation of the history."""
        self.protocol.mark_received(chat_id, sequence, generation, now_ms())
        self.wake_tasks()

    def _update_watermarks(self, changes: ChangeSet) -> list[Update]:
        """Update the watermarks, and return updates for the changes that no frame has reported."""
        updates: list[Update] = []
        for chat_id, members in changes.members.items():
            known = self.watermarks.get(chat_id, {})
            updates += [
                Delivery(chat_id, member.user_id, member.last_acked_sequence)
                for member in members
                if member.last_acked_sequence > known.get(member.user_id, 0)
            ]
            self.watermarks[chat_id] = {
                member.user_id: max(member.last_acked_sequence, known.get(member.user_id, 0)) for member in members
            }
        for chat_id, user_id, sequence in changes.watermarks:
            watermarks = self.watermarks.get(chat_id)
            if watermarks is not None:
                if sequence is None:
                    watermarks.pop(user_id, None)
                else:
                    watermarks[user_id] = max(sequence, watermarks.get(user_id, 0))
        return updates


def check_chat_id(chat_id: str) -> None:
    """Raise CanonicalError for a malformed chat id."""
    if not isinstance(chat_id, str) or not 1 <= len(chat_id) <= CHAT_ID_CHARACTERS_MAX:
        raise CanonicalError("chat_id", f"must be a string of 1 to {CHAT_ID_CHARACTERS_MAX} characters")
    if "/" in chat_id or _CONTROL.search(chat_id) or not is_storable(chat_id):
        raise CanonicalError("chat_id", 'must have no "/" and no control characters')
    if chat_id in (".", ".."):  # a URL path cannot contain them as segments
        raise CanonicalError("chat_id", "must not be . or ..")
    if not chat_id.isascii() and nfc(chat_id) != chat_id:
        raise CanonicalError("chat_id", "must be in NFC")  # other forms of the same text would be different chats


def prepare(
    chat_id: str,
    content: str,
    content_type: str,
    client_message_id: UUID | str | None,
    limits: ChatLimits,
    wall_ms: int,
) -> OutboxMessage:
    """Validate a message and convert it to an outbox entry, not yet numbered. Raises CanonicalError."""
    check_chat_id(chat_id)
    if not isinstance(content, str) or not is_storable(content):
        raise CanonicalError("content", "must be a string that UTF-8 can encode, without U+0000")
    size = len(content.encode())
    if not 1 <= size <= limits.content_bytes_max:
        reason = f"must have 1 to {limits.content_bytes_max} bytes of UTF-8 (content_bytes_max), not {size}"
        raise CanonicalError("content", reason)
    if not isinstance(content_type, str) or not 1 <= len(content_type) <= CONTENT_TYPE_CHARACTERS_MAX:
        raise CanonicalError("content_type", f"must be a string of 1 to {CONTENT_TYPE_CHARACTERS_MAX} characters")
    if not _CONTENT_TYPE.fullmatch(content_type):
        raise CanonicalError("content_type", f"must be a media type such as {TEXT_PLAIN}")
    return OutboxMessage(0, _parse_message_id(client_message_id), chat_id, content, content_type, wall_ms)


def _parse_message_id(client_message_id: UUID | str | None) -> str:
    if client_message_id is None:
        return str(uuid4())
    try:
        found = UUID(str(client_message_id))
    except ValueError:
        found = UUID(int=0)
    if found.version != 4:
        raise CanonicalError("client_message_id", "must be a random UUID (version 4)")
    return str(found)


class Pending(BasePending[OutboxMessage, Outcome]):
    """A message in the outbox."""

    __slots__ = ("_wait_until_delivered",)

    def __init__(self, entry: OutboxMessage, wait_until_delivered: Callable[[str, int], Awaitable[None]]) -> None:
        super().__init__(entry)
        self._wait_until_delivered = wait_until_delivered

    @property
    def client_message_id(self) -> str:
        """Id of the message, which never changes."""
        return self._entry.client_message_id

    @property
    def chat_id(self) -> str:
        """Chat of the message."""
        return self._entry.chat_id

    @property
    def content(self) -> str:
        """The content, for example to display it before it is sent."""
        return self._entry.content

    @property
    def content_type(self) -> str:
        """Media type of the content."""
        return self._entry.content_type

    sent = alias_method("Pending.sent", "outcome")

    async def delivered(self) -> Outcome:
        """Wait until all other members of the chat have acknowledged the message, or until it is refused."""
        outcome = await self.outcome()
        if isinstance(outcome, Sent):
            await self._wait_until_delivered(self.chat_id, outcome.sequence)
        return outcome


class Outbox(BaseOutbox[ChatRuntime, OutboxMessage, Pending, ChangeSet]):
    """Outbox of a chat client. Its task also saves incoming messages."""

    def __init__(self, runtime: ChatRuntime, new_pending: Callable[[OutboxMessage], Pending]) -> None:
        limit = ("outbox_messages_max", runtime.limits.outbox_messages_max)
        super().__init__(runtime, new_pending, count_max=limit)
        self._capacity_event = asyncio.Event()
        self.refused: dict[int, RefusedMessage] = {}
        """Refused messages by number."""

    async def wait_for_capacity(self) -> None:
        """If too many messages are waiting to be saved, wait until there are fewer."""
        while len(self._runtime.protocol.changes.messages) > self._runtime.limits.frames_max:
            self._capacity_event.clear()
            self.wake()
            await self._capacity_event.wait()

    def _take_changes(self) -> ChangeSet:
        changes = self._runtime.protocol.take_changes()
        self._capacity_event.set()
        return changes

    async def _save_batch(self, entries: Sequence[OutboxMessage], withdrawn: Sequence[int], changes: ChangeSet) -> None:
        await self._runtime.save(self._runtime.store.save, entries, withdrawn, changes)
        for number in withdrawn:
            self.refused.pop(number, None)
        self._runtime.protocol.enqueue(entries, now_ms())
        for entry, outcome in changes.settled:
            if isinstance(outcome, Refused):
                self._runtime.logger.warning("%s was refused: %s", entry, outcome.code)
                self.refused[entry.number] = to_refused_message(entry, outcome)
            self._settle(entry, outcome)
        self._runtime.publish_changes(changes)
        self._runtime.wake_tasks()
