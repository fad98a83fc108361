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

from oncelog.client.ledger.entries import NoReply, QueuedWrite, SequenceGap, SettledWrite, WriteCall
from oncelog.client.ledger.errors import ForgottenError
from oncelog.client.ledger.limits import LedgerLimits
from oncelog.client.ledger.protocol import LedgerProtocol
from oncelog.client.ledger.store import LedgerStore, StoredScope
from oncelog.client.ledger.values import Outcome, PendingWrite, Recovered
from oncelog.client.runtime.backoff import iterate_pauses_s
from oncelog.client.runtime.cancellation import is_being_cancelled
from oncelog.core.operations import Operation
from oncelog.core.transactions import check_operations, encode_operations
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
    from oncelog.client.ledger.transport import LedgerTransport

logger: Final = logging.getLogger("oncelog.client.ledger")

STORE_PAUSE_S: Final = 0.5
"""Before the next attempt to write to a file that cannot be written."""
CONNECTION_POLL_S: Final = 0.1
"""How often is looked whether a server that was away is back. Nothing is sent for that."""
RunInStore = Callable[..., Awaitable[Any]]
"""Calls a function of the store's in its thread."""


class WriteStream:
    """One for a scope."""

    def __init__(  # noqa: PLR0913 - its hands, by name
        self,
        organization: str,
        vault: str,
        stored: StoredScope,
        *,
        store: LedgerStore,
        run_in_store: RunInStore,
        transport: "LedgerTransport",
        limits: LedgerLimits,
        random_source: random.Random,
    ) -> None:
        self._names = (organization, vault)
        self._scope_id = stored.id
        self._store = store
        self._run_in_store = run_in_store
        self._transport = transport
        self._limits = limits
        self._random = random_source
        self._protocol = LedgerProtocol(stored.state, stored.pending, in_flight_max=limits.in_flight_max)
        self._unreported = {entry.number: entry for entry in stored.pending}
        self._by_key = {entry.key: entry for entry in stored.pending}
        self._bytes = sum(len(entry.body) for entry in stored.pending)
        self._recovering = {entry.number: entry for entry in stored.pending}
        self._recovered_writes: dict[int, Recovered] = {}
        self._has_recovered = False
        self._denied: dict[int, ServerRefusedError] = {}
        self._waiters: dict[int, asyncio.Future[Outcome | None]] = {}
        self._watchers: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._save_event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._pauses: Iterator[float] | None = None
        self._retry_after_ms = 0
        self._answered_at = time.monotonic()
        self._is_closing = False
        self._is_done = False
        self._failure: BaseException | None = None
        self.last_error: str | None = None
        """Why the last call came to nothing, as long as none has succeeded since."""
        self._save_task = asyncio.create_task(self._run_guarded(self._save_changes()), name="oncelog ledger: save")
        self._advance()

    # --- writing

    async def write(self, operations: tuple[Operation, ...], key: bytes) -> Outcome:
        """Waits for the outcome, however long that takes. Who gives up waiting does not take it back."""
        self._check_open()
        body = self._encode_body(operations)
        self._check_remembered()
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._submit(key, operations, body)
        elif entry.body != body:
            raise IdReusedError(f"another write waits under the key {UUID(bytes=key)}")
        outcome = await asyncio.shield(self._get_waiter(entry))
        if outcome is None:
            raise ClientError(f"the application withdrew the write {UUID(bytes=key)}")
        return outcome

    def _encode_body(self, operations: tuple[Operation, ...]) -> bytes:
        """Raises CanonicalError, or LimitExceededError."""
        limits = self._limits
        for index, operation in enumerate(operations):
            if not isinstance(operation, Operation):
                raise CanonicalError(f"operations[{index}]", f"must be an operation, not {type(operation).__name__}")
        check_operations(operations, limits.value_bytes_max)
        body = encode_operations(operations)
        if self._transport.compute_size(operations) > limits.transaction_bytes_max:
            raise LimitExceededError("transaction_bytes_max", limits.transaction_bytes_max)
        return body

    def _submit(self, key: bytes, operations: tuple[Operation, ...], body: bytes) -> QueuedWrite:
        limits, protocol = self._limits, self._protocol
        if len(protocol) >= limits.pending_writes_max:
            raise LimitExceededError("pending_writes_max", limits.pending_writes_max)
        if self._bytes + len(body) > limits.pending_bytes_max:
            raise LimitExceededError("pending_bytes_max", limits.pending_bytes_max)
        if time.monotonic() - self._answered_at > limits.idle_ms / 1000:
            protocol.request_state()
        entry = protocol.submit(key, operations, body, _get_now_ms())
        self._unreported[entry.number] = self._by_key[key] = entry
        self._bytes += len(body)
        self._advance()
        return entry

    def _get_waiter(self, entry: QueuedWrite) -> "asyncio.Future[Outcome | None]":
        waiter = self._waiters.get(entry.number)
        if waiter is None:
            waiter = self._waiters[entry.number] = asyncio.get_running_loop().create_future()
        return waiter

    # --- how it stands

    def list_pending(self) -> list[PendingWrite]:
        """Writes without an outcome, in their order."""
        return [_to_pending_write(entry) for entry in self._protocol.entries]

    async def wait_recovered(self) -> list[Recovered]:
        """Waits until all writes of an earlier run have outcomes, and gives them in their order."""
        while True:
            self._check_open()
            self._check_remembered()
            if not self._recovering and (self._has_recovered or not self._protocol.needs_state):
                self._has_recovered = True
                return [recovered for _, recovered in sorted(self._recovered_writes.items())]
            refusal = next(iter(self._denied.values()), None) or self._protocol.refusal
            if refusal is not None:
                raise refusal
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await watcher

    async def resume(self, resend: bool | Collection[UUID]) -> list[Recovered]:
        """The application has decided what becomes of the pending writes. Gives what became of those sent again."""
        self._check_open()
        if self._protocol.forgotten is None:
            return []
        entries = list(self._protocol.entries)
        if isinstance(resend, bool):
            keys = {entry.key for entry in entries} if resend else set()
        else:
            keys = {key.bytes for key in resend}
        selected = [entry for entry in entries if entry.key in keys]
        waiters = [self._get_waiter(entry) for entry in selected]
        self._protocol.resume(keys)
        self._advance()
        outcomes = await asyncio.gather(*map(asyncio.shield, waiters), return_exceptions=True)
        self._check_remembered()
        return [_to_recovered(entry, outcome) for entry, outcome in zip(selected, outcomes, strict=True)]

    async def withdraw(self, key: bytes) -> bool:
        """Take a pending write back; see `LedgerScope.withdraw`."""
        self._check_open()
        entry = self._by_key.get(key)
        if entry is None or entry.number not in self._unreported:
            raise ClientError(f"no pending write has the key {UUID(bytes=key)}")
        waiter = self._get_waiter(entry)
        is_final = self._protocol.withdraw(entry)
        if self._timer is not None:  # the pause may have been for this write
            self._timer.cancel()
            self._end_pause()
        self._advance()
        await asyncio.shield(waiter)
        return is_final

    def _check_remembered(self) -> None:
        """Raises ForgottenError."""
        forgotten = self._protocol.forgotten
        if forgotten is not None:
            raise ForgottenError(forgotten.last, forgotten.server_last, tuple(self.list_pending()))

    def _check_open(self) -> None:
        if self._is_closing or self._failure is not None:
            raise self._build_error()

    def _build_error(self) -> OncelogError:
        if self._failure is None:
            return build_closed_error()
        failed = ClientError(f"the ledger's client cannot go on: {type(self._failure).__name__}: {self._failure}")
        failed.__cause__ = self._failure
        return failed

    # --- saving

    async def _save_changes(self) -> None:
        protocol = self._protocol
        while True:
            await self._save_event.wait()
            self._save_event.clear()
            while (changes := protocol.take_changes()) is not None:
                try:
                    await self._run_in_store(self._store.save, self._scope_id, changes)
                except StoreError as error:
                    self._fail_withdrawn(protocol.revert_unsaved(changes), error)
                    if self._is_done:
                        return
                    logger.warning("%s", error)
                    self.last_error = str(error)
                    await asyncio.sleep(STORE_PAUSE_S)
                    continue
                protocol.confirm_saved(changes)
                for settled in changes.settled:
                    self._report_outcome(settled)
                self._advance()
            if self._is_done:
                return

    def _fail_withdrawn(self, entries: list[QueuedWrite], error: StoreError) -> None:
        for entry in entries:
            self._forget(entry)
            self._fail_waiter(entry, error)

    def _report_outcome(self, settled: SettledWrite) -> None:
        """Once, though one that was written is told before it is saved and again when it is."""
        entry, outcome = settled
        if not self._forget(entry):
            return
        self._denied.pop(entry.number, None)
        if self._recovering.pop(entry.number, None) is not None:
            self._recovered_writes[entry.number] = _to_recovered(entry, outcome)
        if isinstance(outcome, Exception):
            self._fail_waiter(entry, outcome)
            return
        waiter = self._waiters.pop(entry.number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(outcome)

    def _forget(self, entry: QueuedWrite) -> bool:
        """False if it was before."""
        if self._unreported.pop(entry.number, None) is not entry:
            return False
        self._bytes -= len(entry.body)
        if self._by_key.get(entry.key) is entry:  # its key may have been used again since
            del self._by_key[entry.key]
        return True

    def _fail_waiter(self, entry: QueuedWrite, error: Exception) -> None:
        waiter = self._waiters.pop(entry.number, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # whoever waited may have gone

    # --- sending

    def _advance(self) -> None:
        """Something has come, or has changed: does what is to be done now."""
        if not self._is_closing and self._failure is None:
            self._send_all()
        protocol = self._protocol
        for settled in protocol.take_written():
            self._report_outcome(settled)
        for entry, error in protocol.take_denied():
            self._denied[entry.number] = error
            self._fail_waiter(entry, error)
        if protocol.forgotten is not None:
            self._fail_forgotten()
        if protocol.was_adopted:
            protocol.was_adopted = False
            logger.warning("the server had forgotten this client in %s: its sequence begins anew", self._names)
        self._save_event.set()
        self._wake_watchers()

    def _send_all(self) -> None:
        protocol = self._protocol
        for call in protocol.next_calls(_get_now_ms()):
            self._start_task(self._send(call))
        if protocol.take_state_request():
            self._start_task(self._request_state())
        if protocol.is_paused and self._timer is None:
            self._start_pause()

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _fail_forgotten(self) -> None:
        forgotten = self._protocol.forgotten
        if forgotten is None or not self._waiters:
            return
        error = ForgottenError(forgotten.last, forgotten.server_last, tuple(self.list_pending()))
        for entry in list(self._protocol.entries):
            self._fail_waiter(entry, error)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._run_guarded(coroutine), name="oncelog ledger: call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, call: WriteCall) -> None:
        answer = await self._transport.write(*self._names, call)
        if isinstance(answer, NoReply):
            self._record_no_answer(answer.reason, answer.retry_after_ms)
        elif not isinstance(answer, SequenceGap) or self.last_error is None:
            # While one is not taken for now those that were sent behind it find a gap: that is no end of it.
            self._record_answer()
        self._protocol.handle_answer(call, answer)
        self._advance()

    async def _request_state(self) -> None:
        try:
            state = await self._transport.get_client_state(*self._names, waits=False)
        except LostError as error:
            self._record_no_answer(str(error))
            self._protocol.on_state_lost()
        except ServerRefusedError as error:
            self._record_no_answer(str(error), error.retry_after_ms)
            if error.is_transient:
                self._protocol.on_state_lost()
            else:
                self._protocol.on_state_denied(error)
        else:
            self._record_answer()
            self._denied.clear()
            self._protocol.on_state_received(state, _get_now_ms())
        self._advance()

    def _record_answer(self) -> None:
        if self.last_error is not None:
            logger.info("answered again")
        self._pauses = self.last_error = None
        self._answered_at = time.monotonic()

    def _record_no_answer(self, reason: str, retry_after_ms: int = 0) -> None:
        if self.last_error is None:
            logger.warning("not answered, and to be sent again: %s", reason)
        self.last_error = reason
        self._retry_after_ms = max(self._retry_after_ms, retry_after_ms)

    def _start_pause(self) -> None:
        """Until the next attempt. If the server is away that comes as soon as it is back.

        But not at once: a server that ends whenever it is asked would be asked all the time.
        """
        loop = asyncio.get_running_loop()
        limits = self._limits
        if self._pauses is None:
            self._pauses = iterate_pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._random)
        pause_s = next(self._pauses)
        least_ms, self._retry_after_ms = self._retry_after_ms, 0
        if self._protocol.is_refused:
            least_ms = max(least_ms, limits.refused_pause_ms_min)
        least_s = least_ms * self._random.uniform(1, 1.2) / 1000
        until_s = loop.time() + max(pause_s, least_s)
        if not self._transport.is_connected:
            pause_s = min(
                pause_s, next(iterate_pauses_s(limits.reconnect_ms_max, limits.reconnect_ms_max, self._random))
            )
        self._timer = loop.call_later(max(pause_s, least_s), self._poll_connection, until_s)

    def _poll_connection(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        left_s = until_s - loop.time()
        if left_s > 0 and not self._transport.is_connected:
            self._timer = loop.call_later(min(CONNECTION_POLL_S, left_s), self._poll_connection, until_s)
        else:
            self._end_pause()

    def _end_pause(self) -> None:
        self._timer = None
        self._protocol.release()
        self._advance()

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
        self._save_event.set()
        await asyncio.gather(self._save_task, return_exceptions=True)
        self._fail_waiters()

    def _fail_waiters(self) -> None:
        for entry in list(self._protocol.entries):
            self._fail_waiter(entry, self._build_error())
        self._wake_watchers()

    async def _run_guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """What nobody has foreseen must not leave the application waiting."""
        try:
            await coroutine
        except asyncio.CancelledError:
            if self._is_closing and is_being_cancelled():
                raise
            self._fail(ClientError("a task of the client's was cancelled by somebody else"))
        except Exception as error:  # noqa: BLE001 - it is told to everybody
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        logger.error("the ledger's client cannot go on", exc_info=error)
        self._failure = error
        self._fail_waiters()


def build_closed_error() -> ClosedError:
    """What is told to those who come too late, or wait too long."""
    return ClosedError("the ledger's client is closed; what is pending is kept, and sent when it is opened again")


def _get_now_ms() -> int:
    return time.time_ns() // 1_000_000


def _to_pending_write(entry: QueuedWrite) -> PendingWrite:
    return PendingWrite(UUID(bytes=entry.key), entry.sequence, entry.operations)


def _to_recovered(entry: QueuedWrite, outcome: Outcome | BaseException | None) -> Recovered:
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome
    return Recovered(UUID(bytes=entry.key), entry.operations, outcome)
