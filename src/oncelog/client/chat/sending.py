"""What of the outbox is sent, and when: those of one chat in their order, and not before a server wants to be asked."""

import logging
import random
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from oncelog.client.chat import words
from oncelog.client.chat.chats import Chat
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.values import EXPIRED, Entry, Message, Outcome, Refused
from oncelog.client.holdups import HoldUps
from oncelog.client.patience import pauses_s

logger: Final = logging.getLogger("oncelog.client.chat")

Settle = Callable[[Chat, str, Outcome], None]


class Sending:
    """Of one client, over one connection after the other."""

    def __init__(self, limits: ChatLimits, chance: random.Random, settle: Settle) -> None:
        self.requests: dict[str, Chat] = {}
        """What is under way."""
        self.at_ms: dict[str, int] = {}
        """Chats in which nothing is sent before a time."""
        self.hold_ups = HoldUps(logger)
        """By chat: others go on."""
        self._limits = limits
        self._chance = chance
        self._settle = settle
        self._patience: dict[str, Iterator[float]] = {}

    def lost(self) -> None:
        """The connection is gone."""
        self.requests.clear()
        self.at_ms.clear()

    def some(self, chat: Chat, wall_ms: int, next_id: Callable[[], str]) -> list[bytes]:
        """The frames that may be sent now. Nothing is before a catch-up has come to its end."""
        frames: list[bytes] = []
        if not chat.is_synced or chat.chat_id in self.at_ms:
            return frames
        while len(chat.in_flight) < self._limits.in_flight_max:
            entry = chat.next_entry()
            if entry is None:
                break
            name = entry.client_message_id
            if wall_ms - entry.accepted_at_ms >= self._limits.remembered_ms:
                # The catch-up has not found it, so it is not there. Whether it is still to be sent others must say.
                reason = "it has been in the outbox for longer than a server remembers its id (remembered_ms)"
                self._settle(chat, name, Refused(EXPIRED, reason, chat.attempts.get(name, 0) > 0))
                continue
            request_id = next_id()
            chat.in_flight[name] = request_id
            chat.attempts[name] = chat.attempts.get(name, 0) + 1
            self.requests[request_id] = chat
            frames.append(words.send(entry, request_id))
        return frames

    def acked(self, request_id: str) -> Chat | None:
        """An answer has come. None if nobody waits for it."""
        chat = self.requests.pop(request_id, None)
        if chat is not None:
            self._patience.pop(chat.chat_id, None)
        return chat

    def refused(self, request_id: str, error: words.ServerError, now_ms: int) -> Chat:
        """The server says no, for now or for good."""
        chat = self.requests.pop(request_id)
        name = next((one for one, request in chat.in_flight.items() if request == request_id), None)
        if name is None:
            return chat  # it has come by another way meanwhile
        del chat.in_flight[name]
        chat.attempts[name] -= 1  # this one is answered
        if error.code in words.TRANSIENT:
            self.at_ms[chat.chat_id] = now_ms + self.pause_ms(chat, error.retry_after_ms)
            self.hold_ups.refused(error.code, error.message, chat.chat_id)
        else:
            self._settle(chat, name, Refused(error.code, error.message, was_tried=chat.attempts[name] > 0))
        return chat

    def refuse_largest(self) -> None:
        """Refuse the largest message in flight: the server has closed the connection since a frame is too large.

        The server does not name the frame. No other message in flight can be too large if the largest is not.
        """
        in_flight = [
            (len(words.send(chat.entries[name], request_id)), name, chat)
            for chat in set(self.requests.values())
            for name, request_id in chat.in_flight.items()
            if name in chat.entries
        ]
        if in_flight:
            _, name, chat = max(in_flight, key=itemgetter(0))
            del chat.in_flight[name]
            chat.attempts[name] -= 1
            reason = "the server takes no frame as large as this (limits.frame_bytes_max)"
            self._settle(chat, name, Refused(words.TOO_LARGE, reason, was_tried=chat.attempts[name] > 0))

    def pause_ms(self, chat: Chat, least_ms: int) -> int:
        """Longer each time, not all alike, and not less than the server asks for."""
        limits = self._limits
        pauses = self._patience.setdefault(
            chat.chat_id, pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._chance)
        )
        asked_ms = min(least_ms, limits.retry_after_ms_max) * self._chance.uniform(1, 1.2)
        return round(max(1000 * next(pauses), asked_ms)) + 1


def own_message(entry: Entry, said: words.Acked, user_id: str) -> Message:
    """An own message, as all others get it."""
    return Message(
        message_id=said.message_id,
        chat_id=entry.chat_id,
        sequence=said.sequence,
        sender_id=user_id,
        client_message_id=entry.client_message_id,
        content=None if said.erased else entry.content,
        created_at=said.created_at,
        content_type=None if said.erased else entry.content_type,
    )
