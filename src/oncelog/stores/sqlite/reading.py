"""Reading records: pages by cursor, blocks with their evidence. All of it on a connection inside a transaction."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import orjson

from oncelog.core.gaps import missing_numbers
from oncelog.core.proof import Block, body_hash
from oncelog.core.values import LaneHead, Record
from oncelog.stores.leaps import PREVIOUS_EPOCHS_MAX, LaneGaps, is_over_a_leap, leaps_of, previous_epochs_of
from oncelog.stores.protocol import BriefPage, Consumer, Evidence, Page, Query, Show, oldest_first
from oncelog.stores.side_state import lane_of_scope
from oncelog.stores.sqlite.index import POSITION_BITS, place_of
from oncelog.stores.sqlite.statements import SQL

_POSITION: Final = (1 << POSITION_BITS) - 1
_FETCH: Final = 100
_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)


def record_of(row: tuple[Any, ...]) -> Record:
    """A record from the columns of a page's statement."""
    place, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, number, partitions, body = row
    return Record(
        place >> POSITION_BITS,
        place & _POSITION,
        sequence,
        log_time_ms,
        height,
        policy,
        scope,
        key,
        fingerprint,
        actor,
        client,
        number,
        _partitions(partitions),
        b"" if body is None else body,
        body is None,
    )


def read(connection: Any, query: Query, lanes: int, epoch: str) -> Page:
    """A page, all of one moment."""
    lane = query.lane if query.stream is None else lane_of_scope(query.stream, lanes)
    newest = _newest(connection, query, lane)
    query = query.within(newest, epoch)
    upto = newest if query.upto is None else query.upto
    rows, is_cut = _page_rows(_cursor(connection, query, lane, upto), query)
    records = [record_of(row) for row in rows]
    following = upto
    if is_cut:
        following = records[-1].position if query.stream is None else records[-1].sequence
    return Page(records, max(following, query.after), upto, is_cut, newest)


def read_brief(connection: Any, query: Query, policy: str, show: Show, epoch: str) -> BriefPage:
    """The same in brief, of one policy."""
    newest = _newest(connection, query, query.lane)
    query = query.within(newest, epoch)
    upto = newest if query.upto is None else query.upto
    cursor, following = _brief_cursor(connection, query, policy, upto)
    shown: list[bytes] = []
    count = 0
    for briefs, is_cut in _in_parts(cursor, query):
        shown.append(show(briefs))
        count += len(briefs)
        if is_cut:
            following = briefs[-1][0]
    has_more = following is not None
    return BriefPage(shown, count, max(upto if following is None else following, query.after), upto, has_more, newest)


def _brief_cursor(connection: Any, query: Query, policy: str, upto: int) -> tuple[Any, int | None]:
    """What the page is made of, and where it ends, if that is known already: positions of several partitions are."""
    lane, limit = query.lane, query.limit + 1
    if len(query.partitions) == 1:
        bounds = (lane, query.partitions[0], query.after, upto, policy, limit)
        return connection.execute(SQL["brief_partition_page"], bounds), None
    if not query.partitions:
        places = (place_of(lane, query.after), place_of(lane, upto), policy, limit)
        return connection.execute(SQL["brief_lane_page"], places), None
    positions = _positions(connection, query.partitions, (lane, query.after, upto, limit))
    has_more = len(positions) > query.limit
    asked = orjson.dumps([place_of(lane, position) for position in positions[: query.limit]]).decode()
    return connection.execute(SQL["briefs_at"], (asked, policy)), positions[query.limit - 1] if has_more else None


def internal_records(connection: Any, after: Mapping[int, int], limit: int) -> list[Record]:
    """As `Store` says."""
    rows = [
        row
        for lane, head in heads(connection).items()
        for row in connection.execute(
            SQL["internal_page"], (place_of(lane, after.get(lane, 0)), place_of(lane, head.position), limit)
        )
    ]
    return oldest_first(map(record_of, rows), limit)


def count_audit(connection: Any) -> int:
    """Count the audit records."""
    return int(connection.execute(SQL["count_audit"]).fetchone()[0])


def sequence_before(connection: Any, stream: str, upto: int, count: int, lanes: int) -> int:
    """As `Store` says."""
    bounds = (lane_of_scope(stream, lanes), stream, upto, count - 1)
    row = connection.execute(SQL["sequence_before"], bounds).fetchone()
    return 0 if row is None else int(row[0])


def sequence_after(connection: Any, stream: str, after: int, count: int, lanes: int) -> int:
    """As `Store` says."""
    bounds = (lane_of_scope(stream, lanes), stream, after, count)
    (found,) = connection.execute(SQL["sequence_after"], bounds).fetchone()
    return after if found is None else int(found)


def heads(connection: Any) -> dict[int, LaneHead]:
    """The heads of all lanes."""
    return {row[0]: LaneHead(*row[1:8]) for row in connection.execute(SQL["lanes"]).fetchall()}


def block(connection: Any, lane: int, height: int) -> tuple[Block, list[Evidence]]:
    """A block with its records."""
    row = connection.execute(SQL["block"], (lane, height)).fetchone()
    if row is None:
        raise LookupError(f"lane {lane} has no block of height {height}")
    found = Block(*row)
    return found, evidence(connection, lane, found.first_position - 1, found.first_position + found.count - 1)


def evidence(connection: Any, lane: int, after: int, upto: int) -> list[Evidence]:
    """Records of a lane with all that their hashes are made of."""
    rows = connection.execute(SQL["evidence"], (place_of(lane, after), place_of(lane, upto))).fetchall()
    return [evidence_of(row) for row in rows]


def evidence_of(row: tuple[Any, ...]) -> Evidence:
    """From the columns of that statement."""
    *columns, body, salt, kept_hash = row
    if body is None:
        return Evidence(record_of((*columns, body)), b"", kept_hash)
    return Evidence(record_of((*columns, body)), salt, body_hash(salt, body))


def consumers(connection: Any, lanes: int) -> list[Consumer]:
    """All of them, with how far each is behind."""
    found = []
    passed_over = leaps(connection)
    positions = lane_gaps(connection, passed_over, 0).positions
    for scope, name, cursor in connection.execute(SQL["all_consumers"]).fetchall():
        lane = lane_of_scope(scope, lanes)
        newest = _newest(connection, Query(stream=scope or None), lane)
        lag = newest - cursor
        if not scope:
            lag -= missing_numbers(positions, cursor, newest)
        elif is_over_a_leap(passed_over, cursor, newest):
            (lag,) = connection.execute(SQL["count_stream_records"], (lane, scope, cursor)).fetchone()
        found.append(Consumer(scope, name, cursor, lag))
    return found


def leaps(connection: Any) -> tuple[int, ...]:
    """Return the numbers above which the log continued after restores."""
    return leaps_of(connection.execute(SQL["leaps"]).fetchone()[0])


def previous_epochs(connection: Any) -> tuple[str, ...]:
    """Return the epochs that the newest restore records name as ended."""
    places = [place_of(0, above + 1) for above in leaps(connection)[-PREVIOUS_EPOCHS_MAX:]]
    rows = connection.execute(SQL["records_at"], (orjson.dumps(places).decode(),))
    return previous_epochs_of([record_of(row).body for row in rows])


def gaps(connection: Any) -> dict[int, LaneGaps]:
    """Return what leaps have passed over in every lane; nothing in a log without one."""
    passed_over = leaps(connection)
    return {lane: lane_gaps(connection, passed_over, lane) for lane in heads(connection)} if passed_over else {}


def lane_gaps(connection: Any, passed_over: Sequence[int], lane: int) -> LaneGaps:
    """Return what leaps have passed over in one lane."""
    blocks = [connection.execute(SQL["block_before_leap"], (lane, above)).fetchone() for above in passed_over]
    return LaneGaps.of(passed_over, [block or (0, 0) for block in blocks])


def _newest(connection: Any, query: Query, lane: int) -> int:
    if query.stream is None:
        row = connection.execute(SQL["lane_head"], (lane,)).fetchone()
    else:
        row = connection.execute(SQL["stream_head"], (lane, query.stream)).fetchone()
    return 0 if row is None else row[0]


def _cursor(connection: Any, query: Query, lane: int, upto: int) -> Any:
    limit = query.limit + 1  # one more tells whether there is more
    if query.stream is not None:
        return connection.execute(SQL["stream_page"], (lane, query.stream, query.after, upto, limit))
    if not query.partitions:
        return connection.execute(SQL["lane_page"], (place_of(lane, query.after), place_of(lane, upto), limit))
    if len(query.partitions) == 1:
        return connection.execute(SQL["partition_page"], (lane, query.partitions[0], query.after, upto, limit))
    positions = _positions(connection, query.partitions, (lane, query.after, upto, limit))
    places = orjson.dumps([place_of(lane, position) for position in positions]).decode()
    return connection.execute(SQL["records_at"], (places,))


def _positions(connection: Any, partitions: Sequence[str], bounds: tuple[int, int, int, int]) -> list[int]:
    """The first positions of any of the partitions, in order.

    What has been found so far is a bound for what is looked for in the next partition: once there are enough,
    nothing beyond the last of them is wanted.
    """
    lane, after, upto, limit = bounds
    found: list[int] = []
    for partition in partitions:
        rows = connection.execute(SQL["partition_positions"], (lane, partition, after, upto, limit)).fetchone()[0]
        if rows is not None:
            found = sorted({*found, *map(int, rows.split(","))})[:limit]
            if len(found) == limit:
                upto = found[-1]
    return found


def _page_rows(cursor: Any, query: Query) -> tuple[list[tuple[Any, ...]], bool]:
    """The page's rows, and whether it was cut: by the limit, or early by the bytes of its bodies."""
    rows: list[tuple[Any, ...]] = []
    is_cut = False
    for part, is_cut in _in_parts(cursor, query):  # noqa: B007 - that of the last part is what is wanted
        rows.extend(part)
    return rows, is_cut


def _in_parts(cursor: Any, query: Query) -> Iterator[tuple[list[tuple[Any, ...]], bool]]:
    """The page's rows, a hundred at a time and never none; with the last of them whether the page was cut there."""
    before: list[tuple[Any, ...]] = []
    count = size = 0
    while rows := cursor.fetchmany(_FETCH):
        sizes = [_size(row[-1]) for row in rows]
        end = _fitting(sizes, query.limit - count, query.bytes_max - size, is_first=not count)
        if end < len(rows) and not end:
            yield before, True
            return
        if before:
            yield before, False
        if end < len(rows):
            yield rows[:end], True
            return
        before = rows
        count += len(rows)
        size += sum(sizes)
    if before:
        yield before, False


def _size(body: bytes | str | None) -> int:
    """In bytes, also of one that was read as text."""
    if body is None:
        return 0
    return len(body) if isinstance(body, bytes) or body.isascii() else len(body.encode())


def _fitting(sizes: Sequence[int], room: int, room_bytes: int, *, is_first: bool) -> int:
    """How many of them there is room for; for the first of a page there always is."""
    if len(sizes) <= room and sum(sizes) <= room_bytes:
        return len(sizes)
    for index, size in enumerate(sizes):
        room_bytes -= size
        if index == room or (room_bytes < 0 and not (is_first and not index)):
            return index
    return len(sizes)
