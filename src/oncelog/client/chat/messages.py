"""A reader of messages: each once, in the order of its chat, from where the application had come to."""

from collections import deque
from typing import Final

from oncelog.client.chat.desk import Desk
from oncelog.client.chat.keeper import Keeper, now_ms
from oncelog.client.chat.values import Message
from oncelog.errors import ClosedError, HistoryChangedError

PAGE_MESSAGES: Final = 100


class MessageStream:
    """`async for message in stream`. A message counts as received when the next one is asked for.

    Not when the loop is left: nobody can tell whether its body had come to an end, or raised. It reads the file, so a
    slow reader costs no memory.
    """

    def __init__(self, desk: Desk, keeper: Keeper, chat_id: str | None, after: int | None) -> None:
        self._desk = desk
        self._keeper = keeper
        self._chat_id = chat_id
        self._after = after
        self._places: dict[str, tuple[int, int]] = {}
        """Of each chat: the last message that was read, and of which history it was."""
        self._waiting: deque[Message] = deque()
        self._given: Message | None = None
        self._is_over = False
        if chat_id is None or chat_id in desk.shown:
            self._look()  # where it begins is decided now, not at the first message

    def __aiter__(self) -> "MessageStream":
        return self

    async def __anext__(self) -> Message:
        self._acknowledge()
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            await self._read()
        self._demand_same_history(self._waiting[0].chat_id)
        self._given = self._waiting.popleft()
        return self._given

    async def aclose(self) -> None:
        """No more is wanted. The last message comes again the next time."""
        self._is_over = True
        self._waiting.clear()
        self._given = None
        self._desk.wake()

    def _acknowledge(self) -> None:
        given, self._given = self._given, None
        if given is not None and not self._desk.is_ended:
            generation = self._places[given.chat_id][1]
            self._desk.protocol.received(given.chat_id, given.sequence, generation, now_ms())
            self._keeper.work()
            self._keeper.on_accepted()

    async def _read(self) -> None:
        found: list[str] = []

        def is_something() -> bool:
            found[:] = self._look()
            return self._is_over or bool(found)

        try:
            await self._desk.until(is_something)
        except ClosedError:
            self._is_over = True
            return
        for chat_id in found:
            place, generation = self._places[chat_id]
            complete_to = self._desk.shown[chat_id].complete_to  # it may move while the file is read
            page = await self._desk.in_store(
                self._desk.store.messages_after, chat_id, place, complete_to, PAGE_MESSAGES
            )
            self._demand_same_history(chat_id)
            last = page[-1].sequence if len(page) == PAGE_MESSAGES else complete_to
            self._places[chat_id] = (last, generation)
            self._waiting.extend(page)

    def _look(self) -> list[str]:
        """The chats in which there is something to be read."""
        self._demand_same_history(*self._places)
        desk = self._desk
        names = desk.shown if self._chat_id is None else [self._chat_id] if self._chat_id in desk.shown else []
        for chat_id in names:
            if chat_id not in self._places:
                begin = desk.protocol_at_end.chats[chat_id].received_to if self._after is None else self._after
                self._places[chat_id] = (begin, desk.shown[chat_id].generation)
        return [name for name in names if desk.shown[name].complete_to > self._places[name][0]]

    def _demand_same_history(self, *chat_ids: str) -> None:
        for chat_id in chat_ids:
            place, generation = self._places[chat_id]
            shown = self._desk.shown[chat_id]
            if generation != shown.generation:
                self._is_over = True
                self._waiting.clear()
                message = f"the history of {chat_id} is another one than before, and begins again: {place} was the last"
                raise HistoryChangedError(message, self._desk.protocol_at_end.epoch, shown.complete_to)
