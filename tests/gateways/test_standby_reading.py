"""What a server shows before a standby has it is not told, by sessions either that have been open for long."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateways.gateway_stores import event, insisted, limits, place, positions, run, until
from gateways.standbys import Operator, standby_away
from gateways.test_standby import answered, gateway, read, unavailable
from oncelog.engine.log import Log, open_log
from oncelog.stores.postgres import news, sessions
from oncelog.testing.postgres_proxy import Incident, PostgresProxy

LOOK_MS = 200
LONG_MS = 1_000_000
"""Longer than a test may take: who waits for that has not asked anybody else."""


async def shown(address: str, operator: Operator, number: int) -> bool:
    """Whether all can see the event. Whoever waits for the standby is made to wait no longer, as by a shutdown."""
    for pid in await operator.waiting():
        await operator.cancel(pid)
    return number in await positions(address)


def knows_of_standbys(log: Log) -> bool:
    return bool(log._store._sessions.waits_for_standbys)  # type: ignore[attr-defined]


@pytest.mark.rule("CO-11", "CO-13")
def test_an_open_session_does_not_tell_what_is_on_no_standby(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server were lost now, a reader would have been given what is nowhere, under a number of another."""
    monkeypatch.setattr(news, "LOOK_MS", LOOK_MS)

    async def main() -> None:
        async with gateway(address) as log:
            assert place(await answered(log, event(1))) == 1
            assert [record.position for record in await read(log)] == [1]
            await until(lambda: log._store._news._connection)  # type: ignore[attr-defined]
            async with standby_away(address) as operator:
                await until(lambda: knows_of_standbys(log))
                # What is known to be on a standby is told, whether or not there is one at the moment.
                assert [record.position for record in await read(log)] == [1]
                submitted = asyncio.create_task(log.submit(event(2)))
                await until(lambda: shown(address, operator, 2))
                await unavailable(read(log))
                await unavailable(submitted)
            assert [record.position for record in await insisted(lambda: read(log))] == [1, 2]
            assert place(await answered(log, event(2))) == 2

    run(main())


@asynccontextmanager
async def beside_a_silent_one(address: str) -> AsyncIterator[Log]:
    """A log whose sessions are gone, and whose address names first a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        several = address.replace("127.0.0.1", f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1", 1)
        patient = limits(postgres_connect_ms=LONG_MS, postgres_commit_ms=LONG_MS)
        async with open_log(address, limits=patient) as log:
            store: Any = log._store
            store._sessions._address, store._sessions._last = several, ""
            store._writer.abandon()
            yield log


@pytest.mark.rule("CO-16")
def test_a_server_that_says_nothing_keeps_nobody_from_the_next(address: str) -> None:
    async def main() -> None:
        async with beside_a_silent_one(address) as log:
            assert place(await log.submit(event(1))) == 1

    run(main())


@pytest.mark.rule("CO-16")
def test_who_was_refused_is_asked_again_while_another_says_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a standby that becomes the primary while the old one is frozen."""
    monkeypatch.setattr(sessions, "AGAIN_S", 0.05)

    async def main() -> None:
        async with PostgresProxy(address) as proxy, beside_a_silent_one(proxy.address) as log:
            proxy.is_shut = True
            refused = proxy.done[Incident.REFUSED]
            submitted = asyncio.create_task(log.submit(event(1)))
            await until(lambda: proxy.done[Incident.REFUSED] > refused)
            proxy.is_shut = False
            assert place(await submitted) == 1

    run(main())
