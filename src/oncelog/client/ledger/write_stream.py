"""The asyncio side of a scope's writes: it saves the protocol's changes, makes its calls and reports outcomes.

The outbox task saves, a second task waits out the pauses before retries, and each call to the server runs in a separate
task.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from oncelog.client.ledger.entries import QueuedWrite, SequenceGap, SettledWrite, WriteAnswer, WriteCall
from oncelog.client.ledger.protocol import LedgerProtocol
from oncelog.client.ledger.store import LedgerStore, StoredScope
from oncelog.client.ledger.values import ForgottenError, LedgerLimits, Outcome, PendingWrite, Recovered
from oncelog.client.runtime.backoff import RetryPause, RetryTask
from oncelog.client.runtime.client import ClientRuntime, get_wall_ms
from oncelog.client.runtime.outbox import BaseOutbox, BasePending
from oncelog.client.runtime.values import ConnectionState
from oncelog.core.operations import Operation
from oncelog.core.transactions import check_operations, encode_operations
from oncelog.errors import (
    CanonicalError,
    ClientError,
    LimitExceededError,
    LostError,
    ServerRefusedError,
    StoreError,
)

if TYPE_CHECKING:
    from oncelog.client.ledger.transport import LedgerTransport

logger: Final = logging.getLogger("oncelog.client.ledger")
CONNECTION_POLL_S: Final = 0.1
"""Interval at which the stream checks whether the channel is connected. The check sends nothing."""


class LedgerRuntime(ClientRuntime[LedgerStore, LedgerLimits]):
    """State that the scopes of one ledger client share: a store and a channel to the server."""

    transport: "LedgerTransport"


class Pending(BasePending[QueuedWrite, Outcome]):
    """A write and the callers that wait for its outcome."""

    __slots__ = ()

    @property
    def entry(self) -> QueuedWrite:
        """The write as it was submitted."""
        return self._entry


class LedgerOutbox(BaseOutbox[LedgerRuntime, QueuedWrite, Pending, bool]):
    """Outbox of one scope. The protocol holds its own changes until they are saved."""

    reused_text = "a write with different operations is pending under the key {draft}"

    def __init__(self, runtime: LedgerRuntime, stored: StoredScope, on_saved: Callable[[], None]) -> None:
        """`on_saved` is called after each save, when the protocol may have new calls to make."""
        limits = runtime.limits
        super().__init__(
            runtime,
            Pending,
            count_max=("pending_writes_max", limits.pending_writes_max),
            bytes_max=("pending_bytes_max", limits.pending_bytes_max),
        )
        self.protocol = LedgerProtocol(stored.state, stored.pending, in_flight_max=limits.in_flight_max)
        self.denied: dict[int, ServerRefusedError] = {}
        """Refusals of pending writes, by number."""
        self._scope_id = stored.id
        self._on_saved = on_saved
        # A key is stored twice if the first write was reported and a power failure undid or prevented its removal.
        by_key = {entry.key: entry for entry in stored.pending}
        self._superseded = {entry.number for entry in stored.pending if by_key[entry.key] is not entry}
        """Numbers of these first writes. Callers that use the key again wait for the second write."""
        self.load(by_key.values())

    def _take_changes(self) -> bool:
        return True  # the protocol holds the changes

    async def _save_batch(self, entries: Sequence[QueuedWrite], withdrawn: Sequence[object], changes: bool) -> None:
        del withdrawn, changes
        protocol = self.protocol
        for entry in entries:
            protocol.submit(entry)
        unsaved = protocol.take_changes()
        if unsaved is None:
            return
        try:
            await self._runtime.save(self._runtime.store.save, self._scope_id, unsaved)
        except StoreError:
            protocol.revert_unsaved(unsaved)
            self._unsaved = None  # the protocol holds the changes, so later writes need not wait for this save
            raise
        protocol.confirm_saved(unsaved)
        for settled in unsaved.settled:
            self.report(settled)
        self._on_saved()

    def list_pending(self) -> list[PendingWrite]:
        """Return the writes without an outcome, in order, including the ones that are not saved yet."""
        known = {entry.key for entry in self.protocol.entries}
        drafts = [pending.entry for key, pending in self.pending.items() if key not in known]
        found = [(entry.sequence, entry) for entry in self.protocol.entries]
        found += enumerate(drafts, self.protocol.next_sequence)
        return [PendingWrite(UUID(bytes=entry.key), sequence, entry.operations) for sequence, entry in found]

    def report(self, settled: SettledWrite) -> None:
        """Report an outcome once. The protocol passes the outcome of a committed write before and after its save."""
        entry, outcome = settled
        if not entry.is_reported:
            entry.is_reported, entry.outcome = True, outcome
            self.denied.pop(entry.number, None)
            withdrawn = ClientError(f"the application withdrew the write {UUID(bytes=entry.key)}")
            if entry.number not in self._superseded:
                self._settle(entry, outcome or withdrawn)

    def fail_callers(self, entry: QueuedWrite, error: Exception) -> None:
        """Raise an error in the callers waiting for a write. The write remains pending, and others can wait for it."""
        if entry.number not in self._superseded:
            self._settle(entry, error)
            self.load([entry])


class WriteStream(RetryTask[LedgerRuntime]):
    """The writes of one scope. The retry task waits out the protocol's pauses."""

    def __init__(
        self,
        runtime: LedgerRuntime,
        names: tuple[str, str],
        stored: StoredScope,
    ) -> None:
        super().__init__(runtime)
        self._names = names
        self._transport = runtime.transport
        self._limits = runtime.limits
        self.outbox = LedgerOutbox(runtime, stored, self._advance)
        self._protocol = self.outbox.protocol
        self._recovered = stored.pending
        self._has_recovered = False
        self._calls: set[asyncio.Task[None]] = set()
        self._pause_event = asyncio.Event()
        self._retry_after_ms = 0
        self._answered_at = time.monotonic()
        self._tasks = [runtime.start_task("save", self.outbox.run), runtime.start_task("pause", self.run)]
        self._advance()

    # --- writing

    async def write(self, operations: tuple[Operation, ...], key: bytes) -> Outcome:
        """Submit a write and wait for its outcome. Cancelling the caller does not withdraw the write."""
        self._runtime.check_open()
        body = self._encode_body(operations)
        self._check_remembered()
        if time.monotonic() - self._answered_at > self._limits.idle_ms / 1000:
            self._protocol.request_state()
        (pending,) = await self.outbox.submit([QueuedWrite(0, key, operations, body, get_wall_ms())])
        return await pending.outcome()

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

    # --- status

    @property
    def state(self) -> ConnectionState:
        """State of the connection according to the last answer."""
        if self._protocol.is_refused:
            return ConnectionState.REFUSED
        if self.last_error is not None and not self._transport.is_connected:
            return ConnectionState.OFFLINE
        return ConnectionState.LIVE

    async def wait_recovered(self) -> list[Recovered]:
        """Wait until all writes from an earlier run have outcomes. Return them in order."""

        def are_known() -> bool:
            self._check_remembered()
            # Check backwards, because the last write usually gets its outcome last.
            are_reported = all(entry.is_reported for entry in reversed(self._recovered))
            if are_reported and (self._has_recovered or not self._protocol.needs_state):
                return True
            refusal = next(iter(self.outbox.denied.values()), None) or self._protocol.refusal
            if refusal is not None:
                raise refusal
            return False

        await self._runtime.wait_until(are_known)
        self._has_recovered = True
        return [_to_recovered(entry, entry.outcome) for entry in self._recovered]

    async def resume(self, resend: bool | Collection[UUID]) -> list[Recovered]:
        """Resend selected pending writes after a ForgottenError and withdraw the others. Return the outcomes."""
        self._runtime.check_open()
        if self._protocol.forgotten is None:
            return []
        entries = list(self._protocol.entries)
        if isinstance(resend, bool):
            keys = {entry.key for entry in entries} if resend else set()
        else:
            keys = {key.bytes for key in resend}
        selected, denied = [entry for entry in entries if entry.key in keys], self.outbox.denied
        self._protocol.resume(keys)
        self._advance()

        def are_known() -> bool:
            self._check_remembered()
            return all(entry.is_reported or entry.number in denied for entry in reversed(selected))

        await self._runtime.wait_until(are_known)
        return [_to_recovered(entry, denied.get(entry.number, entry.outcome)) for entry in selected]

    async def withdraw(self, key: bytes) -> bool:
        """Withdraw a pending write. See `LedgerScope.withdraw`."""
        self._runtime.check_open()
        if self._find_entry(key) is None:
            await self.outbox.save()  # the write may only just have been submitted
        entry = self._find_entry(key)
        if entry is None:
            raise ClientError(f"no pending write has the key {UUID(bytes=key)}")
        is_final = self._protocol.withdraw(entry)
        self.skip_pause()  # this write may be the reason for the pause
        self._advance()
        await self._runtime.wait_until(lambda: entry.is_reported)
        return is_final

    def _find_entry(self, key: bytes) -> QueuedWrite | None:
        """Return the newest pending write with the key, or None."""
        return next((entry for entry in reversed([*self._protocol.entries]) if entry.key == key), None)

    def _build_forgotten_error(self) -> ForgottenError | None:
        forgotten = self._protocol.forgotten
        if forgotten is None:
            return None
        return ForgottenError(forgotten.last, forgotten.server_last, tuple(self.outbox.list_pending()))

    def _check_remembered(self) -> None:
        """Raise ForgottenError if the server has lost this client's state."""
        error = self._build_forgotten_error()
        if error is not None:
            raise error

    # --- sending

    def _advance(self) -> None:
        """Make the next calls, report outcomes and wake the save task. Called after every protocol change."""
        if not self._runtime.is_ended:
            self._send_all()
        protocol = self._protocol
        for report in protocol.take_reports():
            if isinstance(report.outcome, ServerRefusedError):  # the write remains pending
                self.outbox.denied[report.entry.number] = report.outcome
                self.outbox.fail_callers(report.entry, report.outcome)
            else:
                self.outbox.report(report)
        forgotten_error = self._build_forgotten_error()
        if forgotten_error is not None:
            for entry in protocol.entries:
                self.outbox.fail_callers(entry, forgotten_error)
        if protocol.was_adopted:
            protocol.was_adopted = False
            logger.warning("the server evicted this client from %s; its sequence restarts at 1", self._names)
        self.outbox.wake()
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
                pass  # the refusal of an earlier write left this gap
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
            self.outbox.denied.clear()
            self._protocol.on_state_received(state, get_wall_ms())
        self._advance()

    def _record_answer(self) -> None:
        if self.last_error is not None:
            logger.info("the server is responding again")
        self.last_error = None
        self._backoff.reset()
        self._answered_at = time.monotonic()

    def _record_no_answer(self, error: LostError | ServerRefusedError) -> None:
        if self.last_error is None:
            logger.warning("a call to the server failed and will be retried: %s", error)
        self._record_error(str(error))
        if isinstance(error, ServerRefusedError):
            self._retry_after_ms = max(self._retry_after_ms, error.retry_after_ms)

    # --- pauses

    def skip_pause(self) -> None:
        """End the pause before the next attempt, if the protocol is paused."""
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
        """Wait until the next attempt. The pause ends early when a lost connection is re-established.

        It lasts at least until the next attempt to connect. Without this minimum, the client would retry without a
        pause while a server closes every connection.
        """
        loop, backoff, reconnect_ms_max = asyncio.get_running_loop(), self._backoff, self._limits.reconnect_ms_max
        pause_s = poll_s = backoff.next_pause_s(pause)
        end_s = loop.time() + pause_s
        if not pause.is_long and not self._transport.is_connected:
            reconnect_s = reconnect_ms_max * self._runtime.random_source.uniform(0.5, 1) / 1000
            poll_s = max(min(pause_s, reconnect_s), pause.least_ms / 1000)
        while not await backoff.sleep(poll_s) and loop.time() < end_s and not self._transport.is_connected:
            poll_s = min(CONNECTION_POLL_S, end_s - loop.time())
        self._protocol.release()
        self._advance()

    # --- ending

    async def close(self) -> None:
        """Wait for the answers to sent writes, for at most `close_timeout_ms`, and stop all tasks.

        Writes without an outcome remain in the file.
        """
        unfinished = [*self._calls, *self.outbox.unsaved_submissions]
        if unfinished:
            await asyncio.wait(unfinished, timeout=self._limits.close_timeout_ms / 1000)
        await self._runtime.cancel_tasks([*self._calls, *self._tasks])
        await self.outbox.finish()


def _to_recovered(entry: QueuedWrite, outcome: Outcome | Exception | None) -> Recovered:
    return Recovered(UUID(bytes=entry.key), entry.operations, outcome)
