"""Malformed frames, messages, syncs and chats, and agreement of the fast decoder with the full one."""

import json
from typing import Any
from uuid import UUID, uuid1, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.core.canonical import canonical
from oncelog.core.chat import encode_message
from oncelog.server.chat.messages import ChatMessages, Send
from oncelog.server.errors import MalformedMessageError
from oncelog.server.limits import ApiLimits
from server.chat.chat_servers import SharedServer, message_uuid

MESSAGES = ChatMessages(ApiLimits(message_bytes_max=4096))


@pytest.mark.rule("CH-3", "CH-10", "CO-33")
@pytest.mark.parametrize(
    ("members", "code", "field"),
    [
        ({"client_message_id": str(uuid1())}, "INVALID_MESSAGE", "$.client_message_id"),
        ({"client_message_id": str(UUID(int=7))}, "INVALID_MESSAGE", "$.client_message_id"),
        ({"client_message_id": f"{{{uuid4()}}}"}, "INVALID_MESSAGE", "$.client_message_id"),
        ({"client_message_id": 7}, "INVALID_MESSAGE", "$.client_message_id"),
        ({"client_message_id": None}, "INVALID_MESSAGE", "$.client_message_id"),
        ({"content": ""}, "INVALID_MESSAGE", "$.content"),
        ({"content": 7}, "INVALID_MESSAGE", "$.content"),
        ({"content": "a\0b"}, "INVALID_MESSAGE", "$.content"),
        ({"content": "\ud800"}, "INVALID_MESSAGE", "$.content"),
        ({"content": "a" * 4097}, "MESSAGE_TOO_LARGE", "$.content"),
        ({"content": "é" * 2049}, "MESSAGE_TOO_LARGE", "$.content"),
        ({"content_type": "text"}, "INVALID_MESSAGE", "$.content_type"),
        ({"content_type": f"text/{'a' * 124}"}, "INVALID_MESSAGE", "$.content_type"),
        ({"content_type": "text/é"}, "INVALID_MESSAGE", "$.content_type"),
        ({"chat_id": ""}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": "a/b"}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": "."}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": ".."}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": "a\n"}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": "e\u0301"}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": "a" * 129}, "INVALID_MESSAGE", "$.chat_id"),
        ({"chat_id": None}, "INVALID_REQUEST", "$.chat_id"),
        ({"chat_id": 7}, "INVALID_REQUEST", "$.chat_id"),
        ({"request_id": "a" * 129}, "INVALID_REQUEST", "$.request_id"),
        ({"request_id": 7}, "INVALID_REQUEST", "$.request_id"),
        ({"type": "send"}, "INVALID_REQUEST", "$.type"),
        ({"type": None}, "INVALID_REQUEST", "$.type"),
    ],
)
async def test_invalid_message_is_refused_with_its_field_and_not_stored(
    shared_server: SharedServer, members: dict[str, Any], code: str, field: str
) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann")
    ann = await shared_server.server.connect("ann")
    good = {"type": "send_message", "client_message_id": message_uuid(1), "chat_id": chat, "content": "a"}
    for frame in ({**good, **members}, {**good, **members, "content_type": "text/plain", **members}):
        await ann.socket.send_str(json.dumps(frame))
        error = await ann.receive()
        assert (error["type"], error["code"], error["field"]) == ("error", code, field), error
    over_http = {name: value for name, value in {**good, **members}.items() if name not in ("type", "chat_id")}
    if members.keys() & {"client_message_id", "content", "content_type"}:
        answer = await shared_server.server.http("POST", f"/v1/chats/{chat}/messages", "ann", over_http)
        assert answer.json["error"]["code"] == code
        assert answer.status == (413 if code == "MESSAGE_TOO_LARGE" else 400)
    assert await ann.sync_all(chat) == []


@pytest.mark.rule("CO-20", "CO-33")
@pytest.mark.parametrize(
    "frame", [b"", b"{", b"[]", b"7", b'{"type":"ping","type":"ping"}', b"\xff", b"{}", b"[" * 9999]
)
async def test_malformed_frame_is_refused_and_keeps_the_connection_open(
    shared_server: SharedServer, frame: bytes
) -> None:
    ann = await shared_server.server.connect("ann")
    if frame != b"\xff":  # aiohttp closes the connection, as RFC 6455 requires
        await ann.socket.send_str(frame.decode())
        assert (await ann.receive())["code"] == "INVALID_REQUEST"
    await ann.socket.send_bytes(frame)
    assert (await ann.receive())["code"] == "INVALID_REQUEST"
    assert (await ann.request("ping"))["type"] == "pong"


@pytest.mark.rule("CH-6", "CO-33")
@pytest.mark.parametrize(
    "members",
    [
        {"last_acked_sequence": -1},
        {"last_acked_sequence": 2**53},
        {"last_acked_sequence": 1.5},
        {"last_acked_sequence": "1"},
        {"last_acked_sequence": None},
        {"limit": "1", "last_acked_sequence": 0},
        {"epoch": 7, "last_acked_sequence": 0},
        {"chat_id": 7, "last_acked_sequence": 0},
        {"chat_id": "a/b", "last_acked_sequence": 0},
        {},
    ],
)
async def test_invalid_sync_is_refused(shared_server: SharedServer, members: dict[str, Any]) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "bob")
    bob = await shared_server.server.connect("bob")
    assert await bob.expect_refusal("sync_request", **{"chat_id": chat, **members}) == "INVALID_REQUEST"


@pytest.mark.rule("CH-9", "CO-30", "CO-33")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"chat_id": ""}, "$.chat_id"),
        ({"chat_id": "a/b"}, "$.chat_id"),
        ({"chat_id": "."}, "$.chat_id"),
        ({"chat_id": ".."}, "$.chat_id"),
        ({"chat_id": "a\x7f"}, "$.chat_id"),
        ({"chat_id": "a" * 129}, "$.chat_id"),
        ({"chat_id": 7}, "$.chat_id"),
        ({"members": "user:bob"}, "$.members"),
        ({"members": ["bob"]}, "$.members[0]"),
        ({"members": ["user:bob", "system:x"]}, "$.members[1]"),
        ({"members": ["user:"]}, "$.members[0]"),
        ({"members": [7]}, "$.members[0]"),
        ({"members": ["user:" + "a" * 508]}, "$.members[0]"),
        ({"members": ["user:a\0"]}, "$.members[0]"),
        ({"members": ["user:a"] * 501}, "$.members"),
        ([], "$"),
    ],
)
async def test_invalid_chat_is_refused_with_its_field(shared_server: SharedServer, body: Any, field: str) -> None:
    answer = await shared_server.server.http("POST", "/v1/chats", "ann", body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["field"]) == (400, "INVALID_REQUEST", field)


# --- both decoders -------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["type", "client_message_id", "chat_id", "content", "request_id", "content_type", "x"])
_VALUES = st.one_of(
    st.sampled_from(["send_message", str(uuid4()), str(uuid1()), "general", "text/plain", "a:b", "", "\\", "a" * 4097]),
    st.text(max_size=12),
    st.none(),
    st.integers(),
)
_PLAIN = {"type": "send_message", "client_message_id": message_uuid(1), "chat_id": "c", "content": "hi"}


@pytest.mark.rule("CH-3", "CH-10", "CO-3")
@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=8), st.booleans(), st.booleans())
def test_fast_decoder_agrees_with_the_full_one_or_declines(
    members: list[tuple[str, Any]], is_plain: bool, is_ascii: bool
) -> None:
    pairs = [*(_PLAIN.items() if is_plain else ()), *members]
    text = ",".join(f"{json.dumps(name)}:{json.dumps(value, ensure_ascii=is_ascii)}" for name, value in pairs)
    data = f"{{{text}}}".encode("utf-8", "replace")
    quick = MESSAGES.decode_fast(data)
    if quick is not None:
        assert MESSAGES.decode_frame(data) == quick


@pytest.mark.rule("CO-3")
def test_repeated_member_is_refused_by_both_decoders() -> None:
    data = json.dumps(_PLAIN).encode()
    assert isinstance(MESSAGES.decode_fast(data), Send)
    twice = data[:-1] + b',"content":"other"}'
    assert MESSAGES.decode_fast(twice) is None
    with pytest.raises(MalformedMessageError):
        MESSAGES.decode_frame(twice)


@pytest.mark.rule("CO-1", "CO-4")
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_message_body_is_canonical(content: str) -> None:
    assert encode_message(content, "text/plain") == canonical({"content": content, "content_type": "text/plain"})
