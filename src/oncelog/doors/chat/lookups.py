"""Look-ups of members for live delivery to users with more chats than the hub keeps in memory.

The hub keeps `live_chats_max` chats of each connected user. Others can add a user to any number of chats, so that
limit must not decide which chats are delivered. For a user beyond it the hub asks the store, once per chat, whether the
user is a member of the chat that a message is in; the message waits until the store has answered. The answers are kept
for the chats that were used last. A chat whose answer was dropped costs another look-up, and never a message.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Protocol

from oncelog.doors.limits import DoorLimits
from oncelog.engine.log import Log
from oncelog.errors import OncelogError, StoreError

logger: Final = logging.getLogger("oncelog.doors")

QUERY_PAIRS_MAX: Final = 1000
"""Pairs of chat and user that one query of the store asks for; a single chat may have more."""


class WaitingFrame(NamedTuple):
    """A frame that waits for a look-up."""

    frame: bytes
    excluded: Collection[object]
    """Readers that do not get it: the sender has its answer."""


class Follower(Protocol):
    """Receives the results; the hub."""

    def found_members(self, scope: str, names: Collection[str], waiting: Sequence[WaitingFrame]) -> None:
        """These users are members of the chat, and get the frames that waited."""

    def forget_chat(self, scope: str) -> None:
        """The answer for this chat was dropped."""

    def fail_lookups(self, names: Collection[str], error: Exception) -> None:
        """Frames for these users were lost: they must connect again and sync."""


class MemberLookups:
    """The users of one hub that are beyond the limit, and the results of look-ups."""

    def __init__(self, log: Log, limits: DoorLimits, follower: Follower) -> None:
        self._log = log
        self._limits = limits
        self._follower = follower
        self.users: set[str] = set()
        self._known: OrderedDict[str, None] = OrderedDict()
        """Chats that were looked up for all users, the least recently used first."""
        self._waiting: dict[str, list[WaitingFrame]] = {}
        self._waiting_bytes = 0
        self._changed: dict[tuple[str, str], bool] = {}
        """Memberships that changed while their chat is being looked up."""
        self._generation = 0
        """Changes with the users: a look-up that began before says nothing about a new one."""
        self._running: asyncio.Task[None] | None = None

    def add_user(self, name: str) -> None:
        """Look up chats for this user too. Called again when the user connects another device."""
        self.users.add(name)
        self._generation += 1
        while self._known:
            self._follower.forget_chat(self._known.popitem()[0])

    def remove_user(self, name: str) -> None:
        """The user is not connected any more."""
        self.users.discard(name)
        if not self.users:
            self._known.clear()
            self._clear_waiting()

    def tell(self, scope: str, frame: bytes, excluded: Collection[object] = ()) -> None:
        """Deliver a frame to the users that are members of the chat. Known members already follow the chat."""
        if scope in self._known:
            self._known.move_to_end(scope)
            return
        self._waiting.setdefault(scope, []).append(WaitingFrame(frame, excluded))
        self._waiting_bytes += len(frame)
        if self._waiting_bytes > self._limits.outbox_bytes_max:
            self._fail(StoreError("too many messages wait until members are looked up"))
        elif self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    def is_known(self, scope: str) -> bool:
        """Return whether the members of the chat follow it without a look-up."""
        return scope in self._known

    def note_change(self, scope: str, name: str, *, present: bool) -> None:
        """Let a look-up that is under way take a change into account."""
        if name in self.users and scope in self._waiting:
            self._changed[scope, name] = present

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._look_up()
        except OncelogError as error:
            logger.warning("members could not be looked up for live delivery: %s", error)
            self._fail(error)
        finally:
            self._running = None

    async def _look_up(self) -> None:
        generation, users = self._generation, sorted(self.users)
        scopes = list(self._waiting)[: max(1, QUERY_PAIRS_MAX // max(1, len(users)))]
        found = await self._log.books.members_among([(scope, name) for scope in scopes for name in users])
        if generation != self._generation:
            return  # asked again, with the users of now
        for scope in scopes:
            waiting = self._waiting.pop(scope, None)
            if waiting is None:
                continue
            self._waiting_bytes -= sum(len(one.frame) for one in waiting)
            names = {name for name in users if self._changed.pop((scope, name), (scope, name) in found)}
            self._known[scope] = None
            self._follower.found_members(scope, names, waiting)
        while len(self._known) > self._limits.live_chats_max:
            self._follower.forget_chat(self._known.popitem(last=False)[0])

    def _fail(self, error: Exception) -> None:
        self._clear_waiting()
        self._follower.fail_lookups(list(self.users), error)

    def _clear_waiting(self) -> None:
        self._waiting.clear()
        self._changed.clear()
        self._waiting_bytes = 0
