"""Live delivery to connected devices: messages, acknowledgements and membership changes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from oncelog.server.chat import ack_queue, codec
from server.chat.chat_servers import SharedServer, message_uuid, run_server, sequences

pytestmark = BOTH_STORES


@pytest.mark.rule("CH-7")
async def test_message_reaches_all_devices_of_all_members_except_the_sender(
    shared_server: SharedServer,
) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    phone, laptop = (
        await shared_server.server.connect("ann"),
        await shared_server.server.connect("ann", device_id="laptop"),
    )
    bob, eve = await shared_server.server.connect("bob"), await shared_server.server.connect("eve")
    bot = await shared_server.server.connect("bob", live=False)
    await phone.send_committed(chat, 1, "hi")
    (stored,) = await bob.sync_all(chat)
    for device in (laptop, bob):
        assert await device.wait_for_frame(type="message") == {"type": "message", **stored}
    for device in (phone, laptop, bob, eve, bot):
        assert await device.take_frames() == []
    await laptop.send_committed(chat, 1, "hi")  # a retry is not delivered again
    assert await phone.take_frames() == await bob.take_frames() == []


@pytest.mark.rule("CH-7", "CO-13")
async def test_live_messages_are_complete_and_in_order(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob", "cyn")
    ann, bob, cyn = [await shared_server.server.connect(name) for name in ("ann", "bob", "cyn")]
    for number in range(1, 301):
        sender = ann if number % 2 else bob
        await sender.send_frame("send_message", client_message_id=message_uuid(number), chat_id=chat, content="x")
    assert sequences(await cyn.wait_for_frames(300, "message")) == list(range(1, 301))
    own = sequences(await ann.wait_for_frames(150, "send_message_ack"))
    assert sorted(own + sequences(await ann.wait_for_frames(150, "message"))) == list(range(1, 301))


@pytest.mark.rule("CH-7")
async def test_broadcast_is_encoded_once(shared_server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = shared_server.chat()
    encoded = []
    encode = codec.encode_message_frame

    def count_encoding(record: Any) -> bytes:
        encoded.append(record.sequence)
        return encode(record)

    monkeypatch.setattr(codec, "encode_message_frame", count_encoding)
    await shared_server.server.create(chat, "ann", *(f"m{number}" for number in range(20)))
    members = [await shared_server.server.connect(f"m{number}") for number in range(20)]
    ann = await shared_server.server.connect("ann")
    await ann.send_committed(chat, 1)
    for member in members:
        await member.wait_for_frame(type="message")
    assert encoded == [1]


@pytest.mark.rule("CH-7", "CH-12")
async def test_sync_after_connecting_misses_nothing(shared_server: SharedServer) -> None:
    """Another user sends continuously. Messages that the sync does not return are delivered live."""
    chat, server = shared_server.chat(), shared_server.server
    await server.create(chat, "ann", "bob")
    ann = await server.connect("ann", live=False)
    is_sending = True

    async def send() -> None:
        number = 0
        while is_sending:
            number += 1
            await ann.send_committed(chat, number)

    sending = asyncio.ensure_future(send())
    for _ in range(10):
        bob = await server.connect("bob")
        # A message delivered live before the end of the sync may also be in the sync.
        seen = {*sequences(await bob.sync_all(chat)), *sequences(await bob.wait_for_frames(3, "message"))}
        assert seen == set(range(1, max(seen) + 1))
        await bob.close()
    is_sending = False
    await sending


# --- acknowledgements ------------------------------------------------------------------------------------


@pytest.mark.rule("CH-8")
async def test_ack_only_moves_forward_and_is_delivered_to_members(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    for number in range(1, 4):
        await ann.send_committed(chat, number)
    await bob.acknowledge(chat, 2)
    delivery = {"type": "delivery", "chat_id": chat, "user_id": "user:bob", "last_acked_sequence": 2}
    assert await ann.wait_for_frame(type="delivery") == delivery
    assert await bob.wait_for_frame(type="delivery") == delivery  # other devices of the same user get it too
    await bob.acknowledge(chat, 1)
    await bob.acknowledge(chat, 2)
    await bob.acknowledge(chat, 3)
    assert (await ann.wait_for_frame(type="delivery"))["last_acked_sequence"] == 3
    await shared_server.server.wait_for_watermark(chat, "bob", 3)
    assert await shared_server.server.watermarks(chat, "ann") == {"user:ann": 0, "user:bob": 3}
    await bob.acknowledge(chat, 2)
    assert [frame["type"] for frame in await ann.take_frames()] == []
    assert (await shared_server.server.watermarks(chat, "ann"))["user:bob"] == 3


@pytest.mark.rule("CH-8", "CO-30")
@pytest.mark.parametrize("valid", [0, 150])
async def test_each_refused_ack_is_reported(shared_server: SharedServer, valid: int) -> None:
    chat = shared_server.chat(valid)
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    for number in range(valid):
        await ann.send_committed(chat, valid * 1000 + number)
    numbers = range(300, 0, -1)
    for number in numbers:
        await bob.send_frame("ack", chat_id=chat, last_acked_sequence=number, request_id=f"a{number}")
    for number in numbers:
        if number > valid:
            assert (await bob.wait_for_frame(request_id=f"a{number}"))["code"] == "INVALID_ACK"
    await shared_server.server.wait_for_watermark(chat, "bob", valid)
    assert not [frame for frame in await bob.take_frames() if frame["type"] == "error"]


@pytest.mark.rule("CH-8")
async def test_ack_beyond_the_end_is_refused_and_others_are_applied(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    await ann.send_committed(chat, 1)
    await ann.send_committed(chat, 2)
    for sequence in (1, 99, 2, 3, 2**53 - 1, 1):
        await bob.send_frame("ack", chat_id=chat, last_acked_sequence=sequence, request_id=f"ack {sequence}")
    errors = await bob.wait_for_frames(3, "error")
    assert {one["request_id"] for one in errors} == {"ack 99", "ack 3", f"ack {2**53 - 1}"}
    assert {(one["code"], one["chat_id"], one["last_sequence"]) for one in errors} == {("INVALID_ACK", chat, 2)}
    await shared_server.server.wait_for_watermark(chat, "bob", 2)
    answer = await shared_server.server.http("POST", f"/v1/chats/{chat}/ack", "ann", {"last_acked_sequence": 3})
    assert (answer.status, answer.json["error"]["code"]) == (409, "INVALID_ACK")
    for changed in (True, False):
        answer = await shared_server.server.http("POST", f"/v1/chats/{chat}/ack", "ann", {"last_acked_seq": 2})
        assert (answer.status, answer.json) == (200, {"chat_id": chat, "changed": changed})
    for members in ({"last_acked_sequence": -1}, {"last_acked_sequence": "1"}, {}):
        assert await bob.expect_refusal("ack", chat_id=chat, **members) == "INVALID_REQUEST"


@pytest.mark.rule("CH-8", "CO-30")
async def test_many_acks_are_combined_into_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path) as server:
        await server.create("c", "ann", "bob")
        ann, bob = await server.connect("ann"), await server.connect("bob")
        for number in range(1, 101):
            await ann.send_frame("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
        await bob.wait_for_frames(100, "message")
        await ann.wait_for_frames(100, "send_message_ack")
        gate = server.served.hold_commits(monkeypatch)
        for number in range(1, 101):
            await bob.acknowledge("c", number)
        await bob.request("ping")
        assert server.served.server.log.queue_length == 1
        gate.open()
        await server.wait_for_watermark("c", "bob", 100)
        deliveries = [frame for frame in await ann.take_frames() if frame["type"] == "delivery"]
        assert len(deliveries) <= 2


@pytest.mark.rule("CH-8", "CO-30")
async def test_lowest_acks_are_refused_when_too_many_are_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_queue, "PENDING_ACKS_MAX", 3)
    async with run_server(tmp_path) as server:
        await server.create("c", "ann", "bob")
        ann, bob = await server.connect("ann"), await server.connect("bob")
        for number in range(1, 9):
            await ann.send_committed("c", number)
        gate = server.served.hold_commits(monkeypatch)
        for number in (1, 4, 8, 3, 9, 2, 7):  # the first ack is already being committed
            await bob.send_frame("ack", chat_id="c", last_acked_sequence=number, request_id=f"a{number}")
        await bob.request("ping")  # meanwhile the connection is not blocked
        for number in (3, 2, 4):
            error = await bob.wait_for_frame(type="error")
            assert (error["request_id"], error["code"]) == (f"a{number}", "BUSY")
            assert error["retry_after_ms"] == 100
        gate.open()
        error = await bob.wait_for_frame(type="error")
        assert (error["request_id"], error["code"]) == ("a9", "INVALID_ACK")
        await server.wait_for_watermark("c", "bob", 8)


# --- members -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-7", "CH-9")
async def test_new_member_is_notified_and_receives_later_messages(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    await shared_server.server.create(chat, "ann")
    await ann.wait_for_frame(type="membership")
    await ann.send_committed(chat, 1, "before")
    assert await bob.take_frames() == []
    await shared_server.server.set_member(chat, "ann", "bob")
    joined = {"type": "membership", "chat_id": chat, "user_id": "user:bob", "present": True, "last_acked_sequence": 0}
    joined["role"] = "member"
    assert await ann.wait_for_frame(type="membership") == await bob.wait_for_frame(type="membership") == joined
    await ann.send_committed(chat, 2, "after")
    assert (await bob.wait_for_frame(type="message"))["sequence"] == 2
    assert sequences(await bob.sync_all(chat)) == [1, 2]


@pytest.mark.rule("CH-7", "CH-9", "CO-22")
async def test_removed_member_receives_no_more_messages(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    ann, bob = await shared_server.server.connect("ann"), await shared_server.server.connect("bob")
    await bob.send_committed(chat, 1, "mine")
    await bob.acknowledge(chat, 1)
    await shared_server.server.wait_for_watermark(chat, "bob", 1)
    await shared_server.server.set_member(chat, "ann", "bob", present=False)
    for number in range(2, 12):
        await ann.send_committed(chat, number)
    removed = {"type": "membership", "chat_id": chat, "user_id": "user:bob", "present": False}
    assert await bob.wait_for_frame(type="membership", present=False) == removed
    assert "message" not in {frame["type"] for frame in await bob.take_frames()}
    mine = {"client_message_id": message_uuid(1), "content": "mine"}
    assert await bob.expect_refusal("send_message", chat_id=chat, **mine) == "NOT_A_MEMBER"
    assert await bob.expect_refusal("sync_request", chat_id=chat, last_acked_sequence=0) == "NOT_A_MEMBER"
    assert await bob.expect_refusal("ack", chat_id=chat, last_acked_sequence=1) == "NOT_A_MEMBER"
    await shared_server.server.set_member(chat, "ann", "bob")
    assert await bob.send_committed(chat, 1, "mine") == 1
    await ann.send_committed(chat, 20)
    assert (await bob.wait_for_frame(type="message"))["sequence"] == 12


@pytest.mark.rule("CH-9")
async def test_leaving_member_is_notified_on_all_devices(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann", "bob")
    devices = [await shared_server.server.connect("bob"), await shared_server.server.connect("bob")]
    assert (await shared_server.server.set_member(chat, "bob", "bob", present=False)).status == 200
    for device in devices:
        assert (await device.wait_for_frame(type="membership"))["present"] is False
    assert (await shared_server.server.set_member(chat, "bob", "bob")).status == 403
