"""A log reports the start of a database outage once, and its end once."""

import asyncio
import logging
from functools import partial

import pytest

from deadlines import until
from oncelog.engine.log import Log
from oncelog.errors import StoreUnavailableError
from oncelog.storage.postgres import notify
from oncelog.testing.postgres_proxy import Incident, PostgresProxy
from servers.shared_logs import LONG_MS, event, open_proxied_log, position_of, retry_until_available

GONE = "the database is unreachable; retrying: "
BACK = "the database is reachable again"
ALONE = "this process receives no notifications, so it polls: "
TRIES = 5


async def outage(proxy: PostgresProxy, log: Log, number: int) -> None:
    """Write, read and listen while no session can connect."""
    proxy.is_unreachable = True
    proxy.cut_all()
    for _ in range(TRIES):
        for call in (log.submit(event(number)), log.read()):
            with pytest.raises(StoreUnavailableError):
                await call
    refused = proxy.done[Incident.REFUSED]
    await until(lambda: proxy.done[Incident.REFUSED] > refused + 1)  # Only the listening session reconnects.
    proxy.is_unreachable = False


async def test_each_outage_is_logged_once(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "RECONNECT_PAUSE_S", 0.01)
    monkeypatch.setattr(notify, "POLL_MS", LONG_MS)  # Only the outage closes the listening session.

    with caplog.at_level(logging.WARNING, "oncelog.postgres"):
        async with open_proxied_log(database, postgres_patience_ms=100) as (proxy, log):
            assert position_of(await log.submit(event(1))) == 1
            notifier = log._store._notifier  # type: ignore[attr-defined]
            await until(lambda: notifier._connection is not None)
            caplog.clear()
            for number in (2, 3):
                await outage(proxy, log, number)
                await until(lambda: notifier._connection is not None)
                assert position_of(await retry_until_available(partial(log.submit, event(number)))) == number
                await asyncio.gather(*[retry_until_available(log.read) for _ in range(TRIES)])
    messages = [record.message for record in caplog.records if record.name == "oncelog.postgres"]
    assert [kind for one in messages for kind in (GONE, BACK, ALONE) if one.startswith(kind)] in (
        [GONE, ALONE, BACK] * 2,
        [GONE, BACK, ALONE] * 2,
    )
    assert len(messages) == 3 * 2
