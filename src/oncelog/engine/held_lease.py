"""Work that runs once: its identity, the lease that a caller holds, and the errors for refusals."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.core.limits import FAILURE_BYTES_MAX, LEASE_MS_DEFAULT, RUN_MS_MAX_DEFAULT
from oncelog.core.policy import Policy
from oncelog.core.values import KeyIdentity, Reason, Refused, Submission, Verdict
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
"""Maximum length of an error's class name in a stored failure."""


class Work(Struct, frozen=True, kw_only=True):
    """A piece of work that runs once."""

    policy: Policy
    scope: str
    key: bytes
    fingerprint: bytes
    lease_ms: int = LEASE_MS_DEFAULT
    run_ms_max: int = RUN_MS_MAX_DEFAULT
    """Maximum run time, after which the lease is no longer renewed."""
    waits: bool = True
    """Whether to wait for a caller that is doing the work, or to raise InFlightError."""
    wait_ms: int | None = None
    """Maximum time to wait, or None for no limit."""

    @property
    def identity(self) -> KeyIdentity:
        """Identity of the work in the log, for both its lease and its result."""
        return (self.policy.name, self.scope, "", self.key)


class HeldLease:
    """The right to do a piece of work, until the work is completed or the right is released."""

    __slots__ = ("_outcome", "fence", "fields", "is_lost", "renewed_until_s", "work")

    def __init__(self, work: Work, holder: str) -> None:
        self.work = work
        self.fields: Any = {"policy": work.policy, "scope": work.scope, "key": work.key, "holder": holder}
        """Fields of the items that claim, renew, complete and release the lease."""
        self.fence = 0
        self.renewed_until_s = 0.0
        """`time.monotonic` value at which the work reaches its maximum run time."""
        self.is_lost = False
        """Whether another caller has taken over. The log then refuses this caller's result."""
        self._outcome: asyncio.Future[WorkResult | None] | None = None

    async def wait_outcome(self) -> WorkResult | None:
        """Wait for the holder's result. Return None if the lease ended without one. The caller can then claim the key.

        Raises the error of the work if the work failed.
        """
        if self._outcome is None:
            self._outcome = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._outcome)

    def resolve(self, outcome: WorkResult | BaseException | None) -> None:
        """Pass the outcome, or the work's error, to the callers that wait in this process."""
        if self._outcome is None or self._outcome.done():
            return
        if not isinstance(outcome, BaseException):
            self._outcome.set_result(outcome)
            return
        if isinstance(outcome, StopIteration):  # a future would not accept it
            outcome = RuntimeError(f"the work raised {outcome!r}")
        self._outcome.set_exception(outcome)
        self._outcome.exception()  # retrieve it: asyncio logs unretrieved errors of futures


active_keys: Final[ContextVar[tuple[KeyIdentity, ...]]] = ContextVar("active_keys", default=())
"""Keys of the work that runs in this task or thread. Waiting for one of them would deadlock."""


@contextmanager
def mark_active(lease: HeldLease) -> Iterator[None]:
    """Add the key of a lease to the active keys while its work runs."""
    token = active_keys.set((*active_keys.get(), lease.work.identity))
    try:
        yield
    finally:
        active_keys.reset(token)


def _describe_work(work: Work | Submission) -> str:
    """Name the key and the function (or other scope) of the work."""
    try:
        text = work.key.decode()
    except UnicodeDecodeError:
        text = ""
    key = repr(text) if text and text.isprintable() else work.key.hex()
    return f"the key {key} of {work.scope!r}"


def to_work_error(verdict: Verdict, work: Work | Submission) -> WorkError:
    """Convert a refusal to an exception, because callers of functions do not see verdicts."""
    if not isinstance(verdict, Refused):
        return WorkError(f"unexpected verdict: {verdict!r}")
    match verdict.reason:
        case Reason.IDENTITY_REUSED:
            return ConflictError(
                f"{_describe_work(work)} was already used with different arguments or for different work; nothing was "
                "done; use a new key for new work"
            )
        case Reason.IN_FLIGHT:
            return InFlightError(verdict.message, verdict.retry_after_ms)
        case Reason.RUN_FAILED:
            return _decode_failure(verdict.value or b"")
        case Reason.LEASE_LOST:
            return build_lease_lost_error()
        case Reason.BUSY | Reason.RATE_LIMITED | Reason.READ_ONLY | Reason.QUOTA_EXCEEDED:
            return BusyError(verdict.message, verdict.retry_after_ms, verdict.reason.value)
        case Reason.MALFORMED if verdict.field == "body":
            return ResultError(f"the result for {_describe_work(work)} cannot be stored: {verdict.message}")
        case _:
            return WorkError(verdict.message)


def build_in_flight_error() -> InFlightError:
    """Return the error for a caller whose maximum wait has passed."""
    return InFlightError("another caller is still doing this work")


def build_erased_error() -> ResultErasedError:
    """Return the error for a caller whose work was done earlier but whose result has been erased."""
    return ResultErasedError("the work was done, but its result has been erased since")


def build_lease_lost_error() -> LeaseLostError:
    """Return the error for a caller that completes its work after losing the lease."""
    return LeaseLostError("another caller has taken over; the result of this call was not stored")


class _Failure(Struct):
    kind: str
    message: str


def encode_failure(error: BaseException) -> bytes:
    """Encode an error for callers in other processes, at most `FAILURE_BYTES_MAX` bytes."""
    try:
        message = str(error).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - `__str__` of the application's class may raise anything
        message = "str() of the error failed"
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
        return RunFailedError("unknown", "the error was not recorded")
    return RunFailedError(decoded.kind, decoded.message)
