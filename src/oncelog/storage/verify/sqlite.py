"""Verification of a log in an SQLite file: its structure, and its key index, which is compared with the records."""

import heapq
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any

from oncelog.core.proof import Block
from oncelog.core.values import POSITION_BITS, Record, decode_place, encode_place
from oncelog.errors import CorruptError
from oncelog.sql_files import run_script
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.inspect.sqlite import FileView, load_lane_index_states
from oncelog.storage.key_hash import HASH_MAX
from oncelog.storage.queries.records import find_record, load_heads
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.sqlite.key_index.index import KeyIndex
from oncelog.storage.sqlite.key_index.key_run import find_in_segment, unpack_run
from oncelog.storage.sqlite.key_index.segments import IndexJob, Segment, decode_job
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.statements import SQL, load_migrations
from oncelog.storage.verify.findings import (
    InconsistencyError,
    StepProgress,
    VerificationSummary,
    require,
    translate_damage,
)
from oncelog.storage.verify.indexes import REPORT_ROWS, RowChecksum, check_uniqueness
from oncelog.storage.verify.source import LogState, VerificationSource, check_definitions


def check_file(connection: Any) -> None:
    """Run SQLite's check of the file, and compare Oncelog's schema with what the migrations create.

    The schema includes all indexes, triggers and views on Oncelog's tables. `quick_check` does not compare indexes with
    their tables: `check_indexes` does.
    """
    _check_by_sqlite(connection, "PRAGMA quick_check(1)")
    check_definitions(_build_expected_schema(), _load_schema(connection))


def check_indexes(connection: Any) -> Iterator[StepProgress]:
    """Run SQLite's comparison of Oncelog's tables with their indexes, because a missing entry hides a row.

    Other tables belong to the application, and their indexes may need functions that only the application defines.
    """
    tables = [name for (name,) in connection.execute(SQL["indexed_tables"])]
    for done, name in enumerate(tables):
        yield StepProgress("structure", done, len(tables))
        _check_by_sqlite(connection, f"PRAGMA integrity_check({name})")


def _check_by_sqlite(connection: Any, pragma: str) -> None:
    found = connection.execute(pragma).fetchone()
    require(
        found is not None and found[0] == "ok",
        "SQLite finds the file damaged: " + " ".join(str(found and found[0]).split()),
    )


@cache
def _build_expected_schema() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:")) as expected:
        for _, script in load_migrations():
            run_script(expected, script)
        return _load_schema(expected)


def _load_schema(connection: Any) -> dict[str, str]:
    """Return the definitions by kind and name: `index oncelog_members_member on oncelog_members`."""
    found = {}
    for kind, name, table, definition in connection.execute(SQL["schema"]):
        place = f" on {table}" if kind in {"index", "trigger"} else ""
        found[f"{kind} {name}{place}"] = str(definition)
    return found


def verify_quickly(connection: Any) -> None:
    """Run SQLite's check of the file, and verify the newest block of each lane. Raises InconsistencyError."""
    with translate_damage():
        check_file(connection)
        _check_newest(connection)


def _check_newest(connection: Any) -> None:
    """Compare each head with the newest block and the newest record of its lane."""
    for lane, head in run_query(connection, load_heads).items():
        rows = connection.execute(SQL["blocks"], (lane, head.height - 1, 2)).fetchall()
        block = Block(*rows[0]) if rows else None
        if head.height == 0 and block is None and head.position == 0:
            continue
        if block is None or len(rows) > 1 or block.height != head.height:
            raise InconsistencyError(f"the head has height {head.height}, but the newest block does not", lane)
        require(
            block.hash == head.block_hash and block.first_position + block.count - 1 == head.position,
            "the head does not match the newest block",
            lane,
            head.position,
        )
        last = connection.execute(SQL["last_place"], (encode_place(lane, (1 << POSITION_BITS) - 1),)).fetchone()[0]
        require(
            last == encode_place(lane, head.position),
            "the newest record is not at the head's position",
            lane,
            head.position,
        )


class FileSource(VerificationSource):
    """See `VerificationSource` for the contract of each method.

    Segments and jobs are loaded as they are stored; `check_keys` verifies them.
    """

    def __init__(self, view: FileView) -> None:
        self.view = view
        self._connection = view.connection
        self._connection.text_factory = _decode_text
        self._index = KeyIndex(view.metadata.index_secret)
        self._segments = [Segment(*row) for row in view.iterate_rows("segments")]
        self._jobs: Mapping[int, IndexJob] = {row[0]: decode_job(row) for row in view.iterate_rows("jobs")}
        self._lanes = load_lane_index_states(self._connection)
        self._sealed = RowChecksum()
        self._unsealed: list[tuple[int, int]] = []
        """Keys outside segments, about as many as a writer keeps in memory."""

    def check_structure(self) -> Iterator[StepProgress]:
        """See `VerificationSource`."""
        check_file(self._connection)
        yield from check_indexes(self._connection)

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """See `VerificationSource`."""
        columns = ", ".join(table.columns)
        statement = f"SELECT {columns} FROM oncelog_{table.name} ORDER BY lane, {', '.join(table.keys)}"  # noqa: S608
        return iter(self._connection.execute(statement))

    def iterate_evidence(self) -> Iterator[RowTuple]:
        """See `VerificationSource`."""
        return self.view.iterate_rows("all_evidence")

    def add(self, record: Record) -> None:
        """See `VerificationSource`."""
        place = encode_place(record.lane, record.position)
        identity = (record.policy, record.scope, record.client, record.client_sequence, record.key)
        for key_hash in self._index.hash_record(*identity):
            if self._is_sealed(key_hash, place):
                self._sealed.add(key_hash, place)
            else:
                self._unsealed.append((key_hash, place))

    def check_keys(self, state: LogState, summary: VerificationSummary) -> Iterator[StepProgress]:
        """See `VerificationSource`. A sealed key must be in exactly one segment."""
        self._check_sealing()
        self._check_listed()
        found = RowChecksum(self._sealed.secret)
        sealed = [self._iterate_segment(segment, found) for segment in self._segments]
        before = (-1, -1)
        group: list[int] = []
        unsealed = ((key_hash, place, False) for key_hash, place in sorted(self._unsealed))
        for key_hash, place, is_left in heapq.merge(*sealed, unsealed):
            is_twice = (key_hash, place) == before
            if is_left:
                if not is_twice:
                    raise InconsistencyError("the record's key was not merged", *decode_place(place))
                continue
            if is_twice:
                raise InconsistencyError("the record's key is in the key index twice", *decode_place(place))
            if key_hash != before[0]:
                self._check_uniqueness(group, state)
                group = []
            group.append(place)
            before = key_hash, place
            if found.rows % REPORT_ROWS == 0:
                yield StepProgress("keys", found.rows, self._sealed.rows)
        if found != self._sealed:
            self._raise_difference()
        self._check_uniqueness(group, state)
        summary.keys, summary.sealed_keys = found.rows + len(self._unsealed), found.rows
        summary.segments = len(self._segments)

    def _is_sealed(self, key_hash: int, place: int) -> bool:
        """Return whether a key must be in a segment. The newest keys are only in the records."""
        number, position = decode_place(place)
        lane = self._lanes.get(number)
        if lane is None:
            return False
        if position <= lane.sealed_position:
            return True
        sealing = self._jobs.get(0)
        return sealing is not None and position <= lane.sealing_position and key_hash <= sealing.cursor

    def _check_sealing(self) -> None:
        """Check that segments, jobs and lanes are consistent."""
        for number, lane in self._lanes.items():
            require(
                0 <= lane.sealed_position <= lane.position and 0 <= lane.sealing_position <= lane.position,
                "the key index has more sealed keys than the lane has records",
                number,
            )
            require(
                not lane.sealing_position or 0 in self._jobs,
                "the lane has keys that are being sealed, but the key index has no job for them",
                number,
            )
        segments = {segment.segment: segment for segment in self._segments}
        for job in self._jobs.values():
            levels = [segments[number].level if number in segments else None for number in (job.target, *job.sources)]
            require(
                levels == [job.level, *[job.level - 1] * len(job.sources)],
                f"a key index job on level {job.level} lists segments that do not exist",
            )
            is_inconsistent = len(set(job.sources)) != len(job.sources) or job.keys != segments[job.target].keys
            if is_inconsistent or not -1 <= job.cursor <= HASH_MAX or bool(job.sources) is (job.level == 0):
                raise InconsistencyError(f"a key index job on level {job.level} is inconsistent")

    def _check_uniqueness(self, places: Sequence[int], state: LogState) -> None:
        if len(places) > 1:
            found = (self.view.run_query(find_record, *decode_place(place)) for place in sorted(places))
            check_uniqueness(filter(None, found), state, self.get_log_time)

    def _check_listed(self) -> None:
        """Check that all keys are in listed segments, because lookups read no others."""
        listed = {segment.segment for segment in self._segments}
        segment = -(2**63)
        while (segment := self._connection.execute(SQL["next_segment"], (segment,)).fetchone()[0]) is not None:
            require(segment in listed, f"the key index has keys in segment {segment}, which is not listed")

    def _iterate_segment(self, segment: Segment, found: RowChecksum) -> Iterator[tuple[int, int, bool]]:
        """Yield the hash and place of each key, and whether a merge has already moved the key to its target.

        Lookups ignore a moved key in this segment.
        """
        filling = next((job for job in self._jobs.values() if job.target == segment.segment), None)
        draining = next((job for job in self._jobs.values() if segment.segment in job.sources), None)
        where = f"segment {segment.segment} of the key index"
        before = (-1, -1)
        keys = 0
        for row in self._iterate_keys(segment):
            key_hash, place = row
            if row <= before:
                raise InconsistencyError(f"{where} is out of order at the record's key", *decode_place(place))
            if not self._is_sealed(key_hash, place):
                raise InconsistencyError(
                    f"{where} has a key that is not sealed yet, or that no record has", *decode_place(place)
                )
            if filling and key_hash > filling.cursor:
                raise InconsistencyError(f"{where} has a key that belongs in another segment", *decode_place(place))
            before = row
            keys += 1
            is_left = draining is not None and key_hash <= draining.cursor
            if not is_left:
                found.add(key_hash, place)
            yield key_hash, place, is_left
        require(
            filling is not None or draining is not None or keys == segment.keys,
            f"{where} has {keys} keys, but {segment.keys} according to the list of segments",
        )

    def _iterate_keys(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """Yield the hash and place of each key in the runs of a segment."""
        where = f"segment {segment.segment} of the key index"
        before = -1
        for last, packed in self._connection.execute(SQL["segment_runs"], (segment.segment,)):
            try:
                hashes, places = unpack_run(packed, last)
            except CorruptError as error:
                raise InconsistencyError(f"{where}: {error}") from error
            require(hashes[0] > before, f"{where} has two runs for one hash")
            before = last
            yield from zip(hashes, places, strict=True)

    def _raise_difference(self) -> None:
        """Raise InconsistencyError for the key that is missing or points to a different record."""
        connection = self._connection
        for place, *identity in connection.execute(SQL["all_identities"]):
            for record_hash in self._index.hash_record(*identity):
                places = [
                    found
                    for segment in self._segments
                    for _, found in find_in_segment(connection, segment.segment, [record_hash])
                ]
                if self._is_sealed(record_hash, place) and place not in places:
                    raise InconsistencyError("the record's key is not in the key index", *decode_place(place))
        for segment in self._segments:
            for key_hash, place in self._iterate_keys(segment):
                identity = connection.execute(SQL["identity_at"], (place,)).fetchone()
                if identity is None or key_hash not in self._index.hash_record(*identity):
                    raise InconsistencyError(
                        "the key index lists the record under a different key", *decode_place(place)
                    )
        raise InconsistencyError("the key index does not match the records")


def _decode_text(data: bytes) -> str:
    """Decode text. Damaged text is decoded to a form that differs from every valid text in a log."""
    return data.decode("utf-8", "surrogateescape")
