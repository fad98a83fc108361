"""Writes that a real server refuses, with every client library.

Only a permanently refused write gets the error. The writes before and after it commit, even after a client restart.
Temporarily refused writes wait, and commit in order.
"""

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Struct

from client.libraries import LIBRARIES
from databases import BOTH_STORES, log_at
from deadlines import until
from oncelog.core.rules import quotas
from oncelog.core.tenants import Tenant
from oncelog.engine import committer
from oncelog.testing.clock import ManualClock
from server.rejecting_store import MARK, reject_marked_bodies
from server.running_server import serving

LARGE: Final = "x" * 500
"""A long text that still fits into a row id, which has at most 512 characters."""


class Refusal(Struct, frozen=True):
    """A permanent error from the server."""

    text: str
    """The write that is refused."""
    message: str
    """Lower-case text that the errors of all clients contain."""
    settings: dict[str, Any] = {}


REFUSALS: Final = {
    "unstorable": Refusal(MARK, "does not help"),
    "too large": Refusal(LARGE, "large", {"frame_bytes_max": len(LARGE)}),
}
LIMITS_OF_A_TENANT: Final[dict[str, Any]] = {
    "quota_exceeded": {},
    "rate_limited": {"new_writes_per_second_max": 1000, "new_writes_at_once_max": 1},
    "read_only": {},
}
"""Limits that admit only the first write, by error code. The test sets the quota from the tenant's usage."""
HOUR_MS: Final = 3_600_000


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-34")
@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("name", LIBRARIES)
async def test_permanently_refused_write_does_not_affect_other_writes(tmp_path: Path, name: str, kind: str) -> None:
    library, refusal, path = LIBRARIES[name], REFUSALS[kind], tmp_path / "client.db"
    await reject_marked_bodies(log_at(tmp_path / "events.db"))
    async with serving(tmp_path, **refusal.settings) as served:
        await library.prepare(served)
        async with library.client_of(None, path) as client:
            await library.store(client, ["a", "b", refusal.text, "c", "d"])
        async with library.client_of(served, path) as client:
            refused = await library.settle(client)
            assert list(refused) == [refusal.text]
            assert refusal.message in refused[refusal.text].lower()
            assert await library.write(client, "e") == ""
            assert refusal.message in (await library.write(client, refusal.text)).lower()
            together = await asyncio.gather(*(library.write(client, text) for text in ("f", "g")))
            assert together == ["", ""]
        async with library.client_of(served, path) as client:
            await library.settle(client)
            assert await library.write(client, "h") == ""
            assert sorted(await library.read(served, client)) == sorted("abcdefgh")


@pytest.mark.rule("EV-8", "CO-15")
@pytest.mark.parametrize("code", LIMITS_OF_A_TENANT)
@pytest.mark.parametrize("name", LIBRARIES)
async def test_temporarily_refused_writes_commit_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    monkeypatch.setattr(quotas, "QUOTA_RETRY_AFTER_MS", 5)
    monkeypatch.setattr(committer, "RETRY_AFTER_READ_ONLY_MS", 5)
    library, path = LIBRARIES[name], tmp_path / "client.db"
    # The server's clock is stopped. It is ahead of the clients' clocks, because deltas from the future wait.
    clock = ManualClock(time.time_ns() // 1_000_000 + HOUR_MS)
    async with serving(tmp_path, clock=clock) as served:
        log, requests = served.server.log, served.server.counts.requests
        await library.prepare(served)
        await log.set_tenants([Tenant(library.tenant)])
        ((_, usage),) = await log.usage()  # a chat's members count towards the quota
        limits = {"records_max": usage.records + 1} if code == "quota_exceeded" else LIMITS_OF_A_TENANT[code]
        await log.set_tenants([Tenant(library.tenant, **limits)])
        async with library.client_of(served, path) as client:
            assert await library.write(client, "a") == ""
        log.set_read_only(code == "read_only")
        async with library.client_of(None, path) as client:
            await library.store(client, ["b", "c", "d"])
        async with library.client_of(served, path):
            await until(lambda: requests[*library.requests, code] >= 2)
        async with library.client_of(served, path) as client:  # after a restart
            await until(lambda: requests[*library.requests, code] >= 4)
            log.set_read_only(False)
            await log.set_tenants([])
            assert await library.settle(client) == {}
            assert await library.write(client, "e") == ""
            assert await library.read(served, client) == ["a", "b", "c", "d", "e"]
