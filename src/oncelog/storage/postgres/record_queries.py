"""Queries for records by cursor, and for blocks with their evidence.

No transaction is needed for a page: positions become visible in their order, so whatever is at or below the newest of
one statement is there for the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncelog.core.gaps import count_missing_numbers
from oncelog.core.proof import Block
from oncelog.core.values import LaneHead, Record
from oncelog.storage.leaps import PREVIOUS_EPOCHS_MAX, LaneGaps, decode_leaps, decode_previous_epochs, is_across_leap
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.record_rows import decode_evidence, decode_record
from oncelog.storage.side_state import lane_of_scope
from oncelog.storage.store import Consumer, EncodeViews, Evidence, Page, Query, RecordView, RecordViewPage

_PART_VIEWS: Final = 100
_FIRST_FETCH_ROWS: Final = 64

__all__ = [
    "decode_evidence",
    "decode_record",
    "list_consumers",
    "load_block",
    "load_evidence",
    "load_heads",
    "read_page",
    "read_views",
]


def is_storable(name: str) -> bool:
    """PostgreSQL takes no text with a U+0000. Nothing has such a name: who asks for it gets nothing, not an error."""
    return "\0" not in name


async def read_page(connection: Any, query: Query, lanes: int, epoch: str) -> Page:
    """A page."""
    lane = query.lane if query.stream is None else lane_of_scope(query.stream, lanes)
    newest = await _load_newest(connection, query, lane)
    query = query.clamp(newest, epoch)
    upto = newest if query.upto is None else query.upto
    source = _PageSource(query, lane, upto, None)
    rows, is_cut = await _fetch_page_rows(connection, source, query)
    following = rows[-1][source.number_column] if is_cut else upto
    return Page([decode_record(row) for row in rows], max(following, query.after), upto, is_cut, newest)


async def read_views(connection: Any, query: Query, policy: str, encode: EncodeViews, epoch: str) -> RecordViewPage:
    """The same in brief, of one policy."""
    newest = await _load_newest(connection, query, query.lane)
    query = query.clamp(newest, epoch)
    upto = newest if query.upto is None else query.upto
    rows, is_cut = await _fetch_page_rows(connection, _PageSource(query, query.lane, upto, policy), query)
    parts = [rows[start : start + _PART_VIEWS] for start in range(0, len(rows), _PART_VIEWS)]
    encoded = [encode([_decode_view(row) for row in part]) for part in parts]
    following = rows[-1][0] if is_cut else upto
    return RecordViewPage(encoded, len(rows), max(following, query.after), upto, is_cut, newest)


def _decode_view(row: Any) -> RecordView:
    *columns, body = row
    return (*columns, None if body is None else body.decode())


class _PageSource:
    """Where the rows of a page come from."""

    def __init__(self, query: Query, lane: int, upto: int, policy: str | None) -> None:
        self._query = query
        self._lane = lane
        self._upto = upto
        self._policy = policy
        self._partitions = tuple(filter(is_storable, query.partitions))
        self._is_empty = len(query.partitions) > 0 == len(self._partitions) or not is_storable(query.stream or "")
        self.number_column = 0 if policy is not None else 1 if query.stream is None else 2
        """The column of a row's place in the order that is read."""

    async def fetch_rows(self, connection: Any, after: int, limit: int) -> tuple[Sequence[Any], int | None]:
        """The next of them, and after what to go on; None when there are no more."""
        query, policy = self._query, self._policy
        bounds = (after, self._upto, limit)
        last = () if policy is None else (policy,)
        if self._is_empty:
            return [], None
        if len(self._partitions) > 1:
            statement = "records_at" if policy is None else "briefs_at"
            positions = await self._fetch_positions(connection, after, limit)
            rows = await connection.fetch(SQL[statement], self._lane, positions, *last)
            return rows, positions[-1] if len(positions) == limit else None
        if query.stream is not None:
            rows = await connection.fetch(SQL["stream_page"], self._lane, query.stream, *bounds)
        elif self._partitions:
            statement = "partition_page" if policy is None else "brief_partition_page"
            rows = await connection.fetch(SQL[statement], self._lane, self._partitions[0], *bounds, *last)
        else:
            statement = "lane_page" if policy is None else "brief_lane_page"
            rows = await connection.fetch(SQL[statement], self._lane, *bounds, *last)
        return rows, rows[-1][self.number_column] if len(rows) == limit else None

    async def _fetch_positions(self, connection: Any, after: int, limit: int) -> list[int]:
        """The first positions of any of the partitions. What has been found bounds what is looked for in the next."""
        found: list[int] = []
        upto = self._upto
        for partition in self._partitions:
            rows = await connection.fetch(SQL["partition_positions"], self._lane, partition, after, upto, limit)
            found = sorted({*found, *(row[0] for row in rows)})[:limit]
            if len(found) == limit:
                upto = found[-1]
        return found


async def _fetch_page_rows(connection: Any, source: _PageSource, query: Query) -> tuple[list[Any], bool]:
    """The rows of a page, and whether it was cut: by the limit, or early by the bytes of its bodies.

    Bodies can be long, and a server sends all that it is asked for: so it is asked for few at first, and for as many
    as will fit by the length of those that have come.
    """
    page: list[Any] = []
    size = 0
    after: int | None = query.after
    while after is not None:
        rows, after = await source.fetch_rows(connection, after, _compute_fetch_limit(len(page), size, query))
        for row in rows:
            size += len(row[-1] or b"")
            if len(page) == query.limit or (page and size > query.bytes_max):
                return page, True
            page.append(row)
    return page, False


def _compute_fetch_limit(count: int, size: int, query: Query) -> int:
    """One more than there is room for tells whether there is more."""
    rows_left = query.limit - count + 1
    if count:
        bytes_left = query.bytes_max - size
        return max(1, min(rows_left, 1 + bytes_left * count // max(1, size)))
    return min(rows_left, _FIRST_FETCH_ROWS)


async def list_internal_records(connection: Any, after: Mapping[int, int], limit: int) -> list[Record]:
    """As `Store` says."""
    lanes = [(lane, after.get(lane, 0), head.position) for lane, head in (await load_heads(connection)).items()]
    if not lanes:
        return []
    rows = await connection.fetch(SQL["internal_page"], *map(list, zip(*lanes, strict=True)), limit)
    return [decode_record(row) for row in rows]


async def count_audit_records(connection: Any) -> int:
    """Count the audit records."""
    return int(await connection.fetchval(SQL["count_audit"]))


async def find_sequence_before(connection: Any, stream: str, upto: int, count: int, lanes: int) -> int:
    """As `Store` says."""
    if not is_storable(stream):
        return 0
    found = await connection.fetchval(SQL["sequence_before"], lane_of_scope(stream, lanes), stream, upto, count - 1)
    return found or 0


async def find_sequence_after(connection: Any, stream: str, after: int, count: int, lanes: int) -> int:
    """As `Store` says."""
    if not is_storable(stream):
        return after
    found = await connection.fetchval(SQL["sequence_after"], lane_of_scope(stream, lanes), stream, after, count)
    return after if found is None else int(found)


async def load_heads(connection: Any) -> dict[int, LaneHead]:
    """The heads of all lanes that have been written to."""
    return {row[0]: LaneHead(*tuple(row)[1:]) for row in await connection.fetch(SQL["lanes"])}


async def load_block(connection: Any, lane: int, height: int) -> tuple[Block, list[Evidence]]:
    """A block with its records."""
    row = await connection.fetchrow(SQL["block"], lane, height)
    if row is None:
        raise LookupError(f"lane {lane} has no block of height {height}")
    found = Block(*row)
    return found, await load_evidence(
        connection, lane, found.first_position - 1, found.first_position + found.count - 1
    )


async def load_evidence(connection: Any, lane: int, after: int, upto: int) -> list[Evidence]:
    """Records of a lane with all that their hashes are made of."""
    return [decode_evidence(row) for row in await connection.fetch(SQL["evidence"], lane, after, upto)]


async def list_consumers(connection: Any) -> list[Consumer]:
    """All of them, with how far each is behind."""
    passed_over = await load_leaps(connection)
    positions = (await load_lane_gaps(connection, passed_over, 0)).positions
    found = []
    for lane, scope, name, cursor, newest in await connection.fetch(SQL["consumers"]):
        lag = newest - cursor
        if not scope:
            lag -= count_missing_numbers(positions, cursor, newest)
        elif is_across_leap(passed_over, cursor, newest):
            lag = await connection.fetchval(SQL["count_stream_records"], lane, scope, cursor)
        found.append(Consumer(scope, name, cursor, lag))
    return found


async def load_leaps(connection: Any) -> tuple[int, ...]:
    """Return the numbers above which the log continued after restores."""
    return decode_leaps(await connection.fetchval(SQL["leaps"]))


async def list_previous_epochs(connection: Any) -> tuple[str, ...]:
    """Return the epochs that the newest restore records name as ended."""
    positions = [above + 1 for above in (await load_leaps(connection))[-PREVIOUS_EPOCHS_MAX:]]
    rows = await connection.fetch(SQL["records_at"], 0, positions)
    return decode_previous_epochs([decode_record(row).body for row in rows])


async def load_gaps(connection: Any) -> dict[int, LaneGaps]:
    """Return what leaps have passed over in every lane; nothing in a log without one."""
    passed_over = await load_leaps(connection)
    if not passed_over:
        return {}
    return {lane: await load_lane_gaps(connection, passed_over, lane) for lane in await load_heads(connection)}


async def load_lane_gaps(connection: Any, leap_numbers: Sequence[int], lane: int) -> LaneGaps:
    """Return what leaps have passed over in one lane."""
    rows = [await connection.fetchrow(SQL["block_before_leap"], lane, above) for above in leap_numbers]
    return LaneGaps.from_leaps(leap_numbers, [(0, 0) if row is None else (row[0], row[1]) for row in rows])


async def _load_newest(connection: Any, query: Query, lane: int) -> int:
    if query.stream is None:
        newest = await connection.fetchval(SQL["lane_head"], lane)
    elif not is_storable(query.stream):
        newest = 0
    else:
        newest = await connection.fetchval(SQL["stream_head"], lane, query.stream)
    return newest or 0
