"""Task that delivers events to `apply`, handlers and loops, and saves the cursor after them."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from oncelog.client.events.handlers import EventHandlers
from oncelog.client.events.outbox import EventsRuntime
from oncelog.client.events.protocol import EventsPhase
from oncelog.client.events.store import APPLY, Apply, Reset
from oncelog.client.events.values import Event, SetAside
from oncelog.client.runtime.backoff import wait_for_store
from oncelog.errors import StoreError

DELIVERY_S: Final = 0.1
"""Time after which the deliverer saves the cursor while it delivers events."""


class Deliverer:
    """Delivers events one after the other, each to all handlers and loops."""

    def __init__(self, runtime: EventsRuntime, apply: Apply | None, on_taken: Callable[[], None]) -> None:
        """Call `on_taken` when the protocol may have room for further events."""
        self._runtime = runtime
        self._apply = apply
        self._on_taken = on_taken
        self._wakeup = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.handlers = EventHandlers(runtime.streams)
        self.cursor = 0
        """All events up to this committed id are delivered."""
        self._epoch = ""
        self.set_aside_count = 0

    @property
    def has_handlers(self) -> bool:
        """Whether the application takes events, or the client follows no partitions."""
        return self._apply is not None or bool(self.handlers) or not self._runtime.protocol.partitions

    @property
    def has_undelivered(self) -> bool:
        """Whether events wait for delivery, or the cursor has moved without events."""
        protocol = self._runtime.protocol
        is_other_history = protocol.phase is EventsPhase.HISTORY_CHANGED
        return bool(protocol.ready_count) or (
            not is_other_history and (protocol.cursor != self.cursor or protocol.epoch != self._epoch)
        )

    def start(self, cursor: int, epoch: str, set_aside_count: int) -> None:
        """Begin to deliver events after a cursor."""
        self.cursor, self._epoch, self.set_aside_count = cursor, epoch, set_aside_count
        self._task = self._runtime.start_task("deliver", self._run)
        self.wake()

    def wake(self) -> None:
        """Let the task check for events and handlers."""
        self._wakeup.set()

    def check_not_in_handler(self, method: str) -> None:
        """Raise RuntimeError in a handler of events, which must not wait for the next event."""
        if asyncio.current_task() is self._task:
            raise RuntimeError(f"{method} must not be called by a handler of events: it would wait for itself")

    async def start_over(self, since: int, reset: Reset | None) -> None:
        """Continue from another cursor in the current history of the server."""
        runtime = self._runtime
        # A handler may wait for an outcome that only arrives after the restart.
        if self._task is not None:
            await runtime.cancel_tasks([self._task])
        async with self._lock:
            protocol = runtime.protocol
            change = protocol.history_change
            epoch = protocol.epoch if change is None else change.epoch
            await runtime.call_store(runtime.store.start_over, protocol.partitions, since, epoch, reset)
            protocol.start_over(since, epoch)
        self.start(since, epoch, 0)

    async def redeliver(self) -> list[SetAside]:
        """Deliver events that were set aside again. Return the ones that fail again, with their errors."""
        left: list[SetAside] = []
        async with self._lock:
            for one in await self._runtime.call_store(self._runtime.store.load_set_aside):
                error = await self._redeliver(one)
                if error is not None:
                    left.append(SetAside(one.handler, one.event, error))
        self.set_aside_count = len(left)
        self._runtime.wake_waiters()
        return left

    async def _redeliver(self, failed_delivery: SetAside) -> str | None:
        runtime = self._runtime
        apply = self._apply if failed_delivery.handler == APPLY else None
        if apply is None:
            error = await self.handlers.redeliver(failed_delivery)
            if error is not None:
                return error
        return await runtime.call_store(runtime.store.redeliver, failed_delivery, apply)

    # --- the task

    async def _run(self) -> None:
        runtime = self._runtime
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            # Without handlers and loops events wait: to skip them would lose them.
            while self.has_handlers and self.has_undelivered:
                async with self._lock:
                    if self.has_undelivered:
                        await self._deliver_batch()
                self._on_taken()
                runtime.wake_waiters()

    async def _deliver_batch(self) -> None:
        runtime, protocol = self._runtime, self._runtime.protocol
        epoch = protocol.epoch
        events, cursor = protocol.take_events(runtime.limits.hand_over_events_max)
        failed: list[SetAside] = []
        taken = 0
        began = time.monotonic()
        try:
            for event in events if self.handlers else ():
                if not self.has_handlers:  # the only loop was left
                    break
                if taken and time.monotonic() - began > DELIVERY_S:
                    break  # save the cursor first
                not_taken, is_taken = await self.handlers.deliver(event)
                if not is_taken and self._apply is None:  # the only loop was left before it got the event
                    break
                failed += not_taken
                taken += 1
            else:
                taken = len(events)
        finally:
            # Save also while the client is being closed, so that delivered events are not delivered again.
            if taken < len(events):
                protocol.return_events(events[taken:])
                cursor = events[taken - 1].committed_id if taken else self.cursor
            await asyncio.shield(self._save(events[:taken], cursor, epoch, failed))

    async def _save(self, events: list[Event], cursor: int, epoch: str, failed: list[SetAside]) -> None:
        runtime = self._runtime
        while True:
            try:
                count = await runtime.save(runtime.store.save_delivery, events, cursor, epoch, self._apply, failed)
                break
            except StoreError:
                if runtime.is_ended:
                    return
                await wait_for_store()
        self.cursor, self._epoch = cursor, epoch
        if count >= 0:
            self.set_aside_count = count
        runtime.wake_waiters()
