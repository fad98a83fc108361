"""The key index of a file, held against the records."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from oncelog.core.values import Record
from oncelog.errors import CorruptError
from oncelog.stores.key_hash import HASH_MAX
from oncelog.stores.sqlite.index import KeyIndex, Lane, lane_and_position, place_of
from oncelog.stores.sqlite.jobs import Job, Segment, job_of
from oncelog.stores.sqlite.reading import record_of
from oncelog.stores.sqlite.runs import find, keys_of
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.verifying.findings import ContradictionError, Progress
from oncelog.stores.verifying.identities import judge
from oncelog.stores.verifying.indexes import REPORT_ROWS, Tally
from oncelog.stores.verifying.source import Rules


class Segments:
    """The key index as the file describes it, and which keys must be in its segments."""

    def __init__(self, connection: Any, secret: bytes) -> None:
        self.index = KeyIndex(secret)
        self.segments = [Segment(*row) for row in connection.execute(SQL["segments"]).fetchall()]
        self.jobs: Mapping[int, Job] = {row[0]: job_of(row) for row in connection.execute(SQL["jobs"]).fetchall()}
        rows = connection.execute(SQL["lanes"]).fetchall()
        self.lanes = {row[0]: Lane(row[1], row[8], row[9]) for row in rows}

    def hashes_of(self, record: Record) -> list[int]:
        """Under what a record is found."""
        return self.index.hashes_of_record(
            record.policy, record.scope, record.client, record.client_sequence, record.key
        )

    def is_sealed(self, key_hash: int, place: int) -> bool:
        """Whether a key must be in a segment. The newest are found in the records alone."""
        number, position = lane_and_position(place)
        lane = self.lanes.get(number)
        if lane is None:
            return False
        if position <= lane.sealed_position:
            return True
        sealing = self.jobs.get(0)
        return sealing is not None and position <= lane.sealing_position and key_hash <= sealing.cursor

    def check(self) -> None:
        """What segments, jobs and lanes say of each other."""
        for number, lane in self.lanes.items():
            if not 0 <= lane.sealed_position <= lane.position or not 0 <= lane.sealing_position <= lane.position:
                raise ContradictionError("more keys are said to be sealed than there are records", number)
            if lane.sealing_position and 0 not in self.jobs:
                raise ContradictionError(
                    "keys are said to be on their way to a segment, but no such work is noted", number
                )
        levels = {segment.segment: segment.level for segment in self.segments}
        keys = {segment.segment: segment.keys for segment in self.segments}
        for job in self.jobs.values():
            if levels.get(job.target) != job.level or any(levels.get(one) != job.level - 1 for one in job.sources):
                raise ContradictionError(
                    f"the key index notes work on level {job.level} with segments that do not exist"
                )
            is_odd = len(set(job.sources)) != len(job.sources) or job.keys != keys[job.target]
            if is_odd or not -1 <= job.cursor <= HASH_MAX or bool(job.sources) is (job.level == 0):
                raise ContradictionError(f"the key index notes work on level {job.level} that cannot be")


class SegmentedKeys:
    """Which keys the records say should be in segments, and which not yet. See `Keys` for what each method promises."""

    def __init__(self, connection: Any, secret: bytes) -> None:
        self._connection = connection
        self._segments = Segments(connection, secret)
        self._sealed = Tally()
        self._hot: list[tuple[int, int]] = []
        """The keys that are in no segment: about as many as a writer keeps in memory."""

    def take(self, record: Record) -> None:
        """As `Books` says."""
        place = place_of(record.lane, record.position)
        for one in self._segments.hashes_of(record):
            if self._segments.is_sealed(one, place):
                self._sealed.add(one, place)
            else:
                self._hot.append((one, place))

    def check(self, rules: Rules) -> Iterator[Progress]:
        """As `Keys` says. A key that is sealed is in one segment only."""
        connection, segments = self._connection, self._segments
        segments.check()
        _check_listed(connection, segments)
        found = self._sealed.like()
        sealed = [_segment(connection, segment, segments, found) for segment in segments.segments]
        before = (-1, -1)
        group: list[int] = []
        hot = ((one, place, False) for one, place in sorted(self._hot))
        for one, place, is_left in heapq.merge(*sealed, hot):
            is_twice = (one, place) == before
            if is_left:
                if not is_twice:
                    raise ContradictionError(
                        "the key of the record should have been merged, and was not", *lane_and_position(place)
                    )
                continue
            if is_twice:
                raise ContradictionError("the key of the record is in the key index twice", *lane_and_position(place))
            if one != before[0]:
                self._judge(group, rules)
                group = []
            group.append(place)
            before = one, place
            if found.rows % REPORT_ROWS == 0:
                yield Progress("keys", found.rows, self._sealed.rows)
        if found != self._sealed:
            _name_key(connection, segments)
        self._judge(group, rules)

    def figures(self) -> Mapping[str, int]:
        """As `Keys` says."""
        sealed = self._sealed.rows
        return {"keys": sealed + len(self._hot), "sealed_keys": sealed, "segments": len(self._segments.segments)}

    def _judge(self, places: Sequence[int], rules: Rules) -> None:
        if len(places) > 1:
            rows = self._connection.execute(SQL["records_at"], (orjson.dumps(sorted(places)).decode(),)).fetchall()
            judge(map(record_of, rows), rules, self._log_time_at)

    def _log_time_at(self, lane: int, position: int) -> int:
        row = self._connection.execute(SQL["log_time_at"], (lane, position)).fetchone()
        return row[0] if row else 0


def _check_listed(connection: Any, segments: Segments) -> None:
    """Nobody looks into a segment that is not listed."""
    listed = {segment.segment for segment in segments.segments}
    segment = connection.execute(SQL["next_segment"], (-(2**63),)).fetchone()[0]
    while segment is not None:
        if segment not in listed:
            raise ContradictionError(f"the key index has keys in segment {segment}, which is not listed")
        segment = connection.execute(SQL["next_segment"], (segment,)).fetchone()[0]


def _segment(connection: Any, segment: Segment, segments: Segments, found: Tally) -> Iterator[tuple[int, int, bool]]:
    """Its keys, and whether they are only left there: they have been merged into another, and nobody looks here."""
    filling = next((job for job in segments.jobs.values() if job.target == segment.segment), None)
    draining = next((job for job in segments.jobs.values() if segment.segment in job.sources), None)
    where = f"segment {segment.segment} of the key index"
    before = (-1, -1)
    keys = 0
    for row in _keys(connection, segment):
        key_hash, place = row
        if row <= before:
            raise ContradictionError(f"{where} is out of order at the key of the record", *lane_and_position(place))
        if not segments.is_sealed(key_hash, place):
            raise ContradictionError(
                f"{where} has a key of the record too early, or no such record", *lane_and_position(place)
            )
        if filling and key_hash > filling.cursor:
            raise ContradictionError(f"{where} has a key that belongs in another one", *lane_and_position(place))
        before = row
        keys += 1
        is_left = draining is not None and key_hash <= draining.cursor
        if not is_left:
            found.add(key_hash, place)
        yield key_hash, place, is_left
    if not filling and not draining and keys != segment.keys:
        raise ContradictionError(f"{where} has {keys} keys, and says {segment.keys}")


def _keys(connection: Any, segment: Segment) -> Iterator[tuple[int, int]]:
    """Those of a segment, as its runs have them."""
    where = f"segment {segment.segment} of the key index"
    before = -1
    for last, packed in connection.execute(SQL["segment_runs"], (segment.segment,)):
        try:
            hashes, places = keys_of(packed, last)
        except CorruptError as error:
            raise ContradictionError(f"{where}: {error}") from error
        if hashes[0] <= before:
            raise ContradictionError(f"{where} has two runs for one hash")
        before = last
        yield from zip(hashes, places, strict=True)


def _name_key(connection: Any, segments: Segments) -> None:
    """Says which key is missing, or points to another record."""
    numbers = [segment.segment for segment in segments.segments]
    for place, *identity in connection.execute(SQL["all_identities"]):
        for one in segments.index.hashes_of_record(*identity):
            places = [found for number in numbers for _, found in find(connection, number, [one])]
            if segments.is_sealed(one, place) and place not in places:
                raise ContradictionError("the key of the record is not in the key index", *lane_and_position(place))
    for segment in segments.segments:
        for key_hash, place in _keys(connection, segment):
            identity = connection.execute(SQL["identity_at"], (place,)).fetchone()
            if identity is None or key_hash not in segments.index.hashes_of_record(*identity):
                raise ContradictionError("the key index points to the record by another key", *lane_and_position(place))
    raise ContradictionError("the key index is not what the records make it")
