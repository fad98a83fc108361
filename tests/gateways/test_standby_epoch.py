"""`oncelog epoch --renew` while COMMITs wait for a standby: it does not report an epoch that may be lost."""

import asyncio
from threading import Event

import pytest

from gateways.gateway_stores import LONG_MS, fetched
from gateways.standbys import standby_away
from oncelog.errors import StoreUnavailableError
from oncelog.stores.about import new_epoch
from oncelog.stores.postgres import inspecting, looking
from oncelog.stores.postgres.connecting import Timeouts
from waiting import WAIT_S


@pytest.mark.rule("CO-11")
async def test_new_epoch_with_cancelled_wait_is_not_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = Event()
    loop, is_inside = asyncio.get_running_loop(), asyncio.Event()

    def held() -> str:
        loop.call_soon_threadsafe(is_inside.set)
        may_go_on.wait(WAIT_S)
        return new_epoch()

    patient = Timeouts(connect_ms=LONG_MS, lane_ms=LONG_MS, commit_ms=LONG_MS)
    monkeypatch.setattr(looking, "_TIMEOUTS", patient)
    monkeypatch.setattr(inspecting, "new_epoch", held)
    renewing = asyncio.create_task(asyncio.to_thread(inspecting.inspector_of(address).renew_epoch))
    await is_inside.wait()
    async with standby_away(address) as operator:
        may_go_on.set()
        await operator.cancel(await operator.first_waiting())
        with pytest.raises(StoreUnavailableError, match="COMMIT was not waited for"):
            await renewing
    monkeypatch.undo()
    renewed = await asyncio.to_thread(inspecting.inspector_of(address).renew_epoch)
    assert await fetched(address, "SELECT epoch FROM oncelog_log") == [(renewed.new_epoch,)]
