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
from oncelog.client.runtime.backoff import RetryPause
from oncelog.client.runtime.retry_task import RetryTask

logger: Final = logging.getLogger("oncelog.client.deltas")


class Pusher(RetryTask):
    """Pushes one batch after the other."""

    def __init__(
        self,
        runtime: DeltasRuntime,
        transport: DeltasTransport,
        random_source: random.Random,
        on_acknowledged: Callable[[str], None],
    ) -> None:
        super().__init__(runtime, runtime.limits, random_source)
        self._runtime = runtime
        self._transport = transport
        self._on_acknowledged = on_acknowledged
        self._work_event = asyncio.Event()
        self.protocol = PushProtocol(runtime.limits.push_deltas_max)

    def notify(self) -> None:
        """There is something in the outbox."""
        self._work_event.set()

    def skip_pause(self) -> None:
        """Try at once what waits."""
        self.protocol.release()
        super().skip_pause()
        self._work_event.set()

    def on_discarded(self) -> None:
        """Deltas were taken out of the outbox."""
        self.protocol.on_discarded()
        self.skip_pause()

    async def _step(self) -> RetryPause | None:
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
        self._backoff.clear_skip()
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
        await super()._wait(pause)
        self.protocol.release()

    def _record_error(self, error: str) -> None:
        self.protocol.last_error = error
