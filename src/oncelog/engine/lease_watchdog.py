"""Tracks the leases that this process holds, and renews them while the event loop is blocked.

The event loop renews leases in rounds (`engine.leases`). A function that blocks the event loop also blocks the rounds.
The watchdog is a thread with a second event loop. It detects a late round and renews the leases through a second store
on the same log. The thread runs only while leases are held, and opens the second store only while the first event loop
is blocked. It exits when the first event loop is closed, because work on a closed loop never completes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from oncelog.core.values import Reason, Refused, Renew, Request, Verdict
from oncelog.engine.held_lease import HeldLease
from oncelog.storage.store import BatchResult, Store

logger: Final = logging.getLogger("oncelog.work")
"""Logger of leases."""

ROUNDS_PER_LEASE: Final = 4
"""Renewal rounds per lease duration."""
LATE_ROUNDS: Final = 2
"""The event loop counts as blocked after this many round intervals without a round. At that point, half of the lease
duration is left."""
LATE_S_MIN: Final = 0.05
"""Round delay that is normal on a busy machine. Leases below a tenth of a second cannot be renewed in time."""
RETRIES_PER_LEASE: Final = 8
"""Attempts per lease duration while the second store fails."""
PAUSE_S_MIN: Final = 0.001
"""Margin added to the thread's sleep. Without it the thread could wake just before the round is late and conclude that
the event loop is not blocked."""


class LeaseGroup:
    """The leases with the same duration that this process holds. Any thread may use the group.

    A lease is due from its second round onward, when a quarter to a half of its duration has passed.
    """

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        self.round_s = lease_ms / 1000 / ROUNDS_PER_LEASE
        self.timer: asyncio.TimerHandle
        self._leases: dict[HeldLease, bool] = {}
        """The held leases. The value is True if the lease is due in the next round."""
        self._lock = threading.Lock()
        self.renewed_s = time.monotonic()
        """Start of the last round."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def late_s(self) -> float:
        """Time after which the event loop counts as blocked."""
        return self.renewed_s + max(LATE_ROUNDS * self.round_s, LATE_S_MIN)

    def add(self, lease: HeldLease) -> None:
        """Add a new lease."""
        with self._lock:
            self._leases[lease] = False

    def remove(self, lease: HeldLease) -> bool:
        """Remove a lease. Return whether the group contained it."""
        with self._lock:
            return self._leases.pop(lease, None) is not None

    def begin_round(self) -> list[HeldLease]:
        """Start a round and return the leases that are due. All other leases are due in the next round."""
        with self._lock:
            due = [lease for lease, is_due in self._leases.items() if is_due]
            self._leases = dict.fromkeys(self._leases, True)
            self.renewed_s = time.monotonic()
            return due

    def list_leases(self) -> list[HeldLease]:
        """Return all leases of the group."""
        with self._lock:
            return list(self._leases)

    def remove_overrun(self) -> list[HeldLease]:
        """Remove and return the leases whose work has reached its maximum run time. They are no longer renewed."""
        now_s = time.monotonic()
        overrun = [lease for lease in self.list_leases() if now_s >= lease.renewed_until_s and self.remove(lease)]
        for lease in overrun:
            run_s_max = lease.work.run_ms_max / 1000
            logger.warning("work has run for %g s (run_s_max); its lease is no longer renewed", run_s_max)
        return overrun

    def remove_lost(self, lease: HeldLease, verdict: Verdict) -> bool:
        """Remove a lease if its renewal was refused because another caller has taken over. Return whether it was
        removed."""
        if not (isinstance(verdict, Refused) and verdict.reason is Reason.LEASE_LOST and self.remove(lease)):
            return False
        lease.is_lost = True
        logger.warning("a lease was lost while its work was running: %s", verdict.message)
        return True


def build_renewal(lease: HeldLease) -> Renew:
    """Return the item that renews a lease."""
    return Renew(**lease.fields, fence=lease.fence, lease_ms=lease.work.lease_ms)


class LeaseWatchdog:
    """Renews leases from a thread while the event loop is blocked.

    Once unblocked, the event loop calls `on_lost` for each lease that was lost or has reached its maximum run time.
    """

    def __init__(self, store: Store, on_lost: Callable[[HeldLease], None]) -> None:
        self._store = store
        self._on_lost = on_lost
        self._groups: list[LeaseGroup] = []
        self._loop: asyncio.AbstractEventLoop
        """Event loop that runs the renewal rounds. Set when the first group is watched."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        """Newest thread. It waits for the previous one to finish."""
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the newest thread, or None until the thread runs."""
        self._is_running = False
        self._is_closed = False
        # Only the watchdog thread uses the following attributes.
        self._wakeup = asyncio.Event()
        self._commit: asyncio.Task[BatchResult] | None = None
        self._second_store: Store | None = None
        self._retry_s = 0.0
        """Earliest time of the next attempt after a failure."""
        self._failure_level = logging.WARNING
        """Log level for the next failure: WARNING for the first of several in a row."""

    def watch(self, group: LeaseGroup) -> None:
        """Watch the rounds of a group until `unwatch`. Called in the event loop."""
        if self._store.create_sibling() is None:
            return  # only this event loop can reach the log, so no other caller can take over
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._groups.append(group)
            if not self._is_running and not self._is_closed:
                self._is_running = True
                self._thread_loop = None
                self._thread = threading.Thread(
                    target=self._run, args=(self._thread,), name="oncelog-leases", daemon=True
                )
                self._thread.start()
        self._notify()

    def unwatch(self, group: LeaseGroup) -> None:
        """Stop watching a group. The thread exits when no group is left."""
        with self._lock, suppress(ValueError):
            self._groups.remove(group)
        self._notify()

    async def close(self) -> None:
        """Cancel a running renewal, stop the thread and close the second store."""
        with self._lock:
            self._is_closed = True
        self._notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _notify(self) -> None:
        """Wake the thread. A thread without an event loop reads the groups when it starts."""
        if self._thread_loop is not None:
            with suppress(RuntimeError):  # the thread has exited
                self._thread_loop.call_soon_threadsafe(self._wake)

    # --- in the thread

    def _run(self, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()  # it may still close its store
        with suppress(asyncio.CancelledError):
            asyncio.run(self._watch())

    def _wake(self) -> None:
        self._wakeup.set()
        if self._is_closed and self._commit is not None:
            self._commit.cancel()

    async def _watch(self) -> None:
        self._wakeup = asyncio.Event()
        self._thread_loop = asyncio.get_running_loop()
        try:
            while groups := self._list_groups():
                due_s = max(self._retry_s, min(group.late_s for group in groups))
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due_s - time.monotonic()) + PAUSE_S_MIN):
                        await self._wakeup.wait()
                self._wakeup.clear()
                await self._renew_late(self._list_groups())
        finally:
            await self._close_second_store()

    def _list_groups(self) -> list[LeaseGroup]:
        """Return the groups to watch. Without groups the thread exits, and the next `watch` starts a new one."""
        with self._lock:
            if self._is_closed or self._loop.is_closed():
                self._groups.clear()
            self._is_running = bool(self._groups)
            return list(self._groups)

    async def _renew_late(self, groups: Sequence[LeaseGroup]) -> None:
        """Renew the leases whose round is late."""
        late = [group for group in groups if time.monotonic() >= group.late_s]
        if not late:
            await self._close_second_store()  # the first event loop is running its rounds again
        for group in late:
            began_s = time.monotonic()
            try:
                await self._renew(group)
            except Exception as error:  # noqa: BLE001 - the next attempt may succeed
                logger.log(self._failure_level, "the event loop is blocked, and its leases are not renewed: %s", error)
                self._failure_level = logging.DEBUG
                self._retry_s = time.monotonic() + group.round_s * ROUNDS_PER_LEASE / RETRIES_PER_LEASE
                return
            self._failure_level = logging.WARNING
            group.renewed_s = max(group.renewed_s, began_s)

    async def _renew(self, group: LeaseGroup) -> None:
        lost = group.remove_overrun()
        leases = group.list_leases()
        if leases:
            self._commit = asyncio.create_task(self._commit_renewals(leases))
            verdicts = (await self._commit).verdicts[0]
            logger.info("the event loop is blocked; a thread renewed %d leases", len(leases))
            lost += [
                lease for lease, verdict in zip(leases, verdicts, strict=True) if group.remove_lost(lease, verdict)
            ]
        for lease in lost:
            with suppress(RuntimeError):  # the event loop has been closed
                self._loop.call_soon_threadsafe(self._on_lost, lease)

    async def _commit_renewals(self, leases: Sequence[HeldLease]) -> BatchResult:
        """Renew leases through the second store, which the first renewal opens."""
        if self._second_store is None:
            store = self._store.create_sibling()
            if store is None:
                raise ConnectionAbortedError("only the event loop can reach the log")
            await store.open()
            self._second_store = store
        return await self._second_store.commit([Request(tuple(map(build_renewal, leases)))])

    async def _close_second_store(self) -> None:
        store, self._second_store = self._second_store, None
        if store is not None:
            try:
                await store.close()
            except Exception as error:  # noqa: BLE001 - the renewals are already durable
                logger.debug("the store of the lease watchdog was not closed: %s", error)
