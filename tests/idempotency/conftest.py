"""Fixtures for tests of functions, tools and requests that run once."""

import pytest

from deadlines import WAIT_S, until
from oncelog.engine import leases
from oncelog.engine.answer_cache import WorkResult
from oncelog.engine.held_lease import HeldLease
from oncelog.storage.postgres import borrowed_transaction


@pytest.fixture(autouse=True)
def wait_for_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a failing call wait until its release is committed, even on a slow machine.

    Otherwise, the next call with the same key could still find the lease held, and get the error of the first call.
    """
    monkeypatch.setattr(leases, "RELEASE_WAIT_S", WAIT_S)


@pytest.fixture(autouse=True)
def long_lane_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep PostgreSQL from closing the session of a shared connection on a slow machine."""
    monkeypatch.setattr(borrowed_transaction, "LANE_TIMEOUT", "1h")


@pytest.fixture(params=["starlette", "fastapi"])
def kind(request: pytest.FixtureRequest) -> str:
    """The web framework of the application."""
    return str(request.param)


class Waiters:
    """Counts the callers in this process that are waiting for another caller's outcome."""

    def __init__(self) -> None:
        self.count = 0

    async def until(self, count: int) -> None:
        await until(lambda: self.count == count)


@pytest.fixture
def waiters(monkeypatch: pytest.MonkeyPatch) -> Waiters:
    found = Waiters()
    outcome = HeldLease.wait_outcome

    async def count_waiting(self: HeldLease) -> WorkResult | None:
        found.count += 1
        try:
            return await outcome(self)
        finally:
            found.count -= 1

    monkeypatch.setattr(HeldLease, "wait_outcome", count_waiting)
    return found
