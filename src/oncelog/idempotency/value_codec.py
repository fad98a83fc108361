"""JSON forms of typed values, and their restoration by type.

msgspec handles dataclasses, structs, attrs classes, dates, UUIDs, decimals, sets and tuples. This module adds pydantic
models. It never imports pydantic: a program that has models has imported it already.
"""

import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect as types

JSON_TYPES: Final = (
    types.AnyType,
    types.BoolType,
    types.DictType,
    types.Field,
    types.FloatType,
    types.IntType,
    types.ListType,
    types.LiteralType,
    types.Metadata,
    types.NoneType,
    types.StrType,
    types.TypedDictType,
    types.UnionType,
)
"""Types whose values are their own JSON form, apart from the types inside them."""
_KEYLESS_TYPES: Final = (
    types.ListType,
    types.SetType,
    types.FrozenSetType,
    types.VarTupleType,
    types.TupleType,
    types.DictType,
    types.StructType,
    types.DataclassType,
    types.TypedDictType,
    types.NamedTupleType,
)
"""Types that cannot be keys of a JSON object."""


class _AdaptedMeta(type):
    def __instancecheck__(cls, value: object) -> bool:
        """Accept every value: msgspec only checks results of `decode_model`, which pydantic has already checked."""
        return True


class _AdaptedType(metaclass=_AdaptedMeta):
    """Base class of classes that stand for a type which only pydantic can restore, such as a union of models."""

    adapter: Any


def is_model_type(kind: Any) -> bool:
    """Return whether a type is a class of pydantic models."""
    module = sys.modules.get("pydantic.main")
    return module is not None and isinstance(kind, type) and issubclass(kind, module.BaseModel)


def encode_model(value: Any) -> Any:
    """Return the JSON form of a pydantic model, for msgspec's `enc_hook`.

    The form is restored and compared, so that a stored model is never different from the original: pydantic masks
    secrets, omits excluded fields and drops the fields of a subclass without an error.

    Raises:
        TypeError: the value is not a model.
        ValueError: the restored model is different.
    """
    kind = type(value)
    if not is_model_type(kind):
        raise TypeError(f"a value of type {kind.__qualname__} has no JSON form")
    form = value.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    restored = _validate(kind.model_validate_json, form)
    for name in [*kind.model_fields, "model_extra"]:
        if getattr(restored, name, None) != getattr(value, name, None):
            raise ValueError(
                f"field {name} of {kind.__qualname__} is different after a round trip through JSON; give the field a "
                "type or a serializer that keeps its value"
            )
    return form


def decode_model(kind: Any, form: Any) -> Any:
    """Restore a pydantic model from its JSON form, for msgspec's `dec_hook`. Raises ValueError or TypeError."""
    if is_model_type(kind):
        return _validate(kind.model_validate_json, form)
    if isinstance(kind, type) and issubclass(kind, _AdaptedType):
        return _validate(kind.adapter.validate_json, form)
    raise TypeError(f"a value of type {kind!r} cannot be restored from JSON")


def _validate(validate_json: Callable[[bytes], Any], form: Any) -> Any:
    """Validate in pydantic's JSON mode, in which strict models accept dates and UUIDs as strings."""
    try:
        return validate_json(msgspec.json.encode(form))
    except ValueError as error:
        describe = getattr(error, "errors", None)
        if describe is None:
            raise
        faults = (f"{'.'.join(map(str, fault['loc'])) or '$'}: {fault['msg']}" for fault in describe())
        raise ValueError("; ".join(faults)) from error


def build_codec_type(kind: Any) -> Any:
    """Return the type that msgspec uses to decode values of a type.

    Raises TypeError for a type that msgspec cannot decode and that contains no model.
    """
    try:
        types.type_info(kind)
    except TypeError:
        if not _has_model(kind):
            raise
        return _AdaptedMeta("_Adapted", (_AdaptedType,), {"adapter": _build_adapter(kind)})
    return kind


def _build_adapter(kind: Any) -> Any:
    try:
        return sys.modules["pydantic"].TypeAdapter(kind)
    except Exception as error:
        raise TypeError(str(error)) from error


def _has_model(kind: Any) -> bool:
    return is_model_type(kind) or any(map(_has_model, typing.get_args(kind)))


def restore(form: Any, kind: Any) -> Any:
    """Restore a value of a type from its JSON form. Raises TypeError or ValueError."""
    try:
        return msgspec.convert(form, build_codec_type(kind), dec_hook=decode_model, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def to_json_form(value: Any) -> Any:
    """Return the JSON form of a value, in which only the JSON types occur. Raises TypeError or ValueError."""
    kind = type(value)
    if kind is dict:
        return {key: to_json_form(item) for key, item in value.items()}
    if kind is list:
        return [*map(to_json_form, value)]
    if kind in (str, int, float, bool, type(None)):
        return value
    return to_json_arrays(to_builtins(value))


def to_builtins(value: Any) -> Any:
    """Convert a value to JSON types and tuples, with strings as keys. Raises TypeError or ValueError."""
    return msgspec.to_builtins(value, enc_hook=encode_model, order="deterministic", str_keys=True)


def to_json_arrays(value: Any) -> Any:
    """Convert the tuples in a value to lists, because JSON has no tuples."""
    if isinstance(value, dict):
        return dict(zip(value, map(to_json_arrays, value.values()), strict=True))
    return [*map(to_json_arrays, value)] if isinstance(value, list | tuple) else value


def differs_from_json(kind: Any) -> bool:
    """Return whether values of a type differ from their JSON form, as models, dates and sets do."""
    try:
        return any(not isinstance(info, JSON_TYPES) for info in iterate_types(types.type_info(kind)))
    except TypeError:
        return _has_model(kind)


def find_unstorable_type(kind: Any) -> type | None:
    """Return a class inside a type whose values cannot be stored as JSON, or None. Raises TypeError like msgspec."""
    for info in iterate_types(types.type_info(build_codec_type(kind))):
        if isinstance(info, types.CustomType) and not (
            is_model_type(info.cls) or (isinstance(info.cls, type) and issubclass(info.cls, _AdaptedType))
        ):
            return info.cls
        if isinstance(info, types.DictType) and isinstance(info.key_type, _KEYLESS_TYPES):
            return dict
    return None


def iterate_types(info: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the description of a type and of the types inside it."""
    seen = set() if seen is None else seen
    if isinstance(info, tuple | list):
        for element in info:
            yield from iterate_types(element, seen)
    elif isinstance(info, types.Type | types.Field) and id(info) not in seen:
        seen.add(id(info))
        yield info
        for name in info.__struct_fields__:
            yield from iterate_types(getattr(info, name), seen)
