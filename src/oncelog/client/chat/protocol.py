"""The client's side of the Chat API, without I/O. Times are given to it, in milliseconds of a clock that never jumps.

Frames go in (`receive`), frames to be sent come out (`outgoing`), and so does what is to be kept and told
(`take_changes`). `connect` begins a connection and `disconnect` ends it, any number of times. `tick` is to be called at
`next_at_ms`.

Over each connection: who we are; then the list of our chats, which whoever drives this asks for over HTTP
(`wants_list`, `apply_list`); then all chats in which there is something new are caught up with; and in each of them,
behind that, what lies in the outbox is sent. So an attempt of before that had arrived is found before it is made again.
"""

import logging
import random
from collections.abc import Iterable
from enum import Enum
from typing import Final

from oncelog.client.chat import codec
from oncelog.client.chat.acknowledger import Acknowledger
from oncelog.client.chat.chat_state import ChangeSet, ChatState
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.sender import MessageSender, to_own_message
from oncelog.client.chat.sync_scheduler import SyncScheduler
from oncelog.client.chat.values import (
    Arrived,
    Delivery,
    HistoryChange,
    ListedChat,
    Member,
    Membership,
    Message,
    OutboxMessage,
    Outcome,
    Progress,
    Refused,
    Sent,
    SettledMessage,
)
from oncelog.client.runtime.websocket import CLOSE_TOO_LARGE
from oncelog.errors import LostError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client.chat")

WRONG_USER: Final = "WRONG_USER"
"""The file is another user's. No server says so."""
_CONNECTION_ERROR_CODES: Final = frozenset({codec.AUTH_FAILED, "SLOW_CONSUMER", "SERVER_STOPPING", "HISTORY_CHANGED"})


class ChatPhase(Enum):
    """Of a connection."""

    NONE = "none"
    CONNECTING = "connecting"
    LISTING = "listing"
    READY = "ready"


class ChatProtocol:
    """One client. Never used by two threads at a time."""

    def __init__(
        self,
        device_id: str,
        user_id: str,
        epoch: str,
        chats: Iterable[ChatState],
        limits: ChatLimits,
        random_source: random.Random,
    ) -> None:
        self.phase = ChatPhase.NONE
        self.user_id = user_id
        """As the server has said; empty before the first connection."""
        self.epoch = epoch
        self.chats = {chat.chat_id: chat for chat in chats}
        self.outgoing: list[bytes] = []
        """Frames to be sent, in order. Whoever sends them empties the list."""
        self.wants_list = False
        """Our chats are to be asked for."""
        self.answer_count = 0
        """How many awaited answers have come: while it stands still and `is_waiting`, the server is silent."""
        self.reconnect_ms = 0
        """A server that has said that it closes wants us to come back after so long."""
        self._device_id = device_id
        self._limits = limits
        self._changes = ChangeSet()
        self._wall_ahead_ms = 0
        self._sync_scheduler = SyncScheduler(limits)
        self._sender = MessageSender(limits, random_source, self._settle)
        self._acknowledger = Acknowledger(limits.ack_wait_ms)
        self._check_at_ms = 0
        self._heard_since_list: set[str] = set()
        self._last_request_number = 0

    # --- the connection

    def connect(self, token: str | None, wall_ahead_ms: int) -> None:
        """A connection has been made: says who we are. The wall clock is so far ahead of the one that is given."""
        self.disconnect()
        self.phase = ChatPhase.CONNECTING
        self._wall_ahead_ms = wall_ahead_ms
        self.outgoing.append(codec.encode_connect(token, self._device_id))

    def disconnect(self, close_code: int | None = None) -> None:
        """End the connection. Unanswered messages are sent again over the next one, under the same ids.

        A message that is too large for the server is refused.
        """
        if close_code == CLOSE_TOO_LARGE:
            self._sender.refuse_largest()
        self.phase = ChatPhase.NONE
        self.wants_list = False
        self.reconnect_ms = 0
        self.outgoing.clear()
        for chat in self.chats.values():
            chat.disconnect()
        self._sync_scheduler.disconnect()
        self._sender.disconnect()
        self._acknowledger.disconnect()
        self._heard_since_list.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether the server owes an answer."""
        return self.phase is ChatPhase.CONNECTING or bool(self._sync_scheduler.requests) or bool(self._sender.requests)

    @property
    def is_live(self) -> bool:
        """Everything that we have heard of has arrived."""
        return self.phase is ChatPhase.READY and self._sync_scheduler.is_idle

    @property
    def outbox_count(self) -> int:
        """Messages without an outcome."""
        return sum(len(chat.entries) for chat in self.chats.values())

    @property
    def block_reason(self) -> str | None:
        """What the server says of messages that it does not take for now; None if there are none."""
        return self._sender.blocked_writes.last_error

    def take_changes(self) -> ChangeSet:
        """What there is to be kept and told since the last time."""
        changes, self._changes = self._changes, ChangeSet()
        return changes

    @property
    def message_count(self) -> int:
        """How many there are among them."""
        return len(self._changes.messages)

    @property
    def has_changes(self) -> bool:
        """Whether there is something."""
        return bool(self._changes)

    # --- the application's side

    def enqueue(self, entries: Iterable[OutboxMessage], now_ms: int, *, was_tried: bool = False) -> None:
        """Messages that are in the outbox, in its order. Those of an earlier run may have been sent."""
        for entry in entries:
            chat = self._get_or_create_chat(entry.chat_id, is_member=False)
            chat.entries[entry.client_message_id] = entry
            if was_tried:
                chat.attempts[entry.client_message_id] = 1
            if self.phase is ChatPhase.READY:
                if not chat.is_synced and chat.sync_id is None:
                    self._sync_scheduler.schedule(chat.chat_id)
                self._send_messages(chat, now_ms)
        self._send_syncs()

    def mark_received(self, chat_id: str, sequence: int, generation: int, now_ms: int) -> None:
        """The application has received everything up to here, of the history with this number."""
        chat = self.chats.get(chat_id)
        if chat is not None and generation == chat.generation and sequence > chat.received_to:
            chat.received_to = sequence
            self._changes.save_chat(chat)
            self._schedule_ack(chat, now_ms)

    def join(self, chat_id: str, role: str | None = None) -> None:
        """We are in this chat: the application has made it, or the server says so."""
        self._heard_since_list.add(chat_id)
        chat = self._get_or_create_chat(chat_id)
        chat.role = role or chat.role
        if not chat.is_member:
            chat.is_member = True
            self._changes.save_chat(chat)
        if self.phase is ChatPhase.READY and not chat.is_synced:
            self._sync_scheduler.schedule(chat_id)
            self._send_syncs()

    def leave(self, chat_id: str) -> None:
        """We are not in this chat any more. What has arrived of it stays."""
        self._heard_since_list.add(chat_id)
        chat = self.chats.get(chat_id)
        if chat is not None and chat.is_member:
            chat.is_member = chat.is_synced = False
            chat.role = None
            chat.is_catching_up, chat.acked_to = True, 0
            self._changes.save_chat(chat)
            self._changes.updates.append(Membership(chat_id, self.user_id, present=False))

    def set_members(self, chat_id: str, members: tuple[Member, ...]) -> None:
        """All members of a chat, as the server has said over HTTP."""
        self._changes.members[chat_id] = members

    # --- time

    @property
    def next_at_ms(self) -> int | None:
        """When `tick` is to be called; None for never."""
        if self.phase is not ChatPhase.READY:
            return None
        times = [
            *self._sync_scheduler.due_ms.values(),
            *self._sender.due_ms.values(),
            *self._acknowledger.due_ms.values(),
            self._check_at_ms,
        ]
        return min(times)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        if self.phase is not ChatPhase.READY:
            return
        for chat_id in _take_due(self._sync_scheduler.due_ms, now_ms):
            self._sync_scheduler.schedule(chat_id)
        self._send_syncs()
        for chat_id in _take_due(self._sender.due_ms, now_ms):
            self._send_messages(self.chats[chat_id], now_ms)
        for chat_id in _take_due(self._acknowledger.due_ms, now_ms):
            self._send_ack(self.chats[chat_id])
        if now_ms >= self._check_at_ms:
            self._check_at_ms = now_ms + self._limits.check_ms
            self.wants_list = True

    def flush(self) -> None:
        """The client is being closed: what is to be acknowledged is said now."""
        for chat_id in _take_due(self._acknowledger.due_ms, None):
            self._send_ack(self.chats[chat_id])

    # --- the list of chats

    def start_list(self) -> None:
        """The list is on its way: what is heard from now on may not be in it."""
        self.wants_list = False
        self._heard_since_list.clear()
        self._acknowledger.start_list()

    def apply_list(self, chats: Iterable[ListedChat], now_ms: int) -> None:
        """All chats that we are in, by the server's word."""
        if self.phase not in (ChatPhase.LISTING, ChatPhase.READY):
            return
        is_first, self.phase = self.phase is ChatPhase.LISTING, ChatPhase.READY
        if is_first:
            self._check_at_ms = now_ms + self._limits.check_ms
        seen: set[str] = set()
        for listed in chats:
            seen.add(listed.chat_id)
            self._apply_listed(listed, now_ms)
        for chat_id, chat in self.chats.items():
            if chat_id not in seen and chat_id not in self._heard_since_list:
                self.leave(chat_id)
            if chat_id not in seen and not chat.is_synced and (chat.is_member or chat.entries):
                self._sync_scheduler.schedule(chat_id)  # the server is to say itself that we may not, or may by now
        self._send_syncs()

    def _apply_listed(self, listed: ListedChat, now_ms: int) -> None:
        chat = self.chats.get(listed.chat_id)
        if chat is None or not chat.is_member:
            if listed.chat_id in self._heard_since_list:
                return  # it was left meanwhile
            chat = self._get_or_create_chat(listed.chat_id)
            chat.is_member = True
            chat.role = listed.role
            self._changes.save_chat(chat)
            self._changes.updates.append(Membership(listed.chat_id, self.user_id, present=True, role=listed.role))
        elif chat.role != listed.role:
            is_change = chat.role is not None
            chat.role = listed.role
            if is_change:
                self._changes.updates.append(Membership(listed.chat_id, self.user_id, present=True, role=listed.role))
        self._acknowledger.apply_listed(chat, listed.last_acked_sequence)
        chat.heard_to = max(chat.heard_to, listed.last_sequence)
        self._schedule_ack(chat, now_ms)
        if chat.sync_id is not None:
            return
        if not chat.is_synced and chat.fetched_to == chat.complete_to == listed.last_sequence and not chat.ahead:
            # There is nothing that we do not have: what comes from here on is live.
            chat.is_synced, chat.is_catching_up = True, False
            self._send_messages(chat, now_ms)
        elif not chat.is_synced or chat.is_gapped or listed.last_sequence < chat.complete_to:
            self._sync_scheduler.schedule(chat.chat_id)

    # --- frames in

    def receive(self, data: str | bytes, now_ms: int) -> None:
        """A text frame. Raises ProtocolError, or ServerRefusedError or LostError where the connection is at its end."""
        frame, request_id = codec.decode_frame(data)
        if isinstance(frame, codec.Connected):
            self._handle_connected(frame)
        elif isinstance(frame, codec.ServerError):
            self._handle_error(frame, request_id, now_ms)
        elif isinstance(frame, codec.ClosingFrame):
            self.reconnect_ms = frame.reconnect_delay_ms
            raise LostError(f"the server closes the connection: {frame.reason}")
        elif self.phase in (ChatPhase.NONE, ChatPhase.CONNECTING):
            return
        elif isinstance(frame, Message):
            self._handle_message(frame, now_ms)
        elif isinstance(frame, codec.SendAck):
            self._handle_ack(frame, request_id, now_ms)
        elif isinstance(frame, codec.MessageBatch):
            self._handle_batch(frame, request_id, now_ms)
        elif isinstance(frame, codec.DeliveryFrame):
            self._handle_delivery(frame)
        elif isinstance(frame, codec.MembershipFrame):
            self._handle_membership(frame)

    def _handle_connected(self, frame: codec.Connected) -> None:
        if self.phase is not ChatPhase.CONNECTING:
            return  # said twice
        if self.user_id not in ("", frame.user_id):
            raise ServerRefusedError(
                WRONG_USER, f"the file belongs to {self.user_id!r}, the token to {frame.user_id!r}"
            )
        self.answer_count += 1
        if self.epoch not in ("", frame.epoch):
            logger.warning("the server's history is another one than before: all chats are read anew")
            self._changes.reset(HistoryChange(self.epoch, frame.epoch))
            for chat in self.chats.values():
                chat.reset()
                self._changes.restart_chat(chat)
        if (self.user_id, self.epoch) != (frame.user_id, frame.epoch):
            self.user_id, self.epoch = frame.user_id, frame.epoch
            self._changes.user_and_epoch = (frame.user_id, frame.epoch)
        self.phase = ChatPhase.LISTING
        self.wants_list = True

    def _handle_message(self, message: Message, now_ms: int) -> None:
        """A live one, or our own behind its ack."""
        self._heard_since_list.add(message.chat_id)
        chat = self._get_or_create_chat(message.chat_id)
        before = chat.complete_to
        if chat.add_message(message, self._limits.ahead_max):
            self._save_message(chat, message)
        self._report_progress(chat, before, now_ms)

    def _save_message(self, chat: ChatState, message: Message) -> None:
        self._changes.messages.append(message)
        entry = chat.entries.get(message.client_message_id)
        if entry is not None and message.sender_id == self.user_id:
            # It came there by an attempt whose answer we have not had, or not yet.
            is_different = message.content is not None and (message.content, message.content_type) != (
                entry.content, entry.content_type
            )  # fmt: skip
            sent = Sent(
                message.message_id, message.sequence, message.created_at, duplicate=True, content_mismatch=is_different
            )
            self._settle(chat, message.client_message_id, sent)

    def _report_progress(self, chat: ChatState, before: int, now_ms: int) -> None:
        """Saves how far it is, tells of what can be shown, and sees to what is missing."""
        if chat.complete_to > before:
            self._changes.save_chat(chat)
            self._changes.updates.append(Arrived(chat.chat_id, chat.complete_to))
        self._sync_scheduler.check_gap(chat, now_ms)

    def _handle_ack(self, frame: codec.SendAck, request_id: str | None, now_ms: int) -> None:
        chat = self._sender.finish_request(request_id or "")
        if chat is None:
            return  # said twice
        self.answer_count += 1
        entry = chat.entries.get(frame.client_message_id)
        if entry is not None:
            sent = Sent(
                frame.message_id, frame.sequence, frame.created_at, frame.duplicate, frame.content_mismatch
            )  # fmt: skip
            self._settle(chat, frame.client_message_id, sent)
            if frame.content_mismatch:  # it is another message: a sync brings it, if it is not here
                chat.heard_to = max(chat.heard_to, frame.sequence)
                self._report_progress(chat, chat.complete_to, now_ms)
            else:
                self._handle_message(to_own_message(entry, frame, self.user_id), now_ms)
        self._send_messages(chat, now_ms)

    def _handle_batch(self, batch: codec.MessageBatch, request_id: str | None, now_ms: int) -> None:
        chat = self._sync_scheduler.requests.pop(request_id or "", None)
        if chat is None:
            return  # said twice
        self.answer_count += 1
        chat.sync_id = None
        if batch.cursor_ahead:
            self._reset_chat(chat)
        else:
            before = chat.complete_to
            chat.is_member = True  # else it would not be told
            for message in chat.apply_page(batch):
                self._save_message(chat, message)
            self._changes.save_chat(chat)
            if chat.is_catching_up:
                self._sync_scheduler.schedule(chat.chat_id)
            self._report_progress(chat, before, now_ms)
            self._schedule_ack(chat, now_ms)
            self._send_messages(chat, now_ms)
        self._send_syncs()

    def _reset_chat(self, chat: ChatState) -> None:
        """The server has less of this chat than we, in the same history."""
        logger.warning("the server has lost messages of %s: it is read anew", chat.chat_id)
        chat.reset()
        self._changes.reset_chat(chat, HistoryChange(self.epoch, self.epoch, chat.chat_id))
        self._sync_scheduler.schedule(chat.chat_id)

    def _handle_delivery(self, frame: codec.DeliveryFrame) -> None:
        chat = self.chats.get(frame.chat_id)
        if chat is not None and frame.user_id == self.user_id:
            chat.acked_to = max(chat.acked_to, frame.last_acked_sequence)
        self._changes.watermarks.append((frame.chat_id, frame.user_id, frame.last_acked_sequence))
        self._changes.updates.append(Delivery(frame.chat_id, frame.user_id, frame.last_acked_sequence))

    def _handle_membership(self, frame: codec.MembershipFrame) -> None:
        if frame.user_id == self.user_id:
            chat = self.chats.get(frame.chat_id)
            is_new = chat is None or not chat.is_member or (chat.role != frame.role and frame.role is not None)
            if not frame.present:
                self.leave(frame.chat_id)
                if frame.chat_id in self.chats and self.chats[frame.chat_id].entries:
                    self._sync_scheduler.schedule(frame.chat_id)  # the server is to say that they cannot be sent
                    self._send_syncs()
                return
            self.join(frame.chat_id, frame.role)
            if not is_new:
                return
        elif frame.present:
            self._changes.watermarks.append((frame.chat_id, frame.user_id, frame.last_acked_sequence))
        else:
            self._changes.watermarks.append((frame.chat_id, frame.user_id, None))
        self._changes.updates.append(Membership(frame.chat_id, frame.user_id, frame.present, frame.role))

    # --- errors

    def _handle_error(self, error: codec.ServerError, request_id: str | None, now_ms: int) -> None:
        request = request_id or ""
        if error.code in _CONNECTION_ERROR_CODES or self.phase is ChatPhase.CONNECTING:
            raise ServerRefusedError(error.code, error.message, error.retry_after_ms)
        if request in self._sender.requests:
            self.answer_count += 1
            self._send_messages(self._sender.handle_refusal(request, error, now_ms), now_ms)
        elif request in self._sync_scheduler.requests:
            self.answer_count += 1
            self._handle_sync_error(self._sync_scheduler.requests.pop(request), error, now_ms)
            self._send_syncs()
        elif request and request == self._acknowledger.last_request_id:
            # Such as one beyond the last message. What there really is the list says.
            logger.warning("an acknowledgement was refused: %s: %s", error.code, error.message)
            self.wants_list |= error.code == codec.INVALID_ACK and self.phase is ChatPhase.READY
        else:
            logger.info("about nothing that is under way: %s: %s", error.code, error.message)  # doubled on its way

    def _handle_sync_error(self, chat: ChatState, error: codec.ServerError, now_ms: int) -> None:
        chat.sync_id = None
        if error.code == codec.NOT_A_MEMBER:
            self.leave(chat.chat_id)
            for name in list(chat.entries):
                was_tried = chat.attempts.get(name, 0) > 0
                self._settle(chat, name, Refused(error.code, error.message, was_tried))
        elif error.code in codec.TRANSIENT:
            self._sync_scheduler.due_ms[chat.chat_id] = now_ms + self._sender.next_pause_ms(chat, error.retry_after_ms)
        else:
            raise ServerRefusedError(error.code, error.message, error.retry_after_ms)

    # --- frames out

    def _send_syncs(self) -> None:
        if self.phase is ChatPhase.READY:
            self.outgoing += self._sync_scheduler.take_frames(self.chats, self.epoch, self._next_id)

    def _send_messages(self, chat: ChatState, now_ms: int) -> None:
        if self.phase is ChatPhase.READY:
            self.outgoing += self._sender.take_frames(chat, now_ms + self._wall_ahead_ms, self._next_id)

    def _schedule_ack(self, chat: ChatState, now_ms: int) -> None:
        if self.phase is ChatPhase.READY:
            self._acknowledger.schedule(chat, now_ms)

    def _send_ack(self, chat: ChatState) -> None:
        if self.phase is ChatPhase.READY:
            self.outgoing += self._acknowledger.take_frames(chat, self._next_id)

    # --- other

    def _settle(self, chat: ChatState, client_message_id: str, outcome: Outcome) -> None:
        entry, _ = chat.take_entry(client_message_id)
        if entry is not None:
            self._sender.blocked_writes.unblock(chat.chat_id)
            self._changes.settled.append(SettledMessage(entry, outcome))
            self._changes.updates.append(Progress(chat.chat_id, client_message_id, outcome))

    def _get_or_create_chat(self, chat_id: str, *, is_member: bool = True) -> ChatState:
        chat = self.chats.get(chat_id)
        if chat is None:
            chat = self.chats[chat_id] = ChatState(chat_id, is_member=is_member)
            self._changes.save_chat(chat)
        return chat

    def _next_id(self) -> str:
        self._last_request_number += 1
        return str(self._last_request_number)


def _take_due(times: dict[str, int], now_ms: int | None) -> list[str]:
    """Takes out those whose time has come; all without a time."""
    due = [name for name, at_ms in times.items() if now_ms is None or at_ms <= now_ms]
    for name in due:
        del times[name]
    return due
