"""Small model of a chat server (docs/reference/chat.md) for tests without a network. It does not use `oncelog`.

`test_chat_client_model.py` compares the model with a real server.
"""

import json
from collections import deque
from typing import Any

Frame = dict[str, Any]

PAGE_DEFAULT = 100


class ModelChat:
    def __init__(self) -> None:
        self.log: list[Frame] = []
        self.last = 0
        self.members: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        """Acknowledged sequences of former members."""

    def copy(self) -> "ModelChat":
        copied = ModelChat()
        copied.log, copied.last = list(self.log), self.last
        copied.members, copied.gone = dict(self.members), dict(self.gone)
        return copied

    def role(self, user: str) -> str:
        """Return the role of a member. The oldest member is the owner; the model appoints no other owners."""
        return "owner" if user == next(iter(self.members)) else "member"

    def find_message(self, client_message_id: str) -> Frame | None:
        return next((one for one in self.log if one["client_message_id"] == client_message_id), None)


class ModelServer:
    def __init__(self) -> None:
        self.chats: dict[str, ModelChat] = {}
        self.epoch = "epoch 1"
        self.connections: list[ModelConnection] = []
        self.refusals: list[str] = []
        """Error codes that refuse the next new messages."""
        self.skip = 0
        """Number of sequences to skip before the next message."""
        self.lost: set[str] = set()
        """Ids of messages that were lost when a backup was restored."""
        self._backup: dict[str, ModelChat] = {}
        self._epochs = 1

    # --- HTTP

    def create(self, user: str, chat_id: str, members: list[str]) -> None:
        chat = self.chats.setdefault(chat_id, ModelChat())
        for one in [user, *members]:
            self.set_member(chat_id, one, present=True)
        assert user in chat.members

    def set_member(self, chat_id: str, user: str, *, present: bool) -> None:
        chat = self.chats[chat_id]
        if (user in chat.members) == present:
            return
        told = {*chat.members, user}
        frame = {"type": "membership", "chat_id": chat_id, "user_id": user, "present": present}
        if present:
            frame["last_acked_sequence"] = chat.members[user] = chat.gone.pop(user, 0)
            frame["role"] = chat.role(user)
        else:
            heirs = [one for one in chat.members if chat.role(one) == "member"]
            chat.gone[user] = chat.members.pop(user)
        self._broadcast(told, frame)
        for heir in heirs if not present else ():
            if chat.role(heir) == "owner":
                frame = {"type": "membership", "chat_id": chat_id, "user_id": heir, "present": True, "role": "owner"}
                self._broadcast(set(chat.members), {**frame, "last_acked_sequence": chat.members[heir]})

    def list_chats(self, user: str) -> list[Frame]:
        return [
            {
                "chat_id": name,
                "last_sequence": chat.last,
                "last_acked_sequence": chat.members[user],
                "role": chat.role(user),
            }
            for name, chat in sorted(self.chats.items())
            if user in chat.members
        ]

    # --- operations

    def back_up(self) -> None:
        self._backup = {name: chat.copy() for name, chat in self.chats.items()}

    def restore(self) -> None:
        """Restore the backup and close all connections."""
        before = {one["client_message_id"] for chat in self.chats.values() for one in chat.log}
        self.chats = {name: chat.copy() for name, chat in self._backup.items()}
        self.lost |= before - {one["client_message_id"] for chat in self.chats.values() for one in chat.log}
        self._epochs += 1
        self.epoch = f"epoch {self._epochs}"
        self.stop()

    def stop(self) -> None:
        for connection in list(self.connections):
            connection.cut()

    def _broadcast(self, users: set[str], frame: Frame, except_for: "ModelConnection | None" = None) -> None:
        for connection in self.connections:
            if connection.user in users and connection is not except_for:
                connection.send_frame(frame)


class ModelConnection:
    """Connection to the model: `receive` processes a frame, and `out` queues the answers."""

    def __init__(self, server: ModelServer) -> None:
        self.server = server
        self.user = ""
        self.out: deque[str] = deque()
        self.is_open = True
        server.connections.append(self)

    def cut(self) -> None:
        self.is_open = False
        if self in self.server.connections:
            self.server.connections.remove(self)

    def send_frame(self, frame: Frame) -> None:
        self.out.append(json.dumps(frame))

    def receive(self, data: bytes) -> None:
        frame = json.loads(data)
        request = {"request_id": frame["request_id"]} if "request_id" in frame else {}
        if frame["type"] == "connect":
            self.user = f"user:{frame['token']}"
            self.send_frame(
                {"type": "connected", "user_id": self.user, "epoch": self.server.epoch, "heartbeat_ms": 20_000}
            )
            return
        chat = self.server.chats.get(frame["chat_id"])
        if chat is None or self.user not in chat.members:
            about = {name: frame[name] for name in ("chat_id", "client_message_id") if name in frame}
            self.send_frame({"type": "error", "code": "NOT_A_MEMBER", "message": "no", **request, **about})
            return
        {"send_message": self._send, "sync_request": self._sync, "ack": self._ack}[frame["type"]](chat, frame, request)

    def _send(self, chat: ModelChat, frame: Frame, request: Frame) -> None:
        content = {"content": frame["content"], "content_type": frame.get("content_type", "text/plain")}
        found = chat.find_message(frame["client_message_id"])
        is_known = found is not None
        if found is None:
            if self.server.refusals:
                error = {"type": "error", "code": self.server.refusals.pop(), "message": "later", "retry_after_ms": 5}
                self.send_frame({**error, **request})
                return
            chat.last += 1 + self.server.skip
            self.server.skip = 0
            found = {
                "message_id": f"msg_{frame['chat_id']}_{chat.last}",
                "chat_id": frame["chat_id"],
                "sequence": chat.last,
                "sender_id": self.user,
                "client_message_id": frame["client_message_id"],
                **content,
                "created_at": "2026-01-30T14:30:00.000Z",
            }
            chat.log.append(found)
            self.server._broadcast(set(chat.members), {"type": "message", **found}, except_for=self)
        is_other = (found["content"], found["content_type"], found["sender_id"]) != (*content.values(), self.user)
        names = ("client_message_id", "chat_id", "message_id", "sequence", "created_at")
        answer = {name: found[name] for name in names} | {"duplicate": is_known}
        if is_other:
            answer["content_mismatch"] = True
        self.send_frame({"type": "send_message_ack", **answer, **request})

    def _sync(self, chat: ModelChat, frame: Frame, request: Frame) -> None:
        if frame.get("epoch", self.server.epoch) != self.server.epoch:
            self.send_frame({"type": "error", "code": "HISTORY_CHANGED", "message": "another epoch", **request})
            return
        after, limit = frame["last_acked_sequence"], frame.get("limit", PAGE_DEFAULT)
        answer: Frame = {"type": "message_batch", "chat_id": frame["chat_id"], "last_sequence": chat.last, **request}
        if after > chat.last:
            self.send_frame(
                {**answer, "messages": [], "has_more": False, "next_sequence": chat.last, "cursor_ahead": True}
            )
            return
        found = [one for one in chat.log if one["sequence"] > after]
        page = found[:limit]
        following = page[-1]["sequence"] if page else after
        self.send_frame({**answer, "messages": page, "has_more": len(found) > limit, "next_sequence": following})

    def _ack(self, chat: ModelChat, frame: Frame, request: Frame) -> None:
        sequence = frame["last_acked_sequence"]
        if sequence > chat.last:
            self.send_frame({"type": "error", "code": "INVALID_ACK", "message": "beyond the last", **request})
        elif sequence > chat.members[self.user]:
            chat.members[self.user] = sequence
            told = {"chat_id": frame["chat_id"], "user_id": self.user, "last_acked_sequence": sequence}
            self.server._broadcast(set(chat.members), {"type": "delivery", **told})
