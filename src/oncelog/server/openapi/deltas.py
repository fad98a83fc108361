"""The part of the description that speaks of the deltas."""

from collections.abc import Sequence
from typing import Any, Final

from oncelog import error_codes
from oncelog.core.deltas import (
    GATEWAY_CHARACTERS_MAX,
    IDENTIFIER_CHARACTERS_MAX,
    PUSH_DELTAS_MAX,
    ROW_ID_CHARACTERS_MAX,
)
from oncelog.core.limits import NAME_CHARACTERS_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op
from oncelog.server.limits import COMPACT_DELTAS_MAX, COMPACT_ROWS_MAX, ApiLimits
from oncelog.server.openapi.parts import (
    JSON,
    NO_NUL,
    QUOTA_PROPERTIES,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    operation,
    parameter,
    positive_integer_schema,
    schema_ref,
    schema_response,
    timestamp_schema,
)

_ERROR_SCHEMA: Final = "DeltasError"
_IDENTIFIER: Final[Schema] = {
    "type": "string",
    "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,{IDENTIFIER_CHARACTERS_MAX - 1}}}$",
}
_DELTA_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_HLC: Final[Schema] = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,19})$"}
_ANY_JSON: Final[Schema] = {"description": "Any JSON; no integer that RFC 8785 would change, such as 2^53+1."}
_READ_ERRORS: Final = (400, 401, 429, 503)
_WRITE_ERRORS: Final = (400, 401, 408, 413, 415, 429, 503)
_ERROR_CODES: Final = (
    error_codes.BAD_REQUEST,
    error_codes.DELTA_ID_MISMATCH,
    error_codes.AUTH_FAILED,
    error_codes.FORBIDDEN,
    error_codes.CLOCK_DRIFT,
    error_codes.HISTORY_CHANGED,
    error_codes.TOO_LARGE,
    error_codes.INVALID,
    error_codes.RATE_LIMITED,
    error_codes.SERVER_BUSY,
    error_codes.READ_ONLY,
    error_codes.QUOTA_EXCEEDED,
    error_codes.SERVER_ERROR,
)


def build_paths(limits: ApiLimits) -> Schema:
    """The paths under /v1/sync/."""
    table = {**parameter("table", {**_IDENTIFIER, "description": "Of which table."}), "in": "path", "required": True}
    after = _row_id_parameter("after", "Rows behind this one: `next` of the page before.")
    row_id = _row_id_parameter("rowId", "Only this row.")
    page = parameter("page", {**TEXT_SCHEMA, "description": "`next` of the page before. Nothing else."})
    operations = {
        "push": {"post": _push_operation(limits)},
        "pull": {"get": _pull_operation(limits)},
        "rows/{table}": {
            "get": _get_operation(
                "getRows",
                "Rows",
                "Read the rows of a table",
                "Those that exist, merged, by `rowId`. A page may be empty though there is a `next`.",
                [table, after, _limit_parameter(limits), row_id],
            )
        },
        "snapshot": {
            "get": _get_operation(
                "getSnapshot",
                "Snapshot",
                "Read all rows with their stamps",
                "For whoever's cursor is older than the compaction: all pages, then a pull from `cursor`.",
                [page, _limit_parameter(limits)],
                (*_READ_ERRORS, 409),
            )
        },
        "live": {"get": _live_operation()},
        "compact": {"post": _compact_operation(limits)},
    }
    return {f"/v1/sync/{{gateway}}/{path}": described for path, described in operations.items()}


def _push_operation(limits: ApiLimits) -> Schema:
    about = (
        "All deltas are taken, or none. One that the gateway knows is acknowledged again and changes nothing, so after "
        "any failure push everything again that has no answer."
    )
    told = schema_response("Pushed", "What became of each delta, in the order of the request.")
    described = operation(
        "pushDeltas",
        "Push deltas",
        about,
        told,
        (*_WRITE_ERRORS, 409, 422, 507),
        tag="deltas",
        error_schema=_ERROR_SCHEMA,
    )
    return {**described, "parameters": [_gateway_parameter()], "requestBody": _request_body("Push", limits)}


def _compact_operation(limits: ApiLimits) -> Schema:
    about = (
        "Drops the bodies of old deltas, then rows that were deleted long ago; rows that exist, ids and hashes stay. "
        f"One request compacts at most {COMPACT_DELTAS_MAX} deltas and reads at most {COMPACT_ROWS_MAX} rows: ask "
        "again while `hasMore` is true or `next` is not empty."
    )
    told = schema_response("Compacted", "How far it is.")
    described = operation(
        "compactDeltas", "Compact a gateway", about, told, _WRITE_ERRORS, tag="deltas", error_schema=_ERROR_SCHEMA
    )
    return {**described, "parameters": [_gateway_parameter()], "requestBody": _request_body("Compaction", limits)}


def _request_body(schema: str, limits: ApiLimits) -> Schema:
    about = f"At most {limits.frame_bytes_max} bytes."
    return {"required": True, "description": about, "content": {JSON: {"schema": schema_ref(schema)}}}


def _pull_operation(limits: ApiLimits) -> Schema:
    about = (
        "In the order of arrival at the gateway, which never changes. Ask again with `since` = `cursor` while "
        "`hasMore`. With `snapshot` the deltas have been compacted: read the snapshot, and go on from its cursor."
    )
    return _get_operation(
        "pullDeltas",
        "Pulled",
        "Read deltas",
        about,
        [*_cursor_parameters(), _limit_parameter(limits)],
        (*_READ_ERRORS, 409),
    )


def _live_operation() -> Schema:
    about = (
        "Server-sent events. First `connected`, with the epoch; then every delta after the cursor, and those to come. "
        "The id of each is its `sequence`, so a browser resumes by itself where it was. An event `snapshot` says that "
        "the cursor is older than the compaction, an event `error` why the server ends the stream. The same address "
        "is a WebSocket too (docs/deltas.md)."
    )
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    told = {"description": "A stream that does not end by itself.", "content": content}
    resumed = {
        "anyOf": [integer_schema(), {"type": "string", "maxLength": 0}],
        "description": "The last `sequence` that was received. It goes before `since`. An empty one is none.",
    }
    described = operation(
        "followDeltas", "Follow deltas", about, told, (*_READ_ERRORS, 409), tag="deltas", error_schema=_ERROR_SCHEMA
    )
    last = {**parameter("Last-Event-ID", resumed), "in": "header"}
    return {**described, "parameters": [_gateway_parameter(), *_cursor_parameters(), last]}


def _get_operation(
    name: str,
    schema: str,
    summary: str,
    description: str,
    parameters: Sequence[Schema],
    errors: Sequence[int] = _READ_ERRORS,
) -> Schema:
    described = operation(
        name, summary, description, schema_response(schema, "A page."), errors, tag="deltas", error_schema=_ERROR_SCHEMA
    )
    return {**described, "parameters": [_gateway_parameter(), *parameters]}


def _gateway_parameter() -> Schema:
    schema = {
        "type": "string",
        "minLength": 1,
        "maxLength": GATEWAY_CHARACTERS_MAX,
        "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$",
        "description": "Which gateway. In NFC, without control characters, and neither `.` nor `..`.",
    }
    return {**parameter("gateway", schema), "in": "path", "required": True}


def _cursor_parameters() -> list[Schema]:
    since = {**integer_schema("The cursor: deltas after it. A `sequence`, or a `cursor`."), "default": 0}
    epoch = {**TEXT_SCHEMA, "description": "That of the history which the cursor is of. Another one gets 409."}
    return [parameter("since", since), parameter("epoch", epoch)]


def _limit_parameter(limits: ApiLimits) -> Schema:
    schema = {
        **integer_schema(),
        "default": min(limits.page_events_default, limits.page_events_max),
        "description": f"How many at most. 0 is taken as 1, more than {limits.page_events_max} as that.",
    }
    return parameter("limit", schema)


def _row_id_parameter(name: str, description: str) -> Schema:
    schema = {"type": "string", "maxLength": ROW_ID_CHARACTERS_MAX, "pattern": NO_NUL, "description": description}
    return parameter(name, schema)


# --- schemas -----------------------------------------------------------------------------------------------


def build_schemas(limits: ApiLimits) -> Schema:
    """What is sent and answered there."""
    deltas = {"type": "array", "maxItems": PUSH_DELTAS_MAX, "items": schema_ref("NewDelta")}
    known = object_schema(deltaId=_DELTA_ID, sequence=positive_integer_schema(), duplicate={"type": "boolean"})
    pulled = object_schema(
        deltas={"type": "array", "maxItems": limits.page_events_max, "items": schema_ref("Delta")},
        cursor=integer_schema("Read on after this."),
        hasMore={"type": "boolean"},
        epoch=TEXT_SCHEMA,
    )
    pulled["properties"]["snapshot"] = {"const": True, "description": "The deltas have been compacted."}
    row = object_schema(rowId=TEXT_SCHEMA, columns={"type": "object", "propertyNames": _IDENTIFIER}, hlc=_HLC)
    stamp = {"hlc": _HLC, "clientId": TEXT_SCHEMA, "deltaId": _DELTA_ID}
    stamped = {"anyOf": [object_schema(**stamp), {"type": "null"}]}
    state = object_schema(
        table=_IDENTIFIER,
        rowId=TEXT_SCHEMA,
        columns={"type": "array", "items": object_schema(column=_IDENTIFIER, value=_ANY_JSON, **stamp)},
        written=stamped,
        deleted=stamped,
    )
    return {
        "Push": object_schema(deltas=deltas),
        "NewDelta": _new_delta_schema(limits),
        "Pushed": object_schema(
            committed=integer_schema(),
            duplicates=integer_schema(),
            epoch=TEXT_SCHEMA,
            previousEpochs={"type": "array", "items": TEXT_SCHEMA},
            serverTime=timestamp_schema(),
            results={"type": "array", "items": known},
        ),
        "Delta": _delta_schema(),
        "Pulled": pulled,
        "Rows": object_schema(
            rows={"type": "array", "maxItems": limits.page_events_max, "items": row}, next=TEXT_SCHEMA
        ),
        "Snapshot": object_schema(
            rows={"type": "array", "maxItems": limits.page_events_max, "items": state},
            cursor=integer_schema("To pull from when all pages have been read."),
            next=TEXT_SCHEMA,
            horizon={
                "anyOf": [_HLC, {"type": "null"}],
                "description": "Not null once compaction has dropped deleted rows: a row that no page has is deleted.",
            },
            epoch=TEXT_SCHEMA,
        ),
        "Compaction": {
            "oneOf": [
                _compaction_schema(upto=integer_schema("The last sequence to compact.")),
                _compaction_schema(keep=integer_schema("How many of the newest to keep.")),
            ]
        },
        "Compacted": _compaction_result_schema(),
        _ERROR_SCHEMA: _error_schema(),
    }


def _compaction_schema(**which: Schema) -> Schema:
    schema = object_schema(**which)
    more = {
        "tombstoneAgeMs": integer_schema(
            "Drop rows that were deleted this long ago. Default: `limits.tombstone_age_ms`."
        ),
        "page": {**TEXT_SCHEMA, "description": "`next` of the answer before. Nothing else."},
    }
    return {**schema, "properties": {**schema["properties"], **more}, "additionalProperties": False}


def _compaction_result_schema() -> Schema:
    consumer = object_schema(
        consumer=TEXT_SCHEMA, cursor=integer_schema(), lag=integer_schema("How many deltas it has not read.")
    )
    return object_schema(
        compacted=integer_schema("Deltas whose bodies were dropped."),
        upto=integer_schema(),
        hasMore={"type": "boolean"},
        droppedRows=integer_schema("Deleted rows that were dropped."),
        next={**TEXT_SCHEMA, "description": "Not empty if there are more rows to read: send it as `page`."},
        heldBy={
            "anyOf": [consumer, {"type": "null"}],
            "description": "The slowest named consumer, if deleted rows stay because it has not read them.",
        },
    )


def _new_delta_schema(limits: ApiLimits) -> Schema:
    value = {**_ANY_JSON, "description": f"At most {limits.column_value_bytes_max} bytes in canonical JSON."}
    column = {**object_schema(column=_IDENTIFIER, value=value), "additionalProperties": False}
    name = {"type": "string", "minLength": 1, "pattern": NO_NUL}
    return object_schema(
        deltaId={**_DELTA_ID, "description": "SHA-256 of the canonical `{clientId, columns, hlc, rowId, table}`."},
        op={"enum": [op.value for op in Op]},
        table=_IDENTIFIER,
        rowId={**name, "maxLength": ROW_ID_CHARACTERS_MAX},
        clientId={**name, "maxLength": NAME_CHARACTERS_MAX, "description": "That of the credential."},
        columns={"type": "array", "maxItems": ROW_COLUMNS_MAX, "items": column, "description": "Each column once."},
        hlc={**_HLC, "description": "64 bits: 48 of milliseconds, 16 of counter."},
    )


def _delta_schema() -> Schema:
    return object_schema(
        sequence=positive_integer_schema(),
        deltaId=_DELTA_ID,
        op={"enum": [op.value for op in Op]},
        table=_IDENTIFIER,
        rowId=TEXT_SCHEMA,
        clientId=TEXT_SCHEMA,
        columns={"type": "array", "items": object_schema(column=_IDENTIFIER, value=_ANY_JSON)},
        hlc=_HLC,
    )


def _error_schema() -> Schema:
    more: dict[str, Any] = {
        "index": integer_schema("The delta at fault."),
        "expected": {**_DELTA_ID, "description": "The id that the delta has."},
        **QUOTA_PROPERTIES,
        "limit": integer_schema("What it may be at most."),
        "epoch": {**TEXT_SCHEMA, "description": "The log's, where the reader's is another."},
        "newest": integer_schema("The newest sequence."),
        "snapshot": {"const": True, "description": "Replace all rows by those of the snapshot."},
        "serverTime": timestamp_schema(),
        "retryAfterMs": integer_schema("When to try again."),
    }
    schema = object_schema(error=TEXT_SCHEMA, code={"enum": [code.upper() for code in _ERROR_CODES]})
    return {**schema, "properties": {**schema["properties"], **more}, "additionalProperties": False}
