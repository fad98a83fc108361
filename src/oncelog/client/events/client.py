"""The asyncio events client: submissions are durable, and `apply` handles each event once, in commit order.

    async with Client("http://127.0.0.1:7171", path="todo.db", partitions=["list/1"]) as client:
        pending = await client.submit({"type": "todo.added", "text": "milk"})
        async for event in client.events():
            print(event.committed_id, event.event)

Independent tasks do the work: the `connector` keeps the client connected, the `outbox` saves submissions, the
`deliverer` passes events to the application, and one task reports status changes. The `protocol` makes the decisions
without I/O, and the `store` accesses the file.
"""

import os
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from oncelog.client.events.connector import Connector
from oncelog.client.events.deliverer import Deliverer, EventHandler, EventHandlers, EventStream, get_handler_name
from oncelog.client.events.outbox import Draft, EventsRuntime, Outbox, Pending
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.store import APPLY, Apply, ClientStore, Reset
from oncelog.client.events.values import ClientLimits, Event, HistoryChange, RefusedEvent, SetAside, Status
from oncelog.client.runtime import logger
from oncelog.client.runtime.connector import ConnectedClient
from oncelog.client.runtime.http import Transport, WebSocketTransport, normalize_url
from oncelog.client.runtime.options import (
    Token,
    check_client_id,
    check_function,
    check_limits,
    check_number,
    check_partitions,
    check_path,
    check_token,
)
from oncelog.client.runtime.values import ConnectionState
from oncelog.core.canonical import JsonValue
from oncelog.deprecation import alias_method, warn_renamed
from oncelog.errors import ClientError, SettingsError

_STATE_BY_PHASE: Final = {
    EventsPhase.NONE: ConnectionState.OFFLINE,
    EventsPhase.CONNECTING: ConnectionState.CONNECTING,
    EventsPhase.ASIDE: ConnectionState.CATCHING_UP,
    EventsPhase.CATCHING_UP: ConnectionState.CATCHING_UP,
    EventsPhase.LIVE: ConnectionState.LIVE,
    EventsPhase.HISTORY_CHANGED: ConnectionState.HISTORY_CHANGED,
}


class Client(ConnectedClient[EventsRuntime, Status]):
    """An events client for one server, with its own file. `async with` opens and closes it."""

    def __init__(  # noqa: PLR0913 - keyword arguments, most with a default
        self,
        url: str,
        *,
        path: str | os.PathLike[str] | None = None,
        partitions: Iterable[str],
        client_id: str | None = None,
        token: Token = None,
        apply: Apply | None = None,
        reset: Reset | None = None,
        limits: ClientLimits | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        transport: Transport | None = None,
        chance: random.Random | None = None,
        store: str | os.PathLike[str] | None = None,
    ) -> None:
        """Store the configuration. Opening the client opens the file and connects.

        `path` is an SQLite file, or ":memory:" for an outbox that need not survive a restart. The client creates a
        missing file. The file may also contain the application's tables. The client follows `partitions`; with an empty
        list, it only submits. The file stores `client_id`; by default, the client generates an id. The client calls
        `apply(connection, events)` in the transaction that moves the cursor, and `reset(connection)` in the transaction
        that restarts from a different cursor. `store` is the deprecated name of `path`.
        """
        if store is not None:
            if path is not None:
                raise SettingsError("path and store, its deprecated name, must not both be given")
            warn_renamed("Client(store=…)", "Client(path=…)")
            path = store
        self.url = normalize_url(url)
        self.limits = check_limits(limits, ClientLimits)
        self.partitions = check_partitions(partitions)
        self._requested_id = check_client_id(client_id)
        check_token(token)
        check_function(apply, "apply", may_be_async=False)
        check_function(reset, "reset", may_be_async=False)
        self._reset = reset
        self._transport = transport or WebSocketTransport(self.url, self.limits, headers, tls)
        self._runtime = EventsRuntime("events", logger, ClientStore(check_path(path)), self.limits, chance)
        self._connector: Connector = Connector(self._runtime, self._transport, token)
        self._outbox: Outbox = Outbox(self._runtime)
        self._deliverer = Deliverer(self._runtime, apply)
        self._runtime.wake_tasks = self._wake_tasks
        self._handlers: dict[type, list[Callable[[Any], Awaitable[None] | None]]] = {Status: [], HistoryChange: []}
        """Application functions that the client calls with each new status and each history change."""

    # --- opening and closing

    async def _open(self) -> None:
        runtime = self._runtime
        stored = await runtime.call_store(runtime.store.open, self._requested_id, self.partitions, self._reset)
        runtime.loaded_protocol = EventsProtocol(stored.client_id, self.partitions, stored.cursor, stored.epoch)
        runtime.protocol.wants_events = self._deliverer.has_handlers
        runtime.protocol.enqueue(stored.outbox)
        self._outbox.load(stored.outbox)
        self._outbox.refused_count = stored.refused
        self._start_tasks()
        runtime.start_task("report", self._report_changes)
        self._deliverer.start(stored.cursor, stored.epoch, stored.set_aside)

    async def _drain(self) -> None:
        self._runtime.finish_streams()

    def _wake_tasks(self) -> None:
        """After a protocol change, wake waiting callers and the tasks that now have work."""
        self._connector.wake_writer()
        if self._runtime.protocol.settled:
            self._outbox.wake()
        if self._deliverer.has_undelivered:
            self._deliverer.wake()
        self._runtime.wake_waiters()

    @property
    def client_id(self) -> str:
        """Id of the client on the server."""
        return self._runtime.protocol.client_id

    # --- submitting

    async def submit(
        self,
        event: JsonValue,
        partitions: Sequence[str] | None = None,
        *,
        id: UUID | str | None = None,  # noqa: A002 - its name on the wire
        expected_committed_id: int | None = None,
    ) -> Pending:
        """Add an event to the outbox and save it to disk. The client sends it repeatedly until it has an outcome.

        Raises CanonicalError for a malformed event, LimitExceededError if the outbox is full, IdReusedError if a
        different event with this id is pending, and StoreError if the store cannot be written. In each of these cases,
        the new event is not in the outbox. After a ClosedError the event may be on disk; if so, the client sends it
        when it is reopened.
        """
        return (await self.submit_many([Draft(event, partitions, id, expected_committed_id)]))[0]

    async def submit_many(self, drafts: Iterable[Draft]) -> list[Pending]:
        """Add all of the events to the outbox, in this order, or none of them. Raises the errors of `submit`."""
        self._runtime.check_open()
        return await self._outbox.submit_drafts(drafts)

    def pending(self) -> list[Pending]:
        """Return the submissions without an outcome, including those from earlier runs of the program."""
        return list(self._outbox.pending.values())

    async def refused(self) -> list[RefusedEvent]:
        """Return the submissions that the server has refused, oldest first. `forget_refused` removes them."""
        return await self._runtime.call_store(self._runtime.store.load_refused)

    async def forget_refused(self, *ids: UUID | str) -> None:
        """Remove refused submissions that the application has handled, or all of them if no id is given."""
        self._runtime.check_open()
        await self._outbox.save((), [str(one).lower() for one in ids] or [one.id for one in await self.refused()])

    async def send_again(self, id: UUID | str) -> Pending:  # noqa: A002 - as above
        """Move a refused event back to the outbox with its id, but without an expected committed id.

        Raises ClientError if no refused event has this id, and the errors of `submit`.
        """
        self._runtime.check_open()
        found = [one for one in await self.refused() if one.id == str(id).lower()]
        if not found:
            raise ClientError(f"no refused event has the id {id}")
        draft = Draft(found[-1].event, found[-1].partitions, found[-1].id)
        return (await self._outbox.submit_drafts([draft], [found[-1].id]))[0]

    rejected = alias_method("Client.rejected", "refused")
    forget_all_rejected = alias_method("Client.forget_all_rejected", "forget_refused")

    async def forget_rejected(self, *ids: UUID | str) -> None:
        """Deprecated: use `forget_refused`. Without an id this method forgets nothing; `forget_refused` forgets all."""
        warn_renamed("Client.forget_rejected", "Client.forget_refused")
        if ids:
            await self.forget_refused(*ids)

    # --- events

    def on_event(self, handler: EventHandler, *, name: str | None = None) -> EventHandler:
        """Call `handler` with every event, in order. It may be async. This method also works as a decorator.

        If the handler raises an error, the client sets the event aside for that handler (`set_aside`) and still
        delivers the event to the other handlers. After a crash the client may deliver an event again. Use `apply` to
        handle each event exactly once.
        """
        check_function(handler, "the handler", may_be_async=True)
        called = name or get_handler_name(handler)
        if called == APPLY:
            raise ValueError(f"the name {APPLY!r} is reserved for the `apply` function: give this handler another name")
        self._deliverer.handlers.add(handler, called)
        self._want_events()
        return handler

    async def events(self) -> AsyncIterator[Event]:
        """Iterate over the events after the cursor, in order.

        An event counts as delivered when the loop requests the next one. If the loop exits early or its body raises
        an error, the next loop receives the last event again.
        """
        self._runtime.check_open()
        stream = EventStream(self._runtime.streams)
        self._want_events()
        try:
            async for event in stream:
                yield event
        finally:
            stream.finish()

    def _want_events(self) -> None:
        self._deliverer.wake()
        if self._runtime.is_ready:
            self._runtime.protocol.want_events()
            self._connector.wake_writer()

    async def set_aside(self) -> list[SetAside]:
        """Return the events for which `apply` or a handler raised an error, in order."""
        return await self._runtime.call_store(self._runtime.store.load_set_aside)

    async def forget_set_aside(self, *committed_ids: int) -> None:
        """Remove events that were set aside. The client will not deliver them again."""
        for number in committed_ids:
            check_number(number, "committed_ids")
        runtime = self._runtime
        self._deliverer.set_aside_count = await runtime.call_store(runtime.store.forget_set_aside, committed_ids)
        runtime.wake_waiters()

    async def hand_over_set_aside(self) -> list[SetAside]:
        """Redeliver the events that were set aside. Return the ones that fail again, with their errors.

        Event handlers must not call this method.
        """
        self._deliverer.check_not_in_handler("hand_over_set_aside")
        return await self._deliverer.redeliver()

    async def reached(self, committed_id: int) -> None:
        """Wait until all events up to a committed id have been delivered. Raises ClosedError if the client is closed.

        With the committed id of a submission, an application can wait until its tables contain the event.
        """
        check_number(committed_id, "committed_id")
        if self._deliverer.cursor < committed_id:
            self._deliverer.check_not_in_handler("reached")
        await self._runtime.wait_until(lambda: self._deliverer.cursor >= committed_id)

    # --- status

    def status(self) -> Status:
        """Return the current status, for example for a user interface."""
        runtime, deliverer = self._runtime, self._deliverer
        server_last = runtime.protocol.last_committed_id if runtime.is_open else 0
        return Status(
            state=self._get_state() if runtime.is_open else ConnectionState.CLOSED,
            pending=len(self._outbox.pending),
            refused=self._outbox.refused_count,
            set_aside=deliverer.set_aside_count,
            cursor=deliverer.cursor,
            server_last_committed_id=max(server_last, deliverer.cursor),
            last_error=self._find_last_error(),
        )

    def _get_state(self) -> ConnectionState:
        protocol, connector = self._runtime.protocol, self._connector
        state = _STATE_BY_PHASE[protocol.phase]
        if protocol.phase is EventsPhase.ASIDE and not self._deliverer.has_handlers:
            state = ConnectionState.LIVE  # a client that only submits is ready
        is_refused = not connector.is_admitted and state in (ConnectionState.OFFLINE, ConnectionState.CONNECTING)
        return ConnectionState.REFUSED if is_refused or protocol.read_error is not None else state

    def on_status(self, handler: Callable[[Status], Awaitable[None] | None]) -> None:
        """Call `handler` with each new status."""
        check_function(handler, "the handler", may_be_async=True)
        self._handlers[Status].append(handler)

    def on_history_changed(self, handler: Callable[[HistoryChange], Awaitable[None] | None]) -> None:
        """Call `handler` when the server has a different history. The client then waits for `start_over`."""
        check_function(handler, "the handler", may_be_async=True)
        self._handlers[HistoryChange].append(handler)

    @property
    def history_change(self) -> HistoryChange | None:
        """How the server's history has changed, while the client is waiting for `start_over`; otherwise None."""
        return self._runtime.protocol.history_change

    async def start_over(self, since: int = 0, *, reset: Reset | None = None) -> None:
        """Continue with the server's current history from the cursor `since`.

        The client calls `reset(connection)`, or the `reset` of the constructor, in the transaction that moves the
        cursor, so that the application can remove the effects of events after `since`. The outbox is unaffected: the
        client still sends its submissions. Event handlers must not call this method.
        """
        self._runtime.check_open()
        self._deliverer.check_not_in_handler("start_over")
        check_number(since, "since")
        check_function(reset, "reset", may_be_async=False)
        await self._deliverer.start_over(since, reset or self._reset)
        self._connector.restart()
        self._wake_tasks()

    def _is_live(self) -> bool:
        """Whether the client has caught up and its handlers and loops have received every event."""
        protocol = self._runtime.protocol
        if not self._deliverer.has_handlers:
            return protocol.is_submitting
        return protocol.phase is EventsPhase.LIVE and not self._deliverer.has_undelivered

    async def _report_changes(self) -> None:
        """Call the application's handlers after each status or history change."""
        reported: tuple[Status | None, HistoryChange | None] = (None, None)

        def is_new() -> bool:
            return (self.status(), self.history_change) != reported

        while True:
            await self._runtime.wait_until(is_new)
            before, reported = reported, (self.status(), self.history_change)
            for value, last in zip(reported, before, strict=True):
                if value is None or value == last:
                    continue
                if isinstance(value, HistoryChange):
                    self._runtime.logger.warning("the server's history has changed: %s", value.message)
                for handler in list(self._handlers[type(value)]):
                    await EventHandlers.call(handler, get_handler_name(handler), value)
