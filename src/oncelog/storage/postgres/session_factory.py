"""Creates sessions that are safe to read from: with the log that was opened, and behind a barrier.

While a server waits for a standby that is away, no barrier is passed. So only one session at a time is being made with
each server, and one that stands at its barrier is waited for again rather than left there: sessions that nobody uses
any more would use up the server's connections.

Where the address names several servers, the one that served last is asked first, and soon the others beside it: a
server that says nothing, or whose standbys have left it for another, must not keep us from the one that took over.
Once a session has passed its barrier on another server than before, all those with the old one are let go. They would
show what was there when it was left, and wait for answers that do not come.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

from oncelog.storage.address import redact_address
from oncelog.storage.postgres.connection import (
    Connection,
    Timeouts,
    connect,
    pass_barrier,
    select_error,
    split_address,
    terminate_after,
)
from oncelog.storage.postgres.errors import POSTGRES_ERRORS
from oncelog.storage.postgres.statements import SQL

logger: Final = logging.getLogger("oncelog.postgres")

HEAD_START_S: Final = 0.25
"""For so long a server is waited for before the next one is asked beside it."""

RETRY_S: Final = 0.5
"""While one says nothing, the others are asked again so often."""


class SessionFactory:
    """Makes those of one store."""

    def __init__(self, address: str, timeouts: Timeouts, check: Callable[[Connection], Awaitable[None]]) -> None:
        self._address = address
        self._timeouts = timeouts
        self._check_session = check
        self._lock = asyncio.Lock()
        self._connect_tasks: dict[str, asyncio.Task[Connection]] = {}
        """One for each server, by its address."""
        self._at_barrier: dict[str, Connection] = {}
        self._last_address = ""
        """The address that served last."""
        self._servers: WeakKeyDictionary[Connection, object] = WeakKeyDictionary()
        """With which server each session is."""
        self._is_unreachable = False
        """Whether the last one could not be made: it is logged when that begins, and when it is over."""
        self._timeline = ""
        self.waits_for_standbys = False
        """Whether the server makes its commits wait for standbys, as far as was seen last."""

    async def create(self) -> Connection:
        """One more. Raises TimeoutError where no server commits."""
        async with self._lock:
            try:
                connection = await self._connect_any()
            except Exception as error:
                if not self._is_unreachable:
                    logger.warning(
                        "no session can be had, which is tried again: %s", str(error) or type(error).__name__
                    )
                self._is_unreachable = True
                raise
            if self._is_unreachable:
                logger.warning("sessions can be had again")
                self._is_unreachable = False
            self._terminate_others(connection)
            return connection

    async def poll(self, connection: Connection) -> None:
        """Passes a barrier with a session that has been in use for a while: its server may not be the one any more."""
        await self._load_server_state(connection)
        await pass_barrier(connection)

    def close(self) -> None:
        """Lets go of those that are being made."""
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
                    # The others are left as they are, and found by who comes next: it would be one more each time.
                    self._last_address = host
                    return task.result()
                refused[host] = error
            if loop.time() >= deadline_s:
                await self._give_up(attempts.values())
                raise TimeoutError("the server does not commit: it may wait for a standby that is away")
            if not done and not untried:  # while one says nothing, another may have been made the primary
                untried = [host for host in refused if host not in attempts.values()]
        raise select_error(list(refused.values()))

    def _start_connecting(self, host: str) -> "asyncio.Task[Connection]":
        """A session that is being made with a server, the one that is waited for already if there is one."""
        task = self._connect_tasks.get(host)
        if task is None or (task.done() and (_get_error(task) is not None or task.result().is_closed())):
            task = self._connect_tasks[host] = asyncio.get_running_loop().create_task(self._connect(host))
            task.add_done_callback(_get_error)
        return task

    async def _connect(self, host: str) -> Connection:
        connection = await connect(host, self._timeouts)
        try:
            self._at_barrier[host] = connection
            await pass_barrier(connection)
            with terminate_after(connection, self._timeouts.commit_ms):
                await self._check_session(connection)
                await self._load_server_state(connection)
        except BaseException:
            connection.terminate()
            raise
        finally:
            self._at_barrier.pop(host, None)
        return connection

    async def _give_up(self, hosts: Iterable[str]) -> None:
        """For now: those that stand at their barrier are waited for again."""
        for host in list(hosts):
            if not await self._is_waiting_for_standby(host):
                self._abandon(host)

    def _abandon(self, host: str) -> None:
        """Its socket is let go. It is not cancelled at its barrier: asyncpg would ask the server to cancel as well."""
        connect_task, barrier = self._connect_tasks.pop(host, None), self._at_barrier.get(host)
        if barrier is not None:
            barrier.terminate()
        elif connect_task is not None and not connect_task.cancel() and _get_error(connect_task) is None:
            connect_task.result().terminate()  # it was completed meanwhile

    async def _is_waiting_for_standby(self, host: str) -> bool:
        """Whether the server has our barrier, and waits; else it is the network that is deaf."""
        barrier = self._at_barrier.get(host)
        if barrier is None:
            return False
        pid = barrier.get_server_pid()
        try:
            connection = await connect(host, self._timeouts)
        except POSTGRES_ERRORS:
            return False
        try:
            with terminate_after(connection, self._timeouts.connect_ms):
                return bool(await connection.fetchval(SQL["waits_for_standby"], pid))
        except POSTGRES_ERRORS:
            return False
        finally:
            connection.terminate()

    # --- with which server

    async def _load_server_state(self, connection: Connection) -> None:
        self._servers[connection], self.waits_for_standbys, timeline = await connection.fetchrow(SQL["server"])
        if timeline != self._timeline:
            self._timeline = timeline
            await self._compare_timeline(connection, timeline)

    async def _compare_timeline(self, connection: Connection, timeline: str) -> None:
        """Warn once if the server has another timeline than when the log was last used."""
        before = await connection.fetchval(SQL["timeline"])
        if not timeline or timeline == before:
            return
        if before is not None:
            logger.warning(
                "%s: the timeline of the server is %s, and was %s before: a standby has taken over, or a backup was "
                "restored. If commits are lost, stop everything that uses the log and run "
                "`oncelog epoch ADDRESS --renew`",
                redact_address(self._address),
                timeline,
                before,
            )
        async with connection.transaction():
            # A session must not wait for a standby because of a note: if it is lost, the warning is logged again.
            await connection.execute("SET LOCAL synchronous_commit = off")
            await connection.execute(SQL["set_timeline"], timeline)

    def _terminate_others(self, current_session: Connection) -> None:
        """It has passed its barrier just now, so its server is the one: nobody follows the others any more."""
        current = self._servers[current_session]
        others = [
            connection
            for connection, server in self._servers.items()
            if server != current and not connection.is_closed()
        ]
        if others:
            logger.warning("another server has taken over; %d sessions with the old one are let go", len(others))
        for connection in others:
            connection.terminate()


def _get_error(task: "asyncio.Task[Any]") -> BaseException | None:
    """Looks at it, too: who waited for it may have gone."""
    return TimeoutError("it was let go") if task.cancelled() else task.exception()
