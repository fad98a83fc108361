"""The client side of the Chat API, without I/O. Times are milliseconds of a monotonic clock.

Frames go in (`receive`). Frames to send (`outgoing`) and changes to save and report (`take_changes`) come out.
`connect` begins a connection and `disconnect` ends it, any number of times. The connector calls `tick` at `next_at_ms`.

On each connection the client first authenticates. The connector then requests the list of chats over HTTP
(`wants_list`, `apply_list`), and the client syncs the chats that have new messages. Once a chat is synced, the client
sends the chat's outbox. If an earlier attempt committed a message, the sync finds it before it is sent again.
"""

from collections.abc import Iterable
from typing import Final

from oncelog.client.chat import codec
from oncelog.client.chat.chat_state import ChangeSet, ChatState, QueuedMessage
from oncelog.client.chat.sender import ChatPhase, ChatSender, Work, logger
from oncelog.client.chat.values import (
    Arrived,
    Delivery,
    HistoryChange,
    ListedChat,
    Membership,
    Message,
    OutboxMessage,
    Sent,
)
from oncelog.errors import LostError, ServerRefusedError

WRONG_USER: Final = "WRONG_USER"
"""Client-side error code when the file belongs to a different user than the token."""
_CONNECTION_ERROR_CODES: Final = frozenset({codec.AUTH_FAILED, "SLOW_CONSUMER", "SERVER_STOPPING", "HISTORY_CHANGED"})


class ChatProtocol(ChatSender):
    """Protocol of one chat client."""

    def take_changes(self) -> ChangeSet:
        """Return the changes since the last call, to save and report."""
        changes, self.changes = self.changes, ChangeSet()
        return changes

    # --- the application's side

    def enqueue(self, entries: Iterable[OutboxMessage], now_ms: int, *, was_tried: bool = False) -> None:
        """Add outbox messages, in order. `was_tried` means that an earlier run of the client may have sent them."""
        for entry in entries:
            chat = self._get_or_create_chat(entry.chat_id, is_member=False)
            chat.queue[entry.client_message_id] = QueuedMessage(entry, attempts=int(was_tried))
            if self.phase is ChatPhase.READY:
                if not chat.is_synced and chat.sync_id is None:
                    self._schedule_sync(chat.chat_id)
                self._send_messages(chat, now_ms)
        self._send_syncs()

    def mark_received(self, chat_id: str, sequence: int, generation: int, now_ms: int) -> None:
        """Record that the application has received all messages up to a sequence in a generation of the history."""
        chat = self.chats.get(chat_id)
        if chat is not None and generation == chat.generation and sequence > chat.received_to:
            chat.received_to = sequence
            self.changes.save_chat(chat)
            self._schedule_ack(chat, now_ms)

    def join(self, chat_id: str, role: str | None = None) -> None:
        """Record that the user has become a member of a chat."""
        self._heard_since_list.add(chat_id)
        chat = self._get_or_create_chat(chat_id)
        chat.role = role or chat.role
        if not chat.is_member:
            chat.is_member = True
            self.changes.save_chat(chat)
        if self.phase is ChatPhase.READY and not chat.is_synced:
            self._schedule_sync(chat_id)
            self._send_syncs()

    def leave(self, chat_id: str) -> None:
        """Record that the user has left a chat. Its messages remain in the file."""
        self._heard_since_list.add(chat_id)
        chat = self.chats.get(chat_id)
        if chat is not None and chat.is_member:
            chat.is_member = chat.is_synced = False
            chat.role = None
            chat.is_catching_up, chat.acked_to = True, 0
            self.changes.save_chat(chat)
            self.changes.updates.append(Membership(chat_id, self.user_id, present=False))

    # --- the list of chats

    def start_list(self) -> None:
        """Record that the connector requests the list of chats, which may lack changes that arrive from now on."""
        self.wants_list = False
        self._heard_since_list.clear()
        self._acked_since_list.clear()

    def apply_list(self, chats: Iterable[ListedChat], now_ms: int) -> None:
        """Apply the list of all the user's chats."""
        if self.phase not in (ChatPhase.LISTING, ChatPhase.READY):
            return
        is_first, self.phase = self.phase is ChatPhase.LISTING, ChatPhase.READY
        if is_first:
            self._schedule_list(now_ms)
        seen: set[str] = set()
        for listed in chats:
            seen.add(listed.chat_id)
            self._apply_listed(listed, now_ms)
        for chat_id, chat in self.chats.items():
            if chat_id not in seen and chat_id not in self._heard_since_list:
                self.leave(chat_id)
            if chat_id not in seen and not chat.is_synced and (chat.is_member or chat.queue):
                self._schedule_sync(chat_id)  # the answer shows whether the user is a member now
        self._send_syncs()

    def _apply_listed(self, listed: ListedChat, now_ms: int) -> None:
        chat = self.chats.get(listed.chat_id)
        is_new = chat is None or not chat.is_member
        if chat is None or not chat.is_member:
            if listed.chat_id in self._heard_since_list:
                return  # the user has left it since the request
            chat = self._get_or_create_chat(listed.chat_id)
            chat.is_member = True
            self.changes.save_chat(chat)
        if is_new or chat.role not in (None, listed.role):
            self.changes.updates.append(Membership(listed.chat_id, self.user_id, present=True, role=listed.role))
        chat.role = listed.role
        if chat.chat_id not in self._acked_since_list:
            # The server's number may be lower: an acknowledgement was lost, or the user has left and rejoined.
            chat.acked_to = listed.last_acked_sequence
        chat.heard_to = max(chat.heard_to, listed.last_sequence)
        self._schedule_ack(chat, now_ms)
        if chat.sync_id is not None:
            return
        if not chat.is_synced and chat.fetched_to == chat.complete_to == listed.last_sequence and not chat.ahead:
            # The client has every message, and later ones arrive live.
            chat.is_synced, chat.is_catching_up = True, False
            self._send_messages(chat, now_ms)
        elif not chat.is_synced or chat.is_gapped or listed.last_sequence < chat.complete_to:
            self._schedule_sync(chat.chat_id)

    # --- frames in

    def receive(self, data: str | bytes, now_ms: int) -> None:
        """Handle a text frame. Raises ProtocolError, ServerRefusedError or LostError if the connection must close."""
        frame, request_id = codec.decode_frame(data)
        is_admitted = self.phase in (ChatPhase.LISTING, ChatPhase.READY)
        match frame:
            case codec.Connected():
                self._handle_connected(frame)
            case codec.ServerError():
                self._handle_error(frame, request_id or "", now_ms)
            case codec.ClosingFrame():
                self.reconnect_ms = frame.reconnect_delay_ms
                raise LostError(f"the server is closing the connection: {frame.reason}")
            case Message() if is_admitted:
                self._handle_message(frame, now_ms)
            case codec.SendAck() if is_admitted:
                self._handle_ack(frame, request_id or "", now_ms)
            case codec.MessageBatch() if is_admitted:
                self._handle_batch(frame, request_id or "", now_ms)
            case codec.DeliveryFrame() if is_admitted:
                self._handle_delivery(frame)
            case codec.MembershipFrame() if is_admitted:
                self._handle_membership(frame)

    def _handle_connected(self, frame: codec.Connected) -> None:
        if self.phase is not ChatPhase.CONNECTING:
            return  # duplicate
        if self.user_id not in ("", frame.user_id):
            raise ServerRefusedError(
                WRONG_USER, f"the file belongs to {self.user_id!r}, but the token belongs to {frame.user_id!r}"
            )
        self.answer_count += 1
        if self.epoch not in ("", frame.epoch):
            logger.warning("the server's history has changed: all chats are loaded again")
            self.changes.updates.append(HistoryChange(self.epoch, frame.epoch))
            for chat in self.chats.values():
                self.changes.reset_chat(chat)
        if (self.user_id, self.epoch) != (frame.user_id, frame.epoch):
            self.user_id, self.epoch = frame.user_id, frame.epoch
            self.changes.user_and_epoch = (frame.user_id, frame.epoch)
        self.phase = ChatPhase.LISTING
        self.wants_list = True

    def _handle_message(self, message: Message, now_ms: int) -> None:
        """Handle a live message, or one of the user's messages that the server has acknowledged."""
        self._heard_since_list.add(message.chat_id)
        chat = self._get_or_create_chat(message.chat_id)
        before = chat.complete_to
        if chat.add_message(message, self._limits.ahead_max):
            self._save_message(chat, message)
        self._report_progress(chat, before, now_ms)

    def _save_message(self, chat: ChatState, message: Message) -> None:
        self.changes.messages.append(message)
        queued = chat.queue.get(message.client_message_id)
        if queued is not None and message.sender_id == self.user_id:
            # An earlier attempt committed it, and the answer was lost or has not arrived yet.
            is_different = message.content is not None and queued.entry.equality_key != (
                message.content,
                message.content_type,
            )
            sent = Sent(
                message.message_id, message.sequence, message.created_at, duplicate=True, content_mismatch=is_different
            )
            self._settle(chat, message.client_message_id, sent)

    def _report_progress(self, chat: ChatState, before: int, now_ms: int) -> None:
        """If `complete_to` has risen, save and report it. Schedule a sync if messages are missing."""
        if chat.complete_to > before:
            self.changes.save_chat(chat)
            self.changes.updates.append(Arrived(chat.chat_id, chat.complete_to))
        self._check_gap(chat, now_ms)

    def _handle_ack(self, frame: codec.SendAck, request_id: str, now_ms: int) -> None:
        chat, _ = self._sends.pop(request_id, (None, ""))
        if chat is None:
            return  # duplicate
        self.answer_count += 1
        self._pauses.pop(chat.chat_id, None)
        queued = chat.queue.get(frame.client_message_id)
        if queued is not None:
            sent = Sent(frame.message_id, frame.sequence, frame.created_at, frame.duplicate, frame.content_mismatch)
            self._settle(chat, frame.client_message_id, sent)
            if frame.content_mismatch:  # a different message has this id; a sync fetches it if this client lacks it
                chat.heard_to = max(chat.heard_to, frame.sequence)
                self._report_progress(chat, chat.complete_to, now_ms)
            else:
                self._handle_message(codec.to_own_message(queued.entry, frame, self.user_id), now_ms)
        self._send_messages(chat, now_ms)

    def _handle_batch(self, batch: codec.MessageBatch, request_id: str, now_ms: int) -> None:
        chat = self._syncs.pop(request_id, None)
        if chat is None:
            return  # duplicate
        self.answer_count += 1
        chat.sync_id = None
        if batch.cursor_ahead:
            self._reset_chat(chat)
        else:
            before = chat.complete_to
            chat.is_member = True  # only members get an answer
            for message in chat.apply_page(batch):
                self._save_message(chat, message)
            self.changes.save_chat(chat)
            if chat.is_catching_up:
                self._schedule_sync(chat.chat_id)
            self._report_progress(chat, before, now_ms)
            self._schedule_ack(chat, now_ms)
            self._send_messages(chat, now_ms)
        self._send_syncs()

    def _reset_chat(self, chat: ChatState) -> None:
        """Reload a chat from the start, because the server has lost some of its messages under the same epoch."""
        logger.warning("the server has lost messages of the chat %s: the client loads the chat again", chat.chat_id)
        self.changes.updates.append(HistoryChange(self.epoch, self.epoch, chat.chat_id))
        self.changes.reset_chat(chat)
        self._schedule_sync(chat.chat_id)

    def _handle_delivery(self, frame: codec.DeliveryFrame) -> None:
        chat = self.chats.get(frame.chat_id)
        if chat is not None and frame.user_id == self.user_id:
            chat.acked_to = max(chat.acked_to, frame.last_acked_sequence)
        self.changes.watermarks.append((frame.chat_id, frame.user_id, frame.last_acked_sequence))
        self.changes.updates.append(Delivery(frame.chat_id, frame.user_id, frame.last_acked_sequence))

    def _handle_membership(self, frame: codec.MembershipFrame) -> None:
        if frame.user_id == self.user_id:
            chat = self.chats.get(frame.chat_id)
            is_new = chat is None or not chat.is_member or (chat.role != frame.role and frame.role is not None)
            if not frame.present:
                self.leave(frame.chat_id)
                if frame.chat_id in self.chats and self.chats[frame.chat_id].queue:
                    # The server will refuse the sync, and the client will then refuse the queued messages.
                    self._schedule_sync(frame.chat_id)
                    self._send_syncs()
                return
            self.join(frame.chat_id, frame.role)
            if not is_new:
                return
        else:
            acked = frame.last_acked_sequence if frame.present else None
            self.changes.watermarks.append((frame.chat_id, frame.user_id, acked))
        self.changes.updates.append(Membership(frame.chat_id, frame.user_id, frame.present, frame.role))

    # --- errors

    def _handle_error(self, error: codec.ServerError, request_id: str, now_ms: int) -> None:
        if error.code in _CONNECTION_ERROR_CODES or self.phase is ChatPhase.CONNECTING:
            raise ServerRefusedError(error.code, error.message, error.retry_after_ms)
        if request_id in self._sends:
            self.answer_count += 1
            self._handle_refusal(request_id, error, now_ms)
        elif request_id in self._syncs:
            self.answer_count += 1
            self._handle_sync_error(self._syncs.pop(request_id), error, now_ms)
            self._send_syncs()
        elif request_id and request_id == self._last_ack_id:
            # For example, its sequence is after the last message. The list of chats contains the last sequence.
            logger.warning("an acknowledgement was refused: %s: %s", error.code, error.message)
            self.wants_list |= error.code == codec.INVALID_ACK and self.phase is ChatPhase.READY
        else:
            # The network duplicated a request.
            logger.info("error without a request: %s: %s", error.code, error.message)

    def _handle_sync_error(self, chat: ChatState, error: codec.ServerError, now_ms: int) -> None:
        chat.sync_id = None
        if error.code == codec.NOT_A_MEMBER:
            self.leave(chat.chat_id)
            for name in list(chat.queue):
                self._refuse(chat, name, error.code, error.message)
        elif error.code in codec.TRANSIENT:
            self._due_ms[Work.SYNC][chat.chat_id] = now_ms + self._next_pause_ms(chat, error.retry_after_ms)
        else:
            raise ServerRefusedError(error.code, error.message, error.retry_after_ms)

    # --- other

    def _get_or_create_chat(self, chat_id: str, *, is_member: bool = True) -> ChatState:
        chat = self.chats.get(chat_id)
        if chat is None:
            chat = self.chats[chat_id] = ChatState(chat_id, is_member=is_member)
            self.changes.save_chat(chat)
        return chat
