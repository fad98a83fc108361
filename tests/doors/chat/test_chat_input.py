"""What is no frame, no message, no sync and no chat; and two ways of reading that read the same."""

import json
from typing import Any
from uuid import UUID, uuid1, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doors.chat.chat_doors import House, message_uuid
from oncelog.core.canonical import canonical
from oncelog.core.chat import message_body
from oncelog.doors.chat.reading import BadFrameError, Send, read_frame, read_quickly


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
        ({"request_id": "a" * 129}, "INVALID_REQUEST", "$.request_id"),
        ({"request_id": 7}, "INVALID_REQUEST", "$.request_id"),
        ({"type": "send"}, "INVALID_REQUEST", "$.type"),
        ({"type": None}, "INVALID_REQUEST", "$.type"),
    ],
)
def test_what_is_no_message_is_told_with_its_field_and_writes_nothing(
    house: House, members: dict[str, Any], code: str, field: str
) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann")
        ann = await house.door.device("ann")
        good = {"type": "send_message", "client_message_id": message_uuid(1), "chat_id": chat, "content": "a"}
        for frame in ({**good, **members}, {**good, **members, "content_type": "text/plain", **members}):
            await ann.socket.send_str(json.dumps(frame))
            error = await ann.receive()
            assert (error["type"], error["code"], error["field"]) == ("error", code, field), error
        over_http = {name: value for name, value in {**good, **members}.items() if name not in ("type", "chat_id")}
        if members.keys() & {"client_message_id", "content", "content_type"}:
            answer = await house.door.http("POST", f"/v1/chats/{chat}/messages", "ann", over_http)
            assert answer.json["error"]["code"] == code
            assert answer.status == (413 if code == "MESSAGE_TOO_LARGE" else 400)
        assert await ann.synced(chat) == []

    house.run(main())


@pytest.mark.rule("CO-20", "CO-33")
@pytest.mark.parametrize(
    "frame", [b"", b"{", b"[]", b"7", b'{"type":"ping","type":"ping"}', b"\xff", b"{}", b"[" * 9999]
)
def test_what_is_no_frame_is_told_and_the_connection_stays(house: House, frame: bytes) -> None:
    async def main() -> None:
        ann = await house.door.device("ann")
        if frame != b"\xff":  # which aiohttp ends the connection for, as RFC 6455 says
            await ann.socket.send_str(frame.decode())
            assert (await ann.receive())["code"] == "INVALID_REQUEST"
        await ann.socket.send_bytes(frame)
        assert (await ann.receive())["code"] == "INVALID_REQUEST"
        assert (await ann.ask("ping"))["type"] == "pong"

    house.run(main())


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
def test_what_is_no_sync_is_told(house: House, members: dict[str, Any]) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "bob")
        bob = await house.door.device("bob")
        assert await bob.refused("sync_request", **{"chat_id": chat, **members}) == "INVALID_REQUEST"

    house.run(main())


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
def test_what_is_no_chat_is_told(house: House, body: Any, field: str) -> None:
    async def main() -> None:
        answer = await house.door.http("POST", "/v1/chats", "ann", body)
        error = answer.json["error"]
        assert (answer.status, error["code"], error["field"]) == (400, "INVALID_REQUEST", field)

    house.run(main())


# --- both ways of reading ------------------------------------------------------------------------------

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
def test_the_quick_way_reads_what_the_long_way_reads_or_nothing(
    members: list[tuple[str, Any]], is_plain: bool, is_ascii: bool
) -> None:
    pairs = [*(_PLAIN.items() if is_plain else ()), *members]
    text = ",".join(f"{json.dumps(name)}:{json.dumps(value, ensure_ascii=is_ascii)}" for name, value in pairs)
    data = f"{{{text}}}".encode("utf-8", "replace")
    quick = read_quickly(data, 4096)
    if quick is not None:
        assert read_frame(data, 4096) == quick


@pytest.mark.rule("CO-3")
def test_a_member_that_is_there_twice_is_refused_either_way() -> None:
    data = json.dumps(_PLAIN).encode()
    assert isinstance(read_quickly(data, 4096), Send)
    twice = data[:-1] + b',"content":"other"}'
    assert read_quickly(twice, 4096) is None
    with pytest.raises(BadFrameError):
        read_frame(twice, 4096)


@pytest.mark.rule("CO-1", "CO-4")
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_body_is_in_canonical_form(content: str) -> None:
    assert message_body(content, "text/plain") == canonical({"content": content, "content_type": "text/plain"})
