"""Codec of the Deltas API: its answers and errors in JSON."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from oncelog import error_codes
from oncelog.core.merge import NEVER, Row, Stamp
from oncelog.core.values import Record
from oncelog.engine.read_results import Compacted
from oncelog.server.api_service import encode_page_token
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


# --- answers ----------------------------------------------------------------------------------------------

PushResult = tuple[str, int, bool]
"""Id and sequence of a pushed delta, and whether it was known."""


class PulledPage(Struct, frozen=True):
    """A page of deltas. It is empty where only a snapshot has them."""

    deltas: list[Record]
    cursor: int
    has_more: bool
    is_snapshot: bool = False


class SnapshotPage(Struct, frozen=True):
    """A page of rows with their stamps, and the cursor to pull from when all pages have been read."""

    rows: list[tuple[str, str, Row]]
    cursor: int
    following: str
    horizon: int | None
    """The tombstone horizon: None if no deleted row was ever dropped."""


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
    """Encode a delta with its sequence: the stored bytes are spliced in. An erased one is null."""
    return b"null" if record.erased else b'{"sequence":%d,%b' % (record.sequence, record.body[1:])


def encode_deltas(deltas: Iterable[Record]) -> bytes:
    """Encode an array of deltas."""
    return b"[%b]" % b",".join(map(encode_delta, deltas))


def encode_pull(page: PulledPage, epoch: str) -> bytes:
    """Encode a page of deltas."""
    return b'{"deltas":%b,%b"cursor":%d,"hasMore":%b,"epoch":%b}' % (
        encode_deltas(page.deltas),
        b'"snapshot":true,' if page.is_snapshot else b"",
        page.cursor,
        b"true" if page.has_more else b"false",
        orjson.dumps(epoch),
    )


def encode_rows(rows: Iterable[tuple[str, Row]], following: str) -> bytes:
    """Encode a page of merged rows."""
    return b'{"rows":[%b],%b}' % (b",".join([_encode_row(*row) for row in rows]), _encode_page_members(following))


def _encode_page_members(following: str) -> bytes:
    members: dict[str, Any] = {"next": following, "hasMore": bool(following)}
    return orjson.dumps({**members, "nextAfter": following} if following else members)[1:-1]


def _encode_row(row_id: str, row: Row) -> bytes:
    columns = b",".join([b"%b:%b" % (orjson.dumps(name), value) for name, value in sorted(row.values.items())])
    return b'{"rowId":%b,"columns":{%b},"hlc":"%d"}' % (orjson.dumps(row_id), columns, row.written[0])


def encode_snapshot(page: SnapshotPage, epoch: str) -> bytes:
    """Encode a page of rows with all that a merge needs."""
    return b'{"rows":[%b],"cursor":%d,%b,"horizon":%b,"epoch":%b}' % (
        b",".join([_encode_state(*row) for row in page.rows]),
        page.cursor,
        _encode_page_members(page.following),
        orjson.dumps(None if page.horizon is None else str(page.horizon)),
        orjson.dumps(epoch),
    )


def encode_compaction(compaction: Compacted) -> bytes:
    """Encode the result of a compaction. `nextAfter` continues the search for deleted rows."""
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
        for name, (value, stamp) in sorted(row.columns.items())  # not in the order of arrival
    ]
    state: dict[str, Any] = {"table": table, "rowId": row_id, "columns": columns}
    for name, stamp in (("written", row.written), ("deleted", row.deleted)):
        state[name] = None if stamp == NEVER else _to_stamp(stamp)
    return orjson.dumps(state)


def _to_stamp(stamp: Stamp) -> dict[str, str]:
    hlc, client, delta_id = stamp
    return {"hlc": str(hlc), "clientId": client.decode("utf-16-be", "surrogatepass"), "deltaId": delta_id.hex()}
