"""The message reader of a chat client. It yields each message once, in chat order."""

from collections import deque
from typing import Final

from oncelog.client.chat.outbox import ChatRuntime
from oncelog.client.chat.values import Message
from oncelog.errors import ClosedError, HistoryChangedError

PAGE_MESSAGES: Final = 100


class MessageStream:
    """Yields messages: `async for message in stream`. A message counts as received when the loop requests the next one.

    If the loop exits instead, the message does not count, because the loop's body may have raised an error. The stream
    reads from the file, so messages for a slow reader do not pile up in memory.
    """

    def __init__(self, runtime: ChatRuntime, chat_id: str | None, after: int | None) -> None:
        self._runtime = runtime
        self._chat_id = chat_id
        self._after = after
        self._cursors: dict[str, tuple[int, int]] = {}
        """Last sequence that the stream has read, and the generation of the history, by chat."""
        self._buffer: deque[Message] = deque()
        self._unacknowledged: Message | None = None
        self._is_over = False
        if chat_id is None or chat_id in runtime.progress:
            self._find_readable()  # the stream starts after the messages received so far

    def __aiter__(self) -> "MessageStream":
        return self

    async def __anext__(self) -> Message:
        self._acknowledge()
        while not self._buffer:
            if self._is_over:
                raise StopAsyncIteration
            await self._load_page()
        self._check_same_history(self._buffer[0].chat_id)
        self._unacknowledged = self._buffer.popleft()
        return self._unacknowledged

    async def aclose(self) -> None:
        """End the stream. The next stream begins with the last message that this one returned."""
        self._is_over = True
        self._buffer.clear()
        self._unacknowledged = None
        self._runtime.wake_waiters()

    def _acknowledge(self) -> None:
        message, self._unacknowledged = self._unacknowledged, None
        if message is not None and not self._runtime.is_ended:
            generation = self._cursors[message.chat_id][1]
            self._runtime.mark_received(message.chat_id, message.sequence, generation)

    async def _load_page(self) -> None:
        try:
            found = await self._runtime.wait_for(self._find_readable, lambda found: self._is_over or bool(found))
        except ClosedError:
            self._is_over = True
            return
        for chat_id in found:
            place, generation = self._cursors[chat_id]
            # Read `complete_to` before the page, because it may grow while the page is read.
            complete_to = self._runtime.progress[chat_id].complete_to
            page = await self._runtime.call_store(
                self._runtime.store.load_messages_after, chat_id, place, complete_to, PAGE_MESSAGES
            )
            self._check_same_history(chat_id)
            last = page[-1].sequence if len(page) == PAGE_MESSAGES else complete_to
            self._cursors[chat_id] = (last, generation)
            self._buffer.extend(page)

    def _find_readable(self) -> list[str]:
        """Return the chats that have unread messages."""
        self._check_same_history(*self._cursors)
        runtime = self._runtime
        names = (
            runtime.progress if self._chat_id is None else [self._chat_id] if self._chat_id in runtime.progress else []
        )
        for chat_id in names:
            if chat_id not in self._cursors:
                start = runtime.protocol.chats[chat_id].received_to if self._after is None else self._after
                self._cursors[chat_id] = (start, runtime.progress[chat_id].generation)
        return [name for name in names if runtime.progress[name].complete_to > self._cursors[name][0]]

    def _check_same_history(self, *chat_ids: str) -> None:
        for chat_id in chat_ids:
            place, generation = self._cursors[chat_id]
            shown = self._runtime.progress[chat_id]
            if generation != shown.generation:
                self._is_over = True
                self._buffer.clear()
                message = f"{chat_id} has a new history, and its messages start over; the last message read was {place}"
                raise HistoryChangedError(message, self._runtime.protocol.epoch, shown.complete_to)
