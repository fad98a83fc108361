"""Rows of a page of records, fetched with several statements until the page is full."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from oncelog.storage.queries.records import get_value
from oncelog.storage.queries.statement import QuerySteps, Statement
from oncelog.storage.store import Query, count_fitting

_FIRST_FETCH_ROWS: Final = 64

Rows = Sequence[Any]


def read_rows(
    query: Query,
    lane: int,
    epoch: str,
    policy: str | None,
    take: Callable[[Rows], object],
    fetch_rows_max: int = 10**6,
) -> QuerySteps[tuple[int, int, bool, int]]:
    """Pass the rows of a page to `take`, in parts. `policy` selects views of its records (`RecordView`).

    Bodies can be long, and a statement reads all rows that it selects. The first statement therefore selects few rows,
    and each later one selects as many as will probably fit, judging by the average length so far.

    Returns the remaining fields of `Page`: `next`, `upto`, `has_more` and `newest`.
    """
    stream = query.stream
    heads = yield Statement("lane_head", lane) if stream is None else Statement("stream_head", lane, stream)
    newest = int(get_value(heads, 0))
    query, upto = query.clamp(newest, epoch)
    source = _RowSource(query, lane, upto, policy)
    count = size = 0
    last: int = query.after
    following: int | None = query.after
    while following is not None:
        limit = min(_compute_fetch_limit(count, size, query), fetch_rows_max)
        rows, following = yield from source.fetch(following, limit)
        sizes = [len(row[-1]) if type(row[-1]) is bytes else _measure_text(row[-1]) for row in rows]
        end = count_fitting(sizes, query.limit - count, query.bytes_max - size, is_first=not count)
        if end:
            take(rows[:end])
            last = rows[end - 1][source.number_column]
        if end < len(rows):
            return last, upto, True, newest
        count += end
        size += sum(sizes)
    return max(upto, query.after), upto, False, newest


class _RowSource:
    """Fetches the rows of a page in order."""

    def __init__(self, query: Query, lane: int, upto: int, policy: str | None) -> None:
        self._query = query
        self._lane = lane
        self._upto = upto
        self._prefix = "" if policy is None else "brief_"
        self._policy = () if policy is None else (policy,)
        self._positions: list[int] = []
        """Next positions in several partitions."""
        self._has_more_positions = True
        """Whether there may be positions that have not been loaded yet."""
        self.number_column = 0 if policy is not None else 1 if query.stream is None else 2
        """Column with the number by which the query orders the rows."""

    def fetch(self, after: int, limit: int) -> QuerySteps[tuple[Rows, int | None]]:
        """Return at most `limit` rows, and the number after which to continue (None if there are no more rows)."""
        query = self._query
        if len(query.partitions) > 1:
            return (yield from self._fetch_of_partitions(after, limit))
        bounds = (after, self._upto, limit, *self._policy)
        if query.stream is not None:
            rows = yield Statement("stream_page", self._lane, query.stream, *bounds)
        elif query.partitions:
            rows = yield Statement(f"{self._prefix}partition_page", self._lane, query.partitions[0], *bounds)
        else:
            rows = yield Statement(f"{self._prefix}lane_page", self._lane, *bounds)
        return rows, rows[-1][self.number_column] if len(rows) == limit else None

    def _fetch_of_partitions(self, after: int, limit: int) -> QuerySteps[tuple[Rows, int | None]]:
        """Return the rows of records that are in any of the partitions. Their positions are loaded for a whole page.

        Records of other policies have positions too, so a page of views may need more positions than it has rows.
        """
        if not self._positions:
            page_rows = self._query.limit + 1
            self._positions = yield from self._load_positions(after, page_rows)
            self._has_more_positions = len(self._positions) == page_rows
        positions, self._positions = self._positions[:limit], self._positions[limit:]
        statement = "records_at" if not self._policy else "briefs_at"
        rows = yield Statement(statement, self._lane, positions, *self._policy)
        return rows, positions[-1] if self._positions or self._has_more_positions else None

    def _load_positions(self, after: int, limit: int) -> QuerySteps[list[int]]:
        """Return the first positions in any of the partitions.

        Once `limit` positions are found, the search in the next partition ends at the highest of them.
        """
        found: list[int] = []
        upto = self._upto
        for partition in self._query.partitions:
            rows = yield Statement("partition_positions", self._lane, partition, after, upto, limit)
            if rows and rows[0][0] is not None:
                found = sorted({*found, *map(int, rows[0][0].split(","))})[:limit]
                if len(found) == limit:
                    upto = found[-1]
        return found


def _compute_fetch_limit(count: int, size: int, query: Query) -> int:
    """Return how many rows to fetch: one more than will probably fit, to detect whether there are more."""
    room = query.limit - count + 1
    if count:
        return max(1, min(room, 1 + (query.bytes_max - size) * count // max(1, size)))
    return min(room, _FIRST_FETCH_ROWS)


def _measure_text(body: str | None) -> int:
    """Return the size in bytes of a body that was read as text, or 0 for an erased body."""
    if body is None:
        return 0
    return len(body) if body.isascii() else len(body.encode())
