"""A chat client without tasks or sockets: its store, its protocol, and a network that the test advances stepwise."""

import json
from collections import Counter, deque
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import msgspec

from client.chat.model_chats import ModelConnection, ModelServer
from oncelog.client.chat.chat_state import ChangeSet
from oncelog.client.chat.protocol import ChatProtocol
from oncelog.client.chat.sender import ChatPhase, Work
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import (
    ChatLimits,
    HistoryChange,
    ListedChat,
    Message,
    OutboxMessage,
    Outcome,
    Refused,
    Sent,
)
from oncelog.errors import LostError, ServerRefusedError

LIVE = ("message", "delivery", "membership")
"""Live frames can be lost, duplicated and reordered. Answers cannot."""


class Device:
    def __init__(self, name: str, server: ModelServer, chance: Random, path: Path | None = None) -> None:
        self.name = name
        self.token = name.partition("-")[0]
        self.user = f"user:{self.token}"
        self.server = server
        self.chance = chance
        self.path = path
        self.limits = ChatLimits(
            page_messages=chance.randint(1, 4), in_flight_max=chance.choice((1, 1, 3)), ahead_max=chance.choice((1, 5)),
            syncs_max=chance.randint(1, 3), gap_wait_ms=10, ack_wait_ms=5, check_ms=chance.choice((200, 1000)),
            pause_ms_min=1, pause_ms_max=20,
        )  # fmt: skip
        self.now_ms = 0
        self.drafts: dict[str, OutboxMessage] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.seen: Counter[str] = Counter()
        self.histories: dict[str, list[Message]] = {}
        """Messages of the current history that the application has received, in order."""
        self.store = ChatStore(":memory:" if path is None else str(path))
        self._open(self.store.open(name))

    def _open(self, stored: Any) -> None:
        self.protocol = ChatProtocol(
            stored.device_id, stored.user_id, stored.epoch, stored.chats, self.limits, self.chance
        )
        self.protocol.enqueue(stored.outbox, self.now_ms, was_tried=True)
        self.generations: dict[str, int] = {}
        self.places = {chat.chat_id: chat.received_to for chat in stored.chats}
        """The application's read position in each chat."""
        self.connection: ModelConnection | None = None
        self.out: deque[bytes] = deque()
        self.list_answer: list[ListedChat] | None = None

    def crash(self) -> None:
        """Crash between two transactions. Frames in flight still reach the server."""
        self.cut()
        if self.path is not None:
            self.store.close()
            self.store = ChatStore(str(self.path))
            self._open(self.store.open(self.name))
        else:
            self._open(self.store._load(self.store._file.connection, self.name))
        # The application receives messages after the stored position a second time.
        for chat_id, received in self.histories.items():
            self.histories[chat_id] = [one for one in received if one.sequence <= self.places.get(chat_id, 0)]

    # --- the application

    def send(self, chat_id: str, content: str) -> None:
        name = str(UUID(int=self.chance.getrandbits(128), version=4))
        draft = OutboxMessage(0, name, chat_id, content, "text/plain", self.now_ms)
        self._accept(draft)

    def _accept(self, draft: OutboxMessage) -> None:
        (entry,) = self.store.assign_numbers([draft])
        self.store.save([entry], [], ChangeSet())
        self.drafts[entry.client_message_id] = entry
        self.protocol.enqueue([entry], self.now_ms)

    def read(self) -> None:
        """Read some messages in each chat, as an application would."""
        for chat_id, complete_to in self.complete_positions().items():
            place = self.places.get(chat_id, 0)
            page = self.store.load_messages_after(chat_id, place, complete_to, self.chance.randint(1, 5))
            for message in page:
                self._receive(message)
            if page:
                self.places[chat_id] = page[-1].sequence
                generation = self.generations.get(chat_id, 0)
                self.protocol.mark_received(chat_id, page[-1].sequence, generation, self.now_ms)

    def _receive(self, message: Message) -> None:
        received = self.histories.setdefault(message.chat_id, [])
        assert not received or received[-1].sequence < message.sequence, "message out of order or repeated"
        received.append(message)
        if self.has_current_history:
            log = [one for one in self.server.chats[message.chat_id].log if one["sequence"] <= message.sequence]
            assert [one["sequence"] for one in log] == [one.sequence for one in received], "a message is missing"
            assert msgspec.to_builtins(message) == log[-1]

    @property
    def has_current_history(self) -> bool:
        (epoch,) = self.store._file.connection.execute("SELECT epoch FROM client").fetchone()
        return bool(epoch == self.server.epoch)

    def complete_positions(self) -> dict[str, int]:
        """Return the stored `complete_to` of each chat."""
        return dict(self.store._file.connection.execute("SELECT chat_id, complete_to FROM chats ORDER BY chat_id"))

    def save_changes(self) -> None:
        """Save the received changes and report them."""
        changes = self.protocol.take_changes()
        if not changes:
            return
        self.store.save([], [], changes)
        for settled in changes.settled:
            self.outcomes[settled.entry.client_message_id] = settled.outcome
            self.seen[type(settled.outcome).__name__] += 1
            if isinstance(settled.outcome, Refused):
                self.seen[settled.outcome.code] += 1
        self.generations.update({chat_id: saved.generation for chat_id, saved in changes.chats.items()})
        for update in changes.updates:
            self.seen[type(update).__name__] += 1
            if isinstance(update, HistoryChange):
                for chat_id in list(self.places):
                    if update.chat_id in (None, chat_id):
                        self.places[chat_id] = 0
                        self.histories.pop(chat_id, None)

    # --- the network

    def connect(self) -> None:
        if self.connection is None:
            self.connection = ModelConnection(self.server)
            self.protocol.connect(self.token, 0)
            self._flush()

    def cut(self) -> None:
        if self.connection is not None:
            self.connection.cut()
            self.connection = None
            self.out.clear()
            self.list_answer = None
            self.protocol.disconnect()

    def _flush(self) -> None:
        self.out.extend(self.protocol.outgoing)
        self.protocol.outgoing.clear()

    def request_list(self) -> None:
        if self.connection is not None and self.protocol.wants_list and self.list_answer is None:
            self.protocol.start_list()
            self.list_answer = msgspec.convert(self.server.list_chats(self.user), list[ListedChat])

    def receive_list(self) -> None:
        if self.list_answer is not None:
            answer, self.list_answer = self.list_answer, None
            self.protocol.apply_list(answer, self.now_ms)
            self._flush()

    def deliver_to_server(self) -> None:
        """Deliver one frame to the server."""
        if self.connection is None:
            return
        self._flush()
        if not self.connection.is_open:
            self.cut()
        elif self.out:
            self.connection.receive(self.out.popleft())

    def deliver_to_client(self, *, is_faulty: bool) -> None:
        """Deliver one frame to the client. If `is_faulty`, a live frame may be reordered, duplicated or lost."""
        if self.connection is None:
            return
        waiting = self.connection.out
        if not waiting:
            if not self.connection.is_open:
                self.cut()
            return
        place = 0
        if is_faulty and self.chance.random() < 0.3:
            place = self.chance.randrange(len(waiting))
        frame = waiting[place]
        is_live = json.loads(frame)["type"] in LIVE
        if not is_live:
            place = 0
            frame = waiting[0]
            is_live = json.loads(frame)["type"] in LIVE
        what = self.chance.random() if is_faulty and is_live else 1
        if what >= 0.1:  # Otherwise the frame is delivered twice.
            del waiting[place]
        if 0.1 <= what < 0.2:
            self.seen["lost"] += 1
            return
        try:
            self.protocol.receive(frame, self.now_ms)
        except (LostError, ServerRefusedError) as error:
            self.seen[str(error).split(":")[0]] += 1
            self.cut()
            return
        self._flush()

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        if self.connection is not None:
            self.protocol.tick(self.now_ms)
            self._flush()

    # --- final checks

    @property
    def is_settled(self) -> bool:
        is_live = self.protocol.phase is ChatPhase.READY and self.protocol.is_live and not self.protocol.wants_list
        is_all_sent = not self.out and not self.protocol._due_ms[Work.ACK]
        is_network_idle = is_all_sent and self.connection is not None and not self.connection.out
        return (
            is_live
            and is_network_idle
            and not any(chat.queue for chat in self.protocol.chats.values())
            and not self.protocol.changes
        )

    def settle(self) -> None:
        """Run without faults until the device is idle."""
        for _ in range(5000):
            if self.is_settled and self.list_answer is None and self.is_all_read:
                return
            self.connect()
            self.request_list()
            self.receive_list()
            self.deliver_to_server()
            self.deliver_to_client(is_faulty=False)
            self.save_changes()
            self.read()
            self.pass_time(1)
        raise AssertionError(f"{self.name} does not become idle")

    @property
    def is_all_read(self) -> bool:
        return all(to <= self.protocol.chats[chat_id].received_to for chat_id, to in self.complete_positions().items())

    def check(self) -> None:
        for chat_id, chat in self.server.chats.items():
            if self.user in chat.members:
                received = self.histories.get(chat_id, [])
                assert [msgspec.to_builtins(one) for one in received] == chat.log, (self.name, chat_id)
                assert chat.members[self.user] == (received[-1].sequence if received else 0), "not acknowledged"
        for name, entry in self.drafts.items():
            outcome = self.outcomes[name]
            log = self.server.chats[entry.chat_id].log if entry.chat_id in self.server.chats else []
            found = [one for one in log if one["client_message_id"] == name]
            if isinstance(outcome, Sent):
                assert len(found) == 1 or name in self.server.lost, (self.name, entry)
            else:
                assert not found or outcome.was_tried, (self.name, entry, outcome)
