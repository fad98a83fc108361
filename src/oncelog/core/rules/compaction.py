"""Compaction of a gateway: dropping tombstones, and folding rows before the bodies of their deltas are dropped.

Tombstones are deleted rows that the gateway keeps so that older deltas do not restore them. When compaction drops old
tombstones, the gateway stores one clock reading, the tombstone horizon, above the clocks of all dropped DELETEs. A row
without state is treated as deleted at the horizon, by a DELETE that every replica can merge (`build_horizon_delete`). A
delta that loses to this DELETE is committed with the DELETE as its body. Readers merge the DELETE, so all replicas
converge to the gateway's rows, in any order of arrival. The gateway also stores a new tombstone for the row: otherwise
a client whose snapshot lacks the row would restore the row with its local delta.

Folds are digests of rows, committed before compaction drops the bodies of the deltas that produced the rows (CO-44). A
fold record is an internal record (core/internal_records.py) for the gateway's stream. It lists the deltas whose bodies
are dropped, and a digest of every row that they changed. `plan` computes the digests as part of the commit, so
they describe the rows after exactly the deltas that precede the fold. `verify` compares them with the rows that no
later delta has changed.
"""

from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.batch_state import BatchState
from oncelog.core.canonical import canonical, utf16_sort_key
from oncelog.core.hlc import HLC_MAX, format_hlc
from oncelog.core.identity import compute_lane, delta_id
from oncelog.core.internal_records import check_internal_record, find_first_fault
from oncelog.core.merge import Op, Row, RowDelta, Stamp
from oncelog.core.policy import FOLD_POLICY
from oncelog.core.rules.audit import APPLICATION_ACTOR, COMPACT, append_act
from oncelog.core.rules.quotas import count_in_stream
from oncelog.core.stored_bytes import row_bytes
from oncelog.core.values import Applied, DropTombstones, FoldRows, Record, RecordAct, Tombstone

HORIZON_CLIENT: Final = "oncelog.horizon"
"""Client of a DELETE at the horizon. Among deltas with the same clock, it is ordered like any other client."""
_HORIZON_SORT_KEY: Final = utf16_sort_key(HORIZON_CLIENT)


def build_horizon_delete(horizon: int, table: str, row_id: str) -> RowDelta:
    """Build the DELETE of a row at a tombstone horizon."""
    identity = delta_id(HORIZON_CLIENT, format_hlc(horizon), table, row_id, [])
    return RowDelta(Op.DELETE, table, row_id, HORIZON_CLIENT, horizon, (), identity)


def is_horizon_delete(stamp: Stamp, table: str, row_id: str) -> bool:
    """Return whether `build_horizon_delete` would build a DELETE of the row with this stamp."""
    # A client with this name may have sent a DELETE with columns, which is treated as an ordinary delta.
    return stamp[1] == _HORIZON_SORT_KEY and stamp == build_horizon_delete(stamp[0], table, row_id).stamp


def build_row_without_state(horizon: int | None, table: str, row_id: str) -> Row:
    """Return the row into which a delta is merged if the gateway has no state for the row."""
    return Row() if horizon is None else Row(deleted=build_horizon_delete(horizon, table, row_id).stamp)


def find_winning_horizon_delete(row: Row, delta: RowDelta) -> RowDelta | None:
    """Return the DELETE at a horizon that outranks the delta, or None if the delta wins or loses to a different
    delta."""
    deleted, table, row_id = row.deleted, delta.table, delta.row_id
    if deleted[1] != _HORIZON_SORT_KEY or delta.stamp > deleted or not is_horizon_delete(deleted, table, row_id):
        return None
    return build_horizon_delete(deleted[0], table, row_id)


def list_delete_ids(table: str, row_id: str, row: Row) -> list[bytes]:
    """Return the ids of the deltas that created the tombstone. The newest of their records determines its age.

    For a DELETE at a horizon, this record belongs to the delta that lost to it.
    """
    ids = [row.deleted[2]]
    return [*ids, row.written[2]] if is_horizon_delete(row.deleted, table, row_id) else ids


def drop_tombstones(item: DropTombstones, state: BatchState) -> Applied:
    """Drop tombstones that are old enough and that all listed consumers have read, and raise the horizon above them."""
    lane = state.get_stream_lane(item.scope)
    cursors = [state.consumers.get((item.scope, name)) for name in item.consumers]
    # A removed consumer does not hold back the compaction.
    newest = state.streams.get(item.scope) or 0
    last_read = min((cursor for cursor in cursors if cursor is not None), default=newest)
    oldest_ms = lane.log_time_ms - item.age_ms
    dropped = [
        tombstone
        for tombstone in item.tombstones
        if tombstone.sequence <= last_read
        and tombstone.log_time_ms <= oldest_ms
        and _is_newest(item.scope, tombstone, state)
    ]
    if not dropped:
        return Applied(changed=False)
    for tombstone in dropped:
        identity = (item.scope, tombstone.table, tombstone.row_id)
        if state.tenants is not None:
            count_in_stream(item.scope, state, size=-row_bytes(identity, state.rows.get(identity)))
        state.rows.put(identity, None)
    state.horizons.put(item.scope, max(state.horizons.get(item.scope) or 0, *map(_compute_horizon, dropped)))
    act = RecordAct(
        act=COMPACT,
        actor=item.actor or APPLICATION_ACTOR,
        scope=item.scope,
        details=canonical({"tombstones": len(dropped)}),
    )
    append_act(act, lane, state)
    return Applied(changed=True, count=len(dropped))


def _compute_horizon(tombstone: Tombstone) -> int:
    """Return the lowest horizon that can replace a tombstone. For a DELETE at a horizon, this is the horizon itself."""
    hlc = tombstone.deleted[0]
    return hlc if is_horizon_delete(tombstone.deleted, tombstone.table, tombstone.row_id) else hlc + 1


def _is_newest(scope: str, tombstone: Tombstone, state: BatchState) -> bool:
    """Return whether a horizon can replace a tombstone: no other delta has changed its row."""
    row = state.rows.get((scope, tombstone.table, tombstone.row_id))
    return (
        row is not None
        and not row.exists
        and row.deleted == tombstone.deleted
        and tombstone.deleted[0] < HLC_MAX  # leaves room for a horizon above it
    )


# --- folds ---------------------------------------------------------------------------------------------

FOLD_ACTOR: Final = "system:compaction"
_DIGEST_DIGITS: Final = 32


class FoldedRow(Struct, frozen=True, array_like=True, gc=False):
    """A row's state in a fold."""

    table: str
    row_id: str
    digest: str
    """Empty if the row has no state."""
    deleted_hlc: str | None = None
    """Clock of the newest DELETE, if the row is a tombstone."""


class Fold(Struct, frozen=True):
    """Body of a fold record."""

    scope: str
    sequence: int
    """Sequence of the newest delta that is merged into the rows."""
    deltas: tuple[tuple[int, int], ...]
    """Sequences whose bodies compaction drops, as inclusive ranges."""
    rows: tuple[FoldedRow, ...]


def row_digest(row: Row | None) -> str:
    """Return the digest of a row's columns and stamps, or "" for a row without state."""
    if row is None:
        return ""
    state = (sorted(row.columns.items()), row.written, row.deleted)
    return sha256(msgspec.msgpack.encode(state)).hexdigest()[:_DIGEST_DIGITS]


def fold_rows(item: FoldRows, state: BatchState) -> Applied:
    """Append a fold record for the listed rows, in their state after the previous items of the batch."""
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
    return msgspec.json.decode(record.body, type=Fold)


def check_fold_record(record: Record, lanes: int) -> str | None:
    """Describe the fault of a fold record, or return None for a valid one."""
    is_in_other_lane = compute_lane(record.scope, lanes) != record.lane
    fault = find_first_fault(
        (record.actor != FOLD_ACTOR, f"a fold record has the actor {record.actor!r}, not {FOLD_ACTOR!r}"),
        (is_in_other_lane, f"a fold record of {record.scope!r} belongs in another lane"),
        (record.key != b"", "a fold record has a key"),
    )
    return fault or check_internal_record(record)
