"""A PostgreSQL server on which COMMIT waits for a missing standby, and the operator of that server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from deadlines import WAIT_S, until

GATEWAY = "oncelog"
PROBE = "probe"
WAITING = """
    SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = $1 ORDER BY backend_start
"""
WRITE = "SELECT pg_logical_emit_message(true, 'probe', '')"
"""A write whose COMMIT waits for the standby."""
END_ALL = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"
END_IDLE = f"{END_ALL} AND wait_event IS DISTINCT FROM 'SyncRep'"


@asynccontextmanager
async def open_session(address: str, name: str, **settings: Any) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(address, server_settings={"application_name": name}, **settings)
    try:
        yield connection
    finally:
        connection.terminate()


class Operator:
    """Changes settings and terminates sessions. Its own commits do not wait for standbys."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def set_standbys(self, names: str) -> None:
        await self._connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        await self._connection.execute("SELECT pg_reload_conf()")

    async def waiting_sessions(self, name: str = GATEWAY) -> list[int]:
        """Return the process ids of sessions whose COMMIT waits for the standby, oldest first."""
        return [pid for (pid,) in await self._connection.fetch(WAITING, name)]

    async def wait_for_waiting_session(self) -> int:
        """Wait until some session's COMMIT is waiting, and return the session's process id."""
        return int((await until(self.waiting_sessions))[0])

    async def cancel(self, pid: int) -> None:
        """Cancel the wait of a COMMIT, as an operator might by mistake. The server then shows the commit to all
        sessions.
        """
        await self._connection.execute("SELECT pg_cancel_backend($1)", pid)

    async def cancel_until(self, task: "asyncio.Future[Any]") -> None:
        """Cancel waiting sessions repeatedly until a task is done, and at least once."""
        await self.cancel(await self.wait_for_waiting_session())
        async with asyncio.timeout(WAIT_S):
            while not task.done():
                for pid in await self.waiting_sessions():
                    await self.cancel(pid)

    async def end_sessions(self, statement: str = END_ALL) -> None:
        """Terminate the sessions of all logs, and wait until they are gone."""
        await until(lambda: self._is_zero(statement))

    async def _is_zero(self, statement: str) -> bool:
        return bool(await self._connection.fetchval(statement, GATEWAY) == 0)

    async def start_waiting_commit(self, probe: Any) -> "asyncio.Task[Any] | None":
        """Return a task whose COMMIT is waiting, or None if the COMMIT did not wait."""
        written = asyncio.create_task(probe.execute(WRITE))
        while not written.done():
            if await self.waiting_sessions(PROBE):
                return written
        await written
        return None


@asynccontextmanager
async def standby_away(address: str) -> AsyncIterator[Operator]:
    """Make every COMMIT wait during the block. Afterwards, no COMMIT waits, as if the standby had returned."""
    connection = await asyncpg.connect(address, server_settings={"synchronous_commit": "local"})
    operator = Operator(connection)
    try:
        async with open_session(address, PROBE) as probe:
            try:
                await operator.set_standbys("ghost")
                written = await until(lambda: operator.start_waiting_commit(probe))
                try:
                    yield operator
                finally:
                    await operator.set_standbys("")
                    await written  # Waiting COMMITs complete now.
            finally:
                await operator.set_standbys("")
    finally:
        connection.terminate()
