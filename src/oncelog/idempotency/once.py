"""`once`: a function that can be called again and runs once.

    log = oncelog.open_blocking("app.db")

    @oncelog.once(log, key=lambda order_id, amount: order_id)
    def charge(order_id: str, amount: int) -> Receipt: ...

The first call with a key runs the function and keeps its result; every later one gets the result back, in whatever
process and after whatever restart, until it is forgotten. Callers at the same moment wait for the one that runs.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from typing import Any, Final, Literal, ParamSpec, TypeVar

from msgspec import Struct

from oncelog.core.identity import scope_of
from oncelog.core.limits import LEASE_MS_MAX, RUN_MS_LIMIT, RUN_MS_MAX_DEFAULT
from oncelog.core.policy import Policy, Retention, kept_for
from oncelog.engine.blocking import BlockingLog
from oncelog.engine.held_lease import HeldLease, Work
from oncelog.engine.log import Log
from oncelog.idempotency.call_key import (
    KEY_BYTES,
    Arguments,
    Key,
    build_policy,
    check_name,
    encode_key,
    get_function_name,
)
from oncelog.idempotency.result_codec import NO_RESULT, RaisedOutcome, ResultCodec, is_async
from oncelog.idempotency.share import AsyncSharedLog, SharedLog

P = ParamSpec("P")
R = TypeVar("R")

InFlight = Literal["wait", "raise"]
AnyLog = Log | BlockingLog | SharedLog | AsyncSharedLog
RETENTION_DEFAULT: Final = kept_for(hours=24)
RUN_S_MAX: Final = RUN_MS_MAX_DEFAULT / 1000


def once(  # noqa: PLR0913 - each one an answer to a question that a caller may have
    log: AnyLog | Callable[[], AnyLog],
    *,
    key: Callable[..., Key] | None = None,
    scope: str | Callable[..., str] | None = None,
    name: str | None = None,
    retention: Retention = RETENTION_DEFAULT,
    in_flight: InFlight = "wait",
    wait_s: float | None = None,
    lease_s: float = 30,
    run_s_max: float = RUN_S_MAX,
    remember: Sequence[type[Exception]] = (),
    ignore: Sequence[str] = (),
    result: Any = NO_RESULT,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function idempotent: an async one with a `Log`, any other with a `BlockingLog`, or with a `share`d one.

    `log` may also be a function that gives it. Without `key`, equal arguments are one call; with it, equal keys are,
    and the same key with other arguments raises ConflictError. `ignore` names parameters that say nothing about the
    call (`self`, a connection). `scope` keeps keys apart that may be equal, such as those of two users. Exceptions are
    not kept, and the next call runs again, but for those that `remember` lists. `in_flight="raise"` raises
    InFlightError where else the call would wait, for `wait_s` at most. `lease_s` is how long others wait for a process
    that died; the lease is renewed while the function runs, for `run_s_max` at most. `name` is the function's; a
    changed one begins with an empty memory.
    """
    if in_flight not in ("wait", "raise"):
        raise ValueError(f"in_flight must be 'wait' or 'raise', not {in_flight!r}")
    _check_log(log)
    if key is not None and not callable(key):
        raise TypeError(f"key is a function of the arguments that gives one, not {type(key).__name__}")
    lease_ms = check_duration_ms("lease_s", lease_s)
    run_ms_max = check_duration_ms("run_s_max", run_s_max, RUN_MS_LIMIT)
    wait_ms = None if wait_s is None else check_duration_ms("wait_s", wait_s)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if not inspect.isroutine(function):
            raise TypeError(f"once decorates functions and methods, not {type(function).__name__}")
        its_name = get_function_name(function) if name is None else check_name(name)
        calls = _OnceOptions(
            policy=build_policy("once", its_name, retention),
            arguments=Arguments(function, ignore),
            encoding=ResultCodec(function, result, remember),
            key=key,
            name=its_name,
            scope=scope,
            lease_ms=lease_ms,
            run_ms_max=run_ms_max,
            waits=in_flight == "wait",
            wait_ms=wait_ms,
            remember=tuple(remember),
        )
        wrapped: Any = (_wrap_async if is_async(function) else _wrap_blocking)(function, calls, log)
        wrapped.__oncelog__ = calls
        return wrapped  # type: ignore[no-any-return]

    return decorate


def _check_log(log: object) -> None:
    if isinstance(log, AnyLog):
        return
    if not callable(log):
        raise TypeError(f"once takes a log, or a function that gives it, not {type(log).__name__}")
    needed = [
        parameter for parameter in inspect.signature(log).parameters.values() if parameter.default is parameter.empty
    ]
    if any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        for parameter in needed
    ):
        raise TypeError("once needs the log: @oncelog.once(log), not @oncelog.once")


def work_of(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Work:
    """Under what a call of a decorated function is remembered: for `Log.lookup`, `Log.erase` and the curious."""
    calls = getattr(function, "__oncelog__", None)
    if not isinstance(calls, _OnceOptions):
        raise TypeError(f"{function!r} is not decorated with once")
    return calls.build_work(args, kwargs)


class _OnceOptions(Struct, frozen=True, kw_only=True):
    """All that is known about a function when it is decorated."""

    policy: Policy
    arguments: Arguments
    encoding: ResultCodec
    key: Callable[..., Key] | None
    name: str
    scope: str | Callable[..., str] | None
    lease_ms: int
    run_ms_max: int
    waits: bool
    wait_ms: int | None
    remember: tuple[type[Exception], ...]

    def build_work(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Work:
        arguments_hash = sha256(self.arguments.encode(args, kwargs)).digest()
        return Work(
            policy=self.policy,
            scope=self._build_stream(args, kwargs),
            key=arguments_hash[:KEY_BYTES] if self.key is None else encode_key(self.key(*args, **kwargs)),
            fingerprint=arguments_hash,
            lease_ms=self.lease_ms,
            run_ms_max=self.run_ms_max,
            waits=self.waits,
            wait_ms=self.wait_ms,
        )

    def _build_stream(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        scope = self.scope(*args, **kwargs) if callable(self.scope) else self.scope
        if self.scope is not None and not isinstance(scope, str):
            raise TypeError(f"scope must be a text, not {type(scope).__name__}")
        return _build_stream_name(self.name, scope)


@functools.lru_cache(maxsize=1024)
def _build_stream_name(name: str, scope: str | None) -> str:
    """A stream of the function's own, so that its results are numbered 1, 2, 3… and mix with nothing else."""
    return scope_of("once", name) if scope is None else scope_of("once", name, scope)


def _wrap_async(
    function: Callable[..., Any], options: _OnceOptions, log: AnyLog | Callable[[], AnyLog]
) -> Callable[..., Any]:
    if isinstance(log, BlockingLog | SharedLog):
        raise TypeError(
            f"{function.__qualname__} is async: give it a log of `oncelog.open`, or share asyncpg's connection"
        )
    encoding = options.encoding

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        async def call() -> tuple[bytes, Any]:
            try:
                return encoding.encode_result(await function(*args, **kwargs))
            except options.remember as error:
                return encoding.encode_error(error)

        work = options.build_work(args, kwargs)
        opened_log = log() if not isinstance(log, Log | AsyncSharedLog) and callable(log) else log
        if isinstance(opened_log, AsyncSharedLog):
            return await _call_in_async_transaction(
                functools.partial(function, *args, **kwargs), opened_log, work, options
            )
        leases = _get_log(opened_log, Log, function).leases
        result_or_lease = leases.recall(work) or await leases.begin(work)
        if not isinstance(result_or_lease, HeldLease):
            return encoding.decode_outcome(result_or_lease.body)
        _, value = await leases.run(result_or_lease, call)
        return _unwrap(value)

    return wrapper


def _wrap_blocking(
    function: Callable[..., Any], options: _OnceOptions, log: AnyLog | Callable[[], AnyLog]
) -> Callable[..., Any]:
    if isinstance(log, Log | AsyncSharedLog):
        raise TypeError(f"{function.__qualname__} is not async: give it a log of `oncelog.open_blocking`")
    encoding = options.encoding

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        def call() -> tuple[bytes, Any]:
            try:
                return encoding.encode_result(function(*args, **kwargs))
            except options.remember as error:
                return encoding.encode_error(error)

        work = options.build_work(args, kwargs)
        opened_log = log() if not isinstance(log, BlockingLog | SharedLog) and callable(log) else log
        if isinstance(opened_log, SharedLog):
            return _call_in_transaction(functools.partial(function, *args, **kwargs), opened_log, work, options)
        leases = _get_log(opened_log, BlockingLog, function).leases
        result_or_lease = leases.recall(work) or leases.begin(work)
        if not isinstance(result_or_lease, HeldLease):
            return encoding.decode_outcome(result_or_lease.body)
        _, value = leases.run(result_or_lease, call)
        return _unwrap(value)

    return wrapper


def _unwrap(value: Any) -> Any:
    if isinstance(value, RaisedOutcome):
        raise value.error
    return value


def _call_in_transaction(function: Callable[[], Any], log: SharedLog, work: Work, options: _OnceOptions) -> Any:
    encoding = options.encoding
    with log.transaction(work) as shared:
        if shared.result is not None:
            value = encoding.decode_outcome(shared.result)
        else:
            try:
                with shared.guard_function():
                    body, value = encoding.encode_result(function())
            except options.remember as error:
                body, value = encoding.encode_error(error)
            shared.complete(body)
    return _unwrap(value)


async def _call_in_async_transaction(
    function: Callable[[], Awaitable[Any]], log: AsyncSharedLog, work: Work, options: _OnceOptions
) -> Any:
    encoding = options.encoding
    async with log.transaction(work) as shared:
        if shared.result is not None:
            value = encoding.decode_outcome(shared.result)
        else:
            try:
                async with shared.guard_function():
                    body, value = encoding.encode_result(await function())
            except options.remember as error:
                body, value = encoding.encode_error(error)
            await shared.complete(body)
    return _unwrap(value)


L = TypeVar("L", Log, BlockingLog)


def _get_log(log: AnyLog | Callable[[], AnyLog], kind: type[L], function: Callable[..., Any]) -> L:
    opened_log = log if isinstance(log, kind) else log() if callable(log) else log
    if not isinstance(opened_log, kind):
        raise TypeError(f"{function.__qualname__} needs a {kind.__name__}, not {type(opened_log).__name__}")
    return opened_log


def check_duration_ms(name: str, seconds: float, ms_max: int = LEASE_MS_MAX) -> int:
    """Return a duration of the caller in milliseconds. Raises ValueError for one that is out of range."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= ms_max / 1000:
        raise ValueError(f"{name} must be from 0.001 to {ms_max // 1000} seconds, not {seconds!r}")
    return round(seconds * 1000)
