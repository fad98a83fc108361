"""How far others have received a chat: asked for once a connection, and then told live."""

import asyncio
import random
from contextlib import suppress

from oncelog.client.chat.connector import ChatConnector
from oncelog.client.chat.http_calls import ChatHttpCalls
from oncelog.client.chat.outbox import Outbox
from oncelog.client.chat.runtime import ChatRuntime
from oncelog.client.chat.timeline import has_reached_all
from oncelog.client.runtime.backoff import iterate_pauses_s
from oncelog.errors import LostError, ProtocolError, ServerRefusedError


class DeliveryCounts:
    """Of one client."""

    def __init__(
        self,
        runtime: ChatRuntime,
        outbox: Outbox,
        connector: ChatConnector,
        calls: ChatHttpCalls,
        random_source: random.Random,
    ) -> None:
        self._runtime = runtime
        self._outbox = outbox
        self._connector = connector
        self._calls = calls
        self._random = random_source
        self._counted_connections: dict[str, int] = {}
        """Over which connection each chat was asked about."""
        self._tasks: dict[str, asyncio.Task[bool]] = {}

    def schedule(self, chat_id: str) -> None:
        """Has it asked for, if that is due, while nobody waits for it; it is told as an update."""
        if self._connector.is_connected and not self._is_counted(chat_id) and chat_id not in self._tasks:
            task = self._tasks[chat_id] = asyncio.create_task(self._query(chat_id))
            task.add_done_callback(lambda task: self._finish_query(chat_id, task))

    def _finish_query(self, chat_id: str, task: "asyncio.Task[bool]") -> None:
        del self._tasks[chat_id]
        if not task.cancelled():
            task.exception()  # the client is closed, or says so elsewhere

    async def close(self) -> None:
        """When no more is needed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def load_watermarks(self, chat_id: str) -> dict[str, int]:
        """As the server has them; without one, as we have heard last."""
        await self._query(chat_id)
        known = self._runtime.watermarks.get(chat_id)
        return (
            dict(known)
            if known is not None
            else await self._runtime.call_store(self._runtime.store.load_watermarks, chat_id)
        )

    async def wait_until_delivered(self, chat_id: str, sequence: int) -> None:
        """Returns when every other member has received everything up to here."""
        limits = self._runtime.limits
        pauses = iterate_pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._random)
        while not self._is_delivered(chat_id, sequence):
            connection = self._connector.connection_count
            is_counted = self._connector.is_connected and await self._query(chat_id)

            def is_otherwise(before: int = connection) -> bool:
                return self._is_delivered(chat_id, sequence) or self._connector.connection_count != before

            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_counted else next(pauses)):
                    await self._runtime.wait_until(is_otherwise)

    async def _query(self, chat_id: str) -> bool:
        """Asks, if what is known is not of this connection. False if nobody answers."""
        protocol, connection = self._runtime.protocol, self._connector.connection_count
        if self._is_counted(chat_id):
            return True
        try:
            protocol.set_members(chat_id, await self._calls.get_delivery(chat_id))
        except (LostError, ProtocolError, ServerRefusedError):
            return False
        self._counted_connections[chat_id] = connection
        await self._outbox.save()  # it is told when it has been kept
        return True

    def _is_counted(self, chat_id: str) -> bool:
        return (
            self._counted_connections.get(chat_id) == self._connector.connection_count
            and chat_id in self._runtime.watermarks
        )

    def _is_delivered(self, chat_id: str, sequence: int) -> bool:
        known = self._runtime.watermarks.get(chat_id)
        return known is not None and has_reached_all(known, self._runtime.protocol.user_id, sequence)
