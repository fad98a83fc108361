"""State that the tasks of one chat client share: the store, chats as they are saved, and readers of updates."""

import random
import time
from collections.abc import Callable

from oncelog.client.chat.chat_state import ChangeSet, SavedChat
from oncelog.client.chat.protocol import ChatProtocol
from oncelog.client.chat.sender import logger
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import ChatLimits, Delivery, HistoryChange, Update
from oncelog.client.runtime.client import ProtocolRuntime


def now_ms() -> int:
    """Return the time of the monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class ChatRuntime(ProtocolRuntime[ChatStore, ChatLimits, ChatProtocol]):
    """State of one chat client."""

    def __init__(self, store: ChatStore, limits: ChatLimits, random_source: random.Random | None) -> None:
        super().__init__("chat", logger, store, limits, random_source)
        self.progress: dict[str, SavedChat] = {}
        """Chats as they are in the file."""
        self.watermarks: dict[str, dict[str, int]] = {}
        """Acknowledged sequences of the members, of chats whose members were requested."""
        self.history_change: HistoryChange | None = None
        self.wake_tasks: Callable[[], None] = self.wake_waiters
        """Wakes the tasks after a call that changes the protocol. The client sets it."""

    def publish_changes(self, changes: ChangeSet) -> None:
        """Report changes that are saved, to readers of updates and callers that wait."""
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
        """The application has received everything up to this sequence, in this generation of the history."""
        self.protocol.mark_received(chat_id, sequence, generation, now_ms())
        self.wake_tasks()

    def _update_watermarks(self, changes: ChangeSet) -> list[Update]:
        """Update the watermarks, and return updates for the ones that no frame has reported."""
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
