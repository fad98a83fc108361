"""Notifications between processes. They are sent with NOTIFY after the commit, so that lanes do not wait for each
other.

A notification carries no data. A process that misses one finds the commit at its next poll. Commits made while a
notification is being sent share the next one.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from oncelog.storage.postgres.connection import Connection, logger, terminate_after
from oncelog.storage.postgres.errors import POSTGRES_ERRORS
from oncelog.storage.postgres.statements import SQL

POLL_TIMEOUT_MS: Final = 5_000
"""Maximum wait for an answer on the listening session, before a new session replaces it."""
POLL_MS: Final = 5_000
"""Interval at which the listening session passes the barrier.

The barrier fails if the server is no longer the primary, which a process that only reads would not notice otherwise.
"""
RECONNECT_PAUSE_S: Final = 1.0
"""Pause before a new session replaces a lost one."""


class Notifier:
    """Sends and receives notifications on one session."""

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
        self._wake: Callable[[], None] = lambda: None
        """Called when another process may have committed; does nothing before `listen`."""
        self._connection: Connection | None = None
        self._listen_task: asyncio.Task[None] | None = None
        self._send_task: asyncio.Task[None] | None = None
        self._statement_lock = asyncio.Lock()
        """Held while a notification or a poll runs: the session runs one statement at a time."""
        self._has_unsent = False
        self._is_closed = False

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever another process may have committed."""
        self._wake = wake
        self._start_listening()

    def notify(self) -> None:
        """Wake the other processes after a commit of this one."""
        self._has_unsent = True
        self._start_listening()
        if self._send_task is None and self._connection is not None:
            self._send_task = asyncio.get_running_loop().create_task(self._send(self._connection))

    async def close(self) -> None:
        """Stop sending and listening."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.terminate()  # otherwise, asyncpg would cancel the statement on the server too
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
            logger.debug("notifying other processes failed: %s", error)
        finally:
            self._send_task = None

    async def _listen(self) -> None:
        has_failed = False
        while not self._is_closed:
            try:
                await self._listen_on(await self._connect())
            except Exception as error:  # noqa: BLE001 - polling replaces notifications after any error
                if not has_failed:
                    logger.warning("this process receives no notifications, so it polls: %s", error)
                has_failed = True
            else:
                has_failed = False
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _listen_on(self, connection: Connection) -> None:
        """Listen until the session ends."""
        try:
            is_ended = asyncio.Event()
            connection.add_termination_listener(lambda _: is_ended.set())
            with terminate_after(connection, POLL_TIMEOUT_MS):
                await connection.add_listener(self._channel, self._on_notification)
            self._connection = connection
            self._wake()  # other processes may have committed before this point
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
            self._wake()
