"""Driver for the chat client's protocol: a test plays the server frame by frame."""

import json
from random import Random
from typing import Any

from oncelog.client.chat.chat_state import ChangeSet, ChatState
from oncelog.client.chat.protocol import ChatProtocol
from oncelog.client.chat.values import ChatLimits, ListedChat, OutboxMessage

ME = "user:ann"
EPOCH = "e1"
NEVER = 10**9


def entry(number: int, chat_id: str = "tea", accepted_at_ms: int = 0) -> OutboxMessage:
    return OutboxMessage(number, f"id-{number}", chat_id, f"text {number}", "text/plain", accepted_at_ms)


class ProtocolDriver:
    """A protocol whose server frames come from the test."""

    def __init__(self, *chats: ChatState, user_id: str = ME, epoch: str = EPOCH, **limits: Any) -> None:
        self.limits = ChatLimits(**{"check_ms": NEVER, **limits})
        self.protocol = ChatProtocol("phone", user_id, epoch, chats, self.limits, Random(0))
        self.now_ms = 0

    def begin(self, *listed: ListedChat) -> "ProtocolDriver":
        self.protocol.connect("ann", 0)
        assert self.take_sent() == [{"type": "connect", "token": "ann", "device_id": "phone"}]
        self.receive("connected", user_id=ME, epoch=EPOCH, heartbeat_ms=1)
        assert self.protocol.wants_list
        self.receive_list(*listed)
        return self

    def receive_list(self, *listed: ListedChat) -> None:
        self.protocol.start_list()
        self.protocol.apply_list(listed, self.now_ms)

    def take_sent(self) -> list[dict[str, Any]]:
        frames = [json.loads(one) for one in self.protocol.outgoing]
        self.protocol.outgoing.clear()
        return frames

    def receive(self, kind: str, **members: Any) -> None:
        self.protocol.receive(json.dumps({"type": kind, **members}), self.now_ms)

    def receive_messages(self, *sequences: int, chat_id: str = "tea", **members: Any) -> None:
        for sequence in sequences:
            self.receive("message", **{**message(sequence, chat_id), **members})

    def receive_page(
        self, request: dict[str, Any], *sequences: int, has_more: bool = False, following: int | None = None
    ) -> None:
        after = request["last_acked_sequence"]
        self.receive(
            "message_batch",
            request_id=request["request_id"],
            chat_id=request["chat_id"],
            messages=[message(one, request["chat_id"]) for one in sequences],
            has_more=has_more,
            next_sequence=following if following is not None else max((after, *sequences)),
            last_sequence=99,
        )

    def receive_ack(self, request: dict[str, Any], sequence: int, **members: Any) -> None:
        self.receive("send_message_ack", **{**ack_for(request, sequence), **members})

    def advance(self, ms: int) -> list[dict[str, Any]]:
        self.now_ms += ms
        self.protocol.tick(self.now_ms)
        return self.take_sent()

    @property
    def changes(self) -> ChangeSet:
        return self.protocol.take_changes()

    def chat(self, chat_id: str = "tea") -> ChatState:
        return self.protocol.chats[chat_id]


def message(sequence: int, chat_id: str = "tea") -> dict[str, Any]:
    return {
        "message_id": f"msg_{sequence}", "chat_id": chat_id, "sequence": sequence, "sender_id": "user:bob",
        "client_message_id": f"theirs-{sequence}", "content": f"text {sequence}", "content_type": "text/plain",
        "created_at": "2026-01-30T14:30:00.000Z",
    }  # fmt: skip


def ack_for(request: dict[str, Any], sequence: int) -> dict[str, Any]:
    echoed = {name: request[name] for name in ("request_id", "client_message_id", "chat_id")}
    created = "2026-01-30T14:30:00.000Z"
    return {**echoed, "message_id": f"msg_{sequence}", "sequence": sequence, "created_at": created, "duplicate": False}


def chat_at(complete_to: int, received_to: int = 0, chat_id: str = "tea") -> ChatState:
    return ChatState(chat_id, complete_to=complete_to, fetched_to=complete_to, received_to=received_to)
