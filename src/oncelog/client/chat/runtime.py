"""What the tasks of one client share: the file with its thread, what of it may be shown, and who is told of what."""

import logging
from collections.abc import Sequence
from typing import Final

from oncelog.client.chat.change_set import ChangeSet
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.outbox import Pending
from oncelog.client.chat.protocol import ChatProtocol
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import Delivery, HistoryChange, Refused, RefusedMessage, Update
from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.client import ClientRuntime
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.client.chat")
MessageKey = tuple[str, str]
"""Of an own message: its chat and its id."""


class StoredProgress:
    """How far one chat lies in the file."""

    __slots__ = ("complete_to", "generation")

    def __init__(self, complete_to: int = 0) -> None:
        self.complete_to = complete_to
        self.generation = 0
        """How often its history has begun again."""


class ChatRuntime(ClientRuntime):
    """State of one chat client."""

    def __init__(self, store: ChatStore, limits: ChatLimits) -> None:
        super().__init__("chat", logger)
        self.store = store
        self.limits = limits
        self.progress: dict[str, StoredProgress] = {}
        self.pending: dict[MessageKey, Pending] = {}
        self.refused: dict[int, RefusedMessage] = {}
        """By their numbers in the outbox."""
        self.watermarks: dict[str, dict[str, int]] = {}
        """Of the chats that somebody has asked about."""
        self.history_change: HistoryChange | None = None
        self._streams: list[BoundedStream[Update]] = []
        self._open_protocol: ChatProtocol | None = None

    @property
    def protocol(self) -> ChatProtocol:
        """Raises ClosedError."""
        self.check_open()
        return self.last_protocol

    @property
    def last_protocol(self) -> ChatProtocol:
        """Also while the client is being closed."""
        if self._open_protocol is None:
            raise self.end_error
        return self._open_protocol

    def attach_protocol(self, protocol: ChatProtocol) -> None:
        """What lay in the file is known."""
        self._open_protocol = protocol
        self.progress = {chat.chat_id: StoredProgress(chat.complete_to) for chat in protocol.chats.values()}

    def new_update_stream(self) -> BoundedStream[Update]:
        """A reader, from now on."""
        limit = ("updates_max", self.limits.updates_max)
        stream = BoundedStream[Update](self._streams.remove, count_max=limit)
        self._streams.append(stream)
        return stream

    def on_end(self, error: OncelogError | None) -> None:
        """End readers of updates and callers that wait for outcomes."""
        for stream in list(self._streams):
            stream.finish(error)
        for pending in self.pending.values():
            pending.settle(self.end_error)

    def publish(self, changes: ChangeSet) -> None:
        """It lies in the file: tells everybody whom it concerns."""
        for chat_id, generation in changes.generations.items():
            self.progress.setdefault(chat_id, StoredProgress()).generation = generation
            self.watermarks.pop(chat_id, None)
        for chat_id, _, complete_to, _, _ in changes.chats.values():
            self.progress.setdefault(chat_id, StoredProgress()).complete_to = complete_to
        self._settle(changes)
        changes.updates += self._update_watermarks(changes)
        for update in changes.updates:
            if isinstance(update, HistoryChange):
                self.history_change = update
        self.notify(changes.updates)

    def notify(self, updates: Sequence[Update]) -> None:
        """To all who read updates, and all who wait for something."""
        for stream in list(self._streams):
            stream.put(updates)
        self.wake_waiters()

    def _settle(self, changes: ChangeSet) -> None:
        for settled in changes.settled:
            entry, outcome = settled.entry, settled.outcome
            if isinstance(outcome, Refused):
                logger.warning("message %s was refused: %s", entry.client_message_id, outcome.code)
                self.refused[entry.number] = RefusedMessage(
                    entry.client_message_id, entry.chat_id, entry.content, entry.content_type, entry.accepted_at_ms,
                    outcome,
                )  # fmt: skip
            pending = self.pending.pop((entry.chat_id, entry.client_message_id), None)
            if pending is not None:
                pending.settle(outcome)

    def _update_watermarks(self, changes: ChangeSet) -> list[Update]:
        """What is known of others. Gives what of it nobody has been told."""
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
