"""Servers wake each other: NOTIFY after a commit and outside of it, so that no lane waits for another.

It is a wake-up and no data: who misses one looks by himself before long. One is sent for all commits that were made
while the one before was on its way.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from oncelog.storage.postgres.connection import Connection, terminate_after
from oncelog.storage.postgres.errors import POSTGRES_ERRORS
from oncelog.storage.postgres.statements import SQL

logger: Final = logging.getLogger("oncelog.postgres")

POLL_TIMEOUT_MS: Final = 5_000
"""Longest wait for an answer on the listening session, before another session is opened."""
POLL_MS: Final = 5_000
"""How often a session that only listens must pass a barrier.

By that a gateway that only reads notices, too, that its server is not the one any more that others write to.
"""
RECONNECT_PAUSE_S: Final = 1.0
"""Before a session that was lost is made anew."""


class Notifier:
    """One session that listens, and one word for the others at a time."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        poll: Callable[[Connection], Awaitable[None]],
        channel: str,
    ) -> None:
        self._connect = connect
        self._poll_session = poll
        self._channel = channel
        self._sender = secrets.token_hex(8)
        self._wake: Callable[[], None] | None = None
        self._connection: Connection | None = None
        self._listen_task: asyncio.Task[None] | None = None
        self._send_task: asyncio.Task[None] | None = None
        self._statement_lock = asyncio.Lock()
        """Held by a notification or a poll: the session runs one statement at a time."""
        self._has_unsent = False
        self._is_closed = False

    def listen(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called when another gateway may have committed something."""
        self._wake = wake
        self._start_listening()

    def notify(self) -> None:
        """Something has been committed here."""
        self._has_unsent = True
        self._start_listening()
        if self._send_task is None and self._connection is not None:
            self._send_task = asyncio.get_running_loop().create_task(self._send(self._connection))

    async def close(self) -> None:
        """Neither tells nor listens any more."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.terminate()  # cancelled alone, asyncpg would ask the server to cancel as well
        tasks = [task for task in (self._listen_task, self._send_task) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start_listening(self) -> None:
        if self._listen_task is None and not self._is_closed:
            self._listen_task = asyncio.get_running_loop().create_task(self._listen())

    async def _send(self, connection: Connection) -> None:
        try:
            while self._has_unsent:
                async with self._statement_lock:
                    self._has_unsent = False
                    with terminate_after(connection, POLL_TIMEOUT_MS):
                        await connection.execute(SQL["notify"], self._channel, self._sender)
        except POSTGRES_ERRORS as error:
            self._has_unsent = True
            logger.debug("other gateways were not woken: %s", error)
        finally:
            self._send_task = None

    async def _listen(self) -> None:
        is_in_vain = False
        while not self._is_closed:
            try:
                await self._listen_on(await self._connect())
            except Exception as error:  # noqa: BLE001 - whatever it is, looking now and then is enough until it is over
                if not is_in_vain:
                    logger.warning("nobody can wake this gateway, so it looks by itself: %s", error)
                is_in_vain = True
            else:
                is_in_vain = False
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _listen_on(self, connection: Connection) -> None:
        """Returns when the session has ended."""
        try:
            is_ended = asyncio.Event()
            connection.add_termination_listener(lambda _: is_ended.set())
            with terminate_after(connection, POLL_TIMEOUT_MS):
                await connection.add_listener(self._channel, self._on_notification)
            self._connection = connection
            self._wake_listener()  # something may have been said before
            if self._has_unsent:
                self.notify()
            while not is_ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(is_ended.wait(), POLL_MS / 1000)
                if not is_ended.is_set():
                    async with self._statement_lock:
                        with terminate_after(connection, POLL_TIMEOUT_MS):
                            await self._poll_session(connection)
        finally:
            self._connection = None
            connection.terminate()

    def _on_notification(self, _connection: Any, _process: int, _channel: str, name: object) -> None:
        if name != self._sender:
            self._wake_listener()

    def _wake_listener(self) -> None:
        if self._wake is not None:
            self._wake()
