"""Decides when a chat client sends syncs, messages and acknowledgements. The base class of the protocol.

The client sends a chat's messages in order once the chat is synced. It syncs a few chats at a time. It briefly collects
acknowledgements before sending them, and repeats any that the server may not have received.
"""

import logging
import random
from collections.abc import Iterable
from enum import Enum
from operator import itemgetter
from typing import Final

from oncelog.client.chat import codec
from oncelog.client.chat.chat_state import ChangeSet, ChatState
from oncelog.client.chat.values import EXPIRED, ChatLimits, Outcome, Progress, Refused, SettledMessage
from oncelog.client.runtime.backoff import Pauses, RetryPause
from oncelog.client.runtime.http import CLOSE_TOO_LARGE
from oncelog.client.runtime.protocol import BaseProtocol

logger: Final = logging.getLogger("oncelog.client.chat")


class ChatPhase(Enum):
    """Phase of a connection."""

    NONE = "none"
    CONNECTING = "connecting"
    LISTING = "listing"
    READY = "ready"


class Work(Enum):
    """Kinds of work that `tick` does."""

    SYNC = "sync"
    SEND = "send"
    ACK = "ack"
    LIST = "list"


class ChatSender(BaseProtocol):
    """Protocol state of one chat client, and the frames that it sends."""

    def __init__(
        self,
        device_id: str,
        user_id: str,
        epoch: str,
        chats: Iterable[ChatState],
        limits: ChatLimits,
        random_source: random.Random,
    ) -> None:
        super().__init__(logger)
        self.phase = ChatPhase.NONE
        self.user_id = user_id
        """User id that the server has reported. Empty before the first connection."""
        self.epoch = epoch
        self.chats = {chat.chat_id: chat for chat in chats}
        self.wants_list = False
        """Whether the connector has to request the list of chats over HTTP."""
        self.changes = ChangeSet()
        """Changes to save and report."""
        self._device_id = device_id
        self._limits = limits
        self._random = random_source
        self._wall_ahead_ms = 0
        self._syncs: dict[str, ChatState] = {}
        """Unanswered syncs: the chat, by request id."""
        self._sends: dict[str, tuple[ChatState, str]] = {}
        """Unanswered messages: the chat and the message id, by request id."""
        self._due_ms: dict[Work, dict[str, int]] = {work: {} for work in Work}
        """Times at which work is due, by chat. While a chat has a SEND time, the client sends none of its messages."""
        self._sync_queue: dict[str, None] = {}
        self._last_ack_id = ""
        """Request id of the last acknowledgement, which the server answers only to refuse it."""
        self._heard_since_list: set[str] = set()
        """Chats with changes that the requested list may not contain."""
        self._acked_since_list: set[str] = set()
        """Chats with acknowledgements that the requested list may not contain."""
        self._pauses: dict[str, Pauses] = {}

    # --- the connection

    def connect(self, token: str | None, wall_ahead_ms: int) -> None:
        """Begin a connection. The wall clock is `wall_ahead_ms` ahead of the monotonic clock."""
        self.disconnect()
        self.phase = ChatPhase.CONNECTING
        self._wall_ahead_ms = wall_ahead_ms
        self.outgoing.append(codec.encode_connect(token, self._device_id))

    def disconnect(self, close_code: int | None = None) -> None:
        """Record the end of the connection. The next one resends unanswered messages under the same ids.

        If the server closed the connection because a frame was too large, refuse the largest message.
        """
        if close_code == CLOSE_TOO_LARGE:
            self._refuse_largest()
        self.phase = ChatPhase.NONE
        self.wants_list = False
        self._last_ack_id = ""
        for chat in self.chats.values():
            chat.disconnect()
        self.outgoing.clear()
        self._heard_since_list.clear()
        self._syncs.clear()
        self._sends.clear()
        self._sync_queue.clear()
        for times in self._due_ms.values():
            times.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether the client is waiting for an answer from the server."""
        return self.phase is ChatPhase.CONNECTING or bool(self._syncs or self._sends)

    @property
    def is_submitting(self) -> bool:
        """Whether the server has admitted the client, and the connection is ready for writes."""
        return self.phase is ChatPhase.READY

    @property
    def is_live(self) -> bool:
        """Whether every message that the server has reported has arrived."""
        is_syncing = self._syncs or self._sync_queue or self._due_ms[Work.SYNC]
        return self.phase is ChatPhase.READY and not is_syncing

    # --- time

    @property
    def next_at_ms(self) -> int | None:
        """When `tick` must be called next, or None if no work is scheduled."""
        if self.phase is not ChatPhase.READY:
            return None
        return min((at_ms for times in self._due_ms.values() for at_ms in times.values()), default=None)

    def tick(self, now_ms: int) -> None:
        """Do the work that is due."""
        if self.phase is not ChatPhase.READY:
            return
        for work in Work:
            for chat_id in self._take_due(work, now_ms):
                match work:
                    case Work.SYNC:
                        self._schedule_sync(chat_id)
                    case Work.SEND:
                        self._send_messages(self.chats[chat_id], now_ms)
                    case Work.ACK:
                        self._send_ack(self.chats[chat_id])
                    case Work.LIST:
                        self._schedule_list(now_ms)
                        self.wants_list = True
            self._send_syncs()

    def flush(self) -> None:
        """Send the collected acknowledgements before the client is closed."""
        for chat_id in self._take_due(Work.ACK, None):
            self._send_ack(self.chats[chat_id])

    def _take_due(self, work: Work, now_ms: int | None) -> list[str]:
        """Remove the times up to `now_ms` (None: all times), and return their chats."""
        times = self._due_ms[work]
        due = [chat_id for chat_id, at_ms in times.items() if now_ms is None or at_ms <= now_ms]
        for chat_id in due:
            del times[chat_id]
        return due

    def _schedule_list(self, now_ms: int) -> None:
        self._due_ms[Work.LIST][""] = now_ms + self._limits.check_ms

    # --- syncs

    def _schedule_sync(self, chat_id: str) -> None:
        self._sync_queue[chat_id] = None

    def _check_gap(self, chat: ChatState, now_ms: int) -> None:
        """Schedule a sync if a message before the newest one is missing. The delay gives the message time to arrive."""
        if chat.is_synced and not chat.is_gapped:
            self._due_ms[Work.SYNC].pop(chat.chat_id, None)
        elif chat.sync_id is None and chat.chat_id not in self._sync_queue:
            # Chats and memberships that are new to the client also need a sync.
            self._due_ms[Work.SYNC].setdefault(chat.chat_id, now_ms + self._limits.gap_wait_ms)

    def _send_syncs(self) -> None:
        while self.phase is ChatPhase.READY and self._sync_queue and len(self._syncs) < self._limits.syncs_max:
            chat = self.chats[next(iter(self._sync_queue))]
            del self._sync_queue[chat.chat_id]
            self._due_ms[Work.SYNC].pop(chat.chat_id, None)
            if chat.sync_id is None:
                limit = self._limits.page_messages
                chat.sync_id = self._append_request(codec.encode_sync, chat.chat_id, chat.fetched_to, limit, self.epoch)
                chat.is_catching_up, chat.asked_heard_to = True, chat.heard_to
                self._syncs[chat.sync_id] = chat

    # --- messages

    def _send_messages(self, chat: ChatState, now_ms: int) -> None:
        if self.phase is not ChatPhase.READY or not chat.is_synced or chat.chat_id in self._due_ms[Work.SEND]:
            return
        while len(chat.in_flight) < self._limits.in_flight_max:
            name = next((name for name in chat.queue if name not in chat.in_flight), None)
            if name is None:
                break
            queued = chat.queue[name]
            if now_ms + self._wall_ahead_ms - queued.entry.accepted_at_ms >= self._limits.remembered_ms:
                # The sync did not find the message, so it is not in the chat. The application decides whether to send
                # it again.
                reason = "it has been in the outbox for longer than a server remembers its id (remembered_ms)"
                self._refuse(chat, name, EXPIRED, reason)
                continue
            chat.in_flight.add(name)
            queued.attempts += 1
            self._sends[self._append_request(codec.encode_send, queued.entry)] = (chat, name)

    def _handle_refusal(self, request_id: str, error: codec.ServerError, now_ms: int) -> None:
        """Schedule a retry of a message after a transient error. Refuse the message after any other error."""
        chat, name = self._sends.pop(request_id)
        if name in chat.in_flight:  # if not, a sync or a broadcast has already settled it
            self._withdraw_attempt(chat, name)
            if error.code in codec.TRANSIENT:
                self._due_ms[Work.SEND][chat.chat_id] = now_ms + self._next_pause_ms(chat, error.retry_after_ms)
                self.blocked_writes.block(error.code, error.message, chat.chat_id)
            else:
                self._refuse(chat, name, error.code, error.message)
        self._send_messages(chat, now_ms)

    def _refuse_largest(self) -> None:
        """Refuse the largest message in flight, because the server received a frame that was too large.

        The server does not identify the frame. If the largest message is not too large, no other message is.
        """
        in_flight = [
            (len(codec.encode_send(chat.queue[name].entry, request_id)), chat, name)
            for request_id, (chat, name) in self._sends.items()
            if name in chat.in_flight
        ]
        if in_flight:
            _, chat, name = max(in_flight, key=itemgetter(0))
            self._withdraw_attempt(chat, name)
            self._refuse(
                chat, name, codec.TOO_LARGE, "the frame is larger than the server accepts (limits.frame_bytes_max)"
            )

    def _next_pause_ms(self, chat: ChatState, least_ms: int) -> int:
        pauses = self._pauses.setdefault(chat.chat_id, Pauses(self._limits, self._random))
        return round(1000 * pauses.next_pause_s(RetryPause(least_ms))) + 1

    @staticmethod
    def _withdraw_attempt(chat: ChatState, name: str) -> None:
        """Do not count an attempt that the server answered without committing the message."""
        chat.in_flight.remove(name)
        chat.queue[name].attempts -= 1

    def _refuse(self, chat: ChatState, name: str, code: str, message: str) -> None:
        self._settle(chat, name, Refused(code, message, was_tried=chat.queue[name].attempts > 0))

    def _settle(self, chat: ChatState, name: str, outcome: Outcome) -> None:
        chat.in_flight.discard(name)
        queued = chat.queue.pop(name, None)
        if queued is not None:
            self.blocked_writes.unblock(chat.chat_id)
            self.changes.settled.append(SettledMessage(queued.entry, outcome))
            self.changes.updates.append(Progress(chat.chat_id, name, outcome))

    # --- acknowledgements

    def _schedule_ack(self, chat: ChatState, now_ms: int) -> None:
        if self.phase is ChatPhase.READY and chat.has_unacknowledged:
            self._due_ms[Work.ACK].setdefault(chat.chat_id, now_ms + self._limits.ack_wait_ms)

    def _send_ack(self, chat: ChatState) -> None:
        if self.phase is ChatPhase.READY and chat.has_unacknowledged:
            chat.acked_to = chat.received_to
            self._acked_since_list.add(chat.chat_id)
            self._last_ack_id = self._append_request(codec.encode_ack, chat.chat_id, chat.acked_to)
