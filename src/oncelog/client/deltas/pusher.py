"""The task that empties the outbox."""

import asyncio
from collections.abc import Callable, Sequence

from oncelog.client.deltas.codec import GatewayRefusedError, OutboxEntry, PushReply, describe_failure
from oncelog.client.deltas.push_protocol import PushProtocol
from oncelog.client.deltas.store import DeltasRuntime
from oncelog.client.deltas.transport import DeltasTransport
from oncelog.client.runtime.backoff import RetryPause, RetryTask
from oncelog.errors import ClientError, LostError, ProtocolError


class Pusher(RetryTask[DeltasRuntime]):
    """Pushes one batch at a time."""

    def __init__(
        self, runtime: DeltasRuntime, transport: DeltasTransport, on_acknowledged: Callable[[str], None]
    ) -> None:
        super().__init__(runtime)
        self._transport = transport
        self._on_acknowledged = on_acknowledged
        self._work_event = asyncio.Event()
        self.protocol = PushProtocol(runtime.limits.push_deltas_max)

    def notify(self) -> None:
        """Wake the task: the outbox may have a new delta."""
        self._work_event.set()

    def skip_pause(self) -> None:
        """End the pause, and push a held delta too."""
        self.protocol.release()
        super().skip_pause()
        self._work_event.set()

    def on_discarded(self) -> None:
        """Process the withdrawal of deltas."""
        self.protocol.on_discarded()
        self.skip_pause()

    async def _step(self) -> RetryPause | None:
        """Make one push. If there is nothing to push, wait for a new delta, or return the pause of a held one."""
        runtime, protocol = self._runtime, self.protocol
        self._work_event.clear()
        bounds = protocol.bounds
        # Read before the batch: the application may withdraw deltas while the store lists them.
        discards, refusal = protocol.discards, protocol.refusal
        batch = await runtime.call_store(
            runtime.store.list_pending, bounds.before, bounds.deltas_max, runtime.limits.push_bytes_max
        )
        if not batch:
            held = protocol.get_held_pause()
            if held is None:
                await self._work_event.wait()
            return held
        if protocol.discards != discards:
            return None
        self._backoff.clear_skip()
        answer: PushReply | ClientError
        try:
            answer = await self._push(batch)
        except (LostError, ProtocolError, GatewayRefusedError) as error:
            if protocol.discards != discards:
                return None
            if protocol.last_error is None:
                runtime.logger.info("not pushed: %s", describe_failure(error))
            answer = error
        pause = protocol.handle_answer(batch, answer)
        if protocol.refusal is not None and protocol.refusal != refusal:
            runtime.logger.warning("the gateway refuses a delta: %s", protocol.refusal)
        return pause

    async def _push(self, batch: Sequence[OutboxEntry]) -> PushReply:
        runtime = self._runtime
        reply = await self._transport.push(batch)
        is_ours = await runtime.call_store(runtime.store.acknowledge, batch[-1].number, reply)
        self._on_acknowledged(reply.epoch)
        if not is_ours:
            raise LostError(f"the push was acknowledged in another history, of epoch {reply.epoch}")
        self._backoff.reset()
        return reply

    async def _wait(self, pause: RetryPause) -> None:
        await super()._wait(pause)
        self.protocol.release()

    def _record_error(self, error: str) -> None:
        self.protocol.last_error = error
