"""Leases that this process holds, and their renewal while the event loop is blocked.

The event loop renews leases in rounds (`engine.leases`). A function that blocks the loop stops the rounds as well. The
watchdog is a thread that notices a missing round and renews the leases by itself, through a second store on the same
log. It runs only while leases are held, and opens the second store only while the loop is blocked. It ends when the
loop is closed, because work of a closed loop never completes.
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
from oncelog.storage.store import Store

logger: Final = logging.getLogger("oncelog.work")

ROUNDS_PER_LEASE: Final = 4
"""Rounds of renewals in the time that a lease lasts."""
LATE_ROUNDS: Final = 2
"""The loop counts as blocked when a round is late by another one: half of a lease is left to renew it."""
LATE_S_MIN: Final = 0.05
"""A busy machine delays a round by that much. Leases of less than a tenth of a second are too short to be saved."""
RETRIES_PER_LEASE: Final = 8
"""Attempts in the time that a lease lasts, while the second store fails."""
PAUSE_S_MIN: Final = 0.001
"""Between two checks: a thread that wakes up too early would take the loop for free."""


class LeaseGroup:
    """Leases of one length that this process holds. Any thread may use it.

    A lease is renewed from the second round on that finds it: when a fourth to a half of its time is over.
    """

    def __init__(self, lease_ms: int) -> None:
        self.round_s = lease_ms / 1000 / ROUNDS_PER_LEASE
        self.timer: asyncio.TimerHandle | None = None
        self._new: set[HeldLease] = set()
        self._renewable: set[HeldLease] = set()
        self._lock = threading.Lock()
        self.renewed_s = time.monotonic()
        """When the last round began."""

    def __len__(self) -> int:
        return len(self._new) + len(self._renewable)

    @property
    def late_s(self) -> float:
        """The moment from which on the event loop counts as blocked."""
        return self.renewed_s + max(LATE_ROUNDS * self.round_s, LATE_S_MIN)

    def add(self, lease: HeldLease) -> None:
        """Add a lease that was granted just now."""
        with self._lock:
            self._new.add(lease)

    def remove(self, lease: HeldLease) -> bool:
        """Return whether the lease was still here."""
        with self._lock:
            leases = self._new if lease in self._new else self._renewable
            if lease not in leases:
                return False
            leases.remove(lease)
            return True

    def begin_round(self) -> list[HeldLease]:
        """Return the leases that are due. Younger leases are due in the next round."""
        with self._lock:
            due = list(self._renewable)
            self._renewable |= self._new
            self._new.clear()
            self.renewed_s = time.monotonic()
            return due

    def list_leases(self) -> list[HeldLease]:
        """Return all leases of the group."""
        with self._lock:
            return [*self._new, *self._renewable]

    def remove_overrun(self) -> list[HeldLease]:
        """Remove the leases whose work has reached its maximum run time: they are not renewed any more."""
        now_s = time.monotonic()
        overrun = [lease for lease in self.list_leases() if now_s >= lease.renewed_until_s and self.remove(lease)]
        for lease in overrun:
            run_s_max = lease.work.run_ms_max / 1000
            logger.warning("work has run for %g s (run_s_max): its lease is not renewed any more", run_s_max)
        return overrun

    def remove_lost(self, lease: HeldLease, verdict: Verdict) -> bool:
        """Remove a lease that another caller has taken over, by the verdict of its renewal. Return whether it was."""
        if not (isinstance(verdict, Refused) and verdict.reason is Reason.LEASE_LOST and self.remove(lease)):
            return False
        lease.is_lost = True
        logger.warning("a lease was lost while its work was being done: %s", verdict.message)
        return True


def build_renewal(lease: HeldLease) -> Renew:
    """Return the item that renews a lease."""
    work = lease.work
    return Renew(
        policy=work.policy,
        scope=work.scope,
        key=work.key,
        holder=lease.holder,
        fence=lease.fence,
        lease_ms=work.lease_ms,
    )


class LeaseWatchdog:
    """Renews leases from a thread while the event loop is blocked.

    `on_lost` is called in that thread with a lease that was lost, or whose work has reached its maximum run time.
    """

    def __init__(self, store: Store, on_lost: Callable[[HeldLease], None]) -> None:
        self._store = store
        self._on_lost = on_lost
        self._groups: list[LeaseGroup] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop that runs the renewal rounds."""
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        """The last one that was started."""
        self._second_store: _SecondStore | None = None
        """Of that thread."""
        self._is_running = False
        self._is_closed = False
        self._retry_s = 0.0
        """When to try again after a failure."""
        self._failure_level = logging.WARNING
        """The level of the next failure: WARNING for the first one in a row."""

    def watch(self, group: LeaseGroup) -> None:
        """Watch the rounds of a group until `unwatch`. Called on the event loop."""
        if self._store.create_sibling() is None:
            return  # no other process or thread can take over
        self._loop = asyncio.get_running_loop()
        with self._condition:
            self._groups.append(group)
            if not self._is_running and not self._is_closed:
                self._is_running = True
                self._second_store = _SecondStore(self._store)
                self._thread = threading.Thread(
                    target=self._run, args=(self._second_store, self._thread), name="oncelog-leases", daemon=True
                )
                self._thread.start()
            self._condition.notify()

    def unwatch(self, group: LeaseGroup) -> None:
        """Stop watching a group. The thread ends when it has nothing to watch."""
        with self._condition:
            if group in self._groups:
                self._groups.remove(group)
            self._condition.notify()

    async def close(self) -> None:
        """End the thread and close the second store."""
        with self._condition:
            self._is_closed = True
            thread, second = self._thread, self._second_store
            self._condition.notify()
        if thread is not None and second is not None:
            second.cancel()
            await asyncio.to_thread(thread.join)

    # --- in the thread

    def _run(self, second_store: "_SecondStore", previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()  # it may still close its store
        while True:
            with self._condition:
                if self._groups and not self._is_closed:
                    due_s = max(self._retry_s, min(group.late_s for group in self._groups))
                    self._condition.wait(max(0.0, due_s - time.monotonic()) + PAUSE_S_MIN)
                if self._is_closed or not self._groups or (self._loop is not None and self._loop.is_closed()):
                    self._is_running = False
                    break
                groups = list(self._groups)
            self._renew_late(groups, second_store)
        second_store.close()

    def _renew_late(self, groups: Sequence[LeaseGroup], second_store: "_SecondStore") -> None:
        """Renew the leases whose round is late."""
        late = [group for group in groups if time.monotonic() >= group.late_s]
        if not late:
            second_store.close()  # the loop renews its leases again
        for group in late:
            began_s = time.monotonic()
            try:
                self._renew(group, second_store)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may succeed
                logger.log(self._failure_level, "the event loop is blocked, and its leases are not renewed: %s", error)
                self._failure_level = logging.DEBUG
                self._retry_s = time.monotonic() + group.round_s * ROUNDS_PER_LEASE / RETRIES_PER_LEASE
                return
            self._failure_level = logging.WARNING
            group.renewed_s = max(group.renewed_s, began_s)

    def _renew(self, group: LeaseGroup, second_store: "_SecondStore") -> None:
        for lease in group.remove_overrun():
            self._on_lost(lease)
        leases = group.list_leases()
        if leases:
            verdicts = second_store.commit([build_renewal(lease) for lease in leases])
            logger.info("the event loop is blocked; a thread renewed %d leases", len(leases))
            for lease, verdict in zip(leases, verdicts, strict=True):
                if group.remove_lost(lease, verdict):
                    self._on_lost(lease)


class _SecondStore:
    """A sibling of the log's store, with an event loop for the thread that uses it. Opened by its first commit."""

    def __init__(self, store: Store) -> None:
        self._first_store = store
        self._store: Store | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[list[Verdict]] | None = None
        self._is_cancelled = False

    def commit(self, items: Sequence[Renew]) -> list[Verdict]:
        """Commit items as one request, each with its own verdict. Raises what the store raises."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._task = self._loop.create_task(self._commit(items))
        if self._is_cancelled:
            task.cancel()
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError as error:
            raise ConnectionAbortedError("the log is being closed") from error
        finally:
            self._task = None

    def close(self) -> None:
        """Close the store, if it is open."""
        store, self._store = self._store, None
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            if store is not None:
                loop.run_until_complete(store.close())
        except Exception as error:  # noqa: BLE001 - the renewals are durable already
            logger.debug("the store of the lease watchdog was not closed: %s", error)
        finally:
            loop.close()

    def cancel(self) -> None:
        """End a commit that is under way, from another thread, and refuse all others."""
        self._is_cancelled = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # the loop has been closed: nothing is under way
                loop.call_soon_threadsafe(task.cancel)

    async def _commit(self, items: Sequence[Renew]) -> list[Verdict]:
        if self._store is None:
            store = self._first_store.create_sibling()
            if store is None:
                raise ConnectionAbortedError("only the event loop can reach the log")
            await store.open()
            self._store = store
        result = await self._store.commit([Request(tuple(items))])
        return result.verdicts[0]
