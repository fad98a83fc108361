"""If a server freezes while it holds a lane, the database ends its session, and the other servers continue."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.server_process import ServerProcess
from databases import server_address
from deadlines import until
from oncelog.core.values import Submission
from oncelog.engine.log import open_log
from oncelog.testing.postgres import create_schema
from oncelog.testing.postgres_proxy import PostgresProxy
from server.running_server import item
from servers.server_processes import running_servers
from servers.shared_logs import LONG_MS, event, fetch_rows, limits, open_proxied_log, position_of, positions
from servers.test_prepared_statements import session_of

LANE_MS = 1_500
"""Idle time after which the database ends a session that holds a lane."""
TAKE_OVER_MS_MAX = 60_000
"""Upper bound for the takeover. Without the timeout, the other server would wait until the frozen server resumes."""
IN_TRANSACTION = """
    SELECT a.pid, (extract(epoch FROM a.state_change) * 1000)::bigint FROM pg_stat_activity AS a
    JOIN pg_locks AS l ON l.pid = a.pid
    WHERE a.state = 'idle in transaction' AND l.relation = 'oncelog_lanes'::regclass AND l.mode = 'RowShareLock'
"""
LARGE = 40
"""Events in one request."""
CUT_OFF_MS = 2_000
REQUESTS_MIN = 4
"""Lower bound (exclusive) for the requests in a transaction."""
REQUESTS_MAX = 9
"""Upper bound (exclusive) for the requests in a transaction."""
HOLDS = {
    "after it locked the lane for some events": ("BEGIN", False, 3),
    "after it locked the lane for many events": ("BEGIN", False, LARGE),
    "after it wrote some events": ("COMMIT", True, 3),
    "after it wrote many events": ("COMMIT", True, LARGE),
}
"""Statement at which the server is frozen, whether the statement or its answer is held, and the number of events."""


async def submit(session: aiohttp.ClientSession, server: ServerProcess, *numbers: int) -> list[int]:
    """Submit events to a server and return their positions."""
    body = {"events": [item(number) for number in numbers]}
    async with session.post(server.url + "/v1/events", json=body) as response:
        results: list[dict[str, Any]] = (await response.json())["results"]
        return [result["committed_id"] for result in results]


def is_frozen(server: ServerProcess) -> bool:
    state = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(") ")[2]
    return state.startswith("T")


@pytest.mark.rule("CO-12", "CO-14", "CO-16")
@pytest.mark.parametrize("moment", HOLDS)
async def test_frozen_server_loses_its_lane_to_other_servers(moment: str) -> None:
    while not await is_lane_lost_by_frozen_server(*HOLDS[moment]):
        pass


async def is_lane_lost_by_frozen_server(statement: str, is_query: bool, size: int) -> bool:
    """Freeze a server while it holds a lane. Return False if the database ended its session earlier."""
    database = str(await create_schema(server_address()))
    numbers = range(1, size + 1)
    places = [3, 1, *range(4, size + 2)]
    """Event 2 and a new event get positions 1 and 2 on the other server."""
    new, newest = size + 1, size + 2
    async with (
        PostgresProxy(database) as proxy,
        aiohttp.ClientSession() as session,
        running_servers(proxy.address, postgres_lane_ms=LANE_MS, postgres_patience_ms=LONG_MS) as (frozen,),
        running_servers(database, postgres_lane_ms=LONG_MS, postgres_patience_ms=LONG_MS) as (other,),
    ):
        held = proxy.hold(statement, is_query=is_query)
        first = asyncio.create_task(submit(session, frozen, *numbers))
        await held.wait_reached()
        accepted_count = proxy.accepted_count
        frozen.process.send_signal(signal.SIGSTOP)
        await until(lambda: is_frozen(frozen))
        sessions = await fetch_rows(database, IN_TRANSACTION)
        if not sessions or proxy.accepted_count > accepted_count:
            first.cancel()
            return False
        ((pid, since_ms),) = sessions
        if not is_query:  # The answer remains in the socket of the frozen process.
            held.release()
        assert await submit(session, other, 2, new) == [1, 2]
        assert is_frozen(frozen)
        await check_taken_over(database, pid, since_ms)
        assert not first.done()
        held.release()  # A COMMIT that arrives now fails.
        frozen.process.send_signal(signal.SIGCONT)
        assert await first == places
        assert await submit(session, frozen, newest, new) == [newest, 2]
        assert await submit(session, other, *numbers) == places
    given = dict(zip(numbers, places, strict=True)) | {new: 2, newest: newest}
    assert await positions(database) == {number: [position_of] for number, position_of in given.items()}
    return True


async def check_taken_over(database: str, pid: int, since_ms: int) -> None:
    """Assert, by the database clock, that the other server committed after the timeout and that the idle session has
    ended.
    """
    statement = "SELECT log_time_ms FROM oncelog_records WHERE lane = 0 AND position = 1"
    ((taken_ms,),) = await fetch_rows(database, statement)
    assert LANE_MS <= taken_ms - since_ms <= LANE_MS + TAKE_OVER_MS_MAX

    async def has_ended() -> bool:  # Locks are released slightly earlier.
        return await fetch_rows(database, "SELECT pid FROM pg_stat_activity WHERE pid = $1", pid) == []

    await until(has_ended)


@pytest.mark.rule("CO-12", "CO-16")
async def test_log_cut_off_after_any_request_loses_its_lane() -> None:
    """The database detects an idle session after any request except COPY, which the log does not use."""
    points = range(1, REQUESTS_MAX + 1)
    found = await asyncio.gather(*(is_taken_over_after(requests) for requests in points))
    count = found.index(False)
    assert count > REQUESTS_MIN
    assert found == [requests <= count for requests in points]


async def is_taken_over_after(requests: int) -> bool:
    """Cut off a log after some requests of a transaction. Return False if the transaction has fewer requests."""
    while (found := await cut_off_after(requests)) is None:
        pass
    return found


async def cut_off_after(requests: int) -> bool | None:
    """Like `is_taken_over_after`, but return None if the log lost its session before it was cut off."""
    database = str(await create_schema(server_address()))
    async with (
        open_proxied_log(database, postgres_lane_ms=CUT_OFF_MS) as (proxy, log),
        open_log(database, limits=limits()) as other,
    ):
        held = proxy.hold_after("BEGIN;", requests)
        session = session_of(log)
        submitted = asyncio.create_task(log.submit_many(build_events(1)))
        reached = asyncio.create_task(held.wait_reached())
        await asyncio.wait([submitted, reached], return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            held.release()
            return False if session_of(log) == session else None
        taken = position_of(await other.submit(event(9_999)))
        assert taken in (1, LARGE + 1)  # The log retries in a new session and may commit first.
        held.release()
        places = [position_of(verdict) for verdict in await submitted]
        assert places == [position for position in range(1, LARGE + 2) if position != taken]
        assert proxy.cancel_requests == 0
        return True


def build_events(first: int) -> list[Submission]:
    return [event(number) for number in range(first, first + LARGE)]


@pytest.mark.parametrize("requests", [1, 3, 6, 8])
async def test_log_frozen_during_opening_does_not_block_other_logs(database: str, requests: int) -> None:
    async with open_log(database):
        pass
    async with PostgresProxy(database) as proxy:
        held = proxy.hold_after("BEGIN;", requests)
        starting = asyncio.create_task(open_and_close(proxy.address))
        reached = asyncio.create_task(held.wait_reached())
        await asyncio.wait([starting, reached], return_when=asyncio.FIRST_COMPLETED)
        async with open_log(database, limits=limits()) as other:
            await other.submit(event(1))
        held.release()
        await starting
        reached.cancel()


async def open_and_close(address: str) -> None:
    async with open_log(address, limits=limits(postgres_lane_ms=CUT_OFF_MS)):
        pass


async def test_logs_opened_together_on_an_empty_database_share_one_epoch(database: str) -> None:
    logs = [open_log(database) for _ in range(8)]
    await asyncio.gather(*(log.__aenter__() for log in logs))
    assert len({log.epoch for log in logs}) == 1
    for log in logs:
        await log.close()
