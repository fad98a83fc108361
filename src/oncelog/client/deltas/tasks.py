"""The two tasks of a deltas client.

The pusher empties the outbox. The puller reads pages from the gateway until it has caught up, then live messages.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from oncelog.client.deltas.codec import DeltaPage, GatewayRefusedError, OutboxEntry, PushReply, RowPage, SnapshotPage
from oncelog.client.deltas.protocol import (
    PullEffect,
    PullProtocol,
    PullRequest,
    PushProtocol,
    ReadDeltas,
    ReadSnapshot,
    ResetRows,
    RestartSnapshot,
    StageRows,
)
from oncelog.client.deltas.store import DeltasRuntime
from oncelog.client.deltas.transport import DeltasTransport, LiveStream
from oncelog.client.deltas.values import Change, HistoryChange
from oncelog.client.runtime.backoff import RetryPause, RetryTask
from oncelog.core.merge import RowDelta
from oncelog.errors import ClientError, LostError, ProtocolError


class SyncTask(RetryTask[DeltasRuntime]):
    """Base class of the pusher and the puller."""

    protocol: PushProtocol | PullProtocol

    def __init__(self, runtime: DeltasRuntime, transport: DeltasTransport) -> None:
        super().__init__(runtime)
        self._transport = transport

    def _record_error(self, error: str) -> None:
        self.protocol.last_error = error


class Pusher(SyncTask):
    """Pushes one batch at a time."""

    protocol: PushProtocol

    def __init__(
        self, runtime: DeltasRuntime, transport: DeltasTransport, on_acknowledged: Callable[[str], None]
    ) -> None:
        super().__init__(runtime, transport)
        self._on_acknowledged = on_acknowledged
        self._work_event = asyncio.Event()
        self.protocol = PushProtocol(runtime.limits.push_deltas_max)

    def notify(self) -> None:
        """Wake the task: the outbox may have a new delta."""
        self._work_event.set()

    def skip_pause(self) -> None:
        """End the pause and allow a held delta to be pushed."""
        self.protocol.release()
        super().skip_pause()
        self._work_event.set()

    def on_discarded(self) -> None:
        """Reset the refusal and push immediately, because deltas were withdrawn."""
        self.protocol.on_discarded()
        self.skip_pause()

    async def _step(self) -> RetryPause | None:
        """Push one batch. If there is nothing to push, wait for a new delta, or return the pause of a held one."""
        runtime, protocol = self._runtime, self.protocol
        self._work_event.clear()
        held = protocol.held
        # Read these before the batch, because the application may withdraw deltas while the store lists them.
        discards, refusal = protocol.discards, protocol.refusal
        batch = await runtime.call_store(
            runtime.store.list_pending,
            None if held is None else held.number,
            protocol.deltas_max,
            runtime.limits.push_bytes_max,
        )
        if not batch:
            if protocol.held is not None:
                return protocol.held.pause
            await self._work_event.wait()
            return None
        if protocol.discards != discards:
            return None
        self._backoff.skip_event.clear()
        answer: PushReply | ClientError
        try:
            answer = await self._push(batch)
        except (LostError, ProtocolError, GatewayRefusedError) as error:
            if protocol.discards != discards:
                return None
            answer = error
        had_error = protocol.last_error is not None
        pause = protocol.handle_answer(batch, answer)
        if isinstance(answer, ClientError) and not had_error:
            runtime.logger.info("not pushed: %s", protocol.last_error)
        if protocol.refusal is not None and protocol.refusal != refusal:
            runtime.logger.warning("the gateway refuses a delta: %s", protocol.refusal)
        return pause

    async def _push(self, batch: Sequence[OutboxEntry]) -> PushReply:
        runtime = self._runtime
        reply = await self._transport.push(batch)
        is_ours = await runtime.call_store(runtime.store.acknowledge, batch[-1].number, reply)
        self._on_acknowledged(reply.epoch)
        if not is_ours:
            raise LostError(f"the push was acknowledged in a different history, with epoch {reply.epoch}")
        self._backoff.reset()
        return reply

    async def _wait(self, pause: RetryPause) -> None:
        await super()._wait(pause)
        self.protocol.release()


class Puller(SyncTask):
    """Makes one request or receives one live message at a time."""

    protocol: PullProtocol

    def __init__(self, runtime: DeltasRuntime, transport: DeltasTransport) -> None:
        super().__init__(runtime, transport)
        self._live_stream: LiveStream | None = None
        self._live_since_s = 0.0
        self._receive_task: asyncio.Task[DeltaPage[RowDelta]] | None = None
        self._rounds_requested = 0
        self._rounds_done = 0
        self._snapshot_restarts = 0
        """How many consecutive times the snapshot was restarted."""
        self._lost_history: tuple[str, int] | None = None
        """Epoch and cursor of a history that the gateway no longer has."""
        sync_state = runtime.store.sync_state
        self.protocol = PullProtocol(sync_state.cursor, sync_state.epoch)
        self.history_change: HistoryChange | None = None

    @property
    def is_live(self) -> bool:
        """Whether deltas arrive as the gateway commits them."""
        return self._live_stream is not None and self.protocol.is_caught_up

    def check_epoch(self, epoch: str) -> None:
        """Process the epoch of an acknowledged push. If the epoch has changed, read the gateway immediately."""
        self.protocol.on_acknowledged(epoch)
        if self.protocol.epoch != epoch:
            self._rounds_requested += 1
            self.skip_pause()

    async def run_round(self) -> None:
        """Wait until all of the gateway's current deltas have arrived."""
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
        """Make one request or receive one live message."""
        protocol = self.protocol
        rounds_requested = self._rounds_requested
        if rounds_requested > self._rounds_done:
            protocol.pull_again()
        request = protocol.next_request(is_reset_wanted=self._runtime.store.sync_state.is_reset_wanted)
        answer: DeltaPage[RowDelta] | RowPage | ClientError | None
        try:
            answer = await self._send_request(request)
        except (LostError, ProtocolError, GatewayRefusedError) as error:
            answer = error
        if answer is None:
            return None
        had_error = protocol.last_error is not None
        effect = protocol.handle_answer(request, answer)
        if isinstance(effect, RetryPause):
            if not had_error:
                self._runtime.logger.info("not connected: %s", protocol.last_error)
            return effect
        await self._execute(effect)
        if isinstance(effect, RestartSnapshot):
            self._snapshot_restarts += 1
            return RetryPause() if self._snapshot_restarts > 1 else None
        if not isinstance(effect, DeltaPage) or effect.deltas:
            self._backoff.reset()
        if isinstance(effect, DeltaPage):
            self._snapshot_restarts = 0
            if isinstance(request, ReadDeltas) and not request.is_live and not effect.has_more:
                self._rounds_done = rounds_requested
        return None

    async def _send_request(self, request: PullRequest) -> DeltaPage[RowDelta] | RowPage | None:
        """Send a request and return the answer, or None if `skip_pause` interrupted the wait for a live message."""
        limits = self._runtime.limits
        if isinstance(request, ReadSnapshot):
            await self._disconnect()
            return await self._transport.snapshot(request.page, limits.page_rows)
        if not request.is_live:
            return await self._transport.pull(request.since, request.epoch, limits.page_deltas)
        if self._live_stream is not None:
            return await self._receive_page(self._live_stream)
        self._live_stream = await self._transport.follow(request.since, request.epoch)
        self._live_since_s = time.monotonic()
        return DeltaPage((), request.since, has_more=False, epoch=self._live_stream.epoch)

    async def _receive_page(self, live: LiveStream) -> DeltaPage[RowDelta] | None:
        if self._receive_task is None:
            self._receive_task = asyncio.create_task(live.receive(), name="oncelog deltas: live")
        skipped = asyncio.create_task(self._backoff.skip_event.wait())
        try:
            await asyncio.wait((self._receive_task, skipped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            skipped.cancel()
        self._backoff.skip_event.clear()
        if not self._receive_task.done():
            return None
        receive_task, self._receive_task = self._receive_task, None
        return receive_task.result()

    async def _execute(self, effect: PullEffect) -> None:
        runtime, store, protocol = self._runtime, self._runtime.store, self.protocol
        notify = runtime.publish
        match effect:
            case DeltaPage(deltas, cursor, epoch=epoch):
                if deltas or (cursor, epoch) != (protocol.cursor, protocol.epoch):
                    await runtime.call_store(store.apply, deltas, cursor, epoch, notify=notify)
            case SnapshotPage():
                last_cursor = None if effect.next else effect.cursor
                await runtime.call_store(store.join, effect.rows, last_cursor, effect.epoch, notify=notify)
            case StageRows(page, is_first):
                await runtime.call_store(store.stage, page.rows, is_first, page.horizon)
                if not page.next:
                    await self._replace(page)
            case ResetRows():
                if effect.is_compacted:
                    runtime.logger.info("reading all rows again: %s", effect.message)
                else:
                    runtime.logger.warning("the gateway's history has changed: %s", effect.message)
                    self._lost_history = (protocol.epoch, protocol.cursor)
                await runtime.call_store(store.request_reset)
        protocol.confirm(effect)

    async def _replace(self, page: RowPage) -> None:
        runtime, protocol = self._runtime, self.protocol
        changes_max = runtime.limits.changes_max if runtime.streams else 0
        await runtime.call_store(
            runtime.store.replace,
            page.cursor,
            page.epoch,
            changes_max,
            page.horizon,
            notify=self._publish_replacement,
        )
        lost_history = self._lost_history
        if lost_history is None and protocol.epoch not in ("", page.epoch):
            lost_history = (protocol.epoch, protocol.cursor)
        if lost_history is not None:
            self.history_change = HistoryChange(lost_history[0], page.epoch, lost_history[1], page.cursor)
            runtime.logger.warning("the gateway's rows have replaced all local rows: %s", self.history_change)
        self._lost_history = None

    def _publish_replacement(self, changes: list[Change] | None) -> None:
        """Pass the changes of a reset to all streams. If there were too many (None), end the streams with an error."""
        for stream in list(self._runtime.streams) if changes is None else ():
            stream.overflow("changes_max", self._runtime.limits.changes_max)
        self._runtime.publish(changes or ())

    async def _disconnect(self) -> None:
        live, self._live_stream = self._live_stream, None
        if live is not None and time.monotonic() - self._live_since_s > self._runtime.limits.pause_ms_max / 1000:
            self._backoff.reset()  # the connection lasted long enough, so the next pause is short again
        receive_task, self._receive_task = self._receive_task, None
        if receive_task is not None:
            receive_task.cancel()
            await asyncio.gather(receive_task, return_exceptions=True)
        if live is not None:
            await live.close()

    async def _wait(self, pause: RetryPause) -> None:
        await self._disconnect()
        await super()._wait(pause)
