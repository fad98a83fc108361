"""The writes of one scope, with asyncio: saves what the protocol changes, makes its calls, and reports outcomes.

One task saves; submissions that arrive during a save are part of the next one. Another task waits before a retry. Each
call to the server is a separate task.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncelog.client.ledger.entries import QueuedWrite, SequenceGap, SettledWrite, WriteAnswer, WriteCall
from oncelog.client.ledger.protocol import LedgerProtocol
from oncelog.client.ledger.store import LedgerStore, StoredScope
from oncelog.client.ledger.values import ForgottenError, LedgerLimits, Outcome, PendingWrite, Recovered
from oncelog.client.runtime.backoff import RetryPause, RetryTask, iterate_pauses_s, wait_for_store
from oncelog.client.runtime.client import ClientRuntime, get_wall_ms
from oncelog.client.runtime.values import ConnectionState
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

logger: Final = logging.getLogger("oncelog.client.ledger")

CONNECTION_POLL_S: Final = 0.1
"""Interval at which the stream checks for a connection. A check sends nothing."""


class LedgerRuntime(ClientRuntime[LedgerStore, LedgerLimits]):
    """State that the scopes of one ledger client share: a store, and a channel to the server."""

    def __init__(
        self,
        store: LedgerStore,
        transport: "LedgerTransport",
        limits: LedgerLimits,
        random_source: random.Random | None,
    ) -> None:
        super().__init__("ledger", logger, store, limits, random_source)
        self.transport = transport


class WriteStream(RetryTask[LedgerRuntime]):
    """Writes of one scope. The retry task waits while the protocol is paused."""

    def __init__(
        self,
        runtime: LedgerRuntime,
        names: tuple[str, str],
        stored: StoredScope,
    ) -> None:
        super().__init__(runtime)
        self._names = names
        self._scope_id = stored.id
        self._transport = runtime.transport
        self._limits = runtime.limits
        self._protocol = LedgerProtocol(stored.state, stored.pending, in_flight_max=runtime.limits.in_flight_max)
        self._by_key = {entry.key: entry for entry in stored.pending}
        self._bytes = sum(len(entry.body) for entry in stored.pending)
        self._recovered = stored.pending
        self._recovering = len(stored.pending)
        """Number of recovered writes without an outcome."""
        self._has_recovered = False
        self._denied: dict[int, ServerRefusedError] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._save_event = asyncio.Event()
        self._pause_event = asyncio.Event()
        self._retry_after_ms = 0
        self._answered_at = time.monotonic()
        self._is_done = False
        self.last_error: str | None = None
        """Reason for the last failed call; None after a successful one."""
        self._save_task = runtime.start_task("save", self._save_changes)
        self._pause_task = runtime.start_task("pause", self.run)
        runtime.end_calls.append(self._fail_waiters)
        self._advance()

    # --- writing

    async def write(self, operations: tuple[Operation, ...], key: bytes) -> Outcome:
        """Submit a write and wait for its outcome. A cancelled caller does not withdraw the write."""
        self._runtime.check_open()
        body = self._encode_body(operations)
        self._check_remembered()
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._submit(key, operations, body)
        elif entry.body != body:
            raise IdReusedError(f"a write with other operations is pending under the key {UUID(bytes=key)}")
        outcome = await asyncio.shield(self._get_waiter(entry))
        if outcome is None:
            raise ClientError(f"the application withdrew the write {UUID(bytes=key)}")
        return outcome

    def _encode_body(self, operations: tuple[Operation, ...]) -> bytes:
        """Check and encode operations. Raises CanonicalError or LimitExceededError."""
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
        entry = protocol.submit(key, operations, body, get_wall_ms())
        self._by_key[key] = entry
        self._bytes += len(body)
        self._advance()
        return entry

    @staticmethod
    def _get_waiter(entry: QueuedWrite) -> "asyncio.Future[Outcome | None]":
        if entry.waiter is None:
            entry.waiter = asyncio.get_running_loop().create_future()
        return entry.waiter

    # --- status

    @property
    def pending_count(self) -> int:
        """Number of writes without an outcome."""
        return len(self._protocol)

    @property
    def state(self) -> ConnectionState:
        """State of the connection, by the last answer."""
        if self._protocol.is_refused:
            return ConnectionState.REFUSED
        if self.last_error is not None and not self._transport.is_connected:
            return ConnectionState.OFFLINE
        return ConnectionState.LIVE

    def list_pending(self) -> list[PendingWrite]:
        """Return the writes without an outcome, in their order."""
        return [_to_pending_write(entry) for entry in self._protocol.entries]

    async def wait_recovered(self) -> list[Recovered]:
        """Wait until all writes of an earlier run have outcomes. Return them in their order."""

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
        return [_to_recovered(entry, entry.outcome) for entry in self._recovered]

    async def resume(self, resend: bool | Collection[UUID]) -> list[Recovered]:
        """Send selected pending writes again after a ForgottenError and withdraw the others. Return the outcomes."""
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
        """Withdraw a pending write; see `LedgerScope.withdraw`."""
        self._runtime.check_open()
        entry = self._by_key.get(key)
        if entry is None or entry.is_reported:
            raise ClientError(f"no pending write has the key {UUID(bytes=key)}")
        waiter = self._get_waiter(entry)
        is_final = self._protocol.withdraw(entry)
        self.skip_pause()  # the pause may be for this write
        self._advance()
        await asyncio.shield(waiter)
        return is_final

    def _build_forgotten_error(self) -> ForgottenError | None:
        forgotten = self._protocol.forgotten
        if forgotten is None:
            return None
        return ForgottenError(forgotten.last, forgotten.server_last, tuple(self.list_pending()))

    def _check_remembered(self) -> None:
        """Raise ForgottenError if the server has lost the state of this client."""
        error = self._build_forgotten_error()
        if error is not None:
            raise error

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
                    for entry in protocol.revert_unsaved(changes):
                        self._forget(entry)
                        _give_outcome(entry, error)
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

    def _report_outcome(self, settled: SettledWrite) -> None:
        """Report an outcome once: a committed write is reported before it is saved, and settled again after that."""
        entry, outcome = settled
        if entry.is_reported:
            return
        self._forget(entry)
        entry.outcome = outcome
        self._denied.pop(entry.number, None)
        self._recovering -= entry.is_recovered
        _give_outcome(entry, outcome)

    def _forget(self, entry: QueuedWrite) -> None:
        entry.is_reported = True
        self._bytes -= len(entry.body)
        if self._by_key.get(entry.key) is entry:  # a later write may use its key again
            del self._by_key[entry.key]

    # --- sending

    def _advance(self) -> None:
        """Make the next calls, report outcomes and wake the save task, after any change of the protocol."""
        if not self._runtime.is_ended:
            self._send_all()
        protocol = self._protocol
        for report in protocol.take_reports():
            if isinstance(report.outcome, ServerRefusedError):  # the write stays pending
                self._denied[report.entry.number] = report.outcome
                _give_outcome(*report)
            else:
                self._report_outcome(report)
        forgotten_error = self._build_forgotten_error()
        if forgotten_error is not None:
            self._fail_all(forgotten_error)
        if protocol.was_adopted:
            protocol.was_adopted = False
            logger.warning("the server had evicted this client in %s: its sequence starts again", self._names)
        self._save_event.set()
        self._runtime.wake_waiters()

    def _send_all(self) -> None:
        protocol = self._protocol
        for call in protocol.next_calls(get_wall_ms()):
            self._start_call(partial(self._send, call))
        if protocol.take_state_request():
            self._start_call(self._request_state)
        if protocol.is_paused:
            self._pause_event.set()

    def _start_call(self, work: Callable[[], Awaitable[None]]) -> None:
        task = self._runtime.start_task("call", work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _send(self, call: WriteCall) -> None:
        answer: WriteAnswer
        try:
            answer = await self._transport.write(*self._names, call)
        except (LostError, ServerRefusedError) as error:
            answer = error
        match answer:
            case LostError() | ServerRefusedError(is_transient=True):
                self._record_no_answer(answer)
            case SequenceGap() if self.last_error is not None:
                pass  # the server refuses an earlier write for now, so the writes behind it find a gap
            case _:
                self._record_answer()
        self._protocol.handle_answer(call, answer)
        self._advance()

    async def _request_state(self) -> None:
        try:
            state = await self._transport.get_client_state(*self._names, waits=False)
        except (LostError, ServerRefusedError) as error:
            self._record_no_answer(error)
            self._protocol.on_state_failed(error)
        else:
            self._record_answer()
            self._denied.clear()
            self._protocol.on_state_received(state, get_wall_ms())
        self._advance()

    def _record_answer(self) -> None:
        if self.last_error is not None:
            logger.info("the server answers again")
        self.last_error = None
        self._backoff.reset()
        self._answered_at = time.monotonic()

    def _record_no_answer(self, error: LostError | ServerRefusedError) -> None:
        if self.last_error is None:
            logger.warning("no answer; the write is sent again: %s", error)
        self._record_error(str(error))
        if isinstance(error, ServerRefusedError):
            self._retry_after_ms = max(self._retry_after_ms, error.retry_after_ms)

    def _record_error(self, error: str) -> None:
        self.last_error = error

    # --- pauses

    def skip_pause(self) -> None:
        """End the pause before the next attempt, if there is one."""
        if self._protocol.is_paused:
            super().skip_pause()

    async def _step(self) -> RetryPause:
        """Wait until the protocol is paused."""
        self._pause_event.clear()
        if not self._protocol.is_paused:
            await self._pause_event.wait()
        retry_after_ms, self._retry_after_ms = self._retry_after_ms, 0
        return RetryPause(min(retry_after_ms, self._limits.retry_after_ms_max), is_long=self._protocol.is_refused)

    async def _wait(self, pause: RetryPause) -> None:
        """Wait until the next attempt. The pause ends early when a lost connection is back.

        It lasts at least until the next attempt to connect, because a server that ends each connection would be called
        without any pause.
        """
        loop, backoff, reconnect_ms_max = asyncio.get_running_loop(), self._backoff, self._limits.reconnect_ms_max
        pause_s = poll_s = backoff.next_pause_s(pause)
        end_s = loop.time() + pause_s
        if not pause.is_long and not self._transport.is_connected:
            reconnect_s = next(iterate_pauses_s(reconnect_ms_max, reconnect_ms_max, self._runtime.random_source))
            poll_s = max(min(pause_s, reconnect_s), pause.least_ms / 1000)
        while not await backoff.sleep(poll_s) and loop.time() < end_s and not self._transport.is_connected:
            poll_s = min(CONNECTION_POLL_S, end_s - loop.time())
        self._protocol.release()
        self._advance()

    # --- ending

    async def close(self) -> None:
        """Wait for the answers to sent writes, at most `close_timeout_ms`.

        Writes without an outcome stay in the file.
        """
        await self._runtime.cancel_tasks([self._pause_task])
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._limits.close_timeout_ms / 1000)
        await self._runtime.cancel_tasks(list(self._calls))
        self._is_done = True
        self._save_event.set()
        await asyncio.gather(self._save_task, return_exceptions=True)
        self._fail_waiters()

    def _fail_waiters(self) -> None:
        self._fail_all(self._runtime.end_error)
        self._runtime.wake_waiters()

    def _fail_all(self, error: Exception) -> None:
        for entry in list(self._protocol.entries):
            _give_outcome(entry, error)


def _give_outcome(entry: QueuedWrite, outcome: Outcome | Exception | None) -> None:
    """Give an outcome or an error to the callers that wait for a write. A write can have new callers afterwards."""
    waiter, entry.waiter = entry.waiter, None
    if waiter is None or waiter.done():
        return
    if isinstance(outcome, Exception):
        waiter.set_exception(outcome)
        waiter.exception()  # the callers may be gone
    else:
        waiter.set_result(outcome)


def _to_pending_write(entry: QueuedWrite) -> PendingWrite:
    return PendingWrite(UUID(bytes=entry.key), entry.sequence, entry.operations)


def _to_recovered(entry: QueuedWrite, outcome: Outcome | BaseException | None) -> Recovered:
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome
    return Recovered(UUID(bytes=entry.key), entry.operations, outcome)
