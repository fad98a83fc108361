"""`once`: a decorator that makes a function run once per key, however often it is called.

    log = oncelog.open_blocking("app.db")

    @oncelog.once(log, key=lambda order_id, amount: order_id)
    def charge(order_id: str, amount: int) -> Receipt: ...

The first call with a key runs the function and stores its result. Later calls return the stored result, in any process
and after restarts, until the log forgets it. Concurrent calls wait for the running one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from hashlib import sha256
from typing import Any, Final, ParamSpec, TypeVar

from msgspec import Struct

from oncelog.core.identity import scope_of
from oncelog.core.limits import RUN_MS_MAX_DEFAULT
from oncelog.core.policy import Policy, Retention, kept_for
from oncelog.engine.blocking import BlockingLog
from oncelog.engine.held_lease import HeldLease, Work
from oncelog.engine.log import Log
from oncelog.idempotency.call_key import (
    KEY_BYTES,
    Arguments,
    InFlight,
    Key,
    WaitOptions,
    build_policy,
    check_name,
    check_wait_options,
    encode_key,
    get_function_name,
)
from oncelog.idempotency.result_codec import NO_RESULT, RaisedOutcome, ResultCodec, is_async
from oncelog.idempotency.share import AsyncSharedLog, SharedLog

P = ParamSpec("P")
R = TypeVar("R")

AnyLog = Log | BlockingLog | SharedLog | AsyncSharedLog
RETENTION_DEFAULT: Final = kept_for(hours=24)
RUN_S_MAX: Final = RUN_MS_MAX_DEFAULT / 1000


def once(  # noqa: PLR0913 - all but the first are keyword arguments
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
    """Make a function idempotent: an async function with a `Log`, any other with a `BlockingLog`, or either with a
    `share`d log.

    `log` may also be a function that returns the log. Calls with equal arguments count as one call. With `key`, calls
    with equal keys do, and reusing a key with different arguments raises ConflictError. `ignore` lists parameters that
    do not identify the call (`self`, a connection). `scope` separates keys that may coincide, such as those of two
    users.

    Exceptions in `remember` are stored like results. After any other exception the next call runs the function again.
    While another call runs, a call waits for at most `wait_s`, or with `in_flight="raise"` raises InFlightError.
    `lease_s` is how long other processes wait after the running process has died. The lease is renewed while the
    function runs, for at most `run_s_max`. `name` replaces the function's name; under a new name, earlier results are
    not found.
    """
    wait_options = check_wait_options(in_flight, wait_s, lease_s, run_s_max)
    _check_log(log)
    if key is not None and not callable(key):
        raise TypeError(f"key must be a function that returns a key for the arguments, not {type(key).__name__}")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if not inspect.isroutine(function):
            raise TypeError(f"once can decorate functions and methods only, not {type(function).__name__}")
        its_name = get_function_name(function) if name is None else check_name(name)
        calls = _OnceOptions(
            policy=build_policy("once", its_name, retention),
            arguments=Arguments(function, ignore),
            encoding=ResultCodec(function, result, remember),
            key=key,
            name=its_name,
            scope=scope,
            wait_options=wait_options,
        )
        wrapped: Any = (_wrap_async if is_async(function) else _wrap_blocking)(function, calls, log)
        wrapped.__oncelog__ = calls
        return wrapped  # type: ignore[no-any-return]

    return decorate


def _check_log(log: object) -> None:
    if isinstance(log, AnyLog):
        return
    if not callable(log):
        raise TypeError(f"once needs a log, or a function that returns a log, not {type(log).__name__}")
    try:
        inspect.signature(log).bind()
    except TypeError as error:
        raise TypeError("once needs the log: @oncelog.once(log), not @oncelog.once") from error


def work_of(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Work:
    """Return the work that a call of a decorated function stands for, with its scope and key for `Log.lookup` and
    `Log.erase`."""
    calls = getattr(function, "__oncelog__", None)
    if not isinstance(calls, _OnceOptions):
        raise TypeError(f"{function!r} is not decorated with once")
    return calls.build_work(args, kwargs)


class _OnceOptions(Struct, frozen=True, kw_only=True):
    """The options of a decorated function."""

    policy: Policy
    arguments: Arguments
    encoding: ResultCodec
    key: Callable[..., Key] | None
    name: str
    scope: str | Callable[..., str] | None
    wait_options: WaitOptions

    def build_work(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Work:
        arguments_hash = sha256(self.arguments.encode(args, kwargs)).digest()
        return Work(
            policy=self.policy,
            scope=self._build_stream(args, kwargs),
            key=arguments_hash[:KEY_BYTES] if self.key is None else encode_key(self.key(*args, **kwargs)),
            fingerprint=arguments_hash,
            **self.wait_options,
        )

    def _build_stream(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        scope = self.scope(*args, **kwargs) if callable(self.scope) else self.scope
        if self.scope is not None and not isinstance(scope, str):
            raise TypeError(f"scope must be a string, not {type(scope).__name__}")
        return _build_stream_name(self.name, scope)


@functools.lru_cache(maxsize=1024)
def _build_stream_name(name: str, scope: str | None) -> str:
    """Return the name of the function's own stream, in which its results are numbered 1, 2, 3…"""
    return scope_of("once", name) if scope is None else scope_of("once", name, scope)


def _wrap_async(
    function: Callable[..., Any], options: _OnceOptions, log: AnyLog | Callable[[], AnyLog]
) -> Callable[..., Any]:
    if isinstance(log, BlockingLog | SharedLog):
        raise TypeError(
            f"{function.__qualname__} is async: it needs a log opened with `oncelog.open`, or a shared asyncpg "
            "connection"
        )
    encoding = options.encoding

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        async def call(guard: AbstractAsyncContextManager[None]) -> tuple[bytes, Any]:
            try:
                async with guard:
                    return encoding.encode_result(await function(*args, **kwargs))
            except encoding.remembered_errors as error:
                return encoding.encode_error(error)

        work = options.build_work(args, kwargs)
        opened_log = _resolve_log(log)
        if isinstance(opened_log, AsyncSharedLog):
            async with opened_log.transaction(work) as shared:
                if shared.result is not None:
                    return encoding.decode_outcome(shared.result)
                shared.body, value = await call(shared.guard_function())
            return _unwrap(value)
        leases = _check_kind(opened_log, Log, function).leases
        result_or_lease = leases.recall(work) or await leases.begin(work)
        if not isinstance(result_or_lease, HeldLease):
            return encoding.decode_outcome(result_or_lease.body)
        _, value = await leases.run(result_or_lease, lambda: call(nullcontext()))
        return _unwrap(value)

    return wrapper


def _wrap_blocking(
    function: Callable[..., Any], options: _OnceOptions, log: AnyLog | Callable[[], AnyLog]
) -> Callable[..., Any]:
    if isinstance(log, Log | AsyncSharedLog):
        raise TypeError(f"{function.__qualname__} is not async: it needs a log opened with `oncelog.open_blocking`")
    encoding = options.encoding

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        def call(guard: AbstractContextManager[None]) -> tuple[bytes, Any]:
            try:
                with guard:
                    return encoding.encode_result(function(*args, **kwargs))
            except encoding.remembered_errors as error:
                return encoding.encode_error(error)

        work = options.build_work(args, kwargs)
        opened_log = _resolve_log(log)
        if isinstance(opened_log, SharedLog):
            with opened_log.transaction(work) as shared:
                if shared.result is not None:
                    return encoding.decode_outcome(shared.result)
                shared.body, value = call(shared.guard_function())
            return _unwrap(value)
        leases = _check_kind(opened_log, BlockingLog, function).leases
        result_or_lease = leases.recall(work) or leases.begin(work)
        if not isinstance(result_or_lease, HeldLease):
            return encoding.decode_outcome(result_or_lease.body)
        _, value = leases.run(result_or_lease, lambda: call(nullcontext()))
        return _unwrap(value)

    return wrapper


def _unwrap(value: Any) -> Any:
    if isinstance(value, RaisedOutcome):
        raise value.error
    return value


L = TypeVar("L", Log, BlockingLog)


def _resolve_log(log: AnyLog | Callable[[], AnyLog]) -> object:
    return log if isinstance(log, AnyLog) else log()


def _check_kind(log: object, kind: type[L], function: Callable[..., Any]) -> L:
    if not isinstance(log, kind):
        raise TypeError(f"{function.__qualname__} needs a {kind.__name__}, not {type(log).__name__}")
    return log
