"""Segments of the key index, and the sealing and merging in progress."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple

import orjson
from msgspec import Struct

from oncelog.errors import CorruptError
from oncelog.storage.key_hash import HASH_MAX
from oncelog.storage.metadata import DAMAGE_HINT
from oncelog.storage.sqlite.key_index import key_run
from oncelog.storage.sqlite.key_index.memtable import HashOrder
from oncelog.storage.sqlite.statements import SQL

KEYS_PER_RECORD_MAX: Final = 2
CLEAR_RUNS: Final = 16
"""How many runs of a merged source are deleted together. Single deletions would write the same pages repeatedly."""


class Segment(NamedTuple):
    """Sorted keys, in runs."""

    segment: int
    level: int
    keys: int


class IndexJob(NamedTuple):
    """Work that fills a segment. Level 0 is filled from memory, higher levels from their source segments."""

    level: int
    target: int
    sources: tuple[int, ...]
    keys: int
    cursor: int


def decode_job(row: tuple[Any, ...]) -> IndexJob:
    """Decode a row of the statement `jobs`. Raises CorruptError."""
    level, target, sources, keys, cursor = row
    try:
        return IndexJob(level, target, tuple(orjson.loads(sources)), keys, cursor)
    except (ValueError, TypeError) as error:
        message = f"a key index job has the sources {sources!r}, which are not a list of segments"
        raise CorruptError(f"{message}; {DAMAGE_HINT}") from error


def load_progress(connection: Any, records: int) -> tuple[list[Segment], dict[int, IndexJob]]:
    """Return the segments, and the jobs by level. Raises CorruptError if `records` records cannot have that many
    keys."""
    segments = [Segment(*row) for row in connection.execute(SQL["segments"]).fetchall()]
    jobs = {row[0]: decode_job(row) for row in connection.execute(SQL["jobs"]).fetchall()}
    _check_key_counts(segments, jobs.values(), records)
    return segments, jobs


def _check_key_counts(segments: Iterable[Segment], jobs: Iterable[IndexJob], records: int) -> None:
    """Raise CorruptError for an impossible key count, because memory is allocated for that many keys."""
    for counted in chain[Segment | IndexJob](segments, jobs):
        if not 0 <= counted.keys <= KEYS_PER_RECORD_MAX * records:
            problem = f"a segment with {counted.keys} keys in a log of {records} records"
            raise CorruptError(f"the key index claims {problem}; {DAMAGE_HINT}")


def count_sealed_keys(segments: Iterable[Segment], jobs: Iterable[IndexJob]) -> int:
    """Return how many keys are in segments, without the keys that are being sealed."""
    # Keys that are being merged are counted in both the sources and the target.
    return sum(segment.keys for segment in segments) - sum(job.keys for job in jobs)


class IndexDelta(Struct):
    """Changes made by a transaction, and the segments and jobs that result."""

    added: list[tuple[int, int]]
    """Hashes of new keys with their places."""
    jobs: dict[int, IndexJob]
    segments: list[Segment]
    positions: dict[int, int]
    began_sealing: bool = False
    sealed_segment: int = 0
    """Segment that the transaction completed, or 0."""
    sealing_order: HashOrder | None = None

    def begin_job(self, connection: Any, level: int, sources: tuple[int, ...], keys: int) -> None:
        """Start a job, and add the segment that it fills."""
        target = max((segment.segment for segment in self.segments), default=0) + 1
        self.segments.append(Segment(target, level, keys))
        connection.execute(SQL["add_segment"], (target, level, keys))
        self.advance_job(connection, IndexJob(level, target, sources, keys, -1), -1)

    def advance_job(self, connection: Any, job: IndexJob, cursor: int) -> None:
        """Save the hash that a job has reached."""
        self.jobs[job.level] = job._replace(cursor=cursor)
        row = (job.level, job.target, orjson.dumps(job.sources).decode(), job.keys, cursor)
        connection.execute(SQL["save_job"], row)

    def end_job(self, connection: Any, job: IndexJob) -> None:
        """End a job, and drop its sources."""
        del self.jobs[job.level]
        connection.execute(SQL["end_job"], (job.level,))
        connection.execute(SQL["drop_segments"], (orjson.dumps(job.sources).decode(),))
        self.segments = [segment for segment in self.segments if segment.segment not in job.sources]


def select_segments_to_clear(job: IndexJob, upto: int) -> Iterator[int]:
    """Yield the merge sources whose merged runs should be deleted when the merge reaches a hash.

    The sources are cleared one after another, each after about CLEAR_RUNS merged runs. Lookups ignore runs below the
    cursor, so deleting them late only costs space. The selection depends on the cursor alone, so any process can
    continue it.
    """
    if upto == HASH_MAX:
        yield from job.sources
        return
    times = max(1, job.keys // (len(job.sources) * CLEAR_RUNS * key_run.RUN_KEYS))
    width = (HASH_MAX + 1) // times
    for number, segment in enumerate(job.sources):
        shift = number * width // len(job.sources)
        if (upto + shift) // width > (job.cursor + shift) // width:
            yield segment
