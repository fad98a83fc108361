"""Fixtures of the tests about functions, tools and requests that run once."""

import pytest

from engine.watched import until
from oncelog.engine.results import Result
from oncelog.engine.work import Holding


@pytest.fixture(params=["starlette", "fastapi"])
def kind(request: pytest.FixtureRequest) -> str:
    """The web framework of the application."""
    return str(request.param)


class Waiters:
    """Counts the callers that wait in this process for the outcome of another caller's work."""

    def __init__(self) -> None:
        self.count = 0

    async def until(self, count: int) -> None:
        await until(lambda: self.count == count)


@pytest.fixture
def waiters(monkeypatch: pytest.MonkeyPatch) -> Waiters:
    found = Waiters()
    outcome = Holding.outcome

    async def counted(self: Holding) -> Result | None:
        found.count += 1
        try:
            return await outcome(self)
        finally:
            found.count -= 1

    monkeypatch.setattr(Holding, "outcome", counted)
    return found
