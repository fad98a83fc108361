"""Decoders of the Events API: messages from bytes to values, or an error that names the field.

A request that is no request is refused whole (`bad_request`); what is wrong with one event refuses that event alone
(EV-9). Nothing here asks who sends it or what is known: shape comes before everything else (CO-18).
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
import orjson
from msgspec import Raw, Struct

from oncelog.core.builders import event, parse_uuid
from oncelog.core.canonical import INTEGER_MAX, JsonValue, canonical_plain
from oncelog.core.identity import fingerprint, normal_partitions
from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.policy import EVENTS
from oncelog.core.values import Mode, Submission
from oncelog.error_codes import PROTOCOL_VERSION, VALIDATION_FAILED, VERSION_UNSUPPORTED
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError, MalformedMessageError
from oncelog.server.events.codec import RejectedItem
from oncelog.server.events.projects import Project
from oncelog.server.json_fields import (
    bad_request,
    decode_client_id,
    decode_committed_id,
    decode_object,
    get_events,
    get_limit,
    get_required,
    get_text,
    get_token,
    parse_json,
    type_error,
)

MSG_ID_CHARACTERS_MAX: Final = 256


class Envelope(Struct, frozen=True, gc=False):
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
    items: list[Submission | RejectedItem]
    mode: Mode = Mode.EACH


class Sync(Struct, frozen=True):
    """A page that is asked for."""

    partitions: tuple[str, ...]
    since: int
    limit: int | None = None
    epoch: str | None = None
    upto: int | None = None
    """Over HTTP: the bound of a paging that has begun."""


# --- envelopes ---------------------------------------------------------------------------------------


class EnvelopeNames(Struct, frozen=True):
    """The names of an envelope's members, and what may be in them."""

    msg_id: str = "msg_id"
    version: str = "protocol_version"
    has_numbers: bool = True
    """Whether a `msg_id` may be a number."""


NATIVE_ENVELOPE: Final = EnvelopeNames()
_VERSION_MISSING: Final = (
    'is missing: every frame has "protocol_version" (the native dialect) or "protocolVersion" (the dialect of the npm '
    "package insieme), whichever the first frame of the connection had"
)


def decode_message(data: bytes, names: EnvelopeNames = NATIVE_ENVELOPE) -> Envelope:
    """A frame of the WebSocket. Raises MalformedMessageError."""
    msg_id = b""
    try:
        members = decode_object(parse_json(data), "$")
        msg_id = _get_msg_id(members, names)
        kind = get_text(members, "type", "$")
        _check_version(members, names)
        return Envelope(kind, decode_object(get_required(members, "payload", "$"), "$.payload"), msg_id)
    except ApiError as error:
        raise MalformedMessageError(error, msg_id) from None


def decode_body(data: bytes) -> Mapping[str, JsonValue]:
    """The body of an HTTP request. Raises ApiError."""
    return decode_object(parse_json(data), "$")


def _get_msg_id(members: Mapping[str, JsonValue], names: EnvelopeNames) -> bytes:
    path = f"$.{names.msg_id}"
    value = members.get(names.msg_id)
    if value is None:
        return b""
    if type(value) is str and len(value) <= MSG_ID_CHARACTERS_MAX:
        try:
            return b"%b" % orjson.dumps(value)  # kept, and else in a block of 4 KiB
        except orjson.JSONEncodeError:  # half a character
            raise bad_request(path, "lone surrogate in a string") from None
    if names.has_numbers and type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX:
        return b"%d" % value
    numbers = ", or a whole number" if names.has_numbers else ""
    raise bad_request(path, f"must be a string of at most {MSG_ID_CHARACTERS_MAX} characters{numbers}")


def _check_version(members: Mapping[str, JsonValue], names: EnvelopeNames) -> None:
    if names.version not in members:
        raise bad_request(f"$.{names.version}", _VERSION_MISSING)
    version = get_text(members, names.version, "$")
    if version != PROTOCOL_VERSION:
        raise ApiError(
            VERSION_UNSUPPORTED,
            f"{names.version} must be {PROTOCOL_VERSION!r}",
            supported=[PROTOCOL_VERSION],
        )


# --- the quick way -----------------------------------------------------------------------------------


class _FastItem(Struct, gc=False):
    id: str
    partitions: list[str]
    event: Raw
    expected_committed_id: int | None = None


class _FastPayload(Struct, gc=False):
    events: list[_FastItem]


class _FastMessage(Struct, gc=False):
    type: Literal["submit_events"]
    protocol_version: Literal["1.0"]
    payload: _FastPayload
    msg_id: str | None = None


_decode_fast_message: Final = msgspec.json.Decoder(_FastMessage).decode
_MESSAGE_COLONS: Final = 4
"""Of the members type, protocol_version, payload and events."""
_ITEM_COLONS: Final = 3


def decode_fast(data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | None:
    """The `msg_id` and the submissions of a plain `submit_events`, or None: then the long way is to be taken.

    Never refuses anything. It gives submissions only where the long way would give the same: a member that is
    unknown, there twice, of another type, or has an escape in it makes the number of colons another one, or has been
    seen before. Most messages of a busy server are plain, and this costs them half.
    """
    if b"\\" in data:
        return None
    try:
        message = _decode_fast_message(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    items = message.payload.events
    if not 1 <= len(items) <= events_max:
        return None
    msg_id = message.msg_id
    colons = _MESSAGE_COLONS + _ITEM_COLONS * len(items)
    if msg_id is not None:
        if len(msg_id) > MSG_ID_CHARACTERS_MAX:
            return None
        colons += 1 + msg_id.count(":")
    submissions: list[Submission | RejectedItem] = []
    ids: list[str] = []
    for item in items:
        submission = _to_fast_submission(item, actor, client)
        if submission is None:
            return None
        submissions.append(submission)
        ids.append(item.id)
        # Of other partitions than one there may have been more than are left.
        colons += submission.body.count(b":") + item.partitions[0].count(":") + (item.expected_committed_id is not None)
    if colons != data.count(b":") or (len(ids) > 1 and len({submission.key for submission in submissions}) != len(ids)):  # type: ignore[union-attr]
        return None
    # There is nothing in it that would have to be escaped.
    return b"" if msg_id is None else b'"%b"' % msg_id.encode(), Submit(ids, submissions)


def _to_fast_submission(item: _FastItem, actor: str, client: str) -> Submission | None:
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
        key = parse_uuid(item.id)
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


def decode_connect(payload: Mapping[str, JsonValue], path: str = "$.payload") -> Connect:
    """Raises ApiError."""
    token = get_token(payload, path)
    return Connect(token, decode_client_id(get_required(payload, "client_id", path), f"{path}.client_id"))


def get_client_id(members: Mapping[str, JsonValue]) -> str | None:
    """Over HTTP: which client it is, if it says so. Raises ApiError."""
    value = members.get("client_id")
    return None if value is None else decode_client_id(value, "$.client_id")


def decode_submit(
    payload: Mapping[str, JsonValue], actor: str, client: str, events_max: int, path: str = "$.payload"
) -> Submit:
    """The submissions of a request. Raises ApiError where all of it is refused."""
    events = get_events(payload, events_max, path)
    ids: list[str] = []
    items: list[Submission | RejectedItem] = []
    keys: dict[bytes, int] = {}
    # All of them are looked at before any is made: a bad one refuses the request before anything is done.
    shapes = [_decode_item(value, f"{path}.events[{index}]") for index, value in enumerate(events)]
    for index, (id_text, key, _, _, _) in enumerate(shapes):
        first = keys.setdefault(key, index)
        if first != index:
            raise bad_request(f"{path}.events[{index}].id", f"is the id of events[{first}] too: {id_text}")
        ids.append(id_text)
    for id_text, _, partitions, body, expected in shapes:
        items.append(_to_submission(id_text, partitions, body, expected, actor, client))
    return Submit(ids, items)


_ItemFields = tuple[str, bytes, Sequence[JsonValue], JsonValue, int | None]


def _decode_item(value: JsonValue, path: str) -> _ItemFields:
    """What must be right about every event, or the request is none: id, partitions, event, expectation."""
    if type(value) is not dict:
        value = decode_object(value, path)
    try:
        id_text, partitions, body = value["id"], value["partitions"], value["event"]
    except KeyError as error:
        raise bad_request(f"{path}.{error.args[0]}", "is missing") from None
    try:
        key = parse_uuid(id_text)
    except CanonicalError as error:
        raise bad_request(f"{path}.id", error.reason) from None
    if type(partitions) is not list:
        raise type_error(f"{path}.partitions", partitions, "an array")
    expected = value.get("expected_committed_id")
    if expected is not None:
        expected = decode_committed_id(expected, f"{path}.expected_committed_id")
    return id_text, key, partitions, body, expected


def _to_submission(
    id_text: str, partitions: Sequence[JsonValue], body: JsonValue, expected: int | None, actor: str, client: str
) -> Submission | RejectedItem:
    try:
        return event(id_text, body, partitions, actor=actor, client=client, expected_position=expected)
    except CanonicalError as error:
        return RejectedItem(VALIDATION_FAILED, error.path.removeprefix("$."), error.reason)


def decode_sync(payload: Mapping[str, JsonValue], path: str = "$.payload") -> Sync:
    """Raises ApiError."""
    partitions = get_required(payload, "partitions", path)
    if type(partitions) is not list:
        raise type_error(f"{path}.partitions", partitions, "an array")
    since = get_required(payload, "since_committed_id", path)
    limit = get_limit(payload, path)
    epoch = payload.get("epoch")
    if epoch is not None and type(epoch) is not str:
        raise type_error(f"{path}.epoch", epoch, "a string")
    return Sync(
        decode_partitions(partitions, f"{path}.partitions"),
        decode_committed_id(since, f"{path}.since_committed_id"),
        limit,
        epoch,
    )


def decode_partitions(partitions: Sequence[JsonValue], path: str) -> tuple[str, ...]:
    """Partitions that are asked for, in normal form. Raises ApiError."""
    try:
        normal = normal_partitions(partitions, path)
    except CanonicalError as error:
        raise bad_request(error.path, error.reason) from None
    if not 1 <= len(normal) <= PARTITIONS_MAX:
        raise bad_request(path, f"must have 1 to {PARTITIONS_MAX} different partitions, not {len(normal)}")
    if not all(1 <= len(name) <= PARTITION_CHARACTERS_MAX and "\0" not in name for name in normal):
        raise bad_request(path, f"must each have 1 to {PARTITION_CHARACTERS_MAX} characters, and not U+0000")
    return normal
