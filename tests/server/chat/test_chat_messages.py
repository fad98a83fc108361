"""Messages are stored once and in one order, even if clients send them repeatedly."""

import asyncio
import re

import pytest

from databases import BOTH_STORES
from server.chat.chat_servers import MESSAGE, SharedServer, message_uuid, sequences

pytestmark = BOTH_STORES


@pytest.mark.rule("CH-1", "CH-2")
async def test_answered_message_is_visible_to_all_members(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    for number in range(1, 6):
        answer = await ann.send(chat, number, f"m{number}")
        assert answer == {
            "type": "send_message_ack",
            "request_id": answer["request_id"],
            "client_message_id": message_uuid(number),
            "chat_id": chat,
            "message_id": answer["message_id"],
            "sequence": number,
            "created_at": answer["created_at"],
            "duplicate": False,
        }
        assert re.fullmatch(r"msg_[0-9a-f]{26}", answer["message_id"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", answer["created_at"])
        (stored,) = (await bob.sync(chat, number - 1))["messages"]
        same = {name: answer[name] for name in ("message_id", "sequence", "created_at", "client_message_id")}
        assert same.items() <= stored.items()


@pytest.mark.rule("CH-2", "CH-7")
async def test_concurrent_messages_get_dense_sequences_in_each_chat(shared_server: SharedServer) -> None:
    chats = [shared_server.chat(suffix) for suffix in "abc"]
    for chat in chats:
        await shared_server.server.create(chat, "ann", "bob")
    devices = [await shared_server.server.connect(name) for name in ("ann", "bob", "ann")]
    numbers = iter(range(1, 10**6))
    sends = [(chat, index % 3, next(numbers)) for index in range(39) for chat in chats]
    for chat, index, number in sends:
        await devices[index].send_frame(
            "send_message", client_message_id=message_uuid(number), chat_id=chat, content=str(number)
        )
    acked = [frame for device in devices for frame in await device.wait_for_frames(39, "send_message_ack")]
    for chat in chats:
        messages = await devices[0].sync_all(chat)
        assert sequences(messages) == list(range(1, 40))
        answered = {one["client_message_id"]: one["sequence"] for one in acked if one["chat_id"] == chat}
        assert answered == {one["client_message_id"]: one["sequence"] for one in messages}


@pytest.mark.rule("CH-3", "CH-4")
async def test_retry_gets_the_original_answer(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    first = await ann.send(chat, 1, "one")
    await ann.send(chat, 2, "two")
    again = await ann.send(chat, 1, "one")
    assert again == {**first, "request_id": again["request_id"], "duplicate": True}
    other_device = await shared_server.server.connect("ann")
    again = await other_device.send(chat, 1, "one", client_message_id=message_uuid(1).upper())
    assert (again["sequence"], again["duplicate"], "content_mismatch" in again) == (1, True, False)
    assert again["client_message_id"] == message_uuid(1).upper()
    for device, content, more in (
        (ann, "other", {}),
        (ann, "one", {"content_type": "text/markdown"}),
        (bob, "one", {}),
    ):
        answer = await device.send(chat, 1, content, **more)
        assert (answer["message_id"], answer["sequence"]) == (first["message_id"], 1)
        assert answer["duplicate"] is answer["content_mismatch"] is True
    stored = await bob.sync_all(chat)
    assert [(one["sender_id"], one["content"], one["content_type"]) for one in stored] == [
        ("user:ann", "one", "text/plain"),
        ("user:ann", "two", "text/plain"),
    ]


@pytest.mark.rule("CH-3", "CO-14")
async def test_concurrent_sends_of_one_id_store_one_message(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    devices = [await shared_server.server.connect(name) for name in ("ann", "ann", "bob")]
    answers = await asyncio.gather(*[device.send(chat, 7, "same") for device in devices for _ in range(1)])
    answers += [await devices[0].send(chat, 7, "same")]
    assert {(one["sequence"], one["message_id"]) for one in answers} == {(1, answers[0]["message_id"])}
    assert sorted(one["duplicate"] for one in answers) == [False, True, True, True]
    assert len(await devices[0].sync_all(chat)) == 1


@pytest.mark.rule("CH-3")
async def test_same_id_in_two_chats_is_two_messages(shared_server: SharedServer) -> None:
    one, two = shared_server.chat("one"), shared_server.chat("two")
    for chat in (one, two):
        await shared_server.server.create(chat, "ann")
    ann = await shared_server.server.connect("ann")
    answers = [await ann.send(chat, 1) for chat in (one, two)]
    assert [answer["duplicate"] for answer in answers] == [False, False]
    assert answers[0]["message_id"] != answers[1]["message_id"]


@pytest.mark.rule("CH-10")
@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        ("a", None),
        ("é" * 2048, "text/plain"),
        ('"\\/\b\f\n\r\t\x01\x7f\u2028\ud7ff\ue000\U0001f600', "text/markdown; charset=utf-8"),
        ("type:content:chat_id:", None),
        (" " * 4096, None),
    ],
)
async def test_message_is_delivered_and_stored_unchanged(
    shared_server: SharedServer, content: str, content_type: str | None
) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    answer = await ann.send(chat, 1, content, **({} if content_type is None else {"content_type": content_type}))
    live = await bob.wait_for_frame(type="message")
    (stored,) = await ann.sync_all(chat)
    (over_http,) = (await shared_server.server.http("GET", f"/v1/chats/{chat}/messages", "bob")).json["messages"]
    assert set(stored) == MESSAGE
    assert live == {"type": "message", **stored}
    assert over_http == stored
    assert stored == {
        "message_id": answer["message_id"],
        "chat_id": chat,
        "sequence": 1,
        "sender_id": "user:ann",
        "client_message_id": message_uuid(1),
        "content": content,
        "content_type": content_type or "text/plain",
        "created_at": answer["created_at"],
    }


@pytest.mark.rule("CO-20")
async def test_unknown_members_are_ignored_and_not_stored(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann")
    ann = await shared_server.server.connect("ann")
    await ann.send(chat, 1, sender_id="user:eve", actor="user:eve", sequence=17)
    (stored,) = await ann.sync_all(chat)
    assert (stored["sender_id"], stored["sequence"], set(stored)) == ("user:ann", 1, MESSAGE)


@pytest.mark.rule("CH-1")
async def test_message_sent_over_http_gets_the_same_answer(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    bob = await shared_server.server.connect("bob")
    body = {"client_message_id": message_uuid(1), "content": "hello"}
    path = f"/v1/chats/{chat}/messages"
    first = await shared_server.server.http("POST", path, "ann", body)
    again = await shared_server.server.http("POST", path, "ann", body)
    other = await shared_server.server.http("POST", path, "ann", {**body, "content": "other"})
    assert [first.status, again.status, other.status] == [201, 200, 200]
    assert again.json == {**first.json, "duplicate": True}
    assert other.json == {**first.json, "duplicate": True, "content_mismatch": True}
    assert (await bob.wait_for_frame(type="message"))["content"] == "hello"
    assert await bob.take_frames() == []
