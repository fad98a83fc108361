"""The asyncio client: submissions that survive, and every event once, in one order.

    async with Client("http://127.0.0.1:7171", store="todo.db", partitions=["list/1"]) as client:
        pending = await client.submit({"type": "todo.added", "text": "milk"})
        async for event in client.events():
            print(event.committed_id, event.event)

Tasks share the work, and none of them waits for another: one stays connected (`connecting`), one keeps the outbox, one
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

from oncelog.client.cancelling import carried, is_being_cancelled
from oncelog.client.checking import (
    checked_client_id,
    checked_partitions,
    checked_store,
    demand_committed_id,
    demand_function,
)
from oncelog.client.connecting import Connecting
from oncelog.client.desk import end_store_thread
from oncelog.client.handlers import EventHandler, Handlers, named
from oncelog.client.limits import ClientLimits
from oncelog.client.pending import Draft, Pending, Prepared, prepare
from oncelog.client.protocol import Phase, Protocol
from oncelog.client.store import APPLY, Apply, ClientStore, Reset, described
from oncelog.client.tokens import Token, demand_token
from oncelog.client.values import Event, HistoryChange, Rejected, Rejection, SetAside, Settled, State, Status
from oncelog.client.wire import Transport, WebSocketTransport, normal_url
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
HAND_OVER_S: Final = 0.1
"""For so long events go to handlers before the cursor behind them is saved."""
_STATES: Final = {
    Phase.NONE: State.OFFLINE,
    Phase.CONNECTING: State.CONNECTING,
    Phase.ASIDE: State.CATCHING_UP,
    Phase.CATCHING_UP: State.CATCHING_UP,
    Phase.LIVE: State.LIVE,
    Phase.HISTORY_CHANGED: State.HISTORY_CHANGED,
}

T = TypeVar("T")


class _Accepting(NamedTuple):
    """Submissions on their way into the outbox, and who waits for that."""

    prepared: list[Prepared]
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
        self.url = normal_url(url)
        self.limits = limits or ClientLimits()
        if not isinstance(self.limits, ClientLimits):
            raise SettingsError(f"limits must be ClientLimits, not {limits!r}")
        self.partitions = checked_partitions(partitions)
        self._wanted_id = checked_client_id(client_id)
        demand_token(token)
        demand_function(apply, "apply", may_be_async=False)
        demand_function(reset, "reset", may_be_async=False)
        self._token = token
        self._apply = apply
        self._reset = reset
        self._store = ClientStore(checked_store(store))
        self._transport = transport or WebSocketTransport(self.url, self.limits, headers, tls)
        self._chance = chance or random.Random()  # noqa: S311 - for pauses
        self._handlers = Handlers()
        self._status_handlers: list[Callable[[Status], Awaitable[None] | None]] = []
        self._history_handlers: list[Callable[[HistoryChange], Awaitable[None] | None]] = []
        self._open_protocol: Protocol | None = None
        self._open_connecting: Connecting | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._accepting: list[_Accepting] = []
        self._waiting: dict[str, Pending] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._cursor = 0
        self._epoch = ""
        self._rejected = 0
        self._set_aside = 0
        self._store_error: str | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._handing_task: asyncio.Task[None] | None = None
        self._ended_on_purpose: set[asyncio.Task[None]] = set()
        self._outbox_bytes = 0
        self._outbox_work = asyncio.Event()
        self._events_work = asyncio.Event()
        self._report_work = asyncio.Event()
        self._handing = asyncio.Lock()

    # --- opening and closing

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise ClosedError("a client is opened once; make another one")
        self._thread = ThreadPoolExecutor(1, "oncelog-client")
        try:
            kept = await self._in_store(self._store.open, self._wanted_id, self.partitions, self._reset)
        except BaseException:
            self._is_closed = True
            self._thread.submit(self._store.close)  # whoever gives up waiting leaves a thread that opens it
            self._thread.shutdown()
            raise
        self._cursor, self._epoch = kept.cursor, kept.epoch
        self._rejected, self._set_aside = kept.rejected, kept.set_aside
        protocol = self._open_protocol = Protocol(kept.client_id, self.partitions, kept.cursor, kept.epoch)
        protocol.wants_events = self._has_takers
        self._waiting = {entry.id: Pending(entry) for entry in kept.outbox}
        self._outbox_bytes = sum(len(entry.body) for entry in kept.outbox)
        protocol.offer(kept.outbox)
        self._open_connecting = Connecting(
            protocol, self._transport, self._token, self.limits, self._chance, self._look_around
        )
        for work in (self._open_connecting.run, self._keep_outbox, self._report_all):
            self._begin(work)
        self._handing_task = self._begin(self._hand_over_all)
        return self

    def _begin(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work), name=f"oncelog client: {work.__name__}")
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
        if self._closing is None:
            self._is_closed = True
            self._closing = asyncio.create_task(self._close(self._thread), name="oncelog client: close")
        if asyncio.current_task() not in self._tasks:
            await asyncio.shield(self._closing)

    async def _close(self, thread: ThreadPoolExecutor) -> None:
        try:
            self._handlers.close()
            await self._end(self._tasks)
            await self._transport.close()
        finally:
            self._tell_waiters(_closed())
            await end_store_thread(thread, self._store.close)

    @staticmethod
    async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell_waiters(self, error: OncelogError) -> None:
        """Nothing more will come."""
        accepting, self._accepting = self._accepting, []
        for group in accepting:
            if not group.accepted.done():
                group.accepted.set_exception(error)
                group.accepted.exception()  # whoever submitted may have gone
        for pending in self._waiting.values():
            pending.settle(error)
        self._wake_waiters()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """What nobody has foreseen must not leave the application waiting."""
        try:
            await work()
        except asyncio.CancelledError:
            is_meant = self._is_closed or self._failure or asyncio.current_task() in self._ended_on_purpose
            if is_being_cancelled() and is_meant:
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
        self._tell_waiters(self._why_not())

    @property
    def client_id(self) -> str:
        """As the server knows it."""
        return self._protocol.client_id

    @property
    def _protocol(self) -> Protocol:
        if self._open_protocol is None:
            raise ClosedError("the client is not open: use `async with`")
        return self._open_protocol

    @property
    def _connecting(self) -> Connecting:
        if self._open_connecting is None:
            raise ClosedError("the client is not open: use `async with`")
        return self._open_connecting

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
        self._demand_open()
        pending: dict[int, Pending] = {}
        new: dict[str, tuple[Prepared, Pending]] = {}
        for place, draft in enumerate(drafts):
            prepared = prepare(draft, self._partitions_of(draft.partitions), self.limits.body_bytes_max)
            known = self._waiting.get(prepared.id) or new.get(prepared.id, (None, None))[1]
            if known is None:
                known = Pending(prepared)
                new[prepared.id] = (prepared, known)
            elif not known.says_the_same(prepared):
                raise IdReusedError(f"another event waits under the id {prepared.id}")
            pending[place] = known
        if len(self._waiting) + len(new) > self.limits.outbox_events_max:
            raise LimitExceededError("outbox_events_max", self.limits.outbox_events_max)
        size = sum(len(prepared.body) for prepared, _ in new.values())
        if self._outbox_bytes + size > self.limits.outbox_bytes_max:
            raise LimitExceededError("outbox_bytes_max", self.limits.outbox_bytes_max)
        await self._accepted([prepared for prepared, _ in new.values()], {id: one for id, (_, one) in new.items()})  # noqa: A001
        for one in pending.values():
            one.demand_taken()
        return list(pending.values())

    async def _accepted(self, prepared: list[Prepared], pending: Mapping[str, Pending]) -> None:
        """Returns when they are on the disk, and with them those before them that may say the same."""
        accepting = _Accepting(prepared, asyncio.get_running_loop().create_future())
        self._waiting.update(pending)
        self._outbox_bytes += sum(len(one.body) for one in prepared)
        self._accepting.append(accepting)
        self._outbox_work.set()
        # Whoever gives up waiting does not take it back: it may be on the disk already.
        await asyncio.shield(accepting.accepted)

    def _partitions_of(self, partitions: Sequence[str] | None) -> Sequence[str]:
        if partitions is not None:
            return partitions
        if len(self.partitions) != 1:
            raise ValueError(f"partitions must be given: the client follows {len(self.partitions)}, not one")
        return list(self.partitions)

    def pending(self) -> list[Pending]:
        """All submissions without an outcome, those of an earlier run too."""
        return list(self._waiting.values())

    async def rejected(self) -> list[Rejection]:
        """What the server has refused for good, oldest first, until `forget_rejected`."""
        return await self._in_store(self._store.rejected)

    async def forget_rejected(self, *ids: UUID | str) -> None:
        """The application has seen to these."""
        texts = [str(one).lower() for one in ids]
        self._rejected = await self._in_store(self._store.forget_rejected, texts)
        self._report_work.set()

    async def forget_all_rejected(self) -> None:
        """The application has seen to all."""
        self._rejected = await self._in_store(self._store.forget_rejected, None)
        self._report_work.set()

    async def _keep_outbox(self) -> None:
        """Saves what is submitted and what is settled, together: while one is being saved others gather."""
        settled: list[Settled] = []
        while True:
            await self._outbox_work.wait()
            self._outbox_work.clear()
            accepting, self._accepting = self._accepting, []
            if settled:  # they could not be saved with the last ones; on a full disk, that may be easier alone
                self._accepting, accepting = accepting + self._accepting, []
                self._outbox_work.set()
            settled += self._protocol.take_settled()
            try:
                entries = self._store.numbered([one for group in accepting for one in group.prepared])
                await self._in_store(self._store.write_outbox, entries, settled, time.time_ns() // 1_000_000)
            except StoreError as error:
                self._not_accepted(accepting, error)
                self._fail_store(error)
                await asyncio.sleep(STORE_PAUSE_S)
                self._outbox_work.set()
                continue
            except BaseException as error:
                self._not_accepted(accepting, error if isinstance(error, Exception) else _closed())
                raise
            self._store_error = None
            self._protocol.offer(entries)
            self._connecting.sent_soon()
            for group in accepting:
                if not group.accepted.done():
                    group.accepted.set_result(None)
            self._settle(settled)
            settled = []
            self._look_around()

    def _not_accepted(self, accepting: Sequence[_Accepting], error: Exception) -> None:
        for group in accepting:
            for prepared in group.prepared:
                pending = self._waiting.pop(prepared.id, None)
                if pending is not None:
                    self._outbox_bytes -= len(prepared.body)
                    pending.settle(error)
            if not group.accepted.done():
                group.accepted.set_exception(error)
                group.accepted.exception()  # whoever submitted may have gone

    def _settle(self, settled: Sequence[Settled]) -> None:
        for one in settled:
            if isinstance(one.outcome, Rejected):
                self._rejected += 1
                logger.warning("%s was rejected: %s", one.entry.id, one.outcome)
            pending = self._waiting.pop(one.entry.id, None)
            if pending is not None:
                self._outbox_bytes -= len(one.entry.body)
                pending.settle(one.outcome)

    # --- events

    def on_event(self, handler: EventHandler, *, name: str | None = None) -> EventHandler:
        """Calls the function with every event, in order; it may be async. Can be used as a decorator.

        If it raises, the event is set aside for it (`set_aside`), and goes to the others. After a crash an event may
        come again that it had already been called with: for once and only once, use `apply`.
        """
        demand_function(handler, "the handler", may_be_async=True)
        called = name or named(handler)
        if called == APPLY:
            raise ValueError(f"{APPLY!r} is the name of what is called in the transaction: give this one another name")
        self._handlers.add(handler, called)
        self._want_events()
        return handler

    async def events(self) -> AsyncIterator[Event]:
        """Every event from the cursor on, in order. One counts as handed over when the next one is asked for.

        If the loop is left, or its body raises, the last one comes again: to the next loop, or the next time.
        """
        self._demand_open()
        stream = self._handlers.stream()
        self._want_events()
        try:
            async for event in stream:
                yield event
        finally:
            stream.finish()
        if self._failure is not None:
            raise self._why_not()

    def _want_events(self) -> None:
        self._events_work.set()
        if self._open_protocol is not None and self._open_connecting is not None:
            self._open_protocol.want_events()
            self._open_connecting.sent_soon()

    async def set_aside(self) -> list[SetAside]:
        """Events that `apply` or a handler could not take, in their order."""
        return await self._in_store(self._store.set_aside)

    async def forget_set_aside(self, *committed_ids: int) -> None:
        """These need not be handed over any more, to nobody."""
        for number in committed_ids:
            demand_committed_id(number, "committed_ids")
        self._set_aside = await self._in_store(self._store.forget_set_aside, committed_ids)
        self._report_work.set()

    async def hand_over_set_aside(self) -> list[SetAside]:
        """Hands them over once more. Gives those that could not be taken again, with their errors.

        Not to be called by a handler of events.
        """
        left: list[SetAside] = []
        self._demand_no_handler("hand_over_set_aside")
        async with self._handing:
            for one in await self.set_aside():
                error = await self._handed_over_again(one)
                if error is not None:
                    left.append(SetAside(one.handler, one.event, error))
        self._set_aside = len(left)
        self._report_work.set()
        return left

    async def _handed_over_again(self, one: SetAside) -> str | None:
        apply = self._apply if one.handler == APPLY else None
        if apply is None:
            error = await self._handlers.hand_over_again(one)
            if error is not None:
                return error
        return await self._in_store(self._store.apply_again, one, apply)

    async def reached(self, committed_id: int) -> None:
        """Returns when everything up to this number has been handed over. Raises ClosedError if the client is closed.

        For what the application has submitted itself, once it knows its number, and wants to see in its own tables.
        """
        demand_committed_id(committed_id, "committed_id")
        if self._cursor < committed_id:
            self._demand_no_handler("reached")
        await self._until(lambda: self._cursor >= committed_id)

    @property
    def _has_takers(self) -> bool:
        return self._apply is not None or bool(self._handlers) or not self.partitions

    async def _hand_over_all(self) -> None:
        while True:
            await self._events_work.wait()
            self._events_work.clear()
            # Without anybody who takes them, events wait: to let them pass would lose them.
            while self._has_takers and self._is_something_new():
                async with self._handing:
                    if self._is_something_new():
                        await self._hand_over_some()
                self._connecting.sent_soon()
                self._report_work.set()

    def _is_something_new(self) -> bool:
        protocol = self._protocol
        is_other_history = protocol.phase is Phase.HISTORY_CHANGED
        return bool(protocol.ready) or (
            not is_other_history and (protocol.cursor != self._cursor or protocol.epoch != self._epoch)
        )

    async def _hand_over_some(self) -> None:
        protocol = self._protocol
        epoch = protocol.epoch
        events, cursor = protocol.take_events(self.limits.hand_over_events_max)
        failed: list[SetAside] = []
        taken = 0
        began = time.monotonic()
        try:
            for event in events if self._handlers else ():
                if not self._has_takers:  # the only loop was left
                    break
                if taken and time.monotonic() - began > HAND_OVER_S:
                    break  # what was handed over is saved before it goes on
                not_taken, is_taken = await self._handlers.hand_over(event)
                if not is_taken and self._apply is None:  # it was left before it came to this one
                    break
                failed += not_taken
                taken += 1
            else:
                taken = len(events)
        finally:
            # Also if the client is being closed: what has been handed over must not come again.
            if taken < len(events):
                protocol.put_back(events[taken:])
                cursor = events[taken - 1].committed_id if taken else self._cursor
            await asyncio.shield(self._save_handed_over(events[:taken], cursor, epoch, failed))

    async def _save_handed_over(self, events: list[Event], cursor: int, epoch: str, failed: list[SetAside]) -> None:
        while True:
            try:
                count = await self._in_store(self._store.hand_over, events, cursor, epoch, self._apply, failed)
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
            self._set_aside = count
        self._wake_waiters()

    # --- how it stands

    def status(self) -> Status:
        """How the client stands, for a user interface."""
        protocol, connecting = self._open_protocol, self._open_connecting
        if protocol is None or connecting is None or self._is_closed or self._failure is not None:
            error = None if self._failure is None else described(self._failure)
            counts = len(self._waiting), self._rejected, self._set_aside
            return Status(State.CLOSED, *counts, self._cursor, self._cursor, error)
        state = _STATES[protocol.phase]
        if protocol.phase is Phase.ASIDE and not self._has_takers:
            state = State.LIVE  # there is nothing else that it could do
        is_refused = not connecting.is_let_in and state in (State.OFFLINE, State.CONNECTING)
        if is_refused or protocol.refused_reading is not None:
            state = State.REFUSED
        return Status(
            state=state,
            pending=len(self._waiting),
            rejected=self._rejected,
            set_aside=self._set_aside,
            cursor=self._cursor,
            server_last_committed_id=max(protocol.last_committed_id, self._cursor),
            last_error=self._store_error
            or protocol.refused_reading
            or connecting.last_error
            or protocol.hold_ups.last_error,
        )

    def on_status(self, handler: Callable[[Status], Awaitable[None] | None]) -> None:
        """Calls the function whenever the client stands otherwise than before."""
        demand_function(handler, "the handler", may_be_async=True)
        self._status_handlers.append(handler)

    def on_history_changed(self, handler: Callable[[HistoryChange], Awaitable[None] | None]) -> None:
        """Calls the function when the server's log is another one than before. Nothing goes on until `start_over`."""
        demand_function(handler, "the handler", may_be_async=True)
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
        self._demand_open()
        self._demand_no_handler("start_over")
        demand_committed_id(since, "since")
        demand_function(reset, "reset", may_be_async=False)
        # A handler may wait for an outcome that will come only behind this.
        if self._handing_task is not None:
            self._ended_on_purpose.add(self._handing_task)
            await self._end([self._handing_task])
        async with self._handing:
            change = self._protocol.history_change
            epoch = self._protocol.epoch if change is None else change.epoch
            await self._in_store(self._store.start_over, self.partitions, since, epoch, reset or self._reset)
            self._protocol.start_over(since, epoch)
            self._cursor, self._epoch, self._set_aside = since, epoch, 0
        self._ended_on_purpose.clear()
        self._handing_task = self._begin(self._hand_over_all)
        self._events_work.set()
        self._connecting.restart()
        self._look_around()

    async def until_live(self) -> None:
        """Returns when the client has caught up, and all of it has been handed over (if somebody takes it)."""
        await self._until(self._is_live)

    def _is_live(self) -> bool:
        if not self._has_takers:
            return self._protocol.is_submitting
        return self._protocol.phase is Phase.LIVE and not self._is_something_new()

    async def until_settled(self) -> None:
        """Returns when every submission has its outcome."""
        await self._until(lambda: not self._waiting)

    def reconnect_now(self) -> None:
        """Ends the pause before the next attempt: the application knows that the network is back."""
        self._connecting.hurry()

    async def _until(self, condition: Callable[[], bool]) -> None:
        self._demand_open()
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
            self._demand_open()

    def _look_around(self) -> None:
        """Something has come, or has changed: wakes those whose work it is."""
        protocol = self._protocol
        if protocol.has_settled:
            self._outbox_work.set()
        if self._is_something_new():
            self._events_work.set()
        self._wake_waiters()
        self._report_work.set()

    async def _report_all(self) -> None:
        """Tells the handlers of the application's how the client stands."""
        told: Status | None = None
        change: HistoryChange | None = None
        while True:
            await self._report_work.wait()
            self._report_work.clear()
            status = self.status()
            if status != told:
                told = status
                for handler in list(self._status_handlers):
                    await Handlers.call(handler, named(handler), status)
            if self.history_change is not None and self.history_change != change:
                logger.warning("the history on the server has changed: %s", self.history_change.message)
                for on_change in list(self._history_handlers):
                    await Handlers.call(on_change, named(on_change), self.history_change)
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
        self._report_work.set()

    def _demand_open(self) -> None:
        if self._is_closed or self._open_protocol is None or self._failure is not None:
            raise self._why_not()

    def _demand_no_handler(self, method: str) -> None:
        """Who is called with an event must not wait for the next one."""
        if asyncio.current_task() is self._handing_task:
            raise RuntimeError(f"{method} must not be called by a handler of events: it would wait for itself")

    def _why_not(self) -> OncelogError:
        if self._failure is None:
            return _closed()
        failed = ClientError(f"the client cannot go on: {described(self._failure)}")
        failed.__cause__ = self._failure
        return failed

    async def _in_store(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None or (self._is_closed and self._open_protocol is None):
            raise _closed()
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, carried, function, *arguments)
        except RuntimeError as error:  # the thread has been ended
            raise _closed() from error
        return await called


def _closed() -> ClosedError:
    return ClosedError("the client is closed; what was submitted is kept, and sent when it is opened again")
