"""The asyncio client: submissions that survive, and every event once, in one order.

    async with Client("http://127.0.0.1:7171", store="todo.db", partitions=["list/1"]) as client:
        pending = await client.submit({"type": "todo.added", "text": "milk"})
        async for event in client.events():
            print(event.committed_id, event.event)

Tasks share the work, and none of them waits for another: one stays connected (`connector`), one keeps the outbox, one
hands events over, one reports. What is decided lies in `protocol`, what is kept in `store`.
"""

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar
from uuid import UUID

from oncelog.client.events.connector import Connector
from oncelog.client.events.handlers import EventHandler, EventHandlers, get_handler_name
from oncelog.client.events.limits import ClientLimits
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.store import APPLY, Apply, ClientStore, Reset, describe_error
from oncelog.client.events.submissions import Draft, Pending, PreparedEvent, prepare
from oncelog.client.events.values import (
    ConnectionState,
    Event,
    HistoryChange,
    Rejected,
    Rejection,
    SetAside,
    SettledEntry,
    Status,
)
from oncelog.client.runtime.cancellation import call_in_thread, is_being_cancelled
from oncelog.client.runtime.client import close_store_thread
from oncelog.client.runtime.options import (
    check_client_id,
    check_committed_id,
    check_function,
    check_partitions,
    check_store,
)
from oncelog.client.runtime.tokens import Token, check_token
from oncelog.client.runtime.websocket import Transport, WebSocketTransport, normalize_url
from oncelog.core.canonical import JsonValue
from oncelog.errors import (
    ClientError,
    ClosedError,
    IdReusedError,
    LimitExceededError,
    OncelogError,
    SettingsError,
    StoreError,
)

logger: Final = logging.getLogger("oncelog.client")

STORE_PAUSE_S: Final = 0.5
"""Before the next attempt to write to a store that cannot be written."""
DELIVERY_S: Final = 0.1
"""For so long events go to handlers before the cursor behind them is saved."""
_STATE_BY_PHASE: Final = {
    EventsPhase.NONE: ConnectionState.OFFLINE,
    EventsPhase.CONNECTING: ConnectionState.CONNECTING,
    EventsPhase.ASIDE: ConnectionState.CATCHING_UP,
    EventsPhase.CATCHING_UP: ConnectionState.CATCHING_UP,
    EventsPhase.LIVE: ConnectionState.LIVE,
    EventsPhase.HISTORY_CHANGED: ConnectionState.HISTORY_CHANGED,
}

T = TypeVar("T")


class _PendingAccept(NamedTuple):
    """Submissions on their way into the outbox, and who waits for that."""

    prepared: list[PreparedEvent]
    accepted: "asyncio.Future[None]"


class Client:
    """One client of one server, with a store of its own. `async with` opens and closes it."""

    def __init__(  # noqa: PLR0913 - by name, and nearly all may be left out
        self,
        url: str,
        *,
        store: str | os.PathLike[str],
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
    ) -> None:
        """Says what is to be; nothing is opened yet.

        `store` is a file of SQLite's, made if it is missing: the application's own, or ":memory:" for a client whose
        outbox need not survive. `partitions` are followed; with none the client only submits. `client_id` is kept in
        the store, and made there if it is not given. `apply(connection, events)` is called in the transaction that
        moves the cursor; `reset(connection)`, in one that begins again from another point.
        """
        self.url = normalize_url(url)
        self.limits = limits or ClientLimits()
        if not isinstance(self.limits, ClientLimits):
            raise SettingsError(f"limits must be ClientLimits, not {limits!r}")
        self.partitions = check_partitions(partitions)
        self._requested_id = check_client_id(client_id)
        check_token(token)
        check_function(apply, "apply", may_be_async=False)
        check_function(reset, "reset", may_be_async=False)
        self._token = token
        self._apply = apply
        self._reset = reset
        self._store = ClientStore(check_store(store))
        self._transport = transport or WebSocketTransport(self.url, self.limits, headers, tls)
        self._random = chance or random.Random()  # noqa: S311 - for pauses
        self._handlers = EventHandlers()
        self._status_handlers: list[Callable[[Status], Awaitable[None] | None]] = []
        self._history_handlers: list[Callable[[HistoryChange], Awaitable[None] | None]] = []
        self._open_protocol: EventsProtocol | None = None
        self._open_connector: Connector | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pending_accepts: list[_PendingAccept] = []
        self._pending: dict[str, Pending] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._cursor = 0
        self._epoch = ""
        self._rejected_count = 0
        self._set_aside_count = 0
        self._store_error: str | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._close_task: asyncio.Task[None] | None = None
        self._delivery_task: asyncio.Task[None] | None = None
        self._stopped_tasks: set[asyncio.Task[None]] = set()
        self._outbox_bytes = 0
        self._outbox_wakeup = asyncio.Event()
        self._delivery_wakeup = asyncio.Event()
        self._report_wakeup = asyncio.Event()
        self._delivery_lock = asyncio.Lock()

    # --- opening and closing

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise ClosedError("a client is opened once; make another one")
        self._thread = ThreadPoolExecutor(1, "oncelog-client")
        try:
            stored = await self._call_store(self._store.open, self._requested_id, self.partitions, self._reset)
        except BaseException:
            self._is_closed = True
            self._thread.submit(self._store.close)  # whoever gives up waiting leaves a thread that opens it
            self._thread.shutdown()
            raise
        self._cursor, self._epoch = stored.cursor, stored.epoch
        self._rejected_count, self._set_aside_count = stored.rejected, stored.set_aside
        protocol = self._open_protocol = EventsProtocol(stored.client_id, self.partitions, stored.cursor, stored.epoch)
        protocol.wants_events = self._has_handlers
        self._pending = {entry.id: Pending(entry) for entry in stored.outbox}
        self._outbox_bytes = sum(len(entry.body) for entry in stored.outbox)
        protocol.enqueue(stored.outbox)
        self._open_connector = Connector(
            protocol, self._transport, self._token, self.limits, self._random, self._wake_tasks
        )
        for function in (self._open_connector.run, self._persist_outbox, self._report_changes):
            self._start_task(function)
        self._delivery_task = self._start_task(self._deliver_all)
        return self

    def _start_task(self, function: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard_task(function), name=f"oncelog client: {function.__name__}")
        self._tasks.append(task)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all tasks. What lies in the outbox stays there, and is sent when the client is opened again.

        A handler that calls it does not wait for it: it is cancelled at its next `await`, and its event comes again.
        """
        if self._thread is None or self._open_protocol is None:
            return
        if self._close_task is None:
            self._is_closed = True
            self._close_task = asyncio.create_task(self._close(self._thread), name="oncelog client: close")
        if asyncio.current_task() not in self._tasks:
            await asyncio.shield(self._close_task)

    async def _close(self, thread: ThreadPoolExecutor) -> None:
        try:
            self._handlers.close()
            await self._cancel_tasks(self._tasks)
            await self._transport.close()
        finally:
            self._fail_waiters(_client_closed_error())
            await close_store_thread(thread, self._store.close)

    @staticmethod
    async def _cancel_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail_waiters(self, error: OncelogError) -> None:
        """Nothing more will come."""
        pending_accepts, self._pending_accepts = self._pending_accepts, []
        for group in pending_accepts:
            if not group.accepted.done():
                group.accepted.set_exception(error)
                group.accepted.exception()  # whoever submitted may have gone
        for pending in self._pending.values():
            pending.settle(error)
        self._wake_waiters()

    async def _guard_task(self, function: Callable[[], Awaitable[None]]) -> None:
        """What nobody has foreseen must not leave the application waiting."""
        try:
            await function()
        except asyncio.CancelledError:
            is_expected = self._is_closed or self._failure or asyncio.current_task() in self._stopped_tasks
            if is_being_cancelled() and is_expected:
                raise
            self._fail(ClientError("a task of the client's was cancelled by somebody else"))
        except (KeyboardInterrupt, SystemExit) as error:
            self._fail(error)
            raise
        except BaseException as error:  # noqa: BLE001 - a GeneratorExit, say
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        logger.error("the client cannot go on", exc_info=error)
        self._failure = error
        self._handlers.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._fail_waiters(self._new_failure_error())

    @property
    def client_id(self) -> str:
        """As the server knows it."""
        return self._protocol.client_id

    @property
    def _protocol(self) -> EventsProtocol:
        if self._open_protocol is None:
            raise ClosedError("the client is not open: use `async with`")
        return self._open_protocol

    @property
    def _connector(self) -> Connector:
        if self._open_connector is None:
            raise ClosedError("the client is not open: use `async with`")
        return self._open_connector

    # --- submitting

    async def submit(
        self,
        event: JsonValue,
        partitions: Sequence[str] | None = None,
        *,
        id: UUID | str | None = None,  # noqa: A002 - the name that it has on the wire
        expected_committed_id: int | None = None,
    ) -> Pending:
        """Takes an event into the outbox. On return it is on the disk, and will be sent until it has an outcome.

        Raises CanonicalError for what is no event, LimitExceededError if the outbox is full, IdReusedError if another
        event waits under this id, StoreError if the store cannot be written: then it was not taken. After a
        ClosedError it may be on the disk: then it is sent when the client is opened again.
        """
        return (await self.submit_many([Draft(event, partitions, id, expected_committed_id)]))[0]

    async def submit_many(self, drafts: Iterable[Draft]) -> list[Pending]:
        """Takes several into the outbox, all or none, in this order."""
        self._check_open()
        pending: dict[int, Pending] = {}
        new: dict[str, tuple[PreparedEvent, Pending]] = {}
        for place, draft in enumerate(drafts):
            prepared = prepare(draft, self._get_partitions(draft.partitions), self.limits.body_bytes_max)
            known = self._pending.get(prepared.id) or new.get(prepared.id, (None, None))[1]
            if known is None:
                known = Pending(prepared)
                new[prepared.id] = (prepared, known)
            elif not known.has_same_content(prepared):
                raise IdReusedError(f"another event waits under the id {prepared.id}")
            pending[place] = known
        if len(self._pending) + len(new) > self.limits.outbox_events_max:
            raise LimitExceededError("outbox_events_max", self.limits.outbox_events_max)
        size = sum(len(prepared.body) for prepared, _ in new.values())
        if self._outbox_bytes + size > self.limits.outbox_bytes_max:
            raise LimitExceededError("outbox_bytes_max", self.limits.outbox_bytes_max)
        await self._accept(
            [prepared for prepared, _ in new.values()],
            {id: new_pending for id, (_, new_pending) in new.items()},  # noqa: A001
        )
        for new_pending in pending.values():
            new_pending.check_accepted()
        return list(pending.values())

    async def _accept(self, prepared: list[PreparedEvent], pending: Mapping[str, Pending]) -> None:
        """Returns when they are on the disk, and with them those before them that may say the same."""
        pending_accept = _PendingAccept(prepared, asyncio.get_running_loop().create_future())
        self._pending.update(pending)
        self._outbox_bytes += sum(len(event.body) for event in prepared)
        self._pending_accepts.append(pending_accept)
        self._outbox_wakeup.set()
        # Whoever gives up waiting does not take it back: it may be on the disk already.
        await asyncio.shield(pending_accept.accepted)

    def _get_partitions(self, partitions: Sequence[str] | None) -> Sequence[str]:
        if partitions is not None:
            return partitions
        if len(self.partitions) != 1:
            raise ValueError(f"partitions must be given: the client follows {len(self.partitions)}, not one")
        return list(self.partitions)

    def pending(self) -> list[Pending]:
        """All submissions without an outcome, those of an earlier run too."""
        return list(self._pending.values())

    async def rejected(self) -> list[Rejection]:
        """What the server has refused for good, oldest first, until `forget_rejected`."""
        return await self._call_store(self._store.load_rejected)

    async def forget_rejected(self, *ids: UUID | str) -> None:
        """The application has seen to these."""
        texts = [str(event_id).lower() for event_id in ids]
        self._rejected_count = await self._call_store(self._store.forget_rejected, texts)
        self._report_wakeup.set()

    async def forget_all_rejected(self) -> None:
        """The application has seen to all."""
        self._rejected_count = await self._call_store(self._store.forget_rejected, None)
        self._report_wakeup.set()

    async def _persist_outbox(self) -> None:
        """Saves what is submitted and what is settled, together: while one is being saved others gather."""
        settled: list[SettledEntry] = []
        while True:
            await self._outbox_wakeup.wait()
            self._outbox_wakeup.clear()
            pending_accepts, self._pending_accepts = self._pending_accepts, []
            if settled:  # they could not be saved with the last ones; on a full disk, that may be easier alone
                self._pending_accepts, pending_accepts = pending_accepts + self._pending_accepts, []
                self._outbox_wakeup.set()
            settled += self._protocol.take_settled()
            try:
                entries = self._store.assign_numbers([event for group in pending_accepts for event in group.prepared])
                await self._call_store(self._store.save_outbox, entries, settled, time.time_ns() // 1_000_000)
            except StoreError as error:
                self._fail_accepts(pending_accepts, error)
                self._fail_store(error)
                await asyncio.sleep(STORE_PAUSE_S)
                self._outbox_wakeup.set()
                continue
            except BaseException as error:
                self._fail_accepts(pending_accepts, error if isinstance(error, Exception) else _client_closed_error())
                raise
            self._store_error = None
            self._protocol.enqueue(entries)
            self._connector.wake_writer()
            for group in pending_accepts:
                if not group.accepted.done():
                    group.accepted.set_result(None)
            self._settle(settled)
            settled = []
            self._wake_tasks()

    def _fail_accepts(self, pending_accepts: Sequence[_PendingAccept], error: Exception) -> None:
        for group in pending_accepts:
            for prepared in group.prepared:
                pending = self._pending.pop(prepared.id, None)
                if pending is not None:
                    self._outbox_bytes -= len(prepared.body)
                    pending.settle(error)
            if not group.accepted.done():
                group.accepted.set_exception(error)
                group.accepted.exception()  # whoever submitted may have gone

    def _settle(self, settled: Sequence[SettledEntry]) -> None:
        for settled_entry in settled:
            if isinstance(settled_entry.outcome, Rejected):
                self._rejected_count += 1
                logger.warning("%s was rejected: %s", settled_entry.entry.id, settled_entry.outcome)
            pending = self._pending.pop(settled_entry.entry.id, None)
            if pending is not None:
                self._outbox_bytes -= len(settled_entry.entry.body)
                pending.settle(settled_entry.outcome)

    # --- events

    def on_event(self, handler: EventHandler, *, name: str | None = None) -> EventHandler:
        """Calls the function with every event, in order; it may be async. Can be used as a decorator.

        If it raises, the event is set aside for it (`set_aside`), and goes to the others. After a crash an event may
        come again that it had already been called with: for once and only once, use `apply`.
        """
        check_function(handler, "the handler", may_be_async=True)
        called = name or get_handler_name(handler)
        if called == APPLY:
            raise ValueError(f"{APPLY!r} is the name of what is called in the transaction: give this one another name")
        self._handlers.add(handler, called)
        self._want_events()
        return handler

    async def events(self) -> AsyncIterator[Event]:
        """Every event from the cursor on, in order. One counts as handed over when the next one is asked for.

        If the loop is left, or its body raises, the last one comes again: to the next loop, or the next time.
        """
        self._check_open()
        stream = self._handlers.new_stream()
        self._want_events()
        try:
            async for event in stream:
                yield event
        finally:
            stream.finish()
        if self._failure is not None:
            raise self._new_failure_error()

    def _want_events(self) -> None:
        self._delivery_wakeup.set()
        if self._open_protocol is not None and self._open_connector is not None:
            self._open_protocol.want_events()
            self._open_connector.wake_writer()

    async def set_aside(self) -> list[SetAside]:
        """Events that `apply` or a handler could not take, in their order."""
        return await self._call_store(self._store.load_set_aside)

    async def forget_set_aside(self, *committed_ids: int) -> None:
        """These need not be handed over any more, to nobody."""
        for number in committed_ids:
            check_committed_id(number, "committed_ids")
        self._set_aside_count = await self._call_store(self._store.forget_set_aside, committed_ids)
        self._report_wakeup.set()

    async def hand_over_set_aside(self) -> list[SetAside]:
        """Hands them over once more. Gives those that could not be taken again, with their errors.

        Not to be called by a handler of events.
        """
        remaining: list[SetAside] = []
        self._check_not_in_handler("hand_over_set_aside")
        async with self._delivery_lock:
            for delivery in await self.set_aside():
                error = await self._redeliver(delivery)
                if error is not None:
                    remaining.append(SetAside(delivery.handler, delivery.event, error))
        self._set_aside_count = len(remaining)
        self._report_wakeup.set()
        return remaining

    async def _redeliver(self, failed_delivery: SetAside) -> str | None:
        apply = self._apply if failed_delivery.handler == APPLY else None
        if apply is None:
            error = await self._handlers.redeliver(failed_delivery)
            if error is not None:
                return error
        return await self._call_store(self._store.redeliver, failed_delivery, apply)

    async def reached(self, committed_id: int) -> None:
        """Returns when everything up to this number has been handed over. Raises ClosedError if the client is closed.

        For what the application has submitted itself, once it knows its number, and wants to see in its own tables.
        """
        check_committed_id(committed_id, "committed_id")
        if self._cursor < committed_id:
            self._check_not_in_handler("reached")
        await self._wait_until(lambda: self._cursor >= committed_id)

    @property
    def _has_handlers(self) -> bool:
        return self._apply is not None or bool(self._handlers) or not self.partitions

    async def _deliver_all(self) -> None:
        while True:
            await self._delivery_wakeup.wait()
            self._delivery_wakeup.clear()
            # Without anybody who takes them, events wait: to let them pass would lose them.
            while self._has_handlers and self._has_undelivered():
                async with self._delivery_lock:
                    if self._has_undelivered():
                        await self._deliver_batch()
                self._connector.wake_writer()
                self._report_wakeup.set()

    def _has_undelivered(self) -> bool:
        protocol = self._protocol
        is_other_history = protocol.phase is EventsPhase.HISTORY_CHANGED
        return bool(protocol.ready_count) or (
            not is_other_history and (protocol.cursor != self._cursor or protocol.epoch != self._epoch)
        )

    async def _deliver_batch(self) -> None:
        protocol = self._protocol
        epoch = protocol.epoch
        events, cursor = protocol.take_events(self.limits.hand_over_events_max)
        failed: list[SetAside] = []
        delivered_count = 0
        started_s = time.monotonic()
        try:
            for event in events if self._handlers else ():
                if not self._has_handlers:  # the only loop was left
                    break
                if delivered_count and time.monotonic() - started_s > DELIVERY_S:
                    break  # what was handed over is saved before it goes on
                failures, is_delivered = await self._handlers.deliver(event)
                if not is_delivered and self._apply is None:  # it was left before it came to this one
                    break
                failed += failures
                delivered_count += 1
            else:
                delivered_count = len(events)
        finally:
            # Also if the client is being closed: what has been handed over must not come again.
            if delivered_count < len(events):
                protocol.return_events(events[delivered_count:])
                cursor = events[delivered_count - 1].committed_id if delivered_count else self._cursor
            await asyncio.shield(self._save_delivered(events[:delivered_count], cursor, epoch, failed))

    async def _save_delivered(self, events: list[Event], cursor: int, epoch: str, failed: list[SetAside]) -> None:
        while True:
            try:
                count = await self._call_store(self._store.save_delivery, events, cursor, epoch, self._apply, failed)
                break
            except StoreError as error:
                self._fail_store(error)
                if not self._is_closed:
                    await asyncio.sleep(STORE_PAUSE_S)
                if self._is_closed:
                    return
        self._store_error = None
        self._cursor, self._epoch = cursor, epoch
        if count >= 0:
            self._set_aside_count = count
        self._wake_waiters()

    # --- how it stands

    def status(self) -> Status:
        """How the client stands, for a user interface."""
        protocol, connector = self._open_protocol, self._open_connector
        if protocol is None or connector is None or self._is_closed or self._failure is not None:
            error = None if self._failure is None else describe_error(self._failure)
            counts = len(self._pending), self._rejected_count, self._set_aside_count
            return Status(ConnectionState.CLOSED, *counts, self._cursor, self._cursor, error)
        state = _STATE_BY_PHASE[protocol.phase]
        if protocol.phase is EventsPhase.ASIDE and not self._has_handlers:
            state = ConnectionState.LIVE  # there is nothing else that it could do
        is_refused = not connector.is_admitted and state in (ConnectionState.OFFLINE, ConnectionState.CONNECTING)
        if is_refused or protocol.read_error is not None:
            state = ConnectionState.REFUSED
        return Status(
            state=state,
            pending=len(self._pending),
            rejected=self._rejected_count,
            set_aside=self._set_aside_count,
            cursor=self._cursor,
            server_last_committed_id=max(protocol.last_committed_id, self._cursor),
            last_error=self._store_error
            or protocol.read_error
            or connector.last_error
            or protocol.blocked_writes.last_error,
        )

    def on_status(self, handler: Callable[[Status], Awaitable[None] | None]) -> None:
        """Calls the function whenever the client stands otherwise than before."""
        check_function(handler, "the handler", may_be_async=True)
        self._status_handlers.append(handler)

    def on_history_changed(self, handler: Callable[[HistoryChange], Awaitable[None] | None]) -> None:
        """Calls the function when the server's log is another one than before. Nothing goes on until `start_over`."""
        check_function(handler, "the handler", may_be_async=True)
        self._history_handlers.append(handler)

    @property
    def history_change(self) -> HistoryChange | None:
        """What is known about the server's other history, while the client waits for `start_over`."""
        return self._protocol.history_change

    async def start_over(self, since: int = 0, *, reset: Reset | None = None) -> None:
        """Goes on with the history that the server has now, from another point.

        `reset(connection)` (or that of the client) is called in the same transaction: there the application removes
        what it has made of the events behind `since`. Submissions in the outbox are sent as before. Not to be called
        by a handler of events.
        """
        self._check_open()
        self._check_not_in_handler("start_over")
        check_committed_id(since, "since")
        check_function(reset, "reset", may_be_async=False)
        # A handler may wait for an outcome that will come only behind this.
        if self._delivery_task is not None:
            self._stopped_tasks.add(self._delivery_task)
            await self._cancel_tasks([self._delivery_task])
        async with self._delivery_lock:
            change = self._protocol.history_change
            epoch = self._protocol.epoch if change is None else change.epoch
            await self._call_store(self._store.start_over, self.partitions, since, epoch, reset or self._reset)
            self._protocol.start_over(since, epoch)
            self._cursor, self._epoch, self._set_aside_count = since, epoch, 0
        self._stopped_tasks.clear()
        self._delivery_task = self._start_task(self._deliver_all)
        self._delivery_wakeup.set()
        self._connector.restart()
        self._wake_tasks()

    async def until_live(self) -> None:
        """Returns when the client has caught up, and all of it has been handed over (if somebody takes it)."""
        await self._wait_until(self._is_live)

    def _is_live(self) -> bool:
        if not self._has_handlers:
            return self._protocol.is_submitting
        return self._protocol.phase is EventsPhase.LIVE and not self._has_undelivered()

    async def until_settled(self) -> None:
        """Returns when every submission has its outcome."""
        await self._wait_until(lambda: not self._pending)

    def reconnect_now(self) -> None:
        """Ends the pause before the next attempt: the application knows that the network is back."""
        self._connector.skip_pause()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._check_open()
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
            self._check_open()

    def _wake_tasks(self) -> None:
        """Something has come, or has changed: wakes those whose work it is."""
        protocol = self._protocol
        if protocol.has_settled:
            self._outbox_wakeup.set()
        if self._has_undelivered():
            self._delivery_wakeup.set()
        self._wake_waiters()
        self._report_wakeup.set()

    async def _report_changes(self) -> None:
        """Tells the handlers of the application's how the client stands."""
        reported: Status | None = None
        change: HistoryChange | None = None
        while True:
            await self._report_wakeup.wait()
            self._report_wakeup.clear()
            status = self.status()
            if status != reported:
                reported = status
                for handler in list(self._status_handlers):
                    await EventHandlers.call(handler, get_handler_name(handler), status)
            if self.history_change is not None and self.history_change != change:
                logger.warning("the history on the server has changed: %s", self.history_change.message)
                for on_change in list(self._history_handlers):
                    await EventHandlers.call(on_change, get_handler_name(on_change), self.history_change)
            change = self.history_change

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- other

    def _fail_store(self, error: StoreError) -> None:
        if self._store_error is None:
            logger.warning("%s", error)
        self._store_error = str(error)
        self._report_wakeup.set()

    def _check_open(self) -> None:
        if self._is_closed or self._open_protocol is None or self._failure is not None:
            raise self._new_failure_error()

    def _check_not_in_handler(self, method: str) -> None:
        """Who is called with an event must not wait for the next one."""
        if asyncio.current_task() is self._delivery_task:
            raise RuntimeError(f"{method} must not be called by a handler of events: it would wait for itself")

    def _new_failure_error(self) -> OncelogError:
        if self._failure is None:
            return _client_closed_error()
        failed = ClientError(f"the client cannot go on: {describe_error(self._failure)}")
        failed.__cause__ = self._failure
        return failed

    async def _call_store(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None or (self._is_closed and self._open_protocol is None):
            raise _client_closed_error()
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, call_in_thread, function, *arguments)
        except RuntimeError as error:  # the thread has been ended
            raise _client_closed_error() from error
        return await called


def _client_closed_error() -> ClosedError:
    return ClosedError("the client is closed; what was submitted is kept, and sent when it is opened again")
