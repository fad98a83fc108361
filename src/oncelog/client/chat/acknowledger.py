"""What the application has received, told to the server: together, a little later, and again where it may be lost."""

from collections.abc import Callable

from oncelog.client.chat import codec
from oncelog.client.chat.chat_state import ChatState


class Acknowledger:
    """Of one client, over one connection after the other."""

    def __init__(self, wait_ms: int) -> None:
        self.due_ms: dict[str, int] = {}
        """When each chat's is said."""
        self.last_request_id = ""
        """Nobody answers but to refuse one; the last is enough."""
        self._wait_ms = wait_ms
        self._sent_since_list: set[str] = set()

    def disconnect(self) -> None:
        """The connection is gone."""
        self.due_ms.clear()
        self.last_request_id = ""

    def start_list(self) -> None:
        """What is said from now on the list may not know."""
        self._sent_since_list.clear()

    def apply_listed(self, chat: ChatState, acked_to: int) -> None:
        """What the server knows. Less than we had said, if that was lost on its way, or we had left and come back."""
        if chat.chat_id not in self._sent_since_list:
            chat.acked_to = acked_to

    def schedule(self, chat: ChatState, now_ms: int) -> None:
        """If there is something to say."""
        if chat.is_member and chat.received_to > chat.acked_to:
            self.due_ms.setdefault(chat.chat_id, now_ms + self._wait_ms)

    def take_frames(self, chat: ChatState, next_id: Callable[[], str]) -> list[bytes]:
        """What is to be said by now."""
        if not chat.is_member or chat.received_to <= chat.acked_to:
            return []
        chat.acked_to = chat.received_to
        self._sent_since_list.add(chat.chat_id)
        self.last_request_id = next_id()
        return [codec.encode_ack(chat.chat_id, chat.acked_to, self.last_request_id)]
