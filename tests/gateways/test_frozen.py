"""A server is frozen while it holds a lane: the database ends its session, and the other servers go on."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databases import server_address
from doors.serving import item
from gateways.gateway_stores import event, fetched, place, positions, proxied, until
from gateways.running import ServerProcess, running_servers
from oncelog.core.values import Submission
from oncelog.engine.limits import Limits
from oncelog.engine.log import open_log
from oncelog.testing.postgres import fresh_schema
from oncelog.testing.postgres_proxy import PostgresProxy

LANE_MS = 1_500
"""The database ends a session that holds a lane and is silent for this time."""
PATIENCE_MS = 60_000
IN_TRANSACTION = """
    SELECT a.pid FROM pg_stat_activity AS a JOIN pg_locks AS l ON l.pid = a.pid
    WHERE a.state = 'idle in transaction' AND l.relation = 'oncelog_lanes'::regclass AND l.mode = 'RowShareLock'
"""
LARGE = 40
"""Events in one request."""
CUT_OFF_MS = 2_000
REQUESTS_MIN = 4
"""A transaction has more requests than this."""
REQUESTS_MAX = 9
"""A transaction has fewer requests than this."""
HOLDS = {
    "after it locked the lane for some events": ("BEGIN", False, 3),
    "after it locked the lane for many events": ("BEGIN", False, LARGE),
    "after it wrote some events": ("COMMIT", True, 3),
    "after it wrote many events": ("COMMIT", True, LARGE),
}
"""Statement at which the server is frozen, whether the statement itself or its answer is held, number of events."""


async def submit(session: aiohttp.ClientSession, server: ServerProcess, *numbers: int) -> list[int]:
    """Submit events to a server and return their positions."""
    body = {"events": [item(number) for number in numbers]}
    async with session.post(server.url + "/v1/events", json=body) as response:
        results: list[dict[str, Any]] = (await response.json())["results"]
        return [result["committed_id"] for result in results]


def is_frozen(server: ServerProcess) -> bool:
    state = Path(f"/proc/{server.pid}/stat").read_text().rpartition(") ")[2]
    return state.startswith("T")


@pytest.mark.rule("CO-12", "CO-14", "CO-16")
@pytest.mark.parametrize("moment", HOLDS)
async def test_frozen_server_loses_its_lane_to_other_servers(database: str, moment: str) -> None:
    statement, is_query, size = HOLDS[moment]
    numbers = range(1, size + 1)
    places = [3, 1, *range(4, size + 2)]
    """Behind the positions that the other server assigns to event 2 and to a new one."""
    new, newest = size + 1, size + 2
    async with (
        PostgresProxy(database) as proxy,
        aiohttp.ClientSession() as session,
        running_servers(proxy.address, database, postgres_lane_ms=LANE_MS, postgres_patience_ms=PATIENCE_MS) as (
            frozen,
            other,
        ),
    ):
        held = proxy.hold(statement, is_query=is_query)
        since_ms = time.time_ns() // 1_000_000
        first = asyncio.create_task(submit(session, frozen, *numbers))
        await held.reached()
        frozen.freeze()  # before the database ends its session
        await until(lambda: is_frozen(frozen))
        if not is_query:  # the answer waits in the socket of the frozen process
            held.let_go()
        assert await submit(session, other, 2, new) == [1, 2]
        assert is_frozen(frozen)
        await check_taken_over(database, since_ms)
        assert not first.done()
        held.let_go()  # a COMMIT that arrives now is too late
        frozen.thaw()
        assert await first == places
        assert await submit(session, frozen, newest, new) == [newest, 2]
        assert await submit(session, other, *numbers) == places
    given = dict(zip(numbers, places, strict=True)) | {new: 2, newest: newest}
    assert await positions(database) == {number: [place] for number, place in given.items()}


async def check_taken_over(database: str, since_ms: int) -> None:
    """The other server committed after the timeout, and no session holds the lane any more."""
    statement = "SELECT log_time_ms FROM oncelog_records WHERE lane = 0 AND position = 1"
    ((taken_ms,),) = await fetched(database, statement)
    assert taken_ms - since_ms >= LANE_MS
    assert await fetched(database, IN_TRANSACTION) == []


@pytest.mark.rule("CO-12", "CO-16")
async def test_log_cut_off_between_any_two_requests_loses_its_lane() -> None:
    """The database sees that the session is idle, whichever request was the last one. Inside of COPY it would not."""
    points = range(1, REQUESTS_MAX + 1)
    found = await asyncio.gather(*(is_taken_over_after(requests) for requests in points))
    count = found.index(False)
    assert count > REQUESTS_MIN
    assert found == [requests <= count for requests in points]


async def is_taken_over_after(requests: int) -> bool:
    """Cut a log off after some requests of a transaction; return False if the transaction has fewer."""
    database = str(await fresh_schema(server_address()))
    async with proxied(database, postgres_lane_ms=CUT_OFF_MS) as (proxy, log), open_log(database) as other:
        held = proxy.hold_after("BEGIN;", requests)
        submitted = asyncio.create_task(log.submit_many(many(1)))
        reached = asyncio.create_task(held.reached())
        await asyncio.wait([submitted, reached], return_when=asyncio.FIRST_COMPLETED)
        if submitted.done():
            reached.cancel()
            return False
        assert place(await other.submit(event(9_999))) == 1
        held.let_go()
        assert [place(verdict) for verdict in await submitted] == list(range(2, LARGE + 2))
        assert proxy.cancel_requests == 0
        return True


def many(first: int) -> list[Submission]:
    return [event(number) for number in range(first, first + LARGE)]


@pytest.mark.parametrize("requests", [1, 3, 6, 8])
async def test_log_frozen_while_it_opens_does_not_block_others(database: str, requests: int) -> None:
    async with open_log(database):
        pass
    async with PostgresProxy(database) as proxy:
        held = proxy.hold_after("BEGIN;", requests)
        starting = asyncio.create_task(open_and_close(proxy.address))
        reached = asyncio.create_task(held.reached())
        await asyncio.wait([starting, reached], return_when=asyncio.FIRST_COMPLETED)
        async with open_log(database, limits=Limits(postgres_lane_ms=CUT_OFF_MS)) as other:
            await other.submit(event(1))
        held.let_go()
        await starting
        reached.cancel()


async def open_and_close(address: str) -> None:
    async with open_log(address, limits=Limits(postgres_lane_ms=CUT_OFF_MS)):
        pass


async def test_logs_opened_together_on_an_empty_database_share_one_epoch(database: str) -> None:
    logs = [open_log(database) for _ in range(8)]
    await asyncio.gather(*(log.__aenter__() for log in logs))
    assert len({log.epoch for log in logs}) == 1
    for log in logs:
        await log.close()
