"""Results of submitted events, and dialects, which decode and encode the frames of a connection.

A result is either a verdict of the log or a rejection by the API.

The Events API has two dialects (`native_dialect`, `insieme_dialect`). They differ in member names and in the form of an
event. Sessions, subscribers and the hub serve both.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.canonical import INTEGER_MAX, LONE_SURROGATE, JsonValue
from oncelog.core.values import Committed, Mode, Reason, Receipt, Record, Refused, Replayed, Submission, Verdict
from oncelog.error_codes import (
    AUTH_FAILED,
    PROTOCOL_VERSION,
    RATE_LIMITED,
    SERVER_ERROR,
    VALIDATION_FAILED,
    VERSION_UNSUPPORTED,
)
from oncelog.server.auth.principal import parse_client_id
from oncelog.server.errors import RETRYABLE_CODES, ApiError, MalformedMessageError, field_error, retryable_error
from oncelog.server.events.projects import Project
from oncelog.server.messages import (
    Field,
    Message,
    Schema,
    decode_array,
    decode_integer,
    decode_number,
    decode_object,
    decode_text,
    get_required,
    get_text,
    parse_json,
)
from oncelog.server.websocket_frames import encode_frame_header
from oncelog.storage.store import RecordView, RecordViewPage, to_record_view

# --- results ---------------------------------------------------------------------------------------------

PRIOR_ITEM_FAILED: Final = "prior_item_failed"
CLOSING_CODES: Final = frozenset({AUTH_FAILED, VERSION_UNSUPPORTED, RATE_LIMITED, SERVER_ERROR})
"""Error codes after which the server closes the connection (EV-2)."""


class RejectedItem(Struct, frozen=True, gc=False):
    """An item that the API rejects before anything is submitted to the log."""

    reason: str
    field: str
    message: str


ItemResult = Verdict | RejectedItem


class Submit(Struct, frozen=True, gc=False):
    """The events of a request: their ids as sent, and a submission or rejection for each."""

    ids: list[str]
    items: list[Submission | RejectedItem]
    mode: Mode = Mode.EACH
    traceparent: str = ""
    """Trace context of the request over a WebSocket. An invalid one is ignored."""


_UNTIL_REFUSED: Final = Mode.UNTIL_REFUSED  # enum member look-ups are slow in Python 3.11


def get_reason(result: ItemResult) -> str:
    """Return the Events API code for why an item was rejected."""
    if isinstance(result, RejectedItem):
        return result.reason
    is_skipped = isinstance(result, Refused) and result.reason is Reason.NOT_PROCESSED
    return PRIOR_ITEM_FAILED if is_skipped else VALIDATION_FAILED


def find_request_error(results: Iterable[ItemResult]) -> ApiError | None:
    """Return an error to send instead of results if the log left an item undecided, so that the client retries.

    Clients treat `rejected` as final and would give up on an event that the log can accept later.
    """
    for result in results:
        if type(result) is Refused and result.reason in RETRYABLE_CODES:
            return retryable_error(result)
    return None


def select_submissions(submit: Submit) -> list[Submission]:
    """Return the submissions, without rejected items. With `UNTIL_REFUSED`, stop at the first rejected item."""
    items = submit.items
    if submit.mode is _UNTIL_REFUSED:
        items = list(takewhile(lambda item: type(item) is Submission, items))
    return [item for item in items if type(item) is Submission]


def merge_results(submit: Submit, verdicts: Sequence[Verdict]) -> Sequence[ItemResult]:
    """Return one result for each item: the log's verdict or the API's rejection."""
    items = submit.items
    if len(verdicts) == len(items):
        return verdicts
    if submit.mode is not _UNTIL_REFUSED:
        following = iter(verdicts)
        return [next(following) if isinstance(item, Submission) else item for item in items]
    # Items after the first refused one are skipped. If the log refused none, the list stopped at the first rejected
    # item.
    refused = next((index for index, verdict in enumerate(verdicts) if isinstance(verdict, Refused)), None)
    results: list[ItemResult] = list(verdicts)
    if refused is None:
        refused = len(verdicts)
        results.append(items[refused])  # type: ignore[arg-type]  # `select_submissions` ends at a rejected item
    skipped = Refused(Reason.NOT_PROCESSED, f"item {refused} was refused", index=refused)
    return [*results, *[skipped] * (len(items) - len(results))]


def find_highest_position(results: Sequence[ItemResult]) -> int:
    """Return the highest position in the results, or 0 if none has a position."""
    positions = [
        result.receipt.position for result in results if isinstance(result, Committed | Replayed) and result.receipt
    ]
    return max(positions, default=0)


# --- frames ----------------------------------------------------------------------------------------------

MSG_ID_CHARACTERS_MAX: Final = 256


class Envelope(Struct, frozen=True, gc=False):
    """A frame with a valid envelope."""

    type: str
    payload: Mapping[str, JsonValue]
    msg_id: bytes
    """The `msg_id` in JSON, for the reply. Empty if the frame has none."""
    traceparent: str = ""


class Connect(Struct, frozen=True):
    """Authenticates a connection. The repr does not show the token."""

    token: str | None
    client_id: str
    """The requested client id. Empty if the client requests none, and uses that of its credential."""
    project: Project | None = None
    """The connection's project, in the `insieme` dialect."""

    def __repr__(self) -> str:
        return f"Connect({self.client_id!r})"


class Sync(Struct, frozen=True):
    """Requests a page of events."""

    partitions: tuple[str, ...]
    since: int
    limit: int | None = None
    epoch: str | None = None
    upto: int | None = None
    """The bound of the first page, which later pages over HTTP repeat."""


# --- fields ------------------------------------------------------------------------------------------

TOKEN: Final = Field(name="token", decode=decode_text)
LIMIT: Final = Field(name="limit", decode=decode_integer)


def client_id_field(
    name: str, *, is_required: bool = True, default: str | None = None, schema: Schema | None = None
) -> Field:
    """Declare the field for a client id."""
    return Field(name=name, decode=parse_client_id, is_required=is_required, default=default, schema=schema or {})


def since_field(name: str) -> Field:
    """Declare the field for a cursor."""
    return Field(name=name, decode=decode_number, is_required=True)


def decode_events(value: JsonValue, path: str, events_max: int) -> list[JsonValue]:
    """Return a submission's events, still undecoded. Raises ApiError for an empty array or too many events."""
    events = decode_array(value, path)
    if not 1 <= len(events) <= events_max:
        raise field_error(path, f"must have 1 to {events_max} events, not {len(events)}")
    return events


def check_unique_ids(ids: Sequence[str], keys: Sequence[object], path: str) -> None:
    """Raise ApiError if two events of a request have the same key. The error contains the id."""
    firsts: dict[object, int] = {}
    for index, key in enumerate(keys):
        first = firsts.setdefault(key, index)
        if first != index:
            shown = ids[index].encode("utf-8", "replace").decode()
            raise field_error(f"{path}[{index}].id", f"is also the id of events[{first}]: {shown}")


# --- envelopes ---------------------------------------------------------------------------------------


class EnvelopeNames(Struct, frozen=True):
    """The member names of an envelope, and whether a `msg_id` may be a number."""

    msg_id: str = "msg_id"
    version: str = "protocol_version"
    has_numbers: bool = True


_VERSION_MISSING: Final = (
    'is missing: every frame needs "protocol_version" (the native dialect) or "protocolVersion" (the dialect of the '
    "npm package insieme), like the first frame of the connection"
)


class Dialect(ABC):
    """The dialect of a connection; several connections may share one."""

    names: ClassVar[EnvelopeNames]
    connect: ClassVar[Message[Connect]]
    """The payload of `connect`."""
    is_project_bound: ClassVar[bool]
    """Whether a reader follows a single project. All readers of a project receive a record in the same form."""

    def __init__(self, *, shows_actor: bool = True) -> None:
        self.shows_actor = shows_actor

    # --- frames in

    def decode_message(self, data: bytes) -> Envelope:
        """Decode a frame. Raises MalformedMessageError if it is malformed."""
        names, msg_id = self.names, b""
        try:
            members = decode_object(parse_json(data), "$")
            msg_id = _get_msg_id(members, names)
            kind = get_text(members, "type", "$")
            _check_version(members, names)
            payload = decode_object(get_required(members, "payload", "$"), "$.payload")
            traceparent = members.get("traceparent")
            # W3C Trace Context: a receiver ignores a trace context that it cannot read.
            return Envelope(kind, payload, msg_id, traceparent if type(traceparent) is str else "")
        except ApiError as error:
            raise MalformedMessageError(error, msg_id) from None

    def decode(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Envelope:
        """Decode an authenticated client's frame: a submission with its `msg_id`, or any other message.

        Raises MalformedMessageError.
        """
        message = self.decode_message(data)
        if message.type != "submit_events":
            return message
        try:
            submit = self.decode_submit(message.payload, actor, client, events_max)
            return message.msg_id, replace(submit, traceparent=message.traceparent) if message.traceparent else submit
        except ApiError as error:
            raise MalformedMessageError(error, message.msg_id) from None

    @abstractmethod
    def decode_submit(self, payload: Mapping[str, JsonValue], actor: str, client: str, events_max: int) -> Submit:
        """Decode a submission. Raises ApiError for a fault that concerns the whole submission."""

    def bind(self, connect: Connect) -> "Dialect":  # noqa: ARG002 - for the dialect with projects
        """Return the dialect for the connection after `connect`."""
        return self

    @abstractmethod
    def decode_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """Decode the payload of `sync`. Raises ApiError if it is malformed."""

    # --- payloads out

    @abstractmethod
    def encode_connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:
        """Encode the answer to `connect`, with the client id and actor that this client's events will show."""

    def translate_error(self, error: ApiError) -> ApiError:
        """Return the error with the codes and field names of the dialect."""
        return error

    @abstractmethod
    def encode_results(self, ids: Sequence[str], results: Sequence[ItemResult], now_ms: int = 0) -> bytes:
        """Encode the answer to a submission: one result for each event, in the order of the request (EV-8)."""

    @abstractmethod
    def encode_view(self, view: RecordView) -> str | None:
        """Encode an event. Returns None if the dialect cannot show the record."""

    def encode_record(self, record: Record) -> str | None:
        """Encode an event for a live reader, like `encode_view`."""
        return self.encode_view(to_record_view(record))

    def encode_events(self, views: Sequence[RecordView]) -> bytes:
        """Encode the events of a page, separated by commas. Runs in worker threads."""
        return ",".join(filter(None, map(self.encode_view, views))).encode()

    @abstractmethod
    def encode_page(self, sync: Sync, page: RecordViewPage, epoch: str) -> list[bytes]:
        """Encode the answer to `sync` in parts. The answer is large, and joining the parts only once saves a copy."""

    # --- frames out

    def encode_frame(self, kind: bytes, parts: Sequence[bytes], now_ms: int, msg_id: bytes = b"") -> bytes:
        """Encode a message as a frame, from the parts of its payload. `msg_id` is the JSON form of the request's id."""
        names = self.names
        head = b'{"type":"%b","%b":"1.0",%b"timestamp":%d,"payload":' % (
            kind,
            names.version.encode(),
            b'"%b":%b,' % (names.msg_id.encode(), msg_id) if msg_id else b"",
            now_ms,
        )
        return b"".join((encode_frame_header(len(head) + sum(map(len, parts)) + 1), head, *parts, b"}"))

    def encode_committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """Encode the answer to a submission whose only event was committed."""
        results = self.encode_results([id_text], [Committed(receipt)], now_ms)
        return self.encode_frame(b"submit_events_result", [results], now_ms, msg_id)

    def encode_broadcast(self, record: Record, now_ms: int) -> bytes | None:
        """Encode a record as a broadcast frame. Returns None if the dialect cannot show it."""
        text = self.encode_record(record)
        return None if text is None else self.encode_frame(b"event_broadcast", [text.encode()], now_ms)


def join_with_commas(parts: Sequence[bytes]) -> list[bytes]:
    """Insert a comma between adjacent parts."""
    joined: list[Any] = [b","] * (2 * len(parts) - 1)
    joined[::2] = parts
    return joined


def _get_msg_id(members: Mapping[str, JsonValue], names: EnvelopeNames) -> bytes:
    path = f"$.{names.msg_id}"
    value = members.get(names.msg_id)
    if value is None:
        return b""
    if type(value) is str and len(value) <= MSG_ID_CHARACTERS_MAX:
        try:
            return b"%b" % orjson.dumps(value)  # a copy, because orjson's result occupies 4 KiB
        except orjson.JSONEncodeError:
            raise field_error(path, LONE_SURROGATE) from None
    if names.has_numbers and type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX:
        return b"%d" % value
    numbers = ", or a whole number" if names.has_numbers else ""
    raise field_error(path, f"must be a string of at most {MSG_ID_CHARACTERS_MAX} characters{numbers}")


def _check_version(members: Mapping[str, JsonValue], names: EnvelopeNames) -> None:
    if names.version not in members:
        raise field_error(f"$.{names.version}", _VERSION_MISSING)
    if get_text(members, names.version, "$") != PROTOCOL_VERSION:
        message = f"{names.version} must be {PROTOCOL_VERSION!r}"
        raise ApiError(VERSION_UNSUPPORTED, message, supported=[PROTOCOL_VERSION])
