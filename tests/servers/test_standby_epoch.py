"""`oncelog epoch --renew` reports the new epoch only after the missing standby has it."""

import asyncio
from threading import Event
from typing import Any

import pytest

from deadlines import WAIT_S, until
from oncelog.core.values import Request
from oncelog.storage.inspect import postgres
from oncelog.storage.metadata import EpochRenewal, build_leap_request
from oncelog.storage.postgres import store
from oncelog.storage.postgres.connection import Timeouts
from servers.shared_logs import LONG_MS, fetch_rows
from servers.standbys import Operator, standby_away


async def has_another_waiting(operator: Operator, cancelled: int) -> bool:
    """Whether a second session is waiting, which checks if the COMMIT of the cancelled session is durable."""
    return any(pid != cancelled for pid in await operator.waiting_sessions())


@pytest.mark.rule("CO-11")
async def test_new_epoch_is_reported_after_replication_despite_a_cancelled_wait(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = Event()
    loop, is_inside = asyncio.get_running_loop(), asyncio.Event()

    def hold_leap(*arguments: Any, **named: Any) -> tuple[Request, EpochRenewal]:
        loop.call_soon_threadsafe(is_inside.set)
        may_go_on.wait(WAIT_S)
        return build_leap_request(*arguments, **named)

    patient = Timeouts(connect_ms=LONG_MS, lane_ms=LONG_MS, commit_ms=LONG_MS, patience_ms=LONG_MS)
    monkeypatch.setattr(postgres, "_RENEW_TIMEOUTS", patient)
    monkeypatch.setattr(store, "build_leap_request", hold_leap)
    renewing = asyncio.create_task(asyncio.to_thread(postgres.DatabaseInspector(address).renew_epoch))
    await is_inside.wait()
    async with standby_away(address) as operator:
        may_go_on.set()
        cancelled = await operator.wait_for_waiting_session()
        await operator.cancel(cancelled)
        await until(lambda: has_another_waiting(operator, cancelled))
        assert not renewing.done()
    renewed = await renewing
    assert await fetch_rows(address, "SELECT epoch FROM oncelog_log") == [(renewed.new_epoch,)]
