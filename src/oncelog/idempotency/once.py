"""`once`: a decorator that makes a function run once per key, however often it is called.

    log = oncelog.open_blocking("app.db")

    @oncelog.once(log, key=lambda order_id, amount: order_id)
    def charge(order_id: str, amount: int) -> Invoice: ...

The first call with a key runs the function and stores its result. Later calls return the stored result, in any process
and after restarts, until the log forgets it. Concurrent calls wait for the running one.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from oncelog.core.limits import RUN_MS_MAX_DEFAULT
from oncelog.core.policy import Retention, kept_for
from oncelog.engine.blocking import BlockingLog
from oncelog.engine.held_lease import Work
from oncelog.engine.log import Log
from oncelog.idempotency.blocking_once_call import wrap_blocking
from oncelog.idempotency.call_key import (
    Arguments,
    InFlight,
    Key,
    build_policy,
    build_work_factory,
    check_name,
    get_function_name,
)
from oncelog.idempotency.once_call import AnyLog, OnceOptions, wrap_async
from oncelog.idempotency.result_codec import NO_RESULT, ResultCodec, is_async
from oncelog.idempotency.share import AsyncSharedLog, SharedLog

P = ParamSpec("P")
R = TypeVar("R")

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
    """Make a function run once per key: an async function with a `Log`, any other function with a `BlockingLog`.

        @oncelog.once(log, key=lambda order, cents: order.id)
        def charge(order: Order, cents: int) -> Invoice: ...

    The first call runs the function and stores its result. Each later call returns the result, in any process that has
    the log open, until the log forgets it (`retention`, 24 hours by default).

    `log` may also be the result of `share`, for functions of both kinds, or a function that returns the log. Calls with
    equal arguments count as one call. With `key`, calls with equal keys do, and reusing a key with different arguments
    raises ConflictError. `ignore` lists parameters that do not identify the call (`self`, a connection). `scope`
    separates keys that may coincide, such as those of two users.

    Arguments and results may be JSON, pydantic models, dataclasses, `msgspec.Struct`s, attrs classes, dates, UUIDs and
    decimals. The result is returned as the annotated type, or as the type `result`. An argument without a canonical
    form raises CanonicalError before the function runs; a result that cannot be stored raises ResultError.

    Exceptions in `remember` are stored like results. After any other exception the next call runs the function again.
    While another call is running, a call waits for at most `wait_s`, or with `in_flight="raise"` raises InFlightError.
    `lease_s` is how long other processes wait after the running process has died. The lease is renewed while the
    function runs, for at most `run_s_max`. `name` replaces the function's name; under a new name, earlier results are
    not found.
    """
    new_work = build_work_factory(in_flight, wait_s, lease_s, run_s_max)
    _check_log(log)
    if key is not None and not callable(key):
        raise TypeError(f"key must be a function that returns a key for the arguments, not {type(key).__name__}")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if not inspect.isroutine(function):
            raise TypeError(f"once can decorate functions and methods only, not {type(function).__name__}")
        wrap = _choose_wrapper(function, log)
        its_name = get_function_name(function) if name is None else check_name(name)
        calls = OnceOptions(
            policy=build_policy("once", its_name, retention),
            arguments=Arguments(function, ignore),
            encoding=ResultCodec(function, result, remember),
            key=key,
            name=its_name,
            scope=scope,
            new_work=new_work,
        )
        wrapped: Any = wrap(function, calls, log)
        wrapped.__oncelog__ = calls
        return wrapped  # type: ignore[no-any-return]

    return decorate


def _check_log(log: object) -> None:
    if isinstance(log, AnyLog):
        return
    if not callable(log):
        raise TypeError(
            f"once needs a log, or a function that returns a log, not {type(log).__name__}: open one with "
            "oncelog.open_blocking(…) or oncelog.open(…)"
        )
    try:
        inspect.signature(log).bind()
    except TypeError as error:
        raise TypeError("once needs the log: @oncelog.once(log), not @oncelog.once") from error


def _choose_wrapper(function: Callable[..., Any], log: object) -> Callable[..., Any]:
    if is_async(function):
        if isinstance(log, BlockingLog | SharedLog):
            raise TypeError(
                f"{function.__qualname__} is async: it needs a log opened with `oncelog.open`, or a shared asyncpg "
                "connection"
            )
        return wrap_async
    if isinstance(log, Log | AsyncSharedLog):
        raise TypeError(f"{function.__qualname__} is not async: it needs a log opened with `oncelog.open_blocking`")
    return wrap_blocking


def work_of(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Work:
    """Return the work that a call to a decorated function represents, with its scope and key for `Log.lookup` and
    `Log.erase`."""
    calls = getattr(function, "__oncelog__", None)
    if not isinstance(calls, OnceOptions):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"{name} is not decorated: pass a function that @oncelog.once(log) decorates")
    return calls.build_work(args, kwargs)
