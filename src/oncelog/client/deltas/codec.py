"""Decoding and validation of a gateway's answers and live messages."""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from oncelog.client.runtime.http import DECODE_ERRORS, decode_answer, get_status_code
from oncelog.client.runtime.values import Number
from oncelog.core.canonical import canonical_text, utf16_sort_key
from oncelog.core.deltas import DeltaJson, decode_delta
from oncelog.core.hlc import parse_hlc
from oncelog.core.limits import CLOCK_DRIFT_MS_MAX
from oncelog.core.merge import NEVER, Row, RowDelta, Stamp
from oncelog.error_codes import CLOCK_DRIFT, TOO_LARGE
from oncelog.errors import CanonicalError, ClientError, ProtocolError, ServerRefusedError

DeltaT = TypeVar("DeltaT")
RowT = TypeVar("RowT")
HlcT = TypeVar("HlcT")
GATEWAY: Final = "gateway"
"""Name of the server in error messages."""


class GatewayRefusedError(ServerRefusedError):
    """The gateway refuses a request."""

    def __init__(
        self, code: str, message: str, retry_after_ms: int = 0, index: int | None = None, *, is_compacted: bool = False
    ) -> None:
        super().__init__(code, message, retry_after_ms)
        self.message = message
        self.index = index
        """Index of the refused delta in the push, or None if the gateway refused the whole request."""
        self.is_compacted = is_compacted
        """Whether the gateway has compacted the deltas after the cursor. The history is unchanged, but the client must
        read the rows from a snapshot."""

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later.

        This is also true if the gateway refused it because the client's clock is slightly ahead.
        """
        is_ahead = self.code == CLOCK_DRIFT and 0 < self.retry_after_ms <= CLOCK_DRIFT_MS_MAX
        return is_ahead or super().is_transient


def describe_failure(error: ClientError) -> str:
    """Return the error text of a failed request. A gateway's code is in upper case, as in the Deltas API."""
    return f"{error.code.upper()}: {error.message}" if isinstance(error, GatewayRefusedError) else str(error)


class OutboxEntry(Struct, frozen=True, gc=False):
    """A delta in the outbox."""

    number: int
    """Position in the outbox, which is also the order of pushes. 0 until the outbox assigns one."""
    delta_id: bytes
    body: bytes

    def decode(self) -> DeltaJson:
        """Return the fields of the delta."""
        return msgspec.json.decode(self.body, type=DeltaJson)


# --- answers -----------------------------------------------------------------------------------------


class PushResult(Struct, frozen=True, rename="camel"):
    """Acknowledgement of one delta."""

    delta_id: str
    sequence: Number
    duplicate: bool = False


class PushReply(Struct, frozen=True, rename="camel"):
    """Acknowledgement of all deltas of a push."""

    epoch: str
    previous_epochs: tuple[str, ...] = ()
    """Epochs of the earlier histories that the gateway's history continues after a restore. Servers of version 0.1 do
    not send them."""
    results: tuple[PushResult, ...] = ()


class DeltaPage(Struct, Generic[DeltaT], frozen=True, rename="camel"):
    """Deltas after a cursor, in the gateway's order: an answer to a pull, or a message of a live connection."""

    deltas: tuple[DeltaT, ...]
    cursor: Number
    has_more: bool
    epoch: str
    is_compacted: bool = field(default=False, name="snapshot")
    """Whether the gateway has compacted the deltas after the cursor, so that the client must read the snapshot."""


class SnapshotRow(Struct, frozen=True):
    """A row with the state that a merge needs."""

    table: str
    row_id: str
    row: Row


class SnapshotPage(Struct, Generic[RowT, HlcT], frozen=True):
    """A page of the gateway's rows."""

    rows: tuple[RowT, ...]
    cursor: Number
    next: str
    """Token of the next page. Empty on the last page."""
    epoch: str
    horizon: HlcT | None = None
    """Tombstone horizon, if the gateway has dropped deleted rows. Rows that are on no page then count as deleted."""


RowPage = SnapshotPage[SnapshotRow, int]


# --- messages as JSON --------------------------------------------------------------------------------


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


class _ErrorJson(Struct, rename="camel"):
    error: str
    code: str
    index: int | None = None
    retry_after_ms: int = 0
    snapshot: bool = False

    def to_error(self) -> GatewayRefusedError:
        code = self.code.lower()
        return GatewayRefusedError(code, self.error, self.retry_after_ms, self.index, is_compacted=self.snapshot)


class _LiveJson(Struct, rename="camel"):
    type: str
    deltas: tuple[Raw, ...] = ()
    cursor: Number = 0
    epoch: str = ""


# --- decoding ----------------------------------------------------------------------------------------


def decode_push_reply(body: bytes, entries: Sequence[OutboxEntry]) -> PushReply:
    """Decode the answer to a push. Raises ProtocolError if it is malformed or acknowledges different deltas."""
    reply = decode_answer(body, PushReply, GATEWAY)
    if [result.delta_id for result in reply.results] != [entry.delta_id.hex() for entry in entries]:
        raise ProtocolError("the gateway acknowledged different deltas from those that were pushed")
    return reply


def decode_delta_page(body: bytes) -> DeltaPage[RowDelta]:
    """Decode the answer to a pull. Raises ProtocolError."""
    return decode_deltas(decode_answer(body, DeltaPage[Raw], GATEWAY))


def decode_deltas(page: DeltaPage[Raw]) -> DeltaPage[RowDelta]:
    """Decode and check the deltas of a page. Raises ProtocolError."""
    try:
        deltas = tuple(decode_delta(bytes(body)) for body in page.deltas)
    except CanonicalError as error:
        raise ProtocolError(f"the gateway sent an invalid delta: {error}") from error
    return DeltaPage(deltas, page.cursor, page.has_more, page.epoch, page.is_compacted)


def decode_snapshot_page(body: bytes) -> RowPage:
    """Decode a page of a snapshot. Raises ProtocolError."""
    page = decode_answer(body, SnapshotPage[_RowJson, str], GATEWAY)
    try:
        rows = tuple(row.to_snapshot_row() for row in page.rows)
        horizon = None if page.horizon is None else parse_hlc(page.horizon)
    except (CanonicalError, ValueError) as error:
        raise ProtocolError(f"the gateway sent a snapshot with an invalid row: {error}") from error
    return SnapshotPage(rows, page.cursor, page.next, page.epoch, horizon)


def decode_error(status: int, body: bytes, retry_after_ms: int) -> GatewayRefusedError:
    """Decode an error answer.

    If the body is not the gateway's JSON, for example because a proxy answered, derive the code from the status.
    """
    try:
        error = msgspec.json.decode(body, type=_ErrorJson).to_error()
    except DECODE_ERRORS:
        code = TOO_LARGE if status == 413 else get_status_code(status)
        error = GatewayRefusedError(code, f"no gateway answers at this address (HTTP status {status}): check the URL")
    error.retry_after_ms = max(error.retry_after_ms, retry_after_ms)
    return error


def decode_connected(text: str) -> str:
    """Return the epoch in the first message of a live connection. Raises ProtocolError or GatewayRefusedError."""
    return _decode_live_message(text, "connected").epoch


def decode_live(text: str, epoch: str) -> DeltaPage[Raw]:
    """Decode a message of a live connection.

    `epoch` is the connection's epoch. Raises ProtocolError or GatewayRefusedError.
    """
    message = _decode_live_message(text, "deltas", "snapshot")
    is_compacted = message.type == "snapshot"
    return DeltaPage(message.deltas, message.cursor, is_compacted, epoch, is_compacted)


def _decode_live_message(text: str, *kinds: str) -> _LiveJson:
    message = decode_answer(text.encode(), _LiveJson, GATEWAY)
    if message.type == "error":
        raise decode_answer(text.encode(), _ErrorJson, GATEWAY).to_error()
    if message.type not in kinds:
        raise ProtocolError(f"the gateway sent a message of the unexpected type {message.type!r}")
    return message
