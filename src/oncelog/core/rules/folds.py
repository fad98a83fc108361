"""Folds: digests of rows, committed before compaction drops the bodies of the deltas that made them (CO-44).

A fold record is an internal record (core/internal_records.py) of the gateway's stream. It names the deltas whose
bodies are dropped, and every row that they changed with a digest of its state. The digest is computed in the decision,
so that it is that of the rows after all deltas up to a sequence. `verify` compares rows with it that no later delta
has changed.
"""

from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.batch_state import BatchState
from oncelog.core.identity import compute_lane
from oncelog.core.internal_records import check_internal_record
from oncelog.core.merge import Row
from oncelog.core.policy import FOLD_POLICY
from oncelog.core.values import Applied, FoldRows, Record

FOLD_ACTOR: Final = "system:compaction"
_DIGEST_DIGITS: Final = 32


class FoldedRow(Struct, frozen=True, array_like=True, gc=False):
    """A row at a fold."""

    table: str
    row_id: str
    digest: str
    """Empty for a row without state."""
    deleted_hlc: str | None = None
    """The clock of its newest DELETE, if it is a tombstone."""


class Fold(Struct, frozen=True):
    """The body of a fold record."""

    scope: str
    sequence: int
    """The newest delta of the stream that the rows contain."""
    deltas: tuple[tuple[int, int], ...]
    """The sequences whose bodies are dropped, as ranges."""
    rows: tuple[FoldedRow, ...]


_FOLD_DECODER: Final = msgspec.json.Decoder(Fold)


def row_digest(row: Row | None) -> str:
    """Return the digest of a row's columns and stamps; "" for a row without state."""
    if row is None:
        return ""
    state = (sorted(row.columns.items()), row.written, row.deleted)
    return sha256(msgspec.msgpack.encode(state)).hexdigest()[:_DIGEST_DIGITS]


def fold_rows(item: FoldRows, state: BatchState) -> Applied:
    """Append the fold record of the named rows, as they are after the items before this one."""
    lane = state.get_stream_lane(item.scope)
    rows = tuple(_fold_row(table, row_id, state.rows.get((item.scope, table, row_id))) for table, row_id in item.rows)
    body = msgspec.json.encode(Fold(item.scope, state.streams.get(item.scope) or 0, item.deltas, rows))
    lane.advance_position()
    state.append_internal(lane, FOLD_POLICY, FOLD_ACTOR, body, scope=item.scope)
    return Applied(changed=True, count=len(rows))


def _fold_row(table: str, row_id: str, row: Row | None) -> FoldedRow:
    deleted_hlc = None if row is None or row.exists else str(row.deleted[0])
    return FoldedRow(table, row_id, row_digest(row), deleted_hlc)


def decode_fold(record: Record) -> Fold:
    """Return the content of a fold record. Raises MsgspecError."""
    return _FOLD_DECODER.decode(record.body)


def check_fold_record(record: Record, lanes: int) -> str | None:
    """Describe the fault of a fold record; None without a fault."""
    if record.actor != FOLD_ACTOR:
        return f"a fold record has the actor {record.actor!r}, not {FOLD_ACTOR!r}"
    if compute_lane(record.scope, lanes) != record.lane:
        return f"a fold record of {record.scope!r} belongs in another lane"
    if record.key:
        return "a fold record has a key"
    return check_internal_record(record)
