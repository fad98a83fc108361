"""Two servers on one log: it makes no difference to which of them somebody is connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from databases import BOTH_STORES
from doors.chat.chat_doors import Door, message_uuid, opened, sequences
from doors.serving import run

pytestmark = BOTH_STORES


@asynccontextmanager
async def two(directory: Path) -> AsyncIterator[tuple[Door, Door]]:
    async with opened(directory) as one, opened(directory) as other:
        yield one, other


@pytest.mark.rule("CH-7", "CO-13")
def test_messages_reach_members_at_the_other_gateway_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob")
            ann, bob = await one.device("ann"), await other.device("bob")
            for number in range(1, 101):
                device = ann if number % 2 else bob
                await device.tell("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
            for device in (ann, bob):
                own = sequences(await device.takes(50, "send_message_ack"))
                live = sequences(await device.takes(50, "message"))
                assert live == sorted(live)
                assert sorted(own + live) == list(range(1, 101))

    run(main())


@pytest.mark.rule("CH-3", "CH-4", "CO-14")
def test_a_message_is_sent_again_at_the_other_gateway(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob")
            here, there = await one.device("ann"), await other.device("ann")
            bob = await other.device("bob")
            answers = await asyncio.gather(here.send("c", 1), there.send("c", 1))
            assert {answer["sequence"] for answer in answers} == {1}
            assert sorted(answer["duplicate"] for answer in answers) == [False, True]
            mismatch = await there.send("c", 1, "other")
            assert mismatch["content_mismatch"] is True
            assert (await bob.take(type="message"))["sequence"] == 1
            assert [frame["type"] for frame in await bob.quiet()] == []

    run(main())


@pytest.mark.rule("CH-4", "CH-7")
@pytest.mark.parametrize("name", ["ann", "bob"])
def test_whoever_comes_second_with_an_id_at_the_other_gateway_is_sent_what_the_first_said(
    tmp_path: Path, name: str
) -> None:
    """Of two people, and of two devices of one: he has an answer, but not to what he wrote."""

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob")
            devices = (await one.device("ann"), await other.device(name))
            for number in range(1, 21):  # whether the answer or the message comes first is a matter of chance
                texts = ("here", "there")
                sends = (device.send("c", number, text) for device, text in zip(devices, texts, strict=True))
                answers = await asyncio.gather(*sends)
                [winner] = (place for place in (0, 1) if not answers[place]["duplicate"])
                loser = 1 - winner
                assert answers[loser]["content_mismatch"] is True
                message = await devices[loser].take(type="message")
                said = (message["sequence"], message["content"], message["sender_id"])
                assert said == (number, texts[winner], f"user:{devices[winner].name}")
                assert await devices[winner].quiet() == []

    run(main())


@pytest.mark.rule("CH-7", "CH-9")
def test_whoever_is_made_a_member_at_the_other_gateway_starts_to_receive(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            bob, ann = await other.device("bob"), await one.device("ann")
            await one.create("c", "ann")
            await one.set_member("c", "ann", "bob")
            assert (await bob.take(type="membership", user_id="user:bob"))["present"] is True
            await ann.sent("c", 1)
            assert (await bob.take(type="message"))["sequence"] == 1

    run(main())


@pytest.mark.rule("CH-9", "CO-22")
def test_whoever_is_removed_at_the_other_gateway_is_told_and_gets_nothing_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob", "cyn")
            ann, bob, cyn = await one.device("ann"), await other.device("bob"), await other.device("cyn")
            await one.set_member("c", "ann", "bob", present=False)
            # Nothing of it is a matter of time: what is asked for is decided by the log, not by who is followed here.
            assert await bob.refused("sync_request", chat_id="c", last_acked_sequence=0) == "NOT_A_MEMBER"
            gone = {"type": "membership", "chat_id": "c", "user_id": "user:bob", "present": False}
            assert await bob.take(type="membership") == await cyn.take(type="membership") == gone
            await ann.sent("c", 1)
            assert (await cyn.take(type="message"))["sequence"] == 1
            assert await bob.quiet() == []

    run(main())


@pytest.mark.rule("CH-9", "CO-22")
def test_what_is_sent_after_a_removal_at_the_other_gateway_never_reaches_the_removed_one(tmp_path: Path) -> None:
    """Sent at once: the gateway that he is connected to hears of both together."""

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob", "cyn")
            ann, bob, cyn = await one.device("ann"), await other.device("bob"), await other.device("cyn")
            for number in range(1, 11):
                await one.set_member("c", "ann", "bob", present=False)
                await ann.sent("c", number, "secret")
                assert (await cyn.take(type="message"))["sequence"] == number
                assert [(frame["type"], frame["present"]) for frame in await bob.quiet()] == [("membership", False)]
                await one.set_member("c", "ann", "bob")
                await bob.take(type="membership", present=True)

    run(main())


@pytest.mark.rule("CH-8")
def test_acks_at_the_other_gateway_become_delivery_frames(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob")
            ann, bob = await one.device("ann"), await other.device("bob")
            for number in (1, 2, 3):
                await ann.sent("c", number)
            await bob.takes(3, "message")
            await bob.acknowledge("c", 2)
            told = await ann.take(type="delivery")
            assert (told["user_id"], told["last_acked_sequence"]) == ("user:bob", 2)
            await bob.acknowledge("c", 3)
            assert (await ann.take(type="delivery"))["last_acked_sequence"] == 3
            assert await bob.refused("ack", chat_id="c", last_acked_sequence=4) == "INVALID_ACK"
            assert await one.watermarks("c", "ann") == {"user:ann": 0, "user:bob": 3}

    run(main())


@pytest.mark.rule("CH-8")
def test_whoever_comes_back_has_received_what_he_had(tmp_path: Path) -> None:
    """Those at the gateway where it happens are told the same as those at the other."""

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            await one.create("c", "ann", "bob", "cyn")
            here, there = await one.device("ann"), await other.device("cyn")
            for number in (1, 2):
                await here.sent("c", number)
            bob = await one.device("bob")
            await bob.acknowledge("c", 2)
            await one.watermark("c", "bob", 2)
            await one.set_member("c", "ann", "bob", present=False)
            for device in (here, there):
                await device.take(type="membership", present=False)
            await one.set_member("c", "ann", "bob")
            for device in (here, there):
                assert (await device.take(type="membership", user_id="user:bob"))["last_acked_sequence"] == 2
            assert (await one.watermarks("c", "ann"))["user:bob"] == 2

    run(main())


@pytest.mark.rule("CH-9", "CO-14")
def test_two_who_make_a_chat_at_two_gateways(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (one, other):
            for number in range(8):
                body = {"chat_id": f"c{number}"}
                answers = await asyncio.gather(
                    one.http("POST", "/v1/chats", "ann", body), other.http("POST", "/v1/chats", "bob", body)
                )
                assert sorted(answer.status for answer in answers) == [201, 403]

    run(main())


@pytest.mark.rule("CH-7")
def test_many_changes_of_members_at_once_are_all_found_elsewhere(tmp_path: Path) -> None:
    """More than one page of them, in all lanes."""

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            bob = await other.device("bob")
            body = {"members": ["user:bob", *(f"user:m{number}" for number in range(400))]}
            made = await asyncio.gather(*[one.http("POST", "/v1/chats", "ann", body) for _ in range(12)])
            chats = {answer.json["chat_id"] for answer in made}
            joined = {(await bob.take(type="membership", user_id="user:bob"))["chat_id"] for _ in chats}
            assert joined == chats
            ann = await one.device("ann")
            for number, chat in enumerate(chats, 1):
                await ann.sent(chat, number)
            assert {(await bob.take(type="message"))["chat_id"] for _ in chats} == chats

    run(main())
