"""Fields of what comes in, and the error that names the one at fault. What both dialects read is read here."""

from collections.abc import Mapping
from typing import Final

from oncelog.codes import BAD_REQUEST
from oncelog.core.canonical import INTEGER_MAX, JsonValue, Unreadable, parse_parts
from oncelog.doors.faults import DoorError
from oncelog.doors.principal import client_id_of
from oncelog.errors import CanonicalError

_COMMITTED_ID: Final = "a whole number from 0 to 2^53−1"
_KINDS: Final = {dict: "an object", list: "an array", str: "a string", int: "a whole number", bool: "true or false"}


def parsed(data: bytes) -> JsonValue:
    """The value of a JSON text. Raises DoorError."""
    try:
        return parse_parts(data)
    except CanonicalError as error:
        raise bad(error.path, error.reason) from None


def members_of(value: JsonValue, path: str) -> Mapping[str, JsonValue]:
    """`value` if it is an object. Raises DoorError."""
    if type(value) is not dict:
        raise wrong_type(path, value, "an object")
    return value


def required(members: Mapping[str, JsonValue], name: str, path: str) -> JsonValue:
    """The member of that name. Raises DoorError if there is none."""
    try:
        return members[name]
    except KeyError:
        raise bad(f"{path}.{name}", "is missing") from None


def text_of(members: Mapping[str, JsonValue], name: str, path: str) -> str:
    """The member of that name, a string. Raises DoorError."""
    value = required(members, name, path)
    if type(value) is not str:
        raise wrong_type(f"{path}.{name}", value, "a string")
    return value


def events_of(payload: Mapping[str, JsonValue], events_max: int, path: str) -> list[JsonValue]:
    """The events of a submission, unread, and as many as there may be. Raises DoorError."""
    events = required(payload, "events", path)
    if type(events) is not list:
        raise wrong_type(f"{path}.events", events, "an array")
    if not 1 <= len(events) <= events_max:
        raise bad(f"{path}.events", f"must have 1 to {events_max} events, not {len(events)}")
    return events


def token_of(payload: Mapping[str, JsonValue], path: str) -> str | None:
    """The credential, if there is one. Raises DoorError."""
    token = payload.get("token")
    if token is not None and type(token) is not str:
        raise wrong_type(f"{path}.token", token, "a string")
    return token


def client_of(value: JsonValue, path: str) -> str:
    """A client's id. Raises DoorError."""
    try:
        return client_id_of(value, path)
    except CanonicalError as error:
        raise bad(error.path, error.reason) from None


def limit_of(payload: Mapping[str, JsonValue], path: str) -> int | None:
    """How many events a page may have, if that is said. Raises DoorError."""
    limit = payload.get("limit")
    return None if limit is None else whole(limit, f"{path}.limit", "a whole number")


def committed_id_of(value: JsonValue, path: str) -> int:
    """A number of the log. Raises DoorError."""
    number = whole(value, path, _COMMITTED_ID)
    if not 0 <= number <= INTEGER_MAX:
        raise bad(path, f"must be {_COMMITTED_ID}, not {number}")
    return number


def whole(value: JsonValue, path: str, wanted: str) -> int:
    """1, 1.0 and 1e0 are one value (CO-1). Raises DoorError."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise wrong_type(path, value, wanted)
    return value


def wrong_type(path: str, value: JsonValue, wanted: str) -> DoorError:
    """For a value that is none of that kind, or none at all."""
    if type(value) is Unreadable:
        return bad("".join([path, *(f".{step}" for step in value.steps)]), value.reason)
    found = "null" if value is None else _KINDS.get(type(value), "a number")
    return bad(path, f"must be {wanted}, not {found}")


def bad(path: str, reason: str) -> DoorError:
    """Keeps half characters out of what is sent."""
    field = path.encode("utf-8", "replace").decode()
    return DoorError(BAD_REQUEST, f"{field}: {reason}", field=field)
