"""Watermarks of chat members. The client requests them once per connection; frames then update them."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from oncelog.client.chat.connector import ChatConnector
from oncelog.client.chat.http_client import ChatHttpClient
from oncelog.client.chat.outbox import ChatRuntime, Outbox
from oncelog.client.chat.values import Mark, Message
from oncelog.client.runtime.backoff import Pauses, RetryPause
from oncelog.errors import LostError, OncelogError, ProtocolError, ServerRefusedError


def get_mark(message: Message, user_id: str, watermarks: Mapping[str, int]) -> Mark:
    """Return `DELIVERED` if all other members have received the user's message, and `SENT` otherwise."""
    has_others = bool(watermarks.keys() - {user_id})
    if message.sender_id == user_id and has_others and _has_reached_all(watermarks, user_id, message.sequence):
        return Mark.DELIVERED
    return Mark.SENT


def _has_reached_all(watermarks: Mapping[str, int], user_id: str, sequence: int) -> bool:
    """Whether all other members have received all messages up to a sequence."""
    return all(acked >= sequence for other, acked in watermarks.items() if other != user_id)


@dataclass(slots=True, eq=False)
class DeliveryCounts:
    """Watermarks of the members of all chats of one client."""

    _runtime: ChatRuntime
    _outbox: Outbox
    _connector: ChatConnector
    _http: ChatHttpClient
    _counted_connections: dict[str, int] = field(default_factory=dict)
    """By chat, the number of the connection on which the client last requested the chat's watermarks."""
    _scheduled: set[str] = field(default_factory=set)
    """Chats whose watermarks a task is requesting."""

    def schedule(self, chat_id: str) -> None:
        """Request the watermarks of a chat in a task if they are out of date. They arrive as updates."""
        if self._connector.is_connected and not self._is_counted(chat_id) and chat_id not in self._scheduled:
            self._scheduled.add(chat_id)
            self._runtime.start_task("delivery", partial(self._run_scheduled, chat_id))

    async def _run_scheduled(self, chat_id: str) -> None:
        with suppress(OncelogError):  # the next call requests them again
            await self._query(chat_id)
        self._scheduled.discard(chat_id)

    async def load_watermarks(self, chat_id: str) -> dict[str, int]:
        """Return the server's watermarks, or the last known ones if the server does not answer."""
        await self._query(chat_id)
        known = self._runtime.watermarks.get(chat_id)
        if known is not None:
            return dict(known)
        return await self._runtime.call_store(self._runtime.store.load_watermarks, chat_id)

    async def wait_until_delivered(self, chat_id: str, sequence: int) -> None:
        """Wait until all other members have received all messages up to a sequence."""
        pauses = Pauses(self._runtime.limits, self._runtime.random_source)
        while not self._is_delivered(chat_id, sequence):
            connection = self._connector.connection_count
            is_counted = self._connector.is_connected and await self._query(chat_id)

            def has_changed(before: int = connection) -> bool:
                return self._is_delivered(chat_id, sequence) or self._connector.connection_count != before

            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_counted else pauses.next_pause_s(RetryPause())):
                    await self._runtime.wait_until(has_changed)

    async def _query(self, chat_id: str) -> bool:
        """Request watermarks unless already requested on this connection. Return False on failure."""
        protocol, connection = self._runtime.open_protocol, self._connector.connection_count
        if self._is_counted(chat_id):
            return True
        try:
            members = await self._http.get_delivery(chat_id)
        except (LostError, ProtocolError, ServerRefusedError):
            return False
        protocol.changes.members[chat_id] = members
        self._counted_connections[chat_id] = connection
        await self._outbox.save()  # the client reports watermarks once they are saved
        return True

    def _is_counted(self, chat_id: str) -> bool:
        is_current = self._counted_connections.get(chat_id) == self._connector.connection_count
        return is_current and chat_id in self._runtime.watermarks

    def _is_delivered(self, chat_id: str, sequence: int) -> bool:
        known = self._runtime.watermarks.get(chat_id)
        return known is not None and _has_reached_all(known, self._runtime.protocol.user_id, sequence)
