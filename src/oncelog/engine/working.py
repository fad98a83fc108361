"""Work that is done once: who may do it, what became of it, and those who wait.

The key is claimed before the work begins, so that one caller at a time does it, in whatever process. While it goes on
its lease is renewed. Its result is committed under the lease's fencing number, so that a caller who lost the lease
cannot. `core.plan` decides; this module submits the claims, renewals and results. While a function blocks the event
loop, `engine.lease_watchdog` renews the leases.

Callers of one process that want the same meet here and ask the store once. Those of other processes ask again and
again, with growing pauses: a lease says nothing when it ends.
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
from oncelog.engine.lease_watchdog import LeaseGroup, LeaseWatchdog, renewal
from oncelog.engine.results import Result, ResultCache
from oncelog.engine.work import Holding, Work, doing, done_here, failure_of, lease_lost, refusal, still_in_flight
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
from oncelog.stores.protocol import Query, Store

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
Keep = Callable[[KeyIdentity, Result, int], None]


class Works:
    """All the work of one log in one process. On the log's event loop; only `recall` may come from anywhere."""

    def __init__(self, submit: Submit, store: Store, results: ResultCache, keep: Keep) -> None:
        self._submit = submit
        self._store = store
        self._results = results
        self._keep = keep
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name = secrets.token_hex(16)
        """Holders of leases are known by this and a number: nobody else can name one."""
        self._numbers = itertools.count(1)
        self._here: dict[KeyIdentity, Holding] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leases: dict[int, LeaseGroup] = {}
        """By their length."""
        self._watchdog = LeaseWatchdog(store, self._let_go_later)
        self._is_closing = False
        self.waiting = 0
        """How many wait right now for work that another process does, those who wait with them not counted."""

    @property
    def leases(self) -> int:
        """How many are held here right now."""
        return sum(map(len, self._leases.values()))

    def recall(self, work: Work) -> Result | None:
        """The result, if it is in memory. Of another write under the same key nothing is said here."""
        result = self._results.get(work.policy, work.identity)
        return result if result is not None and result.fingerprint == work.fingerprint else None

    async def begin(self, work: Work) -> Result | Holding:
        """The result if there is one, else the right to do the work: then end it by one of the three below.

        It asks the store: whoever can, asks `recall` first.

        Raises ConflictError, InFlightError, RunFailedError, ResultErasedError and BusyError; if the caller who was
        waited for did the work in this process and failed, the very error of it.
        """
        if self._is_closing:
            raise ClosedError("the log is closed")
        identity = work.identity
        if identity in doing.get():
            raise WorkError("the work calls itself with its own key, and would wait for itself")
        deadline = None if work.wait_ms is None else self._found_loop().time() + work.wait_ms / 1000
        return await self._begin(work, identity, deadline)

    async def complete(self, holding: Holding, body: bytes) -> Result:
        """Commits what the work said. Raises LeaseLostError if another caller has taken over."""
        try:
            return await self._complete(holding, body)
        except asyncio.CancelledError:
            # It is on its way all the same; asked again under the same identity, the log says what became of it.
            self._task(self._complete(holding, body))
            raise

    async def fail(self, holding: Holding, error: BaseException) -> None:
        """The work failed: those who wait are told, and the next caller does it again."""
        await self._released(holding, error)

    async def carry_out(self, holding: Holding, call: Callable[[], Awaitable[tuple[bytes, T]]]) -> tuple[Result, T]:
        """Does the work and ends it. `call` gives the body to keep, and whatever its caller wants to have beside it."""
        try:
            with done_here(holding):
                body, value = await call()
        except Exception as error:
            await self.fail(holding, error)
            raise
        except BaseException:  # cancelled, interrupted
            await self.give_back(holding)
            raise
        return await self.complete(holding, body), value

    async def give_back(self, holding: Holding) -> None:
        """Nothing came of it, and nobody is to blame: one of those who wait takes over."""
        await self._released(holding, None)

    async def close(self) -> None:
        """Waits for results that are being kept. Work that is still being done loses its lease when that ends."""
        self._is_closing = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._watchdog.close()
        for leases in self._leases.values():
            if leases.timer is not None:
                leases.timer.cancel()
            for holding in leases.members():
                holding.fail(ClosedError("the log was closed while the work was being done"))
        self._leases.clear()
        self._here.clear()

    # --- beginning

    async def _begin(self, work: Work, identity: KeyIdentity, deadline: float | None) -> Result | Holding:
        while True:
            here = self._here.get(identity)
            if here is not None and work.waits and here.work.fingerprint == work.fingerprint:
                result = await self._outcome(here, deadline)
                if result is not None:
                    return result
                continue
            holding = Holding(work, f"{self._name}-{next(self._numbers)}")
            self._here.setdefault(identity, holding)
            try:
                return await self._claim(holding, identity, deadline)
            except RunFailedError as error:
                self._leave(holding)
                holding.fail(error)
                raise
            except BaseException:
                # Whatever kept this caller from it need not keep the others: one of them tries next.
                self._leave(holding)
                holding.settle(None)
                raise

    async def _outcome(self, here: Holding, deadline: float | None) -> Result | None:
        if deadline is None:
            return await here.outcome()
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await here.outcome()
        except TimeoutError as error:
            if not limit.expired():
                raise  # the very error of the work that was waited for
            raise still_in_flight() from error

    async def _claim(self, holding: Holding, identity: KeyIdentity, deadline: float | None) -> Result | Holding:
        work = holding.work
        pause_s = PAUSE_S_MIN
        waited_for = 0
        claims = 0
        while True:
            generation = self._results.generation
            claimed_s = monotonic()
            verdict = await self._claimed(holding, waited_for)
            if isinstance(verdict, Granted):
                holding.fence = verdict.fence
                claims += 1
                if claims < CLAIMS_MAX and monotonic() - claimed_s > work.lease_ms / 2000:
                    # The event loop was blocked meanwhile: another caller may have taken over and be done.
                    waited_for = 0
                    continue
                self._hold(holding)
                return holding
            if isinstance(verdict, Replayed):
                result = await self._read(work.policy, verdict)
                self._keep(identity, result, generation)
                self._leave(holding)
                holding.settle(result)
                return result
            if not isinstance(verdict, Refused) or verdict.reason is not Reason.IN_FLIGHT:
                raise refusal(verdict)
            if not work.waits:
                raise InFlightError("another caller works on it", verdict.retry_after_ms)
            waited_for = verdict.current
            await self._pause(min(pause_s, max(verdict.retry_after_ms, 1) / 1000), deadline)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _pause(self, pause_s: float, deadline: float | None) -> None:
        if deadline is not None:
            left_s = deadline - self._found_loop().time()
            if left_s <= 0:
                raise still_in_flight()
            pause_s = min(pause_s, left_s)
        self.waiting += 1
        try:
            await asyncio.sleep(pause_s)
        finally:
            self.waiting -= 1

    async def _claimed(self, holding: Holding, waited_for: int) -> Verdict:
        work = holding.work
        claim = Claim(
            policy=work.policy,
            scope=work.scope,
            key=work.key,
            fingerprint=work.fingerprint,
            holder=holding.holder,
            lease_ms=work.lease_ms,
            waited_for=waited_for,
        )
        try:
            return await self._submit(claim)
        except asyncio.CancelledError:
            # The claim is on its way all the same. If it is granted, nobody will do the work.
            self._task(self._give_back_claimed(holding, claim))
            raise

    async def _give_back_claimed(self, holding: Holding, claim: Claim) -> None:
        try:
            verdict = await self._submit(claim)  # repeated by its holder, it gets the same lease
        except OncelogError:
            return
        if isinstance(verdict, Granted):
            holding.fence = verdict.fence
            await self._release(holding, None)

    async def _read(self, policy: Policy, known: Replayed) -> Result:
        receipt = known.receipt
        if receipt is None or known.erased:
            raise ResultErasedError("it was done, but what it said has been erased since")
        position = receipt.position
        page = await self._store.read(Query(lane=receipt.lane, after=position - 1, upto=position, limit=1))
        record = page.records[0]
        if record.erased:
            raise ResultErasedError("it was done, but what it said has been erased since")
        return Result(policy, receipt, record.fingerprint, record.body)

    # --- ending

    async def _complete(self, holding: Holding, body: bytes) -> Result:
        work = holding.work
        submission = Submission(
            policy=work.policy,
            scope=work.scope,
            key=work.key,
            fingerprint=work.fingerprint,
            body=body,
            holder=holding.holder,
            fence=holding.fence,
        )
        generation = self._results.generation
        try:
            verdict = await self._insisted(submission, work.lease_ms)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end(holding, None)  # the outcome is not known, so the lease is left to end by itself
            raise
        if isinstance(verdict, Committed):
            result = Result(work.policy, verdict.receipt, work.fingerprint, body)
        elif isinstance(verdict, Replayed):
            result = await self._completed_before(holding, verdict, body)
        else:
            error = refusal(verdict)
            await self._release(holding, None if isinstance(error, LeaseLostError) else error)
            raise error
        self._keep(work.identity, result, generation)
        self._end(holding, result)
        return result

    async def _completed_before(self, holding: Holding, known: Replayed, body: bytes) -> Result:
        """Somebody has: this caller, when its outcome was not known, or the one who took over."""
        try:
            result = await self._read(holding.work.policy, known)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end(holding, None)
            raise
        if holding.is_lost or result.body != body:
            self._end(holding, result)
            raise lease_lost()
        return result

    async def _insisted(self, item: Submission | Release, patience_ms: int) -> Verdict:
        """The work has been done, and would be lost or waited for in vain: so this is tried again for a while."""
        clock = self._found_loop().time
        deadline = clock() + patience_ms / 1000
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

    async def _released(self, holding: Holding, error: BaseException | None) -> None:
        """Goes on though its caller does not, who waits for it for a moment only."""
        await asyncio.wait([self._task(self._release(holding, error))], timeout=RELEASE_WAIT_S)

    async def _release(self, holding: Holding, error: BaseException | None) -> None:
        work = holding.work
        release = Release(
            policy=work.policy,
            scope=work.scope,
            key=work.key,
            holder=holding.holder,
            fence=holding.fence,
            failure=None if error is None else failure_of(error),
        )
        self._hold_no_more(holding)
        try:
            verdict = await self._insisted(release, work.lease_ms)
            if isinstance(verdict, Refused):
                logger.warning("a lease could not be given back and will end by itself: %s", verdict.message)
        except OncelogError as trouble:
            logger.warning("a lease could not be given back and will end by itself: %s", trouble)
        finally:
            self._end(holding, None, error)

    def _end(self, holding: Holding, result: Result | None, error: BaseException | None = None) -> None:
        self._hold_no_more(holding)
        self._leave(holding)
        if error is None:
            holding.settle(result)
        else:
            holding.fail(error)

    def _leave(self, holding: Holding) -> None:
        identity = holding.work.identity
        if self._here.get(identity) is holding:
            del self._here[identity]

    # --- renewing

    def _hold(self, holding: Holding) -> None:
        lease_ms = holding.work.lease_ms
        holding.renewed_until_s = monotonic() + holding.work.run_ms_max / 1000
        leases = self._leases.get(lease_ms)
        if leases is None:
            leases = self._leases[lease_ms] = LeaseGroup(lease_ms)
            self._renew_later(leases, lease_ms)
            self._watchdog.watch(leases)
        leases.add(holding)

    def _hold_no_more(self, holding: Holding) -> bool:
        """False if it was not held any more."""
        leases = self._leases.get(holding.work.lease_ms)
        return leases is not None and leases.remove(holding)

    def _renew_later(self, leases: LeaseGroup, lease_ms: int) -> None:
        leases.timer = self._found_loop().call_later(leases.round_s, self._begin_round, leases, lease_ms)

    def _begin_round(self, leases: LeaseGroup, lease_ms: int) -> None:
        for holding in leases.remove_overrun():
            self._let_go(holding)
        for holding in leases.begin_round():
            self._task(self._renew(holding))
        if len(leases):
            self._renew_later(leases, lease_ms)
        else:
            del self._leases[lease_ms]
            self._watchdog.forget(leases)

    async def _renew(self, holding: Holding) -> None:
        try:
            verdict = await self._submit(renewal(holding))
        except OncelogError as error:
            logger.debug("a lease could not be renewed and is tried again: %s", error)  # the committer has said so
        else:
            leases = self._leases.get(holding.work.lease_ms)
            if leases is not None and leases.remove_lost(holding, verdict):
                self._let_go(holding)

    def _let_go(self, holding: Holding) -> None:
        """Let the callers that wait for the work in this process claim it again."""
        self._leave(holding)
        holding.settle(None)

    def _let_go_later(self, holding: Holding) -> None:
        """Call `_let_go` once the event loop is free again. For other threads."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has been closed
                self._loop.call_soon_threadsafe(self._let_go, holding)

    def _found_loop(self) -> asyncio.AbstractEventLoop:
        """A log is used by one event loop. Asking for it costs a system call, so it is asked once."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    # --- tasks that go on though their caller does not

    def _task(self, coroutine: Awaitable[T]) -> "asyncio.Task[T]":
        task = self._found_loop().create_task(_awaited(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("ended with %r", task.exception())

    async def kept(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Cancelling the caller does not cancel it: the outcome of work that is done is not to be lost."""
        return await asyncio.shield(self._task(coroutine))


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _is_busy(verdict: Verdict) -> bool:
    return isinstance(verdict, Refused) and verdict.reason in (Reason.BUSY, Reason.RATE_LIMITED)
