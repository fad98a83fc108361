"""Compares the indexes of partitions, streams and identities with the records, from which they are derived.

Neither side fits into memory, and they are in different orders. The verification therefore compares checksums, which
are sums of a keyed hash of each row. It searches for the wrong row only if the sums differ.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Final

from msgspec import Struct, field

from oncelog.core.internal_records import find_last_eviction
from oncelog.core.policy import FOREVER, find_retention
from oncelog.core.values import KeyIdentity, Record, SequenceIdentity
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.metadata import NO_GAPS
from oncelog.storage.side_state import FLOORS, STREAMS, lane_of_scope
from oncelog.storage.verify.findings import InconsistencyError, StepProgress, require
from oncelog.storage.verify.source import LogState, VerificationSource, check_order, pair_rows

REPORT_ROWS: Final = 10_000
GetLogTime = Callable[[int, int], int]
"""Returns the log time of the record at a lane and position, or 0 if no record exists there."""


class RowChecksum(Struct):
    """A sum over rows that does not depend on their order. Checksums with the same secret can be compared."""

    secret: bytes = field(default_factory=partial(os.urandom, 16))
    """Secret that prevents an attacker from preparing rows with an equal sum."""
    total: int = 0
    rows: int = 0

    def add(self, *columns: int | str) -> None:
        """Add a row."""
        row = repr(columns).encode()  # different for different rows
        self.total += int.from_bytes(blake2b(row, digest_size=16, key=self.secret).digest(), "big")
        self.rows += 1


class IndexCollector:
    """Computes checksums of the rows that the records require in the partition and stream indexes."""

    def __init__(self) -> None:
        self.partitions = RowChecksum()
        self.streams = RowChecksum()

    def add(self, record: Record) -> None:
        """See `RecordCollector`."""
        for partition in set(record.partitions):
            self.partitions.add(record.lane, partition, record.position)
        if record.sequence:
            self.streams.add(record.lane, record.scope, record.sequence, record.position)


def check_partitions(source: VerificationSource, collector: IndexCollector) -> Iterator[StepProgress]:
    """Check that the partition index has exactly the rows that the records require."""
    found = RowChecksum(collector.partitions.secret)
    rows = check_order(source.view.iterate_rows("all_partition_records"), 3, "the index of partitions")
    for lane, partition, position in rows:
        found.add(lane, partition, position)
        if found.rows % REPORT_ROWS == 0:
            yield StepProgress("partitions", found.rows, collector.partitions.rows)
    if found != collector.partitions:
        _raise_difference(source, "partition", "the partition")


def check_streams(source: VerificationSource, collector: IndexCollector, state: LogState) -> Iterator[StepProgress]:
    """Check that the stream index has exactly the rows that the records require.

    Also checks the newest sequence and the floor of each stream.
    """
    found = RowChecksum(collector.streams.secret)
    last_leap = state.leaps[-1] if state.leaps else 0
    streams = _check_newest(source, _follow_streams(source, state, found))
    reported = 0
    for (lane, scope), stream, floor in pair_rows(streams, source.iterate_sorted(FLOORS), 2):
        if stream is None:
            raise InconsistencyError(f"the stream {scope!r} has a floor, but is not in the table of streams", lane)
        if floor is not None and floor[0] != last_leap:
            raise InconsistencyError(f"the floor of {scope!r} is {floor[0]}, but the last leap is {last_leap}", lane)
        (position,) = stream
        if position and (floor is not None) is not (position <= last_leap):
            problem = "has no floor" if floor is None else "has a floor though it was written to after the last leap"
            raise InconsistencyError(f"the stream {scope!r} {problem}", lane)
        if found.rows - reported >= REPORT_ROWS:
            reported = found.rows
            yield StepProgress("streams", found.rows, collector.streams.rows)
    if found != collector.streams:
        _raise_difference(source, "stream", "the stream")


def _follow_streams(source: VerificationSource, state: LogState, found: RowChecksum) -> Iterator[RowTuple]:
    """Yield the lane, scope, last sequence and last position of each stream in the index.

    Adds all rows of the index to `found`.
    """
    rows = check_order(source.view.iterate_rows("all_stream_records"), 3, "the index of streams")
    for (lane, scope), stream_rows in groupby(rows, itemgetter(0, 1)):
        require(
            lane_of_scope(scope, state.settings.lanes) == lane, f"the stream {scope!r} belongs in another lane", lane
        )
        sequence = position = 0
        for _, _, number, place in stream_rows:
            found.add(lane, scope, number, place)
            if number not in _compute_next_sequences(sequence, position, place, state.leaps) or place <= position:
                problem = f"sequence {number} of {scope!r} follows {sequence} at {position}"
                raise InconsistencyError(problem, lane, place)
            sequence, position = number, place
        yield lane, scope, sequence, position


def _check_newest(source: VerificationSource, ends: Iterator[RowTuple]) -> Iterator[RowTuple]:
    """Compare the ends of streams with the table of streams. Yields the lane, scope and last position of each stream.

    A stream that was opened but has no record yet is in the table with sequence 0, and is yielded with position 0.
    """
    for (lane, scope), end, stored in pair_rows(ends, source.iterate_sorted(STREAMS), 2):
        sequence, position = end or (0, 0)
        if stored is None:
            raise InconsistencyError(f"the stream {scope!r} has records, but is not in the table of streams", lane)
        require(
            end is not None or not stored[0],
            f"the stream {scope!r} has {stored[0]} records in the table of streams, but none in the index",
            lane,
        )
        require(
            stored[0] == sequence,
            f"the stream {scope!r} ends at {sequence}, but at {stored[0]} in the table of streams",
            lane,
        )
        yield lane, scope, position


def _compute_next_sequences(sequence: int, position: int, place: int, leaps: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sequences that the record at `place` may have if it follows a record at `position`.

    After a leap between the two records, the sequence continues at the leap's number. The first record of a stream has
    that number, or 1 if the stream was created after the leap.
    """
    passed = [above for above in leaps if position <= above < place - 1]
    if not passed:
        return (sequence + 1,)
    return (passed[-1] + 1,) if sequence else (1, passed[-1] + 1)


def _raise_difference(source: VerificationSource, table: str, label: str) -> None:
    """Raise InconsistencyError for the row that is missing or surplus."""
    missing = source.view.fetch_first(f"missing_{table}_record")
    if missing is not None:
        raise InconsistencyError(f"the record is not found under {label} {missing[2]!r}", missing[0], missing[1])
    extra = source.view.fetch_first(f"extra_{table}_record")
    if extra is not None:
        raise InconsistencyError(
            f"the index lists {label} {extra[2]!r} here, but no such record exists", extra[0], extra[1]
        )
    raise InconsistencyError(f"the index of {table}s does not match the records")


def list_identities(record: Record) -> Iterator[KeyIdentity | SequenceIdentity]:
    """Yield the identities that lead to a record: its key, and its client sequence."""
    if record.key:
        yield record.identity
    if record.client_sequence:
        yield (record.policy, record.scope, record.client, record.client_sequence)


def check_uniqueness(records: Iterable[Record], state: LogState, get_log_time: GetLogTime) -> None:
    """Check records that share a hash, in order. An identity may repeat only after its older record was forgotten."""
    last: dict[KeyIdentity | SequenceIdentity, Record] = {}
    for after in records:
        for identity in list_identities(after):
            before = last.get(identity)
            last[identity] = after
            if before is not None and not _was_forgotten(before, after, state, get_log_time):
                raise InconsistencyError(
                    f"repeats an identity of {after.policy} {after.scope!r}: the record at position {before.position} "
                    "has it, and the log had not forgotten it yet",
                    after.lane,
                    after.position,
                )


def _was_forgotten(before: Record, after: Record, state: LogState, get_log_time: GetLogTime) -> bool:
    """Return whether the key of `before` was forgotten when `plan` decided `after`."""
    gaps = state.gaps.get(after.lane, NO_GAPS).positions
    evicting = find_last_eviction(after.position - 1, state.settings.eviction_interval, gaps)
    retention = find_retention(after.policy, state.policies) or FOREVER
    return not retention.remembers(before.log_time_ms, after.log_time_ms, get_log_time(after.lane, evicting))
