"""Codec of the Deltas API: its answers and errors in JSON."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from oncelog import error_codes
from oncelog.core.merge import NEVER, Row, Stamp
from oncelog.core.values import Record
from oncelog.engine.read_results import Compacted
from oncelog.server.errors import ApiError
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
"""Names of the details of an error in this API."""


def get_code(error: ApiError) -> str:
    """Return the code of an error in this API."""
    is_too_large = error.details.get("status") == _TOO_LARGE_STATUS
    return (error_codes.TOO_LARGE if is_too_large else error.code).upper()


def to_error_members(error: ApiError) -> dict[str, Any]:
    """Return the members of an error in frames and events."""
    details = {shown: error.details[name] for name, shown in _DETAIL_NAMES.items() if name in error.details}
    return {"error": error.message, "code": get_code(error), **details}


def encode_error(error: ApiError, **more: str) -> bytes:
    """Encode an error of a stream or a WebSocket."""
    return orjson.dumps({**more, **to_error_members(error)})


PROBLEM_DIALECT: Final = ProblemDialect(get_code, to_error_members, {error_codes.SERVER_ERROR: 503})


# --- pushed -----------------------------------------------------------------------------------------------


def encode_push(
    results: Sequence[tuple[str, int, bool]], epoch: str, previous_epochs: Sequence[str], time_ms: int
) -> bytes:
    """What became of a push: id, sequence, and whether it was known, of each delta."""
    texts = [
        f'{{"deltaId":"{delta_id}","sequence":{sequence},"duplicate":{"true" if is_known else "false"}}}'
        for delta_id, sequence, is_known in results
    ]
    duplicates = sum([is_known for _, _, is_known in results])
    return (
        f'{{"committed":{len(results) - duplicates},"duplicates":{duplicates},"epoch":"{epoch}",'
        f'"previousEpochs":{orjson.dumps(previous_epochs).decode()},"serverTime":{time_ms},"results":[{",".join(texts)}]}}'
    ).encode()


# --- read ---------------------------------------------------------------------------------------------------


def encode_delta(record: Record) -> bytes:
    """A delta as readers get it: as it was kept, with its place."""
    return b'{"sequence":%d,%b' % (record.sequence, record.body[1:])


def encode_pull(records: Iterable[Record], cursor: int, epoch: str, *, has_more: bool, is_snapshot: bool) -> bytes:
    """A page of deltas."""
    return b'{"deltas":[%b],%b"cursor":%d,"hasMore":%b,"epoch":%b}' % (
        b",".join(map(encode_delta, records)),
        b'"snapshot":true,' if is_snapshot else b"",
        cursor,
        b"true" if has_more else b"false",
        orjson.dumps(epoch),
    )


def encode_rows(rows: Iterable[tuple[str, Row]], following: str) -> bytes:
    """A page of merged rows."""
    return b'{"rows":[%b],%b}' % (b",".join([_encode_row(*row) for row in rows]), _encode_page_members(following))


def _encode_page_members(following: str) -> bytes:
    members: dict[str, Any] = {"next": following, "hasMore": bool(following)}
    return orjson.dumps({**members, "nextAfter": following} if following else members)[1:-1]


def _encode_row(row_id: str, row: Row) -> bytes:
    columns = b",".join([b"%b:%b" % (orjson.dumps(name), value) for name, value in sorted(row.values.items())])
    return b'{"rowId":%b,"columns":{%b},"hlc":"%d"}' % (orjson.dumps(row_id), columns, row.written[0])


def encode_snapshot(
    rows: Iterable[tuple[str, str, Row]], cursor: int, following: str, epoch: str, horizon: int | None
) -> bytes:
    """A page of rows with all that a merge needs."""
    return b'{"rows":[%b],"cursor":%d,%b,"horizon":%b,"epoch":%b}' % (
        b",".join([_encode_state(*row) for row in rows]),
        cursor,
        _encode_page_members(following),
        orjson.dumps(None if horizon is None else str(horizon)),
        orjson.dumps(epoch),
    )


def encode_compaction(compaction: Compacted, following: str) -> bytes:
    """What a compaction did, and what it left."""
    consumer = compaction.held_by
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
        for name, (value, stamp) in sorted(row.columns.items())  # not in the order of arrival
    ]
    state: dict[str, Any] = {"table": table, "rowId": row_id, "columns": columns}
    for name, stamp in (("written", row.written), ("deleted", row.deleted)):
        state[name] = None if stamp == NEVER else _to_stamp(stamp)
    return orjson.dumps(state)


def _to_stamp(stamp: Stamp) -> dict[str, str]:
    hlc, client, delta_id = stamp
    return {"hlc": str(hlc), "clientId": client.decode("utf-16-be", "surrogatepass"), "deltaId": delta_id.hex()}
