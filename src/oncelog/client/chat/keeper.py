"""The task that keeps: what is sent goes into the outbox, and what comes into the file, before anybody is told."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from oncelog.client.chat.changes import Changes
from oncelog.client.chat.desk import Desk, closed
from oncelog.client.chat.values import Entry
from oncelog.client.patience import STORE_PAUSE
from oncelog.errors import StoreError

logger: Final = logging.getLogger("oncelog.client.chat")


class _Accepting(NamedTuple):
    """Messages on their way into the outbox, and who waits for that."""

    drafts: Sequence[Entry]
    taken_back: Sequence[int]
    accepted: "asyncio.Future[None]"


def now_ms() -> int:
    """Of the clock that never jumps."""
    return time.monotonic_ns() // 1_000_000


class Keeper:
    """`run` goes on until it is cancelled. What comes while a transaction is under way goes into the next one."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._accepting: list[_Accepting] = []
        self.last_error: str | None = None
        """Why the file cannot be written; None while it can."""
        self.on_accepted: Callable[[], None] = lambda: None
        """Called when the protocol has something new to send."""
        self.is_busy = False
        """Something is being written, and has not been told yet."""
        self._unsaved: Changes | None = None
        """What must be in the file before anything else is: it says up to where everything is there."""
        self._writing: asyncio.Task[None] | None = None

    def work(self) -> None:
        """There may be something to keep."""
        self._work.set()

    async def room(self) -> None:
        """Returns when not too much waits to be kept."""
        protocol, limits = self._desk.protocol, self._desk.limits
        while protocol.waiting_messages > limits.frames_max:
            self._room.clear()
            self._work.set()
            await self._room.wait()

    async def accept(self, drafts: Sequence[Entry], taken_back: Sequence[int] = ()) -> None:
        """Returns when they are on the disk. Raises StoreError: then they are not."""
        accepting = _Accepting(drafts, taken_back, asyncio.get_running_loop().create_future())
        self._accepting.append(accepting)
        self._work.set()
        # Whoever gives up waiting does not take it back: it may be on the disk already.
        await asyncio.shield(accepting.accepted)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self._keep_all()
            self.is_busy = False
            self._desk.wake()

    async def keep_last(self) -> None:
        """When nothing else runs any more. What cannot be kept comes again, with all that is behind it."""
        self.refuse(closed())
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        try:
            for changes in (self._unsaved, self._desk.protocol_at_end.take_changes()):
                if changes:
                    await self._desk.in_store(self._desk.store.write, [], [], changes)
        except StoreError as error:
            logger.warning("%s", error)

    async def _keep_all(self) -> None:
        desk = self._desk
        accepting, self._accepting = self._accepting, []
        self.is_busy = True
        changes = self._unsaved = desk.protocol.take_changes()
        self._room.set()
        entries = desk.store.numbered([one for group in accepting for one in group.drafts])
        taken_back = [number for group in accepting for number in group.taken_back]
        try:
            await self._write(entries, taken_back, changes)
        except StoreError as error:
            self._not_accepted(accepting, error)
            await self._keep_later(changes, error)
            return
        except BaseException:
            self._not_accepted(accepting, closed())
            raise
        for group in accepting:
            if not group.accepted.done():
                group.accepted.set_result(None)

    async def _write(self, entries: Sequence[Entry], taken_back: Sequence[int], changes: Changes) -> None:
        # Also if the client is being closed meanwhile: what is being written is told.
        self._writing = asyncio.create_task(self._written(entries, taken_back, changes))
        await asyncio.shield(self._writing)

    async def _written(self, entries: Sequence[Entry], taken_back: Sequence[int], changes: Changes) -> None:
        desk = self._desk
        if entries or taken_back or changes:
            await desk.in_store(desk.store.write, entries, taken_back, changes)
        self.last_error = self._unsaved = None
        for number in taken_back:
            desk.refused.pop(number, None)
        desk.protocol_at_end.offer(entries, now_ms())
        desk.publish(changes)
        self.on_accepted()

    async def _keep_later(self, changes: Changes, error: StoreError) -> None:
        """Alone, and as often as it takes: nothing that comes behind it may be kept before it."""
        while True:
            if self.last_error is None:
                logger.warning("%s", error)
            self.last_error = str(error)
            self._desk.wake()
            if not changes:
                return
            await asyncio.sleep(STORE_PAUSE.least_ms / 1000)
            try:
                await self._write([], [], changes)
            except StoreError as again:
                error = again
            else:
                return

    def refuse(self, error: Exception) -> None:
        """Those who wait for the disk wait in vain."""
        accepting, self._accepting = self._accepting, []
        self._not_accepted(accepting, error)

    def _not_accepted(self, accepting: Sequence[_Accepting], error: Exception) -> None:
        for group in accepting:
            for draft in group.drafts:
                pending = self._desk.pending.pop((draft.chat_id, draft.client_message_id), None)
                if pending is not None:
                    pending.settle(error)
            if not group.accepted.done():
                group.accepted.set_exception(error)
                group.accepted.exception()  # whoever sent it may have gone
