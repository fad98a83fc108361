"""Codec of the Deltas API: encodes answers and errors as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from oncelog import error_codes
from oncelog.core.deltas import (
    IDENTIFIER_CHARACTERS_MAX,
    PUSH_DELTAS_MAX,
    ROW_ID_CHARACTERS_MAX,
)
from oncelog.core.limits import NAME_CHARACTERS_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import NEVER, Op, Row, Stamp
from oncelog.core.values import Record
from oncelog.engine.read_results import Compacted
from oncelog.server.api_service import encode_page_token, outcome_schema, page_members
from oncelog.server.errors import ApiError
from oncelog.server.limits import ApiLimits
from oncelog.server.messages import (
    NO_NUL,
    POSITIVE_INTEGER,
    TEXT_SCHEMA,
    TIMESTAMP,
    Schema,
    integer_schema,
    object_schema,
    page_schema,
    schema_ref,
    with_optional,
)
from oncelog.server.problems import ProblemDialect

_TOO_LARGE_STATUS: Final = 413
_DETAIL_NAMES: Final = {
    "index": "index",
    "expected": "expected",
    "tenant": "tenant",
    "quota": "quota",
    "limit": "limit",
    "usage": "usage",
    "epoch": "epoch",
    "newest": "newest",
    "snapshot": "snapshot",
    "server_time_ms": "serverTime",
    "retry_after_ms": "retryAfterMs",
}
"""Names of error details in this API."""
_PAGE_NAMES: Final = ("hasMore", "nextAfter")


def get_code(error: ApiError) -> str:
    """Return this API's code for an error."""
    is_too_large = error.details.get("status") == _TOO_LARGE_STATUS
    return (error_codes.TOO_LARGE if is_too_large else error.code).upper()


def to_error_members(error: ApiError) -> dict[str, Any]:
    """Return the JSON members of an error, for frames and server-sent events."""
    details = {shown: error.details[name] for name, shown in _DETAIL_NAMES.items() if name in error.details}
    return {"error": error.message, "code": get_code(error), **details}


def encode_error(error: ApiError, **more: str) -> bytes:
    """Encode an error for a stream or a WebSocket."""
    return orjson.dumps({**more, **to_error_members(error)})


PROBLEM_DIALECT: Final = ProblemDialect(get_code, to_error_members, {error_codes.SERVER_ERROR: 503})


# --- answers ----------------------------------------------------------------------------------------------

PushResult = tuple[str, int, bool]
"""Id and sequence of a pushed delta, and whether the delta was already known."""


def encode_push(results: Sequence[PushResult], epoch: str, previous_epochs: Sequence[str], time_ms: int) -> bytes:
    """Encode the answer to a push."""
    texts = [
        f'{{"deltaId":"{delta_id}","sequence":{sequence},"duplicate":{"true" if is_known else "false"}}}'
        for delta_id, sequence, is_known in results
    ]
    duplicates = sum([is_known for _, _, is_known in results])
    return (
        f'{{"committed":{len(results) - duplicates},"duplicates":{duplicates},"epoch":"{epoch}",'
        f'"previousEpochs":{orjson.dumps(previous_epochs).decode()},"serverTime":{time_ms},"results":[{",".join(texts)}]}}'
    ).encode()


def encode_delta(record: Record) -> bytes:
    """Encode a delta with its sequence, splicing in the stored bytes. An erased delta is null."""
    return b"null" if record.erased else b'{"sequence":%d,%b' % (record.sequence, record.body[1:])


def encode_deltas(deltas: Iterable[Record]) -> bytes:
    """Encode an array of deltas."""
    return b"[%b]" % b",".join(map(encode_delta, deltas))


def encode_pull(deltas: Iterable[Record], cursor: int, epoch: str, *, has_more: bool, is_snapshot: bool) -> bytes:
    """Encode a page of deltas, which is empty if the deltas have been compacted."""
    return b'{"deltas":%b,%b"cursor":%d,"hasMore":%b,"epoch":%b}' % (
        encode_deltas(deltas),
        b'"snapshot":true,' if is_snapshot else b"",
        cursor,
        b"true" if has_more else b"false",
        orjson.dumps(epoch),
    )


def encode_rows(rows: Iterable[tuple[str, Row]], following: str) -> bytes:
    """Encode a page of merged rows, without deleted rows."""
    shown = b",".join([_encode_row(*row) for row in rows if row[1].exists])
    return b'{"rows":[%b],%b}' % (shown, _encode_page_members(following))


def _encode_page_members(following: str) -> bytes:
    return orjson.dumps({"next": following, **page_members(following, *_PAGE_NAMES)})[1:-1]


def _encode_row(row_id: str, row: Row) -> bytes:
    columns = b",".join([b"%b:%b" % (orjson.dumps(name), value) for name, value in sorted(row.values.items())])
    return b'{"rowId":%b,"columns":{%b},"hlc":"%d"}' % (orjson.dumps(row_id), columns, row.written[0])


def encode_snapshot(
    rows: Iterable[tuple[str, str, Row]], cursor: int, following: str, epoch: str, horizon: int | None
) -> bytes:
    """Encode a page of rows with the stamps for merging, and the cursor for the pull after the last page.

    The tombstone horizon is null until a deleted row has been dropped.
    """
    return b'{"rows":[%b],"cursor":%d,%b,"horizon":%b,"epoch":%b}' % (
        b",".join([_encode_state(*row) for row in rows]),
        cursor,
        _encode_page_members(following),
        orjson.dumps(None if horizon is None else str(horizon)),
        orjson.dumps(epoch),
    )


def encode_compaction(compaction: Compacted) -> bytes:
    """Encode the result of a compaction. The next request continues the search for deleted rows at `nextAfter`."""
    consumer = compaction.held_by
    following = "" if compaction.next_row is None else encode_page_token(0, None, *compaction.next_row)
    return orjson.dumps(
        {
            "compacted": compaction.deltas,
            "upto": compaction.upto,
            "hasMore": compaction.has_more,
            "droppedRows": compaction.dropped,
            "next": following,
            **({"nextAfter": following} if following else {}),
            "heldBy": None
            if consumer is None
            else {"consumer": consumer.name, "cursor": consumer.cursor, "lag": consumer.lag},
        }
    )


def _encode_state(table: str, row_id: str, row: Row) -> bytes:
    columns = [
        {"column": name, "value": orjson.Fragment(value), **_to_stamp(stamp)}
        for name, (value, stamp) in sorted(row.columns.items())  # sorted by name, independent of the order of arrival
    ]
    state: dict[str, Any] = {"table": table, "rowId": row_id, "columns": columns}
    for name, stamp in (("written", row.written), ("deleted", row.deleted)):
        state[name] = None if stamp == NEVER else _to_stamp(stamp)
    return orjson.dumps(state)


def _to_stamp(stamp: Stamp) -> dict[str, str]:
    hlc, client, delta_id = stamp
    return {"hlc": str(hlc), "clientId": client.decode("utf-16-be", "surrogatepass"), "deltaId": delta_id.hex()}


# --- JSON schemas of the OpenAPI document ------------------------------------------------------------

IDENTIFIER: Final[Schema] = {
    "type": "string",
    "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,{IDENTIFIER_CHARACTERS_MAX - 1}}}$",
}
DELTA_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_HLC: Final[Schema] = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,19})$"}
_NEXT: Final = {**TEXT_SCHEMA, "deprecated": True, "description": "`nextAfter`; empty on the last page."}
_ANY_JSON: Final[Schema] = {"description": "Any JSON, except integers that RFC 8785 would change, such as 2^53+1."}


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    known = object_schema(deltaId=DELTA_ID, sequence=POSITIVE_INTEGER, duplicate={"type": "boolean"})
    pulled = object_schema(
        deltas={"type": "array", "maxItems": limits.page_events_max, "items": schema_ref("Delta")},
        cursor=integer_schema("`since` of the next page."),
        hasMore={"type": "boolean"},
        epoch=TEXT_SCHEMA,
    )

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
        "Push": object_schema(deltas={"type": "array", "maxItems": PUSH_DELTAS_MAX, "items": schema_ref("NewDelta")}),
        "NewDelta": _new_delta_schema(limits),
        "Pushed": object_schema(
            committed=integer_schema(),
            duplicates=integer_schema(),
            epoch=TEXT_SCHEMA,
            previousEpochs={"type": "array", "items": TEXT_SCHEMA},
            serverTime=TIMESTAMP,
            results={"type": "array", "items": known},
        ),
        "Delta": object_schema(
            sequence=POSITIVE_INTEGER,
            deltaId=DELTA_ID,
            op={"enum": [op.value for op in Op]},
            table=IDENTIFIER,
            rowId=TEXT_SCHEMA,
            clientId=TEXT_SCHEMA,
            columns={"type": "array", "items": object_schema(column=IDENTIFIER, value=_ANY_JSON)},
            hlc=_HLC,
        ),
        "DeltaOutcome": outcome_schema(delta={"anyOf": [schema_ref("Delta"), {"type": "null"}]}),
        "Pulled": with_optional(pulled, snapshot={"const": True, "description": "The deltas have been compacted."}),
        "Rows": page_schema(
            *_PAGE_NAMES,
            rows={"type": "array", "maxItems": limits.page_events_max, "items": row},
            next=_NEXT,
        ),
        "Snapshot": page_schema(
            *_PAGE_NAMES,
            rows={"type": "array", "maxItems": limits.page_events_max, "items": state},
            cursor=integer_schema("`since` of the pull after the last page."),
            next=_NEXT,
            horizon={
                "anyOf": [_HLC, {"type": "null"}],
                "description": "Not null after compaction has dropped deleted rows. In that case, a row that is on "
                "no page is deleted.",
            },
            epoch=TEXT_SCHEMA,
        ),
        "Compaction": {
            "oneOf": [
                _compaction_schema(upto=integer_schema("The last sequence to compact.")),
                _compaction_schema(keep=integer_schema("Number of the newest deltas to keep.")),
            ]
        },
        "Compacted": _compaction_result_schema(),
    }


def _compaction_schema(**which: Schema) -> Schema:
    return with_optional(
        {**object_schema(**which), "additionalProperties": False},
        tombstoneAgeMs=integer_schema("Drop rows deleted at least this long ago. Default: `limits.tombstone_age_ms`."),
        after={**TEXT_SCHEMA, "description": "`nextAfter` of the previous answer. No other value is valid."},
        page={**TEXT_SCHEMA, "deprecated": True, "description": "Previous name of `after`."},
    )


def _compaction_result_schema() -> Schema:
    consumer = object_schema(
        consumer=TEXT_SCHEMA, cursor=integer_schema(), lag=integer_schema("Number of deltas that it has not read.")
    )
    next_after = {**TEXT_SCHEMA, "description": "`after` of the next request, if there are more rows."}
    schema = object_schema(
        compacted=integer_schema("Number of deltas whose bodies were dropped."),
        upto=integer_schema(),
        hasMore={"type": "boolean"},
        droppedRows=integer_schema("Number of deleted rows that were dropped."),
        next=_NEXT,
        heldBy={
            "anyOf": [consumer, {"type": "null"}],
            "description": "The slowest named consumer, if deleted rows remain because it has not read them.",
        },
    )
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
        clientId={**name, "maxLength": NAME_CHARACTERS_MAX, "description": "The credential's client."},
        columns={
            "type": "array",
            "maxItems": ROW_COLUMNS_MAX,
            "items": column,
            "description": "Must not contain a column twice.",
        },
        hlc={**_HLC, "description": "64-bit hybrid logical clock: 48 bits for milliseconds, 16 bits for a counter."},
    )
