"""Work that is done once: what identifies it, the lease that a caller holds, and the errors of a refusal."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypedDict

import msgspec
from msgspec import Struct

from oncelog.core.limits import FAILURE_BYTES_MAX, LEASE_MS_DEFAULT, RUN_MS_MAX_DEFAULT
from oncelog.core.policy import Policy
from oncelog.core.values import KeyIdentity, Reason, Refused, Verdict
from oncelog.engine.answer_cache import WorkResult
from oncelog.errors import (
    BusyError,
    ConflictError,
    InFlightError,
    LeaseLostError,
    ResultErasedError,
    ResultError,
    RunFailedError,
    WorkError,
)

KIND_CHARACTERS_MAX: Final = 200
"""Of the name of an error, as those in other processes are told it."""


class WorkKey(TypedDict):
    """Fields of the items that claim, renew, complete and release a lease."""

    policy: Policy
    scope: str
    key: bytes


class Work(Struct, frozen=True, kw_only=True):
    """What is to be done once."""

    policy: Policy
    scope: str
    key: bytes
    fingerprint: bytes
    lease_ms: int = LEASE_MS_DEFAULT
    run_ms_max: int = RUN_MS_MAX_DEFAULT
    """How long its lease is renewed."""
    waits: bool = True
    """Whether to wait for another caller who does it already, or to raise InFlightError."""
    wait_ms: int | None = None
    """How long to wait at most; None for as long as it takes."""

    @property
    def identity(self) -> KeyIdentity:
        """Under what it is remembered and leased."""
        return (self.policy.name, self.scope, "", self.key)


def build_key_fields(work: Work) -> WorkKey:
    """Return the fields that all items for a piece of work have in common."""
    return {"policy": work.policy, "scope": work.scope, "key": work.key}


class HeldLease:
    """The right to do a piece of work, until it is completed, failed or given back."""

    __slots__ = ("_outcome", "fence", "holder", "is_lost", "renewed_until_s", "work")

    def __init__(self, work: Work, holder: str) -> None:
        self.work = work
        self.holder = holder
        self.fence = 0
        self.renewed_until_s = 0.0
        """When the work reaches its maximum run time, by `time.monotonic`."""
        self.is_lost = False
        """Another caller has taken over; what this one does is for nothing."""
        self._outcome: asyncio.Future[WorkResult | None] | None = None

    async def wait_outcome(self) -> WorkResult | None:
        """For those who wait in this process: None if nothing came of it and the next one may try."""
        if self._outcome is None:
            self._outcome = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._outcome)

    def resolve(self, outcome: WorkResult | BaseException | None) -> None:
        """Pass the outcome, or the error of the work, to the callers that wait in this process."""
        if self._outcome is None or self._outcome.done():
            return
        if not isinstance(outcome, BaseException):
            self._outcome.set_result(outcome)
            return
        if isinstance(outcome, StopIteration):  # no future accepts it
            outcome = RuntimeError(f"the work raised {outcome!r}")
        self._outcome.set_exception(outcome)
        self._outcome.exception()  # retrieved: asyncio logs no error if all waiting callers have been cancelled


active_keys: Final[ContextVar[tuple[KeyIdentity, ...]]] = ContextVar("active_keys", default=())
"""What is being done in this task or thread: it must not wait for itself."""


@contextmanager
def mark_active(lease: HeldLease) -> Iterator[None]:
    """Around the work itself."""
    token = active_keys.set((*active_keys.get(), lease.work.identity))
    try:
        yield
    finally:
        active_keys.reset(token)


def to_work_error(verdict: Verdict) -> WorkError:
    """What a refusal is for those who call functions and await results, not verdicts."""
    if not isinstance(verdict, Refused):
        return WorkError(f"the log answered with {verdict!r}")
    match verdict.reason:
        case Reason.IDENTITY_REUSED:
            return ConflictError("this key was used for something else; nothing was done")
        case Reason.IN_FLIGHT:
            return InFlightError(verdict.message, verdict.retry_after_ms)
        case Reason.RUN_FAILED:
            return _decode_failure(verdict.value or b"")
        case Reason.LEASE_LOST:
            return build_lease_lost_error()
        case Reason.BUSY | Reason.RATE_LIMITED | Reason.READ_ONLY | Reason.QUOTA_EXCEEDED:
            return BusyError(verdict.message, verdict.retry_after_ms, verdict.reason.value)
        case Reason.MALFORMED if verdict.field == "body":
            return ResultError(verdict.message)
        case _:
            return WorkError(verdict.message)


def build_in_flight_error() -> InFlightError:
    """For who has waited long enough."""
    return InFlightError("another caller still works on it")


def build_erased_error() -> ResultErasedError:
    """Return the error of a caller whose work was done, but whose result was erased."""
    return ResultErasedError("it was done, but what it said has been erased since")


def build_lease_lost_error() -> LeaseLostError:
    """For who comes too late."""
    return LeaseLostError("another caller has taken over; what this one did was not kept")


class _Failure(Struct):
    kind: str
    message: str


def encode_failure(error: BaseException) -> bytes:
    """What those in other processes are told of an error. Whatever it is, it has a form."""
    try:
        message = str(error).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - it is the application's
        message = "its text cannot be made"
    kind = type(error).__name__[:KIND_CHARACTERS_MAX].encode("utf-8", "replace").decode()
    while True:
        failure = msgspec.json.encode(_Failure(kind, message))
        if len(failure) <= FAILURE_BYTES_MAX:
            return failure
        message = message[: len(message) * 3 // 4]


def _decode_failure(failure: bytes) -> RunFailedError:
    try:
        decoded = msgspec.json.decode(failure, type=_Failure)
    except msgspec.MsgspecError:
        return RunFailedError("unknown", "it left no word")
    return RunFailedError(decoded.kind, decoded.message)
