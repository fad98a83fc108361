"""Calls to async functions that `once` decorates.

`tools/blocking` generates the module for blocking functions from this one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from hashlib import sha256
from typing import Any, TypeVar

from msgspec import Struct

from oncelog.core.identity import scope_of
from oncelog.core.policy import Policy
from oncelog.engine.blocking import BlockingLog
from oncelog.engine.held_lease import HeldLease, Work
from oncelog.engine.log import Log
from oncelog.idempotency.call_key import KEY_BYTES, Arguments, Key, encode_key
from oncelog.idempotency.result_codec import RaisedOutcome, ResultCodec
from oncelog.idempotency.share import AsyncSharedLog, SharedLog

AnyLog = Log | BlockingLog | SharedLog | AsyncSharedLog
L = TypeVar("L", Log, BlockingLog)


class OnceOptions(Struct, frozen=True, kw_only=True):
    """The options of a decorated function."""

    policy: Policy
    arguments: Arguments
    encoding: ResultCodec
    key: Callable[..., Key] | None
    name: str
    scope: str | Callable[..., str] | None
    new_work: Callable[..., Work]

    def build_work(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Work:
        """Return the work that a call with these arguments represents."""
        arguments_hash = sha256(self.arguments.encode(args, kwargs)).digest()
        return self.new_work(
            policy=self.policy,
            scope=self._build_stream(args, kwargs),
            key=arguments_hash[:KEY_BYTES]
            if self.key is None
            else encode_key(self._call("key", self.key, args, kwargs)),
            fingerprint=arguments_hash,
        )

    def _build_stream(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        scope = self._call("scope", self.scope, args, kwargs) if callable(self.scope) else self.scope
        if self.scope is not None and not isinstance(scope, str):
            raise TypeError(f"scope must be a string, not {type(scope).__name__}")
        return _build_stream_name(self.name, scope)

    def _call(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function that the application gave as an option. Raises TypeError if its parameters differ."""
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except ValueError:  # a function of an extension module without a signature
                raise error from None
            except TypeError as difference:
                raise TypeError(
                    f"{name}=… of {self.name} must be a function with the same parameters as the decorated one: "
                    f"{difference}"
                ) from error
            raise


@functools.lru_cache(maxsize=1024)
def _build_stream_name(name: str, scope: str | None) -> str:
    """Return the name of the function's own stream, in which its results are numbered 1, 2, 3…"""
    return scope_of("once", name) if scope is None else scope_of("once", name, scope)


def wrap_async(
    function: Callable[..., Any], options: OnceOptions, log: AnyLog | Callable[[], AnyLog]
) -> Callable[..., Any]:
    """Wrap a function: a call returns the stored result, or runs the function and stores its result."""
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
        opened_log = resolve_log(log)
        if isinstance(opened_log, AsyncSharedLog):
            async with opened_log.transaction(work) as shared:
                if shared.result is not None:
                    return encoding.decode_outcome(shared.result)
                shared.body, value = await call(shared.guard_function())
            return unwrap_outcome(value)
        leases = check_kind(opened_log, Log, function).leases
        result_or_lease = leases.recall(work) or await leases.begin(work)
        if not isinstance(result_or_lease, HeldLease):
            return encoding.decode_outcome(result_or_lease.body)
        _, value = await leases.run(result_or_lease, lambda: call(nullcontext()))
        return unwrap_outcome(value)

    return wrapper


def unwrap_outcome(value: Any) -> Any:
    """Return the result of a call, or raise the error that it raised."""
    if isinstance(value, RaisedOutcome):
        raise value.error
    return value


def resolve_log(log: AnyLog | Callable[[], AnyLog]) -> object:
    """Return the log. If the argument is a function, call it to get the log."""
    return log if isinstance(log, AnyLog) else log()


def check_kind(log: object, kind: type[L], function: Callable[..., Any]) -> L:
    """Return the log. Raises TypeError if the decorated function needs a different kind of log."""
    if not isinstance(log, kind):
        raise TypeError(f"{function.__qualname__} needs a {kind.__name__}, not {type(log).__name__}")
    return log
