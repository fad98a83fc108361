"""What comes in: the messages of the events door, from bytes to values, with an error that names the field.

A request that is no request is refused whole (`bad_request`); what is wrong with one event refuses that event alone
(EV-9). Nothing here asks who sends it or what is known: shape comes before everything else (CO-18).
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
import orjson
from msgspec import Raw, Struct

from oncelog.codes import PROTOCOL_VERSION, VALIDATION_FAILED, VERSION_UNSUPPORTED
from oncelog.core.canonical import INTEGER_MAX, JsonValue, canonical_plain
from oncelog.core.identity import fingerprint, normal_partitions
from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.policy import EVENTS
from oncelog.core.values import Mode, Submission
from oncelog.core.writing import event, uuid_bytes
from oncelog.doors.events.projects import Project
from oncelog.doors.events.words import Rejected
from oncelog.doors.faults import DoorError
from oncelog.doors.fields import (
    bad,
    client_of,
    committed_id_of,
    events_of,
    limit_of,
    members_of,
    parsed,
    required,
    text_of,
    token_of,
    wrong_type,
)
from oncelog.errors import CanonicalError

MSG_ID_CHARACTERS_MAX: Final = 256


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
    project: Project | None = None
    """That the connection is bound to, in the second dialect."""

    def __repr__(self) -> str:
        return f"Connect({self.client_id!r})"


class Submit(Struct, frozen=True, gc=False):
    """Events to be committed: for each its id as it was sent, and the submission or what is wrong with it."""

    ids: list[str]
    items: list[Submission | Rejected]
    mode: Mode = Mode.EACH


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


class Spelling(Struct, frozen=True):
    """The names of an envelope's members, and what may be in them."""

    msg_id: str = "msg_id"
    version: str = "protocol_version"
    has_numbers: bool = True
    """Whether a `msg_id` may be a number."""


SNAKE: Final = Spelling()
_DIALECTS: Final = (
    'is missing: every frame has "protocol_version" (the native dialect) or "protocolVersion" (the dialect of the npm '
    "package insieme), whichever the first frame of the connection had"
)


def read_message(data: bytes, spelling: Spelling = SNAKE) -> Message:
    """A frame of the WebSocket. Raises BadMessageError."""
    msg_id = b""
    try:
        members = members_of(parsed(data), "$")
        msg_id = _msg_id(members, spelling)
        kind = text_of(members, "type", "$")
        _demand_version(members, spelling)
        return Message(kind, members_of(required(members, "payload", "$"), "$.payload"), msg_id)
    except DoorError as error:
        raise BadMessageError(error, msg_id) from None


def read_body(data: bytes) -> Mapping[str, JsonValue]:
    """The body of an HTTP request. Raises DoorError."""
    return members_of(parsed(data), "$")


def _msg_id(members: Mapping[str, JsonValue], spelling: Spelling) -> bytes:
    path = f"$.{spelling.msg_id}"
    value = members.get(spelling.msg_id)
    if value is None:
        return b""
    if type(value) is str and len(value) <= MSG_ID_CHARACTERS_MAX:
        try:
            return b"%b" % orjson.dumps(value)  # kept, and else in a block of 4 KiB
        except orjson.JSONEncodeError:  # half a character
            raise bad(path, "lone surrogate in a string") from None
    if spelling.has_numbers and type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX:
        return b"%d" % value
    numbers = ", or a whole number" if spelling.has_numbers else ""
    raise bad(path, f"must be a string of at most {MSG_ID_CHARACTERS_MAX} characters{numbers}")


def _demand_version(members: Mapping[str, JsonValue], spelling: Spelling) -> None:
    if spelling.version not in members:
        raise bad(f"$.{spelling.version}", _DIALECTS)
    version = text_of(members, spelling.version, "$")
    if version != PROTOCOL_VERSION:
        raise DoorError(
            VERSION_UNSUPPORTED,
            f"{spelling.version} must be {PROTOCOL_VERSION!r}",
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
    # There is nothing in it that would have to be escaped.
    return b"" if msg_id is None else b'"%b"' % msg_id.encode(), Submit(ids, submissions)


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
    token = token_of(payload, path)
    return Connect(token, client_of(required(payload, "client_id", path), f"{path}.client_id"))


def read_client_id(members: Mapping[str, JsonValue]) -> str | None:
    """Over HTTP: which client it is, if it says so. Raises DoorError."""
    value = members.get("client_id")
    return None if value is None else client_of(value, "$.client_id")


def read_submit(
    payload: Mapping[str, JsonValue], actor: str, client: str, events_max: int, path: str = "$.payload"
) -> Submit:
    """The submissions of a request. Raises DoorError where all of it is refused."""
    events = events_of(payload, events_max, path)
    ids: list[str] = []
    items: list[Submission | Rejected] = []
    keys: dict[bytes, int] = {}
    # All of them are looked at before any is made: a bad one refuses the request before anything is done.
    shapes = [_shape(value, f"{path}.events[{index}]") for index, value in enumerate(events)]
    for index, (id_text, key, _, _, _) in enumerate(shapes):
        first = keys.setdefault(key, index)
        if first != index:
            raise bad(f"{path}.events[{index}].id", f"is the id of events[{first}] too: {id_text}")
        ids.append(id_text)
    for id_text, _, partitions, body, expected in shapes:
        items.append(_submission(id_text, partitions, body, expected, actor, client))
    return Submit(ids, items)


_Shape = tuple[str, bytes, Sequence[JsonValue], JsonValue, int | None]


def _shape(value: JsonValue, path: str) -> _Shape:
    """What must be right about every event, or the request is none: id, partitions, event, expectation."""
    if type(value) is not dict:
        value = members_of(value, path)
    try:
        id_text, partitions, body = value["id"], value["partitions"], value["event"]
    except KeyError as error:
        raise bad(f"{path}.{error.args[0]}", "is missing") from None
    try:
        key = uuid_bytes(id_text)
    except CanonicalError as error:
        raise bad(f"{path}.id", error.reason) from None
    if type(partitions) is not list:
        raise wrong_type(f"{path}.partitions", partitions, "an array")
    expected = value.get("expected_committed_id")
    if expected is not None:
        expected = committed_id_of(expected, f"{path}.expected_committed_id")
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
    partitions = required(payload, "partitions", path)
    if type(partitions) is not list:
        raise wrong_type(f"{path}.partitions", partitions, "an array")
    since = required(payload, "since_committed_id", path)
    limit = limit_of(payload, path)
    epoch = payload.get("epoch")
    if epoch is not None and type(epoch) is not str:
        raise wrong_type(f"{path}.epoch", epoch, "a string")
    return Sync(
        read_partitions(partitions, f"{path}.partitions"),
        committed_id_of(since, f"{path}.since_committed_id"),
        limit,
        epoch,
    )


def read_partitions(partitions: Sequence[JsonValue], path: str) -> tuple[str, ...]:
    """Partitions that are asked for, in normal form. Raises DoorError."""
    try:
        normal = normal_partitions(partitions, path)
    except CanonicalError as error:
        raise bad(error.path, error.reason) from None
    if not 1 <= len(normal) <= PARTITIONS_MAX:
        raise bad(path, f"must have 1 to {PARTITIONS_MAX} different partitions, not {len(normal)}")
    if not all(1 <= len(one) <= PARTITION_CHARACTERS_MAX and "\0" not in one for one in normal):
        raise bad(path, f"must each have 1 to {PARTITION_CHARACTERS_MAX} characters, and not U+0000")
    return normal
