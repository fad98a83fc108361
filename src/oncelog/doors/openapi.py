"""The description of the HTTP interface (OpenAPI 3.1), made from the limits that the server really has.

It is no stricter and no looser than the server: tests send what it allows and what it does not, and look at what comes.
So what is wrong with one event has no place in the schema of a request: it is a result of that event (EV-9).
"""

from collections.abc import Mapping
from typing import Any, Final

from oncelog import codes
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.doors import openapi_audit, openapi_chat, openapi_deltas, openapi_ledger
from oncelog.doors.limits import DoorLimits
from oncelog.doors.openapi_parts import (
    EVERYWHERE,
    JSON,
    NO_NUL,
    QUOTA,
    TEXT,
    Schema,
    answer,
    error,
    json_answer,
    number,
    object_of,
    operation,
    parameter,
    ref,
    time,
    whole,
)

_UUID: Final = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")

_ABOUT: Final = """\
An idempotent append log: submit an event any number of times, it is committed once, in an order that never changes.

The same door is open by WebSocket, at `/v1/events`: submissions, pages and what is committed, on one connection. \
OpenAPI has no words for that. docs/http.md is the handbook of what is described here, docs/server.md of the settings, \
among them all limits."""


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
            {"name": "ledger", "description": "Write transactions, read what they left, prove it"},
            {"name": "deltas", "description": "Push and pull deltas of rows, read the rows that they come to"},
            {"name": "chat", "description": "Send, read and acknowledge messages of chats, look after their members"},
            {"name": "audit", "description": "Read the administrative acts that the log has recorded"},
            {"name": "operators", "description": "For operators of the server. Only `/metrics` needs a credential"},
        ],
        "paths": {
            "/": {"get": _open("hello", "What this is", {200: answer("Hello", "Hello.")})},
            "/healthz": {"get": _open("health", "Whether the process lives", {200: answer("Health", "It does.")})},
            "/readyz": {"get": _readyz()},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _open("describe", "This document", {200: json_answer("It.", {"type": "object"})})},
            "/v1/events": {"get": _page(limits), "post": _submit(limits)},
            "/v1/events/stream": {"get": _stream()},
            "/v1/audit": {"get": openapi_audit.page()},
            **openapi_ledger.paths(limits),
            **openapi_deltas.paths(limits),
            **openapi_chat.paths(limits),
        },
        "components": {
            "schemas": {
                **_schemas(limits),
                **openapi_audit.schemas(),
                **openapi_ledger.schemas(limits),
                **openapi_deltas.schemas(limits),
                **openapi_chat.schemas(limits),
            },
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
    responses = {**answers, **{status: error(status) for status in EVERYWHERE}}
    return {
        "operationId": name,
        "tags": ["operators"],
        "summary": summary,
        "security": [],
        "responses": {str(status): response for status, response in responses.items()},
    }


def _ready() -> Schema:
    schema = object_of(status={"const": "ok"}, epoch=TEXT, last_committed_id=whole())
    read_only = {**TEXT, "description": "Why no new writes are taken, if they are not."}
    return {**schema, "properties": {**schema["properties"], "read_only": read_only}}


def _readyz() -> Schema:
    summary = "Whether it can do its work"
    return _open(
        "readiness",
        summary,
        {
            200: answer("Ready", "It can."),
            503: answer("Health", "The log cannot be read, or the server is stopping."),
        },
    )


def _metrics() -> Schema:
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    about = (
        "Needs the grant to read `oncelog/metrics`, unless `metrics_public` is set. It may be on another port, or off."
    )
    return operation("metrics", "Counters and gauges", about, text, (401, 429), tag="operators")


# --- events ------------------------------------------------------------------------------------------------


def _submit(limits: DoorLimits) -> Schema:
    about = (
        "Each event is committed once, however often it is sent: a retry gets the answer of the first time. One that "
        "is rejected does not stop the others. The same id twice in a request refuses all of it."
    )
    told = answer("Results", "What became of each event, in the order of the request.")
    return {
        **operation("submit", "Submit events", about, told, (400, 401, 408, 413, 415, 429, 503, 507)),
        "requestBody": {
            "required": True,
            "description": f"At most {limits.frame_bytes_max} bytes.",
            "content": {JSON: {"schema": ref("Submission")}},
        },
    }


def _page(limits: DoorLimits) -> Schema:
    about = (
        "Events that touch any of the partitions, ascending, each once. To read all there is: ask again with `since` = "
        "`next_since_committed_id` and `to` = `sync_to_committed_id` while `has_more`. The bound `to` stays as it was "
        "at the first page, so this ends however fast the log grows."
    )
    limit = {
        **whole(),
        "default": min(limits.page_events_default, limits.page_events_max),
        "description": f"Events of a page at most. 0 is taken as 1, more than {limits.page_events_max} as that.",
    }
    return {
        **operation("page", "Read a page of events", about, answer("Page", "A page."), (400, 401, 409, 429, 503)),
        "parameters": [
            *_scope(),
            parameter("limit", limit),
            parameter("to", whole("The bound of a paging that has begun: `sync_to_committed_id` of its first page.")),
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
    told = {"description": "A stream that does not end by itself.", "content": content}
    resumed = {
        "anyOf": [whole(), {"type": "string", "maxLength": 0}],
        "description": "The last `committed_id` that was received. It goes before `since`. An empty one is none.",
    }
    return {
        **operation("follow", "Follow events", about, told, (400, 401, 409, 429, 503)),
        "parameters": [*_scope(), {**parameter("Last-Event-ID", resumed), "in": "header"}],
    }


def _scope() -> list[Schema]:
    partitions = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "minLength": 1, "maxLength": PARTITION_CHARACTERS_MAX, "pattern": NO_NUL},
        "description": f"Once for each partition. At most {PARTITIONS_MAX} different ones, in Unicode's normal form C.",
    }
    since = {**whole("The cursor: events after it. A `committed_id`, or `next_since_committed_id`."), "default": 0}
    epoch = {"type": "string", "description": "That of the history which the cursor is of. Another one gets 409."}
    return [
        {**parameter("partition", partitions), "required": True, "style": "form", "explode": True},
        parameter("since", since),
        parameter("epoch", epoch),
    ]


# --- schemas -----------------------------------------------------------------------------------------------


def _schemas(limits: DoorLimits) -> Schema:
    return {
        "Hello": object_of(oncelog=TEXT, events=TEXT, ledger=TEXT, deltas=TEXT, chat=TEXT, health=TEXT),
        "Health": object_of(status=TEXT),
        "Ready": _ready(),
        "Submission": {
            "type": "object",
            "required": ["events"],
            "properties": {
                "client_id": {
                    "type": ["string", "null"],
                    "minLength": 1,
                    "maxLength": _CLIENT_ID_CHARACTERS_MAX,
                    "pattern": NO_NUL,
                    "description": "Whose events they are. Without it that of the credential.",
                },
                "events": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": limits.request_events_max,
                    "uniqueItems": True,
                    "description": "No two with the same id.",
                    "items": ref("NewEvent"),
                },
            },
        },
        "NewEvent": _new_event(),
        "Results": object_of(results={"type": "array", "minItems": 1, "items": _result()}),
        "Event": _event(),
        "Page": object_of(
            partitions={"type": "array", "items": TEXT},
            events={"type": "array", "maxItems": limits.page_events_max, "items": ref("Event")},
            next_since_committed_id=whole("Read on after this."),
            has_more={"type": "boolean"},
            sync_to_committed_id=whole("The bound: `to` of the pages that follow."),
            epoch=TEXT,
        ),
        "Error": object_of(error=_described_error()),
    }


def _new_event() -> Schema:
    return {
        "type": "object",
        "required": ["id", "partitions", "event"],
        "properties": {
            "id": {"type": "string", "pattern": _UUID, "description": "A UUID. Its letters' case does not matter."},
            "partitions": {
                "type": "array",
                "description": f"1 to {PARTITIONS_MAX} different strings of 1 to {PARTITION_CHARACTERS_MAX} "
                "characters, or the event is rejected.",
            },
            "event": {"description": "An object with a `type` that is a string and not empty, or it is rejected."},
            "expected_committed_id": {
                **whole("Commit only if nothing was committed to its partitions after this number."),
                "type": ["integer", "null"],
            },
        },
    }


def _result() -> Schema:
    identity = {"type": "string", "pattern": _UUID, "description": "As it was sent."}
    fault = {
        **object_of(field=TEXT, message=TEXT),
        "properties": {"field": TEXT, "message": TEXT, "current_committed_id": whole()},
    }
    committed = object_of(id=identity, status={"const": "committed"}, committed_id=number(), status_updated_at=time())
    committed["properties"]["erased"] = {"const": True}
    reasons = {"enum": [codes.VALIDATION_FAILED, codes.FORBIDDEN]}
    errors = {"type": "array", "minItems": 1, "items": fault}
    rejected = object_of(id=identity, status={"const": "rejected"}, reason=reasons, errors=errors)
    return {"oneOf": [committed, rejected]}


def _event() -> Schema:
    event = object_of(
        id={"type": "string", "pattern": _UUID},
        client_id=TEXT,
        partitions={"type": "array", "minItems": 1, "items": TEXT},
        committed_id=number(),
        event={"type": ["object", "null"], "description": "As it was submitted, in canonical form; null if erased."},
        status_updated_at=time(),
    )
    event["properties"]["erased"] = {"const": True}
    about = "The principal that wrote it, as the server knows it. Left out if `show_actors` is off."
    event["properties"]["actor"] = {**TEXT, "description": about}
    return event


def _described_error() -> Schema:
    told = [
        codes.BAD_REQUEST,
        codes.AUTH_FAILED,
        codes.FORBIDDEN,
        codes.NOT_FOUND,
        codes.HISTORY_CHANGED,
        codes.RATE_LIMITED,
        codes.SERVER_BUSY,
        codes.READ_ONLY,
        codes.QUOTA_EXCEEDED,
        codes.SERVER_ERROR,
    ]
    details = {
        "type": "object",
        "properties": {
            "field": {**TEXT, "description": "What is wrong."},
            **QUOTA,
            "limit": whole("What it may be at most."),
            "retry_after_ms": whole("When to try again."),
            "epoch": {**TEXT, "description": "The log's, where the reader's is another."},
            "server_last_committed_id": whole("The newest there is."),
        },
    }
    return object_of(code={"enum": told}, message=TEXT, details=details)
