"""Fields of what comes in, and the error that names the one at fault. What both dialects read is read here."""

from collections.abc import Mapping
from typing import Final

from oncelog.core.canonical import INTEGER_MAX, JsonValue, UnreadableValue, parse_parts
from oncelog.error_codes import BAD_REQUEST
from oncelog.errors import CanonicalError
from oncelog.server.auth.principal import parse_client_id
from oncelog.server.errors import ApiError

_COMMITTED_ID_TYPE: Final = "a whole number from 0 to 2^53−1"
_TYPE_NAMES: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
}


def parse_json(data: bytes) -> JsonValue:
    """The value of a JSON text. Raises ApiError."""
    try:
        return parse_parts(data)
    except CanonicalError as error:
        raise bad_request(error.path, error.reason) from None


def decode_object(value: JsonValue, path: str) -> Mapping[str, JsonValue]:
    """`value` if it is an object. Raises ApiError."""
    if type(value) is not dict:
        raise type_error(path, value, "an object")
    return value


def get_required(members: Mapping[str, JsonValue], name: str, path: str) -> JsonValue:
    """The member of that name. Raises ApiError if there is none."""
    try:
        return members[name]
    except KeyError:
        raise bad_request(f"{path}.{name}", "is missing") from None


def get_text(members: Mapping[str, JsonValue], name: str, path: str) -> str:
    """The member of that name, a string. Raises ApiError."""
    value = get_required(members, name, path)
    if type(value) is not str:
        raise type_error(f"{path}.{name}", value, "a string")
    return value


def get_events(payload: Mapping[str, JsonValue], events_max: int, path: str) -> list[JsonValue]:
    """The events of a submission, unread, and as many as there may be. Raises ApiError."""
    events = get_required(payload, "events", path)
    if type(events) is not list:
        raise type_error(f"{path}.events", events, "an array")
    if not 1 <= len(events) <= events_max:
        raise bad_request(f"{path}.events", f"must have 1 to {events_max} events, not {len(events)}")
    return events


def get_token(payload: Mapping[str, JsonValue], path: str) -> str | None:
    """The credential, if there is one. Raises ApiError."""
    token = payload.get("token")
    if token is not None and type(token) is not str:
        raise type_error(f"{path}.token", token, "a string")
    return token


def decode_client_id(value: JsonValue, path: str) -> str:
    """A client's id. Raises ApiError."""
    try:
        return parse_client_id(value, path)
    except CanonicalError as error:
        raise bad_request(error.path, error.reason) from None


def get_limit(payload: Mapping[str, JsonValue], path: str) -> int | None:
    """How many events a page may have, if that is said. Raises ApiError."""
    limit = payload.get("limit")
    return None if limit is None else decode_integer(limit, f"{path}.limit", "a whole number")


def decode_committed_id(value: JsonValue, path: str) -> int:
    """A number of the log. Raises ApiError."""
    number = decode_integer(value, path, _COMMITTED_ID_TYPE)
    if not 0 <= number <= INTEGER_MAX:
        raise bad_request(path, f"must be {_COMMITTED_ID_TYPE}, not {number}")
    return number


def decode_integer(value: JsonValue, path: str, expected: str) -> int:
    """1, 1.0 and 1e0 are one value (CO-1). Raises ApiError."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise type_error(path, value, expected)
    return value


def type_error(path: str, value: JsonValue, expected: str) -> ApiError:
    """For a value that is none of that kind, or none at all."""
    if type(value) is UnreadableValue:
        return bad_request("".join([path, *(f".{step}" for step in value.steps)]), value.reason)
    found = "null" if value is None else _TYPE_NAMES.get(type(value), "a number")
    return bad_request(path, f"must be {expected}, not {found}")


def bad_request(path: str, reason: str) -> ApiError:
    """Keeps half characters out of what is sent."""
    field = path.encode("utf-8", "replace").decode()
    return ApiError(BAD_REQUEST, f"{field}: {reason}", field=field)
