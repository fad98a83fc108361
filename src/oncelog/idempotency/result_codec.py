"""How the outcome of a call is kept: as JSON, by the type that the function says it returns."""

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from oncelog.errors import CorruptError, ResultError
from oncelog.idempotency.call_key import get_module_name

R = TypeVar("R")

NO_RESULT: Final = object()
"""Stands for a result type that is not given: the function's annotation says it."""


class _StoredError(Struct):
    """An exception that was listed: which of the listed, and what it was made with."""

    kind: str
    arguments: list[Any] = []
    attributes: dict[str, Any] = {}


class RaisedOutcome(Struct, frozen=True):
    """Stands for the value of a call that raised a listed exception."""

    error: Exception


class _StoredOutcome(Struct, Generic[R], omit_defaults=True):
    result: R | UnsetType = UNSET
    raised: _StoredError | None = None


class ResultCodec:
    """Of one function's outcomes. Made when it is decorated, so that a type that cannot be kept is found there."""

    def __init__(self, function: Callable[..., Any], result: Any, remembered_errors: Sequence[type[Exception]]) -> None:
        self._type = _get_result_type(function) if result is NO_RESULT else result
        _check_json_type(self._type, function)
        self._decoder = msgspec.json.Decoder(_StoredOutcome[self._type])  # type: ignore[name-defined]
        if isinstance(remembered_errors, type):
            raise TypeError("remember is a list of exceptions, not one of them")
        self.remembered_errors = tuple(remembered_errors)
        self._errors_by_name = {_get_error_name(error): error for error in remembered_errors}

    def encode_result(self, value: Any) -> tuple[bytes, Any]:
        """The body for a value, and the value as everybody will get it.

        Raises ResultError if it is not what the function says it returns.
        """
        try:
            body = msgspec.json.encode(_StoredOutcome(value))
            stored = self._decoder.decode(body)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise ResultError(f"the result cannot be kept as {self._type}: {error}") from error
        if stored.result is UNSET:
            raise ResultError("the result is UNSET, which stands for none")
        return body, stored.result

    def encode_error(self, error: Exception) -> tuple[bytes, RaisedOutcome]:
        """The body for a listed exception. One that no JSON can hold is kept by its text."""
        kind = next(kind for kind, listed in self._errors_by_name.items() if isinstance(error, listed))
        try:
            raised = _StoredError(kind, list(error.args), dict(vars(error)))
            body = msgspec.json.encode(_StoredOutcome(raised=raised))
        except (TypeError, ValueError, RecursionError):
            text = str(error).encode("utf-8", "replace").decode()
            body = msgspec.json.encode(_StoredOutcome(raised=_StoredError(kind, [text])))
        return body, RaisedOutcome(error)

    def decode_outcome(self, body: bytes) -> Any:
        """Gives the value, or raises the exception."""
        try:
            stored = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ResultError(
                f"what was kept is not {self._type}: {error}; if the function returns another type by now, "
                "give it another name"
            ) from error
        if stored.raised is not None:
            raise self._rebuild_error(stored.raised)
        if stored.result is UNSET:
            raise CorruptError("what was kept is no outcome of a call")
        return stored.result

    def _rebuild_error(self, raised: _StoredError) -> Exception:
        """Not by its own initialiser, which may want other arguments than those that an exception keeps."""
        listed = self._errors_by_name.get(raised.kind)
        if listed is None:
            return ResultError(f"the call raised {raised.kind}, which is no longer listed in remember=…")
        try:
            error = listed.__new__(listed, *raised.arguments)
            error.args = tuple(raised.arguments)
            for name, value in raised.attributes.items():
                setattr(error, name, value)
        except Exception as trouble:  # noqa: BLE001 - whatever the class has against it
            call = f"{raised.kind}({raised.arguments})"
            return ResultError(f"the call raised {call}, which cannot be made again: {trouble}")
        return error


def _get_error_name(error: type[Exception]) -> str:
    if not (isinstance(error, type) and issubclass(error, Exception)):
        raise TypeError(f"remember lists exceptions, and {error!r} is none")
    return f"{get_module_name(error.__module__)}.{error.__qualname__}"


def _get_result_type(function: Callable[..., Any]) -> Any:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise TypeError(
            f"the types of {function.__qualname__} cannot be read: {error}; say with result=… what it returns"
        ) from error
    if "return" not in hints:
        raise TypeError(f"{function.__qualname__} does not say what it returns: annotate it, or say so with result=…")
    return hints["return"]


def _check_json_type(kind: Any, function: Callable[..., Any]) -> None:
    try:
        custom_type = next(_iterate_custom_types(msgspec.inspect.type_info(kind), set()), None)
        msgspec.json.Decoder(kind)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__} returns {kind}, which cannot be kept as JSON: {error}") from error
    if custom_type is not None:
        raise TypeError(
            f"{function.__qualname__} returns {kind}, and {custom_type.__qualname__} cannot be kept as JSON: "
            "return a dataclass, a msgspec.Struct or plain values, in dicts by texts or numbers"
        )


_NO_KEYS: Final = (
    msgspec.inspect.ListType,
    msgspec.inspect.SetType,
    msgspec.inspect.FrozenSetType,
    msgspec.inspect.VarTupleType,
    msgspec.inspect.TupleType,
    msgspec.inspect.DictType,
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
    msgspec.inspect.NamedTupleType,
)
"""What cannot be the key of a JSON object."""


def _iterate_custom_types(info: Any, seen: set[int]) -> Iterator[type]:
    """What msgspec itself does not know how to write, however deep inside."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        yield info.cls
    elif isinstance(info, msgspec.inspect.DictType) and isinstance(info.key_type, _NO_KEYS):
        yield dict
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        for name in info.__struct_fields__:
            yield from _iterate_custom_types(getattr(info, name), seen)
    elif isinstance(info, tuple | list):
        for element in info:
            yield from _iterate_custom_types(element, seen)


def is_async(function: Callable[..., Any]) -> bool:
    """Raises TypeError for what gives its result piece by piece: there is no one result to keep."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator, which has no one result that could be kept")
    return inspect.iscoroutinefunction(function)
