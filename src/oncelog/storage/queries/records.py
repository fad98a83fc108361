"""Queries on records, blocks, lane heads and consumers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog.core.internal_records import count_missing_numbers
from oncelog.core.proof import Block
from oncelog.core.values import LaneHead, Record
from oncelog.storage.leaps import PREVIOUS_EPOCHS_MAX, LaneGaps, decode_leaps, decode_previous_epochs, is_across_leap
from oncelog.storage.queries.record_pages import read_rows
from oncelog.storage.queries.statement import QuerySteps, Statement
from oncelog.storage.record_rows import decode_evidence, decode_record
from oncelog.storage.side_state import lane_of_scope
from oncelog.storage.store import Consumer, EncodeViews, Evidence, Page, Query, RecordView, RecordViewPage, ScopedBlock

_HEAD_COLUMNS: Final = len(LaneHead.__struct_fields__)
_PART_VIEWS: Final = 100
"""Records that are encoded at a time (`RecordViewPage.encoded`)."""

Rows = Sequence[Sequence[Any]]


def _get_value(rows: Rows, default: Any = None) -> Any:
    """Return the value of a statement that gives one row with one column at most."""
    return rows[0][0] if rows and rows[0][0] is not None else default


# --- pages of records


def read_page(query: Query, lanes: int, epoch: str) -> QuerySteps[Page]:
    """As `Store.read`.

    A page needs no transaction: positions become visible in their order, so records up to the newest position of one
    statement are visible to the next.
    """
    lane = query.lane if query.stream is None else lane_of_scope(query.stream, lanes)
    newest = yield from _load_newest(query.stream, lane)
    query = query.clamp(newest, epoch)
    upto = newest if query.upto is None else query.upto
    records: list[Record] = []
    cut_at = yield from read_rows(query, lane, upto, None, lambda rows: records.extend(map(decode_record, rows)))
    return Page(records, max(upto if cut_at is None else cut_at, query.after), upto, cut_at is not None, newest)


def read_views(
    query: Query, policy: str, encode: EncodeViews, epoch: str, fetch_rows_max: int
) -> QuerySteps[RecordViewPage]:
    """As `Store.read_views`, with at most `fetch_rows_max` rows in memory at a time."""
    newest = yield from _load_newest(None, query.lane)
    query = query.clamp(newest, epoch)
    upto = newest if query.upto is None else query.upto
    encoded: list[bytes] = []
    count = 0

    def encode_rows(rows: Rows) -> None:
        nonlocal count
        count += len(rows)
        parts = (rows[start : start + _PART_VIEWS] for start in range(0, len(rows), _PART_VIEWS))
        encoded.extend(encode(_decode_views(part)) for part in parts)

    cut_at = yield from read_rows(query, query.lane, upto, policy, encode_rows, fetch_rows_max)
    following = max(upto if cut_at is None else cut_at, query.after)
    return RecordViewPage(encoded, count, following, upto, cut_at is not None, newest)


def _decode_views(rows: Sequence[Any]) -> Sequence[RecordView]:
    """Return rows with their bodies as text. Rows of SQLite, which are tuples, have that already."""
    if type(rows[0]) is tuple:
        return rows
    return [(*columns, None if body is None else body.decode()) for *columns, body in rows]


def _load_newest(stream: str | None, lane: int) -> QuerySteps[int]:
    """Return the newest position of a lane, or the newest sequence of a stream in it."""
    if stream is None:
        rows = yield Statement("lane_head", lane)
    else:
        rows = yield Statement("stream_head", lane, stream)
    return _get_value(rows, 0)  # type: ignore[no-any-return]


# --- records, blocks and heads


def find_record(lane: int, position: int) -> QuerySteps[Record | None]:
    """Return the record at a position, or None."""
    rows = yield Statement("records_at", lane, [position])
    return decode_record(rows[0]) if rows else None


def list_internal_records(after: Mapping[int, int], limit: int) -> QuerySteps[list[Record]]:
    """As `Store.internal_records`."""
    heads = yield from load_heads()
    lanes = list(heads)
    positions = [after.get(lane, 0) for lane in lanes]
    newest = [head.position for head in heads.values()]
    rows = yield Statement("internal_page", lanes, positions, newest, limit)
    return [decode_record(row) for row in rows]


def count_audit_records() -> QuerySteps[int]:
    """Count the audit records."""
    return int(_get_value((yield Statement("count_audit"))))


def count_erasures() -> QuerySteps[int]:
    """As `Store.erasures`."""
    return int(_get_value((yield Statement("erasures"))))


def find_sequence_before(stream: str, upto: int, count: int, lanes: int) -> QuerySteps[int]:
    """As `Store.sequence_before`."""
    rows = yield Statement("sequence_before", lane_of_scope(stream, lanes), stream, upto, count - 1)
    return int(_get_value(rows, 0))


def find_sequence_after(stream: str, after: int, count: int, lanes: int) -> QuerySteps[int]:
    """As `Store.sequence_after`."""
    rows = yield Statement("sequence_after", lane_of_scope(stream, lanes), stream, after, count)
    return int(_get_value(rows, after))


def load_heads() -> QuerySteps[dict[int, LaneHead]]:
    """Return the heads of all lanes that have been written to."""
    rows = yield Statement("lanes")
    return {lane: LaneHead(*head[:_HEAD_COLUMNS]) for lane, *head in rows}


def find_block(lane: int, height: int) -> QuerySteps[Block | None]:
    """Return the block of a height, or None."""
    rows = yield Statement("block", lane, height)
    return Block(*rows[0]) if rows else None


def load_block(lane: int, height: int) -> QuerySteps[tuple[Block, list[Evidence]]]:
    """As `Store.block`."""
    block = yield from find_block(lane, height)
    if block is None:
        raise LookupError(f"lane {lane} has no block of height {height}")
    after = block.first_position - 1
    evidence = yield from load_evidence(lane, after, after + block.count)
    return block, evidence


def load_evidence(lane: int, after: int, upto: int) -> QuerySteps[list[Evidence]]:
    """Return records of a lane with what their hashes cover."""
    rows = yield Statement("evidence", lane, after, upto)
    return [decode_evidence(row) for row in rows]


def list_blocks(lane: int, after: int, limit: int, scope: str) -> QuerySteps[list[ScopedBlock]]:
    """As `Store.blocks`."""
    rows = yield Statement("blocks", lane, after, limit)
    blocks = [Block(*row) for row in rows]
    if not blocks:
        return []
    last = blocks[-1]
    bounds = (blocks[0].first_position - 1, last.first_position + last.count - 1)
    rows = yield Statement("scoped_positions", lane, *bounds, scope)
    return _group_positions(blocks, [position for (position,) in rows])


def _group_positions(blocks: Sequence[Block], positions: Sequence[int]) -> list[ScopedBlock]:
    """Return each block with the positions that are in it. Both arguments are in order."""
    found, place = [], 0
    for block in blocks:
        first = place
        while place < len(positions) and positions[place] < block.first_position + block.count:
            place += 1
        found.append(ScopedBlock(block, tuple(positions[first:place])))
    return found


# --- consumers and restores


def list_consumers() -> QuerySteps[list[Consumer]]:
    """As `Store.consumers`."""
    leaps = yield from load_leaps()
    gaps = yield from _load_lane_gaps(leaps, 0)
    rows = yield Statement("consumers")
    consumers = []
    for lane, scope, name, cursor, newest in rows:
        lag = newest - cursor
        if not scope:
            lag -= count_missing_numbers(gaps.positions, cursor, newest)
        elif is_across_leap(leaps, cursor, newest):
            lag = _get_value((yield Statement("count_stream_records", lane, scope, cursor)))
        consumers.append(Consumer(scope, name, cursor, lag))
    return consumers


def load_leaps() -> QuerySteps[tuple[int, ...]]:
    """Return the numbers above which the log continued after restores."""
    return decode_leaps(_get_value((yield Statement("leaps"))))


def list_previous_epochs() -> QuerySteps[tuple[str, ...]]:
    """Return the epochs that the newest restore records name as ended."""
    leaps = yield from load_leaps()
    rows = yield Statement("records_at", 0, [above + 1 for above in leaps[-PREVIOUS_EPOCHS_MAX:]])
    return decode_previous_epochs([decode_record(row).body for row in rows])


def load_gaps() -> QuerySteps[dict[int, LaneGaps]]:
    """Return the numbers that leaps passed over in every lane; nothing in a log without a leap."""
    leaps = yield from load_leaps()
    heads = (yield from load_heads()) if leaps else {}
    gaps = {}
    for lane in heads:
        gaps[lane] = yield from _load_lane_gaps(leaps, lane)
    return gaps


def _load_lane_gaps(leaps: Sequence[int], lane: int) -> QuerySteps[LaneGaps]:
    """Return the numbers that leaps passed over in one lane."""
    ends = []
    for above in leaps:
        rows = yield Statement("block_before_leap", lane, above)
        ends.append((rows[0][0], rows[0][1]) if rows else (0, 0))
    return LaneGaps.from_leaps(leaps, ends)
