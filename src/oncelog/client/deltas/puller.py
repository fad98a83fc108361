"""The task that reads the gateway: pages until it has caught up, then what is live."""

import asyncio
import logging
import random
import time
from typing import Final

from oncelog.client.deltas.codec import (
    DeltaPage,
    LiveCompacted,
    LiveDeltas,
    NoReply,
    ServerError,
    SnapshotPage,
)
from oncelog.client.deltas.pull_protocol import (
    ApplyDeltas,
    FollowDeltas,
    JoinRows,
    PullDeltas,
    PullEffect,
    PullProtocol,
    PullRequest,
    ReadSnapshot,
    ResetRows,
    RestartSnapshot,
    StageRows,
)
from oncelog.client.deltas.runtime import DeltasRuntime
from oncelog.client.deltas.transport import DeltasTransport, LiveStream
from oncelog.client.deltas.values import HistoryChange
from oncelog.client.runtime.backoff import RetryPause
from oncelog.client.runtime.retry_task import RetryTask

logger: Final = logging.getLogger("oncelog.client.deltas")

_LiveMessage = LiveDeltas | LiveCompacted | ServerError | NoReply


class Puller(RetryTask):
    """Makes one request, or takes one live message, after the other."""

    def __init__(self, runtime: DeltasRuntime, transport: DeltasTransport, random_source: random.Random) -> None:
        super().__init__(runtime, runtime.limits, random_source)
        self._runtime = runtime
        self._transport = transport
        self._live_stream: LiveStream | None = None
        self._live_since_s = 0.0
        self._receive_task: asyncio.Task[_LiveMessage] | None = None
        self._rounds_requested = 0
        self._rounds_done = 0
        self._snapshot_restarts = 0
        """How often in a row a snapshot had to be begun."""
        self._lost_history: tuple[str, int] | None = None
        """Epoch and cursor of a history that is no more the gateway's."""
        sync_state = runtime.store.sync_state
        self.protocol = PullProtocol(sync_state.cursor, sync_state.epoch)
        self.history_change: HistoryChange | None = None

    @property
    def is_live(self) -> bool:
        """Whether what is committed arrives at once."""
        return self._live_stream is not None and self.protocol.is_caught_up

    def check_epoch(self, epoch: str) -> None:
        """A push was acknowledged in this history: if it is another one, nobody need wait to be told so."""
        self.protocol.on_acknowledged(epoch)
        if self.protocol.epoch != epoch:
            self._rounds_requested += 1
            self.skip_pause()

    async def run_round(self) -> None:
        """Returns when all that the gateway has at this moment has arrived."""
        self._rounds_requested += 1
        round_number = self._rounds_requested
        self.skip_pause()
        await self._runtime.wait_until(lambda: self._rounds_done >= round_number)

    async def run(self) -> None:
        """Repeat the step until cancelled."""
        try:
            await super().run()
        finally:
            await self._disconnect()

    async def _step(self) -> RetryPause | None:
        """One request, or one message of what is live."""
        protocol = self.protocol
        rounds_requested = self._rounds_requested
        if rounds_requested > self._rounds_done:
            protocol.pull_again()
        request = protocol.next_request(is_reset_wanted=self._runtime.store.sync_state.is_reset_wanted)
        answer = await self._send_request(request)
        if answer is None:
            return None
        had_error = protocol.last_error is not None
        effect = protocol.handle_answer(request, answer)
        if isinstance(effect, RetryPause):
            if not had_error:
                logger.info("not connected: %s", answer)
            return effect
        await self._execute(effect)
        if isinstance(effect, RestartSnapshot):
            self._snapshot_restarts += 1
            return RetryPause() if self._snapshot_restarts > 1 else None
        if not isinstance(effect, ApplyDeltas) or effect.deltas:
            self._backoff.reset()
        if isinstance(effect, ApplyDeltas):
            self._snapshot_restarts = 0
            if isinstance(request, PullDeltas) and effect.is_caught_up:
                self._rounds_done = rounds_requested
        return None

    async def _send_request(self, request: PullRequest) -> DeltaPage | SnapshotPage | _LiveMessage | None:
        """None if there is something else to do, or nothing has come of it."""
        limits = self._runtime.limits
        match request:
            case PullDeltas(since, epoch):
                return await self._transport.pull(since, epoch, limits.page_deltas)
            case ReadSnapshot(page):
                await self._disconnect()
                return await self._transport.snapshot(page, limits.page_rows)
            case FollowDeltas():
                if self._live_stream is None:
                    return await self._connect(request)
                return await self._receive_message()

    async def _connect(self, request: FollowDeltas) -> ServerError | NoReply | None:
        live = await self._transport.follow(request.since, request.epoch)
        if isinstance(live, ServerError | NoReply):
            return live
        self._live_stream = live
        self._live_since_s = time.monotonic()
        self._receive_task = asyncio.create_task(live.receive(), name="oncelog deltas: live")
        other = self.protocol.on_connected(live.epoch)
        if other is not None:
            await self._execute(other)
        return None

    async def _receive_message(self) -> _LiveMessage | None:
        """The next one; None if there is something else to do."""
        receive_task, live = self._receive_task, self._live_stream
        if receive_task is None or live is None:
            return None
        skipped = asyncio.create_task(self._backoff.wait_for_skip())
        try:
            await asyncio.wait((receive_task, skipped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            skipped.cancel()
        self._backoff.clear_skip()
        if not receive_task.done():
            return None
        message = receive_task.result()
        if isinstance(message, LiveDeltas):
            self._receive_task = asyncio.create_task(live.receive(), name="oncelog deltas: live")
        return message

    async def _execute(self, effect: PullEffect) -> None:
        runtime, store, protocol = self._runtime, self._runtime.store, self.protocol
        match effect:
            case ApplyDeltas():
                if effect.deltas or (effect.cursor, effect.epoch) != (protocol.cursor, protocol.epoch):
                    await runtime.call_store_and_notify(
                        store.apply, effect.deltas, effect.cursor, effect.epoch, notify=runtime.publish_changes
                    )
            case JoinRows():
                cursor = None if effect.next else effect.cursor
                await runtime.call_store_and_notify(
                    store.join, effect.rows, cursor, effect.epoch, notify=runtime.publish_changes
                )
            case StageRows():
                await runtime.call_store(store.stage, effect.rows, effect.is_first, effect.horizon)
                if not effect.next:
                    await self._replace(effect)
            case ResetRows():
                if effect.is_compacted:
                    logger.info("all rows are read again: %s", effect.message)
                else:
                    logger.warning("the gateway's history is another one than before: %s", effect.message)
                    self._lost_history = (protocol.epoch, protocol.cursor)
                await runtime.call_store(store.request_reset)
            case RestartSnapshot():
                pass
        protocol.confirm(effect)

    async def _replace(self, effect: StageRows) -> None:
        runtime, protocol = self._runtime, self.protocol
        changes_max = runtime.limits.changes_max if runtime.streams else 0
        await runtime.call_store_and_notify(
            runtime.store.replace,
            effect.cursor,
            effect.epoch,
            changes_max,
            effect.horizon,
            notify=runtime.publish_replacement,
        )
        lost_history = self._lost_history
        if lost_history is None and protocol.epoch not in ("", effect.epoch):
            lost_history = (protocol.epoch, protocol.cursor)
        if lost_history is not None:
            self.history_change = HistoryChange(lost_history[0], effect.epoch, lost_history[1], effect.cursor)
            logger.warning("all rows are the gateway's again: %s", self.history_change)
        self._lost_history = None

    async def _disconnect(self) -> None:
        live, self._live_stream = self._live_stream, None
        if live is not None and time.monotonic() - self._live_since_s > self._runtime.limits.pause_ms_max / 1000:
            self._backoff.reset()  # it was more than a greeting: the next pause is a short one again
        receive_task, self._receive_task = self._receive_task, None
        if receive_task is not None:
            receive_task.cancel()
            await asyncio.gather(receive_task, return_exceptions=True)
        if live is not None:
            await live.close()

    async def _wait(self, pause: RetryPause) -> None:
        await self._disconnect()
        await super()._wait(pause)

    def _record_error(self, error: str) -> None:
        self.protocol.last_error = error
