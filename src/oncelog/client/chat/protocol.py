"""The client's side of the chat door, without I/O. Times are given to it, in milliseconds of a clock that never jumps.

Frames go in (`receive`), frames to be sent come out (`outgoing`), and so does what is to be kept and told
(`take_changes`). A connection is begun by `begin` and ended by `lost`, as often as it takes. `tick` is to be called at
`next_at_ms`.

Over each connection: who we are; then the list of our chats, which whoever drives this asks for over HTTP
(`wants_list`, `listed`); then all chats in which there is something new are caught up with; and in each of them, behind
that, what lies in the outbox is sent. So an attempt of before that had arrived is found before it is made again.
"""

import logging
import random
from collections.abc import Iterable
from enum import Enum
from typing import Final

from oncelog.client.chat import words
from oncelog.client.chat.acking import Acking
from oncelog.client.chat.changes import Changes, Settled
from oncelog.client.chat.chats import Chat
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.sending import Sending, own_message
from oncelog.client.chat.syncing import Syncing
from oncelog.client.chat.values import (
    Arrived,
    Delivery,
    Entry,
    HistoryChange,
    Listed,
    Member,
    Membership,
    Message,
    Outcome,
    Progress,
    Refused,
    Sent,
)
from oncelog.client.words import CLOSED_TOO_LARGE
from oncelog.errors import LostError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client.chat")

WRONG_USER: Final = "WRONG_USER"
"""The file is another user's. No server says so."""
_OF_THE_CONNECTION: Final = frozenset({words.AUTH_FAILED, "SLOW_CONSUMER", "SERVER_STOPPING", "HISTORY_CHANGED"})


class Phase(Enum):
    """Of a connection."""

    NONE = "none"
    CONNECTING = "connecting"
    LISTING = "listing"
    READY = "ready"


class Protocol:
    """One client. Never used by two threads at a time."""

    def __init__(
        self, device_id: str, user_id: str, epoch: str, chats: Iterable[Chat], limits: ChatLimits, chance: random.Random
    ) -> None:
        self.phase = Phase.NONE
        self.user_id = user_id
        """As the server has said; empty before the first connection."""
        self.epoch = epoch
        self.chats = {chat.chat_id: chat for chat in chats}
        self.outgoing: list[bytes] = []
        """Frames to be sent, in order. Whoever sends them empties the list."""
        self.wants_list = False
        """Our chats are to be asked for."""
        self.answers = 0
        """How many awaited answers have come: while it stands still and `is_waiting`, the server is silent."""
        self.closing_ms = 0
        """A server that has said that it closes wants us to come back after so long."""
        self._device_id = device_id
        self._limits = limits
        self._changes = Changes()
        self._wall_ahead_ms = 0
        self._syncing = Syncing(limits)
        self._sending = Sending(limits, chance, self._settle)
        self._acking = Acking(limits.ack_wait_ms)
        self._check_at = 0
        self._heard_since_list: set[str] = set()
        self._number = 0

    # --- the connection

    def begin(self, token: str | None, wall_ahead_ms: int) -> None:
        """A connection has been made: says who we are. The wall clock is so far ahead of the one that is given."""
        self.lost()
        self.phase = Phase.CONNECTING
        self._wall_ahead_ms = wall_ahead_ms
        self.outgoing.append(words.connect(token, self._device_id))

    def lost(self, close_code: int | None = None) -> None:
        """End the connection. Unanswered messages are sent again over the next one, under the same ids.

        A message that is too large for the server is refused.
        """
        if close_code == CLOSED_TOO_LARGE:
            self._sending.refuse_largest()
        self.phase = Phase.NONE
        self.wants_list = False
        self.closing_ms = 0
        self.outgoing.clear()
        for chat in self.chats.values():
            chat.lost()
        self._syncing.lost()
        self._sending.lost()
        self._acking.lost()
        self._heard_since_list.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether the server owes an answer."""
        return self.phase is Phase.CONNECTING or bool(self._syncing.requests) or bool(self._sending.requests)

    @property
    def is_live(self) -> bool:
        """Everything that we have heard of has arrived."""
        return self.phase is Phase.READY and self._syncing.is_idle

    @property
    def pending(self) -> int:
        """Messages without an outcome."""
        return sum(len(chat.entries) for chat in self.chats.values())

    @property
    def held_up(self) -> str | None:
        """What the server says of messages that it does not take for now; None if there are none."""
        return self._sending.hold_ups.last_error

    def take_changes(self) -> Changes:
        """What there is to be kept and told since the last time."""
        changes, self._changes = self._changes, Changes()
        return changes

    @property
    def waiting_messages(self) -> int:
        """How many there are among them."""
        return len(self._changes.messages)

    @property
    def has_changes(self) -> bool:
        """Whether there is something."""
        return bool(self._changes)

    # --- the application's side

    def offer(self, entries: Iterable[Entry], now_ms: int, *, was_tried: bool = False) -> None:
        """Messages that are in the outbox, in its order. Those of an earlier run may have been sent."""
        for entry in entries:
            chat = self._chat(entry.chat_id, is_member=False)
            chat.entries[entry.client_message_id] = entry
            if was_tried:
                chat.attempts[entry.client_message_id] = 1
            if self.phase is Phase.READY:
                if not chat.is_synced and chat.sync_id is None:
                    self._syncing.want(chat.chat_id)
                self._send_some(chat, now_ms)
        self._sync_some()

    def received(self, chat_id: str, sequence: int, generation: int, now_ms: int) -> None:
        """The application has received everything up to here, of the history with this number."""
        chat = self.chats.get(chat_id)
        if chat is not None and generation == chat.generation and sequence > chat.received_to:
            chat.received_to = sequence
            self._changes.touch(chat)
            self._ack_soon(chat, now_ms)

    def joined(self, chat_id: str, role: str | None = None) -> None:
        """We are in this chat: the application has made it, or the server says so."""
        self._heard_since_list.add(chat_id)
        chat = self._chat(chat_id)
        chat.role = role or chat.role
        if not chat.is_member:
            chat.is_member = True
            self._changes.touch(chat)
        if self.phase is Phase.READY and not chat.is_synced:
            self._syncing.want(chat_id)
            self._sync_some()

    def left(self, chat_id: str) -> None:
        """We are not in this chat any more. What has arrived of it stays."""
        self._heard_since_list.add(chat_id)
        chat = self.chats.get(chat_id)
        if chat is not None and chat.is_member:
            chat.is_member = chat.is_synced = False
            chat.role = None
            chat.is_catching_up, chat.acked_to = True, 0
            self._changes.touch(chat)
            self._changes.updates.append(Membership(chat_id, self.user_id, present=False))

    def counted(self, chat_id: str, members: tuple[Member, ...]) -> None:
        """All members of a chat, as the server has said over HTTP."""
        self._changes.members[chat_id] = members

    # --- time

    @property
    def next_at_ms(self) -> int | None:
        """When `tick` is to be called; None for never."""
        if self.phase is not Phase.READY:
            return None
        times = [
            *self._syncing.at_ms.values(),
            *self._sending.at_ms.values(),
            *self._acking.at_ms.values(),
            self._check_at,
        ]
        return min(times)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        if self.phase is not Phase.READY:
            return
        for chat_id in _due(self._syncing.at_ms, now_ms):
            self._syncing.want(chat_id)
        self._sync_some()
        for chat_id in _due(self._sending.at_ms, now_ms):
            self._send_some(self.chats[chat_id], now_ms)
        for chat_id in _due(self._acking.at_ms, now_ms):
            self._ack(self.chats[chat_id])
        if now_ms >= self._check_at:
            self._check_at = now_ms + self._limits.check_ms
            self.wants_list = True

    def flush(self) -> None:
        """The client is being closed: what is to be acknowledged is said now."""
        for chat_id in _due(self._acking.at_ms, None):
            self._ack(self.chats[chat_id])

    # --- the list of chats

    def list_asked(self) -> None:
        """The list is on its way: what is heard from now on may not be in it."""
        self.wants_list = False
        self._heard_since_list.clear()
        self._acking.list_asked()

    def listed(self, chats: Iterable[Listed], now_ms: int) -> None:
        """All chats that we are in, by the server's word."""
        if self.phase not in (Phase.LISTING, Phase.READY):
            return
        is_first, self.phase = self.phase is Phase.LISTING, Phase.READY
        if is_first:
            self._check_at = now_ms + self._limits.check_ms
        seen: set[str] = set()
        for one in chats:
            seen.add(one.chat_id)
            self._list_one(one, now_ms)
        for chat_id, chat in self.chats.items():
            if chat_id not in seen and chat_id not in self._heard_since_list:
                self.left(chat_id)
            if chat_id not in seen and not chat.is_synced and (chat.is_member or chat.entries):
                self._syncing.want(chat_id)  # the server is to say itself that we may not, or may by now
        self._sync_some()

    def _list_one(self, one: Listed, now_ms: int) -> None:
        chat = self.chats.get(one.chat_id)
        if chat is None or not chat.is_member:
            if one.chat_id in self._heard_since_list:
                return  # it was left meanwhile
            chat = self._chat(one.chat_id)
            chat.is_member = True
            chat.role = one.role
            self._changes.touch(chat)
            self._changes.updates.append(Membership(one.chat_id, self.user_id, present=True, role=one.role))
        elif chat.role != one.role:
            is_change = chat.role is not None
            chat.role = one.role
            if is_change:
                self._changes.updates.append(Membership(one.chat_id, self.user_id, present=True, role=one.role))
        self._acking.listed(chat, one.last_acked_sequence)
        chat.heard_to = max(chat.heard_to, one.last_sequence)
        self._ack_soon(chat, now_ms)
        if chat.sync_id is not None:
            return
        if not chat.is_synced and chat.fetched_to == chat.complete_to == one.last_sequence and not chat.ahead:
            # There is nothing that we do not have: what comes from here on is live.
            chat.is_synced, chat.is_catching_up = True, False
            self._send_some(chat, now_ms)
        elif not chat.is_synced or chat.is_gapped or one.last_sequence < chat.complete_to:
            self._syncing.want(chat.chat_id)

    # --- frames in

    def receive(self, data: str | bytes, now_ms: int) -> None:
        """A text frame. Raises ProtocolError, or ServerRefusedError or LostError where the connection is at its end."""
        said, request_id = words.read(data)
        if isinstance(said, words.Connected):
            self._connected(said)
        elif isinstance(said, words.ServerError):
            self._error(said, request_id, now_ms)
        elif isinstance(said, words.Closing):
            self.closing_ms = said.reconnect_delay_ms
            raise LostError(f"the server closes the connection: {said.reason}")
        elif self.phase in (Phase.NONE, Phase.CONNECTING):
            return
        elif isinstance(said, Message):
            self._arrived(said, now_ms)
        elif isinstance(said, words.Acked):
            self._acked(said, request_id, now_ms)
        elif isinstance(said, words.Batch):
            self._batch(said, request_id, now_ms)
        elif isinstance(said, words.Delivered):
            self._delivered(said)
        elif isinstance(said, words.MembershipFrame):
            self._membership(said)

    def _connected(self, said: words.Connected) -> None:
        if self.phase is not Phase.CONNECTING:
            return  # said twice
        if self.user_id not in ("", said.user_id):
            raise ServerRefusedError(WRONG_USER, f"the file belongs to {self.user_id!r}, the token to {said.user_id!r}")
        self.answers += 1
        if self.epoch not in ("", said.epoch):
            logger.warning("the server's history is another one than before: all chats are read anew")
            self._changes.reset(HistoryChange(self.epoch, said.epoch))
            for chat in self.chats.values():
                chat.forget()
                self._changes.begun_again(chat)
        if (self.user_id, self.epoch) != (said.user_id, said.epoch):
            self.user_id, self.epoch = said.user_id, said.epoch
            self._changes.identity = (said.user_id, said.epoch)
        self.phase = Phase.LISTING
        self.wants_list = True

    def _arrived(self, message: Message, now_ms: int) -> None:
        """A live one, or our own behind its ack."""
        self._heard_since_list.add(message.chat_id)
        chat = self._chat(message.chat_id)
        before = chat.complete_to
        if chat.arrived(message, self._limits.ahead_max):
            self._keep(chat, message)
        self._moved(chat, before, now_ms)

    def _keep(self, chat: Chat, message: Message) -> None:
        self._changes.messages.append(message)
        entry = chat.entries.get(message.client_message_id)
        if entry is not None and message.sender_id == self.user_id:
            # It came there by an attempt whose answer we have not had, or not yet.
            is_other = message.content is not None and (message.content, message.content_type) != (
                entry.content, entry.content_type
            )  # fmt: skip
            sent = Sent(
                message.message_id, message.sequence, message.created_at, duplicate=True, content_mismatch=is_other
            )
            self._settle(chat, message.client_message_id, sent)

    def _moved(self, chat: Chat, before: int, now_ms: int) -> None:
        """Saves how far it is, tells of what can be shown, and sees to what is missing."""
        if chat.complete_to > before:
            self._changes.touch(chat)
            self._changes.updates.append(Arrived(chat.chat_id, chat.complete_to))
        self._syncing.look_at(chat, now_ms)

    def _acked(self, said: words.Acked, request_id: str | None, now_ms: int) -> None:
        chat = self._sending.acked(request_id or "")
        if chat is None:
            return  # said twice
        self.answers += 1
        entry = chat.entries.get(said.client_message_id)
        if entry is not None:
            sent = Sent(
                said.message_id, said.sequence, said.created_at, said.duplicate, said.content_mismatch
            )  # fmt: skip
            self._settle(chat, said.client_message_id, sent)
            if said.content_mismatch:  # it is another message: a sync brings it, if it is not here
                chat.heard_to = max(chat.heard_to, said.sequence)
                self._moved(chat, chat.complete_to, now_ms)
            else:
                self._arrived(own_message(entry, said, self.user_id), now_ms)
        self._send_some(chat, now_ms)

    def _batch(self, batch: words.Batch, request_id: str | None, now_ms: int) -> None:
        chat = self._syncing.requests.pop(request_id or "", None)
        if chat is None:
            return  # said twice
        self.answers += 1
        chat.sync_id = None
        if batch.cursor_ahead:
            self._forget(chat)
        else:
            before = chat.complete_to
            chat.is_member = True  # else it would not be told
            for message in chat.page(batch):
                self._keep(chat, message)
            self._changes.touch(chat)
            if chat.is_catching_up:
                self._syncing.want(chat.chat_id)
            self._moved(chat, before, now_ms)
            self._ack_soon(chat, now_ms)
            self._send_some(chat, now_ms)
        self._sync_some()

    def _forget(self, chat: Chat) -> None:
        """The server has less of this chat than we, in the same history."""
        logger.warning("the server has lost messages of %s: it is read anew", chat.chat_id)
        chat.forget()
        self._changes.reset_chat(chat, HistoryChange(self.epoch, self.epoch, chat.chat_id))
        self._syncing.want(chat.chat_id)

    def _delivered(self, said: words.Delivered) -> None:
        chat = self.chats.get(said.chat_id)
        if chat is not None and said.user_id == self.user_id:
            chat.acked_to = max(chat.acked_to, said.last_acked_sequence)
        self._changes.watermarks.append((said.chat_id, said.user_id, said.last_acked_sequence))
        self._changes.updates.append(Delivery(said.chat_id, said.user_id, said.last_acked_sequence))

    def _membership(self, said: words.MembershipFrame) -> None:
        if said.user_id == self.user_id:
            chat = self.chats.get(said.chat_id)
            is_new = chat is None or not chat.is_member or (chat.role != said.role and said.role is not None)
            if not said.present:
                self.left(said.chat_id)
                if said.chat_id in self.chats and self.chats[said.chat_id].entries:
                    self._syncing.want(said.chat_id)  # the server is to say that they cannot be sent
                    self._sync_some()
                return
            self.joined(said.chat_id, said.role)
            if not is_new:
                return
        elif said.present:
            self._changes.watermarks.append((said.chat_id, said.user_id, said.last_acked_sequence))
        else:
            self._changes.watermarks.append((said.chat_id, said.user_id, None))
        self._changes.updates.append(Membership(said.chat_id, said.user_id, said.present, said.role))

    # --- errors

    def _error(self, error: words.ServerError, request_id: str | None, now_ms: int) -> None:
        request = request_id or ""
        if error.code in _OF_THE_CONNECTION or self.phase is Phase.CONNECTING:
            raise ServerRefusedError(error.code, error.message, error.retry_after_ms)
        if request in self._sending.requests:
            self.answers += 1
            self._send_some(self._sending.refused(request, error, now_ms), now_ms)
        elif request in self._syncing.requests:
            self.answers += 1
            self._sync_refused(self._syncing.requests.pop(request), error, now_ms)
            self._sync_some()
        elif request and request == self._acking.last_request:
            # Such as one beyond the last message. What there really is the list says.
            logger.warning("an acknowledgement was refused: %s: %s", error.code, error.message)
            self.wants_list |= error.code == words.INVALID_ACK and self.phase is Phase.READY
        else:
            logger.info("about nothing that is under way: %s: %s", error.code, error.message)  # doubled on its way

    def _sync_refused(self, chat: Chat, error: words.ServerError, now_ms: int) -> None:
        chat.sync_id = None
        if error.code == words.NOT_A_MEMBER:
            self.left(chat.chat_id)
            for name in list(chat.entries):
                was_tried = chat.attempts.get(name, 0) > 0
                self._settle(chat, name, Refused(error.code, error.message, was_tried))
        elif error.code in words.TRANSIENT:
            self._syncing.at_ms[chat.chat_id] = now_ms + self._sending.pause_ms(chat, error.retry_after_ms)
        else:
            raise ServerRefusedError(error.code, error.message, error.retry_after_ms)

    # --- frames out

    def _sync_some(self) -> None:
        if self.phase is Phase.READY:
            self.outgoing += self._syncing.some(self.chats, self.epoch, self._next_id)

    def _send_some(self, chat: Chat, now_ms: int) -> None:
        if self.phase is Phase.READY:
            self.outgoing += self._sending.some(chat, now_ms + self._wall_ahead_ms, self._next_id)

    def _ack_soon(self, chat: Chat, now_ms: int) -> None:
        if self.phase is Phase.READY:
            self._acking.soon(chat, now_ms)

    def _ack(self, chat: Chat) -> None:
        if self.phase is Phase.READY:
            self.outgoing += self._acking.frames(chat, self._next_id)

    # --- other

    def _settle(self, chat: Chat, client_message_id: str, outcome: Outcome) -> None:
        entry, _ = chat.take_entry(client_message_id)
        if entry is not None:
            self._sending.hold_ups.went_through(chat.chat_id)
            self._changes.settled.append(Settled(entry, outcome))
            self._changes.updates.append(Progress(chat.chat_id, client_message_id, outcome))

    def _chat(self, chat_id: str, *, is_member: bool = True) -> Chat:
        chat = self.chats.get(chat_id)
        if chat is None:
            chat = self.chats[chat_id] = Chat(chat_id, is_member=is_member)
            self._changes.touch(chat)
        return chat

    def _next_id(self) -> str:
        self._number += 1
        return str(self._number)


def _due(times: dict[str, int], now_ms: int | None) -> list[str]:
    """Takes out those whose time has come; all without a time."""
    due = [name for name, at_ms in times.items() if now_ms is None or at_ms <= now_ms]
    for name in due:
        del times[name]
    return due
