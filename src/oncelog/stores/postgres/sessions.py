"""Sessions that may be believed: with the log that was opened, and behind a barrier.

While the server waits for a standby that is away, no barrier is passed. So only one session at a time is being made,
and one that stands at its barrier is waited for again rather than left there: sessions that nobody uses any more would
use up the server's connections.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from oncelog.stores.postgres.connecting import Connection, Timeouts, abandoning, connect, pass_barrier
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.troubles import OF_POSTGRES

logger: Final = logging.getLogger("oncelog.postgres")


class Sessions:
    """Makes those of one store."""

    def __init__(self, address: str, timeouts: Timeouts, demand: Callable[[Connection], Awaitable[None]]) -> None:
        self._address = address
        self._timeouts = timeouts
        self._demand = demand
        self._turn = asyncio.Lock()
        self._making: asyncio.Task[Connection] | None = None
        self._at_barrier: Connection | None = None
        self._is_away = False
        """Whether the last one could not be made: it is logged when that begins, and when it is over."""

    async def new(self) -> Connection:
        """One more. Raises TimeoutError where the server does not commit."""
        async with self._turn:
            try:
                made = await self._next()
            except Exception as error:
                if not self._is_away:
                    logger.warning(
                        "no session can be had, which is tried again: %s", str(error) or type(error).__name__
                    )
                self._is_away = True
                raise
            if self._is_away:
                logger.warning("sessions can be had again")
                self._is_away = False
            return made

    async def _next(self) -> Connection:
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._made())
            self._making.add_done_callback(_look_at)
        await asyncio.wait([self._making], timeout=self._timeouts.commit_ms / 1000)
        if not self._making.done():
            if not await self._is_waiting_for_standby():
                self._abandon()
            raise TimeoutError("the server does not commit: it may wait for a standby that is away")
        made, self._making = self._making, None
        return made.result()

    def close(self) -> None:
        """Lets go of one that is being made."""
        if self._making is not None:
            if self._making.done() and not self._making.cancelled() and self._making.exception() is None:
                self._making.result().terminate()
            self._abandon()

    async def _made(self) -> Connection:
        connection = await connect(self._address, self._timeouts)
        try:
            self._at_barrier = connection
            await pass_barrier(connection)
            with abandoning(connection, self._timeouts.commit_ms):
                await self._demand(connection)
        except BaseException:
            connection.terminate()
            raise
        finally:
            self._at_barrier = None
        return connection

    def _abandon(self) -> None:
        """Its socket is let go. It is not cancelled at its barrier: asyncpg would ask the server to cancel as well."""
        making, self._making = self._making, None
        if self._at_barrier is not None:
            self._at_barrier.terminate()
        elif making is not None:
            making.cancel()

    async def _is_waiting_for_standby(self) -> bool:
        """Whether the server has our barrier, and waits; else it is the network that is deaf."""
        if self._at_barrier is None:
            return False
        pid = self._at_barrier.get_server_pid()
        try:
            connection = await connect(self._address, self._timeouts)
        except OF_POSTGRES:
            return False
        try:
            with abandoning(connection, self._timeouts.connect_ms):
                return bool(await connection.fetchval(SQL["waits_for_standby"], pid))
        except OF_POSTGRES:
            return False
        finally:
            connection.terminate()


def _look_at(task: asyncio.Task[Any]) -> None:
    """Who waited for it may have gone."""
    if not task.cancelled():
        task.exception()
