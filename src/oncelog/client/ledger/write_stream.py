"""The writes of one scope, in asyncio: saves what the protocol says, sends what it says, and tells those who wait.

One task saves, and while it does others gather for the next time; each call to the server is a task of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncelog.client.ledger.entries import NoReply, QueuedWrite, SequenceGap, SettledWrite, WriteCall
from oncelog.client.ledger.errors import ForgottenError
from oncelog.client.ledger.protocol import LedgerProtocol
from oncelog.client.ledger.runtime import LedgerRuntime, logger
from oncelog.client.ledger.store import StoredScope
from oncelog.client.ledger.values import Outcome, PendingWrite, Recovered
from oncelog.client.runtime.backoff import Backoff, RetryPause, iterate_pauses_s, wait_for_store
from oncelog.client.runtime.status import ConnectionState
from oncelog.core.operations import Operation
from oncelog.core.transactions import check_operations, encode_operations
from oncelog.errors import (
    CanonicalError,
    ClientError,
    IdReusedError,
    LimitExceededError,
    LostError,
    ServerRefusedError,
    StoreError,
)

if TYPE_CHECKING:
    from oncelog.client.ledger.transport import LedgerTransport

CONNECTION_POLL_S: Final = 0.1
"""Interval at which the stream checks whether a server that was away is back. Nothing is sent for that."""


class WriteStream:
    """One for a scope."""

    def __init__(
        self,
        runtime: LedgerRuntime,
        transport: "LedgerTransport",
        names: tuple[str, str],
        stored: StoredScope,
    ) -> None:
        limits = runtime.limits
        self._names = names
        self._scope_id = stored.id
        self._runtime = runtime
        self._transport = transport
        self._limits = limits
        self._backoff = Backoff(limits, runtime.random_source)
        self._protocol = LedgerProtocol(stored.state, stored.pending, in_flight_max=limits.in_flight_max)
        self._unreported = {entry.number: entry for entry in stored.pending}
        self._by_key = {entry.key: entry for entry in stored.pending}
        self._bytes = sum(len(entry.body) for entry in stored.pending)
        self._recovering = {entry.number: entry for entry in stored.pending}
        self._recovered_writes: dict[int, Recovered] = {}
        self._has_recovered = False
        self._denied: dict[int, ServerRefusedError] = {}
        self._waiters: dict[int, asyncio.Future[Outcome | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._save_event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._retry_after_ms = 0
        self._answered_at = time.monotonic()
        self._is_done = False
        self.last_error: str | None = None
        """Why the last call came to nothing, as long as none has succeeded since."""
        self._save_task = runtime.start_task("save", self._save_changes)
        runtime.end_calls.append(self._fail_waiters)
        self._advance()

    # --- writing

    async def write(self, operations: tuple[Operation, ...], key: bytes) -> Outcome:
        """Waits for the outcome, however long that takes. Who gives up waiting does not take it back."""
        self._runtime.check_open()
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

    @property
    def pending_count(self) -> int:
        """Writes without an outcome."""
        return len(self._protocol)

    @property
    def state(self) -> ConnectionState:
        """How the client stands to the server, by the last answer."""
        if self._protocol.is_refused:
            return ConnectionState.REFUSED
        if self.last_error is not None and not self._transport.is_connected:
            return ConnectionState.OFFLINE
        return ConnectionState.LIVE

    def list_pending(self) -> list[PendingWrite]:
        """Writes without an outcome, in their order."""
        return [_to_pending_write(entry) for entry in self._protocol.entries]

    async def wait_recovered(self) -> list[Recovered]:
        """Waits until all writes of an earlier run have outcomes, and gives them in their order."""

        def are_known() -> bool:
            self._check_remembered()
            if not self._recovering and (self._has_recovered or not self._protocol.needs_state):
                return True
            refusal = next(iter(self._denied.values()), None) or self._protocol.refusal
            if refusal is not None:
                raise refusal
            return False

        await self._runtime.wait_until(are_known)
        self._has_recovered = True
        return [recovered for _, recovered in sorted(self._recovered_writes.items())]

    async def resume(self, resend: bool | Collection[UUID]) -> list[Recovered]:
        """The application has decided what becomes of the pending writes. Gives what became of those sent again."""
        self._runtime.check_open()
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
        self._runtime.check_open()
        entry = self._by_key.get(key)
        if entry is None or entry.number not in self._unreported:
            raise ClientError(f"no pending write has the key {UUID(bytes=key)}")
        waiter = self._get_waiter(entry)
        is_final = self._protocol.withdraw(entry)
        self.skip_pause()  # it may have been for this write
        self._advance()
        await asyncio.shield(waiter)
        return is_final

    def _check_remembered(self) -> None:
        """Raises ForgottenError."""
        forgotten = self._protocol.forgotten
        if forgotten is not None:
            raise ForgottenError(forgotten.last, forgotten.server_last, tuple(self.list_pending()))

    # --- saving

    async def _save_changes(self) -> None:
        protocol = self._protocol
        while True:
            await self._save_event.wait()
            self._save_event.clear()
            while (changes := protocol.take_changes()) is not None:
                try:
                    await self._runtime.call_store(self._runtime.store.save, self._scope_id, changes)
                except StoreError as error:
                    self._fail_withdrawn(protocol.revert_unsaved(changes), error)
                    if self._is_done:
                        return
                    logger.warning("%s", error)
                    self.last_error = str(error)
                    await wait_for_store()
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
        if not self._runtime.is_ended:
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
        self._runtime.wake_waiters()

    def _send_all(self) -> None:
        protocol = self._protocol
        for call in protocol.next_calls(_get_now_ms()):
            self._start_call(partial(self._send, call))
        if protocol.take_state_request():
            self._start_call(self._request_state)
        if protocol.is_paused and self._timer is None:
            self._start_pause()

    def _fail_forgotten(self) -> None:
        forgotten = self._protocol.forgotten
        if forgotten is None or not self._waiters:
            return
        error = ForgottenError(forgotten.last, forgotten.server_last, tuple(self.list_pending()))
        for entry in list(self._protocol.entries):
            self._fail_waiter(entry, error)

    def _start_call(self, work: Callable[[], Awaitable[None]]) -> None:
        task = self._runtime.start_task("call", work)
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
        self.last_error = None
        self._backoff.reset()
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
        limits, random_source = self._limits, self._runtime.random_source
        pause = RetryPause(min(self._retry_after_ms, limits.retry_after_ms_max), is_long=self._protocol.is_refused)
        self._retry_after_ms = 0
        pause_s = self._backoff.next_pause_s(pause)
        first_s = pause_s
        if not pause.is_long and not self._transport.is_connected:
            reconnect_s = next(iterate_pauses_s(limits.reconnect_ms_max, limits.reconnect_ms_max, random_source))
            first_s = max(min(pause_s, reconnect_s), pause.least_ms / 1000)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(first_s, self._poll_connection, loop.time() + pause_s)

    def _poll_connection(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        left_s = until_s - loop.time()
        if left_s > 0 and not self._transport.is_connected:
            self._timer = loop.call_later(min(CONNECTION_POLL_S, left_s), self._poll_connection, until_s)
        else:
            self._end_pause()

    def skip_pause(self) -> None:
        """End the pause before the next attempt, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._end_pause()

    def _end_pause(self) -> None:
        self._timer = None
        self._protocol.release()
        self._advance()

    # --- ending

    async def close(self) -> None:
        """Waits for the answers of what has been sent, but not long; what has none stays pending in the file."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.close_timeout_ms / 1000)
        await self._runtime.cancel_tasks(list(self._tasks))
        self._is_done = True
        self._save_event.set()
        await asyncio.gather(self._save_task, return_exceptions=True)
        self._fail_waiters()

    def _fail_waiters(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for entry in list(self._protocol.entries):
            self._fail_waiter(entry, self._runtime.end_error)
        self._runtime.wake_waiters()


def _get_now_ms() -> int:
    return time.time_ns() // 1_000_000


def _to_pending_write(entry: QueuedWrite) -> PendingWrite:
    return PendingWrite(UUID(bytes=entry.key), entry.sequence, entry.operations)


def _to_recovered(entry: QueuedWrite, outcome: Outcome | BaseException | None) -> Recovered:
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome
    return Recovered(UUID(bytes=entry.key), entry.operations, outcome)
