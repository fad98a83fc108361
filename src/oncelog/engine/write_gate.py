"""Whether new writes are accepted: enough disk space, and not set read-only by an operator.

What is known is answered all the same, and so is who reads. Whatever ends or frees something goes on too: work under
a lease, cursors, erasure, members that leave or are removed. For these the limit leaves room.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from operator import gt, lt
from typing import Final

from msgspec import Struct

from oncelog.core.limits import check_whole_numbers
from oncelog.errors import DiskFullError, OncelogError
from oncelog.storage.store import Store

logger: Final = logging.getLogger("oncelog.engine")

PAUSE_MS_MAX: Final = 10_000
"""How long a disk is left alone at most that was found full again and again, before it is tried."""
PROBE_FREE_BYTES_MIN: Final = 2**20
"""With less than this free a disk that was full still is: what is tried is small, and fits where no commit does."""
RETRY_AFTER_MS: Final = 5000
"""When a write may be sent again that came while none were taken."""
HYSTERESIS_PERCENT: Final = 10
"""So much further from its limit must a disk be before new writes are taken again, where no number is given."""


class DiskLimits(Struct, frozen=True, kw_only=True):
    """When a log takes no new writes because its disk is nearly full, and when it does again. 0 does not look."""

    free_bytes_min: int = 0
    """Free bytes of the file system of a log in a file, less its -wal; below it the log takes no new writes."""
    free_again_bytes_min: int = 0
    """Free bytes from which on the log takes new writes again, at least `free_bytes_min`. 0 is a tenth more than
    `free_bytes_min`."""
    store_bytes_max: int = 0
    """Bytes of the database, or of the file; above it the log takes no new writes."""
    store_again_bytes_max: int = 0
    """Bytes up to which the log takes new writes again, at most `store_bytes_max`. 0 is a tenth less than
    `store_bytes_max`."""
    look_ms: int = 1000
    """Interval between looks at the free bytes, and between attempts to write to a full disk."""
    store_look_ms: int = 10_000
    """Interval between counts of the bytes of the store: a large database takes a while to add them up."""

    def __post_init__(self) -> None:
        may_be_zero = [name for name in self.__struct_fields__ if "bytes" in name]
        check_whole_numbers(self, self.__struct_fields__, may_be_zero=may_be_zero)

    @property
    def free_again_bytes(self) -> int:
        """So many must be free again."""
        margin = self.free_bytes_min * HYSTERESIS_PERCENT // 100
        return max(self.free_again_bytes_min or self.free_bytes_min + margin, self.free_bytes_min)

    @property
    def store_again_bytes(self) -> int:
        """So few must the store have again."""
        margin = self.store_bytes_max * HYSTERESIS_PERCENT // 100
        return min(self.store_again_bytes_max or self.store_bytes_max - margin, self.store_bytes_max)


class ReadOnlyReason(Enum):
    """Why no new writes are taken."""

    OPERATOR = "operator"
    FREE = "free"
    """Too little of the disk is free."""
    SIZE = "size"
    """The store has come to its limit."""
    FULL = "full"
    """A commit found no room."""


class WriteGate:
    """One for a log in a process. Everything happens on the event loop's thread."""

    def __init__(self, store: Store, disk_limits: DiskLimits | None) -> None:
        self._store = store
        self.disk_limits = disk_limits
        """None does not look at all: then only an operator can say that no new writes are taken."""
        self._reasons: dict[ReadOnlyReason, str] = {}
        self.on_change: Callable[[bool, str, str], None] | None = None
        """Called when the log starts or ends to refuse new writes: whether it does, why, and the operator's actor."""
        self._poll_task: asyncio.Task[None] | None = None
        self._since_store_poll_ms = 0
        """The last look at the store."""
        self._pause_ms = 0
        self._waited_ms = 0
        self._not_full_ms = PAUSE_MS_MAX
        """How long to wait before a full disk is tried, how long that has been, and for how long it was not full."""
        self.free_bytes: int | None = None
        """As of the last look."""
        self.store_bytes: int | None = None
        """The same."""

    @property
    def message(self) -> str:
        """Why no new writes are taken; empty if they are."""
        return "; ".join(self._reasons.values())

    @property
    def reasons(self) -> frozenset[ReadOnlyReason]:
        """The same for machines."""
        return frozenset(self._reasons)

    def refresh_message(self) -> str:
        """The message, for a batch that is about to be committed."""
        if self.disk_limits is not None and self.disk_limits.free_bytes_min:
            self._poll_disk()
        return self.message if self._reasons else ""

    def set_read_only(self, *, is_read_only: bool, actor: str = "") -> None:
        """The operator's switch."""
        self._set_reason(ReadOnlyReason.OPERATOR, is_read_only, "an operator has set it so", actor)

    def set_limits(self, disk_limits: DiskLimits | None) -> None:
        """Other limits from now on."""
        self.disk_limits = disk_limits
        self._poll_disk()
        self._check_store_size()
        if disk_limits is None:
            self._set_reason(ReadOnlyReason.FULL, False)
        else:
            self._since_store_poll_ms = (
                disk_limits.store_look_ms
            )  # the store is looked at next, however long ago the last look was
            self._start_polling()

    def notify_failure(self, error: BaseException) -> None:
        """A commit was not made."""
        if self.disk_limits is not None and isinstance(error, DiskFullError):
            if ReadOnlyReason.FULL not in self._reasons:
                # What is tried is small: it may fit where a large commit does not, again and again.
                self._pause_ms = min(2 * self._pause_ms, PAUSE_MS_MAX) if self._not_full_ms < PAUSE_MS_MAX else 0
                self._pause_ms = max(self._pause_ms, self.disk_limits.look_ms)
                self._waited_ms = 0
            self._set_reason(ReadOnlyReason.FULL, True, "the disk is full")

    # --- looking

    async def start(self) -> None:
        """Looks once, and from then on by the clock."""
        if self.disk_limits is not None:
            self._poll_disk()
            await self._poll_store()
            self._start_polling()

    async def stop(self) -> None:
        """Looks no more."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.wait([self._poll_task])

    def _start_polling(self) -> None:
        if self._poll_task is None and self.disk_limits is not None:
            self._poll_task = asyncio.get_running_loop().create_task(self._poll())

    async def _poll(self) -> None:
        # What the limits are is asked anew after every wait: they may be others by then.
        while (before := self.disk_limits) is not None:
            await asyncio.sleep(before.look_ms / 1000)
            self._since_store_poll_ms += before.look_ms
            self._poll_disk()
            disk_limits = self.disk_limits
            if disk_limits is not None and self._since_store_poll_ms >= disk_limits.store_look_ms:
                self._since_store_poll_ms = 0
                await self._poll_store()
            # The write-ahead log takes space of its own, and no commit arrives to empty it.
            if ReadOnlyReason.FREE in self._reasons and await self._try_call(self._store.scrub, "no room was made"):
                self._poll_disk()
            if ReadOnlyReason.FULL not in self._reasons:
                self._not_full_ms += before.look_ms
                continue
            self._waited_ms += before.look_ms
            if self._waited_ms >= self._pause_ms:
                self._waited_ms = 0
                await self._probe()
        self._poll_task = None

    def _poll_disk(self) -> None:
        self.free_bytes = self._store.free_bytes()
        limits = self.disk_limits or DiskLimits()
        message = f"less than {limits.free_bytes_min} bytes of the disk are free"
        self._check_bytes(
            ReadOnlyReason.FREE, self.free_bytes, lt, limits.free_bytes_min, limits.free_again_bytes, message
        )

    def _check_store_size(self) -> None:
        """Compare the last known size of the store with its limit."""
        limits = self.disk_limits or DiskLimits()
        message = f"the store has more than {limits.store_bytes_max} bytes"
        self._check_bytes(
            ReadOnlyReason.SIZE, self.store_bytes, gt, limits.store_bytes_max, limits.store_again_bytes, message
        )

    def _check_bytes(
        self,
        reason: ReadOnlyReason,
        found: int | None,
        is_beyond: Callable[[int, int], bool],
        limit: int,
        resume_limit: int,
        message: str,
    ) -> None:
        """Set or clear a reason. Once it is set, `resume_limit` applies, so that it does not change with every poll."""
        if not limit:
            self._set_reason(reason, False)
        elif found is not None:
            is_active = is_beyond(found, resume_limit if reason in self._reasons else limit)
            self._set_reason(reason, is_active, message)

    async def _poll_store(self) -> None:
        # A reader that took long kept bytes in the write-ahead log, and no commit arrives to remove them.
        if ReadOnlyReason.SIZE in self._reasons and not await self._try_call(self._store.scrub, "no room was made"):
            return
        if await self._try_call(self._measure_store, "the size of the store is not known"):
            self._check_store_size()

    async def _measure_store(self) -> None:
        self.store_bytes = await self._store.size_bytes()

    async def _probe(self) -> None:
        """Clear the reason FULL if the store can write again."""
        if not await self._try_call(self._store.probe, "still nothing can be written"):
            return
        free = self._store.free_bytes()
        if free is None or free >= PROBE_FREE_BYTES_MIN:
            self._not_full_ms = 0
            self._set_reason(ReadOnlyReason.FULL, False)

    async def _try_call(self, call: Callable[[], Awaitable[object]], failure: str) -> bool:
        """Return whether the call succeeded. No error may end the polling."""
        try:
            await call()
        except OncelogError as error:
            logger.debug("%s: %s", failure, error)  # callers of `submit` get the error
        except Exception:
            logger.warning("%s; it is tried again", failure, exc_info=True)
        else:
            return True
        return False

    def _set_reason(self, reason: ReadOnlyReason, is_active: bool, message: str = "", actor: str = "") -> None:
        """Set or clear a reason. Logs each change once."""
        if is_active == (reason in self._reasons):
            return
        was_read_only = bool(self._reasons)
        if is_active:
            self._reasons[reason] = message
            logger.warning("no new writes are taken: %s", message)
        else:
            message = self._reasons.pop(reason)
            if self._reasons:
                logger.warning("no new writes are taken yet, but this is over: %s", message)
            else:
                logger.warning("new writes are taken again; this is over: %s", message)
        is_read_only = bool(self._reasons)
        if self.on_change is not None and (is_read_only != was_read_only or reason is ReadOnlyReason.OPERATOR):
            self.on_change(is_active if reason is ReadOnlyReason.OPERATOR else is_read_only, message, actor)
