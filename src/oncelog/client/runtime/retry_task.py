"""A task that repeats a step, and waits where the step asks for a pause or fails."""

import random
from abc import ABC, abstractmethod

from oncelog.client.runtime.backoff import STORE_PAUSE, Backoff, RetryPause
from oncelog.client.runtime.client import ClientRuntime
from oncelog.client.runtime.limits import BaseLimits
from oncelog.errors import ProtocolError, StoreError


class RetryTask(ABC):
    """`run` is the task."""

    def __init__(self, runtime: ClientRuntime, limits: BaseLimits, random_source: random.Random) -> None:
        self._client_runtime = runtime
        self._backoff = Backoff(limits, random_source)

    @abstractmethod
    async def _step(self) -> RetryPause | None:
        """Do the next thing. Return the pause before the following step, None for none."""

    @abstractmethod
    def _record_error(self, error: str) -> None:
        """Keep the reason why there is a pause, for the status of the client."""

    def skip_pause(self) -> None:
        """Try again at once: the application knows that the network is back, or there is something new to do."""
        self._backoff.skip()

    async def run(self) -> None:
        """Repeat the step until cancelled."""
        while True:
            try:
                pause = await self._step()
            except StoreError as error:
                self._client_runtime.logger.warning("%s", error)
                self._record_error(str(error))
                pause = STORE_PAUSE
            except ProtocolError as error:
                self._client_runtime.logger.warning("%s", error)
                self._record_error(str(error))
                pause = RetryPause()
            if pause is not None:
                await self._wait(pause)
            self._client_runtime.wake_waiters()

    async def _wait(self, pause: RetryPause) -> None:
        self._client_runtime.wake_waiters()
        await self._backoff.wait(pause)
