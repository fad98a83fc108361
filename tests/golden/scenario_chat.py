"""Scenarios of the chat API: HTTP and WebSocket."""

from typing import Any, Final

from golden.steps import HangUp, Http, Note, Open, Receive, Send, Step

PATH: Final = "/v1/chats"
EPOCH: Final = {"epoch": r'"epoch": ?"(\w+)"'}


def uuid(number: int) -> str:
    return f"2d8e6b3a-52a5-4c70-9c2e-{number:012x}"


def message(number: int, content: str = "Hello", **members: Any) -> dict[str, Any]:
    return {"client_message_id": uuid(number), "content": content, **members}


HTTP: Final[tuple[Step, ...]] = (
    Note("chats and members"),
    Http(f"POST {PATH}", {"chat_id": "general", "members": ["user:ben"]}, by="ann"),
    Http(f"POST {PATH}", {"chat_id": "general"}, by="ann"),
    Http(f"POST {PATH}", {"chat_id": "general", "members": ["user:cy"]}, by="ann"),
    Http(f"POST {PATH}", {"chat_id": "general"}, by="ben"),
    Http(f"POST {PATH}", {"chat_id": "general", "members": ["user:di"]}, by="ben"),
    Http(f"POST {PATH}", {"chat_id": "general"}, by="eve"),
    Http(f"POST {PATH}", {}, by="ann"),
    Http(f"GET {PATH}", by="ann"),
    Http(f"GET {PATH}?limit=1", by="ann"),
    Http(f"GET {PATH}?after=general", by="ben"),
    Http(f"GET {PATH}/general", by="ann"),
    Http(f"GET {PATH}/general?limit=1&after=user:ann", by="ann"),
    Note("messages"),
    Http(f"POST {PATH}/general/messages", message(1), by="ann"),
    Http(f"POST {PATH}/general/messages", message(1), by="ann"),
    Http(f"POST {PATH}/general/messages", message(1, "other"), by="ann"),
    Http(f"POST {PATH}/general/messages", message(2, "<b>größe</b>", content_type="text/html"), by="ben"),
    Http(f"POST {PATH}/general/messages", message(3, "third"), by="ben"),
    Http(f"GET {PATH}/general/messages", by="ann"),
    Http(f"GET {PATH}/general/messages?after=1&limit=1", by="ann"),
    Http(f"GET {PATH}/general/messages?before=3&limit=1", by="ann"),
    Http(f"GET {PATH}/general/messages?after=99", by="ann"),
    Http(f"GET {PATH}/general/messages?epoch=0000000000000000", by="ann"),
    Http(f"GET {PATH}/general/messages/{uuid(1)}", by="ann"),
    Http(f"GET {PATH}/general/messages/{uuid(9)}", by="ann"),
    Http(f"GET {PATH}/general/nothing", by="ann"),
    Http(f"PATCH {PATH}/general/messages", by="ann"),
    Note("acknowledgements"),
    Http(f"POST {PATH}/general/ack", {"last_acked_sequence": 2}, by="ben"),
    Http(f"POST {PATH}/general/ack", {"last_acked_sequence": 1}, by="ben"),
    Http(f"POST {PATH}/general/ack", {"last_acked_sequence": 9}, by="ben"),
    Http(f"GET {PATH}/general/delivery", by="ann"),
    Note("roles"),
    Http(f"PUT {PATH}/general/members/user:di", by="ann"),
    Http(f"PUT {PATH}/general/members/user:di", by="ben"),
    Http(f"PUT {PATH}/general/members/user:ann", {"role": "member"}, by="ann"),
    Http(f"PUT {PATH}/general/members/user:ben", {"role": "owner"}, by="ann"),
    Http(f"PUT {PATH}/general/members/user:none", {"role": "owner", "only_if_member": True}, by="ann"),
    Http(f"DELETE {PATH}/general/members/user:di", by="cy"),
    Http(f"DELETE {PATH}/general/members/user:di", by="ann"),
    Http(f"DELETE {PATH}/general/members/user:cy", by="cy"),
    Http(f"DELETE {PATH}/general/members/user:cy", by="cy"),
    Http(f"GET {PATH}/general", by="ben"),
    Note("callers that are not members"),
    Http(f"GET {PATH}/general", by="eve"),
    Http(f"GET {PATH}/none", by="eve"),
    Http(f"GET {PATH}/general/messages", by="eve"),
    Http(f"GET {PATH}/general/delivery", by="eve"),
    Http(f"POST {PATH}/general/messages", message(1), by="eve"),
    Http(f"POST {PATH}/general/ack", {"last_acked_sequence": 1}, by="eve"),
    Http(f"PUT {PATH}/general/members/user:eve", by="eve"),
    Note("errors"),
    Http(f"POST {PATH}", {"chat_id": ""}, by="ann"),
    Http(f"POST {PATH}", {"chat_id": "a/b"}, by="ann"),
    Http(f"POST {PATH}", {"chat_id": "x", "members": "user:ben"}, by="ann"),
    Http(f"POST {PATH}", "no JSON", by="ann"),
    Http(f"POST {PATH}/general/messages", message(4, ""), by="ann"),
    Http(f"POST {PATH}/general/messages", message(4, "x" * 4097), by="ann"),
    Http(f"POST {PATH}/general/messages", message(4, content_type="none"), by="ann"),
    Http(f"POST {PATH}/general/messages", {"client_message_id": "none", "content": "a"}, by="ann"),
    Http(f"POST {PATH}/general/messages", {"content": "a"}, by="ann"),
    Http(f"POST {PATH}/general/messages", "x" * 70_001, by="ann"),
    Http(f"GET {PATH}/general/messages?after=1&before=2", by="ann"),
    Http(f"GET {PATH}/general/messages?after=x", by="ann"),
    Http(f"POST {PATH}/general/ack", {}, by="ann"),
    Http(f"PUT {PATH}/general/members/user:ben", {"role": "king"}, by="ann"),
    Http(f"PUT {PATH}/general/members/none", by="ann"),
    Http(f"GET {PATH}?limit=x", by="ann"),
    Http(f"GET {PATH}", by="not a good token"),
    Http(f"DELETE {PATH}"),
)


def say(number: int, content: str = "Hello", **members: Any) -> dict[str, Any]:
    return {"type": "send_message", "chat_id": "tea", **message(number, content), **members}


def ask(sequence: int, **members: Any) -> dict[str, Any]:
    return {"type": "sync_request", "chat_id": "tea", "last_acked_sequence": sequence, **members}


def connect(token: str, **members: Any) -> dict[str, Any]:
    return {"type": "connect", "token": token, "request_id": "c1", **members}


SOCKET: Final[tuple[Step, ...]] = (
    Http(f"POST {PATH}", {"chat_id": "tea", "members": ["user:ben"]}, by="ann"),
    Note("connect"),
    Open("ann", "/v1/chat"),
    Send("ann", ask(0)),
    Send("ann", connect("ann", device_id="laptop"), save=EPOCH),
    Send("ann", connect("ann")),
    Open("ben", "/v1/chat"),
    Send("ben", connect("ben", device_id="phone")),
    Open("quiet", "/v1/chat"),
    Send("quiet", connect("ben", live=False)),
    Note("send, retry, and retry with different content"),
    Send("ann", say(1, request_id="r1")),
    Receive("ben"),
    Send("ann", say(1)),
    Send("ann", say(1, "other")),
    Send("ben", say(2, "größe 𝄞", content_type="text/markdown")),
    Receive("ann"),
    Note("sync"),
    Send("ann", ask(0, limit=1, request_id="r2")),
    Send("ann", ask(1, epoch="{{epoch}}")),
    Send("ann", ask(9)),
    Send("quiet", {"type": "sync_request", "chat_id": "tea", "last_acked_seq": 1}),
    Note("acknowledgements"),
    Send("ben", {"type": "ack", "chat_id": "tea", "last_acked_sequence": 2}, receive=0),
    Receive("ann"),
    Receive("ben"),
    Send("ben", {"type": "ack", "chat_id": "tea", "last_acked_sequence": 9, "request_id": "r3"}),
    Note("members"),
    Http(f"PUT {PATH}/tea/members/user:cy", {"role": "member"}, by="ann"),
    Receive("ann"),
    Receive("ben"),
    Http(f"PUT {PATH}/tea/members/user:ben", {"role": "owner"}, by="ann"),
    Receive("ann", 2),
    Receive("ben", 2),
    Http(f"DELETE {PATH}/tea/members/user:ben", by="ann"),
    Receive("ann"),
    Receive("ben"),
    Send("ben", say(3)),
    Send("ben", ask(0)),
    Note("ping"),
    Send("ann", {"type": "ping", "request_id": "p1"}),
    Send("ann", "ping", opcode=9),
    Note("errors"),
    Send("ann", ask(0, epoch="0000000000000000", request_id="r4")),
    Send("ann", ask(0, chat_id="none")),
    Send("ann", ask(-1)),
    Send("ann", say(4, "")),
    Send("ann", say(4, "x" * 4097)),
    Send("ann", say(4, client_message_id="none")),
    Send("ann", say(4, content_type="none")),
    Send("ann", {"type": "none", "request_id": "r5"}),
    Send("ann", {"request_id": "r6"}),
    Send("ann", "no JSON"),
    Send("ann", '{"type":"ping","type":"ping"}'),
    Send("ann", "bytes", opcode=2),
    Send("ann", say(4, "x" * 70_000)),
    Open("bad", "/v1/chat"),
    Send("bad", connect("not a good token")),
    Open("page", "/v1/chat", headers={"Origin": "https://evil.example.org"}),
    HangUp("quiet"),
)
