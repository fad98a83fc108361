"""Encodes the outcome of a call as JSON, according to the function's annotated return type."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from oncelog.errors import CorruptError, ResultError
from oncelog.idempotency.annotations import format_type, resolve_annotation
from oncelog.idempotency.call_key import get_module_name
from oncelog.idempotency.value_codec import build_codec_type, decode_model, encode_model, find_unstorable_type

R = TypeVar("R")

NO_RESULT: Final = object()
"""Default result type: use the function's annotation."""


class _StoredError(Struct):
    """Stored exception: its name in `remember`, and the arguments and attributes needed to rebuild it."""

    kind: str
    arguments: list[Any] = []
    attributes: dict[str, Any] = {}


class RaisedOutcome(Struct, frozen=True):
    """Outcome of a call that raised an exception listed in `remember`."""

    error: Exception


class _StoredOutcome(Struct, Generic[R], omit_defaults=True):
    result: R | UnsetType = UNSET
    raised: _StoredError | None = None


class ResultCodec:
    """Codec for a function's outcomes. The decorator creates it when the function is defined, so that types that
    cannot be encoded are reported early."""

    def __init__(self, function: Callable[..., Any], result: Any, remembered_errors: Sequence[type[Exception]]) -> None:
        self._type = _get_result_type(function) if result is NO_RESULT else result
        self._name = getattr(function, "__name__", repr(function))
        _check_json_type(self._type, function)
        codec_type = build_codec_type(self._type)
        self._encode = msgspec.json.Encoder(enc_hook=encode_model).encode
        self._decoder: msgspec.json.Decoder[_StoredOutcome[Any]] = msgspec.json.Decoder(
            _StoredOutcome[codec_type],  # type: ignore[valid-type]
            dec_hook=decode_model,
        )
        if isinstance(remembered_errors, type):
            raise TypeError("remember must be a list of exceptions, not a single exception")
        self.remembered_errors = tuple(remembered_errors)
        self._errors_by_name = {_get_error_name(error): error for error in self.remembered_errors}

    def encode_result(self, value: Any) -> tuple[bytes, Any]:
        """Return the body for a value, and the value decoded from that body, which all callers get.

        Raises ResultError if the value does not have the annotated type.
        """
        try:
            body = self._encode(_StoredOutcome(value))
            stored = self._decoder.decode(body)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise ResultError(
                f"the result of {self._name} cannot be stored as {format_type(self._type)}: {error}; nothing was "
                "stored, so the next call runs the function again: return that type, or change the annotation"
            ) from error
        if stored.result is UNSET:
            raise ResultError(f"the result of {self._name} is UNSET, which cannot be stored")
        return body, stored.result

    def encode_error(self, error: Exception) -> tuple[bytes, RaisedOutcome]:
        """Return the body for an exception in `remember`. If its arguments cannot be encoded, only its text is
        stored."""
        kind = next(kind for kind, listed in self._errors_by_name.items() if isinstance(error, listed))
        try:
            raised = _StoredError(kind, list(error.args), dict(vars(error)))
            body = msgspec.json.encode(_StoredOutcome(raised=raised))
        except (TypeError, ValueError, RecursionError):
            text = str(error).encode("utf-8", "replace").decode()
            body = msgspec.json.encode(_StoredOutcome(raised=_StoredError(kind, [text])))
        return body, RaisedOutcome(error)

    def decode_outcome(self, body: bytes) -> Any:
        """Return the value of a stored outcome, or raise its exception."""
        try:
            stored = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ResultError(
                f"the stored result of {self._name} is not {format_type(self._type)}: {error}; if the "
                "return type of the function has changed, set a new name with name=…"
            ) from error
        if stored.raised is not None:
            raise self._rebuild_error(stored.raised)
        if stored.result is UNSET:
            raise CorruptError("the stored bytes are not the outcome of a call")
        return stored.result

    def _rebuild_error(self, raised: _StoredError) -> Exception:
        """Rebuild a stored exception without calling `__init__`, whose parameters may differ from `args`."""
        listed = self._errors_by_name.get(raised.kind)
        if listed is None:
            return ResultError(f"the call raised {raised.kind}, which is no longer listed in remember=…")
        try:
            error = listed.__new__(listed, *raised.arguments)
            error.args = tuple(raised.arguments)
            for name, value in raised.attributes.items():
                setattr(error, name, value)
        except Exception as failed:  # noqa: BLE001 - a class of the application may raise anything
            call = f"{raised.kind}({raised.arguments})"
            return ResultError(f"the call raised {call}, which cannot be rebuilt: {failed}")
        return error


def _get_error_name(error: type[Exception]) -> str:
    if not (isinstance(error, type) and issubclass(error, Exception)):
        raise TypeError(f"remember must list exception classes, not {error!r}")
    return f"{get_module_name(error.__module__)}.{error.__qualname__}"


def _get_result_type(function: Callable[..., Any]) -> Any:
    try:
        return resolve_annotation(function, "return")
    except KeyError:
        raise TypeError(
            f"{function.__qualname__} has no return type: annotate it, or set the type with result=…"
        ) from None
    except Exception as error:
        raise TypeError(
            f"the return type of {function.__qualname__} cannot be read: {error}; set it with result=…"
        ) from error


def _check_json_type(kind: Any, function: Callable[..., Any]) -> None:
    try:
        unstorable_type = find_unstorable_type(kind)
        msgspec.json.Decoder(build_codec_type(kind), dec_hook=decode_model)
    except TypeError as error:
        name = format_type(kind)
        raise TypeError(f"{function.__qualname__} returns {name}, which cannot be stored as JSON: {error}") from error
    if unstorable_type is not None:
        raise TypeError(
            f"{function.__qualname__} returns {format_type(kind)}, and {unstorable_type.__qualname__} cannot be stored "
            "as JSON: return a dataclass, a pydantic model, a msgspec.Struct or plain values, and dicts with strings "
            "or numbers as keys"
        )


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function is async. Raises TypeError for a generator, which has no single result."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator, which has no single result to store: return a list")
    return inspect.iscoroutinefunction(function)
