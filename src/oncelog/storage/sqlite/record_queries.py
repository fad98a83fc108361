"""Queries for records by cursor, and for blocks with their evidence, inside a transaction."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import orjson

from oncelog.core.gaps import count_missing_numbers
from oncelog.core.proof import Block, hash_body
from oncelog.core.values import LaneHead, Record
from oncelog.storage.leaps import PREVIOUS_EPOCHS_MAX, LaneGaps, decode_leaps, decode_previous_epochs, is_across_leap
from oncelog.storage.side_state import lane_of_scope
from oncelog.storage.sqlite.key_index.index import POSITION_BITS, encode_place
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.store import Consumer, EncodeViews, Evidence, Page, Query, RecordViewPage, merge_by_log_time

_POSITION_MASK: Final = (1 << POSITION_BITS) - 1
_FETCH_ROWS: Final = 100
_decode_partitions: Final = lru_cache(maxsize=1024)(msgspec.json.Decoder(tuple[str, ...]).decode)


def decode_record(row: tuple[Any, ...]) -> Record:
    """A record from the columns of a page's statement."""
    place, sequence, log_time_ms, height, policy, scope, key, fingerprint, actor, client, number, partitions, body = row
    return Record(
        place >> POSITION_BITS,
        place & _POSITION_MASK,
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
        _decode_partitions(partitions),
        b"" if body is None else body,
        body is None,
    )


def read_page(connection: Any, query: Query, lanes: int, epoch: str) -> Page:
    """A page, all of one moment."""
    lane = query.lane if query.stream is None else lane_of_scope(query.stream, lanes)
    newest = _load_newest(connection, query, lane)
    query = query.clamp(newest, epoch)
    upto = newest if query.upto is None else query.upto
    rows, is_cut = _fetch_page_rows(_open_cursor(connection, query, lane, upto), query)
    records = [decode_record(row) for row in rows]
    following = upto
    if is_cut:
        following = records[-1].position if query.stream is None else records[-1].sequence
    return Page(records, max(following, query.after), upto, is_cut, newest)


def read_views(connection: Any, query: Query, policy: str, encode: EncodeViews, epoch: str) -> RecordViewPage:
    """The same in brief, of one policy."""
    newest = _load_newest(connection, query, query.lane)
    query = query.clamp(newest, epoch)
    upto = newest if query.upto is None else query.upto
    cursor, following = _open_view_cursor(connection, query, policy, upto)
    encoded: list[bytes] = []
    count = 0
    for views, is_cut in _iterate_parts(cursor, query):
        encoded.append(encode(views))
        count += len(views)
        if is_cut:
            following = views[-1][0]
    has_more = following is not None
    return RecordViewPage(
        encoded, count, max(upto if following is None else following, query.after), upto, has_more, newest
    )


def _open_view_cursor(connection: Any, query: Query, policy: str, upto: int) -> tuple[Any, int | None]:
    """What the page is made of, and where it ends, if that is known already: positions of several partitions are."""
    lane, limit = query.lane, query.limit + 1
    if len(query.partitions) == 1:
        bounds = (lane, query.partitions[0], query.after, upto, policy, limit)
        return connection.execute(SQL["brief_partition_page"], bounds), None
    if not query.partitions:
        places = (encode_place(lane, query.after), encode_place(lane, upto), policy, limit)
        return connection.execute(SQL["brief_lane_page"], places), None
    positions = _load_positions(connection, query.partitions, (lane, query.after, upto, limit))
    has_more = len(positions) > query.limit
    place_list = orjson.dumps([encode_place(lane, position) for position in positions[: query.limit]]).decode()
    return connection.execute(SQL["briefs_at"], (place_list, policy)), positions[query.limit - 1] if has_more else None


def list_internal_records(connection: Any, after: Mapping[int, int], limit: int) -> list[Record]:
    """As `Store` says."""
    rows = [
        row
        for lane, head in load_heads(connection).items()
        for row in connection.execute(
            SQL["internal_page"], (encode_place(lane, after.get(lane, 0)), encode_place(lane, head.position), limit)
        )
    ]
    return merge_by_log_time(map(decode_record, rows), limit)


def count_audit_records(connection: Any) -> int:
    """Count the audit records."""
    return int(connection.execute(SQL["count_audit"]).fetchone()[0])


def find_sequence_before(connection: Any, stream: str, upto: int, count: int, lanes: int) -> int:
    """As `Store` says."""
    bounds = (lane_of_scope(stream, lanes), stream, upto, count - 1)
    row = connection.execute(SQL["sequence_before"], bounds).fetchone()
    return 0 if row is None else int(row[0])


def find_sequence_after(connection: Any, stream: str, after: int, count: int, lanes: int) -> int:
    """As `Store` says."""
    bounds = (lane_of_scope(stream, lanes), stream, after, count)
    (found,) = connection.execute(SQL["sequence_after"], bounds).fetchone()
    return after if found is None else int(found)


def load_heads(connection: Any) -> dict[int, LaneHead]:
    """The heads of all lanes."""
    return {row[0]: LaneHead(*row[1:8]) for row in connection.execute(SQL["lanes"]).fetchall()}


def load_block(connection: Any, lane: int, height: int) -> tuple[Block, list[Evidence]]:
    """A block with its records."""
    row = connection.execute(SQL["block"], (lane, height)).fetchone()
    if row is None:
        raise LookupError(f"lane {lane} has no block of height {height}")
    found = Block(*row)
    return found, load_evidence(connection, lane, found.first_position - 1, found.first_position + found.count - 1)


def load_evidence(connection: Any, lane: int, after: int, upto: int) -> list[Evidence]:
    """Records of a lane with all that their hashes are made of."""
    rows = connection.execute(SQL["evidence"], (encode_place(lane, after), encode_place(lane, upto))).fetchall()
    return [decode_evidence(row) for row in rows]


def decode_evidence(row: tuple[Any, ...]) -> Evidence:
    """From the columns of that statement."""
    *columns, body, salt, kept_hash = row
    if body is None:
        return Evidence(decode_record((*columns, body)), b"", kept_hash)
    return Evidence(decode_record((*columns, body)), salt, hash_body(salt, body))


def list_consumers(connection: Any, lanes: int) -> list[Consumer]:
    """All of them, with how far each is behind."""
    found = []
    passed_over = load_leaps(connection)
    positions = load_lane_gaps(connection, passed_over, 0).positions
    for scope, name, cursor in connection.execute(SQL["all_consumers"]).fetchall():
        lane = lane_of_scope(scope, lanes)
        newest = _load_newest(connection, Query(stream=scope or None), lane)
        lag = newest - cursor
        if not scope:
            lag -= count_missing_numbers(positions, cursor, newest)
        elif is_across_leap(passed_over, cursor, newest):
            (lag,) = connection.execute(SQL["count_stream_records"], (lane, scope, cursor)).fetchone()
        found.append(Consumer(scope, name, cursor, lag))
    return found


def load_leaps(connection: Any) -> tuple[int, ...]:
    """Return the numbers above which the log continued after restores."""
    return decode_leaps(connection.execute(SQL["leaps"]).fetchone()[0])


def list_previous_epochs(connection: Any) -> tuple[str, ...]:
    """Return the epochs that the newest restore records name as ended."""
    places = [encode_place(0, above + 1) for above in load_leaps(connection)[-PREVIOUS_EPOCHS_MAX:]]
    rows = connection.execute(SQL["records_at"], (orjson.dumps(places).decode(),))
    return decode_previous_epochs([decode_record(row).body for row in rows])


def load_gaps(connection: Any) -> dict[int, LaneGaps]:
    """Return what leaps have passed over in every lane; nothing in a log without one."""
    passed_over = load_leaps(connection)
    return (
        {lane: load_lane_gaps(connection, passed_over, lane) for lane in load_heads(connection)} if passed_over else {}
    )


def load_lane_gaps(connection: Any, leap_numbers: Sequence[int], lane: int) -> LaneGaps:
    """Return what leaps have passed over in one lane."""
    blocks = [connection.execute(SQL["block_before_leap"], (lane, above)).fetchone() for above in leap_numbers]
    return LaneGaps.from_leaps(leap_numbers, [block or (0, 0) for block in blocks])


def _load_newest(connection: Any, query: Query, lane: int) -> int:
    if query.stream is None:
        row = connection.execute(SQL["lane_head"], (lane,)).fetchone()
    else:
        row = connection.execute(SQL["stream_head"], (lane, query.stream)).fetchone()
    return 0 if row is None else row[0]


def _open_cursor(connection: Any, query: Query, lane: int, upto: int) -> Any:
    limit = query.limit + 1  # one more tells whether there is more
    if query.stream is not None:
        return connection.execute(SQL["stream_page"], (lane, query.stream, query.after, upto, limit))
    if not query.partitions:
        return connection.execute(SQL["lane_page"], (encode_place(lane, query.after), encode_place(lane, upto), limit))
    if len(query.partitions) == 1:
        return connection.execute(SQL["partition_page"], (lane, query.partitions[0], query.after, upto, limit))
    positions = _load_positions(connection, query.partitions, (lane, query.after, upto, limit))
    places = orjson.dumps([encode_place(lane, position) for position in positions]).decode()
    return connection.execute(SQL["records_at"], (places,))


def _load_positions(connection: Any, partitions: Sequence[str], bounds: tuple[int, int, int, int]) -> list[int]:
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


def _fetch_page_rows(cursor: Any, query: Query) -> tuple[list[tuple[Any, ...]], bool]:
    """The page's rows, and whether it was cut: by the limit, or early by the bytes of its bodies."""
    rows: list[tuple[Any, ...]] = []
    is_cut = False
    for part, is_cut in _iterate_parts(cursor, query):  # noqa: B007 - that of the last part is what is wanted
        rows.extend(part)
    return rows, is_cut


def _iterate_parts(cursor: Any, query: Query) -> Iterator[tuple[list[tuple[Any, ...]], bool]]:
    """The page's rows, a hundred at a time and never none; with the last of them whether the page was cut there."""
    before: list[tuple[Any, ...]] = []
    count = size = 0
    while rows := cursor.fetchmany(_FETCH_ROWS):
        sizes = [_measure_body(row[-1]) for row in rows]
        end = _count_fitting(sizes, query.limit - count, query.bytes_max - size, is_first=not count)
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


def _measure_body(body: bytes | str | None) -> int:
    """In bytes, also of one that was read as text."""
    if body is None:
        return 0
    return len(body) if isinstance(body, bytes) or body.isascii() else len(body.encode())


def _count_fitting(sizes: Sequence[int], rows_left: int, bytes_left: int, *, is_first: bool) -> int:
    """How many of them there is room for; for the first of a page there always is."""
    if len(sizes) <= rows_left and sum(sizes) <= bytes_left:
        return len(sizes)
    for index, size in enumerate(sizes):
        bytes_left -= size
        if index == rows_left or (bytes_left < 0 and not (is_first and not index)):
            return index
    return len(sizes)
