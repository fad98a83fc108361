"""What comes in: the messages of the events door, from bytes to values, with an error that names the field.

A request that is no request is refused whole (`bad_request`); what is wrong with one event refuses that event alone
(EV-9). Nothing here asks who sends it or what is known: shape comes before everything else (CO-18).
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
import orjson
from msgspec import Raw, Struct

from oncelog.core.canonical import INTEGER_MAX, JsonValue, Unreadable, canonical_plain, parse_parts
from oncelog.core.identity import fingerprint, normal_partitions
from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.policy import EVENTS
from oncelog.core.values import Submission
from oncelog.core.writing import event, uuid_bytes
from oncelog.doors.events.words import (
    BAD_REQUEST,
    PROTOCOL_VERSION,
    VALIDATION_FAILED,
    VERSION_UNSUPPORTED,
    DoorError,
    Rejected,
)
from oncelog.doors.principal import client_id_of
from oncelog.errors import CanonicalError

MSG_ID_CHARACTERS_MAX: Final = 256
_COMMITTED_ID: Final = "a whole number from 0 to 2^53−1"
_KINDS: Final = {dict: "an object", list: "an array", str: "a string", int: "a whole number", bool: "true or false"}


class Message(Struct, frozen=True, gc=False):
    """A frame whose envelope is right."""

    type: str
    payload: Mapping[str, JsonValue]
    msg_id: bytes
    """In JSON, for the reply; empty if there was none."""


class Connect(Struct, frozen=True):
    """Who wants to come in. Its repr does not tell the token."""

    token: str | None
    client_id: str

    def __repr__(self) -> str:
        return f"Connect({self.client_id!r})"


class Submit(Struct, frozen=True, gc=False):
    """Events to be committed: for each its id as it was sent, and the submission or what is wrong with it."""

    ids: list[str]
    items: list[Submission | Rejected]


class Sync(Struct, frozen=True):
    """A page that is asked for."""

    partitions: tuple[str, ...]
    since: int
    limit: int | None = None
    epoch: str | None = None
    upto: int | None = None
    """Over HTTP: the bound of a paging that has begun."""


class BadMessageError(DoorError):
    """A message that is none. Its `msg_id` is told where it could be read."""

    def __init__(self, error: DoorError, msg_id: bytes) -> None:
        super().__init__(error.code, error.message, **error.details)
        self.msg_id = msg_id


# --- envelopes ---------------------------------------------------------------------------------------


def read_message(data: bytes) -> Message:
    """A frame of the WebSocket. Raises BadMessageError."""
    msg_id = b""
    try:
        members = _members(_parsed(data), "$")
        msg_id = _msg_id(members)
        kind = _text(members, "type", "$")
        _demand_version(members)
        return Message(kind, _members(_required(members, "payload", "$"), "$.payload"), msg_id)
    except DoorError as error:
        raise BadMessageError(error, msg_id) from None


def read_body(data: bytes) -> Mapping[str, JsonValue]:
    """The body of an HTTP request. Raises DoorError."""
    return _members(_parsed(data), "$")


def _parsed(data: bytes) -> JsonValue:
    try:
        return parse_parts(data)
    except CanonicalError as error:
        raise _bad(error.path, error.reason) from None


def _msg_id(members: Mapping[str, JsonValue]) -> bytes:
    value = members.get("msg_id")
    if value is None:
        return b""
    if type(value) is str and len(value) <= MSG_ID_CHARACTERS_MAX:
        try:
            return orjson.dumps(value)
        except orjson.JSONEncodeError:  # half a character
            raise _bad("$.msg_id", "lone surrogate in a string") from None
    if type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX:
        return orjson.dumps(value)
    raise _bad("$.msg_id", f"must be a string of at most {MSG_ID_CHARACTERS_MAX} characters, or a whole number")


def _demand_version(members: Mapping[str, JsonValue]) -> None:
    version = _text(members, "protocol_version", "$")
    if version != PROTOCOL_VERSION:
        raise DoorError(
            VERSION_UNSUPPORTED,
            f"protocol_version must be {PROTOCOL_VERSION!r}",
            supported=[PROTOCOL_VERSION],
        )


# --- the quick way -----------------------------------------------------------------------------------


class _QuickItem(Struct, gc=False):
    id: str
    partitions: list[str]
    event: Raw
    expected_committed_id: int | None = None


class _QuickPayload(Struct, gc=False):
    events: list[_QuickItem]


class _QuickMessage(Struct, gc=False):
    type: Literal["submit_events"]
    protocol_version: Literal["1.0"]
    payload: _QuickPayload
    msg_id: str | None = None


_quick_message: Final = msgspec.json.Decoder(_QuickMessage).decode
_COLONS: Final = 4
"""Of the members type, protocol_version, payload and events."""
_ITEM_COLONS: Final = 3


def read_quickly(data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | None:
    """The `msg_id` and the submissions of a plain `submit_events`, or None: then the long way is to be taken.

    Never refuses anything. It gives submissions only where the long way would give the same: a member that is
    unknown, there twice, of another type, or has an escape in it makes the number of colons another one, or has been
    seen before. Most messages of a busy server are plain, and this costs them half.
    """
    if b"\\" in data:
        return None
    try:
        message = _quick_message(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    items = message.payload.events
    if not 1 <= len(items) <= events_max:
        return None
    msg_id = message.msg_id
    colons = _COLONS + _ITEM_COLONS * len(items)
    if msg_id is not None:
        if len(msg_id) > MSG_ID_CHARACTERS_MAX:
            return None
        colons += 1 + msg_id.count(":")
    submissions: list[Submission | Rejected] = []
    ids: list[str] = []
    for item in items:
        submission = _quick_submission(item, actor, client)
        if submission is None:
            return None
        submissions.append(submission)
        ids.append(item.id)
        # Of other partitions than one there may have been more than are left.
        colons += submission.body.count(b":") + item.partitions[0].count(":") + (item.expected_committed_id is not None)
    if colons != data.count(b":") or (len(ids) > 1 and len({one.key for one in submissions}) != len(ids)):  # type: ignore[union-attr]
        return None
    return b"" if msg_id is None else orjson.dumps(msg_id), Submit(ids, submissions)


def _quick_submission(item: _QuickItem, actor: str, client: str) -> Submission | None:
    partitions = item.partitions
    expected = item.expected_committed_id
    if len(partitions) != 1 or not 1 <= len(partitions[0]) <= PARTITION_CHARACTERS_MAX or not partitions[0].isascii():
        return None
    if expected is not None and not 0 <= expected <= INTEGER_MAX:
        return None
    found = canonical_plain(bytes(item.event))
    if found is None:
        return None
    value, body = found
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is not str or not kind:
        return None
    normal = (partitions[0],)
    try:
        key = uuid_bytes(item.id)
    except CanonicalError:
        return None
    return Submission(
        policy=EVENTS,
        scope="",
        key=key,
        fingerprint=fingerprint(normal, body),
        body=body,
        actor=actor,
        partitions=normal,
        client=client,
        expected_position=expected,
    )


# --- payloads ----------------------------------------------------------------------------------------


def read_connect(payload: Mapping[str, JsonValue], path: str = "$.payload") -> Connect:
    """Raises DoorError."""
    token = payload.get("token")
    if token is not None and type(token) is not str:
        raise _wrong_type(f"{path}.token", token, "a string")
    return Connect(token, _client_id(_required(payload, "client_id", path), f"{path}.client_id"))


def read_client_id(members: Mapping[str, JsonValue]) -> str | None:
    """Over HTTP: which client it is, if it says so. Raises DoorError."""
    value = members.get("client_id")
    return None if value is None else _client_id(value, "$.client_id")


def _client_id(value: JsonValue, path: str) -> str:
    try:
        return client_id_of(value, path)
    except CanonicalError as error:
        raise _bad(error.path, error.reason) from None


def read_submit(
    payload: Mapping[str, JsonValue], actor: str, client: str, events_max: int, path: str = "$.payload"
) -> Submit:
    """The submissions of a request. Raises DoorError where all of it is refused."""
    events = _required(payload, "events", path)
    if type(events) is not list:
        raise _wrong_type(f"{path}.events", events, "an array")
    if not 1 <= len(events) <= events_max:
        raise _bad(f"{path}.events", f"must have 1 to {events_max} events, not {len(events)}")
    ids: list[str] = []
    items: list[Submission | Rejected] = []
    keys: dict[bytes, int] = {}
    # All of them are looked at before any is made: a bad one refuses the request before anything is done.
    shapes = [_shape(value, f"{path}.events[{index}]") for index, value in enumerate(events)]
    for index, (id_text, key, _, _, _) in enumerate(shapes):
        first = keys.setdefault(key, index)
        if first != index:
            raise _bad(f"{path}.events[{index}].id", f"is the id of events[{first}] too: {id_text}")
        ids.append(id_text)
    for id_text, _, partitions, body, expected in shapes:
        items.append(_submission(id_text, partitions, body, expected, actor, client))
    return Submit(ids, items)


_Shape = tuple[str, bytes, Sequence[JsonValue], JsonValue, int | None]


def _shape(value: JsonValue, path: str) -> _Shape:
    """What must be right about every event, or the request is none: id, partitions, event, expectation."""
    if type(value) is not dict:
        value = _members(value, path)
    try:
        id_text, partitions, body = value["id"], value["partitions"], value["event"]
    except KeyError as error:
        raise _bad(f"{path}.{error.args[0]}", "is missing") from None
    try:
        key = uuid_bytes(id_text)
    except CanonicalError as error:
        raise _bad(f"{path}.id", error.reason) from None
    if type(partitions) is not list:
        raise _wrong_type(f"{path}.partitions", partitions, "an array")
    expected = value.get("expected_committed_id")
    if expected is not None:
        expected = _committed_id(expected, f"{path}.expected_committed_id")
    return id_text, key, partitions, body, expected


def _submission(
    id_text: str, partitions: Sequence[JsonValue], body: JsonValue, expected: int | None, actor: str, client: str
) -> Submission | Rejected:
    try:
        return event(id_text, body, partitions, actor=actor, client=client, expected_position=expected)
    except CanonicalError as error:
        return Rejected(VALIDATION_FAILED, error.path.removeprefix("$."), error.reason)


def read_sync(payload: Mapping[str, JsonValue], path: str = "$.payload") -> Sync:
    """Raises DoorError."""
    partitions = _required(payload, "partitions", path)
    if type(partitions) is not list:
        raise _wrong_type(f"{path}.partitions", partitions, "an array")
    since = _required(payload, "since_committed_id", path)
    limit = payload.get("limit")
    epoch = payload.get("epoch")
    if limit is not None:
        limit = _whole(limit, f"{path}.limit", "a whole number")
    if epoch is not None and type(epoch) is not str:
        raise _wrong_type(f"{path}.epoch", epoch, "a string")
    return Sync(
        read_partitions(partitions, f"{path}.partitions"),
        _committed_id(since, f"{path}.since_committed_id"),
        limit,
        epoch,
    )


def read_partitions(partitions: Sequence[JsonValue], path: str) -> tuple[str, ...]:
    """Partitions that are asked for, in normal form. Raises DoorError."""
    if not 1 <= len(partitions) <= PARTITIONS_MAX:
        raise _bad(path, f"must have 1 to {PARTITIONS_MAX} partitions, not {len(partitions)}")
    try:
        normal = normal_partitions(partitions, path)
    except CanonicalError as error:
        raise _bad(error.path, error.reason) from None
    if not all(1 <= len(one) <= PARTITION_CHARACTERS_MAX and "\0" not in one for one in normal):
        raise _bad(path, f"must each have 1 to {PARTITION_CHARACTERS_MAX} characters, and not U+0000")
    return normal


def _committed_id(value: JsonValue, path: str) -> int:
    number = _whole(value, path, _COMMITTED_ID)
    if not 0 <= number <= INTEGER_MAX:
        raise _bad(path, f"must be {_COMMITTED_ID}, not {number}")
    return number


def _whole(value: JsonValue, path: str, wanted: str) -> int:
    """1, 1.0 and 1e0 are one value (CO-1)."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise _wrong_type(path, value, wanted)
    return value


# --- fields ------------------------------------------------------------------------------------------


def _members(value: JsonValue, path: str) -> Mapping[str, JsonValue]:
    if type(value) is not dict:
        raise _wrong_type(path, value, "an object")
    return value


def _required(members: Mapping[str, JsonValue], name: str, path: str) -> JsonValue:
    try:
        return members[name]
    except KeyError:
        raise _bad(f"{path}.{name}", "is missing") from None


def _text(members: Mapping[str, JsonValue], name: str, path: str) -> str:
    value = _required(members, name, path)
    if type(value) is not str:
        raise _wrong_type(f"{path}.{name}", value, "a string")
    return value


def _wrong_type(path: str, value: JsonValue, wanted: str) -> DoorError:
    if type(value) is Unreadable:
        return _bad("".join([path, *(f".{step}" for step in value.steps)]), value.reason)
    found = "null" if value is None else _KINDS.get(type(value), "a number")
    return _bad(path, f"must be {wanted}, not {found}")


def _bad(path: str, reason: str) -> DoorError:
    """Keeps half characters out of what is sent."""
    field = path.encode("utf-8", "replace").decode()
    return DoorError(BAD_REQUEST, f"{field}: {reason}", field=field)
