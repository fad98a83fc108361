"""Which chats are caught up with, and when: some at a time, and what is missing in one after it could have come."""

from collections.abc import Callable, Mapping

from oncelog.client.chat import words
from oncelog.client.chat.chats import Chat
from oncelog.client.chat.limits import ChatLimits


class Syncing:
    """Of one client, over one connection after the other."""

    def __init__(self, limits: ChatLimits) -> None:
        self.requests: dict[str, Chat] = {}
        """What is under way."""
        self.at_ms: dict[str, int] = {}
        """Chats in which it is due at a time."""
        self._limits = limits
        self._waiting: dict[str, None] = {}

    def lost(self) -> None:
        """The connection is gone."""
        for kept in (self.requests, self.at_ms, self._waiting):
            kept.clear()

    @property
    def is_idle(self) -> bool:
        """Nothing is missing, by all that we have heard."""
        return not (self.requests or self.at_ms or self._waiting)

    def want(self, chat_id: str) -> None:
        """As soon as it is its turn."""
        self._waiting[chat_id] = None

    def look_at(self, chat: Chat, now_ms: int) -> None:
        """Something has arrived. If something is missing before it, that has a moment to come by itself."""
        if chat.is_synced and not chat.is_gapped:
            self.at_ms.pop(chat.chat_id, None)
        elif chat.sync_id is None and chat.chat_id not in self._waiting:
            # Also of a chat that we did not know of, or not that we are in it.
            self.at_ms.setdefault(chat.chat_id, now_ms + self._limits.gap_wait_ms)

    def some(self, chats: Mapping[str, Chat], epoch: str, next_id: Callable[[], str]) -> list[bytes]:
        """The frames that may be sent now."""
        frames: list[bytes] = []
        while self._waiting and len(self.requests) < self._limits.syncs_max:
            chat = chats[next(iter(self._waiting))]
            del self._waiting[chat.chat_id]
            self.at_ms.pop(chat.chat_id, None)
            if chat.sync_id is None:
                request_id = next_id()
                chat.asks(request_id)
                self.requests[request_id] = chat
                limit = self._limits.page_messages
                frames.append(words.sync(chat.chat_id, chat.fetched_to, limit, epoch, request_id))
        return frames
