"""Which chats are caught up with, and when: some at a time, and what is missing in one after it could have come."""

from collections.abc import Callable, Mapping

from oncelog.client.chat import codec
from oncelog.client.chat.chat_state import ChatState
from oncelog.client.chat.limits import ChatLimits


class SyncScheduler:
    """Of one client, over one connection after the other."""

    def __init__(self, limits: ChatLimits) -> None:
        self.requests: dict[str, ChatState] = {}
        """What is under way."""
        self.due_ms: dict[str, int] = {}
        """Chats in which it is due at a time."""
        self._limits = limits
        self._queue: dict[str, None] = {}

    def disconnect(self) -> None:
        """The connection is gone."""
        for collection in (self.requests, self.due_ms, self._queue):
            collection.clear()

    @property
    def is_idle(self) -> bool:
        """Nothing is missing, by all that we have heard."""
        return not (self.requests or self.due_ms or self._queue)

    def schedule(self, chat_id: str) -> None:
        """As soon as it is its turn."""
        self._queue[chat_id] = None

    def check_gap(self, chat: ChatState, now_ms: int) -> None:
        """Something has arrived. If something is missing before it, that has a moment to come by itself."""
        if chat.is_synced and not chat.is_gapped:
            self.due_ms.pop(chat.chat_id, None)
        elif chat.sync_id is None and chat.chat_id not in self._queue:
            # Also of a chat that we did not know of, or not that we are in it.
            self.due_ms.setdefault(chat.chat_id, now_ms + self._limits.gap_wait_ms)

    def take_frames(self, chats: Mapping[str, ChatState], epoch: str, next_id: Callable[[], str]) -> list[bytes]:
        """The frames that may be sent now."""
        frames: list[bytes] = []
        while self._queue and len(self.requests) < self._limits.syncs_max:
            chat = chats[next(iter(self._queue))]
            del self._queue[chat.chat_id]
            self.due_ms.pop(chat.chat_id, None)
            if chat.sync_id is None:
                request_id = next_id()
                chat.start_sync(request_id)
                self.requests[request_id] = chat
                limit = self._limits.page_messages
                frames.append(codec.encode_sync(chat.chat_id, chat.fetched_to, limit, epoch, request_id))
        return frames
