"""Fan-out of the Chat API: delivers each message once, in order, to the connected members of its chat.

The hub listens to all stream lanes. The tailer of a lane passes on each record in the order of positions, and the hub
delivers it at once, without waiting for the verdict of the write. The hub also listens to membership changes, which
arrive in the order of their revisions. It therefore delivers messages and changes from other servers in the same way as
messages and changes from this server. The hub encodes each broadcast once. The connection that sent a message receives
the answer instead of the broadcast.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from oncelog.core.chat import CHAT_PREFIX, parse_chat_scope
from oncelog.core.policy import CHAT
from oncelog.core.values import Record
from oncelog.server.api_service import ApiService
from oncelog.server.chat import codec
from oncelog.server.chat.member_lookups import MemberLookups
from oncelog.server.send_queue import SendQueueOwner, WriteCoalescer
from oncelog.storage.side_state import MEMBERSHIP
from oncelog.storage.store import MemberChange

PAGE_CHATS: Final = 1000


class ChatReader(SendQueueOwner, Protocol):
    """The interface through which the hub uses a connection."""

    @property
    def user_id(self) -> str:
        """Return the connection's user."""

    def may_follow(self, scope: str) -> bool:
        """Return whether the connection is live and its grants cover the chat."""

    def fail(self, error: Exception) -> None:
        """Send an error to the client and close the connection."""


@dataclass(slots=True)
class _User:
    """A connected user with one or more devices, and the chats that the user is a member of."""

    readers: set[ChatReader] = field(default_factory=set)
    """Devices that have joined."""
    joining_count: int = 0
    """Devices that are currently joining."""
    chats: set[str] = field(default_factory=set)
    """All chats of the user, if there are at most `live_chats_max`. For a user with more chats, only the most recently
    used chats that were looked up (`ChatHub.lookups`)."""
    is_loaded: bool = False
    pending_changes: dict[str, bool] = field(default_factory=dict)
    """Membership changes that have arrived while the chats are being loaded."""
    load_task: asyncio.Task[None] | None = None


class ChatHub:
    """A server's chat hub. All methods run on the event loop's thread."""

    def __init__(self, service: ApiService, on_fail: Callable[[Exception], None]) -> None:
        self._service = service
        self._on_fail = on_fail
        self._lanes: set[int] = set()
        self._is_member_listener = False
        self._start_lock = asyncio.Lock()
        self._users: dict[str, _User] = {}
        self._live: dict[str, set[ChatReader]] = {}
        """The connections that follow each chat."""
        self._senders: dict[tuple[str, bytes], tuple[ChatReader, bytes]] = {}
        """Connection and body of each message that is being committed."""
        self._deliveries: dict[str, dict[str, int]] = {}
        """Watermarks that have not been broadcast yet, by chat and member."""
        self._delivery_timer: asyncio.TimerHandle | None = None
        self.lookups = MemberLookups(service, self)
        self.coalescer = WriteCoalescer()

    # --- connections

    async def join(self, reader: ChatReader) -> None:
        """Start delivering messages and changes in the reader's chats. Raises the errors of the store."""
        await self._start_listening()
        name = reader.user_id
        user = self._users.setdefault(name, _User())
        user.joining_count += 1
        try:
            if not user.is_loaded:
                if user.load_task is None or user.load_task.done():
                    user.load_task = asyncio.get_running_loop().create_task(self._load_chats(name, user))
                await asyncio.shield(user.load_task)
            # Do not await anything from here on: the reader would miss a change that arrives in the meantime.
            user.readers.add(reader)
            for scope in user.chats:
                self._follow(reader, scope)
        finally:
            user.joining_count -= 1
            self._remove_if_idle(name, user)

    def leave(self, reader: ChatReader) -> None:
        """Stop delivering to the reader."""
        user = self._users.get(reader.user_id)
        if user is None or reader not in user.readers:
            return
        user.readers.discard(reader)
        for scope in user.chats:
            self._unfollow(reader, scope)
        self._remove_if_idle(reader.user_id, user)

    def refresh_reader(self, reader: ChatReader) -> None:
        """Apply changed grants to the reader's chats."""
        user = self._users.get(reader.user_id)
        if user is not None and reader in user.readers:
            for scope in user.chats:
                self._unfollow(reader, scope)
                self._follow(reader, scope)

    def _remove_if_idle(self, name: str, user: _User) -> None:
        if not user.readers and not user.joining_count and self._users.get(name) is user:
            del self._users[name]
            self.lookups.remove_user(name)

    async def _load_chats(self, name: str, user: _User) -> None:
        """Load a user's chats and apply concurrent changes. Above `live_chats_max`, use look-ups instead."""
        chats: set[str] = set()
        after, has_more = "", True
        chats_max = self._service.limits.live_chats_max
        while has_more and len(chats) < chats_max:
            page = await self._service.log.state.memberships(name, prefix=CHAT_PREFIX, after=after, limit=PAGE_CHATS)
            chats.update(membership.scope for membership in page.memberships)
            has_more = page.has_more
            after = page.memberships[-1].scope if page.memberships else after
        for scope, present in user.pending_changes.items():
            (chats.add if present else chats.discard)(scope)
        if has_more or len(chats) > chats_max:
            chats = set()
            if self._users.get(name) is user:  # otherwise the user disconnected during the load
                self.lookups.add_user(name)
        user.chats, user.is_loaded = chats, True
        user.pending_changes.clear()

    def _follow(self, reader: ChatReader, scope: str) -> None:
        if reader.may_follow(scope):
            self._live.setdefault(scope, set()).add(reader)

    def _unfollow(self, reader: ChatReader, scope: str) -> None:
        readers = self._live.get(scope)
        if readers is not None:
            readers.discard(reader)
            if not readers:
                del self._live[scope]

    # --- listening

    async def _start_listening(self) -> None:
        """Listen to all stream lanes. Starts with the first live reader, so a server without readers reads no lanes."""
        lanes = self._service.log.settings.lanes
        if len(self._lanes) == lanes and self._is_member_listener:
            return
        async with self._start_lock:
            if not self._is_member_listener:
                await self._service.log.listen_members(self)
                self._is_member_listener = True
            for lane in range(1, lanes + 1):
                if lane not in self._lanes:
                    await self._service.log.listen(self, lane)
                    self._lanes.add(lane)

    def fail(self, error: Exception) -> None:
        """See `RecordListener`. The server closes all connections, because otherwise their deliveries would have gaps.

        The next reader that joins restarts the hub.
        """
        for lane in self._lanes:
            self._service.log.unlisten(self, lane)
        self._lanes.clear()
        self._senders.clear()
        self._on_fail(error)

    def close(self) -> None:
        """See `RecordListener`. The server closes the connections itself."""

    # --- messages

    def expect_message(self, scope: str, key: bytes, body: bytes, reader: ChatReader) -> None:
        """Register a message before it is submitted, so that the sending connection does not receive the broadcast."""
        self._senders.setdefault((scope, key), (reader, body))

    def cancel_expected(self, scope: str, key: bytes, reader: ChatReader) -> None:
        """Unregister a message that was not committed for this reader."""
        sender = self._senders.get((scope, key))
        if sender is not None and sender[0] is reader:
            del self._senders[scope, key]

    def deliver(self, records: Sequence[Record]) -> None:
        """See `RecordListener`."""
        live, senders, broadcast, lookups = self._live, self._senders, self.coalescer.broadcast, self.lookups
        deliveries = 0
        for record in records:
            if record.policy != CHAT.name:
                continue
            sent = senders.pop((record.scope, record.key), None) if senders else None
            readers = live.get(record.scope)
            if lookups.users and not lookups.is_covered(record.scope):
                sender = sent[0] if sent is not None and _is_sent_by(record, *sent) else None
                is_affected = sender is not None and sender.user_id in lookups.users
                lookups.add_message(record.scope, record.sequence, sender if is_affected else None)
            if readers:
                excluded = (
                    () if sent is None or sent[0] not in readers or not _is_sent_by(record, *sent) else (sent[0],)
                )
                if len(readers) > len(excluded):
                    deliveries += broadcast(codec.encode_message_frame(record), readers, excluded)
        self._service.counts.deliveries += deliveries

    # --- members

    def deliver_changes(self, changes: Sequence[MemberChange]) -> None:
        """See `MemberListener`."""
        for change in changes:
            if not change.scope.startswith(CHAT_PREFIX):
                continue
            if change.kind == MEMBERSHIP:
                self._change_membership(change)
            elif change.scope in self._live:
                self._deliveries.setdefault(change.scope, {})[change.member] = change.acknowledged
        if self._deliveries and self._delivery_timer is None:
            delay_s = self._service.limits.delivery_ms / 1000
            self._delivery_timer = asyncio.get_running_loop().call_later(delay_s, self._broadcast_deliveries)

    def _change_membership(self, change: MemberChange) -> None:
        scope, user = change.scope, self._users.get(change.member)
        concerned: set[ChatReader] = set()
        if user is not None:
            concerned = {reader for reader in user.readers if reader.may_follow(scope)}
            self._set_chat(change.member, user, scope, present=change.present)
        readers = self._live.get(scope, set()) | concerned
        if readers or self.lookups.users:
            frame = codec.encode_membership_frame(parse_chat_scope(scope), change)
            self.coalescer.broadcast(frame, readers)
            if self.lookups.users and not self.lookups.is_covered(scope):
                self.lookups.add_change(scope, change.member, frame)

    def _set_chat(self, name: str, user: _User, scope: str, *, present: bool) -> None:
        """Apply the addition or removal of a user, whose devices then follow or leave the chat."""
        if not user.is_loaded:
            user.pending_changes[scope] = present
            return
        if name in self.lookups.users:
            is_followed = self.lookups.set_member(scope, name, present=present)
        elif present and scope not in user.chats and len(user.chats) >= self._service.limits.live_chats_max:
            self._move_to_lookups(name, user)
            is_followed = False
        else:
            is_followed = present
        if is_followed:
            self._add_chat(user, scope)
        elif not present:
            self._remove_chat(user, scope)

    def _move_to_lookups(self, name: str, user: _User) -> None:
        """Switch a user that now exceeds `live_chats_max` to look-ups."""
        followed = list(user.chats)
        for scope in followed:
            self._remove_chat(user, scope)
        self.lookups.add_user(name, followed)

    def _add_chat(self, user: _User, scope: str) -> None:
        user.chats.add(scope)
        for reader in user.readers:
            self._follow(reader, scope)

    def _remove_chat(self, user: _User, scope: str) -> None:
        user.chats.discard(scope)
        for reader in user.readers:
            self._unfollow(reader, scope)

    # --- results of look-ups

    def send_missed(
        self, scope: str, members: Mapping[str, int], records: Sequence[Record], senders: Mapping[int, object]
    ) -> None:
        """See `LookupReceiver`."""
        for record in records:
            if record.policy == CHAT.name:
                names = [name for name, received in members.items() if record.sequence > received]
                readers = [reader for name in names for reader in self._users[name].readers if reader.may_follow(scope)]
                sender = senders.get(record.sequence)
                self._service.counts.deliveries += self.coalescer.broadcast(
                    codec.encode_message_frame(record), readers, (sender,)
                )

    def follow_chat(self, scope: str, names: Collection[str], changes: Sequence[tuple[str, bytes]]) -> None:
        """See `LookupReceiver`. Each user has already received the changes to their own membership."""
        for name in names:
            user = self._users[name]
            frames = b"".join(frame for member, frame in changes if member != name)
            if frames:
                self.coalescer.broadcast(frames, [reader for reader in user.readers if reader.may_follow(scope)])
            self._add_chat(user, scope)

    def unfollow_chat(self, scope: str) -> None:
        """See `LookupReceiver`."""
        for name in self.lookups.users:
            self._remove_chat(self._users[name], scope)

    def disconnect_users(self, names: Collection[str], error: Exception) -> None:
        """See `LookupReceiver`."""
        for name in names:
            user = self._users.get(name)
            for reader in list(user.readers) if user is not None else ():
                reader.fail(error)

    def _broadcast_deliveries(self) -> None:
        """Send one frame per changed watermark. The frames of a chat are sent together."""
        self._delivery_timer = None
        deliveries, self._deliveries = self._deliveries, {}
        for scope, acknowledged in deliveries.items():
            readers = self._live.get(scope)
            if readers:
                chat_id = parse_chat_scope(scope)
                frames = [codec.encode_delivery_frame(chat_id, name, number) for name, number in acknowledged.items()]
                self.coalescer.broadcast(b"".join(frames), readers)


def _is_sent_by(record: Record, reader: ChatReader, body: bytes) -> bool:
    """Return whether the reader sent this record. Another server may have committed different content under the id."""
    return record.actor == reader.user_id and record.body == body
