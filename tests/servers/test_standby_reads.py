"""Open sessions do not return data before a standby has it, even if the server shows the data."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deadlines import until
from engine.observable_store import LoopClock
from oncelog.engine.log import Log, open_log
from oncelog.storage.postgres import notify, session_factory
from oncelog.testing.postgres_proxy import Incident, PostgresProxy
from servers.shared_logs import LONG_MS, event, limits, position_of, positions, retry_until_available
from servers.standbys import Operator, standby_away
from servers.test_standby import expect_unavailable, open_test_log, read, submit_until_available

CHECK_MS = 60_000
"""Shorter than the idle time after which sessions are closed."""


async def is_visible_after_cancel(address: str, operator: Operator, number: int) -> bool:
    """Cancel all waiting sessions, as a shutdown does. Return whether every session can see the event."""
    for pid in await operator.waiting_sessions():
        await operator.cancel(pid)
    return number in await positions(address)


def waits_for_standbys(log: Log) -> bool:
    return bool(log._store._sessions.waits_for_standbys)  # type: ignore[attr-defined]


@pytest.mark.rule("CO-11", "CO-13")
async def test_open_session_does_not_return_data_without_a_standby(
    address: str, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock
) -> None:
    """If the server were lost now, readers would have seen a record that exists nowhere else."""
    monkeypatch.setattr(notify, "POLL_MS", CHECK_MS)
    async with open_test_log(address, postgres_commit_ms=LONG_MS) as log:
        assert position_of(await log.submit(event(1))) == 1
        assert [record.position for record in await retry_until_available(lambda: read(log))] == [1]
        notifier = log._store._notifier  # type: ignore[attr-defined]
        await until(lambda: notifier._connection and notifier._send_task is None)
        async with standby_away(address) as operator:
            loop_clock.advance(CHECK_MS / 1000)
            await until(lambda: waits_for_standbys(log))
            # Data that is known to be on the standby is returned even while the standby is missing.
            assert [record.position for record in await retry_until_available(lambda: read(log))] == [1]
            submitted = asyncio.create_task(log.submit(event(2)))
            await until(lambda: is_visible_after_cancel(address, operator, 2))
            calls = asyncio.gather(expect_unavailable(read(log)), expect_unavailable(submitted))
            await operator.cancel_until(calls)
            await calls
        assert [record.position for record in await retry_until_available(lambda: read(log))] == [1, 2]
        assert position_of(await submit_until_available(log, event(2))) == 2


@asynccontextmanager
async def log_with_silent_first_host(address: str) -> AsyncIterator[Log]:
    """A log without sessions. The first host in its address accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        several = address.replace("127.0.0.1", f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1", 1)
        async with open_log(address, limits=limits()) as log:
            store: Any = log._store
            store._sessions._address, store._sessions._last_address = several, ""
            store._writer.abandon()
            yield log


@pytest.mark.rule("CO-16")
async def test_silent_host_does_not_block_the_next_host(address: str) -> None:
    async with log_with_silent_first_host(address) as log:
        assert position_of(await log.submit(event(1))) == 1


@pytest.mark.rule("CO-16")
async def test_refused_host_is_retried_while_a_second_host_is_silent(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when a standby becomes the primary while the old primary is frozen."""
    monkeypatch.setattr(session_factory, "RETRY_S", 0.05)
    async with PostgresProxy(address) as proxy, log_with_silent_first_host(proxy.address) as log:
        proxy.is_unreachable = True
        refused = proxy.done[Incident.REFUSED]
        submitted = asyncio.create_task(log.submit(event(1)))
        await until(lambda: proxy.done[Incident.REFUSED] > refused)
        proxy.is_unreachable = False
        assert position_of(await submitted) == 1
