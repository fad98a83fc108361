"""A gateway that is frozen while it holds a lane: the others wait for it no longer than they must, and go on."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from doors.serving import item
from gateways.gateway_stores import WAIT_S, event, fetched, place, positions, proxied, run, until
from gateways.running import Gateway, gateways
from oncelog.core.values import Submission
from oncelog.engine.limits import Limits
from oncelog.engine.log import open_log
from oncelog.testing.postgres_proxy import PostgresProxy

LANE_MS = 1_500
MARGIN_MS = 25_000
"""What a busy machine may take in addition: without a time-out it is waited for as long as it is frozen."""
IN_TRANSACTION = """
    SELECT a.pid, (extract(epoch FROM a.state_change) * 1000)::bigint FROM pg_stat_activity AS a
    JOIN pg_locks AS l ON l.pid = a.pid
    WHERE a.state = 'idle in transaction' AND l.relation = 'oncelog_lanes'::regclass AND l.mode = 'RowShareLock'
"""
LARGE = 40
"""Events in one request."""
CUT_OFF_MS = 1_000
REQUESTS_MIN = 4
"""A transaction has more of them."""
HOLDS = {
    "when it has got the lane": ("BEGIN", False),
    "when it has written everything": ("COMMIT", True),
}


async def submit(session: aiohttp.ClientSession, gateway: Gateway, *numbers: int) -> list[int]:
    """The places that a gateway gives events; every one of them must have one."""
    body = {"events": [item(number) for number in numbers]}
    async with session.post(gateway.url + "/v1/events", json=body) as response:
        results: list[dict[str, Any]] = (await response.json())["results"]
        return [result["committed_id"] for result in results]


def is_frozen(gateway: Gateway) -> bool:
    state = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(") ")[2]
    return state.startswith("T")


@pytest.mark.rule("CO-12", "CO-14", "CO-16")
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("moment", HOLDS)
def test_a_frozen_gateway_loses_its_lane_to_the_others(database: str, moment: str, size: int) -> None:
    statement, is_query = HOLDS[moment]
    numbers = range(1, size + 1)
    places = [3, 1, *range(4, size + 2)]
    """Behind those that the other has given to the second of them, and to one that is new."""
    new, newest = size + 1, size + 2

    async def main() -> None:
        async with PostgresProxy(database) as proxy, aiohttp.ClientSession() as session:
            starting = gateways(proxy.address, database, postgres_lane_ms=LANE_MS, postgres_patience_ms=15_000)
            frozen, other = await asyncio.to_thread(starting.__enter__)
            try:
                held = proxy.hold(statement, is_query=is_query)
                first = asyncio.create_task(submit(session, frozen, *numbers))
                async with asyncio.timeout(WAIT_S):
                    await held.reached()
                ((pid, since_ms),) = await until(lambda: fetched(database, IN_TRANSACTION))
                frozen.freeze()
                await until(lambda: is_frozen(frozen))
                if not is_query:  # the answer waits for it in its socket
                    held.let_go()
                async with asyncio.timeout(WAIT_S):
                    assert await submit(session, other, 2, new) == [1, 2]
                assert is_frozen(frozen)
                await demand_taken_over(database, pid, since_ms)
                assert not first.done()
                held.let_go()  # a COMMIT that comes now comes too late
                frozen.thaw()
                async with asyncio.timeout(WAIT_S):
                    assert await first == places
                    assert await submit(session, frozen, newest, new) == [newest, 2]
                    assert await submit(session, other, *numbers) == places
            finally:
                await asyncio.to_thread(starting.__exit__, None, None, None)
        given = dict(zip(numbers, places, strict=True)) | {new: 2, newest: newest}
        assert await positions(database) == {number: [place] for number, place in given.items()}

    run(main())


@pytest.mark.rule("CO-12", "CO-16")
def test_a_gateway_that_is_cut_off_between_any_two_requests_loses_its_lane(database: str) -> None:
    """Wherever it is when nothing more comes from it, the server sees that it is idle. Inside of COPY it would not."""

    async def main() -> None:
        for requests in itertools.count(1):
            async with proxied(database, postgres_lane_ms=CUT_OFF_MS) as (proxy, log), open_log(database) as other:
                held = proxy.hold_after("BEGIN;", requests)
                submitted = asyncio.create_task(log.submit_many(many(10_000 * requests)))
                reached = asyncio.create_task(held.reached())
                await asyncio.wait([submitted, reached], return_when=asyncio.FIRST_COMPLETED)
                if submitted.done():
                    reached.cancel()
                    break
                between = place(await other.submit(event(10_000 * requests + 9_999)))
                held.let_go()
                places = [place(verdict) for verdict in await submitted]
                assert places == list(range(places[0], places[0] + LARGE))
                assert between not in places
                assert proxy.cancel_requests == 0
        assert requests > REQUESTS_MIN

    run(main())


def many(first: int) -> list[Submission]:
    return [event(number) for number in range(first, first + LARGE)]


async def demand_taken_over(database: str, pid: int, since_ms: int) -> None:
    """By the database's clock: not before the time was over, and soon after it. The session is gone."""
    statement = "SELECT log_time_ms FROM oncelog_records WHERE lane = 0 AND position = 1"
    ((taken_ms,),) = await fetched(database, statement)
    assert LANE_MS <= taken_ms - since_ms <= LANE_MS + MARGIN_MS
    assert await fetched(database, "SELECT pid FROM pg_stat_activity WHERE pid = $1", pid) == []


@pytest.mark.parametrize("requests", [1, 3, 6, 8])
def test_a_gateway_that_is_frozen_while_it_starts_keeps_nobody_out(database: str, requests: int) -> None:
    async def main() -> None:
        async with open_log(database):
            pass
        async with PostgresProxy(database) as proxy:
            held = proxy.hold_after("BEGIN;", requests)
            starting = asyncio.create_task(opened_and_closed(proxy.address))
            reached = asyncio.create_task(held.reached())
            await asyncio.wait([starting, reached], return_when=asyncio.FIRST_COMPLETED)
            async with open_log(database, limits=Limits(postgres_lane_ms=CUT_OFF_MS)) as other:
                await other.submit(event(1))
            held.let_go()
            await starting
            reached.cancel()

    run(main())


async def opened_and_closed(address: str) -> None:
    async with open_log(address, limits=Limits(postgres_lane_ms=CUT_OFF_MS)):
        pass


def test_gateways_that_start_together_on_an_empty_database_make_one_log(database: str) -> None:
    async def main() -> None:
        logs = [open_log(database) for _ in range(8)]
        await asyncio.gather(*(log.__aenter__() for log in logs))
        assert len({log.epoch for log in logs}) == 1
        for log in logs:
            await log.close()

    run(main())
