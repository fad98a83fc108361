"""The second dialect: that of the npm package `insieme` 2.1.0 (EV-18). Names in camel case, one project a connection.

What a project, its partitions and its ids are in the first dialect is in `projects`. An event's `event` there is
{type, schemaVersion, payload, userId, meta}; a record that has not got these is not shown here, whoever wrote it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from oncelog import codes
from oncelog.core.canonical import INTEGER_MAX, JsonValue, canonical_at
from oncelog.core.identity import fingerprint, object_field, text_field
from oncelog.core.identity import required as required_field
from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, Mode, Reason, Receipt, Record, Refused, Replayed, Submission
from oncelog.doors.events import words
from oncelog.doors.events.dialect import Dialect
from oncelog.doors.events.projects import EVENT_ID_CHARACTERS_MAX, Project, project_of
from oncelog.doors.events.reading import BadMessageError, Connect, Message, Spelling, Submit, Sync, read_message
from oncelog.doors.events.words import Rejected, Result
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
)
from oncelog.doors.frames import json_text
from oncelog.errors import CanonicalError
from oncelog.stores.protocol import Brief, BriefPage, brief_of

SPELLING: Final = Spelling(msg_id="msgId", version="protocolVersion", has_numbers=False)

_CODE: Final = {
    codes.VERSION_UNSUPPORTED: "protocolVersion_unsupported",
    **dict.fromkeys((codes.SERVER_BUSY, codes.READ_ONLY, codes.QUOTA_EXCEEDED), codes.SERVER_ERROR),
}
"""Codes that have another name here, or none. The client knows no busy server, and would wait for its answer for ever;
after a `server_error` it connects again, and sends again what has no result."""

_FIELD: Final = {"key": "id", "body": "payload", "fingerprint": "payload", "partitions": "partition"}
"""The core's and the door's fields by their names here. Others have the same."""


def spoken(data: bytes, first: Dialect, second: Dialect) -> Dialect | None:
    """The dialect of a first frame, one of the two; None if it does not say."""
    try:
        members = members_of(parsed(data), "$")
    except DoorError:
        return None
    if "protocol_version" in members:
        return first
    return second if SPELLING.version in members else None


class Camel:
    """The dialect of a connection; before `connect`, without a project."""

    is_of_project: Final = True

    def __init__(self, project: Project | None, asked_id: str = "", *, shows_actor: bool = True) -> None:
        self._project = project
        self._asked_id = asked_id
        """The `clientId` of `connect`. Events may have it in `meta`, also if the server stores a longer one."""
        self._shows_actor = shows_actor

    # --- what comes in

    def read_message(self, data: bytes) -> Message:
        """As `Dialect` says."""
        return read_message(data, SPELLING)

    def read(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Message:
        """As `Dialect` says."""
        message = read_message(data, SPELLING)
        if message.type != "submit_events":
            return message
        try:
            events = events_of(message.payload, events_max, "$.payload")
            ids = [_event_id(value, f"$.payload.events[{index}]") for index, value in enumerate(events)]
            _demand_different(ids)
        except DoorError as error:
            raise BadMessageError(error, message.msg_id) from None
        names = (client, self._asked_id)
        items = [_item(value, self.project, actor, names) for value in events]
        return message.msg_id, Submit(ids, items, Mode.UNTIL_REFUSED)

    def read_connect(self, payload: Mapping[str, JsonValue]) -> Connect:
        """As `Dialect` says."""
        path = "$.payload"
        token = token_of(payload, path)
        client_id = client_of(required(payload, "clientId", path), f"{path}.clientId")
        project_id = text_of(payload, "projectId", path)
        try:
            return Connect(token, client_id, project_of(text_field(project_id, "$")))
        except CanonicalError as error:
            raise bad(f"{path}.projectId", error.reason) from None

    def bound(self, connect: Connect) -> Dialect:
        """As `Dialect` says."""
        return Camel(connect.project, connect.client_id, shows_actor=self._shows_actor)

    def read_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """As `Dialect` says."""
        path = "$.payload"
        if text_of(payload, "projectId", path) != self.project.id:
            raise DoorError(codes.FORBIDDEN, f"{path}.projectId: {_OTHER_PROJECT}", field=f"{path}.projectId")
        since = committed_id_of(required(payload, "sinceCommittedId", path), f"{path}.sinceCommittedId")
        return Sync((self.project.partition,), since, limit_of(payload, path))

    @property
    def project(self) -> Project:
        """That of the connection."""
        if self._project is None:
            raise DoorError(codes.BAD_REQUEST, "the first message must be connect")
        return self._project

    # --- what goes out

    def connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:  # noqa: ARG002 - no epoch here
        """As `Dialect` says."""
        payload = {"clientId": client_id, "projectId": self.project.id, "projectLastCommittedId": last_committed_id}
        return orjson.dumps({**payload, "actor": actor} if self._shows_actor else payload)

    def error(self, error: DoorError) -> DoorError:
        """As `Dialect` says."""
        details = {_camel_case(name): value for name, value in error.details.items()}
        code = _CODE.get(error.code, error.code)
        if code == codes.RATE_LIMITED and self._project is not None:
            code = codes.SERVER_ERROR  # before `connect` it is about credentials: sending them again does not help
        return DoorError(code, error.message, **details)

    def results(self, ids: Sequence[str], results: Sequence[Result], now_ms: int) -> bytes:
        """As `Dialect` says."""
        payload = {"results": [_result(ids, index, result, now_ms) for index, result in enumerate(results)]}
        try:
            return orjson.dumps(payload)
        except orjson.JSONEncodeError:  # an id with half a character is echoed too: escaped
            return json.dumps(payload).encode()

    def shown(self, briefs: Sequence[Brief]) -> bytes:
        """As `Dialect` says."""
        return ",".join(filter(None, (self._event(brief) for brief in briefs))).encode()

    def page(self, sync: Sync, page: BriefPage, epoch: str) -> list[bytes]:  # noqa: ARG002 - not told here
        """As `Dialect` says. What is not shown is passed over: the cursor moves on."""
        tail = b'],"nextSinceCommittedId":%d,"hasMore":%b,"syncToCommittedId":%d}' % (
            page.next,
            b"true" if page.has_more else b"false",
            max(page.upto, sync.since),
        )
        head = b'{"projectId":%b,"events":[' % json_text(self.project.id).encode()
        return [head, b",".join(filter(None, page.shown)), tail]

    def frame(self, kind: bytes, parts: Sequence[bytes], now_ms: int, msg_id: bytes = b"") -> bytes:
        """As `Dialect` says."""
        reply = b'"msgId":%b,' % msg_id if msg_id else b""
        head = b'{"type":"%b","protocolVersion":"1.0",%b"timestamp":%d,"payload":' % (kind, reply, now_ms)
        return words.frame_after(head, parts)

    def committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """As `Dialect` says."""
        return self.frame(
            b"submit_events_result", [self.results([id_text], [Committed(receipt)], now_ms)], now_ms, msg_id
        )

    def broadcast(self, record: Record, now_ms: int) -> bytes | None:
        """As `Dialect` says."""
        text = self._event(brief_of(record))
        return None if text is None else self.frame(b"event_broadcast", [text.encode()], now_ms)

    def _event(self, brief: Brief) -> str | None:
        return event_text(brief, self.project, shows_actor=self._shows_actor)


# --- items -------------------------------------------------------------------------------------------

_OTHER_PROJECT: Final = "must be the project of this connection"


def _event_id(value: JsonValue, path: str) -> str:
    """Return the id of an item, whatever text it is: the result echoes it. Raises DoorError without one."""
    return text_of(members_of(value, path), "id", path)


def _check_id(id_text: str) -> None:
    """Raise CanonicalError for a text that cannot be an id.

    The item is rejected, and not the request: the client would send its first draft again and again.
    """
    text_field(id_text, "$.id")
    if not 1 <= len(id_text) <= EVENT_ID_CHARACTERS_MAX or "\0" in id_text:
        raise CanonicalError("$.id", f"must have 1 to {EVENT_ID_CHARACTERS_MAX} characters, and not U+0000")


def _demand_different(ids: Sequence[str]) -> None:
    firsts: dict[str, int] = {}
    for index, id_text in enumerate(ids):
        first = firsts.setdefault(id_text, index)
        if first != index:
            shown = id_text.encode("utf-8", "replace").decode()
            raise bad(f"$.payload.events[{index}].id", f"is the id of events[{first}] too: {shown}")


def _item(item: Mapping[str, JsonValue], project: Project, actor: str, names: tuple[str, str]) -> Submission | Rejected:
    """Return the submission of an item. `names` are the client id as it is stored, and as the client gave it."""
    client = names[0]
    try:
        _check_id(item["id"])
        project_id = text_field(required_field(item, "projectId"), "$.projectId")
        meta = object_field(required_field(item, "meta"), "$.meta")
        if project_id != project.id:
            return Rejected(codes.FORBIDDEN, "projectId", _OTHER_PROJECT)
        if project.is_of_another(required_field(item, "partition")):
            return Rejected(codes.FORBIDDEN, "partition", "must not be another project's")
        if meta.get("clientId", client) not in names:
            return Rejected(codes.FORBIDDEN, "meta.clientId", "must be the client of this connection")
        return _submission(item, meta, project, actor, client)
    except CanonicalError as error:
        return Rejected(codes.VALIDATION_FAILED, error.path.removeprefix("$."), error.reason)


def _submission(
    item: Mapping[str, JsonValue], meta: Mapping[str, JsonValue], project: Project, actor: str, client: str
) -> Submission:
    """Raises CanonicalError with the path of what is wrong."""
    said = _said(item)
    if type(required_field(meta, "clientTs", "$.meta")) not in (int, float):
        raise CanonicalError("$.meta.clientTs", "must be a number")
    own = text_field(required_field(item, "partition"), "$.partition")
    try:
        partitions = project.partitions_of(own)
    except CanonicalError as error:
        raise CanonicalError("$.partition", error.reason) from None
    scope, key = project.identity_of(item["id"])
    # Whichever client sends it, it is the same event. Who sent it first stays with it.
    anyones = {name: value for name, value in meta.items() if name != "clientId"}
    return Submission(
        policy=EVENTS,
        scope=scope,
        key=key,
        fingerprint=fingerprint(partitions, canonical_at({**said, "meta": anyones}, "$")),
        body=canonical_at({**said, "meta": {**anyones, "clientId": client}}, "$"),
        actor=actor,
        client=client,
        partitions=partitions,
    )


def _said(item: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """What an item says, but for its `meta`. Raises CanonicalError."""
    version = required_field(item, "schemaVersion")
    is_whole = type(version) is int or (type(version) is float and version.is_integer())
    if not is_whole or not 1 <= version <= INTEGER_MAX:
        raise CanonicalError("$.schemaVersion", f"must be a whole number from 1 to {INTEGER_MAX}")
    said = {
        "type": _named(item, "type"),
        "schemaVersion": version,
        "payload": object_field(required_field(item, "payload"), "$.payload"),
    }
    return {**said, "userId": _named(item, "userId")} if "userId" in item else said


def _named(item: Mapping[str, JsonValue], name: str) -> str:
    text = text_field(required_field(item, name), f"$.{name}")
    if not text:
        raise CanonicalError(f"$.{name}", "must not be empty")
    return text


# --- results -----------------------------------------------------------------------------------------


def _result(ids: Sequence[str], index: int, result: Result, now_ms: int) -> dict[str, Any]:
    told: dict[str, Any] = {"id": ids[index]}
    if isinstance(result, Committed | Replayed) and (receipt := result.receipt) is not None:
        return {**told, "status": "committed", "committedId": receipt.position, "serverTs": receipt.log_time_ms}
    if not isinstance(result, Refused | Rejected):
        raise TypeError(f"an event was answered with {result!r}")
    reason = words.reason_of(result)
    if isinstance(result, Refused) and result.reason is Reason.NOT_PROCESSED:
        blocked = {"reason": reason, "blockedById": ids[result.index], "created": now_ms}
        return {**told, "status": "not_processed", **blocked}
    error = {"field": _FIELD.get(result.field, result.field), "message": result.message}
    return {**told, "status": "rejected", "reason": reason, "errors": [error], "created": now_ms}


# --- records -----------------------------------------------------------------------------------------


class _Event(Struct, gc=False):
    type: str
    schema_version: Annotated[int, Meta(ge=1)] = msgspec.field(name="schemaVersion")
    payload: Raw
    meta: Raw
    user_id: str | UnsetType | None = msgspec.field(name="userId", default=UNSET)


class _Sent(Struct, gc=False):
    """What every client puts into `meta`, as far as it is looked at."""

    client_id: Annotated[str, Meta(min_length=1)] = msgspec.field(name="clientId")
    client_ts: int | float = msgspec.field(name="clientTs")


_event_of: Final = msgspec.json.Decoder(_Event).decode
_sent_of: Final = msgspec.json.Decoder(_Sent).decode


def event_text(brief: Brief, project: Project, *, shows_actor: bool = True) -> str | None:
    """A record as an event of the project. None if it says something else than such an event does, or nothing more."""
    position, log_time_ms, actor, client, scope, key, partitions, body = brief
    if body is None:
        return None
    try:
        event = _event_of(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    payload, meta = bytes(event.payload).decode(), bytes(event.meta).decode()
    if not payload.startswith("{") or not meta.startswith("{"):
        return None
    # What comes again and again, and is short, is kept in its form (`json_text`). These may be anything.
    event_id, kind = _text(project.id_of(scope, key)), _text(event.type)
    user = f'"userId":{_text(event.user_id)},' if event.user_id else ""
    if shows_actor:
        user = f'{user}"actor":{json_text(actor)},'
    return (
        f'{{"committedId":{position},"id":{event_id},'
        f'"projectId":{json_text(project.id)},{user}"partition":{json_text(project.own_partition(partitions))},'
        f'"type":{kind},"schemaVersion":{event.schema_version},"payload":{payload},'
        f'"meta":{_whole_meta(meta, client, log_time_ms)},"serverTs":{log_time_ms}}}'
    )


def _text(text: str) -> str:
    return orjson.dumps(text).decode()


def _whole_meta(meta: str, client: str, log_time_ms: int) -> str:
    """Return `meta` with the members that the package reads, the same at every reading.

    Events of the first dialect may lack them, or have a `clientId` of their sender's choice: readers are shown the
    client that the server has stored.
    """
    with suppress(msgspec.DecodeError, RecursionError):
        if _sent_of(meta).client_id == client:
            return meta
    members = orjson.loads(meta)
    members["clientId"] = client
    if type(members.get("clientTs")) not in (int, float):
        members["clientTs"] = log_time_ms
    return orjson.dumps(members).decode()


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
