"""The task that empties the outbox."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from oncelog.client.deltas.codec import NoReply, PushReply
from oncelog.client.deltas.push_protocol import PushProtocol
from oncelog.client.deltas.runtime import DeltasRuntime
from oncelog.client.deltas.transport import DeltasTransport
from oncelog.client.runtime.backoff import STORE_PAUSE, Backoff, RetryPause
from oncelog.errors import StoreError

logger: Final = logging.getLogger("oncelog.client.deltas")


class Pusher:
    """`run` goes on until it is cancelled."""

    def __init__(
        self,
        runtime: DeltasRuntime,
        transport: DeltasTransport,
        rng: random.Random,
        on_acknowledged: Callable[[str], None],
    ) -> None:
        self._runtime = runtime
        self._transport = transport
        self._on_acknowledged = on_acknowledged
        self._backoff = Backoff(runtime.limits, rng)
        self._work_event = asyncio.Event()
        self._wake_event = asyncio.Event()
        self.protocol = PushProtocol(runtime.limits.push_deltas_max)

    def notify(self) -> None:
        """There is something in the outbox."""
        self._work_event.set()

    def retry_now(self) -> None:
        """What waits is tried at once."""
        self.protocol.release()
        self._wake_event.set()
        self._work_event.set()

    def on_discarded(self) -> None:
        """Deltas were taken out of the outbox."""
        self.protocol.on_discarded()
        self.retry_now()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                pause = await self._push()
            except StoreError as error:
                logger.warning("%s", error)
                self.protocol.last_error = str(error)
                pause = STORE_PAUSE
            self._runtime.wake_waiters()
            if pause is not None:
                await self._wait(pause)

    async def _push(self) -> RetryPause | None:
        """One push, or none if there is nothing to do: then it waits until there is."""
        desk, pushing = self._runtime, self.protocol
        self._work_event.clear()
        bounds = pushing.bounds
        batch = await desk.call_store(
            desk.store.list_pending, bounds.before, bounds.deltas_max, desk.limits.push_bytes_max
        )
        if not batch:
            held = pushing.get_held_pause()
            if held is None:
                await self._work_event.wait()
            return held
        self._wake_event.clear()
        discards, before = pushing.discards, pushing.refusal
        answer = await self._transport.push(batch)
        if isinstance(answer, PushReply):
            is_ours = await desk.call_store(desk.store.acknowledge, batch[-1].number, answer)
            self._on_acknowledged(answer.epoch)
            if not is_ours:
                answer = NoReply(f"the push was acknowledged in another history, of epoch {answer.epoch}")
        if isinstance(answer, PushReply):
            self._backoff.reset()
        elif pushing.discards != discards:
            return None
        elif pushing.last_error is None:
            logger.info("not pushed: %s", answer)
        pause = pushing.handle_answer(batch, answer)
        if pushing.refusal is not None and pushing.refusal != before:
            logger.warning("the gateway refuses a delta: %s", pushing.refusal)
        return pause

    async def _wait(self, pause: RetryPause) -> None:
        try:
            async with asyncio.timeout(self._backoff.next_pause_s(pause)):
                await self._wake_event.wait()
        except TimeoutError:
            pass
        self._wake_event.clear()
        self.protocol.release()
