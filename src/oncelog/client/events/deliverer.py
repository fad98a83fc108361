"""The task that delivers events to `apply`, handlers and loops, and then saves the cursor.

Handlers are application functions; loops iterate over `Client.events`.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from oncelog.client.events.outbox import EventsRuntime
from oncelog.client.events.protocol import EventsPhase
from oncelog.client.events.store import APPLY, Apply, Reset
from oncelog.client.events.values import Event, SetAside
from oncelog.client.runtime import logger
from oncelog.client.runtime.backoff import wait_for_store
from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.client import describe_error, is_being_cancelled
from oncelog.errors import OncelogError, StoreError

DELIVERY_S: Final = 0.1
"""The deliverer saves the cursor at least this often while it delivers a batch to handlers."""

EventHandler = Callable[[Event], Awaitable[None] | None]


class EventHandlers:
    """Handlers and loops of one client. All of them get an event before any of them gets the next one."""

    def __init__(self, streams: list[Any]) -> None:
        """`streams` lists the open loops."""
        self._handlers: dict[str, EventHandler] = {}
        self._streams: list[EventStream] = streams

    def __bool__(self) -> bool:
        return bool(self._handlers or self._streams)

    def add(self, handler: EventHandler, name: str) -> None:
        """Add a handler. Its unique name identifies its failed events after a restart. Raises ValueError for a taken
        name."""
        if name in self._handlers:
            raise ValueError(f"another handler has the name {name!r}: give this handler another name")
        self._handlers[name] = handler

    async def deliver(self, event: Event) -> tuple[list[SetAside], bool]:
        """Deliver an event to all handlers and loops. If one of them fails, the others still receive it.

        Return the failed deliveries, and whether any handler or loop received the event: a loop may exit just before.
        """
        failed: list[SetAside] = []
        is_taken = bool(self._handlers)
        for name, handler in list(self._handlers.items()):
            error = await self.call(handler, name, event)
            if error is not None:
                failed.append(SetAside(name, event, error))
        # All loops get the event at the same time, so that no loop waits for the body of another.
        for handled in [stream.deliver(event) for stream in self._streams]:
            is_taken |= await handled
        return failed, is_taken

    async def redeliver(self, failed_delivery: SetAside) -> str | None:
        """Redeliver an event to the handler that failed. Return its error, or None if it succeeds."""
        handler = self._handlers.get(failed_delivery.handler)
        if handler is None:
            return f"the handler {failed_delivery.handler!r} does not exist; its first error: {failed_delivery.error}"
        return await self.call(handler, failed_delivery.handler, failed_delivery.event)

    @staticmethod
    async def call(handler: Callable[[Any], Awaitable[None] | None], name: str, value: Any) -> str | None:
        """Call an application function. Return a one-line description of its error, or None if it succeeds."""
        try:
            result = handler(value)
            if inspect.isawaitable(result):
                await result
        except (Exception, asyncio.CancelledError) as error:
            # Continue if the application cancelled a task that its handler awaits. Stop only if this task is cancelled.
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            logger.exception("the handler %s failed", name)
            return describe_error(error)
        return None


class EventStream(BoundedStream[Event]):
    """A loop over a client's events. An event counts as delivered when the loop requests the next one.

    If the loop exits instead, the event does not count, because the loop's body may have raised an error.
    """

    def __init__(self, streams: list[Any]) -> None:
        super().__init__(streams, count_max=("events", 1))
        self._handled: asyncio.Future[bool] | None = None
        """Result of the current delivery: whether the loop requested the next event."""
        self._is_delivered = False

    async def __anext__(self) -> Event:
        if self._is_delivered:
            self._settle(was_handled=True)
        event = await super().__anext__()
        self._is_delivered = True
        return event

    def deliver(self, event: Event) -> "asyncio.Future[bool]":
        """Pass the next event to the loop. The result is False if the loop exits before it requests another event."""
        self._handled = asyncio.get_running_loop().create_future()
        if self._is_over:
            self._handled.set_result(False)
        else:
            self.put([event])
        return self._handled

    def finish(self, error: OncelogError | None = None) -> None:
        """End the stream and drop its undelivered event, because the client is closed or the loop has exited."""
        self._end(error)
        self._settle(was_handled=False)

    def _settle(self, *, was_handled: bool) -> None:
        if self._handled is not None and not self._handled.done():
            self._handled.set_result(was_handled)
        self._is_delivered = False


def get_handler_name(handler: Callable[..., object]) -> str:
    """Return the name that identifies a function in logs and in the store."""
    return getattr(handler, "__qualname__", None) or type(handler).__name__


class Deliverer:
    """Delivers events one after another, each to all handlers and loops."""

    def __init__(self, runtime: EventsRuntime, apply: Apply | None) -> None:
        self._runtime = runtime
        self._apply = apply
        self._wakeup = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.handlers = EventHandlers(runtime.streams)
        self.cursor = 0
        """All events up to this committed id have been delivered."""
        self._epoch = ""
        self.set_aside_count = 0

    @property
    def has_handlers(self) -> bool:
        """Whether the application consumes events, or the client follows no partitions and has none to deliver."""
        return self._apply is not None or bool(self.handlers) or not self._runtime.protocol.partitions

    @property
    def has_undelivered(self) -> bool:
        """Whether events are waiting for delivery, or the cursor has moved without events."""
        protocol = self._runtime.protocol
        is_other_history = protocol.phase is EventsPhase.HISTORY_CHANGED
        return bool(protocol.ready) or (
            not is_other_history and (protocol.cursor != self.cursor or protocol.epoch != self._epoch)
        )

    def start(self, cursor: int, epoch: str, set_aside_count: int) -> None:
        """Start delivering the events after a cursor."""
        self.cursor, self._epoch, self.set_aside_count = cursor, epoch, set_aside_count
        self._task = self._runtime.start_task("deliver", self._run)
        self.wake()

    def wake(self) -> None:
        """Wake the task to check for events and handlers."""
        self._wakeup.set()

    def check_not_in_handler(self, method: str) -> None:
        """Raise RuntimeError when called in an event handler, which must not wait for a later event."""
        if asyncio.current_task() is self._task:
            raise RuntimeError(f"{method} must not be called by an event handler: it would deadlock")

    async def start_over(self, since: int, reset: Reset | None) -> None:
        """Continue from the cursor `since` in the server's current history."""
        runtime = self._runtime
        # A handler may be waiting for an outcome that arrives only after the restart.
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
        """Redeliver the events that were set aside. Return the ones that fail again, with their errors."""
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
            # Without handlers and loops, events wait here: skipping them would lose them.
            while self.has_handlers and self.has_undelivered:
                async with self._lock:
                    if self.has_undelivered:
                        await self._deliver_batch()
                runtime.wake_tasks()  # the protocol may have room for further events

    async def _deliver_batch(self) -> None:
        runtime, protocol = self._runtime, self._runtime.protocol
        epoch = protocol.epoch
        events, cursor = protocol.take_events(runtime.limits.hand_over_events_max)
        failed: list[SetAside] = []
        taken = 0
        began = time.monotonic()
        try:
            for event in events if self.handlers else ():
                if not self.has_handlers:  # the only loop has exited
                    break
                if taken and time.monotonic() - began > DELIVERY_S:
                    break  # save the cursor first
                not_taken, is_taken = await self.handlers.deliver(event)
                if not is_taken and self._apply is None:  # the only loop exited before it received the event
                    break
                failed += not_taken
                taken += 1
            else:
                taken = len(events)
        finally:
            # Save even while the client is closing, so that delivered events are not delivered again.
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
