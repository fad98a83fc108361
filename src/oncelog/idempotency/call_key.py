"""The identity of a call (its function's name and canonical arguments), and the options for waiting callers."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from oncelog.core.canonical import canonical, canonical_at, canonical_fast
from oncelog.core.limits import LEASE_MS_MAX, RUN_MS_LIMIT
from oncelog.core.policy import KEY_BYTES_MAX, NAME_CHARACTERS_MAX, OnReuse, Order, Policy, Retention
from oncelog.engine.held_lease import Work
from oncelog.errors import CanonicalError
from oncelog.idempotency.value_codec import encode_model, is_model_type, to_json_arrays

KEY_BYTES: Final = 16
"""Length of a key computed from arguments."""

Key = bytes | str | UUID
InFlight = Literal["wait", "raise"]
NAME_MAX: Final = 256
"""Maximum length of a function's name, which is part of its stream's name."""
_EXACT_MAX: Final = 2**53 - 1
_MAIN: Final = ("__main__", "__mp_main__")
"""Names of a script's main module. Multiprocessing workers use the second name."""
_NON_NAME_CHARACTERS: Final = re.compile(r"[^a-z0-9_.-]+")


def check_name(name: object) -> str:
    """Return a function name. Raises ValueError if a log cannot store it."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_MAX or not name.isprintable():
        raise ValueError(f"name must be a string of 1 to {NAME_MAX} printable characters, not {name!r}"[:200])
    return name


def get_function_name(function: Callable[..., Any]) -> str:
    """Return the name under which a function's results are stored: its module and qualified name.

    Raises ValueError for an inner function, because two of them may have the same name.
    """
    module, name = function.__module__, function.__qualname__
    if "<" in name:
        raise ValueError(f"{name} is inside another function, so its name may not be unique: set a name with name=…")
    return f"{get_module_name(module)}.{name}"


def get_module_name(module: str) -> str:
    """Return the name of a module. For a script, this is the name under which other programs import it."""
    if module not in _MAIN:
        return module
    main = sys.modules.get(module)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return Path(getattr(main, "__file__", None) or "__main__").stem


def build_policy(kind: str, name: str, retention: Retention) -> Policy:
    """Build the policy for a function's calls: one per function, so that the log refuses a changed retention."""
    plain = _NON_NAME_CHARACTERS.sub("-", name.lower())
    policy = f"{kind}.{plain}"
    if plain != name or len(policy) > NAME_CHARACTERS_MAX:
        suffix = f"-{sha256(name.encode()).hexdigest()[:8]}"
        policy = policy[: NAME_CHARACTERS_MAX - len(suffix)] + suffix
    return build_leased_policy(policy, retention)


def build_leased_policy(name: str, retention: Retention) -> Policy:
    """Build a policy for work that runs once, under a lease."""
    return Policy(
        name=name,
        key_bytes=(1, KEY_BYTES_MAX),
        order=Order.STREAM,
        on_reuse=OnReuse.REFUSE,
        retention=retention,
        leased=True,
    )


def build_work_factory(in_flight: str, wait_s: float | None, lease_s: float, run_s_max: float) -> partial[Work]:
    """Check a caller's options, and return a function that creates work with them.

    Raises ValueError for an option that is out of range.
    """
    if in_flight not in ("wait", "raise"):
        raise ValueError(f"in_flight must be 'wait' or 'raise', not {in_flight!r}")
    return partial(
        Work,
        waits=in_flight == "wait",
        wait_ms=None if wait_s is None else _to_ms("wait_s", wait_s, LEASE_MS_MAX),
        lease_ms=_to_ms("lease_s", lease_s, LEASE_MS_MAX),
        run_ms_max=_to_ms("run_s_max", run_s_max, RUN_MS_LIMIT),
    )


def _to_ms(name: str, seconds: float, ms_max: int) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= ms_max / 1000:
        raise ValueError(f"{name} must be from 0.001 to {ms_max // 1000} seconds, not {seconds!r}")
    return round(seconds * 1000)


class Arguments:
    """Encodes the arguments of a function's calls as canonical text."""

    def __init__(self, function: Callable[..., Any], ignore: Sequence[str]) -> None:
        if isinstance(ignore, str):
            raise TypeError("ignore must be a list of parameter names, not a single name")
        self._function = function.__qualname__
        self._signature = inspect.signature(function)
        self._ignore = frozenset(ignore)
        unknown = self._ignore - self._signature.parameters.keys()
        if unknown:
            names = ", ".join(self._signature.parameters) or "none"
            raise ValueError(
                f"ignore lists {sorted(unknown)}, but the parameters of {function.__qualname__} are: {names}"
            )
        parameters = self._signature.parameters.values()
        self._defaults = {
            parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
        }
        self._positional: list[str] | None = None
        if all(parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) for parameter in parameters):
            self._positional = [
                parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ]

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the canonical text of a call's arguments.

        Raises TypeError for arguments that the function does not accept, and CanonicalError for values that cannot be
        encoded.
        """
        values = self._bind(args, kwargs)
        for name in self._ignore:
            del values[name]
        encoded = canonical_fast(values)  # most arguments are plain JSON values
        return self._encode_tagged(values) if encoded is None else encoded

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each parameter. Simple calls, the most common, avoid the slower `inspect`."""
        if self._positional is not None and len(args) <= len(self._positional):
            values = dict(zip(self._positional, args, strict=False))
            if values.keys().isdisjoint(kwargs):
                values = {**self._defaults, **values, **kwargs}
                if values.keys() == self._signature.parameters.keys():
                    return values
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _encode_tagged(self, values: dict[str, Any]) -> bytes:
        """Encode arguments, tagging values that are not JSON. Raises CanonicalError with the name of the argument at
        fault."""
        return canonical_at({name: self._encode_argument(name, value) for name, value in values.items()}, "$")

    def _encode_argument(self, name: str, value: Any) -> Any:
        path = f"$.{name}"
        try:
            form = to_json_arrays(_tag(value))
            canonical_at(form, path)
        except (TypeError, ValueError, RecursionError) as error:
            reason = error.reason if isinstance(error, CanonicalError) else str(error)
            raise CanonicalError(
                error.path if isinstance(error, CanonicalError) and error.path.startswith(path) else path,
                f"the argument {name} of {self._function}, of type {type(value).__name__}, has no canonical form: "
                f"{reason}; if it does not identify the call, list it in ignore=…",
            ) from error
        return form


def encode_value(value: Any) -> bytes:
    """Return the canonical text of a value. Raises TypeError or ValueError for a value that has none."""
    return canonical(to_json_arrays(_tag(value)))


_PLAIN: Final = (str, float, bool, type(None))


def _tag(value: Any) -> Any:
    """Tag values that are not JSON with their class name, so that `Refund(5)` differs from `Charge(5)`.

    For deeply nested values, `map` uses less stack than a comprehension.
    """
    if isinstance(value, list | tuple):
        return [*map(_tag, value)]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a dict has keys that are not strings")
        return dict(zip(value, map(_tag, value.values()), strict=True))
    if type(value) in _PLAIN or (type(value) is int and abs(value) <= _EXACT_MAX):
        return value
    return {type(value).__name__: _to_builtins(value)}


def _to_builtins(value: Any) -> Any:
    if type(value) is int:
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _tag(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return {name: _tag(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, set | frozenset):
        return sorted((_tag(element) for element in value), key=canonical)
    if is_model_type(type(value)):
        return _tag(encode_model(value))
    return msgspec.to_builtins(value, enc_hook=encode_model)


def encode_key(key: object) -> bytes:
    """Encode a caller's key: a string in UTF-8, or a UUID as its 16 bytes."""
    try:
        raw = key.bytes if isinstance(key, UUID) else key.encode() if isinstance(key, str) else key
    except UnicodeEncodeError as error:
        raise ValueError("a key must not have lone surrogates") from error
    if not isinstance(raw, bytes):
        raise TypeError(f"a key must be a string, bytes or a UUID, not {type(key).__name__}")
    if not 1 <= len(raw) <= KEY_BYTES_MAX:
        raise ValueError(f"a key must have 1 to {KEY_BYTES_MAX} bytes, not {len(raw)}")
    return raw
