"""Live delivery to users with more chats than the server keeps in memory, regardless of other users."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES
from deadlines import soon, until
from oncelog.core.values import MemberIdentity
from oncelog.errors import StoreUnavailableError
from oncelog.server.chat import codec, member_lookups
from server.chat.chat_servers import ChatServer, Device, run_server, sequences

pytestmark = BOTH_STORES


class HeldLookups:
    """Holds member lookups in the store until a test releases them."""

    def __init__(self, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[set[MemberIdentity]] = []
        self.error: Exception | None = None
        self._permits = asyncio.Semaphore(0)
        books = server.served.server.log.state
        look_up = books.members_among

        async def held(identities: Iterable[MemberIdentity]) -> set[MemberIdentity]:
            asked = set(identities)
            found = await look_up(asked)
            self.asked.append(asked)
            await self._permits.acquire()
            if self.error is not None:
                raise self.error
            return found

        monkeypatch.setattr(books, "members_among", held)

    async def begin(self, number: int) -> None:
        """Wait until query `number` has read the store and is held."""
        await until(lambda: len(self.asked) >= number)

    def release(self, number: int = 1) -> None:
        for _ in range(number):
            self._permits.release()


async def create_large_users(server: ChatServer, *names: str) -> None:
    """Make the users members of `own` and of more chats than the server keeps in memory (`live_chats_max=2`)."""
    for chat in ("own", "x1", "x2"):
        await server.create(chat, "ann", *names)


async def messages_of(device: Device) -> list[tuple[str, int]]:
    return [(one["chat_id"], one["sequence"]) for one in await device.take_frames() if one["type"] == "message"]


@pytest.mark.rule("CH-19", "CH-7", "CO-30")
async def test_large_messages_in_unrelated_chats_do_not_disconnect_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, live_chats_max=2, outbox_bytes_max=10_000) as server:
        await create_large_users(server, "bob")
        for number in range(8):
            await server.create(f"mallory{number}", "mallory")
        ann, bob = await server.connect("ann", live=False), await server.connect("bob")
        mallory = await server.connect("mallory", live=False)
        held = HeldLookups(server, monkeypatch)
        for number in range(8):
            await mallory.send_committed(f"mallory{number}", number, "x" * 4000)
        for number in (1, 2):
            await ann.send_committed("own", number)
        held.release(100)
        assert sequences(await bob.wait_for_frames(2, "message")) == [1, 2]
        await ann.send_committed("own", 3)
        assert (await bob.wait_for_frame(type="message"))["sequence"] == 3


@pytest.mark.rule("CH-19", "CH-7", "CO-30")
async def test_user_that_reconnects_repeatedly_does_not_delay_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, live_chats_max=2) as server:
        await create_large_users(server, "bob", "eve")
        ann, bob = await server.connect("ann", live=False), await server.connect("bob")
        held = HeldLookups(server, monkeypatch)
        await ann.send_committed("own", 1)
        await held.begin(1)
        eve = await server.connect("eve")
        await ann.send_committed("own", 2)
        held.release()  # the result is used for bob, although eve has connected meanwhile
        assert sequences(await bob.wait_for_frames(2, "message")) == [1, 2]
        await held.begin(2)
        assert held.asked == [{("chat/own", "user:bob")}, {("chat/own", "user:eve")}]
        await eve.close()
        eve = await server.connect("eve")
        await ann.send_committed("own", 3)  # bob follows the chat already; eve must be looked up
        assert (await bob.wait_for_frame(type="message"))["sequence"] == 3
        held.release(100)
        assert (await eve.wait_for_frame(type="message", sequence=3))["chat_id"] == "own"
        second = await server.connect("bob")  # follows the same chats as the first device
        asked = len(held.asked)
        await ann.send_committed("own", 4)
        for device in (bob, second, eve):
            assert (await device.wait_for_frame(type="message"))["sequence"] == 4
        assert len(held.asked) == asked


@pytest.mark.rule("CH-19", "CH-9")
async def test_member_removed_during_a_lookup_gets_no_message_and_an_added_one_gets_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, live_chats_max=2) as server:
        await create_large_users(server, "bob", "eve")
        await server.set_member("own", "ann", "eve", present=False)
        await server.create("x3", "ann", "eve")
        ann, bob, eve = (
            await server.connect("ann", live=False),
            await server.connect("bob"),
            await server.connect("eve"),
        )
        held = HeldLookups(server, monkeypatch)
        await ann.send_committed("own", 1)
        await held.begin(1)
        await server.set_member("own", "ann", "bob", present=False)
        await server.set_member("own", "ann", "eve")
        await bob.wait_for_frame(type="membership", user_id="user:bob", present=False)
        await eve.wait_for_frame(type="membership", user_id="user:eve", present=True)
        await ann.send_committed("own", 2)
        held.release(100)
        assert (await eve.wait_for_frame(type="message", sequence=2))["chat_id"] == "own"
        assert (await eve.wait_for_frame(type="membership", user_id="user:bob"))["present"] is False
        await ann.send_committed("own", 3)
        await eve.wait_for_frame(type="message", sequence=3)
        assert await messages_of(bob) == []


@pytest.mark.rule("CH-19", "CH-7")
async def test_missed_messages_are_delivered_once_in_pages_and_not_to_the_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, live_chats_max=2) as server:
        await create_large_users(server, "bob")
        ann, bob, second = (
            await server.connect("ann", live=False),
            await server.connect("bob"),
            await server.connect("bob"),
        )
        held = HeldLookups(server, monkeypatch)
        for number in range(1, 8):
            await (bob if number % 3 == 0 else ann).send_committed("own", number, "x" * 4000)
        read = server.served.server.log.read

        async def short_pages(**options: Any) -> Any:
            return await read(**{**options, "limit": 2})

        monkeypatch.setattr(server.served.server.log, "read", short_pages)
        held.release(100)
        assert sequences(await second.wait_for_frames(7, "message")) == [1, 2, 3, 4, 5, 6, 7]
        await ann.send_committed("own", 8)
        assert (await second.wait_for_frame(type="message"))["sequence"] == 8
        assert sequences(await bob.wait_for_frames(6, "message")) == [1, 2, 4, 5, 7, 8]
        assert await messages_of(bob) == await messages_of(second) == []


@pytest.mark.rule("CH-19", "CH-7")
async def test_message_is_encoded_once_and_chats_without_large_users_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, live_chats_max=2) as server:
        await create_large_users(server, "bob")
        others = [f"other{number}" for number in range(10)]
        for chat in others:
            await server.create(chat, "cyn")
        await server.create("pair", "cyn", "dan")
        cyn, dan, bob = (
            await server.connect("cyn", live=False),
            await server.connect("dan"),
            await server.connect("bob"),
        )
        held = HeldLookups(server, monkeypatch)
        held.release(1000)
        encoded = []
        encode = codec.encode_message_frame

        def count_encoding(record: Any) -> bytes:
            encoded.append(record.sequence)
            return encode(record)

        monkeypatch.setattr(codec, "encode_message_frame", count_encoding)
        await cyn.send_committed("pair", 1)
        await dan.wait_for_frame(type="message")
        assert encoded == [1]
        for chat in others:
            await cyn.send_committed(chat, 1)
        pending = server.served.server.apis.chat_hub.lookups
        wanted = {f"chat/{chat}" for chat in ("pair", *others)}
        await until(lambda: {scope for pairs in held.asked for scope, _ in pairs} >= wanted)
        await until(lambda: pending._task is None)
        assert {scope for pairs in held.asked for scope, _ in pairs} == wanted
        number = len(held.asked)
        for chat in ("pair", *others):
            await cyn.send_committed(chat, 2)
        await dan.wait_for_frame(type="message")
        assert await messages_of(bob) == []
        assert len(held.asked) == number
        assert encoded == [1, 2]


@pytest.mark.rule("CH-19", "CO-31")
async def test_users_are_disconnected_when_the_store_does_not_answer_and_can_sync_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_lookups, "PENDING_MAX", 5)
    async with run_server(tmp_path, live_chats_max=2) as server:
        await create_large_users(server, "bob")
        await server.create("small", "ann", "cyn")
        for number in range(6):
            await server.create(f"other{number}", "ann")
        ann, bob, cyn = (
            await server.connect("ann", live=False),
            await server.connect("bob"),
            await server.connect("cyn"),
        )
        held = HeldLookups(server, monkeypatch)
        await ann.send_committed("own", 1)
        for number in range(6):
            await ann.send_committed(f"other{number}", 1)
        await bob.wait_closed()
        assert bob.frames[0]["code"] == "UNAVAILABLE"
        pending = server.served.server.apis.chat_hub.lookups
        assert (pending._size, pending._unanswered, pending.users) == (0, {}, {})
        held.release(100)
        bob = await server.connect("bob")
        assert sequences(await bob.sync_all("own")) == [1]
        await ann.send_committed("own", 2)
        assert (await bob.wait_for_frame(type="message"))["sequence"] == 2
        held.error = StoreUnavailableError("no answer")
        await ann.send_committed("x1", 1)
        await soon(bob.wait_closed())
        await ann.send_committed("small", 1)  # a user below the limit is not affected
        assert (await cyn.wait_for_frame(type="message"))["sequence"] == 1
