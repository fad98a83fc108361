"""The task that saves own messages into the outbox, and what arrives, before anybody is told."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from oncelog.client.chat.change_set import ChangeSet
from oncelog.client.chat.runtime import ChatRuntime
from oncelog.client.chat.values import OutboxMessage
from oncelog.client.runtime.persister import BasePersister


class OutboxChange(NamedTuple):
    """Messages for the outbox, and the numbers of refused ones that the application has seen to."""

    drafts: Sequence[OutboxMessage] = ()
    withdrawn: Sequence[int] = ()


def now_ms() -> int:
    """Return the time of the clock that never jumps."""
    return time.monotonic_ns() // 1_000_000


class Persister(BasePersister[OutboxChange, ChangeSet]):
    """Persister of a chat client."""

    def __init__(self, runtime: ChatRuntime) -> None:
        super().__init__(runtime)
        self._runtime = runtime
        self._capacity_event = asyncio.Event()
        self.on_accepted: Callable[[], None] = lambda: None
        """Called when the protocol has something new to send."""

    async def wait_for_capacity(self) -> None:
        """Wait while too many messages wait to be saved."""
        while self._runtime.last_protocol.message_count > self._runtime.limits.frames_max:
            self._capacity_event.clear()
            self.wake()
            await self._capacity_event.wait()

    def _take_changes(self) -> ChangeSet:
        changes = self._runtime.last_protocol.take_changes()
        self._capacity_event.set()
        return changes

    async def _save(self, accepted: Sequence[OutboxChange], changes: ChangeSet) -> None:
        runtime = self._runtime
        entries = runtime.store.assign_numbers([draft for one in accepted for draft in one.drafts])
        withdrawn = [number for one in accepted for number in one.withdrawn]
        if entries or withdrawn or changes or self.last_error is not None:
            await runtime.call_store(runtime.store.save, entries, withdrawn, changes)
        for number in withdrawn:
            runtime.refused.pop(number, None)
        runtime.last_protocol.enqueue(entries, now_ms())
        runtime.publish(changes)
        self.on_accepted()

    def _reject(self, submitted: OutboxChange, error: Exception) -> None:
        for draft in submitted.drafts:
            pending = self._runtime.pending.pop((draft.chat_id, draft.client_message_id), None)
            if pending is not None:
                pending.settle(error)
