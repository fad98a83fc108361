"""Parts of the blocking events client that are not generated, because its handlers run in threads."""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final
from uuid import UUID

from oncelog.client.events.deliverer import get_handler_name
from oncelog.client.runtime.blocking_base import BlockingBaseClient
from oncelog.client.runtime.client import call_in_thread
from oncelog.deprecation import warn_renamed
from oncelog.errors import SettingsError

_in_handler: Final[ContextVar[bool]] = ContextVar("in_handler", default=False)


class BlockingEventsBase(BlockingBaseClient):
    """Base class of `BlockingClient`."""

    def close(self) -> None:
        """Close the client. Raises RuntimeError when called by a handler."""
        if _in_handler.get():
            raise RuntimeError("close must not be called by a handler: it would deadlock")
        super().close()

    @abstractmethod
    def forget_refused(self, *ids: UUID | str) -> None:
        """Like `Client.forget_refused`."""

    def forget_rejected(self, *ids: UUID | str) -> None:
        """Deprecated: use `forget_refused`. Without an id this method forgets nothing; `forget_refused` forgets all."""
        warn_renamed("BlockingClient.forget_rejected", "BlockingClient.forget_refused")
        if ids:
            self.forget_refused(*ids)


def wrap_handler(handler: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Wrap a blocking handler in an async one that calls it in a thread."""
    if not callable(handler) or inspect.iscoroutinefunction(handler):
        raise SettingsError("the handler must be a function that is not async, because nothing would await it")

    def handle(value: Any) -> None:
        _in_handler.set(True)  # affects only this call, because `to_thread` copies the context
        handler(value)

    async def call_handler(value: Any) -> None:
        await asyncio.to_thread(call_in_thread, handle, value)

    call_handler.__qualname__ = get_handler_name(handler)
    return call_handler
