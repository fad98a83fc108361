"""The deadline for retries of a batch after its session is lost."""

import asyncio

import pytest

from oncelog.errors import StoreUnavailableError
from oncelog.storage.postgres.writer import RetryDeadline

LIMIT_S = 1.0
TRY_S = 0.2
TRIES_MAX = 100


class VirtualClock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def fail_until_deadline(deadline: RetryDeadline, time: VirtualClock) -> None:
    """Fail repeatedly until the deadline raises."""
    for _ in range(TRIES_MAX):
        await deadline.wait(TimeoutError())
        time.now_s += TRY_S


@pytest.mark.rule("CO-16")
@pytest.mark.parametrize("before_s", [0.0, 3_600.0], ids=["immediately", "later"])
async def test_retry_deadline_starts_at_the_first_lost_session(
    monkeypatch: pytest.MonkeyPatch, before_s: float
) -> None:
    """The batch may have started long ago. If each loss restarted the deadline, the batch would be retried forever."""
    time = VirtualClock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.now_s)
    monkeypatch.setattr(asyncio, "sleep", time.sleep)
    deadline = RetryDeadline("the log", round(LIMIT_S * 1000), "; try again")
    time.now_s += before_s
    with pytest.raises(StoreUnavailableError, match="the log: TimeoutError; try again"):
        await fail_until_deadline(deadline, time)
    monkeypatch.undo()
    assert LIMIT_S / 2 <= time.now_s - before_s <= LIMIT_S + TRY_S
