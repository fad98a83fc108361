"""While the standby is away: who opens a log leaves no session behind that waits on the server for nobody."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.sample import make_log
from gateways.gateway_stores import event, fetched, limits, place, run, until
from gateways.standbys import BOUND_S, GATEWAY, WRITE, Operator, connected, standby_away
from oncelog.engine.log import open_log
from oncelog.errors import StoreUnavailableError
from oncelog.stores.moving import demand_possible, target
from oncelog.stores.postgres import looking
from oncelog.stores.postgres.connecting import Timeouts

CONNECT_MS = 2_000
"""Who waits for longer waits for long."""
COMMIT_MS = 300
PATIENCE_MS = 300
HURRY = Timeouts(connect_ms=CONNECT_MS, commit_ms=COMMIT_MS)
LONG_MS = 100_000
TRIES = 3
WAITS_FOR_LONG = """
    SELECT pid FROM pg_stat_activity
    WHERE wait_event = 'SyncRep' AND application_name = $1 AND clock_timestamp() - state_change > interval '2 seconds'
"""


@asynccontextmanager
async def waiting_for_long(address: str, operator: Operator) -> AsyncIterator[int]:
    """A session of a gateway's, as one that was killed leaves it behind."""
    async with connected(address, GATEWAY) as connection:
        waiting = asyncio.create_task(connection.execute(WRITE))
        try:
            ((pid,),) = await until(lambda: fetched(address, WAITS_FOR_LONG, GATEWAY))
            assert await operator.waiting() == [pid]
            yield pid
        finally:
            connection.terminate()
            await asyncio.gather(waiting, return_exceptions=True)


async def opened(address: str, _: Path) -> None:
    chosen = limits(postgres_connect_ms=CONNECT_MS, postgres_commit_ms=COMMIT_MS, postgres_patience_ms=PATIENCE_MS)
    async with open_log(address, limits=chosen):
        pass


async def looked_at(address: str, _: Path) -> None:
    def look() -> None:
        with looking.looking_at(address):
            pass

    await asyncio.to_thread(look)


async def moved_to(address: str, path: Path) -> None:
    await asyncio.to_thread(demand_possible, str(path), address)


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("come", [opened, looked_at, moved_to])
def test_nobody_waits_beside_one_that_has_waited_for_long(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, come: Callable[[str, Path], Awaitable[Any]]
) -> None:
    path = tmp_path / "log.db"
    make_log(path, rounds=1)
    monkeypatch.setattr(looking, "_TIMEOUTS", HURRY)
    monkeypatch.setattr(target, "_TIMEOUTS", HURRY)
    monkeypatch.setattr(target, "CALL_MS", COMMIT_MS)

    async def main() -> None:
        async with standby_away(address) as operator, waiting_for_long(address, operator) as pid:
            for _ in range(TRIES):
                async with asyncio.timeout(BOUND_S):
                    with pytest.raises(StoreUnavailableError, match="it waits for a standby that is away"):
                        await come(address, path)
                assert await operator.waiting() == [pid]

    run(main())


@pytest.mark.rule("CO-11", "CO-16")
def test_who_comes_while_others_have_just_begun_to_wait_waits_too(address: str) -> None:
    """That is what every session does for a moment. It goes on when the standby has answered."""

    async def main() -> None:
        async with connected(address, GATEWAY) as connection, standby_away(address) as operator:
            others = asyncio.create_task(connection.execute(WRITE))
            first = await operator.first_waiting()
            log = open_log(address, limits=limits(postgres_connect_ms=LONG_MS, postgres_commit_ms=LONG_MS))
            opening = asyncio.create_task(log.__aenter__())
            await until(lambda: is_second(operator, first))
            assert not opening.done()
            await operator.set_standbys("")
            await asyncio.gather(others, opening)
            assert place(await log.submit(event(1))) == 1
            await log.close()

    run(main())


async def is_second(operator: Operator, first: int) -> bool:
    return bool(set(await operator.waiting()) - {first})
