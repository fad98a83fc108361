"""How far others have received a chat: asked for once a connection, and then told live."""

import asyncio
import random
from contextlib import suppress

from oncelog.client.chat.calls import Calls
from oncelog.client.chat.desk import Desk
from oncelog.client.chat.keeper import Keeper
from oncelog.client.chat.lines import has_all
from oncelog.client.chat.link import Link
from oncelog.client.patience import pauses_s
from oncelog.errors import LostError, ProtocolError, ServerRefusedError


class Counting:
    """Of one client."""

    def __init__(self, desk: Desk, keeper: Keeper, link: Link, calls: Calls, chance: random.Random) -> None:
        self._desk = desk
        self._keeper = keeper
        self._link = link
        self._calls = calls
        self._chance = chance
        self._counted: dict[str, int] = {}
        """Over which connection each chat was asked about."""
        self._asking: dict[str, asyncio.Task[bool]] = {}

    def soon(self, chat_id: str) -> None:
        """Has it asked for, if that is due, while nobody waits for it; it is told as an update."""
        if self._link.is_connected and not self._is_counted(chat_id) and chat_id not in self._asking:
            task = self._asking[chat_id] = asyncio.create_task(self._count(chat_id))
            task.add_done_callback(lambda task: self._asked(chat_id, task))

    def _asked(self, chat_id: str, task: "asyncio.Task[bool]") -> None:
        del self._asking[chat_id]
        if not task.cancelled():
            task.exception()  # the client is closed, or says so elsewhere

    async def close(self) -> None:
        """When no more is needed."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def watermarks(self, chat_id: str) -> dict[str, int]:
        """As the server has them; without one, as we have heard last."""
        await self._count(chat_id)
        known = self._desk.watermarks.get(chat_id)
        return dict(known) if known is not None else await self._desk.in_store(self._desk.store.watermarks, chat_id)

    async def until_delivered(self, chat_id: str, sequence: int) -> None:
        """Returns when every other member has received everything up to here."""
        limits = self._desk.limits
        pauses = pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._chance)
        while not self._is_delivered(chat_id, sequence):
            connection = self._link.connections
            is_counted = self._link.is_connected and await self._count(chat_id)

            def is_otherwise(before: int = connection) -> bool:
                return self._is_delivered(chat_id, sequence) or self._link.connections != before

            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_counted else next(pauses)):
                    await self._desk.until(is_otherwise)

    async def _count(self, chat_id: str) -> bool:
        """Asks, if what is known is not of this connection. False if nobody answers."""
        protocol, connection = self._desk.protocol, self._link.connections
        if self._is_counted(chat_id):
            return True
        try:
            protocol.counted(chat_id, await self._calls.delivery(chat_id))
        except (LostError, ProtocolError, ServerRefusedError):
            return False
        self._counted[chat_id] = connection
        await self._keeper.accept([])  # it is told when it has been kept
        return True

    def _is_counted(self, chat_id: str) -> bool:
        return self._counted.get(chat_id) == self._link.connections and chat_id in self._desk.watermarks

    def _is_delivered(self, chat_id: str, sequence: int) -> bool:
        known = self._desk.watermarks.get(chat_id)
        return known is not None and has_all(known, self._desk.protocol.user_id, sequence)
