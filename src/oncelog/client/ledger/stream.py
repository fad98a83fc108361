"""The writes of one scope, in asyncio: saves what the protocol says, sends what it says, and tells those who wait.

One task saves, and while it does others gather for the next time; each call to the server is a task of its own.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from oncelog.client.cancelling import is_being_cancelled
from oncelog.client.ledger.entries import Call, Entry, Gap, Settled, Unknown
from oncelog.client.ledger.errors import ForgottenError
from oncelog.client.ledger.limits import LedgerLimits
from oncelog.client.ledger.protocol import Protocol
from oncelog.client.ledger.store import KeptScope, LedgerStore
from oncelog.client.ledger.values import Outcome, PendingWrite, Recovered
from oncelog.client.patience import pauses_s
from oncelog.core.operations import Operation
from oncelog.core.transactions import check_operations, transaction_body
from oncelog.errors import (
    CanonicalError,
    ClientError,
    ClosedError,
    IdReusedError,
    LimitExceededError,
    LostError,
    OncelogError,
    ServerRefusedError,
    StoreError,
)

if TYPE_CHECKING:
    from oncelog.client.ledger.wire import Wire

logger: Final = logging.getLogger("oncelog.client.ledger")

STORE_PAUSE_S: Final = 0.5
"""Before the next attempt to write to a file that cannot be written."""
LOOK_S: Final = 0.1
"""How often is looked whether a server that was away is back. Nothing is sent for that."""
InStore = Callable[..., Awaitable[Any]]
"""Calls a function of the store's in its thread."""


class Stream:
    """One for a scope."""

    def __init__(  # noqa: PLR0913 - its hands, by name
        self,
        organization: str,
        vault: str,
        kept: KeptScope,
        *,
        store: LedgerStore,
        in_store: InStore,
        wire: "Wire",
        limits: LedgerLimits,
        chance: random.Random,
    ) -> None:
        self._names = (organization, vault)
        self._scope_id = kept.id
        self._store = store
        self._in_store = in_store
        self._wire = wire
        self._limits = limits
        self._chance = chance
        self._protocol = Protocol(kept.state, kept.pending, in_flight_max=limits.in_flight_max)
        self._untold = {entry.number: entry for entry in kept.pending}
        self._by_key = {entry.key: entry for entry in kept.pending}
        self._bytes = sum(len(entry.body) for entry in kept.pending)
        self._recovering = {entry.number: entry for entry in kept.pending}
        self._recovered: dict[int, Recovered] = {}
        self._has_recovered = False
        self._denied: dict[int, ServerRefusedError] = {}
        self._waiters: dict[int, asyncio.Future[Outcome | None]] = {}
        self._watchers: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pauses: Iterator[float] | None = None
        self._retry_after_ms = 0
        self._answered_at = time.monotonic()
        self._is_closing = False
        self._is_done = False
        self._failure: BaseException | None = None
        self.last_error: str | None = None
        """Why the last call came to nothing, as long as none has succeeded since."""
        self._keeper = asyncio.create_task(self._guarded(self._keep()), name="oncelog ledger: keep")
        self._look_around()

    # --- writing

    async def write(self, operations: tuple[Operation, ...], key: bytes) -> Outcome:
        """Waits for the outcome, however long that takes. Who gives up waiting does not take it back."""
        self._demand_open()
        body = self._checked(operations)
        self._demand_remembered()
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._submit(key, operations, body)
        elif entry.body != body:
            raise IdReusedError(f"another write waits under the key {UUID(bytes=key)}")
        outcome = await asyncio.shield(self._waiter(entry))
        if outcome is None:
            raise ClientError(f"the application withdrew the write {UUID(bytes=key)}")
        return outcome

    def _checked(self, operations: tuple[Operation, ...]) -> bytes:
        """Raises CanonicalError, or LimitExceededError."""
        limits = self._limits
        for index, operation in enumerate(operations):
            if not isinstance(operation, Operation):
                raise CanonicalError(f"operations[{index}]", f"must be an operation, not {type(operation).__name__}")
        check_operations(operations, limits.value_bytes_max)
        body = transaction_body(operations)
        if self._wire.size(operations) > limits.transaction_bytes_max:
            raise LimitExceededError("transaction_bytes_max", limits.transaction_bytes_max)
        return body

    def _submit(self, key: bytes, operations: tuple[Operation, ...], body: bytes) -> Entry:
        limits, protocol = self._limits, self._protocol
        if len(protocol) >= limits.pending_writes_max:
            raise LimitExceededError("pending_writes_max", limits.pending_writes_max)
        if self._bytes + len(body) > limits.pending_bytes_max:
            raise LimitExceededError("pending_bytes_max", limits.pending_bytes_max)
        if time.monotonic() - self._answered_at > limits.idle_ms / 1000:
            protocol.ask()
        entry = protocol.submit(key, operations, body, _now_ms())
        self._untold[entry.number] = self._by_key[key] = entry
        self._bytes += len(body)
        self._look_around()
        return entry

    def _waiter(self, entry: Entry) -> "asyncio.Future[Outcome | None]":
        waiter = self._waiters.get(entry.number)
        if waiter is None:
            waiter = self._waiters[entry.number] = asyncio.get_running_loop().create_future()
        return waiter

    # --- how it stands

    def pending(self) -> list[PendingWrite]:
        """Writes without an outcome, in their order."""
        return [_pending(entry) for entry in self._protocol.pending]

    async def recovered(self) -> list[Recovered]:
        """Waits until all writes of an earlier run have outcomes, and gives them in their order."""
        while True:
            self._demand_open()
            self._demand_remembered()
            if not self._recovering and (self._has_recovered or not self._protocol.is_settling):
                self._has_recovered = True
                return [one for _, one in sorted(self._recovered.items())]
            refusal = next(iter(self._denied.values()), None) or self._protocol.refusal
            if refusal is not None:
                raise refusal
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await watcher

    async def resume(self, resend: bool | Collection[UUID]) -> list[Recovered]:
        """The application has decided what becomes of the pending writes. Gives what became of those sent again."""
        self._demand_open()
        if self._protocol.forgotten is None:
            return []
        entries = list(self._protocol.pending)
        if isinstance(resend, bool):
            keys = {entry.key for entry in entries} if resend else set()
        else:
            keys = {one.bytes for one in resend}
        chosen = [entry for entry in entries if entry.key in keys]
        waiters = [self._waiter(entry) for entry in chosen]
        self._protocol.resume(keys)
        self._look_around()
        outcomes = await asyncio.gather(*map(asyncio.shield, waiters), return_exceptions=True)
        self._demand_remembered()
        return [_recovered(entry, outcome) for entry, outcome in zip(chosen, outcomes, strict=True)]

    async def withdraw(self, key: bytes) -> bool:
        """Take a pending write back; see `LedgerScope.withdraw`."""
        self._demand_open()
        entry = self._by_key.get(key)
        if entry is None or entry.number not in self._untold:
            raise ClientError(f"no pending write has the key {UUID(bytes=key)}")
        waiter = self._waiter(entry)
        is_final = self._protocol.withdraw(entry)
        if self._timer is not None:  # the pause may have been for this write
            self._timer.cancel()
            self._release()
        self._look_around()
        await asyncio.shield(waiter)
        return is_final

    def _demand_remembered(self) -> None:
        """Raises ForgottenError."""
        forgotten = self._protocol.forgotten
        if forgotten is not None:
            raise ForgottenError(forgotten.last, forgotten.server_last, tuple(self.pending()))

    def _demand_open(self) -> None:
        if self._is_closing or self._failure is not None:
            raise self._why_not()

    def _why_not(self) -> OncelogError:
        if self._failure is None:
            return closed()
        failed = ClientError(f"the ledger's client cannot go on: {type(self._failure).__name__}: {self._failure}")
        failed.__cause__ = self._failure
        return failed

    # --- saving

    async def _keep(self) -> None:
        protocol = self._protocol
        while True:
            await self._work.wait()
            self._work.clear()
            while (changes := protocol.take_changes()) is not None:
                try:
                    await self._in_store(self._store.save, self._scope_id, changes)
                except StoreError as error:
                    self._tell_withdrawn(protocol.not_saved(changes), error)
                    if self._is_done:
                        return
                    logger.warning("%s", error)
                    self.last_error = str(error)
                    await asyncio.sleep(STORE_PAUSE_S)
                    continue
                protocol.saved(changes)
                for settled in changes.settled:
                    self._tell(settled)
                self._look_around()
            if self._is_done:
                return

    def _tell_withdrawn(self, entries: list[Entry], error: StoreError) -> None:
        for entry in entries:
            self._forget(entry)
            self._fail_waiter(entry, error)

    def _tell(self, settled: Settled) -> None:
        """Once, though one that was written is told before it is saved and again when it is."""
        entry, outcome = settled
        if not self._forget(entry):
            return
        self._denied.pop(entry.number, None)
        if self._recovering.pop(entry.number, None) is not None:
            self._recovered[entry.number] = _recovered(entry, outcome)
        if isinstance(outcome, Exception):
            self._fail_waiter(entry, outcome)
            return
        waiter = self._waiters.pop(entry.number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(outcome)

    def _forget(self, entry: Entry) -> bool:
        """False if it was before."""
        if self._untold.pop(entry.number, None) is not entry:
            return False
        self._bytes -= len(entry.body)
        if self._by_key.get(entry.key) is entry:  # its key may have been used again since
            del self._by_key[entry.key]
        return True

    def _fail_waiter(self, entry: Entry, error: Exception) -> None:
        waiter = self._waiters.pop(entry.number, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # whoever waited may have gone

    # --- sending

    def _look_around(self) -> None:
        """Something has come, or has changed: does what is to be done now."""
        if not self._is_closing and self._failure is None:
            self._send_all()
        protocol = self._protocol
        for settled in protocol.take_written():
            self._tell(settled)
        for entry, error in protocol.take_told():
            self._denied[entry.number] = error
            self._fail_waiter(entry, error)
        if protocol.forgotten is not None:
            self._tell_forgotten()
        if protocol.was_adopted:
            protocol.was_adopted = False
            logger.warning("the server had forgotten this client in %s: its sequence begins anew", self._names)
        self._work.set()
        self._wake_watchers()

    def _send_all(self) -> None:
        protocol = self._protocol
        for call in protocol.next_calls(_now_ms()):
            self._begin(self._send(call))
        if protocol.take_question():
            self._begin(self._ask())
        if protocol.is_held and self._timer is None:
            self._hold()

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _tell_forgotten(self) -> None:
        forgotten = self._protocol.forgotten
        if forgotten is None or not self._waiters:
            return
        error = ForgottenError(forgotten.last, forgotten.server_last, tuple(self.pending()))
        for entry in list(self._protocol.pending):
            self._fail_waiter(entry, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(work), name="oncelog ledger: call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, call: Call) -> None:
        answer = await self._wire.write(*self._names, call)
        if isinstance(answer, Unknown):
            self._not_answered(answer.reason, answer.retry_after_ms)
        elif not isinstance(answer, Gap) or self.last_error is None:
            # While one is not taken for now those that were sent behind it find a gap: that is no end of it.
            self._is_answered()
        self._protocol.answered(call, answer)
        self._look_around()

    async def _ask(self) -> None:
        try:
            state = await self._wire.client_state(*self._names, is_patient=False)
        except LostError as error:
            self._not_answered(str(error))
            self._protocol.state_lost()
        except ServerRefusedError as error:
            self._not_answered(str(error), error.retry_after_ms)
            if error.is_transient:
                self._protocol.state_lost()
            else:
                self._protocol.state_denied(error)
        else:
            self._is_answered()
            self._denied.clear()
            self._protocol.state_told(state, _now_ms())
        self._look_around()

    def _is_answered(self) -> None:
        if self.last_error is not None:
            logger.info("answered again")
        self._pauses = self.last_error = None
        self._answered_at = time.monotonic()

    def _not_answered(self, reason: str, retry_after_ms: int = 0) -> None:
        if self.last_error is None:
            logger.warning("not answered, and to be sent again: %s", reason)
        self.last_error = reason
        self._retry_after_ms = max(self._retry_after_ms, retry_after_ms)

    def _hold(self) -> None:
        """Until the next attempt. If the server is away that comes as soon as it is back.

        But not at once: a server that ends whenever it is asked would be asked all the time.
        """
        loop = asyncio.get_running_loop()
        limits = self._limits
        if self._pauses is None:
            self._pauses = pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._chance)
        pause_s = next(self._pauses)
        least_ms, self._retry_after_ms = self._retry_after_ms, 0
        if self._protocol.is_refused:
            least_ms = max(least_ms, limits.refused_pause_ms_min)
        least_s = least_ms * self._chance.uniform(1, 1.2) / 1000
        until_s = loop.time() + max(pause_s, least_s)
        if not self._wire.is_connected:
            pause_s = min(pause_s, next(pauses_s(limits.reconnect_ms_max, limits.reconnect_ms_max, self._chance)))
        self._timer = loop.call_later(max(pause_s, least_s), self._look_for_server, until_s)

    def _look_for_server(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        left_s = until_s - loop.time()
        if left_s > 0 and not self._wire.is_connected:
            self._timer = loop.call_later(min(LOOK_S, left_s), self._look_for_server, until_s)
        else:
            self._release()

    def _release(self) -> None:
        self._timer = None
        self._protocol.release()
        self._look_around()

    # --- ending

    async def close(self) -> None:
        """Waits for the answers of what has been sent, but not long; what has none stays pending in the file."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.close_timeout_ms / 1000)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._is_done = True
        self._work.set()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self._end_waiting()

    def _end_waiting(self) -> None:
        for entry in list(self._protocol.pending):
            self._fail_waiter(entry, self._why_not())
        self._wake_watchers()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """What nobody has foreseen must not leave the application waiting."""
        try:
            await work
        except asyncio.CancelledError:
            if self._is_closing and is_being_cancelled():
                raise
            self._fail(ClientError("a task of the client's was cancelled by somebody else"))
        except Exception as error:  # noqa: BLE001 - it is told to everybody
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        logger.error("the ledger's client cannot go on", exc_info=error)
        self._failure = error
        self._end_waiting()


def closed() -> ClosedError:
    """What is told to those who come too late, or wait too long."""
    return ClosedError("the ledger's client is closed; what is pending is kept, and sent when it is opened again")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _pending(entry: Entry) -> PendingWrite:
    return PendingWrite(UUID(bytes=entry.key), entry.sequence, entry.operations)


def _recovered(entry: Entry, outcome: Outcome | BaseException | None) -> Recovered:
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome
    return Recovered(UUID(bytes=entry.key), entry.operations, outcome)
