"""Refuses new writes while the disk is nearly full, or while an operator has made the log read-only.

A read-only log still serves reads and answers retries. It also accepts writes that complete work or free space:
completions of leased work, cursors, erasures, and members that leave or are removed. The disk limits leave space for
these writes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from operator import gt, lt
from typing import Final

from msgspec import Struct

from oncelog.core.limits import check_whole_numbers
from oncelog.engine import logger
from oncelog.errors import DiskFullError, OncelogError
from oncelog.storage.store import Store

PAUSE_MS_MAX: Final = 10_000
"""Maximum pause between two probes of a disk that was found full repeatedly."""
PROBE_FREE_BYTES_MIN: Final = 2**20
"""Free bytes below which a disk still counts as full: a probe's small write can succeed where a commit cannot."""
RETRY_AFTER_MS: Final = 5000
"""How long a refused client should wait before it sends the write again."""
HYSTERESIS_PERCENT: Final = 10
"""Default distance from a limit at which the log accepts new writes again, in percent of the limit."""


class DiskLimits(Struct, frozen=True, kw_only=True):
    """Limits at which a log refuses new writes because its disk is nearly full. 0 disables a limit."""

    free_bytes_min: int = 0
    """Minimum free bytes in the file system of the log file, after subtracting the size of the -wal file. The log
    refuses new writes while fewer bytes are free."""
    free_again_bytes_min: int = 0
    """The log accepts new writes again once this many bytes are free. At least `free_bytes_min`; 0 means a tenth more
    than `free_bytes_min`."""
    store_bytes_max: int = 0
    """Maximum size of the database or file. Above this the log refuses new writes."""
    store_again_bytes_max: int = 0
    """The log accepts new writes again once its size is down to this. At most `store_bytes_max`; 0 means a tenth less
    than `store_bytes_max`."""
    look_ms: int = 1000
    """Interval between measurements of the free bytes, and minimum interval between probes of a full disk."""
    store_look_ms: int = 10_000
    """Interval between measurements of the store's size, which take a while for a large database."""

    def __post_init__(self) -> None:
        may_be_zero = [name for name in self.__struct_fields__ if "bytes" in name]
        check_whole_numbers(self, self.__struct_fields__, may_be_zero=may_be_zero)

    @property
    def free_again_bytes(self) -> int:
        """Free bytes at which the log accepts new writes again."""
        margin = self.free_bytes_min * HYSTERESIS_PERCENT // 100
        return max(self.free_again_bytes_min or self.free_bytes_min + margin, self.free_bytes_min)

    @property
    def store_again_bytes(self) -> int:
        """Store size at which the log accepts new writes again."""
        margin = self.store_bytes_max * HYSTERESIS_PERCENT // 100
        return min(self.store_again_bytes_max or self.store_bytes_max - margin, self.store_bytes_max)


DISK_DEFAULTS: Final = DiskLimits(free_bytes_min=256 * 2**20)
"""A server checks its disk space by default. An embedded log does not, but `oncelog doctor` uses this limit for it."""


class ReadOnlyReason(Enum):
    """Why the log refuses new writes."""

    OPERATOR = "operator"
    FREE = "free"
    """The disk has too few free bytes."""
    SIZE = "size"
    """The store exceeds its limit."""
    FULL = "full"
    """A commit failed because the disk was full."""


class WriteGate:
    """Accepts or refuses new writes to one log in one process. Used only in the event loop."""

    def __init__(self, store: Store, disk_limits: DiskLimits | None) -> None:
        self._store = store
        self.disk_limits = disk_limits
        """None disables polling: only an operator can then set the log read-only."""
        self._reasons: dict[ReadOnlyReason, str] = {}
        self.on_change: Callable[[bool, str, str], None] | None = None
        """Called when the log starts or stops refusing new writes. The arguments are whether it refuses them, the
        reason and the actor."""
        self._poll_task: asyncio.Task[None] | None = None
        self._since_store_poll_ms = 0
        """Time since the store was last measured."""
        self._pause_ms = 0
        """Pause before the next probe of a full disk."""
        self._waited_ms = 0
        """Time since the disk was found full, or since the last probe."""
        self._not_full_ms = PAUSE_MS_MAX
        """Time since the disk was last found full."""
        self.free_bytes: int | None = None
        """Free bytes at the last measurement."""
        self.store_bytes: int | None = None
        """Size of the store at the last measurement."""

    @property
    def message(self) -> str:
        """Why the log refuses new writes, as a message. Empty if it accepts them."""
        return "; ".join(self._reasons.values())

    @property
    def reasons(self) -> frozenset[ReadOnlyReason]:
        """Why the log refuses new writes, as values for programs."""
        return frozenset(self._reasons)

    def refresh_message(self) -> str:
        """Measure the free bytes before a commit, and return the message."""
        if self.disk_limits is not None and self.disk_limits.free_bytes_min:
            self._poll_disk()
        return self.message if self._reasons else ""

    def set_read_only(self, *, is_read_only: bool, actor: str = "") -> None:
        """Make the log read-only on behalf of an operator, or writable again."""
        self._set_reason(ReadOnlyReason.OPERATOR, is_read_only, "an operator has made the log read-only", actor)

    def set_limits(self, disk_limits: DiskLimits | None) -> None:
        """Replace the limits and check them immediately."""
        self.disk_limits = disk_limits
        self._poll_disk()
        self._check_store_size()
        if disk_limits is None:
            self._set_reason(ReadOnlyReason.FULL, False)
        else:
            self._since_store_poll_ms = disk_limits.store_look_ms  # the next poll measures the store
            self._start_polling()

    def notify_failure(self, error: BaseException) -> None:
        """Refuse new writes after a commit that failed because the disk is full."""
        if self.disk_limits is not None and isinstance(error, DiskFullError):
            if ReadOnlyReason.FULL not in self._reasons:
                # A probe is small and may succeed where a large commit fails. If that happens repeatedly, pauses grow.
                self._pause_ms = min(2 * self._pause_ms, PAUSE_MS_MAX) if self._not_full_ms < PAUSE_MS_MAX else 0
                self._pause_ms = max(self._pause_ms, self.disk_limits.look_ms)
                self._waited_ms = 0
            self._set_reason(ReadOnlyReason.FULL, True, "the disk is full")

    # --- polling

    async def start(self) -> None:
        """Check all limits and start polling."""
        if self.disk_limits is not None:
            self._poll_disk()
            await self._poll_store()
            self._start_polling()

    async def stop(self) -> None:
        """Stop polling."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.wait([self._poll_task])

    def _start_polling(self) -> None:
        if self._poll_task is None and self.disk_limits is not None:
            self._poll_task = asyncio.get_running_loop().create_task(self._poll())

    async def _poll(self) -> None:
        # Read the limits again after each wait, because `set_limits` may have replaced them.
        while (before := self.disk_limits) is not None:
            await asyncio.sleep(before.look_ms / 1000)
            self._since_store_poll_ms += before.look_ms
            self._poll_disk()
            disk_limits = self.disk_limits
            if disk_limits is not None and self._since_store_poll_ms >= disk_limits.store_look_ms:
                self._since_store_poll_ms = 0
                await self._poll_store()
            # The write-ahead log uses space, and no commit arrives that would empty it.
            if ReadOnlyReason.FREE in self._reasons and await self._try_call(self._store.scrub, "scrubbing failed"):
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
        message = f"less than {limits.free_bytes_min} bytes are free on the disk"
        self._check_bytes(
            ReadOnlyReason.FREE, self.free_bytes, lt, limits.free_bytes_min, limits.free_again_bytes, message
        )

    def _check_store_size(self) -> None:
        """Compare the last known size of the store with its limit."""
        limits = self.disk_limits or DiskLimits()
        message = f"the store is larger than {limits.store_bytes_max} bytes"
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
        """Set or clear a reason. Once set, it is cleared at `resume_limit`, so that it does not change with every
        poll."""
        if not limit:
            self._set_reason(reason, False)
        elif found is not None:
            is_active = is_beyond(found, resume_limit if reason in self._reasons else limit)
            self._set_reason(reason, is_active, message)

    async def _poll_store(self) -> None:
        # A slow reader may have kept bytes in the write-ahead log, and no commit arrives that would remove them.
        if ReadOnlyReason.SIZE in self._reasons and not await self._try_call(self._store.scrub, "scrubbing failed"):
            return
        await self._try_call(self._measure_store, "measuring the store failed")

    async def _measure_store(self) -> None:
        self.store_bytes = await self._store.size_bytes()
        self._check_store_size()

    async def _probe(self) -> None:
        """Probe a full disk, and clear the reason FULL if the store can write again."""
        if not await self._try_call(self._store.probe, "the disk is still full"):
            return
        free = self._store.free_bytes()
        if free is None or free >= PROBE_FREE_BYTES_MIN:
            self._not_full_ms = 0
            self._set_reason(ReadOnlyReason.FULL, False)

    async def _try_call(self, call: Callable[[], Awaitable[object]], failure: str) -> bool:
        """Return whether the call succeeded. Errors are only logged, so that polling continues."""
        try:
            await call()
        except OncelogError as error:
            logger.debug("%s: %s", failure, error)  # callers of `submit` get the error
        except Exception:
            logger.warning("%s; retrying", failure, exc_info=True)
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
            logger.warning("new writes are refused: %s", message)
        else:
            message = self._reasons.pop(reason)
            if self._reasons:
                logger.warning("new writes are still refused; this reason no longer applies: %s", message)
            else:
                logger.warning("new writes are accepted again; this reason no longer applies: %s", message)
        is_read_only = bool(self._reasons)
        if self.on_change is not None and (is_read_only != was_read_only or reason is ReadOnlyReason.OPERATOR):
            self.on_change(is_active if reason is ReadOnlyReason.OPERATOR else is_read_only, message, actor)
