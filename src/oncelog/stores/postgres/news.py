"""Gateways wake each other: NOTIFY after a commit and outside of it, where it makes no lane wait for another.

It is a wake-up and no data: who misses one looks by himself before long. One is sent for all commits that were made
while the one before was on its way.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from oncelog.stores.postgres.connecting import Connection, abandoning
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.troubles import OF_POSTGRES

logger: Final = logging.getLogger("oncelog.postgres")

LOOK_TIMEOUT_MS: Final = 5_000
"""Longest wait for an answer on the listening session, before another session is opened."""
LOOK_MS: Final = 5_000
"""How often a session that only listens must pass a barrier.

By that a gateway that only reads notices, too, that its server is not the one any more that others write to.
"""
PAUSE_S: Final = 1.0
"""Before a session that was lost is made anew."""


class News:
    """One session that listens, and one word for the others at a time."""

    def __init__(
        self,
        connected: Callable[[], Awaitable[Connection]],
        look: Callable[[Connection], Awaitable[None]],
        channel: str,
    ) -> None:
        self._connected = connected
        self._look = look
        self._channel = channel
        self._name = secrets.token_hex(8)
        self._wake: Callable[[], None] | None = None
        self._connection: Connection | None = None
        self._listening: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._untold = False
        self._is_closed = False

    def listen(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called when another gateway may have committed something."""
        self._wake = wake
        self._start()

    def tell(self) -> None:
        """Something has been committed here."""
        self._untold = True
        self._start()
        if self._telling is None and self._connection is not None:
            self._telling = asyncio.get_running_loop().create_task(self._tell(self._connection))

    async def close(self) -> None:
        """Neither tells nor listens any more."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.terminate()  # cancelled alone, asyncpg would ask the server to cancel as well
        tasks = [task for task in (self._listening, self._telling) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self) -> None:
        if self._listening is None and not self._is_closed:
            self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def _tell(self, connection: Connection) -> None:
        try:
            while self._untold:
                self._untold = False
                with abandoning(connection, LOOK_TIMEOUT_MS):
                    await connection.execute(SQL["notify"], self._channel, self._name)
        except OF_POSTGRES as error:
            self._untold = True
            logger.debug("other gateways were not woken: %s", error)
        finally:
            self._telling = None

    async def _listen(self) -> None:
        is_in_vain = False
        while not self._is_closed:
            try:
                await self._listen_on(await self._connected())
            except Exception as error:  # noqa: BLE001 - whatever it is, looking now and then is enough until it is over
                if not is_in_vain:
                    logger.warning("nobody can wake this gateway, so it looks by itself: %s", error)
                is_in_vain = True
            else:
                is_in_vain = False
            await asyncio.sleep(PAUSE_S)

    async def _listen_on(self, connection: Connection) -> None:
        """Returns when the session has ended."""
        try:
            ended = asyncio.Event()
            connection.add_termination_listener(lambda _: ended.set())
            with abandoning(connection, LOOK_TIMEOUT_MS):
                await connection.add_listener(self._channel, self._heard)
            self._connection = connection
            self._woken()  # something may have been said before
            if self._untold:
                self.tell()
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), LOOK_MS / 1000)
                if not ended.is_set() and self._telling is None:
                    await self._ask(connection)
                    if self._untold:
                        self.tell()
        finally:
            self._connection = None
            connection.terminate()

    async def _ask(self, connection: Connection) -> None:
        with abandoning(connection, LOOK_TIMEOUT_MS):
            self._telling = asyncio.get_running_loop().create_task(self._tell_nothing(connection))
            await self._telling

    async def _tell_nothing(self, connection: Connection) -> None:
        try:
            await self._look(connection)
        finally:
            self._telling = None

    def _heard(self, _connection: Any, _process: int, _channel: str, name: object) -> None:
        if name != self._name:
            self._woken()

    def _woken(self) -> None:
        if self._wake is not None:
            self._wake()
