"""The task that keeps: what is sent goes into the outbox, and what comes into the file, before anybody is told."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from oncelog.client.chat.change_set import ChangeSet
from oncelog.client.chat.runtime import ChatRuntime, chat_closed_error
from oncelog.client.chat.values import OutboxMessage
from oncelog.client.runtime.backoff import STORE_PAUSE
from oncelog.errors import StoreError

logger: Final = logging.getLogger("oncelog.client.chat")


class _PendingAccept(NamedTuple):
    """Messages on their way into the outbox, and who waits for that."""

    drafts: Sequence[OutboxMessage]
    withdrawn: Sequence[int]
    accepted: "asyncio.Future[None]"


def now_ms() -> int:
    """Of the clock that never jumps."""
    return time.monotonic_ns() // 1_000_000


class Persister:
    """`run` goes on until it is cancelled. What comes while a transaction is under way goes into the next one."""

    def __init__(self, runtime: ChatRuntime) -> None:
        self._runtime = runtime
        self._wakeup = asyncio.Event()
        self._capacity_event = asyncio.Event()
        self._pending_accepts: list[_PendingAccept] = []
        self.last_error: str | None = None
        """Why the file cannot be written; None while it can."""
        self.on_accepted: Callable[[], None] = lambda: None
        """Called when the protocol has something new to send."""
        self.is_busy = False
        """Something is being written, and has not been told yet."""
        self._unsaved: ChangeSet | None = None
        """What must be in the file before anything else is: it says up to where everything is there."""
        self._write_task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There may be something to keep."""
        self._wakeup.set()

    async def wait_for_capacity(self) -> None:
        """Returns when not too much waits to be kept."""
        protocol, limits = self._runtime.protocol, self._runtime.limits
        while protocol.message_count > limits.frames_max:
            self._capacity_event.clear()
            self._wakeup.set()
            await self._capacity_event.wait()

    async def accept(self, drafts: Sequence[OutboxMessage], withdrawn: Sequence[int] = ()) -> None:
        """Returns when they are on the disk. Raises StoreError: then they are not."""
        accepting = _PendingAccept(drafts, withdrawn, asyncio.get_running_loop().create_future())
        self._pending_accepts.append(accepting)
        self._wakeup.set()
        # Whoever gives up waiting does not take it back: it may be on the disk already.
        await asyncio.shield(accepting.accepted)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            await self._save_all()
            self.is_busy = False
            self._runtime.wake_waiters()

    async def save_last(self) -> None:
        """When nothing else runs any more. What cannot be kept comes again, with all that is behind it."""
        self.fail_accepts(chat_closed_error())
        if self._write_task is not None:
            await asyncio.gather(self._write_task, return_exceptions=True)
        try:
            for changes in (self._unsaved, self._runtime.last_protocol.take_changes()):
                if changes:
                    await self._runtime.call_store(self._runtime.store.save, [], [], changes)
        except StoreError as error:
            logger.warning("%s", error)

    async def _save_all(self) -> None:
        desk = self._runtime
        accepting, self._pending_accepts = self._pending_accepts, []
        self.is_busy = True
        changes = self._unsaved = desk.protocol.take_changes()
        self._capacity_event.set()
        entries = desk.store.assign_numbers([one for group in accepting for one in group.drafts])
        taken_back = [number for group in accepting for number in group.withdrawn]
        try:
            await self._write(entries, taken_back, changes)
        except StoreError as error:
            self._fail_pending(accepting, error)
            await self._retry_save(changes, error)
            return
        except BaseException:
            self._fail_pending(accepting, chat_closed_error())
            raise
        for group in accepting:
            if not group.accepted.done():
                group.accepted.set_result(None)

    async def _write(self, entries: Sequence[OutboxMessage], withdrawn: Sequence[int], changes: ChangeSet) -> None:
        # Also if the client is being closed meanwhile: what is being written is told.
        self._write_task = asyncio.create_task(self._save(entries, withdrawn, changes))
        await asyncio.shield(self._write_task)

    async def _save(self, entries: Sequence[OutboxMessage], withdrawn: Sequence[int], changes: ChangeSet) -> None:
        desk = self._runtime
        if entries or withdrawn or changes:
            await desk.call_store(desk.store.save, entries, withdrawn, changes)
        self.last_error = self._unsaved = None
        for number in withdrawn:
            desk.refused.pop(number, None)
        desk.last_protocol.enqueue(entries, now_ms())
        desk.publish(changes)
        self.on_accepted()

    async def _retry_save(self, changes: ChangeSet, error: StoreError) -> None:
        """Alone, and as often as it takes: nothing that comes behind it may be kept before it."""
        while True:
            if self.last_error is None:
                logger.warning("%s", error)
            self.last_error = str(error)
            self._runtime.wake_waiters()
            if not changes:
                return
            await asyncio.sleep(STORE_PAUSE.least_ms / 1000)
            try:
                await self._write([], [], changes)
            except StoreError as again:
                error = again
            else:
                return

    def fail_accepts(self, error: Exception) -> None:
        """Those who wait for the disk wait in vain."""
        accepting, self._pending_accepts = self._pending_accepts, []
        self._fail_pending(accepting, error)

    def _fail_pending(self, pending_accepts: Sequence[_PendingAccept], error: Exception) -> None:
        for group in pending_accepts:
            for draft in group.drafts:
                pending = self._runtime.pending.pop((draft.chat_id, draft.client_message_id), None)
                if pending is not None:
                    pending.settle(error)
            if not group.accepted.done():
                group.accepted.set_exception(error)
                group.accepted.exception()  # whoever sent it may have gone
