"""How long a batch is retried after a session is lost."""

import asyncio

import pytest

from oncelog.errors import StoreUnavailableError
from oncelog.storage.postgres.writer import RetryDeadline

LIMIT_S = 1.0
TRY_S = 0.2
TRIES_MAX = 100


class Time:
    """Virtual time, which passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def tried(patience: RetryDeadline, time: Time) -> None:
    """Fail repeatedly."""
    for _ in range(TRIES_MAX):
        await patience.wait(TimeoutError())
        time.now_s += TRY_S


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("before_s", [0.0, 3_600.0], ids=["immediately", "later"])
async def test_patience_starts_at_the_first_lost_session(monkeypatch: pytest.MonkeyPatch, before_s: float) -> None:
    """Not at the start of the batch, which may be long ago, and not again at each loss, which would have no end."""
    time = Time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.now_s)
    monkeypatch.setattr(asyncio, "sleep", time.sleep)
    patience = RetryDeadline("the log", round(LIMIT_S * 1000), "; try again")
    time.now_s += before_s
    with pytest.raises(StoreUnavailableError, match="the log: TimeoutError; try again"):
        await tried(patience, time)
    monkeypatch.undo()
    assert LIMIT_S / 2 <= time.now_s - before_s <= LIMIT_S + TRY_S
