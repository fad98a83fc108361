"""Acquires, renews and releases leases, and waits for other callers' work.

The lease manager claims the key before the work begins, so that only one caller in all processes does it at a time. It
renews the lease while the work runs. It commits the result with the lease's fence, so that the log refuses the result
of a caller that has lost its lease. `core.plan` decides; this module submits the claims, renewals and results.
`core.rules.leases` decides when a lease expires. While a function blocks the event loop, `engine.lease_watchdog` renews
the leases.

Callers of one process that want the same key share one claim. Callers in other processes poll with growing pauses,
because the log does not announce when a lease ends.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, Final, TypeVar

from oncelog.background_tasks import BackgroundTasks
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
    build_erased_error,
    build_in_flight_error,
    build_lease_lost_error,
    encode_failure,
    mark_active,
    to_work_error,
)
from oncelog.engine.lease_watchdog import LeaseGroup, LeaseWatchdog, build_renewal, logger
from oncelog.errors import (
    ClockJumpedError,
    ClosedError,
    InFlightError,
    LeaseLostError,
    OncelogError,
    RunFailedError,
    StoreUnavailableError,
    WorkError,
)
from oncelog.storage.store import Query, Store

PAUSE_S_MIN: Final = 0.005
PAUSE_S_MAX: Final = 0.1
"""Maximum pause between two claims while another process does the work."""
CLAIMS_MAX: Final = 3
"""Maximum number of consecutive claims whose leases expire before this process sees that they were granted."""
RELEASE_WAIT_S: Final = 1.0
"""How long a caller waits for the release of its lease. The release is retried until the lease expires."""
T = TypeVar("T")
Submit = Callable[[Item], Awaitable[Verdict]]


class LeaseManager:
    """Manages the leases of one log in one process. It runs on the log's event loop; any thread may call `recall`."""

    def __init__(
        self,
        submit: Submit,
        store: Store,
        results: ResultCache,
        cache_result: Callable[[KeyIdentity, WorkResult, int], None],
    ) -> None:
        self._submit = submit
        self._store = store
        self._results = results
        self._cache_result = cache_result
        self._holder_prefix = secrets.token_hex(16)
        """Random prefix of all holder names, so that no other process can use one of them."""
        self._numbers = itertools.count(1)
        self._local_leases: dict[KeyIdentity, HeldLease] = {}
        self._tasks = BackgroundTasks(logger)
        self._groups: dict[int, LeaseGroup] = {}
        """Lease groups by lease duration in milliseconds."""
        self._watchdog = LeaseWatchdog(store, self._finish)
        self._is_closing = False

    def recall(self, work: Work) -> WorkResult | None:
        """Return the cached result of the work, or None. Also returns None if the key is known with a different
        fingerprint."""
        result = self._results.get(work.policy, work.identity)
        return result if result is not None and result.fingerprint == work.fingerprint else None

    async def begin(self, work: Work) -> WorkResult | HeldLease:
        """Return the stored result, or a lease to do the work. Pass the lease to `complete`, `release` or `run`.

        Call `recall` first, because this method accesses the store.

        Raises ConflictError, InFlightError, RunFailedError, ResultErasedError and BusyError. If another caller in this
        process did the work during the wait and failed, raises that error.
        """
        if self._is_closing:
            raise ClosedError("the log is closed")
        identity = work.identity
        if identity in active_keys.get():
            raise WorkError("the work calls itself with its own key, which would be a deadlock")
        deadline = None if work.wait_ms is None else asyncio.get_running_loop().time() + work.wait_ms / 1000
        while True:
            local_lease = self._local_leases.get(identity)
            if local_lease is None or not work.waits or local_lease.work.fingerprint != work.fingerprint:
                return await self._claim(work, deadline)
            result = await _wait_outcome(local_lease, deadline)
            if result is not None:
                return result

    async def complete(self, lease: HeldLease, body: bytes) -> WorkResult:
        """Commit the result of the work. Raises LeaseLostError if another caller has taken over."""
        try:
            return await self._complete(lease, body)
        except asyncio.CancelledError:
            # The submission was sent before the cancellation. Submitting it again under the same identity returns its
            # verdict.
            self._tasks.start(self._complete(lease, body))
            raise

    async def run(self, lease: HeldLease, call: Callable[[], Awaitable[tuple[bytes, T]]]) -> tuple[WorkResult, T]:
        """Do the work, store its result and end the lease. `call` returns the body to store and a value for the
        caller."""
        try:
            with mark_active(lease):
                body, value = await call()
        except BaseException as error:
            await self.release(lease, error if isinstance(error, Exception) else None)
            raise
        return await self.complete(lease, body), value

    async def release(self, lease: HeldLease, error: Exception | None = None) -> None:
        """Release a lease without a result.

        Callers that wait for the work receive `error`. Without an error, one of them takes over. The release continues
        in the background if its caller is cancelled, or after `RELEASE_WAIT_S`.
        """
        await asyncio.wait([self._tasks.start(self._release(lease, error))], timeout=RELEASE_WAIT_S)

    async def close(self) -> None:
        """Wait until finished results are stored. Leases of unfinished work are no longer renewed."""
        self._is_closing = True
        await self._tasks.wait()
        await self._watchdog.close()
        for group in self._groups.values():
            group.timer.cancel()
            for lease in group.list_leases():
                lease.resolve(ClosedError("the log was closed while the work was being done"))
        self._groups.clear()
        self._local_leases.clear()

    # --- beginning

    async def _claim(self, work: Work, deadline: float | None) -> WorkResult | HeldLease:
        lease = HeldLease(work, f"{self._holder_prefix}-{next(self._numbers)}")
        self._local_leases.setdefault(work.identity, lease)
        try:
            result = await self._acquire(lease, deadline)
        except BaseException as error:
            # Other errors concern only this caller, so one of the waiting callers tries next.
            self._finish(lease, error if isinstance(error, RunFailedError) else None)
            raise
        if result is None:
            return lease
        self._finish(lease, result)
        return result

    async def _acquire(self, lease: HeldLease, deadline: float | None) -> WorkResult | None:
        """Claim the lease repeatedly until it is granted. Return the result instead if another caller completes the
        work."""
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
                    # The event loop was blocked during the claim, so another caller may have taken over and completed
                    # the work.
                    waited_for = 0
                    continue
                self._track(lease)
                return None
            if isinstance(verdict, Replayed):
                result = await self._read(work.policy, verdict)
                self._cache_result(work.identity, result, generation)
                return result
            if not isinstance(verdict, Refused) or verdict.reason is not Reason.IN_FLIGHT:
                raise to_work_error(verdict, work)
            if not work.waits:
                raise InFlightError("another caller is doing this work", verdict.retry_after_ms)
            waited_for = verdict.current
            await _pause(min(pause_s, max(verdict.retry_after_ms, 1) / 1000), deadline)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _submit_claim(self, lease: HeldLease, waited_for: int) -> Verdict:
        work = lease.work
        claim = Claim(**lease.fields, fingerprint=work.fingerprint, lease_ms=work.lease_ms, waited_for=waited_for)
        try:
            return await self._submit(claim)
        except asyncio.CancelledError:
            # The claim was sent before the cancellation. If it is granted, no caller does the work, so release the
            # lease.
            self._tasks.start(self._release_unused_claim(lease, claim))
            raise

    async def _release_unused_claim(self, lease: HeldLease, claim: Claim) -> None:
        with suppress(OncelogError):
            verdict = await self._submit(claim)  # a claim repeated by its holder gets the same lease
            if isinstance(verdict, Granted):
                lease.fence = verdict.fence
                await self._release(lease, None)

    async def _read(self, policy: Policy, known: Replayed) -> WorkResult:
        receipt = known.receipt
        if receipt is not None and not known.erased:
            position = receipt.position
            page = await self._store.read(Query(lane=receipt.lane, after=position - 1, upto=position, limit=1))
            record = page.records[0]
            if not record.erased:
                return WorkResult(policy, receipt, record.fingerprint, record.body)
        raise build_erased_error()

    # --- ending

    async def _complete(self, lease: HeldLease, body: bytes) -> WorkResult:
        work = lease.work
        submission = Submission(**lease.fields, fingerprint=work.fingerprint, body=body, fence=lease.fence)
        generation = self._results.generation
        result: WorkResult | None = None
        try:
            verdict = await self._submit_with_retry(submission, work.lease_ms)
            if isinstance(verdict, Replayed):
                result = await self._read(work.policy, verdict)
        except Exception:
            self._finish(lease)  # the outcome is unknown: leave the lease until it expires
            raise
        if isinstance(verdict, Committed):
            result = WorkResult(work.policy, verdict.receipt, work.fingerprint, body)
        elif result is None:
            error = to_work_error(verdict, work)
            await self._release(lease, None if isinstance(error, LeaseLostError) else error)
            raise error
        elif lease.is_lost or result.body != body:  # another caller took over and completed the work
            self._finish(lease, result)
            raise build_lease_lost_error()
        self._cache_result(work.identity, result, generation)
        self._finish(lease, result)
        return result

    async def _submit_with_retry(self, item: Submission | Release, timeout_ms: int) -> Verdict:
        """Submit a result or a release, retrying until the timeout so that a finished result is not lost."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_ms / 1000
        pause_s = PAUSE_S_MIN
        level = logging.WARNING
        while True:
            try:
                verdict = await self._submit(item)
            except (StoreUnavailableError, ClockJumpedError) as error:
                if self._is_closing or clock() + pause_s > deadline:
                    raise
                logger.log(level, "the result or release of work was not committed; retrying: %s", error)
                level = logging.DEBUG  # only the first failure is a warning
            else:
                if not _is_busy(verdict) or clock() + pause_s > deadline:
                    return verdict
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _release(self, lease: HeldLease, error: Exception | None) -> None:
        failure = None if error is None else encode_failure(error)
        release = Release(**lease.fields, fence=lease.fence, failure=failure)
        self._untrack(lease)
        try:
            verdict = await self._submit_with_retry(release, lease.work.lease_ms)
            if isinstance(verdict, Refused):
                logger.warning("a lease was not released and will expire: %s", verdict.message)
        except OncelogError as failed:
            logger.warning("a lease was not released and will expire: %s", failed)
        finally:
            self._finish(lease, error)

    def _finish(self, lease: HeldLease, outcome: WorkResult | Exception | None = None) -> None:
        """Stop renewing a lease and pass its outcome to the callers that wait for it in this process.

        Without an outcome, one of them claims the key.
        """
        self._untrack(lease)
        identity = lease.work.identity
        if self._local_leases.get(identity) is lease:
            del self._local_leases[identity]
        lease.resolve(outcome)

    # --- renewing

    def _track(self, lease: HeldLease) -> None:
        lease_ms = lease.work.lease_ms
        lease.renewed_until_s = monotonic() + lease.work.run_ms_max / 1000
        group = self._groups.get(lease_ms)
        if group is None:
            group = self._groups[lease_ms] = LeaseGroup(lease_ms)
            self._schedule_round(group)
            self._watchdog.watch(group)
        group.add(lease)

    def _untrack(self, lease: HeldLease) -> None:
        group = self._groups.get(lease.work.lease_ms)
        if group is not None:
            group.remove(lease)

    def _schedule_round(self, group: LeaseGroup) -> None:
        group.timer = asyncio.get_running_loop().call_later(group.round_s, self._run_round, group)

    def _run_round(self, group: LeaseGroup) -> None:
        for lease in group.remove_overrun():
            self._finish(lease)
        for lease in group.begin_round():
            self._tasks.start(self._renew(lease, group))
        if len(group):
            self._schedule_round(group)
        else:
            del self._groups[group.lease_ms]
            self._watchdog.unwatch(group)

    async def _renew(self, lease: HeldLease, group: LeaseGroup) -> None:
        try:
            verdict = await self._submit(build_renewal(lease))
        except OncelogError as error:
            logger.debug("a lease was not renewed; retrying: %s", error)  # the committer has logged the cause
        else:
            if group.remove_lost(lease, verdict):
                self._finish(lease)

    async def shield(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that continues even if the caller is cancelled, so that finished results are stored."""
        return await self._tasks.shield(coroutine)


async def _wait_outcome(lease: HeldLease, deadline: float | None) -> WorkResult | None:
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            return await lease.wait_outcome()
    except TimeoutError as error:
        if not limit.expired():
            raise  # the error of the work itself
        raise build_in_flight_error() from error


async def _pause(pause_s: float, deadline: float | None) -> None:
    if deadline is not None:
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise build_in_flight_error()
        pause_s = min(pause_s, left_s)
    await asyncio.sleep(pause_s)


def _is_busy(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.reason in (Reason.BUSY, Reason.RATE_LIMITED)
