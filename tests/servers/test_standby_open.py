"""Opening a log while the standby is missing leaves no waiting session on the server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from msgspec.structs import replace

from cli.sample_log import make_log
from deadlines import WAIT_S, until
from oncelog.engine.log import open_log
from oncelog.errors import StoreUnavailableError
from oncelog.storage.inspect import postgres as inspect
from oncelog.storage.migrate import target
from oncelog.storage.migrate.migration import check_migration
from oncelog.storage.postgres import connection
from oncelog.storage.postgres.connection import Timeouts
from oncelog.testing.postgres import create_schema
from servers.shared_logs import LONG_MS, event, fetch_rows, limits, position_of
from servers.standbys import GATEWAY, WRITE, Operator, open_session, standby_away

CONNECT_MS = 50
"""A session that has been waiting for longer than this proves that the standby is missing."""
PATIENCE_MS = 300
HURRY = Timeouts(connect_ms=CONNECT_MS, commit_ms=LONG_MS)
TRIES = 2
WAITS_FOR_LONG = """
    SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = $1
    AND clock_timestamp() - state_change > $2 * interval '1 millisecond'
"""


@asynccontextmanager
async def waiting_for_long(address: str, operator: Operator) -> AsyncIterator[int]:
    """Open a session whose COMMIT is waiting, like a session that a killed server has left behind."""
    async with open_session(address, GATEWAY) as connection:
        waiting = asyncio.create_task(connection.execute(WRITE))
        try:
            ((pid,),) = await until(lambda: fetch_rows(address, WAITS_FOR_LONG, GATEWAY, CONNECT_MS))
            assert await operator.waiting_sessions() == [pid]
            yield pid
        finally:
            connection.terminate()
            await asyncio.gather(waiting, return_exceptions=True)


async def open_a_log(address: str, _: Path) -> None:
    chosen = limits(postgres_connect_ms=CONNECT_MS, postgres_patience_ms=PATIENCE_MS)
    async with open_log(address, limits=chosen):
        pass


async def inspect_a_log(address: str, _: Path) -> None:
    def open_view() -> None:
        with inspect.DatabaseInspector(address).open_view():
            pass

    await asyncio.to_thread(open_view)


async def check_move(address: str, path: Path) -> None:
    await asyncio.to_thread(check_migration, str(path), address)


def omit_connect_timeout(
    connect: Callable[[str, Timeouts], Awaitable[Any]],
) -> Callable[[str, Timeouts], Awaitable[Any]]:
    """Connect without a timeout, so that `connect_ms` determines only when a standby counts as missing."""
    return lambda address, timeouts: connect(address, replace(timeouts, connect_ms=LONG_MS))


class LongWait(NamedTuple):
    """A log on a server where a session has been waiting for a long time."""

    address: str
    operator: Operator
    pid: int


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def long_wait(session_loop: None, standby_server: str) -> AsyncIterator[LongWait]:
    """A long wait that all tests of a class share."""
    address = str(await create_schema(standby_server))
    async with open_log(address):
        pass
    async with standby_away(address) as operator, waiting_for_long(address, operator) as pid:
        yield LongWait(address, operator, pid)


class TestLongWaitOfAnotherSession:
    @pytest.mark.rule("CO-11")
    @pytest.mark.parametrize("use", [open_a_log, inspect_a_log, check_move])
    async def test_no_session_is_left_waiting(
        self,
        long_wait: LongWait,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        use: Callable[[str, Path], Awaitable[None]],
    ) -> None:
        path = tmp_path / "log.db"
        await asyncio.to_thread(make_log, path, rounds=1)
        monkeypatch.setattr(connection, "_connect_host", omit_connect_timeout(connection._connect_host))
        monkeypatch.setattr(inspect, "_TIMEOUTS", HURRY)
        monkeypatch.setattr(target, "_TIMEOUTS", HURRY)
        monkeypatch.setattr(target, "CALL_TIMEOUT_MS", LONG_MS)
        for _ in range(TRIES):
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(StoreUnavailableError, match="it is waiting for an unavailable standby"):
                    await use(long_wait.address, path)
            assert await long_wait.operator.waiting_sessions() == [long_wait.pid]


@pytest.mark.rule("CO-11", "CO-16")
async def test_log_waits_if_other_sessions_have_only_started_to_wait(address: str) -> None:
    """Every session waits briefly, and continues when the standby has answered."""
    async with open_session(address, GATEWAY) as connection, standby_away(address) as operator:
        others = asyncio.create_task(connection.execute(WRITE))
        first = await operator.wait_for_waiting_session()
        log = open_log(address, limits=limits())
        opening = asyncio.create_task(log.__aenter__())
        await until(lambda: is_second(operator, first))
        assert not opening.done()
        await operator.set_standbys("")
        await asyncio.gather(others, opening)
        assert position_of(await log.submit(event(1))) == 1
        await log.close()


async def is_second(operator: Operator, first: int) -> bool:
    return bool(set(await operator.waiting_sessions()) - {first})
