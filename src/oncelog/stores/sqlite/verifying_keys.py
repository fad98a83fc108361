"""The key index held against the records, and what it is for: one record an identity while it is remembered."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from oncelog.core.values import KeyIdentity, Record, SequenceIdentity
from oncelog.stores.key_hash import HASH_MAX
from oncelog.stores.sqlite.findings import ContradictionError, Progress
from oncelog.stores.sqlite.index import (
    Job,
    KeyIndex,
    Lane,
    Segment,
    job_of,
    lane_and_position,
    place_of,
)
from oncelog.stores.sqlite.reading import record_of
from oncelog.stores.sqlite.statements import SQL
from oncelog.stores.sqlite.verifying_chain import Rules
from oncelog.stores.sqlite.verifying_index import REPORT_ROWS, Tally


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
        for job in self.jobs.values():
            if levels.get(job.target) != job.level or any(levels.get(one) != job.level - 1 for one in job.sources):
                raise ContradictionError(
                    f"the key index notes work on level {job.level} with segments that do not exist"
                )
            if not -1 <= job.cursor <= HASH_MAX or bool(job.sources) is (job.level == 0):
                raise ContradictionError(f"the key index notes work on level {job.level} that cannot be")


class KeyBooks:
    """Which keys the records say should be in segments, and which not yet."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.keys = Tally()
        self.hot: list[tuple[int, int]] = []
        """The keys that are in no segment: about as many as a writer keeps in memory."""

    def take(self, record: Record) -> None:
        """As `Books` says."""
        place = place_of(record.lane, record.position)
        for one in self._segments.hashes_of(record):
            if self._segments.is_sealed(one, place):
                self.keys.add(one, place)
            else:
                self.hot.append((one, place))


def check_keys(connection: Any, books: KeyBooks, segments: Segments, rules: Rules) -> Iterator[Progress]:
    """Every sealed key is in one segment, at its place; and no identity was stored again while it was remembered."""
    segments.check()
    _check_listed(connection, segments)
    found = books.keys.like()
    sealed = [_segment(connection, segment, segments, found) for segment in segments.segments]
    before = (-1, -1)
    group: list[int] = []
    for one in heapq.merge(*sealed, sorted(books.hot)):
        if one == before:
            raise ContradictionError("the key of the record is in the key index twice", *lane_and_position(one[1]))
        if one[0] != before[0]:
            if len(group) > 1:
                _judge(connection, group, rules)
            group = []
        group.append(one[1])
        before = one
        if found.rows % REPORT_ROWS == 0:
            yield Progress("keys", found.rows, books.keys.rows)
    if found != books.keys:
        _name_key(connection, segments)
    if len(group) > 1:
        _judge(connection, group, rules)


def _check_listed(connection: Any, segments: Segments) -> None:
    """Nobody looks into a segment that is not listed."""
    listed = {segment.segment for segment in segments.segments}
    segment = connection.execute(SQL["next_segment"], (-(2**63),)).fetchone()[0]
    while segment is not None:
        if segment not in listed:
            raise ContradictionError(f"the key index has keys in segment {segment}, which is not listed")
        segment = connection.execute(SQL["next_segment"], (segment,)).fetchone()[0]


def _segment(connection: Any, segment: Segment, segments: Segments, found: Tally) -> Iterator[tuple[int, int]]:
    filling = next((job for job in segments.jobs.values() if job.target == segment.segment), None)
    draining = next((job for job in segments.jobs.values() if segment.segment in job.sources), None)
    where = f"segment {segment.segment} of the key index"
    before = (-1, -1)
    keys = 0
    for row in connection.execute(SQL["segment_keys"], (segment.segment,)):
        key_hash, place = row
        if row <= before:
            raise ContradictionError(f"{where} is out of order at the key of the record", *lane_and_position(place))
        if not segments.is_sealed(key_hash, place):
            raise ContradictionError(
                f"{where} has a key of the record too early, or no such record", *lane_and_position(place)
            )
        if (filling and key_hash > filling.cursor) or (draining and key_hash <= draining.cursor):
            raise ContradictionError(f"{where} has a key that belongs in another one", *lane_and_position(place))
        found.add(key_hash, place)
        before = row
        keys += 1
        yield row
    if not filling and not draining and keys != segment.keys:
        raise ContradictionError(f"{where} has {keys} keys, and says {segment.keys}")


def _name_key(connection: Any, segments: Segments) -> None:
    """Says which key is missing, or points to another record."""
    numbers = orjson.dumps([segment.segment for segment in segments.segments]).decode()
    for place, *identity in connection.execute(SQL["all_identities"]):
        for one in segments.index.hashes_of_record(*identity):
            parameters = {"hashes": orjson.dumps([one]).decode(), "segments": numbers}
            places = [row[1] for row in connection.execute(SQL["find_keys"], parameters)]
            if segments.is_sealed(one, place) and place not in places:
                raise ContradictionError("the key of the record is not in the key index", *lane_and_position(place))
    for segment in segments.segments:
        for key_hash, place in connection.execute(SQL["segment_keys"], (segment.segment,)):
            identity = connection.execute(SQL["identity_at"], (place,)).fetchone()
            if identity is None or key_hash not in segments.index.hashes_of_record(*identity):
                raise ContradictionError("the key index points to the record by another key", *lane_and_position(place))
    raise ContradictionError("the key index is not what the records make it")


def _judge(connection: Any, places: Iterable[int], rules: Rules) -> None:
    """Records that share a hash: of one identity there may be several only where the older was forgotten."""
    last: dict[KeyIdentity | SequenceIdentity, Record] = {}
    rows = connection.execute(SQL["records_at"], (orjson.dumps(sorted(places)).decode(),)).fetchall()
    for after in map(record_of, rows):
        for identity in _identities(after):
            before = last.get(identity)
            last[identity] = after
            if before is not None and not _was_forgotten(connection, before, after, rules):
                raise ContradictionError(
                    f"stores an identity of {after.policy} {after.scope!r} again that position {before.position} had "
                    "stored, though it was still remembered",
                    after.lane,
                    after.position,
                )


def _identities(record: Record) -> Iterator[KeyIdentity | SequenceIdentity]:
    if record.key:
        yield (record.policy, record.scope, record.client if record.client_sequence else "", record.key)
    if record.client_sequence:
        yield (record.policy, record.scope, record.client, record.client_sequence)


def _was_forgotten(connection: Any, before: Record, after: Record, rules: Rules) -> bool:
    """Whether what `before` left to remember was gone when `after` was decided, as `core.invariants` has it."""
    interval = rules.settings.eviction_interval
    evicting = (after.position - 1) // interval * interval
    row = connection.execute(SQL["log_time_at"], (place_of(after.lane, evicting),)).fetchone()
    retention = rules.policies[after.policy].retention
    return not retention.remembers(before.log_time_ms, after.log_time_ms, row[0] if row else 0)
