"""Values of JSON texts, and the error that names the path of the one at fault."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, TypeVar

from oncelog.core.canonical import INTEGER_MAX, JsonValue, UnreadableValue, parse_parts
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError, field_error

T = TypeVar("T")

_NUMBER_TYPE: Final = "a whole number from 0 to 2^53−1"
_TYPE_NAMES: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
}


def parse_json(data: bytes) -> JsonValue:
    """Return the value of a JSON text. Raises ApiError."""
    try:
        return parse_parts(data)
    except CanonicalError as error:
        raise field_error(error.path, error.reason) from None


def _decode_as(kind: type[T], value: Any, path: str) -> T:
    if type(value) is not kind:
        raise type_error(path, value, _TYPE_NAMES[kind])
    return value


decode_object: Final = partial(_decode_as, dict)
decode_array: Final = partial(_decode_as, list)
decode_text: Final = partial(_decode_as, str)
decode_boolean: Final = partial(_decode_as, bool)
"""Return a value of that type. They raise ApiError for another one."""


def get_required(members: Mapping[str, JsonValue], name: str, path: str) -> JsonValue:
    """Return the member of that name. Raises ApiError if there is none."""
    try:
        return members[name]
    except KeyError:
        raise field_error(f"{path}.{name}", "is missing") from None


def get_text(members: Mapping[str, JsonValue], name: str, path: str) -> str:
    """Return the member of that name, a string. Raises ApiError."""
    return decode_text(get_required(members, name, path), f"{path}.{name}")


def decode_integer(value: JsonValue, path: str, expected: str = "a whole number") -> int:
    """Return a whole number: 1, 1.0 and 1e0 are one value (CO-1). Raises ApiError."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise type_error(path, value, expected)
    return value


def decode_number(value: JsonValue, path: str) -> int:
    """Return a whole number that positions and sequences can have. Raises ApiError."""
    number = decode_integer(value, path, _NUMBER_TYPE)
    if not 0 <= number <= INTEGER_MAX:
        raise field_error(path, f"must be {_NUMBER_TYPE}, not {number}")
    return number


def type_error(path: str, value: JsonValue, expected: str) -> ApiError:
    """Return the error for a value of another type than expected, or one that could not be parsed."""
    if type(value) is UnreadableValue:
        return field_error("".join([path, *(f".{step}" for step in value.steps)]), value.reason)
    found = "null" if value is None else _TYPE_NAMES.get(type(value), "a number")
    return field_error(path, f"must be {expected}, not {found}")
