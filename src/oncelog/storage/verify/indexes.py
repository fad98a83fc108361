"""Compares the tables that are derived from records with the records: partitions and streams.

Neither side fits into memory, and each has an order of its own. So both are added up: the sum of a keyed hash of every
row, which comes out equal only for equal rows. Only where the sums differ is the row looked for that is wrong.
"""

import os
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from oncelog.core.values import Record
from oncelog.storage.side_state import TABLES, lane_of_scope
from oncelog.storage.verify.findings import InconsistencyError, StepProgress
from oncelog.storage.verify.source import LogRules, RowTuple, VerificationSource

REPORT_ROWS: Final = 10_000
_STREAMS: Final = next(table for table in TABLES if table.name == "streams")
_FLOORS: Final = next(table for table in TABLES if table.name == "floors")


class RowChecksum:
    """A sum over rows that does not depend on their order."""

    def __init__(self) -> None:
        self._secret = os.urandom(16)  # nobody can prepare rows that add up
        self._sum = 0
        self.rows = 0

    def add(self, *columns: int | str) -> None:
        """Takes in a row."""
        row = repr(columns).encode()  # spells every row in a way of its own
        self._sum += int.from_bytes(blake2b(row, digest_size=16, key=self._secret).digest(), "big")
        self.rows += 1

    def new_empty(self) -> "RowChecksum":
        """An empty one whose sum can be compared with this one's."""
        other = RowChecksum()
        other._secret = self._secret
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowChecksum) and (self._sum, self.rows) == (other._sum, other.rows)

    __hash__ = None  # type: ignore[assignment]


class IndexCollector:
    """What the records say should be in the indexes of partitions and streams."""

    def __init__(self) -> None:
        self.partitions = RowChecksum()
        self.streams = RowChecksum()

    def add(self, record: Record) -> None:
        """As `RecordCollector` says."""
        for partition in set(record.partitions):
            self.partitions.add(record.lane, partition, record.position)
        if record.sequence:
            self.streams.add(record.lane, record.scope, record.sequence, record.position)


def check_partitions(source: VerificationSource, collector: IndexCollector) -> Iterator[StepProgress]:
    """The partition index, in both directions."""
    found = collector.partitions.new_empty()
    rows = check_order(source.iterate_rows("all_partition_records"), 3, "the index of partitions")
    for lane, partition, position in rows:
        found.add(lane, partition, position)
        if found.rows % REPORT_ROWS == 0:
            yield StepProgress("partitions", found.rows, collector.partitions.rows)
    if found != collector.partitions:
        _raise_difference(source, "partition", "the partition")


def check_streams(source: VerificationSource, collector: IndexCollector, rules: LogRules) -> Iterator[StepProgress]:
    """The stream index in both directions, and the newest sequence of every stream."""
    found = collector.streams.new_empty()
    floors = FloorVerifier(source, rules)
    # One that was opened and has no records yet is in the table too, at 0.
    newest = (row for row in check_order(source.iterate_table(_STREAMS), 2, "the table of streams") if row[2])
    stream: tuple[int, str] | None = None
    sequence = position = 0
    rows = check_order(source.iterate_rows("all_stream_records"), 3, "the index of streams")
    for lane, scope, number, place in rows:
        found.add(lane, scope, number, place)
        if stream != (lane, scope):
            _check_newest(stream, sequence, newest)
            floors.check(stream, position)
            stream, sequence, position = (lane, scope), 0, 0
            if lane_of_scope(scope, rules.settings.lanes) != lane:
                raise InconsistencyError(f"the stream {scope!r} belongs in another lane", lane)
        if number not in _compute_next_sequences(sequence, position, place, rules.leaps) or place <= position:
            raise InconsistencyError(f"sequence {number} of {scope!r} follows {sequence} at {position}", lane, place)
        sequence, position = number, place
        if found.rows % REPORT_ROWS == 0:
            yield StepProgress("streams", found.rows, collector.streams.rows)
    if found != collector.streams:
        _raise_difference(source, "stream", "the stream")
    _check_newest(stream, sequence, newest)
    floors.check(stream, position)
    floors.check_rest()
    beyond = next(newest, None)
    if beyond is not None:
        raise InconsistencyError(
            f"the stream {beyond[1]!r} is said to have {beyond[2]} records, and has none", beyond[0]
        )


def _compute_next_sequences(sequence: int, position: int, place: int, leaps: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sequences that the record at a place may have, after another one at a position.

    A leap between them leads to its number. A first record has that number, or 1 if its stream was made after the leap.
    """
    passed = [above for above in leaps if position <= above < place - 1]
    if not passed:
        return (sequence + 1,)
    return (passed[-1] + 1,) if sequence else (1, passed[-1] + 1)


class FloorVerifier:
    """The table of floors: it has every stream without a record since the last leap, and none with one."""

    def __init__(self, source: VerificationSource, rules: LogRules) -> None:
        self._last_leap = rules.leaps[-1] if rules.leaps else 0
        self._rows = check_order(source.iterate_table(_FLOORS), 2, "the table of floors")
        self._row = next(self._rows, None)
        self._source = source

    def check(self, stream: tuple[int, str] | None, position: int) -> None:
        """Check the floor of a stream whose last record is at a position. Streams come in order."""
        if stream is None:
            return
        self._advance_to(stream)
        has_floor = self._row is not None and self._row[:2] == stream
        if has_floor is not (position <= self._last_leap):
            state = "has a floor though it was written to after the last leap" if has_floor else "has no floor"
            raise InconsistencyError(f"the stream {stream[1]!r} {state}", stream[0])

    def check_rest(self) -> None:
        """Check the floors after the last stream with records, and that each belongs to a stream."""
        self._advance_to(None)
        found = self._source.fetch_first("floor_without_stream")
        if found is not None:
            raise InconsistencyError(
                f"the stream {found[1]!r} has a floor, and is not in the table of streams", found[0]
            )

    def _advance_to(self, stream: tuple[int, str] | None) -> None:
        while self._row is not None and (stream is None or self._row[:2] <= stream):
            if self._row[2] != self._last_leap:
                lane, scope, floor = self._row
                raise InconsistencyError(
                    f"the floor of {scope!r} is {floor}, and the last leap's {self._last_leap}", lane
                )
            if self._row[:2] == stream:
                return
            self._row = next(self._rows, None)


def _check_newest(stream: tuple[int, str] | None, sequence: int, newest: Iterator[RowTuple]) -> None:
    if stream is None:
        return
    stored = next(newest, None)
    if stored is None or stored[:2] > stream:
        raise InconsistencyError(f"the stream {stream[1]!r} has records, but is not in the table of streams", stream[0])
    if stored[:2] != stream:
        raise InconsistencyError(
            f"the stream {stored[1]!r} is said to have {stored[2]} records, and has none", stored[0]
        )
    if stored[2] != sequence:
        raise InconsistencyError(
            f"the stream {stream[1]!r} ends at {sequence}, and is said to end at {stored[2]}", stream[0]
        )


def _raise_difference(source: VerificationSource, table: str, label: str) -> None:
    """Says which row is missing, or too much."""
    missing = source.fetch_first(f"missing_{table}_record")
    if missing is not None:
        raise InconsistencyError(f"the record is not found under {label} {missing[2]!r}", missing[0], missing[1])
    extra = source.fetch_first(f"extra_{table}_record")
    if extra is not None:
        raise InconsistencyError(f"is found under {label} {extra[2]!r}, where no such record is", extra[0], extra[1])
    raise InconsistencyError(f"the index of {table}s is not what the records make it")


def check_order(rows: Iterator[RowTuple], width: int, label: str) -> Iterator[RowTuple]:
    """The rows of a table by its key of `width` columns. Nothing is found in a tree that is out of order."""
    before: RowTuple | None = None
    for row in rows:
        if before is not None and row[:width] <= before:
            raise InconsistencyError(f"{label} is out of order at {row[:width]!r}")
        before = row[:width]
        yield row
