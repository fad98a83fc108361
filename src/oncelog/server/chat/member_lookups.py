"""Live delivery to users with more chats than the hub keeps in memory.

The hub keeps all chats of a user in memory if there are at most `live_chats_max`. Other users can add a user to any
number of chats, so the limit must not determine which chats are delivered. For users above the limit, the hub asks the
store once per chat which of these users are members, and caches the answers for the most recently used chats.

Until the answer arrives, the hub keeps only the range of the new messages. Keeping the messages themselves could
exhaust memory or a limit that users share. The members in the answer then receive the range from the store and follow
the chat from there. A user who connects is looked up separately, so the cached answers for other users remain valid.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final, Protocol

from oncelog.core.values import Record
from oncelog.errors import OncelogError, StoreError
from oncelog.server import logger
from oncelog.server.api_service import ApiService

QUERY_PAIRS_MAX: Final = 1000
"""Maximum number of pairs of a chat and a user in one store query. A query for a single chat may exceed it."""
PARALLEL_READS_MAX: Final = 8
"""Maximum number of chats whose missed messages are read concurrently, one page each. The others wait for the next
round."""
PENDING_MAX: Final = 100_000
"""Maximum number of chats, membership changes and senders that wait for answers, about 30 MB. If more are waiting, the
store has stopped responding."""
UNFOLLOWED_FACTOR: Final = 10
"""Maximum number of cached chats without members among the users, as a multiple of `live_chats_max`. Each is one dict
entry."""


class LookupReceiver(Protocol):
    """The hub's interface for the results of look-ups."""

    def send_missed(
        self, scope: str, members: Mapping[str, int], records: Sequence[Record], senders: Mapping[int, object]
    ) -> None:
        """Send each member the messages after its sequence. The connection that sent a message does not receive it.

        `senders` maps sequences to these connections.
        """

    def follow_chat(self, scope: str, names: Collection[str], changes: Sequence[tuple[str, bytes]]) -> None:
        """Send membership changes, each paired with its user, and make the named users follow the chat."""

    def unfollow_chat(self, scope: str) -> None:
        """Make all looked-up users stop following the chat."""

    def disconnect_users(self, names: Collection[str], error: Exception) -> None:
        """Disconnect users who missed messages. Their clients reconnect and sync."""


@dataclass(slots=True)
class _PendingChat:
    """The undelivered messages and changes of one chat."""

    after: int = 0
    """Sequence directly before the first message to send."""
    last: int = 0
    """Sequence of the newest message, or 0 if the chat has no undelivered message."""
    senders: dict[int, object] = field(default_factory=dict)
    changes: list[tuple[str, bytes]] = field(default_factory=list)
    queried: dict[str, int] = field(default_factory=dict)
    """The users in the query, with their numbers."""
    covered: int = 0
    """Number of the newest user when the query began."""
    queried_last: int = 0
    """Value of `last` when the query began. Users who connected later need the messages after it."""
    queried_changes: int = 0
    membership_changes: dict[str, bool] = field(default_factory=dict)
    """Users added (True) or removed since the query began. The answer may not reflect these changes."""
    members: set[str] = field(default_factory=set)
    """The store's answer: the users who receive the missed messages."""
    received: dict[str, int] = field(default_factory=dict)
    """Sequence up to which each user had received messages before it was switched to look-ups."""

    @property
    def size(self) -> int:
        """Number of items that count towards `PENDING_MAX`: the chat, its senders and its changes."""
        return 1 + len(self.senders) + len(self.changes)


class MemberLookups:
    """Look-ups for a hub's connected users with too many chats to keep in memory."""

    def __init__(self, service: ApiService, receiver: LookupReceiver) -> None:
        self._log = service.log
        self._chats_max = service.limits.live_chats_max
        self._receiver = receiver
        self.users: dict[str, int] = {}
        """The users, with ascending numbers. An answer is valid for all users up to a certain number."""
        self._numbers = count(1)
        self._newest = 0
        """Highest number in `users`."""
        self._followed: OrderedDict[str, int] = OrderedDict()
        """LRU cache of chats with members among `users`, with the user number up to which the answer is valid."""
        self._unfollowed: OrderedDict[str, int] = OrderedDict()
        """The same for chats without members among `users`."""
        self._unanswered: dict[str, _PendingChat] = {}
        """Chats whose query has not been answered yet."""
        self._missed: dict[str, _PendingChat] = {}
        """Chats with an answer whose missed messages must still be sent. No chat is in both dicts."""
        self._size = 0
        self._task: asyncio.Task[None] | None = None

    def add_user(self, name: str, followed: Iterable[str] = ()) -> None:
        """Add a user, with the chats that it already follows. No cached answer is valid for the new user."""
        self.users[name] = self._newest = next(self._numbers)
        for scope in followed:
            chat = self._unanswered.get(scope) or self._missed.get(scope)
            if chat is not None:
                chat.received[name] = chat.last

    def remove_user(self, name: str) -> None:
        """Remove a disconnected user."""
        self.users.pop(name, None)
        self._newest = next(reversed(self.users.values()), 0)
        if not self.users:
            self._followed.clear()
            self._unfollowed.clear()
            self._clear_pending()

    # --- chats with an answer

    def is_covered(self, scope: str) -> bool:
        """Return whether all members among the users follow the chat. Marks the chat as recently used."""
        for known in (self._followed, self._unfollowed):
            if scope in known:
                known.move_to_end(scope)
                return known[scope] >= self._newest
        return False

    def set_member(self, scope: str, name: str, *, present: bool) -> bool:
        """Apply a membership change. Returns whether the user follows the chat afterwards."""
        number, covered = self.users[name], self._get_covered(scope)
        if number > covered:
            self._record_change(scope, name, present=present)
            return False
        if present:
            self._set_answer(self._followed, scope, covered)
            self._evict_least_used()
        return present and scope in self._followed

    def _set_answer(self, known: OrderedDict[str, int], scope: str, covered: int) -> None:
        """Put a chat into one of the two caches, as its most recently used entry."""
        self._followed.pop(scope, None)
        self._unfollowed.pop(scope, None)
        known[scope] = covered

    def _get_covered(self, scope: str) -> int:
        return self._followed.get(scope) or self._unfollowed.get(scope) or 0

    def _record_change(self, scope: str, name: str, *, present: bool) -> None:
        if scope in self._unanswered:
            self._unanswered[scope].membership_changes[name] = present
        elif scope in self._missed and name in self._missed[scope].queried:
            members = self._missed[scope].members
            (members.add if present else members.discard)(name)

    def _evict_least_used(self) -> None:
        """Evict answers above the limits. A chat with missed messages is kept until they are sent."""
        limits = (self._followed, self._chats_max), (self._unfollowed, UNFOLLOWED_FACTOR * self._chats_max)
        for known, limit in limits:
            for scope in list(islice(known, max(0, len(known) - limit))):
                if scope not in self._unanswered and scope not in self._missed:
                    del known[scope]
                    if known is self._followed:
                        self._receiver.unfollow_chat(scope)

    # --- chats without an answer

    def add_message(self, scope: str, sequence: int, sender: object | None) -> None:
        """Queue a message, for all members except the sender, until the chat has a valid answer."""
        chat = self._get_pending(scope)
        if not chat.last:
            chat.after = chat.queried_last = sequence - 1
        chat.last = sequence
        if sender is not None:
            chat.senders[sequence] = sender
            self._size += 1
        self._start()

    def add_change(self, scope: str, member: str, frame: bytes) -> None:
        """Queue a membership change, for the other members, until the chat has a valid answer."""
        self._get_pending(scope).changes.append((member, frame))
        self._size += 1
        self._start()

    def _get_pending(self, scope: str) -> _PendingChat:
        chat = self._unanswered.get(scope) or self._missed.get(scope)
        if chat is None:
            chat = self._unanswered[scope] = _PendingChat()
            self._size += 1
        return chat

    def _start(self) -> None:
        if self._size > PENDING_MAX:
            self._fail(StoreError("the store does not answer membership queries; connect again and sync"))
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._unanswered or self._missed:
                await self._query_members()
                chats = list(islice(self._missed.items(), PARALLEL_READS_MAX))
                await asyncio.gather(*(self._send_page(scope, chat) for scope, chat in chats))
        except OncelogError as error:
            logger.warning("members could not be looked up for live delivery: %s", error)
            self._fail(error)
        except Exception:
            logger.exception("members could not be looked up for live delivery")
            self._fail(StoreError("members could not be looked up; connect again and sync"))
        finally:
            self._task = None

    async def _query_members(self) -> None:
        """Query which users without an answer are members of the chats that have waited longest."""
        newest = self._newest
        chats: dict[str, _PendingChat] = {}
        pairs: list[tuple[str, str]] = []
        for scope, chat in self._unanswered.items():
            covered = self._get_covered(scope)
            chat.queried = {name: number for name, number in self.users.items() if number > covered}
            chat.covered, chat.queried_last, chat.queried_changes = newest, chat.last, len(chat.changes)
            chat.membership_changes.clear()
            chats[scope] = chat
            pairs += [(scope, name) for name in chat.queried]
            if len(pairs) >= QUERY_PAIRS_MAX:
                break
        found = await self._log.state.members_among(pairs) if pairs else set()
        for scope, chat in chats.items():
            if self._unanswered.get(scope) is chat:  # otherwise all users disconnected during the query
                del self._unanswered[scope]
                chat.members = {
                    name for name in chat.queried if chat.membership_changes.get(name, (scope, name) in found)
                }
                self._missed[scope] = chat
                if not chat.members:
                    self._finish(scope, chat)

    async def _send_page(self, scope: str, chat: _PendingChat) -> None:
        """Send the next page of missed messages. After the last page, the members follow the chat."""
        upto = chat.last
        if chat.after < upto and chat.members:
            try:
                page = await self._log.read(stream=scope, after=chat.after, upto=upto)
            except OncelogError as error:
                logger.warning("missed messages could not be read for live delivery: %s", error)
                self._receiver.disconnect_users(self._select_connected(chat), error)
                chat.members.clear()
            else:
                if self._missed.get(scope) is not chat:
                    return
                self._receiver.send_missed(scope, self._select_connected(chat), page.records, chat.senders)
                chat.after = page.cursor.position if page.has_more else upto
        if self._missed.get(scope) is chat:
            if chat.after >= chat.last or not chat.members:
                self._finish(scope, chat)
            else:
                self._missed[scope] = self._missed.pop(scope)  # behind the other chats

    def _select_connected(self, chat: _PendingChat) -> dict[str, int]:
        """Return the still connected members, with the sequence up to which each has received messages."""
        names = [name for name in chat.members if self.users.get(name) == chat.queried[name]]
        return {name: chat.received.get(name, 0) for name in names}

    def _finish(self, scope: str, chat: _PendingChat) -> None:
        del self._missed[scope]
        self._size -= chat.size
        names = self._select_connected(chat)
        is_followed = names or scope in self._followed
        self._set_answer(self._followed if is_followed else self._unfollowed, scope, chat.covered)
        self._receiver.follow_chat(scope, names, chat.changes)
        is_late = chat.last > chat.queried_last or len(chat.changes) > chat.queried_changes
        if is_late and self._newest > chat.covered:
            self._unanswered[scope] = late_chat = _PendingChat(
                after=chat.queried_last,
                last=chat.last if chat.last > chat.queried_last else 0,
                senders={number: sender for number, sender in chat.senders.items() if number > chat.queried_last},
                changes=chat.changes[chat.queried_changes :],
                received=chat.received,
            )
            self._size += late_chat.size
        self._evict_least_used()

    def _fail(self, error: Exception) -> None:
        self._clear_pending()
        self._receiver.disconnect_users(list(self.users), error)

    def _clear_pending(self) -> None:
        self._unanswered.clear()
        self._missed.clear()
        self._size = 0
