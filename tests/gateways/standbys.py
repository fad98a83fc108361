"""A server whose COMMITs wait for a standby that does not come, and an operator who looks after it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from gateways.gateway_stores import until

BOUND_S = 30
"""Who is told that the store is not available is told so by then, on a busy machine too; who waits waits for ever."""
GATEWAY = "oncelog"
PROBE = "probe"
WAITING = """
    SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = $1 ORDER BY backend_start
"""
WRITE = "SELECT pg_logical_emit_message(true, 'probe', '')"
"""Its commit waits as every other."""
END_ALL = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"
END_IDLE = f"{END_ALL} AND wait_event IS DISTINCT FROM 'SyncRep'"


@asynccontextmanager
async def connected(address: str, name: str, **settings: Any) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(address, server_settings={"application_name": name}, **settings)
    try:
        yield connection
    finally:
        connection.terminate()


class Operator:
    """Who looks after the server. Its own session waits for nobody."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def set_standbys(self, names: str) -> None:
        await self._connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        await self._connection.execute("SELECT pg_reload_conf()")

    async def waiting(self, name: str = GATEWAY) -> list[int]:
        """The sessions whose COMMIT waits for the standby, the oldest first."""
        return [pid for (pid,) in await self._connection.fetch(WAITING, name)]

    async def first_waiting(self) -> int:
        """Once there is one."""
        return int((await until(self.waiting))[0])

    async def cancel(self, pid: int) -> None:
        """As if by mistake: what it has done, the server then shows to everybody."""
        await self._connection.execute("SELECT pg_cancel_backend($1)", pid)

    async def cancel_until(self, task: "asyncio.Task[Any]") -> None:
        """All that waits, again and again, until a task has ended. There must be something."""
        cancelled = False
        async with asyncio.timeout(BOUND_S):
            while not task.done():
                for pid in await self.waiting():
                    await self.cancel(pid)
                    cancelled = True
        assert cancelled

    async def end_sessions(self, statement: str = END_ALL) -> None:
        """Those of all gateways, and returns when they are gone."""
        await until(lambda: self._is_zero(statement))

    async def _is_zero(self, statement: str) -> bool:
        return bool(await self._connection.fetchval(statement, GATEWAY) == 0)

    async def commits_wait(self, probe: Any) -> "asyncio.Task[Any] | None":
        """A COMMIT that waits; None if it did not."""
        written = asyncio.create_task(probe.execute(WRITE))
        while not written.done():
            if await self.waiting(PROBE):
                return written
        await written
        return None


@asynccontextmanager
async def standby_away(address: str) -> AsyncIterator[Operator]:
    """Inside, no COMMIT returns. At the end the server waits for nobody any more, as if the standby were back."""
    waits_for_nobody = {"synchronous_commit": "local"}
    connection = await asyncpg.connect(address, server_settings=waits_for_nobody)
    operator = Operator(connection)
    try:
        async with connected(address, PROBE) as probe:
            try:
                await operator.set_standbys("ghost")
                written = await until(lambda: operator.commits_wait(probe))
                try:
                    yield operator
                finally:
                    await operator.set_standbys("")
                    await written  # now COMMITs return
            finally:
                await operator.set_standbys("")
    finally:
        connection.terminate()
