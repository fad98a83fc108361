"""The words of the deltas door: its answers, and its errors, in JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from oncelog import codes
from oncelog.core.merge import NEVER, Row, Stamp
from oncelog.core.values import Record
from oncelog.doors.faults import DoorError
from oncelog.doors.requests import JSON
from oncelog.doors.requests import STATUS as STATUS_OF_ALL
from oncelog.engine.cursors import Compacted

STATUS: Final = {
    **STATUS_OF_ALL,
    codes.CLOCK_DRIFT: 409,
    codes.DELTA_ID_MISMATCH: 400,
    codes.TOO_LARGE: 413,
    codes.INVALID: 422,
    codes.SERVER_ERROR: 503,
}
"""The one table from this door's errors to HTTP's."""
_TOO_LARGE_STATUS: Final = 413
_DETAILS: Final = {
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
"""What else an error may tell, and how it is called there."""


def error_json(error: DoorError, **more: str) -> bytes:
    """`{error, code, index?}`, and what else helps."""
    code = codes.TOO_LARGE if error.details.get("status") == _TOO_LARGE_STATUS else error.code
    details = {shown: error.details[name] for name, shown in _DETAILS.items() if name in error.details}
    return orjson.dumps({**more, "error": error.message, "code": code.upper(), **details})


def error_response(error: DoorError, headers: Mapping[str, str] | None = None) -> web.Response:
    """The same as HTTP has it."""
    headers = dict(headers or {})
    retry_after_ms = error.details.get("retry_after_ms")
    if retry_after_ms is not None:
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    if error.code == codes.AUTH_FAILED:
        headers["WWW-Authenticate"] = "Bearer"
    status = error.details.get("status", STATUS[error.code])
    response = web.Response(body=error_json(error), status=status, content_type=JSON, headers=headers)
    if error.details.get("field") == "body":
        response.force_close()  # as in `requests`: what is left of it was not read
    return response


# --- pushed -----------------------------------------------------------------------------------------------


def pushed_json(
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


def delta_json(record: Record) -> bytes:
    """A delta as readers get it: as it was kept, with its place."""
    return b'{"sequence":%d,%b' % (record.sequence, record.body[1:])


def pull_json(records: Iterable[Record], cursor: int, epoch: str, *, has_more: bool, is_snapshot: bool) -> bytes:
    """A page of deltas."""
    return b'{"deltas":[%b],%b"cursor":%d,"hasMore":%b,"epoch":%b}' % (
        b",".join(map(delta_json, records)),
        b'"snapshot":true,' if is_snapshot else b"",
        cursor,
        b"true" if has_more else b"false",
        orjson.dumps(epoch),
    )


def rows_json(rows: Iterable[tuple[str, Row]], following: str) -> bytes:
    """A page of merged rows."""
    return b'{"rows":[%b],"next":%b}' % (b",".join([_row(*row) for row in rows]), orjson.dumps(following))


def _row(row_id: str, row: Row) -> bytes:
    columns = b",".join([b"%b:%b" % (orjson.dumps(name), value) for name, value in sorted(row.values.items())])
    return b'{"rowId":%b,"columns":{%b},"hlc":"%d"}' % (orjson.dumps(row_id), columns, row.written[0])


def snapshot_json(
    rows: Iterable[tuple[str, str, Row]], cursor: int, following: str, epoch: str, horizon: int | None
) -> bytes:
    """A page of rows with all that a merge needs."""
    return b'{"rows":[%b],"cursor":%d,"next":%b,"horizon":%b,"epoch":%b}' % (
        b",".join([_state(*row) for row in rows]),
        cursor,
        orjson.dumps(following),
        orjson.dumps(None if horizon is None else str(horizon)),
        orjson.dumps(epoch),
    )


def compacted_json(done: Compacted, following: str) -> bytes:
    """What a compaction did, and what it left."""
    held = done.held_by
    return orjson.dumps(
        {
            "compacted": done.deltas,
            "upto": done.upto,
            "hasMore": done.has_more,
            "droppedRows": done.dropped,
            "next": following,
            "heldBy": None if held is None else {"consumer": held.name, "cursor": held.cursor, "lag": held.lag},
        }
    )


def _state(table: str, row_id: str, row: Row) -> bytes:
    columns = [
        {"column": name, "value": orjson.Fragment(value), **_stamp(stamp)}
        for name, (value, stamp) in sorted(row.columns.items())  # not in the order of arrival
    ]
    state: dict[str, Any] = {"table": table, "rowId": row_id, "columns": columns}
    for name, stamp in (("written", row.written), ("deleted", row.deleted)):
        state[name] = None if stamp == NEVER else _stamp(stamp)
    return orjson.dumps(state)


def _stamp(stamp: Stamp) -> dict[str, str]:
    hlc, client, delta_id = stamp
    return {"hlc": str(hlc), "clientId": client.decode("utf-16-be", "surrogatepass"), "deltaId": delta_id.hex()}
