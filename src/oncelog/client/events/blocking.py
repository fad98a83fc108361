"""The blocking twin of `Client`: the same methods, each of which waits for its result.

    with BlockingClient("http://127.0.0.1:7171", store="todo.db", partitions=["list/1"]) as client:
        outcome = client.submit({"type": "todo.added", "text": "milk"}).outcome()

Any number of threads may share one. Handlers are called in threads of their own, one event after the other; `apply` is
called in the store's thread, and must not use the client: that would wait for itself.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import UUID

from oncelog.client.events.client import Client
from oncelog.client.events.handlers import get_handler_name
from oncelog.client.events.store import Reset
from oncelog.client.events.submissions import Draft, Pending
from oncelog.client.events.values import Event, HistoryChange, Outcome, Rejection, SetAside, Status
from oncelog.client.runtime.cancellation import call_in_thread
from oncelog.core.canonical import JsonValue
from oncelog.errors import ClosedError, SettingsError
from oncelog.portal import Portal

T = TypeVar("T")
_in_handler: Final[ContextVar[bool]] = ContextVar("in_handler", default=False)


class BlockingPending:
    """A submission that lies in the outbox."""

    def __init__(self, pending: Pending, portal: Portal) -> None:
        self._pending = pending
        self._portal = portal

    @property
    def id(self) -> str:
        """As `Pending.id`."""
        return self._pending.id

    @property
    def event(self) -> dict[str, Any]:
        """As `Pending.event`."""
        return self._pending.event

    @property
    def partitions(self) -> tuple[str, ...]:
        """As `Pending.partitions`."""
        return self._pending.partitions

    @property
    def result(self) -> Outcome | None:
        """As `Pending.result`."""
        return self._pending.result

    def outcome(self, timeout_s: float | None = None) -> Outcome:
        """As `Pending.outcome`; raises TimeoutError if it takes longer."""
        return self._portal.call(_call_with_timeout, self._pending.outcome, timeout_s)


class BlockingClient:
    """For code without an event loop. Takes what `Client` takes; each method does what `Client`'s of that name does."""

    def __init__(self, url: str, **options: Any) -> None:
        self._client = Client(url, **options)
        self._open_portal: Portal | None = None

    def __enter__(self) -> Self:
        portal = Portal("oncelog-client-loop", _client_closed_error)
        try:
            portal.call(self._client.__aenter__)
        except BaseException:
            portal.close()
            raise
        self._open_portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `Client.close`. Raises RuntimeError in a handler: its own thread would have to end first."""
        if _in_handler.get():
            raise RuntimeError("close must not be called by a handler: it would wait for itself")
        portal, self._open_portal = self._open_portal, None
        if portal is not None and not portal.is_forked:
            try:
                portal.call(self._client.close)
            finally:
                portal.close()

    @property
    def _portal(self) -> Portal:
        if self._open_portal is None:
            raise _client_closed_error()
        return self._open_portal

    @property
    def client_id(self) -> str:
        """As `Client.client_id`."""
        return self._client.client_id

    @property
    def history_change(self) -> HistoryChange | None:
        """As `Client.history_change`."""
        return self._client.history_change

    def submit(
        self,
        event: JsonValue,
        partitions: Sequence[str] | None = None,
        *,
        id: UUID | str | None = None,  # noqa: A002 - the name that it has on the wire
        expected_committed_id: int | None = None,
    ) -> BlockingPending:
        """As `Client.submit`."""
        return self.submit_many([Draft(event, partitions, id, expected_committed_id)])[0]

    def submit_many(self, drafts: Iterable[Draft]) -> list[BlockingPending]:
        """As `Client.submit_many`."""
        portal = self._portal
        return [BlockingPending(pending, portal) for pending in portal.call(self._client.submit_many, drafts)]

    def pending(self) -> list[BlockingPending]:
        """As `Client.pending`."""
        portal = self._portal

        async def list_pending() -> list[Pending]:
            return self._client.pending()

        return [BlockingPending(pending, portal) for pending in portal.call(list_pending)]

    def rejected(self) -> list[Rejection]:
        """As `Client.rejected`."""
        return self._portal.call(self._client.rejected)

    def forget_rejected(self, *ids: UUID | str) -> None:
        """As `Client.forget_rejected`."""
        self._portal.call(self._client.forget_rejected, *ids)

    def forget_all_rejected(self) -> None:
        """As `Client.forget_all_rejected`."""
        self._portal.call(self._client.forget_all_rejected)

    def forget_set_aside(self, *committed_ids: int) -> None:
        """As `Client.forget_set_aside`."""
        self._portal.call(self._client.forget_set_aside, *committed_ids)

    def on_event(self, handler: Callable[[Event], None], *, name: str | None = None) -> Callable[[Event], None]:
        """As `Client.on_event`, in a thread of its own."""
        self._call_on_loop(
            lambda: self._client.on_event(_wrap_handler(handler), name=name or get_handler_name(handler))
        )
        return handler

    def on_status(self, handler: Callable[[Status], None]) -> None:
        """As `Client.on_status`, in a thread of its own."""
        self._call_on_loop(lambda: self._client.on_status(_wrap_handler(handler)))

    def on_history_changed(self, handler: Callable[[HistoryChange], None]) -> None:
        """As `Client.on_history_changed`, in a thread of its own."""
        self._call_on_loop(lambda: self._client.on_history_changed(_wrap_handler(handler)))

    def events(self) -> Iterator[Event]:
        """As `Client.events`."""
        return self._portal.iterate(self._client.events())

    def set_aside(self) -> list[SetAside]:
        """As `Client.set_aside`."""
        return self._portal.call(self._client.set_aside)

    def hand_over_set_aside(self) -> list[SetAside]:
        """As `Client.hand_over_set_aside`."""
        return self._portal.call(self._client.hand_over_set_aside)

    def reached(self, committed_id: int, timeout_s: float | None = None) -> None:
        """As `Client.reached`; raises TimeoutError if it takes longer."""
        self._portal.call(_call_with_timeout, lambda: self._client.reached(committed_id), timeout_s)

    def status(self) -> Status:
        """As `Client.status`."""
        return self._client.status()

    def start_over(self, since: int = 0, *, reset: Reset | None = None) -> None:
        """As `Client.start_over`."""
        self._portal.call(self._client.start_over, since, reset=reset)

    def until_live(self, timeout_s: float | None = None) -> None:
        """As `Client.until_live`; raises TimeoutError if it takes longer."""
        self._portal.call(_call_with_timeout, self._client.until_live, timeout_s)

    def until_settled(self, timeout_s: float | None = None) -> None:
        """As `Client.until_settled`; raises TimeoutError if it takes longer."""
        self._portal.call(_call_with_timeout, self._client.until_settled, timeout_s)

    def reconnect_now(self) -> None:
        """As `Client.reconnect_now`."""
        self._call_on_loop(self._client.reconnect_now)

    def _call_on_loop(self, function: Callable[[], object]) -> None:
        """Before the client is open nobody else uses it; from then on its loop does."""
        if self._open_portal is None:
            function()
            return

        async def call() -> None:
            function()

        self._open_portal.call(call)


async def _call_with_timeout(function: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
    async with asyncio.timeout(timeout_s):
        return await function()


def _wrap_handler(handler: Callable[[Any], None]) -> Callable[[Any], Any]:
    if not callable(handler) or inspect.iscoroutinefunction(handler):
        raise SettingsError("the handler must be a function, and not async: nobody would await it")

    def handle(value: Any) -> None:
        _in_handler.set(True)  # a thread of asyncio's has a context of its own for every call
        handler(value)

    async def call_handler(value: Any) -> None:
        await asyncio.to_thread(call_in_thread, handle, value)

    call_handler.__qualname__ = get_handler_name(handler)
    return call_handler


def _client_closed_error() -> ClosedError:
    return ClosedError("the client is closed")
