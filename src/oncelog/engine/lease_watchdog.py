"""Leases that this process holds, and their renewal while the event loop is blocked.

The event loop renews leases in rounds (`engine.working`). A function that blocks the loop stops the rounds as well. The
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
from oncelog.engine.work import Holding
from oncelog.stores.protocol import Store

logger: Final = logging.getLogger("oncelog.work")

ROUNDS: Final = 4
"""Rounds of renewals in the time that a lease lasts."""
LATE_ROUNDS: Final = 2
"""The loop counts as blocked when a round is late by another one: half of a lease is left to renew it."""
LATE_S_MIN: Final = 0.05
"""A busy machine delays a round by that much. Leases of less than a tenth of a second are too short to be saved."""
RETRIES: Final = 8
"""Attempts in the time that a lease lasts, while the second store fails."""
PAUSE_S_MIN: Final = 0.001
"""Between two checks: a thread that wakes up too early would take the loop for free."""


class LeaseGroup:
    """Leases of one length that this process holds. Any thread may use it.

    A lease is renewed from the second round on that finds it: when a fourth to a half of its time is over.
    """

    def __init__(self, lease_ms: int) -> None:
        self.round_s = lease_ms / 1000 / ROUNDS
        self.timer: asyncio.TimerHandle | None = None
        self._young: set[Holding] = set()
        self._old: set[Holding] = set()
        self._lock = threading.Lock()
        self.renewed_s = time.monotonic()
        """When the last round began."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def late_s(self) -> float:
        """The moment from which on the event loop counts as blocked."""
        return self.renewed_s + max(LATE_ROUNDS * self.round_s, LATE_S_MIN)

    def add(self, holding: Holding) -> None:
        """Add a lease that was granted just now."""
        with self._lock:
            self._young.add(holding)

    def remove(self, holding: Holding) -> bool:
        """Return whether the lease was still here."""
        with self._lock:
            held = self._young if holding in self._young else self._old
            if holding not in held:
                return False
            held.remove(holding)
            return True

    def begin_round(self) -> list[Holding]:
        """Return the leases that are due. Younger leases are due in the next round."""
        with self._lock:
            due = list(self._old)
            self._old |= self._young
            self._young.clear()
            self.renewed_s = time.monotonic()
            return due

    def members(self) -> list[Holding]:
        """Return all leases of the group."""
        with self._lock:
            return [*self._young, *self._old]

    def remove_overrun(self) -> list[Holding]:
        """Remove the leases whose work has reached its maximum run time: they are not renewed any more."""
        now_s = time.monotonic()
        overrun = [holding for holding in self.members() if now_s >= holding.renewed_until_s and self.remove(holding)]
        for holding in overrun:
            run_s_max = holding.work.run_ms_max / 1000
            logger.warning("work has run for %g s (run_s_max): its lease is not renewed any more", run_s_max)
        return overrun

    def remove_lost(self, holding: Holding, verdict: Verdict) -> bool:
        """Remove a lease that another caller has taken over, by the verdict of its renewal. Return whether it was."""
        if not (isinstance(verdict, Refused) and verdict.reason is Reason.LEASE_LOST and self.remove(holding)):
            return False
        holding.is_lost = True
        logger.warning("a lease was lost while its work was being done: %s", verdict.message)
        return True


def renewal(holding: Holding) -> Renew:
    """Return the item that renews a lease."""
    work = holding.work
    return Renew(
        policy=work.policy,
        scope=work.scope,
        key=work.key,
        holder=holding.holder,
        fence=holding.fence,
        lease_ms=work.lease_ms,
    )


class LeaseWatchdog:
    """Renews leases from a thread while the event loop is blocked.

    `let_go` is called in that thread with a lease that was lost, or whose work has reached its maximum run time.
    """

    def __init__(self, store: Store, let_go: Callable[[Holding], None]) -> None:
        self._store = store
        self._let_go = let_go
        self._groups: list[LeaseGroup] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop that runs the renewal rounds."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        """The last one that was started."""
        self._second: _SecondStore | None = None
        """Of that thread."""
        self._is_running = False
        self._is_closed = False
        self._retry_s = 0.0
        """When to try again after a failure."""
        self._warning = logging.WARNING
        """The level of the next failure: WARNING for the first one in a row."""

    def watch(self, group: LeaseGroup) -> None:
        """Watch the rounds of a group until `forget`. Called on the event loop."""
        if self._store.sibling() is None:
            return  # no other process or thread can take over
        self._loop = asyncio.get_running_loop()
        with self._changed:
            self._groups.append(group)
            if not self._is_running and not self._is_closed:
                self._is_running = True
                self._second = _SecondStore(self._store)
                self._thread = threading.Thread(
                    target=self._run, args=(self._second, self._thread), name="oncelog-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def forget(self, group: LeaseGroup) -> None:
        """Stop watching a group. The thread ends when it has nothing to watch."""
        with self._changed:
            if group in self._groups:
                self._groups.remove(group)
            self._changed.notify()

    async def close(self) -> None:
        """End the thread and close the second store."""
        with self._changed:
            self._is_closed = True
            thread, second = self._thread, self._second
            self._changed.notify()
        if thread is not None and second is not None:
            second.cancel()
            await asyncio.to_thread(thread.join)

    # --- in the thread

    def _run(self, second: "_SecondStore", previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()  # it may still close its store
        while True:
            with self._changed:
                if self._groups and not self._is_closed:
                    due_s = max(self._retry_s, min(group.late_s for group in self._groups))
                    self._changed.wait(max(0.0, due_s - time.monotonic()) + PAUSE_S_MIN)
                if self._is_closed or not self._groups or (self._loop is not None and self._loop.is_closed()):
                    self._is_running = False
                    break
                groups = list(self._groups)
            self._renew_late(groups, second)
        second.close()

    def _renew_late(self, groups: Sequence[LeaseGroup], second: "_SecondStore") -> None:
        """Renew the leases whose round is late."""
        late = [group for group in groups if time.monotonic() >= group.late_s]
        if not late:
            second.close()  # the loop renews its leases again
        for group in late:
            began_s = time.monotonic()
            try:
                self._renew(group, second)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may succeed
                logger.log(self._warning, "the event loop is blocked, and its leases are not renewed: %s", error)
                self._warning = logging.DEBUG
                self._retry_s = time.monotonic() + group.round_s * ROUNDS / RETRIES
                return
            self._warning = logging.WARNING
            group.renewed_s = max(group.renewed_s, began_s)

    def _renew(self, group: LeaseGroup, second: "_SecondStore") -> None:
        for holding in group.remove_overrun():
            self._let_go(holding)
        held = group.members()
        if held:
            verdicts = second.commit([renewal(holding) for holding in held])
            logger.info("the event loop is blocked; a thread renewed %d leases", len(held))
            for holding, verdict in zip(held, verdicts, strict=True):
                if group.remove_lost(holding, verdict):
                    self._let_go(holding)


class _SecondStore:
    """A sibling of the log's store, with an event loop for the thread that uses it. Opened by its first commit."""

    def __init__(self, store: Store) -> None:
        self._first = store
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
            store = self._first.sibling()
            if store is None:
                raise ConnectionAbortedError("only the event loop can reach the log")
            await store.open()
            self._store = store
        decided = await self._store.commit([Request(tuple(items))])
        return decided.verdicts[0]
