"""The part of the description that speaks of the deltas."""

from collections.abc import Sequence
from typing import Any, Final

from oncelog import codes
from oncelog.core.deltas import (
    GATEWAY_CHARACTERS_MAX,
    IDENTIFIER_CHARACTERS_MAX,
    PUSH_DELTAS_MAX,
    ROW_ID_CHARACTERS_MAX,
)
from oncelog.core.limits import NAME_CHARACTERS_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op
from oncelog.doors.limits import COMPACT_DELTAS_MAX, COMPACT_ROWS_MAX, DoorLimits
from oncelog.doors.openapi_parts import (
    JSON,
    NO_NUL,
    QUOTA,
    TEXT,
    Schema,
    answer,
    number,
    object_of,
    operation,
    parameter,
    ref,
    time,
    whole,
)

_ERROR: Final = "DeltasError"
_IDENTIFIER: Final[Schema] = {
    "type": "string",
    "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,{IDENTIFIER_CHARACTERS_MAX - 1}}}$",
}
_DELTA_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_HLC: Final[Schema] = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,19})$"}
_ANYTHING: Final[Schema] = {"description": "Any JSON; no integer that RFC 8785 would change, such as 2^53+1."}
_READ: Final = (400, 401, 429, 503)
_WRITTEN: Final = (400, 401, 408, 413, 415, 429, 503)
_CODES: Final = (
    codes.BAD_REQUEST,
    codes.DELTA_ID_MISMATCH,
    codes.AUTH_FAILED,
    codes.FORBIDDEN,
    codes.CLOCK_DRIFT,
    codes.HISTORY_CHANGED,
    codes.TOO_LARGE,
    codes.INVALID,
    codes.RATE_LIMITED,
    codes.SERVER_BUSY,
    codes.READ_ONLY,
    codes.QUOTA_EXCEEDED,
    codes.SERVER_ERROR,
)


def paths(limits: DoorLimits) -> Schema:
    """The paths under /v1/sync/."""
    table = {**parameter("table", {**_IDENTIFIER, "description": "Of which table."}), "in": "path", "required": True}
    after = _row_id("after", "Rows behind this one: `next` of the page before.")
    row_id = _row_id("rowId", "Only this row.")
    page = parameter("page", {**TEXT, "description": "`next` of the page before. Nothing else."})
    operations = {
        "push": {"post": _push(limits)},
        "pull": {"get": _pull(limits)},
        "rows/{table}": {
            "get": _get(
                "getRows",
                "Rows",
                "Read the rows of a table",
                "Those that exist, merged, by `rowId`. A page may be empty though there is a `next`.",
                [table, after, _limit(limits), row_id],
            )
        },
        "snapshot": {
            "get": _get(
                "getSnapshot",
                "Snapshot",
                "Read all rows with their stamps",
                "For whoever's cursor is older than the compaction: all pages, then a pull from `cursor`.",
                [page, _limit(limits)],
                (*_READ, 409),
            )
        },
        "live": {"get": _live()},
        "compact": {"post": _compact(limits)},
    }
    return {f"/v1/sync/{{gateway}}/{path}": described for path, described in operations.items()}


def _push(limits: DoorLimits) -> Schema:
    about = (
        "All deltas are taken, or none. One that the gateway knows is acknowledged again and changes nothing, so after "
        "any failure push everything again that has no answer."
    )
    told = answer("Pushed", "What became of each delta, in the order of the request.")
    described = operation(
        "pushDeltas", "Push deltas", about, told, (*_WRITTEN, 409, 422, 507), tag="deltas", fault=_ERROR
    )
    return {**described, "parameters": [_gateway()], "requestBody": _body("Push", limits)}


def _compact(limits: DoorLimits) -> Schema:
    about = (
        "Drops the bodies of old deltas, then rows that were deleted long ago; rows that exist, ids and hashes stay. "
        f"One request compacts at most {COMPACT_DELTAS_MAX} deltas and reads at most {COMPACT_ROWS_MAX} rows: ask "
        "again while `hasMore` is true or `next` is not empty."
    )
    told = answer("Compacted", "How far it is.")
    described = operation("compactDeltas", "Compact a gateway", about, told, _WRITTEN, tag="deltas", fault=_ERROR)
    return {**described, "parameters": [_gateway()], "requestBody": _body("Compaction", limits)}


def _body(schema: str, limits: DoorLimits) -> Schema:
    about = f"At most {limits.frame_bytes_max} bytes."
    return {"required": True, "description": about, "content": {JSON: {"schema": ref(schema)}}}


def _pull(limits: DoorLimits) -> Schema:
    about = (
        "In the order of arrival at the gateway, which never changes. Ask again with `since` = `cursor` while "
        "`hasMore`. With `snapshot` the deltas have been compacted: read the snapshot, and go on from its cursor."
    )
    return _get("pullDeltas", "Pulled", "Read deltas", about, [*_cursor(), _limit(limits)], (*_READ, 409))


def _live() -> Schema:
    about = (
        "Server-sent events. First `connected`, with the epoch; then every delta after the cursor, and those to come. "
        "The id of each is its `sequence`, so a browser resumes by itself where it was. An event `snapshot` says that "
        "the cursor is older than the compaction, an event `error` why the server ends the stream. The same address "
        "is a WebSocket too (docs/deltas.md)."
    )
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    told = {"description": "A stream that does not end by itself.", "content": content}
    resumed = {
        "anyOf": [whole(), {"type": "string", "maxLength": 0}],
        "description": "The last `sequence` that was received. It goes before `since`. An empty one is none.",
    }
    described = operation("followDeltas", "Follow deltas", about, told, (*_READ, 409), tag="deltas", fault=_ERROR)
    last = {**parameter("Last-Event-ID", resumed), "in": "header"}
    return {**described, "parameters": [_gateway(), *_cursor(), last]}


def _get(
    name: str, schema: str, summary: str, about: str, parameters: Sequence[Schema], errors: Sequence[int] = _READ
) -> Schema:
    described = operation(name, summary, about, answer(schema, "A page."), errors, tag="deltas", fault=_ERROR)
    return {**described, "parameters": [_gateway(), *parameters]}


def _gateway() -> Schema:
    schema = {
        "type": "string",
        "minLength": 1,
        "maxLength": GATEWAY_CHARACTERS_MAX,
        "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$",
        "description": "Which gateway. In NFC, without control characters, and neither `.` nor `..`.",
    }
    return {**parameter("gateway", schema), "in": "path", "required": True}


def _cursor() -> list[Schema]:
    since = {**whole("The cursor: deltas after it. A `sequence`, or a `cursor`."), "default": 0}
    epoch = {**TEXT, "description": "That of the history which the cursor is of. Another one gets 409."}
    return [parameter("since", since), parameter("epoch", epoch)]


def _limit(limits: DoorLimits) -> Schema:
    schema = {
        **whole(),
        "default": min(limits.page_events_default, limits.page_events_max),
        "description": f"How many at most. 0 is taken as 1, more than {limits.page_events_max} as that.",
    }
    return parameter("limit", schema)


def _row_id(name: str, about: str) -> Schema:
    schema = {"type": "string", "maxLength": ROW_ID_CHARACTERS_MAX, "pattern": NO_NUL, "description": about}
    return parameter(name, schema)


# --- schemas -----------------------------------------------------------------------------------------------


def schemas(limits: DoorLimits) -> Schema:
    """What is sent and answered there."""
    deltas = {"type": "array", "maxItems": PUSH_DELTAS_MAX, "items": ref("NewDelta")}
    known = object_of(deltaId=_DELTA_ID, sequence=number(), duplicate={"type": "boolean"})
    pulled = object_of(
        deltas={"type": "array", "maxItems": limits.page_events_max, "items": ref("Delta")},
        cursor=whole("Read on after this."),
        hasMore={"type": "boolean"},
        epoch=TEXT,
    )
    pulled["properties"]["snapshot"] = {"const": True, "description": "The deltas have been compacted."}
    row = object_of(rowId=TEXT, columns={"type": "object", "propertyNames": _IDENTIFIER}, hlc=_HLC)
    stamp = {"hlc": _HLC, "clientId": TEXT, "deltaId": _DELTA_ID}
    stamped = {"anyOf": [object_of(**stamp), {"type": "null"}]}
    state = object_of(
        table=_IDENTIFIER,
        rowId=TEXT,
        columns={"type": "array", "items": object_of(column=_IDENTIFIER, value=_ANYTHING, **stamp)},
        written=stamped,
        deleted=stamped,
    )
    return {
        "Push": object_of(deltas=deltas),
        "NewDelta": _delta(limits),
        "Pushed": object_of(
            committed=whole(),
            duplicates=whole(),
            epoch=TEXT,
            previousEpochs={"type": "array", "items": TEXT},
            serverTime=time(),
            results={"type": "array", "items": known},
        ),
        "Delta": _kept(),
        "Pulled": pulled,
        "Rows": object_of(rows={"type": "array", "maxItems": limits.page_events_max, "items": row}, next=TEXT),
        "Snapshot": object_of(
            rows={"type": "array", "maxItems": limits.page_events_max, "items": state},
            cursor=whole("To pull from when all pages have been read."),
            next=TEXT,
            horizon={
                "anyOf": [_HLC, {"type": "null"}],
                "description": "Not null once compaction has dropped deleted rows: a row that no page has is deleted.",
            },
            epoch=TEXT,
        ),
        "Compaction": {
            "oneOf": [
                _compaction(upto=whole("The last sequence to compact.")),
                _compaction(keep=whole("How many of the newest to keep.")),
            ]
        },
        "Compacted": _compacted(),
        _ERROR: _error(),
    }


def _compaction(**which: Schema) -> Schema:
    schema = object_of(**which)
    more = {
        "tombstoneAgeMs": whole("Drop rows that were deleted this long ago. Default: `limits.tombstone_age_ms`."),
        "page": {**TEXT, "description": "`next` of the answer before. Nothing else."},
    }
    return {**schema, "properties": {**schema["properties"], **more}, "additionalProperties": False}


def _compacted() -> Schema:
    consumer = object_of(consumer=TEXT, cursor=whole(), lag=whole("How many deltas it has not read."))
    return object_of(
        compacted=whole("Deltas whose bodies were dropped."),
        upto=whole(),
        hasMore={"type": "boolean"},
        droppedRows=whole("Deleted rows that were dropped."),
        next={**TEXT, "description": "Not empty if there are more rows to read: send it as `page`."},
        heldBy={
            "anyOf": [consumer, {"type": "null"}],
            "description": "The slowest named consumer, if deleted rows stay because it has not read them.",
        },
    )


def _delta(limits: DoorLimits) -> Schema:
    value = {**_ANYTHING, "description": f"At most {limits.column_value_bytes_max} bytes in canonical JSON."}
    column = {**object_of(column=_IDENTIFIER, value=value), "additionalProperties": False}
    name = {"type": "string", "minLength": 1, "pattern": NO_NUL}
    return object_of(
        deltaId={**_DELTA_ID, "description": "SHA-256 of the canonical `{clientId, columns, hlc, rowId, table}`."},
        op={"enum": [op.value for op in Op]},
        table=_IDENTIFIER,
        rowId={**name, "maxLength": ROW_ID_CHARACTERS_MAX},
        clientId={**name, "maxLength": NAME_CHARACTERS_MAX, "description": "That of the credential."},
        columns={"type": "array", "maxItems": ROW_COLUMNS_MAX, "items": column, "description": "Each column once."},
        hlc={**_HLC, "description": "64 bits: 48 of milliseconds, 16 of counter."},
    )


def _kept() -> Schema:
    return object_of(
        sequence=number(),
        deltaId=_DELTA_ID,
        op={"enum": [op.value for op in Op]},
        table=_IDENTIFIER,
        rowId=TEXT,
        clientId=TEXT,
        columns={"type": "array", "items": object_of(column=_IDENTIFIER, value=_ANYTHING)},
        hlc=_HLC,
    )


def _error() -> Schema:
    more: dict[str, Any] = {
        "index": whole("The delta at fault."),
        "expected": {**_DELTA_ID, "description": "The id that the delta has."},
        **QUOTA,
        "limit": whole("What it may be at most."),
        "epoch": {**TEXT, "description": "The log's, where the reader's is another."},
        "newest": whole("The newest sequence."),
        "snapshot": {"const": True, "description": "Replace all rows by those of the snapshot."},
        "serverTime": time(),
        "retryAfterMs": whole("When to try again."),
    }
    schema = object_of(error=TEXT, code={"enum": [code.upper() for code in _CODES]})
    return {**schema, "properties": {**schema["properties"], **more}, "additionalProperties": False}
