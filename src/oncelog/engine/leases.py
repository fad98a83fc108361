"""Acquires, renews and releases leases, and waits for work of others. `core.rules.leases` decides when a lease expires.

The key is claimed before the work begins, so that one caller at a time does it, in whatever process. While it goes on
its lease is renewed. Its result is committed under the lease's fencing number, so that a caller who lost the lease
cannot. `core.plan` decides; this module submits the claims, renewals and results. While a function blocks the event
loop, `engine.lease_watchdog` renews the leases.

Callers of one process that want the same key share one claim. Callers in other processes poll with growing pauses,
because the end of a lease is not announced.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, Final, TypeVar

from oncelog.core.policy import Policy
from oncelog.core.values import (
    Claim,
    Committed,
    Granted,
    Item,
    KeyIdentity,
    Reason,
    Refused,
    Release,
    Replayed,
    Submission,
    Verdict,
)
from oncelog.engine.answer_cache import ResultCache, WorkResult
from oncelog.engine.held_lease import (
    HeldLease,
    Work,
    active_keys,
    build_in_flight_error,
    build_lease_lost_error,
    encode_failure,
    mark_active,
    to_work_error,
)
from oncelog.engine.lease_watchdog import LeaseGroup, LeaseWatchdog, build_renewal
from oncelog.errors import (
    ClockJumpedError,
    ClosedError,
    InFlightError,
    LeaseLostError,
    OncelogError,
    ResultErasedError,
    RunFailedError,
    StoreUnavailableError,
    WorkError,
)
from oncelog.storage.store import Query, Store

logger: Final = logging.getLogger("oncelog.work")

PAUSE_S_MIN: Final = 0.005
PAUSE_S_MAX: Final = 0.1
"""Between two looks at work that another process does."""
CLAIMS_MAX: Final = 3
"""Claims in a row for a lease that may have ended before this process learned that it was granted."""
RELEASE_WAIT_S: Final = 1.0
"""So long a caller waits for its lease to be given back. It is tried for as long as the lease lasts."""
T = TypeVar("T")
Submit = Callable[[Item], Awaitable[Verdict]]
CacheResult = Callable[[KeyIdentity, WorkResult, int], None]


class LeaseManager:
    """All the work of one log in one process. On the log's event loop; only `recall` may come from anywhere."""

    def __init__(self, submit: Submit, store: Store, results: ResultCache, cache_result: CacheResult) -> None:
        self._submit = submit
        self._store = store
        self._results = results
        self._cache_result = cache_result
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder_prefix = secrets.token_hex(16)
        """Holders of leases are known by this and a number: nobody else can name one."""
        self._numbers = itertools.count(1)
        self._local_leases: dict[KeyIdentity, HeldLease] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._groups: dict[int, LeaseGroup] = {}
        """By their length."""
        self._watchdog = LeaseWatchdog(store, self._wake_waiters_threadsafe)
        self._is_closing = False
        self.waiting_count = 0
        """How many wait right now for work that another process does, those who wait with them not counted."""

    @property
    def leases(self) -> int:
        """How many are held here right now."""
        return sum(map(len, self._groups.values()))

    def recall(self, work: Work) -> WorkResult | None:
        """The result, if it is in memory. Of another write under the same key nothing is said here."""
        result = self._results.get(work.policy, work.identity)
        return result if result is not None and result.fingerprint == work.fingerprint else None

    async def begin(self, work: Work) -> WorkResult | HeldLease:
        """The result if there is one, else the right to do the work: then end it by one of the three below.

        It asks the store: whoever can, asks `recall` first.

        Raises ConflictError, InFlightError, RunFailedError, ResultErasedError and BusyError; if the caller who was
        waited for did the work in this process and failed, the very error of it.
        """
        if self._is_closing:
            raise ClosedError("the log is closed")
        identity = work.identity
        if identity in active_keys.get():
            raise WorkError("the work calls itself with its own key, and would wait for itself")
        deadline = None if work.wait_ms is None else self._get_loop().time() + work.wait_ms / 1000
        return await self._begin_or_wait(work, identity, deadline)

    async def complete(self, lease: HeldLease, body: bytes) -> WorkResult:
        """Commits what the work said. Raises LeaseLostError if another caller has taken over."""
        try:
            return await self._complete(lease, body)
        except asyncio.CancelledError:
            # It is on its way all the same; asked again under the same identity, the log says what became of it.
            self._start_task(self._complete(lease, body))
            raise

    async def fail(self, lease: HeldLease, error: BaseException) -> None:
        """The work failed: those who wait are told, and the next caller does it again."""
        await self._release_detached(lease, error)

    async def run(self, lease: HeldLease, call: Callable[[], Awaitable[tuple[bytes, T]]]) -> tuple[WorkResult, T]:
        """Does the work and ends it. `call` gives the body to keep, and whatever its caller wants to have beside it."""
        try:
            with mark_active(lease):
                body, value = await call()
        except Exception as error:
            await self.fail(lease, error)
            raise
        except BaseException:  # cancelled, interrupted
            await self.release(lease)
            raise
        return await self.complete(lease, body), value

    async def release(self, lease: HeldLease) -> None:
        """Nothing came of it, and nobody is to blame: one of those who wait takes over."""
        await self._release_detached(lease, None)

    async def close(self) -> None:
        """Waits for results that are being kept. Work that is still being done loses its lease when that ends."""
        self._is_closing = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._watchdog.close()
        for leases in self._groups.values():
            if leases.timer is not None:
                leases.timer.cancel()
            for lease in leases.list_leases():
                lease.fail(ClosedError("the log was closed while the work was being done"))
        self._groups.clear()
        self._local_leases.clear()

    # --- beginning

    async def _begin_or_wait(self, work: Work, identity: KeyIdentity, deadline: float | None) -> WorkResult | HeldLease:
        while True:
            local_lease = self._local_leases.get(identity)
            if local_lease is not None and work.waits and local_lease.work.fingerprint == work.fingerprint:
                result = await self._wait_outcome(local_lease, deadline)
                if result is not None:
                    return result
                continue
            lease = HeldLease(work, f"{self._holder_prefix}-{next(self._numbers)}")
            self._local_leases.setdefault(identity, lease)
            try:
                return await self._claim(lease, identity, deadline)
            except RunFailedError as error:
                self._forget_lease(lease)
                lease.fail(error)
                raise
            except BaseException:
                # Whatever kept this caller from it need not keep the others: one of them tries next.
                self._forget_lease(lease)
                lease.resolve(None)
                raise

    async def _wait_outcome(self, lease: HeldLease, deadline: float | None) -> WorkResult | None:
        if deadline is None:
            return await lease.wait_outcome()
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await lease.wait_outcome()
        except TimeoutError as error:
            if not limit.expired():
                raise  # the very error of the work that was waited for
            raise build_in_flight_error() from error

    async def _claim(self, lease: HeldLease, identity: KeyIdentity, deadline: float | None) -> WorkResult | HeldLease:
        work = lease.work
        pause_s = PAUSE_S_MIN
        waited_for = 0
        claims = 0
        while True:
            generation = self._results.generation
            claimed_s = monotonic()
            verdict = await self._submit_claim(lease, waited_for)
            if isinstance(verdict, Granted):
                lease.fence = verdict.fence
                claims += 1
                if claims < CLAIMS_MAX and monotonic() - claimed_s > work.lease_ms / 2000:
                    # The event loop was blocked meanwhile: another caller may have taken over and be done.
                    waited_for = 0
                    continue
                self._track(lease)
                return lease
            if isinstance(verdict, Replayed):
                result = await self._read(work.policy, verdict)
                self._cache_result(identity, result, generation)
                self._forget_lease(lease)
                lease.resolve(result)
                return result
            if not isinstance(verdict, Refused) or verdict.reason is not Reason.IN_FLIGHT:
                raise to_work_error(verdict)
            if not work.waits:
                raise InFlightError("another caller works on it", verdict.retry_after_ms)
            waited_for = verdict.current
            await self._pause(min(pause_s, max(verdict.retry_after_ms, 1) / 1000), deadline)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _pause(self, pause_s: float, deadline: float | None) -> None:
        if deadline is not None:
            left_s = deadline - self._get_loop().time()
            if left_s <= 0:
                raise build_in_flight_error()
            pause_s = min(pause_s, left_s)
        self.waiting_count += 1
        try:
            await asyncio.sleep(pause_s)
        finally:
            self.waiting_count -= 1

    async def _submit_claim(self, lease: HeldLease, waited_for: int) -> Verdict:
        work = lease.work
        claim = Claim(
            policy=work.policy,
            scope=work.scope,
            key=work.key,
            fingerprint=work.fingerprint,
            holder=lease.holder,
            lease_ms=work.lease_ms,
            waited_for=waited_for,
        )
        try:
            return await self._submit(claim)
        except asyncio.CancelledError:
            # The claim is on its way all the same. If it is granted, nobody will do the work.
            self._start_task(self._release_unused_claim(lease, claim))
            raise

    async def _release_unused_claim(self, lease: HeldLease, claim: Claim) -> None:
        try:
            verdict = await self._submit(claim)  # repeated by its holder, it gets the same lease
        except OncelogError:
            return
        if isinstance(verdict, Granted):
            lease.fence = verdict.fence
            await self._release(lease, None)

    async def _read(self, policy: Policy, known: Replayed) -> WorkResult:
        receipt = known.receipt
        if receipt is None or known.erased:
            raise ResultErasedError("it was done, but what it said has been erased since")
        position = receipt.position
        page = await self._store.read(Query(lane=receipt.lane, after=position - 1, upto=position, limit=1))
        record = page.records[0]
        if record.erased:
            raise ResultErasedError("it was done, but what it said has been erased since")
        return WorkResult(policy, receipt, record.fingerprint, record.body)

    # --- ending

    async def _complete(self, lease: HeldLease, body: bytes) -> WorkResult:
        work = lease.work
        submission = Submission(
            policy=work.policy,
            scope=work.scope,
            key=work.key,
            fingerprint=work.fingerprint,
            body=body,
            holder=lease.holder,
            fence=lease.fence,
        )
        generation = self._results.generation
        try:
            verdict = await self._submit_with_retry(submission, work.lease_ms)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._finish(lease, None)  # the outcome is not known, so the lease is left to end by itself
            raise
        if isinstance(verdict, Committed):
            result = WorkResult(work.policy, verdict.receipt, work.fingerprint, body)
        elif isinstance(verdict, Replayed):
            result = await self._resolve_replay(lease, verdict, body)
        else:
            error = to_work_error(verdict)
            await self._release(lease, None if isinstance(error, LeaseLostError) else error)
            raise error
        self._cache_result(work.identity, result, generation)
        self._finish(lease, result)
        return result

    async def _resolve_replay(self, lease: HeldLease, known: Replayed, body: bytes) -> WorkResult:
        """Somebody has: this caller, when its outcome was not known, or the one who took over."""
        try:
            result = await self._read(lease.work.policy, known)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._finish(lease, None)
            raise
        if lease.is_lost or result.body != body:
            self._finish(lease, result)
            raise build_lease_lost_error()
        return result

    async def _submit_with_retry(self, item: Submission | Release, timeout_ms: int) -> Verdict:
        """The work has been done, and would be lost or waited for in vain: so this is tried again for a while."""
        clock = self._get_loop().time
        deadline = clock() + timeout_ms / 1000
        pause_s = PAUSE_S_MIN
        level = logging.WARNING
        while True:
            try:
                verdict = await self._submit(item)
            except (StoreUnavailableError, ClockJumpedError) as error:
                if self._is_closing or clock() + pause_s > deadline:
                    raise
                logger.log(level, "the end of a piece of work was not committed and is tried again: %s", error)
                level = logging.DEBUG  # said once
            else:
                if not _is_busy(verdict) or clock() + pause_s > deadline:
                    return verdict
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _release_detached(self, lease: HeldLease, error: BaseException | None) -> None:
        """Goes on though its caller does not, who waits for it for a moment only."""
        await asyncio.wait([self._start_task(self._release(lease, error))], timeout=RELEASE_WAIT_S)

    async def _release(self, lease: HeldLease, error: BaseException | None) -> None:
        work = lease.work
        release = Release(
            policy=work.policy,
            scope=work.scope,
            key=work.key,
            holder=lease.holder,
            fence=lease.fence,
            failure=None if error is None else encode_failure(error),
        )
        self._untrack(lease)
        try:
            verdict = await self._submit_with_retry(release, work.lease_ms)
            if isinstance(verdict, Refused):
                logger.warning("a lease could not be given back and will end by itself: %s", verdict.message)
        except OncelogError as trouble:
            logger.warning("a lease could not be given back and will end by itself: %s", trouble)
        finally:
            self._finish(lease, None, error)

    def _finish(self, lease: HeldLease, result: WorkResult | None, error: BaseException | None = None) -> None:
        self._untrack(lease)
        self._forget_lease(lease)
        if error is None:
            lease.resolve(result)
        else:
            lease.fail(error)

    def _forget_lease(self, lease: HeldLease) -> None:
        identity = lease.work.identity
        if self._local_leases.get(identity) is lease:
            del self._local_leases[identity]

    # --- renewing

    def _track(self, lease: HeldLease) -> None:
        lease_ms = lease.work.lease_ms
        lease.renewed_until_s = monotonic() + lease.work.run_ms_max / 1000
        leases = self._groups.get(lease_ms)
        if leases is None:
            leases = self._groups[lease_ms] = LeaseGroup(lease_ms)
            self._renew_later(leases, lease_ms)
            self._watchdog.watch(leases)
        leases.add(lease)

    def _untrack(self, lease: HeldLease) -> bool:
        """False if it was not held any more."""
        leases = self._groups.get(lease.work.lease_ms)
        return leases is not None and leases.remove(lease)

    def _renew_later(self, leases: LeaseGroup, lease_ms: int) -> None:
        leases.timer = self._get_loop().call_later(leases.round_s, self._begin_round, leases, lease_ms)

    def _begin_round(self, leases: LeaseGroup, lease_ms: int) -> None:
        for lease in leases.remove_overrun():
            self._wake_waiters(lease)
        for lease in leases.begin_round():
            self._start_task(self._renew(lease))
        if len(leases):
            self._renew_later(leases, lease_ms)
        else:
            del self._groups[lease_ms]
            self._watchdog.unwatch(leases)

    async def _renew(self, lease: HeldLease) -> None:
        try:
            verdict = await self._submit(build_renewal(lease))
        except OncelogError as error:
            logger.debug("a lease could not be renewed and is tried again: %s", error)  # the committer has said so
        else:
            leases = self._groups.get(lease.work.lease_ms)
            if leases is not None and leases.remove_lost(lease, verdict):
                self._wake_waiters(lease)

    def _wake_waiters(self, lease: HeldLease) -> None:
        """Let the callers that wait for the work in this process claim it again."""
        self._forget_lease(lease)
        lease.resolve(None)

    def _wake_waiters_threadsafe(self, lease: HeldLease) -> None:
        """Call `_wake_waiters` once the event loop is free again. For other threads."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has been closed
                self._loop.call_soon_threadsafe(self._wake_waiters, lease)

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        """A log is used by one event loop. Asking for it costs a system call, so it is asked once."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    # --- tasks that go on though their caller does not

    def _start_task(self, coroutine: Awaitable[T]) -> "asyncio.Task[T]":
        task = self._get_loop().create_task(_await_result(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("ended with %r", task.exception())

    async def shield(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Cancelling the caller does not cancel it: the outcome of work that is done is not to be lost."""
        return await asyncio.shield(self._start_task(coroutine))


async def _await_result(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _is_busy(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.reason in (Reason.BUSY, Reason.RATE_LIMITED)
