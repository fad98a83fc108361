"""The dialect of the npm package `insieme` 2.1.0 (EV-18), with names in camel case and one project per connection.

`projects` maps projects, their partitions and their ids to the native dialect. In the native dialect, the `event` of a
record that was written in this dialect is {type, schemaVersion, payload, userId, meta}. This dialect does not show
records of any other form.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Final

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from oncelog import error_codes
from oncelog.core.canonical import INTEGER_MAX, JsonValue, canonical_at
from oncelog.core.identity import check_object, check_text, fingerprint
from oncelog.core.identity import get_required as required_field
from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, Mode, Reason, Refused, Replayed, Submission
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError
from oncelog.server.events.dialect import (
    LIMIT,
    TOKEN,
    Connect,
    Dialect,
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
from oncelog.server.events.projects import EVENT_ID_CHARACTERS_MAX, Project, parse_project
from oncelog.server.messages import Field, Message, decode_object, decode_text, get_required, get_text, parse_json
from oncelog.server.websocket_frames import encode_json_text
from oncelog.storage.store import RecordView, RecordViewPage

_ERROR_CODES: Final = {
    error_codes.VERSION_UNSUPPORTED: "protocolVersion_unsupported",
    **dict.fromkeys(
        (error_codes.SERVER_BUSY, error_codes.READ_ONLY, error_codes.QUOTA_EXCEEDED), error_codes.SERVER_ERROR
    ),
}
"""Codes that differ in this dialect. The client does not support SERVER_BUSY and would wait indefinitely for a
different answer. After `server_error` it reconnects and resends all events without a result."""

_FIELD_NAMES: Final = {"key": "id", "body": "payload", "fingerprint": "payload", "partitions": "partition"}
"""This dialect's names for fields. Fields that are not listed keep their name."""


def detect_dialect(data: bytes, native: Dialect, insieme: Dialect) -> Dialect | None:
    """Detect the dialect of a first frame. Returns None if the frame does not reveal it."""
    try:
        members = decode_object(parse_json(data), "$")
    except ApiError:
        return None
    return next((dialect for dialect in (native, insieme) if dialect.names.version in members), None)


_SYNC: Final = Message(
    lambda *values: values,
    Field(name="projectId", decode=decode_text, is_required=True),
    since_field("sinceCommittedId"),
    LIMIT,
)


class InsiemeDialect(Dialect):
    """The `insieme` dialect of one connection, which has no project before `connect`."""

    names: ClassVar = EnvelopeNames(msg_id="msgId", version="protocolVersion", has_numbers=False)
    connect: ClassVar = Message(
        Connect,
        TOKEN,
        client_id_field("clientId"),
        Field(
            name="projectId",
            decode=lambda value, path: parse_project(check_text(decode_text(value, path), path), path),
            is_required=True,
        ),
    )
    is_project_bound: ClassVar = True

    def __init__(self, project: Project | None, requested_id: str = "", *, shows_actor: bool = True) -> None:
        super().__init__(shows_actor=shows_actor)
        self._project = project
        self._requested_id = requested_id
        """The `clientId` in `connect`. Events may repeat it in `meta`, even though the server may store a longer id."""

    # --- frames in

    def decode_submit(self, payload: Mapping[str, JsonValue], actor: str, client: str, events_max: int) -> Submit:
        """See the base class."""
        path = "$.payload.events"
        events = decode_events(get_required(payload, "events", "$.payload"), path, events_max)
        # An id may be any string, because the result echoes it.
        ids = [
            get_text(decode_object(value, f"{path}[{index}]"), "id", f"{path}[{index}]")
            for index, value in enumerate(events)
        ]
        check_unique_ids(ids, ids, path)
        decode_item = partial(
            _decode_item, project=self.project, actor=actor, client=client, requested_id=self._requested_id
        )
        return Submit(ids, [decode_item(decode_object(value, path)) for value in events], Mode.UNTIL_REFUSED)

    def bind(self, connect: Connect) -> Dialect:
        """See the base class."""
        return InsiemeDialect(connect.project, connect.client_id, shows_actor=self.shows_actor)

    def decode_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """See the base class."""
        project_id, since, limit = _SYNC.decode(payload, "$.payload")
        if project_id != self.project.id:
            path = "$.payload.projectId"
            raise ApiError(error_codes.FORBIDDEN, f"{path}: {_OTHER_PROJECT}", field=path)
        return Sync((self.project.partition,), since, limit)

    @property
    def project(self) -> Project:
        """The connection's project. Raises ApiError before `connect`."""
        if self._project is None:
            raise ApiError(error_codes.BAD_REQUEST, "the first message must be connect")
        return self._project

    # --- payloads out

    def encode_connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:  # noqa: ARG002 - has no epoch
        """See the base class."""
        payload = {"clientId": client_id, "projectId": self.project.id, "projectLastCommittedId": last_committed_id}
        return orjson.dumps({**payload, "actor": actor} if self.shows_actor else payload)

    def translate_error(self, error: ApiError) -> ApiError:
        """See the base class."""
        details = {_to_camel_case(name): value for name, value in error.details.items()}
        code = _ERROR_CODES.get(error.code, error.code)
        if code == error_codes.RATE_LIMITED and self._project is not None:
            # Keep the code before `connect`. It means too many wrong credentials there, and resending them does not
            # help.
            code = error_codes.SERVER_ERROR
        return ApiError(code, error.message, **details)

    def encode_results(self, ids: Sequence[str], results: Sequence[ItemResult], now_ms: int = 0) -> bytes:
        """See the base class."""
        payload = {"results": [_to_result(ids, index, result, now_ms) for index, result in enumerate(results)]}
        try:
            return orjson.dumps(payload)
        except orjson.JSONEncodeError:  # echo an id with a lone surrogate in escaped form
            return json.dumps(payload).encode()

    def encode_view(self, view: RecordView) -> str | None:
        """See the base class. The dialect does not show erased records or records of any other form."""
        project = self.project
        position, log_time_ms, actor, client, scope, key, partitions, body = view
        if body is None:
            return None
        try:
            event = _decode_event(body)
        except (msgspec.DecodeError, RecursionError):
            return None
        payload, meta = bytes(event.payload).decode(), bytes(event.meta).decode()
        if not payload.startswith("{") or not meta.startswith("{"):
            return None
        # `encode_json_text` caches texts that repeat. Ids and types rarely repeat, so they bypass the cache.
        event_id, kind = _encode_text(project.to_event_id(scope, key)), _encode_text(event.type)
        user = f'"userId":{_encode_text(event.user_id)},' if event.user_id else ""
        if self.shows_actor:
            user = f'{user}"actor":{encode_json_text(actor)},'
        return (
            f'{{"committedId":{position},"id":{event_id},'
            f'"projectId":{encode_json_text(project.id)},{user}"partition":{encode_json_text(project.find_own_partition(partitions))},'
            f'"type":{kind},"schemaVersion":{event.schema_version},"payload":{payload},'
            f'"meta":{_complete_meta(meta, client, log_time_ms)},"serverTs":{log_time_ms}}}'
        )

    def encode_page(self, sync: Sync, page: RecordViewPage, epoch: str) -> list[bytes]:  # noqa: ARG002 - has no epoch
        """See the base class. The page omits events that the dialect cannot show, and the cursor moves past them."""
        tail = b'],"nextSinceCommittedId":%d,"hasMore":%b,"syncToCommittedId":%d}' % (
            page.next,
            b"true" if page.has_more else b"false",
            max(page.upto, sync.since),
        )
        head = b'{"projectId":%b,"events":[' % encode_json_text(self.project.id).encode()
        return [head, *join_with_commas(list(filter(None, page.encoded))), tail]


# --- items -------------------------------------------------------------------------------------------

_OTHER_PROJECT: Final = "must be the project of this connection"


def _check_id(id_text: str) -> None:
    """Raise CanonicalError if a string cannot be an id.

    The fault rejects only this item. If the server refused the whole request, the client would resend its first draft
    forever.
    """
    check_text(id_text, "$.id")
    if not 1 <= len(id_text) <= EVENT_ID_CHARACTERS_MAX or "\0" in id_text:
        raise CanonicalError("$.id", f"must have 1 to {EVENT_ID_CHARACTERS_MAX} characters and must not contain U+0000")


def _decode_item(
    item: Mapping[str, JsonValue], *, project: Project, actor: str, client: str, requested_id: str
) -> Submission | RejectedItem:
    """Return an item's submission. The item may contain the stored client id or the one requested in `connect`."""
    try:
        _check_id(item["id"])
        project_id = check_text(required_field(item, "projectId"), "$.projectId")
        meta = check_object(required_field(item, "meta"), "$.meta")
        if project_id != project.id:
            return RejectedItem(error_codes.FORBIDDEN, "projectId", _OTHER_PROJECT)
        if project.is_foreign(required_field(item, "partition")):
            return RejectedItem(error_codes.FORBIDDEN, "partition", "must not belong to another project")
        if meta.get("clientId", client) not in (client, requested_id):
            return RejectedItem(error_codes.FORBIDDEN, "meta.clientId", "must be the client of this connection")
        return _to_submission(item, meta, project, actor, client)
    except CanonicalError as error:
        return RejectedItem(error_codes.VALIDATION_FAILED, error.path.removeprefix("$."), error.reason)


def _to_submission(
    item: Mapping[str, JsonValue], meta: Mapping[str, JsonValue], project: Project, actor: str, client: str
) -> Submission:
    """Return an item's submission. Raises CanonicalError with the path of the fault."""
    content = _get_content(item)
    if type(required_field(meta, "clientTs", "$.meta")) not in (int, float):
        raise CanonicalError("$.meta.clientTs", "must be a number")
    partitions = project.get_partitions(check_text(required_field(item, "partition"), "$.partition"), "$.partition")
    scope, key = project.to_scope_and_key(item["id"])
    # The fingerprint must not depend on the client. The stored event keeps the client that sent it first.
    shared_meta = {name: value for name, value in meta.items() if name != "clientId"}
    return Submission(
        policy=EVENTS,
        scope=scope,
        key=key,
        fingerprint=fingerprint(partitions, canonical_at({**content, "meta": shared_meta}, "$")),
        body=canonical_at({**content, "meta": {**shared_meta, "clientId": client}}, "$"),
        actor=actor,
        client=client,
        partitions=partitions,
    )


def _get_content(item: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return an item's content without its `meta`. Raises CanonicalError if it is malformed."""
    version = required_field(item, "schemaVersion")
    is_whole = type(version) is int or (type(version) is float and version.is_integer())
    if not is_whole or not 1 <= version <= INTEGER_MAX:
        raise CanonicalError("$.schemaVersion", f"must be a whole number from 1 to {INTEGER_MAX}")
    content = {
        "type": _get_name(item, "type"),
        "schemaVersion": version,
        "payload": check_object(required_field(item, "payload"), "$.payload"),
    }
    return {**content, "userId": _get_name(item, "userId")} if "userId" in item else content


def _get_name(item: Mapping[str, JsonValue], name: str) -> str:
    text = check_text(required_field(item, name), f"$.{name}")
    if not text:
        raise CanonicalError(f"$.{name}", "must not be empty")
    return text


# --- results -----------------------------------------------------------------------------------------


def _to_result(ids: Sequence[str], index: int, result: ItemResult, now_ms: int) -> dict[str, Any]:
    encoded: dict[str, Any] = {"id": ids[index]}
    if isinstance(result, Committed | Replayed) and (receipt := result.receipt) is not None:
        return {**encoded, "status": "committed", "committedId": receipt.position, "serverTs": receipt.log_time_ms}
    assert isinstance(result, Refused | RejectedItem)  # noqa: S101 - the log never forgets events
    reason = get_reason(result)
    if isinstance(result, Refused) and result.reason is Reason.NOT_PROCESSED:
        blocked = {"reason": reason, "blockedById": ids[result.index], "created": now_ms}
        return {**encoded, "status": "not_processed", **blocked}
    error = {"field": _FIELD_NAMES.get(result.field, result.field), "message": result.message}
    return {**encoded, "status": "rejected", "reason": reason, "errors": [error], "created": now_ms}


# --- records -----------------------------------------------------------------------------------------


class _StoredEvent(Struct, gc=False):
    type: str
    schema_version: Annotated[int, Meta(ge=1)] = msgspec.field(name="schemaVersion")
    payload: Raw
    meta: Raw
    user_id: str | UnsetType | None = msgspec.field(name="userId", default=UNSET)


class _ClientMeta(Struct, gc=False):
    """The members of `meta` that the server reads."""

    client_id: Annotated[str, Meta(min_length=1)] = msgspec.field(name="clientId")
    client_ts: int | float = msgspec.field(name="clientTs")


_decode_event: Final = msgspec.json.Decoder(_StoredEvent).decode
_encode_text: Final = encode_json_text.__wrapped__
_decode_client_meta: Final = msgspec.json.Decoder(_ClientMeta).decode


def _complete_meta(meta: str, client: str, log_time_ms: int) -> str:
    """Return `meta` with the members that the npm package reads. Every reader receives the same values.

    Events written in the native dialect may lack these members or contain any `clientId`. Readers receive the client id
    that the server stored.
    """
    with suppress(msgspec.DecodeError, RecursionError):
        if _decode_client_meta(meta).client_id == client:
            return meta
    members = orjson.loads(meta)
    members["clientId"] = client
    if type(members.get("clientTs")) not in (int, float):
        members["clientTs"] = log_time_ms
    return orjson.dumps(members).decode()


def _to_camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
