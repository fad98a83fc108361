"""What a client and a gateway say to each other: values of ours, made of JSON that is not believed blindly."""

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from oncelog import error_codes
from oncelog.client.events.values import Number
from oncelog.core.canonical import canonical_text, utf16_sort_key
from oncelog.core.deltas import DeltaJson, decode_delta
from oncelog.core.hlc import parse_hlc
from oncelog.core.merge import NEVER, Row, RowDelta, Stamp
from oncelog.errors import CanonicalError, ProtocolError

T = TypeVar("T")

# As the Deltas API encodes them.
BAD_REQUEST: Final = error_codes.BAD_REQUEST.upper()
DELTA_ID_MISMATCH: Final = error_codes.DELTA_ID_MISMATCH.upper()
AUTH_FAILED: Final = error_codes.AUTH_FAILED.upper()
FORBIDDEN: Final = error_codes.FORBIDDEN.upper()
CLOCK_DRIFT: Final = error_codes.CLOCK_DRIFT.upper()
HISTORY_CHANGED: Final = error_codes.HISTORY_CHANGED.upper()
TOO_LARGE: Final = error_codes.TOO_LARGE.upper()
INVALID: Final = error_codes.INVALID.upper()
RATE_LIMITED: Final = error_codes.RATE_LIMITED.upper()
SERVER_BUSY: Final = error_codes.SERVER_BUSY.upper()
SERVER_ERROR: Final = error_codes.SERVER_ERROR.upper()
_CODES_BY_STATUS: Final = {
    401: AUTH_FAILED, 403: FORBIDDEN, 413: TOO_LARGE, 429: RATE_LIMITED, 502: SERVER_BUSY, 503: SERVER_BUSY,
    504: SERVER_BUSY,
}  # fmt: skip


class OutboxEntry(Struct, frozen=True, gc=False):
    """A delta in the outbox."""

    number: int
    """Its place there: they are pushed in this order."""
    delta_id: bytes
    body: bytes

    def decode(self) -> DeltaJson:
        """What it says."""
        return msgspec.json.decode(self.body, type=DeltaJson)


# --- answers -----------------------------------------------------------------------------------------


class PushReply(Struct, frozen=True):
    """All deltas of a push are the gateway's."""

    epoch: str
    previous_epochs: tuple[str, ...] = ()
    """Epochs of histories that the gateway's continues after restores. A server of version 0.1 names none."""


class DeltaPage(Struct, frozen=True):
    """Deltas after a cursor, in the gateway's order."""

    deltas: tuple[RowDelta, ...]
    cursor: int
    has_more: bool
    epoch: str
    is_compacted: bool = False
    """Those after the cursor are no more: the snapshot is to be read."""


class SnapshotRow(Struct, frozen=True):
    """A row with all that a merge needs."""

    table: str
    row_id: str
    row: Row


class SnapshotPage(Struct, frozen=True):
    """A part of the gateway's rows."""

    rows: tuple[SnapshotRow, ...]
    cursor: int
    next: str
    """The next page; empty behind the last."""
    epoch: str
    horizon: int | None = None
    """The gateway's tombstone horizon, if it has dropped deleted rows: a row that no page has is deleted."""


class LiveDeltas(Struct, frozen=True):
    """Deltas as they are committed."""

    deltas: tuple[RowDelta, ...]
    cursor: int


class LiveCompacted(Struct, frozen=True):
    """What is after the cursor has been compacted: the snapshot is to be read."""


class ServerError(Struct, frozen=True):
    """The gateway refuses a request."""

    code: str
    message: str
    index: int | None = None
    """Which delta of the push it is about."""
    retry_after_ms: int = 0
    is_compacted: bool = False
    """The history is the same, but what the client has not read is in the snapshot only."""

    @property
    def is_transient(self) -> bool:
        """Whether the same may be sent again soon."""
        return self.code.lower() in error_codes.RETRYABLE_CODES

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class NoReply(Struct, frozen=True):
    """Nobody knows what became of it."""

    reason: str

    def __str__(self) -> str:
        return self.reason


# --- reading -----------------------------------------------------------------------------------------


class _ResultJson(Struct, rename="camel"):
    delta_id: str
    sequence: Number


class _PushReplyJson(Struct, rename="camel"):
    epoch: str
    results: list[_ResultJson]
    previous_epochs: tuple[str, ...] = ()


class _DeltaPageJson(Struct, rename="camel"):
    deltas: list[Raw]
    cursor: Number
    has_more: bool
    epoch: str
    snapshot: bool = False


class _StampJson(Struct, rename="camel"):
    hlc: str
    client_id: str
    delta_id: str

    def to_stamp(self) -> Stamp:
        return (parse_hlc(self.hlc), utf16_sort_key(self.client_id), bytes.fromhex(self.delta_id))


class _ColumnJson(_StampJson, kw_only=True):
    column: str
    value: Raw


class _RowJson(Struct, rename="camel"):
    table: str
    row_id: str
    columns: list[_ColumnJson]
    written: _StampJson | None
    deleted: _StampJson | None

    def to_snapshot_row(self) -> SnapshotRow:
        columns = {column.column: (canonical_text(bytes(column.value)), column.to_stamp()) for column in self.columns}
        written = NEVER if self.written is None else self.written.to_stamp()
        deleted = NEVER if self.deleted is None else self.deleted.to_stamp()
        return SnapshotRow(self.table, self.row_id, Row(columns, written, deleted))


class _SnapshotJson(Struct):
    rows: list[_RowJson]
    cursor: Number
    next: str
    epoch: str
    horizon: str | None = None


class _ErrorJson(Struct, rename="camel"):
    error: str
    code: str
    index: int | None = None
    retry_after_ms: int = 0
    snapshot: bool = False


class _LiveJson(Struct, rename="camel"):
    type: str
    deltas: list[Raw] = []
    cursor: Number = 0
    epoch: str = ""
    error: str = ""
    code: str = ""
    retry_after_ms: int = 0
    snapshot: bool = False


def decode_push_reply(body: bytes, entries: Sequence[OutboxEntry]) -> PushReply:
    """Raises ProtocolError where the answer is not about these deltas."""
    answer = _decode_json(body, _PushReplyJson)
    if [result.delta_id for result in answer.results] != [result.delta_id.hex() for result in entries]:
        raise ProtocolError("the gateway acknowledges other deltas than those that were pushed")
    return PushReply(answer.epoch, answer.previous_epochs)


def decode_delta_page(body: bytes) -> DeltaPage:
    """Raises ProtocolError."""
    page = _decode_json(body, _DeltaPageJson)
    return DeltaPage(_decode_deltas(page.deltas), page.cursor, page.has_more, page.epoch, page.snapshot)


def decode_snapshot_page(body: bytes) -> SnapshotPage:
    """Raises ProtocolError."""
    page = _decode_json(body, _SnapshotJson)
    try:
        rows = tuple(row.to_snapshot_row() for row in page.rows)
        horizon = None if page.horizon is None else parse_hlc(page.horizon)
    except (CanonicalError, ValueError) as error:
        raise ProtocolError(f"the gateway's snapshot has a row that is none: {error}") from error
    return SnapshotPage(rows, page.cursor, page.next, page.epoch, horizon)


def decode_error(status: int, body: bytes, retry_after_ms: int) -> ServerError:
    """Decode an unsuccessful answer; that of a proxy in between is not JSON of the gateway."""
    try:
        answer = msgspec.json.decode(body, type=_ErrorJson)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        code = _CODES_BY_STATUS.get(status) or (SERVER_ERROR if status >= 500 else BAD_REQUEST)
        return ServerError(code, f"no gateway answers there (HTTP status {status})", None, retry_after_ms)
    return ServerError(
        answer.code, answer.error, answer.index, max(answer.retry_after_ms, retry_after_ms), answer.snapshot
    )


def decode_connected(text: str) -> str | ServerError:
    """The first message of a live connection: the gateway's epoch, or why there is none."""
    message = _decode_json(text.encode(), _LiveJson)
    if message.type == "connected":
        return message.epoch
    return _decode_live_error(message)


def decode_live(text: str) -> LiveDeltas | LiveCompacted | ServerError:
    """Raises ProtocolError."""
    message = _decode_json(text.encode(), _LiveJson)
    if message.type == "deltas":
        return LiveDeltas(_decode_deltas(message.deltas), message.cursor)
    return LiveCompacted() if message.type == "snapshot" else _decode_live_error(message)


def _decode_live_error(message: _LiveJson) -> ServerError:
    if message.type != "error":
        raise ProtocolError(f"the gateway says something that no gateway says: {message.type!r}")
    return ServerError(message.code, message.error, None, message.retry_after_ms, message.snapshot)


def _decode_deltas(bodies: list[Raw]) -> tuple[RowDelta, ...]:
    try:
        return tuple(decode_delta(bytes(body)) for body in bodies)
    except CanonicalError as error:
        raise ProtocolError(f"the gateway has a delta that is none: {error}") from error


def _decode_json(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the gateway's answer is none: {error}") from error
