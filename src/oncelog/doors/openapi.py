"""The description of the HTTP interface (OpenAPI 3.1), made from the limits that the server really has.

It is no stricter and no looser than the server: tests send what it allows and what it does not, and look at what comes.
So what is wrong with one event has no place in the schema of a request: it is a result of that event (EV-9).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog import codes
from oncelog.core.canonical import INTEGER_MAX
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.doors.limits import DoorLimits

Schema = dict[str, Any]

JSON: Final = "application/json"
_UUID: Final = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_NO_NUL: Final = "^[^\\u0000]*$"
_CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")

_ABOUT: Final = """\
An idempotent append log: submit an event any number of times, it is committed once, in an order that never changes.

The same door is open by WebSocket, at `/v1/events`: submissions, pages and what is committed, on one connection. \
OpenAPI has no words for that. docs/http.md is the handbook of what is described here, docs/server.md of the settings, \
among them all limits."""

_ERRORS: Final[Mapping[int, str]] = {
    400: "The request is none: its message says what is wrong, and `details.field` where. Nothing was written.",
    401: "No credential, or none that is good, or one of another client. All get the same text.",
    403: "A partition that may not be read, or a page of an origin that may not connect.",
    409: "The history is another one than the reader's: its `epoch` is not ours, or its cursor is ahead of the log.",
    408: "The body took too long to come.",
    413: "The body is larger than the server takes.",
    415: "The body is not said to be JSON, or is encoded in a way that is not known.",
    429: "Too many failed attempts to authenticate, or too many new events. Try again after `Retry-After`.",
    500: "The server is at fault. Whether something was written is not known: send it again, under the same ids.",
    503: "The server is busy, or is being stopped. Nothing of the request has been decided: send all of it again.",
}
_RETRIED: Final = frozenset({429, 500, 503})
_EVERYWHERE: Final = (403, 500)


def description(limits: DoorLimits) -> dict[str, Any]:
    """The document that is served."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Oncelog",
            "version": codes.PROTOCOL_VERSION,
            "summary": "Events, committed once and in one order",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "events", "description": "Submit, read and follow events"},
            {"name": "operators", "description": "What those need who run the server. No credential is asked for"},
        ],
        "paths": {
            "/": {"get": _open("hello", "What this is", {200: _answer("Hello", "Hello.")})},
            "/healthz": {"get": _open("health", "Whether the process lives", {200: _answer("Health", "It does.")})},
            "/readyz": {"get": _readyz()},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _open("describe", "This document", {200: _json("It.", {"type": "object"})})},
            "/v1/events": {"get": _page(limits), "post": _submit(limits)},
            "/v1/events/stream": {"get": _stream()},
        },
        "components": {
            "schemas": _schemas(limits),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token (JWT) or an API key. In the development mode none is asked for.",
                }
            },
        },
    }


# --- for operators -----------------------------------------------------------------------------------------


def _open(name: str, summary: str, answers: Mapping[int, Schema]) -> Schema:
    responses = {**answers, **{status: _error(status) for status in _EVERYWHERE}}
    return {
        "operationId": name,
        "tags": ["operators"],
        "summary": summary,
        "security": [],
        "responses": {str(status): response for status, response in responses.items()},
    }


def _readyz() -> Schema:
    summary = "Whether it can do its work"
    return _open(
        "readiness",
        summary,
        {
            200: _answer("Ready", "It can."),
            503: _answer("Health", "The log cannot be read, or the server is stopping."),
        },
    )


def _metrics() -> Schema:
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return _open("metrics", "What the server has counted, unless that is turned off", {200: text})


# --- events ------------------------------------------------------------------------------------------------


def _operation(name: str, summary: str, about: str, answer: Schema, errors: Sequence[int]) -> Schema:
    return {
        "operationId": name,
        "tags": ["events"],
        "summary": summary,
        "description": about,
        "security": [{"bearer": []}],
        "responses": {"200": answer, **{str(status): _error(status) for status in sorted({*errors, *_EVERYWHERE})}},
    }


def _submit(limits: DoorLimits) -> Schema:
    about = (
        "Each event is committed once, however often it is sent: a retry gets the answer of the first time. One that "
        "is rejected does not stop the others. The same id twice in a request refuses all of it."
    )
    answer = _answer("Results", "What became of each event, in the order of the request.")
    return {
        **_operation("submit", "Submit events", about, answer, (400, 401, 408, 413, 415, 429, 503)),
        "requestBody": {
            "required": True,
            "description": f"At most {limits.frame_bytes_max} bytes.",
            "content": {JSON: {"schema": _ref("Submission")}},
        },
    }


def _page(limits: DoorLimits) -> Schema:
    about = (
        "Events that touch any of the partitions, ascending, each once. To read all there is: ask again with `since` = "
        "`next_since_committed_id` and `to` = `sync_to_committed_id` while `has_more`. The bound `to` stays as it was "
        "at the first page, so this ends however fast the log grows."
    )
    limit = {
        **_whole(),
        "default": min(limits.page_events_default, limits.page_events_max),
        "description": f"Events of a page at most. 0 is taken as 1, more than {limits.page_events_max} as that.",
    }
    return {
        **_operation("page", "Read a page of events", about, _answer("Page", "A page."), (400, 401, 409, 429, 503)),
        "parameters": [
            *_scope(),
            _parameter("limit", limit),
            _parameter("to", _whole("The bound of a paging that has begun: `sync_to_committed_id` of its first page.")),
        ],
    }


def _stream() -> Schema:
    about = (
        "Server-sent events. First `connected`, with the epoch; then every event after the cursor, and those to come. "
        "The id of each is its `committed_id`, so a browser resumes by itself where it was. A comment comes when "
        "nothing else has for a while. An event `error` says why the server ends the stream; without one it is being "
        "stopped."
    )
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    answer = {"description": "A stream that does not end by itself.", "content": content}
    resumed = {
        "anyOf": [_whole(), {"type": "string", "maxLength": 0}],
        "description": "The last `committed_id` that was received. It goes before `since`. An empty one is none.",
    }
    return {
        **_operation("follow", "Follow events", about, answer, (400, 401, 409, 429, 503)),
        "parameters": [*_scope(), {**_parameter("Last-Event-ID", resumed), "in": "header"}],
    }


def _scope() -> list[Schema]:
    partitions = {
        "type": "array",
        "minItems": 1,
        "maxItems": PARTITIONS_MAX,
        "items": {"type": "string", "minLength": 1, "maxLength": PARTITION_CHARACTERS_MAX, "pattern": _NO_NUL},
        "description": "Once for each partition.",
    }
    since = {**_whole("The cursor: events after it. A `committed_id`, or `next_since_committed_id`."), "default": 0}
    epoch = {"type": "string", "description": "That of the history which the cursor is of. Another one gets 409."}
    return [
        {**_parameter("partition", partitions), "required": True, "style": "form", "explode": True},
        _parameter("since", since),
        _parameter("epoch", epoch),
    ]


def _parameter(name: str, schema: Schema) -> Schema:
    about = schema.pop("description")
    return {"name": name, "in": "query", "description": about, "schema": schema}


# --- answers -----------------------------------------------------------------------------------------------


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(about: str, schema: Schema) -> Schema:
    return {"description": about, "content": {JSON: {"schema": schema}}}


def _answer(name: str, about: str) -> Schema:
    return _json(about, _ref(name))


def _error(status: int) -> Schema:
    response = _answer("Error", _ERRORS[status])
    if status in _RETRIED:
        seconds = {"type": "integer", "minimum": 0}
        response["headers"] = {"Retry-After": {"description": "Seconds, where they are known.", "schema": seconds}}
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}}
    return response


# --- schemas -----------------------------------------------------------------------------------------------


def _schemas(limits: DoorLimits) -> Schema:
    return {
        "Hello": _object(oncelog=_TEXT, events=_TEXT, health=_TEXT),
        "Health": _object(status=_TEXT),
        "Ready": _object(status={"const": "ok"}, epoch=_TEXT, last_committed_id=_whole()),
        "Submission": {
            "type": "object",
            "required": ["events"],
            "properties": {
                "client_id": {
                    "type": ["string", "null"],
                    "minLength": 1,
                    "maxLength": _CLIENT_ID_CHARACTERS_MAX,
                    "pattern": _NO_NUL,
                    "description": "Whose events they are. Without it that of the credential.",
                },
                "events": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": limits.request_events_max,
                    "uniqueItems": True,
                    "description": "No two with the same id.",
                    "items": _ref("NewEvent"),
                },
            },
        },
        "NewEvent": _new_event(),
        "Results": _object(results={"type": "array", "minItems": 1, "items": _result()}),
        "Event": _event(),
        "Page": _object(
            partitions={"type": "array", "items": _TEXT},
            events={"type": "array", "maxItems": limits.page_events_max, "items": _ref("Event")},
            next_since_committed_id=_whole("Read on after this."),
            has_more={"type": "boolean"},
            sync_to_committed_id=_whole("The bound: `to` of the pages that follow."),
            epoch=_TEXT,
        ),
        "Error": _object(error=_described_error()),
    }


_TEXT: Final[Schema] = {"type": "string"}


def _new_event() -> Schema:
    return {
        "type": "object",
        "required": ["id", "partitions", "event"],
        "properties": {
            "id": {"type": "string", "pattern": _UUID, "description": "A UUID. Its letters' case does not matter."},
            "partitions": {
                "type": "array",
                "description": f"1 to {PARTITIONS_MAX} strings of 1 to {PARTITION_CHARACTERS_MAX} characters, or the "
                "event is rejected.",
            },
            "event": {"description": "An object with a `type` that is a string and not empty, or it is rejected."},
            "expected_committed_id": {
                **_whole("Commit only if nothing was committed to its partitions after this number."),
                "type": ["integer", "null"],
            },
        },
    }


def _result() -> Schema:
    identity = {"type": "string", "pattern": _UUID, "description": "As it was sent."}
    fault = {
        **_object(field=_TEXT, message=_TEXT),
        "properties": {"field": _TEXT, "message": _TEXT, "current_committed_id": _whole()},
    }
    committed = _object(id=identity, status={"const": "committed"}, committed_id=_number(), status_updated_at=_time())
    committed["properties"]["erased"] = {"const": True}
    reasons = {"enum": [codes.VALIDATION_FAILED, codes.FORBIDDEN]}
    errors = {"type": "array", "minItems": 1, "items": fault}
    rejected = _object(id=identity, status={"const": "rejected"}, reason=reasons, errors=errors)
    return {"oneOf": [committed, rejected]}


def _event() -> Schema:
    event = _object(
        id={"type": "string", "pattern": _UUID},
        client_id=_TEXT,
        partitions={"type": "array", "minItems": 1, "items": _TEXT},
        committed_id=_number(),
        event={"type": ["object", "null"], "description": "As it was submitted, in canonical form; null if erased."},
        status_updated_at=_time(),
    )
    event["properties"]["erased"] = {"const": True}
    return event


def _described_error() -> Schema:
    told = [
        codes.BAD_REQUEST,
        codes.AUTH_FAILED,
        codes.FORBIDDEN,
        codes.HISTORY_CHANGED,
        codes.RATE_LIMITED,
        codes.SERVER_BUSY,
        codes.SERVER_ERROR,
    ]
    details = {
        "type": "object",
        "properties": {
            "field": {**_TEXT, "description": "What is wrong."},
            "limit": _whole("What it may be at most."),
            "retry_after_ms": _whole("When to try again."),
            "epoch": {**_TEXT, "description": "The log's, where the reader's is another."},
            "server_last_committed_id": _whole("The newest there is."),
        },
    }
    return _object(code={"enum": told}, message=_TEXT, details=details)


def _object(**properties: Any) -> Schema:
    """An object that has all of them."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _whole(about: str = "") -> Schema:
    schema: Schema = {"type": "integer", "minimum": 0, "maximum": INTEGER_MAX}
    return {**schema, "description": about} if about else schema


def _number() -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": INTEGER_MAX}


def _time() -> Schema:
    return {**_number(), "description": "Milliseconds since 1970."}
