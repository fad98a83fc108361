"""Queries on records, blocks, lane heads and consumers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog.core.internal_records import Gap, count_missing_numbers
from oncelog.core.proof import Block, Evidence
from oncelog.core.values import LaneHead, Record
from oncelog.storage.metadata import PREVIOUS_EPOCHS_MAX, LaneGaps, decode_leaps, decode_previous_epochs
from oncelog.storage.queries.statement import QuerySteps, Statement
from oncelog.storage.record_rows import decode_evidence, decode_record
from oncelog.storage.store import Consumer

_HEAD_COLUMNS: Final = len(LaneHead.__struct_fields__)
Rows = Sequence[Sequence[Any]]


def get_value(rows: Rows, default: Any = None) -> Any:
    """Return the value that a statement with at most one row and one column produced."""
    return rows[0][0] if rows and rows[0][0] is not None else default


# --- records, blocks and heads


def find_record(lane: int, position: int) -> QuerySteps[Record | None]:
    """Return the record at a position, or None."""
    records = yield from load_records(lane, [position])
    return records[0] if records else None


def load_records(lane: int, positions: Sequence[int]) -> QuerySteps[list[Record]]:
    """Return the records at the given positions, in order."""
    rows = yield Statement("records_at", lane, list(positions))
    return [decode_record(row) for row in rows]


def list_internal_records(after: Mapping[int, int], limit: int) -> QuerySteps[list[Record]]:
    """See `Store.internal_records`."""
    heads = yield from load_heads()
    lanes = list(heads)
    positions = [after.get(lane, 0) for lane in lanes]
    newest = [head.position for head in heads.values()]
    rows = yield Statement("internal_page", lanes, positions, newest, limit)
    return [decode_record(row) for row in rows]


def count_audit_records() -> QuerySteps[int]:
    """Count the audit records."""
    return int(get_value((yield Statement("count_audit"))))


def count_erasures() -> QuerySteps[int]:
    """See `Store.erasures`."""
    return int(get_value((yield Statement("erasures"))))


def load_heads() -> QuerySteps[dict[int, LaneHead]]:
    """Return the heads of all lanes that have records."""
    rows = yield Statement("lanes")
    return {lane: LaneHead(*head[:_HEAD_COLUMNS]) for lane, *head in rows}


def find_block(lane: int, height: int) -> QuerySteps[Block | None]:
    """Return the block at a height, or None."""
    rows = yield Statement("block", lane, height)
    return Block(*rows[0]) if rows else None


def load_block(lane: int, height: int) -> QuerySteps[tuple[Block, list[Evidence]]]:
    """See `Store.block`."""
    block = yield from find_block(lane, height)
    if block is None:
        raise LookupError(f"lane {lane} has no block at height {height}")
    after = block.first_position - 1
    evidence = yield from load_evidence(lane, after, after + block.count)
    return block, evidence


def load_evidence(lane: int, after: int, upto: int) -> QuerySteps[list[Evidence]]:
    """Return records of a lane with everything that their hashes cover."""
    rows = yield Statement("evidence", lane, after, upto)
    return [decode_evidence(row) for row in rows]


# --- consumers and restores


def list_consumers() -> QuerySteps[list[Consumer]]:
    """See `Store.consumers`."""
    leaps = yield from load_leaps()
    gaps = yield from _load_lane_gaps(leaps, 0)
    rows = yield Statement("consumers")
    consumers = []
    for lane, scope, name, cursor, newest in rows:
        lag = newest - cursor
        if not scope:
            lag -= count_missing_numbers(gaps.positions, cursor, newest)
        elif any(cursor <= above < newest for above in leaps):
            lag = get_value((yield Statement("count_stream_records", lane, scope, cursor)))
        consumers.append(Consumer(scope, name, cursor, lag))
    return consumers


def load_leaps() -> QuerySteps[tuple[int, ...]]:
    """Return the numbers above which numbering resumed after restores."""
    return decode_leaps(get_value((yield Statement("leaps"))))


def load_previous_epochs() -> QuerySteps[tuple[str, ...]]:
    """See `Store.previous_epochs`."""
    leaps = yield from load_leaps()
    restores = yield from load_records(0, [above + 1 for above in leaps[-PREVIOUS_EPOCHS_MAX:]])
    return decode_previous_epochs([record.body for record in restores])


def load_gaps() -> QuerySteps[dict[int, LaneGaps]]:
    """Return the numbers that leaps skipped, by lane. The result is empty for a log without leaps."""
    leaps = yield from load_leaps()
    heads = (yield from load_heads()) if leaps else {}
    gaps = {}
    for lane in heads:
        gaps[lane] = yield from _load_lane_gaps(leaps, lane)
    return gaps


def _load_lane_gaps(leaps: Sequence[int], lane: int) -> QuerySteps[LaneGaps]:
    """Return the numbers that leaps skipped in one lane."""
    positions: list[Gap] = []
    heights: list[Gap] = []
    for above in leaps:
        rows = yield Statement("block_before_leap", lane, above)
        position, height = rows[0] if rows else (0, 0)
        positions.append((position, above + 1))
        heights.append((height, above + 1))
    return LaneGaps(tuple(positions), tuple(heights))
