"""Creates sessions that are safe to read from: they belong to the log that was opened, and have passed the barrier.

While a server waits for an absent standby, no session passes its barrier. The factory therefore creates one session at
a time with each server, and the next call waits for a session that is still at its barrier. If it abandoned such
sessions, they would use up the server's connections.

If the address lists several servers, the factory connects to the server of the newest session first, and to the others
shortly afterwards. A silent server, or one that has lost its standbys, must not delay the switch to the server that
has taken over. When a session passes its barrier on a different server than before, the factory terminates all sessions
with the old server: they would read outdated data, or wait for answers that never arrive.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

from oncelog.storage.address import redact_address
from oncelog.storage.postgres.connection import (
    Connection,
    Timeouts,
    connect,
    logger,
    pass_barrier,
    select_error,
    split_address,
    terminate_after,
    terminate_on_error,
)
from oncelog.storage.postgres.errors import POSTGRES_ERRORS, describe_error
from oncelog.storage.postgres.statements import SQL

HEAD_START_S: Final = 0.25
"""How long the factory waits for a server before it connects to the next one in parallel."""

RETRY_S: Final = 0.5
"""Interval at which the factory tries the other servers again while one is silent."""


class SessionFactory:
    """Creates the sessions of one store."""

    def __init__(self, address: str, timeouts: Timeouts, check: Callable[[Connection], Awaitable[None]]) -> None:
        self._address = address
        self._timeouts = timeouts
        self._check_session = check
        self._lock = asyncio.Lock()
        self._connect_tasks: dict[str, asyncio.Task[Connection]] = {}
        """Connection attempts by address, one for each server."""
        self._at_barrier: dict[str, Connection] = {}
        self._last_address = ""
        """Address of the server of the newest session."""
        self._servers: WeakKeyDictionary[Connection, object] = WeakKeyDictionary()
        """Start time of each session's server, which identifies the server."""
        self._is_unreachable = False
        """Whether the newest attempt failed. Only changes of this state are logged."""
        self._timeline = ""
        self.waits_for_standbys = False
        """Whether commits wait for standbys, according to the newest session or poll."""

    async def create(self) -> Connection:
        """Open a session that has passed the barrier. Raises TimeoutError if no server commits in time."""
        async with self._lock:
            try:
                connection = await self._connect_any()
            except Exception as error:
                if not self._is_unreachable:
                    logger.warning("the database is unreachable; retrying: %s", describe_error(error))
                self._is_unreachable = True
                raise
            if self._is_unreachable:
                logger.warning("the database is reachable again")
                self._is_unreachable = False
            self._terminate_others(connection)
            return connection

    async def poll(self, connection: Connection) -> None:
        """Pass a barrier on a session that has been in use for a while: its server may no longer be the primary."""
        await self._load_server_state(connection)
        await pass_barrier(connection)

    def close(self) -> None:
        """Abandon the sessions that are being opened."""
        for host in list(self._connect_tasks):
            self._abandon(host)

    # --- one of several servers

    async def _connect_any(self) -> Connection:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeouts.commit_ms / 1000
        untried = sorted(split_address(self._address), key=lambda host: host != self._last_address)
        attempts: dict[asyncio.Task[Connection], str] = {}
        refused: dict[str, BaseException] = {}
        while untried or attempts:
            if untried:
                host = untried.pop(0)
                attempts[self._start_connecting(host)] = host
            pause_s = HEAD_START_S if untried else RETRY_S if refused else self._timeouts.commit_ms / 1000
            limit_s = max(0.0, min(pause_s, deadline_s - loop.time()))
            done, _ = await asyncio.wait(attempts, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                host = attempts.pop(task)
                del self._connect_tasks[host]
                error = _get_error(task)
                if error is None:
                    # The other attempts continue, and the next call uses them. Otherwise, each call would add sessions.
                    self._last_address = host
                    return task.result()
                refused[host] = error
            if loop.time() >= deadline_s:
                await self._give_up(attempts.values())
                raise TimeoutError("the server does not commit: it may be waiting for an unavailable standby")
            if not done and not untried:  # while one server is silent, another may have become the primary
                untried = [host for host in refused if host not in attempts.values()]
        raise select_error(list(refused.values()))

    def _start_connecting(self, host: str) -> "asyncio.Task[Connection]":
        """Return the connection attempt for a server. Starts one unless an existing attempt is still usable."""
        task = self._connect_tasks.get(host)
        if task is None or (task.done() and (_get_error(task) is not None or task.result().is_closed())):
            task = self._connect_tasks[host] = asyncio.get_running_loop().create_task(self._connect(host))
            task.add_done_callback(_get_error)
        return task

    async def _connect(self, host: str) -> Connection:
        connection = await connect(host, self._timeouts)
        try:
            with terminate_on_error(connection):
                self._at_barrier[host] = connection
                await pass_barrier(connection)
                with terminate_after(connection, self._timeouts.commit_ms):
                    await self._check_session(connection)
                    await self._load_server_state(connection)
        finally:
            self._at_barrier.pop(host, None)
        return connection

    async def _give_up(self, hosts: Iterable[str]) -> None:
        """Abandon the attempts, except those at their barrier, for which the next call waits."""
        for host in list(hosts):
            if not await self._is_waiting_for_standby(host):
                self._abandon(host)

    def _abandon(self, host: str) -> None:
        """Close the socket of an attempt. Cancelling it at its barrier would cancel the barrier on the server too."""
        connect_task, barrier = self._connect_tasks.pop(host, None), self._at_barrier.get(host)
        if barrier is not None:
            barrier.terminate()
        elif connect_task is not None and not connect_task.cancel() and _get_error(connect_task) is None:
            connect_task.result().terminate()  # the attempt has just succeeded

    async def _is_waiting_for_standby(self, host: str) -> bool:
        """Return whether the server still answers, has received the barrier and is waiting for a standby."""
        barrier = self._at_barrier.get(host)
        if barrier is None:
            return False
        pid = barrier.get_server_pid()
        with suppress(*POSTGRES_ERRORS):
            connection = await connect(host, self._timeouts)
            try:
                with terminate_after(connection, self._timeouts.connect_ms):
                    return bool(await connection.fetchval(SQL["waits_for_standby"], pid))
            finally:
                connection.terminate()
        return False

    # --- the server of a session

    async def _load_server_state(self, connection: Connection) -> None:
        self._servers[connection], self.waits_for_standbys, timeline = await connection.fetchrow(SQL["server"])
        if timeline != self._timeline:
            self._timeline = timeline
            await self._compare_timeline(connection, timeline)

    async def _compare_timeline(self, connection: Connection, timeline: str) -> None:
        """Warn once if the server's timeline differs from the timeline at the last use of the log."""
        before = await connection.fetchval(SQL["timeline"])
        if not timeline or timeline == before:
            return
        if before is not None:
            logger.warning(
                "%s: the server's timeline is %s, but was %s before: a standby has taken over, or a backup was "
                "restored. If commits were lost, stop everything that uses the log and run "
                "`oncelog epoch ADDRESS --renew`",
                redact_address(self._address),
                timeline,
                before,
            )
        async with connection.transaction():
            # A session must not wait for a standby because of this row. If the row is lost, the warning is logged
            # again.
            await connection.execute("SET LOCAL synchronous_commit = off")
            await connection.execute(SQL["set_timeline"], timeline)

    def _terminate_others(self, current_session: Connection) -> None:
        """Terminate the sessions with other servers. The current session has passed its barrier on the primary."""
        current = self._servers[current_session]
        others = [
            connection
            for connection, server in self._servers.items()
            if server != current and not connection.is_closed()
        ]
        if others:
            logger.warning("another server has taken over; closing %d sessions with the old one", len(others))
        for connection in others:
            connection.terminate()


def _get_error(task: "asyncio.Task[Any]") -> BaseException | None:
    """Return the error of a task.

    This marks the error as retrieved, because the task's caller may have been cancelled.
    """
    return TimeoutError("the attempt was abandoned") if task.cancelled() else task.exception()
