"""Simulate the chat hub with a slow store, and with users above and below the limit who connect, leave and join chats.

Each device of a member gets all messages that are delivered after it has joined, once and in order. A removed member
gets no message that is sent after its removal. The hub keeps at most as many chats as the limit allows.
"""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from oncelog.core.policy import CHAT
from oncelog.core.values import MemberIdentity
from oncelog.server.chat import codec
from oncelog.server.chat.hub import ChatHub
from oncelog.server.limits import ApiLimits
from oncelog.server.metrics import Counts
from oncelog.storage.side_state import MEMBERSHIP

USERS = ("user:ann", "user:bob", "user:cyn", "user:dan")
CHATS = tuple(f"chat/{number}" for number in range(8))
LIVE_CHATS_MAX = 2
STEPS = 300


@dataclass
class Message:
    scope: str
    sequence: int
    policy: str = CHAT.name
    key: bytes = b""


@dataclass
class Change:
    scope: str
    member: str
    present: bool
    kind: int = MEMBERSHIP


@dataclass
class Membership:
    scope: str


@dataclass
class MembershipPage:
    memberships: list[Membership]
    has_more: bool


@dataclass
class Cursor:
    position: int


@dataclass
class Page:
    records: list[Message]
    has_more: bool
    cursor: Cursor


class SlowStore:
    """An in-memory log that answers after a random number of event-loop iterations. Pages have two rows."""

    lanes = 1

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.settings = self.state = self
        self.members: dict[str, set[str]] = {scope: set() for scope in CHATS}
        self.messages: dict[str, list[Message]] = {scope: [] for scope in CHATS}

    async def pause(self) -> None:
        for _ in range(self._chance.randrange(12)):
            await asyncio.sleep(0)

    async def listen(self, *_: object) -> None:
        """Do nothing: the simulation calls the hub directly."""

    listen_members = listen

    async def memberships(self, name: str, *, prefix: str, after: str, limit: int) -> MembershipPage:
        assert limit >= len(prefix)
        await self.pause()
        found = [scope for scope in CHATS if name in self.members[scope] and scope > after]
        await self.pause()
        return MembershipPage([Membership(scope) for scope in found[:2]], has_more=len(found) > 2)

    async def members_among(self, identities: Iterable[MemberIdentity]) -> set[MemberIdentity]:
        await self.pause()
        found = {(scope, name) for scope, name in identities if name in self.members[scope]}
        await self.pause()
        return found

    async def read(self, *, stream: str, after: int, upto: int) -> Page:
        await self.pause()
        found = self.messages[stream][after:upto]
        await self.pause()
        return Page(found[:2], len(found) > 2, Cursor(found[:2][-1].sequence))


class Reader:
    """A device that records the messages it receives."""

    def __init__(self, name: str) -> None:
        self.user_id = name
        self.received: dict[str, list[int]] = {scope: [] for scope in CHATS}
        self.begin: dict[str, int] | None = None
        """The last message of each chat that was delivered before the device joined, or None until it has joined."""

    def may_follow(self, _: str) -> bool:
        return True

    def end(self, error: Exception) -> None:
        raise AssertionError(error)


class RecordingCoalescer:
    """Delivers frames to readers immediately."""

    def broadcast(self, frame: Any, readers: Iterable[Reader], but: Collection[Reader] = ()) -> int:
        reached = [reader for reader in readers if reader not in but]
        for reader in reached if isinstance(frame, Message) else ():
            reader.received[frame.scope].append(frame.sequence)
        return len(reached)


class World:
    """A hub, its store and devices. Messages and membership changes reach the hub late but in order."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.store = SlowStore(self.chance)
        limits = ApiLimits(live_chats_max=LIVE_CHATS_MAX)
        service: Any = SimpleNamespace(log=self.store, limits=limits, counts=Counts())
        self.hub: Any = ChatHub(service, lambda _: None)
        coalescer: Any = RecordingCoalescer()
        self.hub.coalescer = coalescer
        self.readers: list[Reader] = []
        self.delivered = dict.fromkeys(CHATS, 0)
        self.member_since: dict[MemberIdentity, int] = {}
        self.removed_at: dict[MemberIdentity, int] = {}
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._joining: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        feed = asyncio.create_task(self._deliver())
        for identity in [(scope, name) for scope in CHATS for name in USERS if self.chance.random() < 0.6]:
            self.store.members[identity[0]].add(identity[1])
            self.member_since[identity] = 0
        steps = (self.send, self.change_member, self.join, self.leave, self.store.pause)
        for _ in range(STEPS):
            (step,) = self.chance.choices(steps, (10, 3, 3, 2, 2))
            await step()
        await asyncio.gather(*self._joining)
        await self._messages.join()
        if self.hub.lookups._task is not None:
            await self.hub.lookups._task
        feed.cancel()

    async def _deliver(self) -> None:
        while True:
            message = await self._messages.get()
            await self.store.pause()
            self.delivered[message.scope] = message.sequence
            self.hub.deliver([message])
            self._messages.task_done()

    async def send(self) -> None:
        scope = self.chance.choice(CHATS)
        message = Message(scope, len(self.store.messages[scope]) + 1)
        self.store.messages[scope].append(message)
        self._messages.put_nowait(message)

    async def change_member(self) -> None:
        scope, name, present = self.chance.choice(CHATS), self.chance.choice(USERS), self.chance.random() < 0.6
        members = self.store.members[scope]
        if present is (name in members):
            return
        (members.add if present else members.discard)(name)
        self.member_since.pop((scope, name), None)
        await self.store.pause()
        self.hub.deliver_changes([Change(scope, name, present)])
        ends = self.member_since if present else self.removed_at
        ends[scope, name] = len(self.store.messages[scope])

    async def join(self) -> None:
        reader = Reader(self.chance.choice(USERS))
        self.readers.append(reader)

        async def joined() -> None:
            await self.hub.join(reader)
            reader.begin = dict(self.delivered)

        self._joining.append(asyncio.create_task(joined()))

    async def leave(self) -> None:
        joined = [reader for reader in self.readers if reader.begin is not None]
        if joined:
            reader = self.chance.choice(joined)
            self.hub.leave(reader)
            self.readers.remove(reader)

    def check(self, reader: Reader, scope: str) -> int:
        """Check the messages that a device received in a chat, and return the number of expected messages."""
        received, identity = reader.received[scope], (scope, reader.user_id)
        assert received == sorted(set(received)), (identity, received)
        assert reader.begin is not None
        if identity in self.member_since:
            begin = max(self.member_since[identity], reader.begin[scope])
            needed = set(range(begin + 1, len(self.store.messages[scope]) + 1))
            assert needed <= set(received), (identity, received)
            return len(needed)
        assert max(received, default=0) <= self.removed_at.get(identity, 0), (identity, received)
        return 0


@pytest.mark.rule("CH-19", "CH-7", "CH-9")
async def test_members_get_all_messages_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "encode_message_frame", lambda record: record)
    monkeypatch.setattr(codec, "encode_membership_frame", lambda *_: b"")
    needed = 0
    for seed in range(60):
        world = World(seed)
        await world.run()
        needed += sum(world.check(reader, scope) for reader in world.readers for scope in CHATS)
        lookups = world.hub.lookups
        assert (lookups._size, lookups._unanswered, lookups._missed) == (0, {}, {})
        assert len(lookups._followed) <= LIVE_CHATS_MAX
        assert all(len(user.chats) <= LIVE_CHATS_MAX for user in world.hub._users.values())
    assert needed > 20_000
