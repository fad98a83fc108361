"""JSON Schemas of the Deltas API."""

from typing import Final

from oncelog.core.deltas import (
    IDENTIFIER_CHARACTERS_MAX,
    PUSH_DELTAS_MAX,
    ROW_ID_CHARACTERS_MAX,
)
from oncelog.core.limits import NAME_CHARACTERS_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op
from oncelog.server.json_schemas import (
    NO_NUL,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    page_schema,
    positive_integer_schema,
    schema_ref,
    timestamp_schema,
    with_optional,
)
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import outcome_schema

IDENTIFIER: Final[Schema] = {
    "type": "string",
    "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,{IDENTIFIER_CHARACTERS_MAX - 1}}}$",
}
DELTA_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_HLC: Final[Schema] = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,19})$"}
_NEXT: Final = {**TEXT_SCHEMA, "deprecated": True, "description": "As `nextAfter`; empty at the end."}
_PAGE_NAMES: Final = ("hasMore", "nextAfter")
_ANY_JSON: Final[Schema] = {"description": "Any JSON; no integer that RFC 8785 would change, such as 2^53+1."}


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    deltas = {"type": "array", "maxItems": PUSH_DELTAS_MAX, "items": schema_ref("NewDelta")}
    known = object_schema(deltaId=DELTA_ID, sequence=positive_integer_schema(), duplicate={"type": "boolean"})
    pulled = object_schema(
        deltas={"type": "array", "maxItems": limits.page_events_max, "items": schema_ref("Delta")},
        cursor=integer_schema("Read on after this."),
        hasMore={"type": "boolean"},
        epoch=TEXT_SCHEMA,
    )
    pulled["properties"]["snapshot"] = {"const": True, "description": "The deltas have been compacted."}
    row = object_schema(rowId=TEXT_SCHEMA, columns={"type": "object", "propertyNames": IDENTIFIER}, hlc=_HLC)
    stamp = {"hlc": _HLC, "clientId": TEXT_SCHEMA, "deltaId": DELTA_ID}
    stamped = {"anyOf": [object_schema(**stamp), {"type": "null"}]}
    state = object_schema(
        table=IDENTIFIER,
        rowId=TEXT_SCHEMA,
        columns={"type": "array", "items": object_schema(column=IDENTIFIER, value=_ANY_JSON, **stamp)},
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
        "DeltaOutcome": outcome_schema(delta={"anyOf": [schema_ref("Delta"), {"type": "null"}]}),
        "Pulled": pulled,
        "Rows": page_schema(
            *_PAGE_NAMES,
            rows={"type": "array", "maxItems": limits.page_events_max, "items": row},
            next=_NEXT,
        ),
        "Snapshot": page_schema(
            *_PAGE_NAMES,
            rows={"type": "array", "maxItems": limits.page_events_max, "items": state},
            cursor=integer_schema("To pull from when all pages have been read."),
            next=_NEXT,
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
    }


def _compaction_schema(**which: Schema) -> Schema:
    schema = object_schema(**which)
    more = {
        "tombstoneAgeMs": integer_schema(
            "Drop rows that were deleted this long ago. Default: `limits.tombstone_age_ms`."
        ),
        "after": {**TEXT_SCHEMA, "description": "`nextAfter` of the answer before. Nothing else."},
        "page": {**TEXT_SCHEMA, "deprecated": True, "description": "As `after`."},
    }
    return {**schema, "properties": {**schema["properties"], **more}, "additionalProperties": False}


def _compaction_result_schema() -> Schema:
    consumer = object_schema(
        consumer=TEXT_SCHEMA, cursor=integer_schema(), lag=integer_schema("How many deltas it has not read.")
    )
    schema = object_schema(
        compacted=integer_schema("Deltas whose bodies were dropped."),
        upto=integer_schema(),
        hasMore={"type": "boolean"},
        droppedRows=integer_schema("Deleted rows that were dropped."),
        next=_NEXT,
        heldBy={
            "anyOf": [consumer, {"type": "null"}],
            "description": "The slowest named consumer, if deleted rows stay because it has not read them.",
        },
    )
    next_after = {**TEXT_SCHEMA, "description": "If there are more rows to read: send it as `after`."}
    return with_optional(schema, nextAfter=next_after)


def _new_delta_schema(limits: ApiLimits) -> Schema:
    value = {**_ANY_JSON, "description": f"At most {limits.column_value_bytes_max} bytes in canonical JSON."}
    column = {**object_schema(column=IDENTIFIER, value=value), "additionalProperties": False}
    name = {"type": "string", "minLength": 1, "pattern": NO_NUL}
    return object_schema(
        deltaId={**DELTA_ID, "description": "SHA-256 of the canonical `{clientId, columns, hlc, rowId, table}`."},
        op={"enum": [op.value for op in Op]},
        table=IDENTIFIER,
        rowId={**name, "maxLength": ROW_ID_CHARACTERS_MAX},
        clientId={**name, "maxLength": NAME_CHARACTERS_MAX, "description": "That of the credential."},
        columns={"type": "array", "maxItems": ROW_COLUMNS_MAX, "items": column, "description": "Each column once."},
        hlc={**_HLC, "description": "64 bits: 48 of milliseconds, 16 of counter."},
    )


def _delta_schema() -> Schema:
    return object_schema(
        sequence=positive_integer_schema(),
        deltaId=DELTA_ID,
        op={"enum": [op.value for op in Op]},
        table=IDENTIFIER,
        rowId=TEXT_SCHEMA,
        clientId=TEXT_SCHEMA,
        columns={"type": "array", "items": object_schema(column=IDENTIFIER, value=_ANY_JSON)},
        hlc=_HLC,
    )
