"""The native dialect: names with underscores, any partitions, and events with a `type` and any further members.

A malformed request is refused as a whole (`bad_request`). A fault in one event rejects only that event (EV-9). Records
are stored and served as bytes: the encoder splices an event into its envelope without parsing it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import orjson
from msgspec import Meta, Raw, Struct

from oncelog import error_codes
from oncelog.core.builders import event, format_uuid, parse_uuid
from oncelog.core.canonical import INTEGER_MAX, JsonValue, canonical_plain
from oncelog.core.identity import fingerprint, normal_partitions
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, Reason, Receipt, Record, Refused, Replayed, Submission
from oncelog.error_codes import VALIDATION_FAILED
from oncelog.errors import CanonicalError
from oncelog.server.api_service import outcome_schema
from oncelog.server.errors import field_error, raise_first
from oncelog.server.events.dialect import (
    LIMIT,
    MSG_ID_CHARACTERS_MAX,
    TOKEN,
    Connect,
    Dialect,
    Envelope,
    EnvelopeNames,
    ItemResult,
    RejectedItem,
    Submit,
    Sync,
    check_unique_ids,
    client_id_field,
    decode_events,
    get_reason,
    join_with_commas,
    since_field,
)
from oncelog.server.limits import ApiLimits
from oncelog.server.messages import (
    NO_NUL,
    POSITIVE_INTEGER,
    TEXT_SCHEMA,
    TIMESTAMP,
    Field,
    Message,
    Schema,
    decode_array,
    decode_number,
    decode_object,
    decode_text,
    get_required,
    integer_schema,
    object_schema,
    schema_ref,
    with_optional,
)
from oncelog.server.websocket_frames import encode_frame_header, encode_json_text
from oncelog.storage.store import RecordView, RecordViewPage, to_record_view

UUID_SCHEMA: Final[Schema] = {
    "type": "string",
    "pattern": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
}
_FIELD_NAMES: Final = {
    "key": "id",
    "body": "event",
    "fingerprint": "event",
    "expected_position": "expected_committed_id",
}
"""This dialect's names for the fields of a submission. Fields that are not listed keep their name."""


class _Item(Struct, frozen=True, gc=False):
    """An event whose request has passed the checks that refuse whole requests."""

    id: tuple[str, bytes]
    """The id as it was sent, and its bytes."""
    partitions: list[JsonValue]
    event: JsonValue
    expected_position: int | None


NEW_EVENT: Final = Message(
    _Item,
    Field(
        name="id",
        decode=lambda value, path: (value, parse_uuid(value, path)),
        schema={**UUID_SCHEMA, "description": "A UUID, in upper or lower case."},
        is_required=True,
    ),
    Field(
        name="partitions",
        decode=decode_array,
        schema={
            "type": "array",
            "description": f"1 to {PARTITIONS_MAX} different strings of 1 to {PARTITION_CHARACTERS_MAX} "
            "characters. The server rejects an event with other partitions.",
        },
        is_required=True,
    ),
    Field(
        name="event",
        decode=lambda value, _: value,
        schema={"description": "An object. The server rejects an event whose `type` is not a non-empty string."},
        is_required=True,
    ),
    Field(
        name="expected_committed_id",
        decode=decode_number,
        schema=integer_schema("Commit only if the partitions have no record with a higher `committed_id`."),
    ),
)


_CLIENT_ID: Final = client_id_field(
    "client_id",
    is_required=False,
    schema={
        "type": "string",
        "minLength": 1,
        "maxLength": NAME_CHARACTERS_MAX - len("client:"),
        "pattern": NO_NUL,
        "description": "Client of the events. Default: the client of the credential.",
    },
)


def _decode_items(value: JsonValue, path: str, *, events_max: int) -> list[_Item]:
    events = decode_events(value, path, events_max)
    items = [
        NEW_EVENT.decode(decode_object(item, f"{path}[{index}]"), f"{path}[{index}]")
        for index, item in enumerate(events)
    ]
    check_unique_ids([item.id[0] for item in items], [item.id[1] for item in items], path)
    return items


@lru_cache(maxsize=16)
def declare_submission(events_max: int) -> Message[tuple[str | None, list[_Item]]]:
    """Declare the body of a submission over HTTP: client id and events. Cached, because a server has only one limit."""
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": events_max,
        "uniqueItems": True,
        "description": "Ids must be different.",
        "items": schema_ref("NewEvent"),
    }
    decode_items = partial(_decode_items, events_max=events_max)
    return Message(
        lambda *values: values,
        _CLIENT_ID,
        Field(name="events", decode=decode_items, schema=schema, is_required=True),
    )


_SYNC: Final = Message(
    Sync,
    Field(
        name="partitions",
        decode=lambda value, path: decode_partitions(decode_array(value, path), path),
        is_required=True,
    ),
    since_field("since_committed_id"),
    LIMIT,
    Field(name="epoch", decode=decode_text),
)


def decode_partitions(partitions: Sequence[JsonValue], path: str) -> tuple[str, ...]:
    """Return the requested partitions in normal form. Raises ApiError, or CanonicalError with the path."""
    normal = normal_partitions(partitions, path)
    are_valid = all(1 <= len(name) <= PARTITION_CHARACTERS_MAX and "\0" not in name for name in normal)
    raise_first(
        partial(field_error, path),
        (
            not 1 <= len(normal) <= PARTITIONS_MAX,
            f"must have 1 to {PARTITIONS_MAX} different partitions, not {len(normal)}",
        ),
        (not are_valid, f"must each have 1 to {PARTITION_CHARACTERS_MAX} characters and must not contain U+0000"),
    )
    return normal


def to_submit(items: Sequence[_Item], actor: str, client: str) -> Submit:
    """Convert the events of a request to submissions."""
    return Submit([item.id[0] for item in items], [_to_submission(item, actor, client) for item in items])


def _to_submission(item: _Item, actor: str, client: str) -> Submission | RejectedItem:
    try:
        return event(
            item.id[0],
            item.event,
            item.partitions,
            actor=actor,
            client=client,
            expected_position=item.expected_position,
        )
    except CanonicalError as error:
        return RejectedItem(VALIDATION_FAILED, error.path.removeprefix("$."), error.reason)


class NativeDialect(Dialect):
    """The native dialect of one server."""

    names: ClassVar = EnvelopeNames()
    connect: ClassVar = Message(Connect, TOKEN, client_id_field("client_id", is_required=False, default=""))
    is_project_bound: ClassVar = False

    def decode(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Envelope:
        """See the base class. The fast decoder handles plain submissions."""
        return decode_fast(data, actor, client, events_max) or super().decode(data, actor, client, events_max)

    def decode_submit(self, payload: Mapping[str, JsonValue], actor: str, client: str, events_max: int) -> Submit:
        """See the base class."""
        events = get_required(payload, "events", "$.payload")
        return to_submit(_decode_items(events, "$.payload.events", events_max=events_max), actor, client)

    def decode_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """See the base class."""
        return _SYNC.decode(payload, "$.payload")

    def encode_connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:
        """See the base class."""
        members = {"client_id": client_id, "actor": actor} if self.shows_actor else {"client_id": client_id}
        return orjson.dumps({**members, "server_last_committed_id": last_committed_id, "epoch": epoch})

    def encode_results(self, ids: Sequence[str], results: Sequence[ItemResult], now_ms: int = 0) -> bytes:  # noqa: ARG002 - shows no time
        """See the base class."""
        return b'{"results":[%b]}' % b",".join(map(_encode_result, ids, results))

    def encode_record(self, record: Record) -> str:
        """See the base class. Readers continue the trace of the request that submitted the event."""
        text = self.encode_view(to_record_view(record))
        return text if record.trace is None else f'{text[:-1]},"traceparent":"{record.trace.traceparent}"}}'

    def encode_view(self, view: RecordView) -> str:
        """See the base class. An erased event is null. A text id is shown as the UUID derived from it (`projects`)."""
        position, log_time_ms, actor, client, _, key, partitions, body = view
        shown_actor = f',"actor":{encode_json_text(actor)}' if self.shows_actor else ""
        erased = "" if body is not None else ',"erased":true'
        return (
            f'{{"id":"{format_uuid(key)}","client_id":{encode_json_text(client)}{shown_actor},"partitions":{partitions},"committed_id":{position},'
            f'"event":{"null" if body is None else body},"status_updated_at":{log_time_ms}{erased}}}'
        )

    def encode_event(self, record: Record) -> bytes:
        """Encode a record as a server-sent event."""
        return self.encode_record(record).encode()

    def encode_page(self, sync: Sync, page: RecordViewPage, epoch: str) -> list[bytes]:
        """See the base class. The client's cursor may be above the position that this server has delivered."""
        tail = b'],"next_since_committed_id":%d,"has_more":%b,"sync_to_committed_id":%d,"epoch":"%b"}' % (
            page.next,
            b"true" if page.has_more else b"false",
            max(page.upto, sync.since),
            epoch.encode(),
        )
        head = b'{"partitions":%b,"events":[' % orjson.dumps(sync.partitions)
        return [head, *join_with_commas(page.encoded), tail]

    def encode_committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """See the base class. Encodes in one step, because a busy server sends mostly such frames."""
        message = (
            b'{"type":"submit_events_result","protocol_version":"1.0",%b"timestamp":%d,"payload":{"results":['
            b'{"id":"%b","status":"committed","committed_id":%d,"status_updated_at":%d}]}}'
        ) % (
            b'"msg_id":%b,' % msg_id if msg_id else b"",
            now_ms,
            id_text.encode(),
            receipt.position,
            receipt.log_time_ms,
        )
        return encode_frame_header(len(message)) + message


NATIVE: Final = NativeDialect()


def _encode_result(id_text: str, result: ItemResult) -> bytes:
    """Encode the result of one event. It echoes the id as sent (EV-9): a UUID, which needs no escapes."""
    if isinstance(result, Committed | Replayed) and (receipt := result.receipt) is not None:
        return b'{"id":"%b","status":"committed","committed_id":%d,"status_updated_at":%d%b}' % (
            id_text.encode(),
            receipt.position,
            receipt.log_time_ms,
            b',"erased":true' if isinstance(result, Replayed) and result.erased else b"",
        )
    assert isinstance(result, RejectedItem | Refused)  # noqa: S101 - the log never forgets events
    error: dict[str, Any] = {"field": _FIELD_NAMES.get(result.field, result.field), "message": result.message}
    if isinstance(result, Refused) and result.reason is Reason.UNEXPECTED_POSITION:
        error["current_committed_id"] = result.current
    # The native dialect never skips items (`Mode.UNTIL_REFUSED`), so clients know every reason.
    return orjson.dumps({"id": id_text, "status": "rejected", "reason": get_reason(result), "errors": [error]})


# --- the fast decoder --------------------------------------------------------------------------------


_Partition = Annotated[str, Meta(min_length=1, max_length=PARTITION_CHARACTERS_MAX)]


class _FastItem(Struct, gc=False):
    id: str
    partitions: Annotated[list[_Partition], Meta(min_length=1, max_length=1)]
    event: Raw
    expected_committed_id: Annotated[int, Meta(ge=0, le=INTEGER_MAX)] | None = None


class _FastPayload(Struct, gc=False):
    events: Annotated[list[_FastItem], Meta(min_length=1)]


class _FastMessage(Struct, gc=False):
    type: Literal["submit_events"]
    protocol_version: Literal["1.0"]
    payload: _FastPayload
    msg_id: Annotated[str, Meta(max_length=MSG_ID_CHARACTERS_MAX)] | None = None
    traceparent: str | None = None


_decode_fast_message: Final = msgspec.json.Decoder(_FastMessage).decode
_MESSAGE_COLONS: Final = 4
"""Colons after the names type, protocol_version, payload and events."""
_ITEM_COLONS: Final = 3


def decode_fast(data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | None:
    """Decode a plain `submit_events` into its `msg_id` and submissions. Returns None for any other message.

    A message with escapes, unknown or repeated members, or members of unexpected types is not plain. Unknown and
    repeated members change the number of colons. The result is the same as that of the full decoder, in half the time.
    Most messages that a busy server receives are plain.
    """
    if b"\\" in data:
        return None
    try:
        message = _decode_fast_message(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    items = message.payload.events
    if len(items) > events_max:
        return None
    msg_id = message.msg_id
    colons = _MESSAGE_COLONS + _ITEM_COLONS * len(items)
    if msg_id is not None:
        colons += 1 + msg_id.count(":")
    traceparent = message.traceparent
    if traceparent is not None:
        colons += 1 + traceparent.count(":")
    submissions: list[Submission | RejectedItem] = []
    ids: list[str] = []
    for item in items:
        submission = _to_fast_submission(item, actor, client)
        if submission is None:
            return None
        submissions.append(submission)
        ids.append(item.id)
        # An item has exactly one partition here, so normalisation cannot have removed any.
        colons += submission.body.count(b":") + item.partitions[0].count(":") + (item.expected_committed_id is not None)
    if colons != data.count(b":") or (len(ids) > 1 and len({submission.key for submission in submissions}) != len(ids)):  # type: ignore[union-attr]
        return None
    # A plain `msg_id` needs no escapes.
    return b"" if msg_id is None else b'"%b"' % msg_id.encode(), (
        Submit(ids, submissions, traceparent=traceparent) if traceparent else Submit(ids, submissions)
    )


def _to_fast_submission(item: _FastItem, actor: str, client: str) -> Submission | None:
    partitions = tuple(item.partitions)
    if not partitions[0].isascii():
        return None
    found = canonical_plain(bytes(item.event))
    if found is None:
        return None
    value, body = found
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is not str or not kind:
        return None
    try:
        key = parse_uuid(item.id)
    except CanonicalError:
        return None
    return Submission(
        policy=EVENTS,
        scope="",
        key=key,
        fingerprint=fingerprint(partitions, body),
        body=body,
        actor=actor,
        partitions=partitions,
        client=client,
        expected_position=item.expected_committed_id,
    )


# --- JSON schemas of the OpenAPI document ------------------------------------------------------------


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    about = "Principal that wrote the event. Left out if `show_actors` is off."
    return {
        "Submission": declare_submission(limits.request_events_max).to_schema(),
        "NewEvent": NEW_EVENT.to_schema(),
        "Results": object_schema(results={"type": "array", "minItems": 1, "items": _result_schema()}),
        "Event": with_optional(
            object_schema(
                id=UUID_SCHEMA,
                client_id=TEXT_SCHEMA,
                partitions={"type": "array", "minItems": 1, "items": TEXT_SCHEMA},
                committed_id=POSITIVE_INTEGER,
                event={
                    "type": ["object", "null"],
                    "description": "The submitted event in canonical form; null if erased.",
                },
                status_updated_at=TIMESTAMP,
            ),
            erased={"const": True},
            actor={**TEXT_SCHEMA, "description": about},
            traceparent={**TEXT_SCHEMA, "description": "Trace context of the request that submitted the event."},
        ),
        "EventOutcome": outcome_schema(event=schema_ref("Event")),
        "Page": object_schema(
            partitions={"type": "array", "items": TEXT_SCHEMA},
            events={"type": "array", "maxItems": limits.page_events_max, "items": schema_ref("Event")},
            next_since_committed_id=integer_schema("`since` of the next page."),
            has_more={"type": "boolean"},
            sync_to_committed_id=integer_schema("Bound of the paging: `to` of the following pages."),
            epoch=TEXT_SCHEMA,
        ),
    }


def _result_schema() -> Schema:
    identity = {**UUID_SCHEMA, "description": "The id as the client sent it."}
    committed = object_schema(
        id=identity,
        status={"const": "committed"},
        committed_id=POSITIVE_INTEGER,
        status_updated_at=TIMESTAMP,
    )
    fault = with_optional(object_schema(field=TEXT_SCHEMA, message=TEXT_SCHEMA), current_committed_id=integer_schema())
    rejected = object_schema(
        id=identity,
        status={"const": "rejected"},
        reason={"enum": [error_codes.VALIDATION_FAILED, error_codes.FORBIDDEN]},
        errors={"type": "array", "minItems": 1, "items": fault},
    )
    return {"oneOf": [with_optional(committed, erased={"const": True}), rejected]}
