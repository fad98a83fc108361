"""Exponential backoff with jitter, and tasks that repeat a step or run together.

A pause is never shorter than the one that the server requests, up to `limits.retry_after_ms_max`.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from typing import Final, Generic

from msgspec import Struct

from oncelog.client.runtime.client import Runtime
from oncelog.client.runtime.values import BaseLimits
from oncelog.errors import ProtocolError, StoreError


class RetryPause(Struct, frozen=True):
    """Pause before the next attempt."""

    least_ms: int = 0
    is_long: bool = False
    """Whether only a person can fix the problem, on the client or the server."""


STORE_PAUSE: Final = RetryPause(500)
"""Pause after a write to the file has failed."""


async def wait_for_store() -> None:
    """Wait for `STORE_PAUSE`."""
    await asyncio.sleep(STORE_PAUSE.least_ms / 1000)


class Pauses:
    """Pauses between the attempts of one task. They grow until an attempt succeeds.

    Jitter keeps clients from reconnecting at the same time.
    """

    def __init__(self, limits: BaseLimits, random_source: random.Random) -> None:
        self._limits = limits
        self._random = random_source
        self.reset()

    def reset(self) -> None:
        """Return to the shortest pauses after a success."""
        self._short_ms, self._long_ms = self._limits.pause_ms_min, self._limits.refused_pause_ms_min

    def next_pause_s(self, pause: RetryPause) -> float:
        """Return the time to wait before the next attempt."""
        limits = self._limits
        if pause.is_long:
            pause_ms, self._long_ms = self._long_ms, min(2 * self._long_ms, limits.refused_pause_ms_max)
        else:
            pause_ms, self._short_ms = self._short_ms, min(2 * self._short_ms, limits.pause_ms_max)
        least_ms = min(pause.least_ms, limits.retry_after_ms_max)
        return max(pause_ms * self._random.uniform(0.5, 1), least_ms * self._random.uniform(1, 1.2)) / 1000


class Backoff(Pauses):
    """Sleeps through the pauses of one task. `skip_event` cuts a pause short."""

    def __init__(self, limits: BaseLimits, random_source: random.Random) -> None:
        super().__init__(limits, random_source)
        self.skip_event = asyncio.Event()
        """Set to end the current pause or, between pauses, the next one."""

    async def wait(self, pause: RetryPause) -> None:
        """Wait before the next attempt, or until `skip_event` is set."""
        await self.sleep(self.next_pause_s(pause))

    async def sleep(self, seconds: float | None) -> bool:
        """Wait for `seconds` (None for no limit) or until `skip_event` is set. Return whether it was set."""
        try:
            async with asyncio.timeout(seconds):
                await self.skip_event.wait()
        except TimeoutError:
            return False
        finally:
            self.skip_event.clear()
        return True


async def run_until_first_ends(work: Iterable[Awaitable[object]]) -> None:
    """Run awaitables until one finishes. Cancel the others, and raise the error of the finished one, if any."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()  # raises


class RetryTask(ABC, Generic[Runtime]):
    """Base class of tasks that repeat a step. `run` is the body of the task."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.last_error: str | None = None
        """Why the last attempt failed, or None if it succeeded."""
        self._backoff = Backoff(runtime.limits, runtime.random_source)

    @abstractmethod
    async def _step(self) -> RetryPause | None:
        """Make one attempt. Return the pause before the next step, or None."""

    def _record_error(self, error: str) -> None:
        """Store the reason for the pause. The client reports it in its status."""
        self.last_error = error

    def skip_pause(self) -> None:
        """Make the next attempt immediately."""
        self._backoff.skip_event.set()

    async def run(self) -> None:
        """Repeat the step until cancelled."""
        while True:
            try:
                pause = await self._step()
            except (StoreError, ProtocolError) as error:
                self._runtime.logger.warning("%s", error)
                self._record_error(str(error))
                pause = STORE_PAUSE if isinstance(error, StoreError) else RetryPause()
            if pause is not None:
                await self._wait(pause)
            self._runtime.wake_waiters()

    async def _wait(self, pause: RetryPause) -> None:
        self._runtime.wake_waiters()
        await self._backoff.wait(pause)
