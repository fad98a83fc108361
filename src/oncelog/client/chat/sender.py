"""What of the outbox is sent, and when: those of one chat in their order, and not before a server wants to be asked."""

import logging
import random
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from oncelog.client.chat import codec
from oncelog.client.chat.chat_state import ChatState
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.values import EXPIRED, Message, OutboxMessage, Outcome, Refused
from oncelog.client.runtime.backoff import iterate_pauses_s
from oncelog.client.runtime.blocked_writes import BlockedWrites

logger: Final = logging.getLogger("oncelog.client.chat")

SettleMessage = Callable[[ChatState, str, Outcome], None]


class MessageSender:
    """Of one client, over one connection after the other."""

    def __init__(self, limits: ChatLimits, random_source: random.Random, settle: SettleMessage) -> None:
        self.requests: dict[str, ChatState] = {}
        """What is under way."""
        self.due_ms: dict[str, int] = {}
        """Chats in which nothing is sent before a time."""
        self.blocked_writes = BlockedWrites(logger)
        """By chat: others go on."""
        self._limits = limits
        self._random = random_source
        self._settle = settle
        self._pauses: dict[str, Iterator[float]] = {}

    def disconnect(self) -> None:
        """The connection is gone."""
        self.requests.clear()
        self.due_ms.clear()

    def take_frames(self, chat: ChatState, wall_ms: int, next_id: Callable[[], str]) -> list[bytes]:
        """The frames that may be sent now. Nothing is before a catch-up has come to its end."""
        frames: list[bytes] = []
        if not chat.is_synced or chat.chat_id in self.due_ms:
            return frames
        while len(chat.in_flight) < self._limits.in_flight_max:
            entry = chat.find_next_entry()
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
            frames.append(codec.encode_send(entry, request_id))
        return frames

    def finish_request(self, request_id: str) -> ChatState | None:
        """An answer has come. None if nobody waits for it."""
        chat = self.requests.pop(request_id, None)
        if chat is not None:
            self._pauses.pop(chat.chat_id, None)
        return chat

    def handle_refusal(self, request_id: str, error: codec.ServerError, now_ms: int) -> ChatState:
        """The server says no, for now or for good."""
        chat = self.requests.pop(request_id)
        name = next((message_id for message_id, request in chat.in_flight.items() if request == request_id), None)
        if name is None:
            return chat  # it has come by another way meanwhile
        del chat.in_flight[name]
        chat.attempts[name] -= 1  # this one is answered
        if error.code in codec.TRANSIENT:
            self.due_ms[chat.chat_id] = now_ms + self.next_pause_ms(chat, error.retry_after_ms)
            self.blocked_writes.block(error.code, error.message, chat.chat_id)
        else:
            self._settle(chat, name, Refused(error.code, error.message, was_tried=chat.attempts[name] > 0))
        return chat

    def refuse_largest(self) -> None:
        """Refuse the largest message in flight: the server has closed the connection since a frame is too large.

        The server does not name the frame. No other message in flight can be too large if the largest is not.
        """
        in_flight = [
            (len(codec.encode_send(chat.entries[name], request_id)), name, chat)
            for chat in set(self.requests.values())
            for name, request_id in chat.in_flight.items()
            if name in chat.entries
        ]
        if in_flight:
            _, name, chat = max(in_flight, key=itemgetter(0))
            del chat.in_flight[name]
            chat.attempts[name] -= 1
            reason = "the server takes no frame as large as this (limits.frame_bytes_max)"
            self._settle(chat, name, Refused(codec.TOO_LARGE, reason, was_tried=chat.attempts[name] > 0))

    def next_pause_ms(self, chat: ChatState, least_ms: int) -> int:
        """Longer each time, not all alike, and not less than the server asks for."""
        limits = self._limits
        pauses = self._pauses.setdefault(
            chat.chat_id, iterate_pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._random)
        )
        retry_after_ms = min(least_ms, limits.retry_after_ms_max) * self._random.uniform(1, 1.2)
        return round(max(1000 * next(pauses), retry_after_ms)) + 1


def to_own_message(entry: OutboxMessage, ack: codec.SendAck, user_id: str) -> Message:
    """An own message, as all others get it."""
    return Message(
        message_id=ack.message_id,
        chat_id=entry.chat_id,
        sequence=ack.sequence,
        sender_id=user_id,
        client_message_id=entry.client_message_id,
        content=None if ack.erased else entry.content,
        created_at=ack.created_at,
        content_type=None if ack.erased else entry.content_type,
    )
