"""The Chat API on two servers that share a log behaves the same, regardless of the server that a user uses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from databases import BOTH_STORES
from server.chat.chat_servers import ChatServer, message_uuid, run_server, sequences
from server.shared_servers import ServerPool, pool_fixture, unique_name

pytestmark = BOTH_STORES


@asynccontextmanager
async def run_server_pair(directory: Path) -> AsyncIterator[tuple[ChatServer, ChatServer]]:
    async with run_server(directory) as one, run_server(directory) as other:
        yield one, other


pair_pool = pool_fixture(run_server_pair)


class Pair:
    """Two servers on one log that many tests share. Each test uses a separate chat and separate users."""

    def __init__(self, servers: tuple[ChatServer, ChatServer], name: str) -> None:
        self.servers = servers
        self.chat = name

    def users(self, *names: str) -> list[str]:
        return [f"{name}-{self.chat}" for name in names]

    async def create(self, *users: str) -> None:
        """Create the chat on the first server and wait until both servers have notified its members."""
        devices = [await server.connect(users[0]) for server in self.servers]
        await self.servers[0].create(self.chat, *users)
        for device in devices:
            for user in users:
                await device.wait_for_frame(type="membership", user_id=f"user:{user}")
            await device.close()


@pytest_asyncio.fixture(loop_scope="session")
async def pair(
    session_loop: None,
    pair_pool: ServerPool[tuple[ChatServer, ChatServer]],
    store_kind: str,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Pair]:
    servers = await pair_pool.get(store_kind)
    yield Pair(servers, unique_name(request))
    for server in servers:
        await server.close()


@pytest.mark.rule("CH-7", "CO-13")
async def test_messages_reach_members_on_the_other_server_in_order(pair: Pair) -> None:
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob")
    await pair.create(*users)
    ann, bob = await one.connect(users[0]), await other.connect(users[1])
    for number in range(1, 101):
        device = ann if number % 2 else bob
        await device.send_frame("send_message", client_message_id=message_uuid(number), chat_id=chat, content="x")
    for device in (ann, bob):
        own = sequences(await device.wait_for_frames(50, "send_message_ack"))
        live = sequences(await device.wait_for_frames(50, "message"))
        assert live == sorted(live)
        assert sorted(own + live) == list(range(1, 101))


@pytest.mark.rule("CH-3", "CH-4", "CO-14")
async def test_message_sent_on_both_servers_is_stored_once(pair: Pair) -> None:
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob")
    await pair.create(*users)
    here, there = await one.connect(users[0]), await other.connect(users[0])
    bob = await other.connect(users[1])
    answers = await asyncio.gather(here.send(chat, 1), there.send(chat, 1))
    assert {answer["sequence"] for answer in answers} == {1}
    assert sorted(answer["duplicate"] for answer in answers) == [False, True]
    mismatch = await there.send(chat, 1, "other")
    assert mismatch["content_mismatch"] is True
    assert (await bob.wait_for_frame(type="message"))["sequence"] == 1
    assert [frame["type"] for frame in await bob.take_frames()] == []


@pytest.mark.rule("CH-4", "CH-7")
@pytest.mark.parametrize("name", ["ann", "bob"])
async def test_device_whose_message_id_was_used_on_the_other_server_receives_the_stored_message(
    pair: Pair, name: str
) -> None:
    """The devices belong to two users or to the same user. The losing device gets an answer, but it refers to the
    winner's text.
    """
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob")
    await pair.create(*users)
    devices = (await one.connect(users[0]), await other.connect(*pair.users(name)))
    for number in range(1, 11):  # the answer and the message may arrive in either order
        texts = ("here", "there")
        sends = (device.send(chat, number, text) for device, text in zip(devices, texts, strict=True))
        answers = await asyncio.gather(*sends)
        [winner] = (place for place in (0, 1) if not answers[place]["duplicate"])
        loser = 1 - winner
        assert answers[loser]["content_mismatch"] is True
        message = await devices[loser].wait_for_frame(type="message")
        stored = (message["sequence"], message["content"], message["sender_id"])
        assert stored == (number, texts[winner], f"user:{devices[winner].name}")
        assert await devices[winner].take_frames() == []


@pytest.mark.rule("CH-7", "CH-9")
async def test_member_added_on_the_other_server_starts_to_receive(pair: Pair) -> None:
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob")
    bob, ann = await other.connect(users[1]), await one.connect(users[0])
    await one.create(chat, users[0])
    await one.set_member(chat, *users)
    assert (await bob.wait_for_frame(type="membership", user_id=f"user:{users[1]}"))["present"] is True
    await ann.send_committed(chat, 1)
    assert (await bob.wait_for_frame(type="message"))["sequence"] == 1


@pytest.mark.rule("CH-9", "CO-22")
async def test_member_removed_on_the_other_server_is_notified_and_receives_nothing_more(pair: Pair) -> None:
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob", "cyn")
    await pair.create(*users)
    ann, bob, cyn = await one.connect(users[0]), await other.connect(users[1]), await other.connect(users[2])
    await one.set_member(chat, users[0], users[1], present=False)
    # Requests are checked against the log, not against the member lists that the server has in memory.
    assert await bob.expect_refusal("sync_request", chat_id=chat, last_acked_sequence=0) == "NOT_A_MEMBER"
    gone = {"type": "membership", "chat_id": chat, "user_id": f"user:{users[1]}", "present": False}
    assert await bob.wait_for_frame(type="membership") == await cyn.wait_for_frame(type="membership") == gone
    await ann.send_committed(chat, 1)
    assert (await cyn.wait_for_frame(type="message"))["sequence"] == 1
    assert await bob.take_frames() == []


@pytest.mark.rule("CH-9", "CO-22")
async def test_message_sent_right_after_a_removal_does_not_reach_the_removed_member(pair: Pair) -> None:
    """The removed member's server reads the removal and the message together."""
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob", "cyn")
    await pair.create(*users)
    ann, bob, cyn = await one.connect(users[0]), await other.connect(users[1]), await other.connect(users[2])
    for number in range(1, 11):
        await one.set_member(chat, users[0], users[1], present=False)
        await ann.send_committed(chat, number, "secret")
        assert (await cyn.wait_for_frame(type="message"))["sequence"] == number
        await bob.wait_for_frame(type="membership", present=False)
        assert "message" not in {frame["type"] for frame in await bob.take_frames()}
        await one.set_member(chat, users[0], users[1])
        await bob.wait_for_frame(type="membership", present=True)


@pytest.mark.rule("CH-8")
async def test_ack_on_the_other_server_is_delivered(pair: Pair) -> None:
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob")
    await pair.create(*users)
    ann, bob = await one.connect(users[0]), await other.connect(users[1])
    for number in (1, 2, 3):
        await ann.send_committed(chat, number)
    await bob.wait_for_frames(3, "message")
    await bob.acknowledge(chat, 2)
    delivery = await ann.wait_for_frame(type="delivery")
    assert (delivery["user_id"], delivery["last_acked_sequence"]) == (f"user:{users[1]}", 2)
    await bob.acknowledge(chat, 3)
    assert (await ann.wait_for_frame(type="delivery"))["last_acked_sequence"] == 3
    assert await bob.expect_refusal("ack", chat_id=chat, last_acked_sequence=4) == "INVALID_ACK"
    assert await one.watermarks(chat, users[0]) == {f"user:{users[0]}": 0, f"user:{users[1]}": 3}


@pytest.mark.rule("CH-8")
async def test_returning_member_keeps_its_watermark(pair: Pair) -> None:
    """Devices on both servers get the same notification."""
    (one, other), chat, users = pair.servers, pair.chat, pair.users("ann", "bob", "cyn")
    await pair.create(*users)
    here, there = await one.connect(users[0]), await other.connect(users[2])
    for number in (1, 2):
        await here.send_committed(chat, number)
    bob = await one.connect(users[1])
    await bob.acknowledge(chat, 2)
    await one.wait_for_watermark(chat, users[1], 2)
    await one.set_member(chat, users[0], users[1], present=False)
    for device in (here, there):
        await device.wait_for_frame(type="membership", present=False)
    await one.set_member(chat, users[0], users[1])
    for device in (here, there):
        joined = await device.wait_for_frame(type="membership", user_id=f"user:{users[1]}")
        assert joined["last_acked_sequence"] == 2
    assert (await one.watermarks(chat, users[0]))[f"user:{users[1]}"] == 2


@pytest.mark.rule("CH-9", "CO-14")
async def test_chat_created_on_both_servers_at_once_has_one_creator(pair: Pair) -> None:
    one, other = pair.servers
    for number in range(8):
        body = {"chat_id": f"{pair.chat}-{number}"}
        answers = await asyncio.gather(
            one.http("POST", "/v1/chats", "ann", body), other.http("POST", "/v1/chats", "bob", body)
        )
        assert sorted(answer.status for answer in answers) == [201, 403]


@pytest.mark.rule("CH-7")
async def test_many_concurrent_membership_changes_reach_the_other_server(pair: Pair) -> None:
    """The changes fill more than one page, in all lanes."""
    (one, other), users = pair.servers, pair.users("ann", "bob")
    bob = await other.connect(users[1])
    body = {"members": [f"user:{users[1]}", *(f"user:m{number}" for number in range(400))]}
    made = await asyncio.gather(*[one.http("POST", "/v1/chats", users[0], body) for _ in range(12)])
    chats = {answer.json["chat_id"] for answer in made}
    joined = {(await bob.wait_for_frame(type="membership", user_id=f"user:{users[1]}"))["chat_id"] for _ in chats}
    assert joined == chats
    ann = await one.connect(users[0])
    for number, chat in enumerate(chats, 1):
        await ann.send_committed(chat, number)
    assert {(await bob.wait_for_frame(type="message"))["chat_id"] for _ in chats} == chats
