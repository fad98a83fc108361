"""Who takes the events: functions that are called with each, and loops that ask for the next."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from oncelog.client.events.values import Event, SetAside
from oncelog.client.runtime.client import describe_error, is_being_cancelled

logger: Final = logging.getLogger("oncelog.client")

EventHandler = Callable[[Event], Awaitable[None] | None]


class EventHandlers:
    """In the order in which they were added. Each event goes to all of them before the next one goes to any."""

    def __init__(self) -> None:
        self._handlers: dict[str, EventHandler] = {}
        self._streams: list[EventStream] = []

    def __bool__(self) -> bool:
        return bool(self._handlers or self._streams)

    def add(self, handler: EventHandler, name: str) -> None:
        """Under a name by which its set-aside events are found again after a restart. Raises ValueError if taken."""
        if name in self._handlers:
            raise ValueError(f"there is a handler {name!r} already: give this one another name")
        self._handlers[name] = handler

    def new_stream(self) -> "EventStream":
        """A loop that takes the events from now on."""
        stream = EventStream(self._streams.remove)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """All loops end."""
        for stream in list(self._streams):
            stream.finish()

    async def deliver(self, event: Event) -> tuple[list[SetAside], bool]:
        """To all of them. Those that could not take it do not keep it from the others.

        Gives those, and whether anybody was there: a loop can be left just before it comes to the event.
        """
        failed: list[SetAside] = []
        is_taken = bool(self._handlers)
        for name, handler in list(self._handlers.items()):
            error = await self.call(handler, name, event)
            if error is not None:
                failed.append(SetAside(name, event, error))
        # All loops get the event first: they do not wait for the bodies of each other.
        for handled in [stream.put(event) for stream in self._streams]:
            is_taken |= await handled
        return failed, is_taken

    async def redeliver(self, failed_delivery: SetAside) -> str | None:
        """To the one that could not take it. Gives its error, or None if all is well."""
        handler = self._handlers.get(failed_delivery.handler)
        if handler is None:
            return f"there is no handler {failed_delivery.handler!r}; at first: {failed_delivery.error}"
        return await self.call(handler, failed_delivery.handler, failed_delivery.event)

    @staticmethod
    async def call(handler: Callable[[Any], Awaitable[None] | None], name: str, value: Any) -> str | None:
        """Calls a function of the application's. Gives its error in one line, or None if all is well."""
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


class EventStream:
    """`async for event in stream`. An event counts as handed over when the next one is requested.

    It does not count when the loop is left: its body may have raised before its end.
    """

    def __init__(self, on_finish: Callable[["EventStream"], None]) -> None:
        self._on_finish = on_finish
        self._event: Event | None = None
        self._handled: asyncio.Future[bool] | None = None
        """Result of the event: whether the loop asked for the next one."""
        self._is_delivered = False
        self._is_over = False
        self._arrival = asyncio.Event()

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> Event:
        if self._is_delivered:
            self._settle(was_handled=True)
        while self._event is None:
            if self._is_over:
                raise StopAsyncIteration
            # A caller that stops waiting here leaves the event for the next call.
            self._arrival.clear()
            await self._arrival.wait()
        self._is_delivered = True
        return self._event

    def put(self, event: Event) -> "asyncio.Future[bool]":
        """Give the loop its next event. The result is False if the loop is left before it asks for another one."""
        self._handled = asyncio.get_running_loop().create_future()
        if self._is_over:
            self._handled.set_result(False)
        else:
            self._event, self._is_delivered = event, False
            self._arrival.set()
        return self._handled

    def finish(self) -> None:
        """End the stream: the client is closed, or the loop was left."""
        if not self._is_over:
            self._is_over = True
            self._on_finish(self)
        self._settle(was_handled=False)
        self._arrival.set()

    def _settle(self, *, was_handled: bool) -> None:
        if self._handled is not None and not self._handled.done():
            self._handled.set_result(was_handled)
        self._event, self._is_delivered = None, False


def get_handler_name(handler: Callable[..., object]) -> str:
    """What a function is called in logs and in the store."""
    return getattr(handler, "__qualname__", None) or type(handler).__name__
