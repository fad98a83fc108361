"""Receivers of events in the application: handlers, which are functions, and loops over `Client.events`."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from oncelog.client.events.values import Event, SetAside
from oncelog.client.runtime.bounded_stream import BoundedStream
from oncelog.client.runtime.client import describe_error, is_being_cancelled
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.client")

EventHandler = Callable[[Event], Awaitable[None] | None]


class EventHandlers:
    """Handlers and loops of one client, in the order of registration. All get an event before any gets the next one."""

    def __init__(self, streams: list[Any]) -> None:
        """`streams` are the open loops."""
        self._handlers: dict[str, EventHandler] = {}
        self._streams: list[EventStream] = streams

    def __bool__(self) -> bool:
        return bool(self._handlers or self._streams)

    def add(self, handler: EventHandler, name: str) -> None:
        """Add a handler. Its name identifies its failed events after a restart. Raises ValueError for a used name."""
        if name in self._handlers:
            raise ValueError(f"another handler has the name {name!r}: give this handler another name")
        self._handlers[name] = handler

    async def deliver(self, event: Event) -> tuple[list[SetAside], bool]:
        """Deliver an event to all handlers and loops. An error of one of them does not keep it from the others.

        Return the failed deliveries, and whether anything received the event: a loop can be left just before that.
        """
        failed: list[SetAside] = []
        is_taken = bool(self._handlers)
        for name, handler in list(self._handlers.items()):
            error = await self.call(handler, name, event)
            if error is not None:
                failed.append(SetAside(name, event, error))
        # All loops get the event at once: they do not wait for the bodies of other loops.
        for handled in [stream.deliver(event) for stream in self._streams]:
            is_taken |= await handled
        return failed, is_taken

    async def redeliver(self, failed_delivery: SetAside) -> str | None:
        """Deliver an event again to the handler that has failed. Return its error, or None."""
        handler = self._handlers.get(failed_delivery.handler)
        if handler is None:
            return f"the handler {failed_delivery.handler!r} does not exist; its first error: {failed_delivery.error}"
        return await self.call(handler, failed_delivery.handler, failed_delivery.event)

    @staticmethod
    async def call(handler: Callable[[Any], Awaitable[None] | None], name: str, value: Any) -> str | None:
        """Call a function of the application. Return its error in one line, or None."""
        try:
            result = handler(value)
            if inspect.isawaitable(result):
                await result
        except (Exception, asyncio.CancelledError) as error:
            # If the application has cancelled what its handler waits for, the task of the client goes on.
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            logger.exception("the handler %s failed", name)
            return describe_error(error)
        return None


class EventStream(BoundedStream[Event]):
    """A loop over the events of a client. An event counts as delivered when the loop requests the next one.

    It does not count when the loop is left, because its body may have raised an error.
    """

    def __init__(self, streams: list[Any]) -> None:
        super().__init__(streams, count_max=("events", 1))
        self._handled: asyncio.Future[bool] | None = None
        """Result of the event: whether the loop has requested the next one."""
        self._is_delivered = False

    async def __anext__(self) -> Event:
        if self._is_delivered:
            self._settle(was_handled=True)
        event = await super().__anext__()
        self._is_delivered = True
        return event

    def deliver(self, event: Event) -> "asyncio.Future[bool]":
        """Pass the next event to the loop. The result is False if the loop is left before it requests another one."""
        self._handled = asyncio.get_running_loop().create_future()
        if self._is_over:
            self._handled.set_result(False)
        else:
            self.put([event])
        return self._handled

    def finish(self, error: OncelogError | None = None) -> None:
        """End the stream without its event, because the client is closed or the loop was left."""
        self._end(error)
        self._settle(was_handled=False)

    def _settle(self, *, was_handled: bool) -> None:
        if self._handled is not None and not self._handled.done():
            self._handled.set_result(was_handled)
        self._is_delivered = False


def get_handler_name(handler: Callable[..., object]) -> str:
    """Return the name of a function in logs and in the store."""
    return getattr(handler, "__qualname__", None) or type(handler).__name__
