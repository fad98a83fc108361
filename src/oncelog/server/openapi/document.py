"""The description of the HTTP interface (OpenAPI 3.1), made from the limits that the server really has.

It is no stricter and no looser than the server: tests send what it allows and what it does not, and look at what comes.
So what is wrong with one event has no place in the schema of a request: it is a result of that event (EV-9).
"""

from collections.abc import Mapping
from typing import Any, Final

from oncelog import error_codes
from oncelog.core.limits import NAME_CHARACTERS_MAX, PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.server.limits import ApiLimits
from oncelog.server.openapi import audit, chat, deltas, ledger
from oncelog.server.openapi.parts import (
    COMMON_ERRORS,
    JSON,
    NO_NUL,
    QUOTA_PROPERTIES,
    TEXT_SCHEMA,
    Schema,
    error_response,
    integer_schema,
    json_response,
    object_schema,
    operation,
    parameter,
    positive_integer_schema,
    schema_ref,
    schema_response,
    timestamp_schema,
)

_UUID: Final = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_CLIENT_ID_CHARACTERS_MAX: Final = NAME_CHARACTERS_MAX - len("client:")

_DESCRIPTION: Final = """\
An idempotent append log: submit an event any number of times, it is committed once, in an order that never changes.

The same door is open by WebSocket, at `/v1/events`: submissions, pages and what is committed, on one connection. \
OpenAPI has no words for that. docs/http.md is the handbook of what is described here, docs/server.md of the settings, \
among them all limits."""


def build_document(limits: ApiLimits) -> dict[str, Any]:
    """The document that is served."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Oncelog",
            "version": error_codes.PROTOCOL_VERSION,
            "summary": "Events, committed once and in one order",
            "description": _DESCRIPTION,
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
            "/": {"get": _public_operation("hello", "What this is", {200: schema_response("Hello", "Hello.")})},
            "/healthz": {
                "get": _public_operation(
                    "health", "Whether the process lives", {200: schema_response("Health", "It does.")}
                )
            },
            "/readyz": {"get": _readyz_operation()},
            "/metrics": {"get": _metrics_operation()},
            "/openapi.json": {
                "get": _public_operation("describe", "This document", {200: json_response("It.", {"type": "object"})})
            },
            "/v1/events": {"get": _page_operation(limits), "post": _submit_operation(limits)},
            "/v1/events/stream": {"get": _stream_operation()},
            "/v1/audit": {"get": audit.page_operation()},
            **ledger.build_paths(limits),
            **deltas.build_paths(limits),
            **chat.build_paths(limits),
        },
        "components": {
            "schemas": {
                **_event_schemas(limits),
                **audit.build_schemas(),
                **ledger.build_schemas(limits),
                **deltas.build_schemas(limits),
                **chat.build_schemas(limits),
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


def _public_operation(name: str, summary: str, responses_by_status: Mapping[int, Schema]) -> Schema:
    responses = {**responses_by_status, **{status: error_response(status) for status in COMMON_ERRORS}}
    return {
        "operationId": name,
        "tags": ["operators"],
        "summary": summary,
        "security": [],
        "responses": {str(status): response for status, response in responses.items()},
    }


def _ready_schema() -> Schema:
    schema = object_schema(status={"const": "ok"}, epoch=TEXT_SCHEMA, last_committed_id=integer_schema())
    read_only = {**TEXT_SCHEMA, "description": "Why no new writes are taken, if they are not."}
    return {**schema, "properties": {**schema["properties"], "read_only": read_only}}


def _readyz_operation() -> Schema:
    summary = "Whether it can do its work"
    return _public_operation(
        "readiness",
        summary,
        {
            200: schema_response("Ready", "It can."),
            503: schema_response("Health", "The log cannot be read, or the server is stopping."),
        },
    )


def _metrics_operation() -> Schema:
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    about = (
        "Needs the grant to read `oncelog/metrics`, unless `metrics_public` is set. It may be on another port, or off."
    )
    return operation("metrics", "Counters and gauges", about, text, (401, 429), tag="operators")


# --- events ------------------------------------------------------------------------------------------------


def _submit_operation(limits: ApiLimits) -> Schema:
    about = (
        "Each event is committed once, however often it is sent: a retry gets the answer of the first time. One that "
        "is rejected does not stop the others. The same id twice in a request refuses all of it."
    )
    told = schema_response("Results", "What became of each event, in the order of the request.")
    return {
        **operation("submit", "Submit events", about, told, (400, 401, 408, 413, 415, 429, 503, 507)),
        "requestBody": {
            "required": True,
            "description": f"At most {limits.frame_bytes_max} bytes.",
            "content": {JSON: {"schema": schema_ref("Submission")}},
        },
    }


def _page_operation(limits: ApiLimits) -> Schema:
    about = (
        "Events that touch any of the partitions, ascending, each once. To read all there is: ask again with `since` = "
        "`next_since_committed_id` and `to` = `sync_to_committed_id` while `has_more`. The bound `to` stays as it was "
        "at the first page, so this ends however fast the log grows."
    )
    limit = {
        **integer_schema(),
        "default": min(limits.page_events_default, limits.page_events_max),
        "description": f"Events of a page at most. 0 is taken as 1, more than {limits.page_events_max} as that.",
    }
    return {
        **operation(
            "page", "Read a page of events", about, schema_response("Page", "A page."), (400, 401, 409, 429, 503)
        ),
        "parameters": [
            *_scope_parameters(),
            parameter("limit", limit),
            parameter(
                "to", integer_schema("The bound of a paging that has begun: `sync_to_committed_id` of its first page.")
            ),
        ],
    }


def _stream_operation() -> Schema:
    about = (
        "Server-sent events. First `connected`, with the epoch; then every event after the cursor, and those to come. "
        "The id of each is its `committed_id`, so a browser resumes by itself where it was. A comment comes when "
        "nothing else has for a while. An event `error` says why the server ends the stream; without one it is being "
        "stopped."
    )
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    told = {"description": "A stream that does not end by itself.", "content": content}
    resumed = {
        "anyOf": [integer_schema(), {"type": "string", "maxLength": 0}],
        "description": "The last `committed_id` that was received. It goes before `since`. An empty one is none.",
    }
    return {
        **operation("follow", "Follow events", about, told, (400, 401, 409, 429, 503)),
        "parameters": [*_scope_parameters(), {**parameter("Last-Event-ID", resumed), "in": "header"}],
    }


def _scope_parameters() -> list[Schema]:
    partitions = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "minLength": 1, "maxLength": PARTITION_CHARACTERS_MAX, "pattern": NO_NUL},
        "description": f"Once for each partition. At most {PARTITIONS_MAX} different ones, in Unicode's normal form C.",
    }
    since = {
        **integer_schema("The cursor: events after it. A `committed_id`, or `next_since_committed_id`."),
        "default": 0,
    }
    epoch = {"type": "string", "description": "That of the history which the cursor is of. Another one gets 409."}
    return [
        {**parameter("partition", partitions), "required": True, "style": "form", "explode": True},
        parameter("since", since),
        parameter("epoch", epoch),
    ]


# --- schemas -----------------------------------------------------------------------------------------------


def _event_schemas(limits: ApiLimits) -> Schema:
    return {
        "Hello": object_schema(
            oncelog=TEXT_SCHEMA,
            events=TEXT_SCHEMA,
            ledger=TEXT_SCHEMA,
            deltas=TEXT_SCHEMA,
            chat=TEXT_SCHEMA,
            health=TEXT_SCHEMA,
        ),
        "Health": object_schema(status=TEXT_SCHEMA),
        "Ready": _ready_schema(),
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
                    "items": schema_ref("NewEvent"),
                },
            },
        },
        "NewEvent": _new_event_schema(),
        "Results": object_schema(results={"type": "array", "minItems": 1, "items": _result_schema()}),
        "Event": _event_schema(),
        "Page": object_schema(
            partitions={"type": "array", "items": TEXT_SCHEMA},
            events={"type": "array", "maxItems": limits.page_events_max, "items": schema_ref("Event")},
            next_since_committed_id=integer_schema("Read on after this."),
            has_more={"type": "boolean"},
            sync_to_committed_id=integer_schema("The bound: `to` of the pages that follow."),
            epoch=TEXT_SCHEMA,
        ),
        "Error": object_schema(error=_error_schema()),
    }


def _new_event_schema() -> Schema:
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
                **integer_schema("Commit only if nothing was committed to its partitions after this number."),
                "type": ["integer", "null"],
            },
        },
    }


def _result_schema() -> Schema:
    identity = {"type": "string", "pattern": _UUID, "description": "As it was sent."}
    fault = {
        **object_schema(field=TEXT_SCHEMA, message=TEXT_SCHEMA),
        "properties": {"field": TEXT_SCHEMA, "message": TEXT_SCHEMA, "current_committed_id": integer_schema()},
    }
    committed = object_schema(
        id=identity,
        status={"const": "committed"},
        committed_id=positive_integer_schema(),
        status_updated_at=timestamp_schema(),
    )
    committed["properties"]["erased"] = {"const": True}
    reasons = {"enum": [error_codes.VALIDATION_FAILED, error_codes.FORBIDDEN]}
    errors = {"type": "array", "minItems": 1, "items": fault}
    rejected = object_schema(id=identity, status={"const": "rejected"}, reason=reasons, errors=errors)
    return {"oneOf": [committed, rejected]}


def _event_schema() -> Schema:
    event = object_schema(
        id={"type": "string", "pattern": _UUID},
        client_id=TEXT_SCHEMA,
        partitions={"type": "array", "minItems": 1, "items": TEXT_SCHEMA},
        committed_id=positive_integer_schema(),
        event={"type": ["object", "null"], "description": "As it was submitted, in canonical form; null if erased."},
        status_updated_at=timestamp_schema(),
    )
    event["properties"]["erased"] = {"const": True}
    about = "The principal that wrote it, as the server knows it. Left out if `show_actors` is off."
    event["properties"]["actor"] = {**TEXT_SCHEMA, "description": about}
    return event


def _error_schema() -> Schema:
    told = [
        error_codes.BAD_REQUEST,
        error_codes.AUTH_FAILED,
        error_codes.FORBIDDEN,
        error_codes.NOT_FOUND,
        error_codes.HISTORY_CHANGED,
        error_codes.RATE_LIMITED,
        error_codes.SERVER_BUSY,
        error_codes.READ_ONLY,
        error_codes.QUOTA_EXCEEDED,
        error_codes.SERVER_ERROR,
    ]
    details = {
        "type": "object",
        "properties": {
            "field": {**TEXT_SCHEMA, "description": "What is wrong."},
            **QUOTA_PROPERTIES,
            "limit": integer_schema("What it may be at most."),
            "retry_after_ms": integer_schema("When to try again."),
            "epoch": {**TEXT_SCHEMA, "description": "The log's, where the reader's is another."},
            "server_last_committed_id": integer_schema("The newest there is."),
        },
    }
    return object_schema(code={"enum": told}, message=TEXT_SCHEMA, details=details)
