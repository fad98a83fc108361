"""What those who are connected are told: messages, how far others have come, who comes and goes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from doors.chat.chat_doors import House, message_uuid, opened, sequences
from doors.serving import run
from oncelog.doors.chat import acks, words

pytestmark = BOTH_STORES


@pytest.mark.rule("CH-7")
def test_a_message_reaches_every_device_of_every_member_but_the_one_that_sent_it(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann", "bob")
        phone, laptop = await house.door.device("ann"), await house.door.device("ann", device_id="laptop")
        bob, eve = await house.door.device("bob"), await house.door.device("eve")
        bot = await house.door.device("bob", live=False)
        await phone.sent(chat, 1, "hi")
        (stored,) = await bob.synced(chat)
        for device in (laptop, bob):
            assert await device.take(type="message") == {"type": "message", **stored}
        for device in (phone, laptop, bob, eve, bot):
            assert await device.quiet() == []
        await laptop.sent(chat, 1, "hi")  # a retry is no second message
        assert await phone.quiet() == await bob.quiet() == []

    house.run(main())


@pytest.mark.rule("CH-7", "CO-13")
def test_live_messages_come_in_order_and_none_is_missing(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann", "bob", "cyn")
        ann, bob, cyn = [await house.door.device(name) for name in ("ann", "bob", "cyn")]
        for number in range(1, 301):
            sender = ann if number % 2 else bob
            await sender.tell("send_message", client_message_id=message_uuid(number), chat_id=chat, content="x")
        assert sequences(await cyn.takes(300, "message")) == list(range(1, 301))
        own = sequences(await ann.takes(150, "send_message_ack"))
        assert sorted(own + sequences(await ann.takes(150, "message"))) == list(range(1, 301))

    house.run(main())


@pytest.mark.rule("CH-7")
def test_a_broadcast_is_encoded_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = house.chat()
    encoded = []
    encode = words.message_frame

    def counted(record: Any) -> bytes:
        encoded.append(record.sequence)
        return encode(record)

    monkeypatch.setattr(words, "message_frame", counted)

    async def main() -> None:
        await house.door.create(chat, "ann", *(f"m{number}" for number in range(20)))
        members = [await house.door.device(f"m{number}") for number in range(20)]
        ann = await house.door.device("ann")
        await ann.sent(chat, 1)
        for member in members:
            await member.take(type="message")

    house.run(main())
    assert encoded == [1]


@pytest.mark.rule("CH-7", "CH-12")
def test_whoever_syncs_after_being_connected_misses_nothing(tmp_path: Path) -> None:
    """While somebody else sends all the time: what the sync did not bring comes live."""

    async def main() -> None:
        async with opened(tmp_path) as door:
            await door.create("c", "ann", "bob")
            ann = await door.device("ann", live=False)
            goes_on = True
            number = 0

            async def send() -> None:
                nonlocal number
                while goes_on:
                    number += 1
                    await ann.sent("c", number)

            sending = asyncio.ensure_future(send())
            for _ in range(15):
                bob = await door.device("bob")
                # What came live before the sync ended may be in both.
                seen = {*sequences(await bob.synced("c")), *sequences(await bob.takes(3, "message"))}
                assert seen == set(range(1, max(seen) + 1))
                await bob.close()
            goes_on = False
            await sending

    run(main())


# --- acknowledgements ------------------------------------------------------------------------------------


@pytest.mark.rule("CH-8")
def test_an_ack_moves_forward_only_and_members_see_it(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann", "bob")
        ann, bob = await house.door.device("ann"), await house.door.device("bob")
        for number in range(1, 4):
            await ann.sent(chat, number)
        await bob.acknowledge(chat, 2)
        told = {"type": "delivery", "chat_id": chat, "user_id": "user:bob", "last_acked_sequence": 2}
        assert await ann.take(type="delivery") == told
        assert await bob.take(type="delivery") == told  # his other devices know of it, and so does this one
        await bob.acknowledge(chat, 1)
        await bob.acknowledge(chat, 2)
        await bob.acknowledge(chat, 3)
        assert (await ann.take(type="delivery"))["last_acked_sequence"] == 3
        await house.door.watermark(chat, "bob", 3)
        assert await house.door.watermarks(chat, "ann") == {"user:ann": 0, "user:bob": 3}
        await bob.acknowledge(chat, 2)
        assert [frame["type"] for frame in await ann.quiet()] == []
        assert (await house.door.watermarks(chat, "ann"))["user:bob"] == 3

    house.run(main())


@pytest.mark.rule("CH-8", "CO-30")
@pytest.mark.parametrize("valid", [0, 150])
def test_of_many_acks_at_once_each_that_is_refused_is_told(house: House, valid: int) -> None:
    chat = house.chat(valid)

    async def main() -> None:
        await house.door.create(chat, "ann", "bob")
        ann, bob = await house.door.device("ann"), await house.door.device("bob")
        for number in range(valid):
            await ann.sent(chat, valid * 1000 + number)
        numbers = range(300, 0, -1)
        for number in numbers:
            await bob.tell("ack", chat_id=chat, last_acked_sequence=number, request_id=f"a{number}")
        for number in numbers:
            if number > valid:
                assert (await bob.take(request_id=f"a{number}"))["code"] == "INVALID_ACK"
        await house.door.watermark(chat, "bob", valid)
        assert not [frame for frame in await bob.quiet() if frame["type"] == "error"]

    house.run(main())


@pytest.mark.rule("CH-8")
def test_an_ack_beyond_the_end_is_refused_and_the_others_beside_it_hold(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann", "bob")
        ann, bob = await house.door.device("ann"), await house.door.device("bob")
        await ann.sent(chat, 1)
        await ann.sent(chat, 2)
        for sequence in (1, 99, 2, 3, 2**53 - 1, 1):
            await bob.tell("ack", chat_id=chat, last_acked_sequence=sequence, request_id=f"ack {sequence}")
        errors = await bob.takes(3, "error")
        assert {one["request_id"] for one in errors} == {"ack 99", "ack 3", f"ack {2**53 - 1}"}
        assert {(one["code"], one["chat_id"], one["last_sequence"]) for one in errors} == {("INVALID_ACK", chat, 2)}
        await house.door.watermark(chat, "bob", 2)
        answer = await house.door.http("POST", f"/v1/chats/{chat}/ack", "ann", {"last_acked_sequence": 3})
        assert (answer.status, answer.json["error"]["code"]) == (409, "INVALID_ACK")
        for changed in (True, False):
            answer = await house.door.http("POST", f"/v1/chats/{chat}/ack", "ann", {"last_acked_seq": 2})
            assert (answer.status, answer.json) == (200, {"chat_id": chat, "changed": changed})
        for members in ({"last_acked_sequence": -1}, {"last_acked_sequence": "1"}, {}):
            assert await bob.refused("ack", chat_id=chat, **members) == "INVALID_REQUEST"

    house.run(main())


@pytest.mark.rule("CH-8", "CO-30")
def test_many_acks_become_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path) as door:
            await door.create("c", "ann", "bob")
            ann, bob = await door.device("ann"), await door.device("bob")
            for number in range(1, 101):
                await ann.tell("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
            await bob.takes(100, "message")
            await ann.takes(100, "send_message_ack")
            gate = door.served.hold_commits(monkeypatch)
            for number in range(1, 101):
                await bob.acknowledge("c", number)
            await bob.ask("ping")
            assert door.served.server.log.queued == 1
            gate.open()
            await door.watermark("c", "bob", 100)
            deliveries = [frame for frame in await ann.quiet() if frame["type"] == "delivery"]
            assert len(deliveries) <= 2

    run(main())


@pytest.mark.rule("CH-8", "CO-30")
def test_of_more_acks_than_may_wait_the_lowest_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "WAITING_MAX", 3)

    async def main() -> None:
        async with opened(tmp_path) as door:
            await door.create("c", "ann", "bob")
            ann, bob = await door.device("ann"), await door.device("bob")
            for number in range(1, 9):
                await ann.sent("c", number)
            gate = door.served.hold_commits(monkeypatch)
            for number in (1, 4, 8, 3, 9, 2, 7):  # the first is on its way
                await bob.tell("ack", chat_id="c", last_acked_sequence=number, request_id=f"a{number}")
            await bob.ask("ping")  # nobody's connection stands still meanwhile
            for number in (3, 2, 4):
                error = await bob.take(type="error")
                assert (error["request_id"], error["code"]) == (f"a{number}", "BUSY")
                assert error["retry_after_ms"] == 100
            gate.open()
            error = await bob.take(type="error")
            assert (error["request_id"], error["code"]) == ("a9", "INVALID_ACK")
            await door.watermark("c", "bob", 8)

    run(main())


# --- who comes and goes ------------------------------------------------------------------------------------


@pytest.mark.rule("CH-7", "CH-9")
def test_a_new_member_is_told_and_gets_what_is_sent_from_then_on(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        ann, bob = await house.door.device("ann"), await house.door.device("bob")
        await house.door.create(chat, "ann")
        await ann.take(type="membership")
        await ann.sent(chat, 1, "before")
        assert await bob.quiet() == []
        await house.door.set_member(chat, "ann", "bob")
        told = {"type": "membership", "chat_id": chat, "user_id": "user:bob", "present": True, "last_acked_sequence": 0}
        assert await ann.take(type="membership") == await bob.take(type="membership") == told
        await ann.sent(chat, 2, "after")
        assert (await bob.take(type="message"))["sequence"] == 2
        assert sequences(await bob.synced(chat)) == [1, 2]

    house.run(main())


@pytest.mark.rule("CH-7", "CH-9", "CO-22")
def test_a_member_that_is_removed_gets_nothing_more_at_once(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann", "bob")
        ann, bob = await house.door.device("ann"), await house.door.device("bob")
        await bob.sent(chat, 1, "mine")
        await bob.acknowledge(chat, 1)
        await house.door.watermark(chat, "bob", 1)
        await house.door.set_member(chat, "ann", "bob", present=False)
        for number in range(2, 12):
            await ann.sent(chat, number)
        told = [frame for frame in await bob.quiet() if frame["type"] != "delivery"]
        assert told == [{"type": "membership", "chat_id": chat, "user_id": "user:bob", "present": False}]
        mine = {"client_message_id": message_uuid(1), "content": "mine"}
        assert await bob.refused("send_message", chat_id=chat, **mine) == "NOT_A_MEMBER"
        assert await bob.refused("sync_request", chat_id=chat, last_acked_sequence=0) == "NOT_A_MEMBER"
        assert await bob.refused("ack", chat_id=chat, last_acked_sequence=1) == "NOT_A_MEMBER"
        await house.door.set_member(chat, "ann", "bob")
        assert await bob.sent(chat, 1, "mine") == 1
        await ann.sent(chat, 20)
        assert (await bob.take(type="message"))["sequence"] == 12

    house.run(main())


@pytest.mark.rule("CH-9")
def test_one_may_leave_and_is_told_on_all_devices(house: House) -> None:
    chat = house.chat()

    async def main() -> None:
        await house.door.create(chat, "ann", "bob")
        devices = [await house.door.device("bob"), await house.door.device("bob")]
        assert (await house.door.set_member(chat, "bob", "bob", present=False)).status == 200
        for device in devices:
            assert (await device.take(type="membership"))["present"] is False
        assert (await house.door.set_member(chat, "bob", "bob")).status == 403

    house.run(main())
