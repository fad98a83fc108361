"""The key index: maps an identity's hash to the places where its record may be.

The index is derived from the records. Inserting into a B-tree becomes more expensive with every million random keys,
because every insert touches a different page. Keys therefore move through three steps:

    memtable  the newest keys, in memory only; rebuilt from the records when a file is opened
    sealed    sorted into a new segment, in runs of about 60 keys (key_run.py), appended in one direction
    merged    FAN_OUT segments of a level become one segment of the next level, so their number stays small

Sealing and merging run in slices inside the transactions of commits, in proportion to the keys of each commit, so no
commit waits for a large step. The same transaction saves the progress, and any process can continue the work. Lookups
of new keys skip all segments thanks to an in-memory filter over all sealed keys, and a filter for each segment tells
where a known key may be.

The index contains only keyed hashes of keys (`key_hash`). Every hit is checked against the record itself.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple, cast

from rbloom import Bloom

from oncelog.core.values import KeyIdentity, SequenceIdentity, decode_place, encode_place
from oncelog.storage.key_hash import HASH_MAX, hash_identities
from oncelog.storage.sqlite.key_index import key_run
from oncelog.storage.sqlite.key_index.filters import KeyFilters, LayeredBloomFilter, create_segment_filter
from oncelog.storage.sqlite.key_index.memtable import (
    HashOrder,
    Memtable,
    add_place,
    are_single,
    count_places,
    list_places,
)
from oncelog.storage.sqlite.key_index.merge import SegmentMerge
from oncelog.storage.sqlite.key_index.segments import (
    IndexDelta,
    IndexJob,
    Segment,
    count_sealed_keys,
    load_progress,
    select_segments_to_clear,
)
from oncelog.storage.sqlite.statements import SQL

SEAL_KEYS: Final = 32_768
"""Approximate number of keys in a lowest-level segment. The memtable holds up to about twice as many."""
FAN_OUT: Final = 16
"""Factor by which segments grow from level to level. Each level writes every key once more; from 8 million keys on, a
key is written twice. A lookup of a known key checks up to this many segments per level."""
WORK_FACTOR: Final = 1.1
"""How many keys the work on each level moves per new key. The factor is above 1, so that one job finishes before the
next begins, but only slightly, so that commits take the same time with and without work."""
SLICE_KEYS: Final = 480
"""Minimum keys per slice of work, but not more than an eighth of a segment. Consecutive slices share their first and
last pages, so very small slices would write these pages repeatedly."""


class LaneIndexState(NamedTuple):
    """Progress of the index in a lane."""

    position: int
    sealed_position: int
    sealing_position: int


CATCH_UP_KEYS_MAX: Final = 1000
"""Maximum number of unread keys of other processes at which `is_nearly_current` returns True."""


class KeyIndex:
    """The index as one process sees it. Only one thread may use it, and only inside transactions.

    In a transaction, call `catch_up` first; `find_places` is complete only after it. Call `stage` before `maintain`.
    The staged keys take effect with `confirm`, which follows COMMIT. After any error, the caller discards the index.
    """

    def __init__(self, secret: bytes, seal_keys: int = SEAL_KEYS) -> None:
        self._secret = secret
        self._seal_keys = seal_keys
        self._memtable: Memtable = {}
        self._sealing_memtable: Memtable = {}
        self._sealing_order: HashOrder | None = None
        self._lanes: dict[int, int] = {}
        self._borders: dict[int, tuple[int, int]] = {}
        self.segments: list[Segment] = []
        """All segments, complete or being filled."""
        self._jobs: dict[int, IndexJob] = {}
        self._merges: dict[int, SegmentMerge] = {}
        self.commits = -1
        """How many of the log's commits this index has loaded; below 0 before the first call of `catch_up`."""
        self._delta: IndexDelta | None = None
        self._unfiltered: list[int] = []
        self.awaits_filter = True
        """Whether sealed keys are collected for a filter that is filled later."""
        self._slice_keys = max(1, min(SLICE_KEYS, seal_keys // 8))
        self._work_due_keys = float(self._slice_keys)
        """Keys for which work is due. Starts at one slice, so that processes with a single commit contribute too."""
        self._filter: LayeredBloomFilter | None = None
        self._segment_filters: dict[int, Bloom] = {}
        """Filters of the segments that this process has read completely, or has written from the beginning."""

    def hash_identities(
        self, identities: Iterable[KeyIdentity | SequenceIdentity]
    ) -> dict[KeyIdentity | SequenceIdentity, int]:
        """Return the hash of each identity."""
        return hash_identities(self._secret, identities)

    # --- in a transaction

    def catch_up(self, connection: Any, commits: int, lanes: Mapping[int, LaneIndexState]) -> None:
        """Load everything that other processes have committed, sealed or merged since the last call."""
        if commits == self.commits:
            return
        self.segments, self._jobs = load_progress(connection, sum(lane.position for lane in lanes.values()))
        self._drop_stale_merges()
        borders = {number: (lane.sealed_position, lane.sealing_position) for number, lane in lanes.items()}
        if any(self._borders.get(number, (0, 0)) != border for number, border in borders.items()):
            self._reassign_keys(lanes)
        self._borders = borders
        is_new = self.commits < 0
        for number, lane in lanes.items():
            # Keys that were sealed before this index was created are in its filter, if it has one. Keys that other
            # processes have both committed and sealed since then are not. They are read here, because lookups would
            # otherwise treat them as new.
            known = self._lanes.get(number, lane.sealed_position if is_new else 0)
            if known < lane.position:
                bounds = (encode_place(number, known), encode_place(number, lane.position))
                self._add_rows(connection.execute(SQL["identities"], bounds).fetchall(), lane)
            self._lanes[number] = lane.position
        self.commits = commits

    def is_nearly_current(self, lanes: Mapping[int, LaneIndexState]) -> bool:
        """Return whether other processes have added so few keys that `catch_up` has little to do."""
        missing = 0
        for number, lane in lanes.items():
            if self._borders.get(number, (0, 0)) != (lane.sealed_position, lane.sealing_position):
                return False
            missing += lane.position - self._lanes.get(number, 0)
        return missing <= CATCH_UP_KEYS_MAX

    def find_places(self, connection: Any, hashes: Collection[int]) -> dict[int, list[int]]:
        """Return the possible places of hashes. Hashes that are certainly new are left out."""
        found: dict[int, list[int]] = {}
        for keys in (self._memtable, self._sealing_memtable):
            if not keys.keys().isdisjoint(hashes):  # one check for all, because most hashes are new
                for key_hash in hashes:
                    places = keys.get(key_hash)
                    if places is not None:
                        found.setdefault(key_hash, []).extend(list_places(places))
        # Search for hashes found in memory too: a different identity with the same hash may be sealed.
        sealed = (
            [] if not self.segments else [*hashes] if self._filter is None else self._filter.possible_members(hashes)
        )
        for segment, segment_hashes in self._select_segments(sorted(sealed)) if sealed else ():
            segment_filter = self._segment_filters.get(segment)
            candidates = (
                segment_hashes
                if segment_filter is None
                else [key_hash for key_hash in segment_hashes if key_hash in segment_filter]
            )
            for key_hash, place in key_run.find_in_segment(connection, segment, candidates) if candidates else ():
                found.setdefault(key_hash, []).append(place)
        return found

    def _select_segments(self, hashes: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield each segment with the hashes that it may contain, in ascending order.

        During a merge, the target has the keys up to the cursor, and the sources have the rest. Keys that are being
        sealed are still in memory.
        """
        ranges: dict[int, tuple[int, int]] = {}
        for job in self._jobs.values():
            done = bisect_right(hashes, job.cursor)
            ranges.update((source, (done, len(hashes))) for source in job.sources)
            ranges[job.target] = (0, done if job.sources else 0)
        for segment in self.segments:
            first, end = ranges.get(segment.segment, (0, len(hashes)))
            if first < end:
                yield segment.segment, hashes[first:end]

    def stage(self, added: list[tuple[int, int]], positions: Mapping[int, int]) -> None:
        """Stage the transaction's changes: hashes with their places, and the new positions of the lanes."""
        self._delta = IndexDelta(added, dict(self._jobs), list(self.segments), dict(positions))

    @property
    def is_staged(self) -> bool:
        """Return whether staged changes are waiting for `confirm`."""
        return self._delta is not None

    def maintain(self, connection: Any) -> None:
        """Run a slice of the due work in the same transaction. The lanes must have been saved already."""
        state = self._delta
        if state is None:
            return
        self._work_due_keys += WORK_FACTOR * len(state.added)
        if self._work_due_keys < self._slice_keys:
            return
        keys, self._work_due_keys = int(self._work_due_keys), 0.0
        self._begin_jobs(connection, state)
        for job in list(state.jobs.values()):
            if job.level == 0:
                self._seal(connection, state, job, keys)
            else:
                self._merge(connection, state, job, keys)

    def confirm(self) -> None:
        """Apply the staged changes after COMMIT."""
        state = self._delta
        if state is None:
            return
        if state.began_sealing:
            self._sealing_memtable, self._memtable, self._sealing_order = self._memtable, {}, state.sealing_order
        added: Memtable = dict(state.added)
        if len(added) == len(state.added) and self._memtable.keys().isdisjoint(added):
            self._memtable.update(added)
        else:
            for key_hash, place in state.added:
                add_place(self._memtable, key_hash, place)
        if state.sealed_segment:
            self._end_sealing(state.sealed_segment)
        self._jobs, self.segments = state.jobs, state.segments
        self._lanes.update(state.positions)
        self.commits += 1
        self._delta = None

    # --- the filter

    @property
    def has_filter(self) -> bool:
        """Return whether the index has its filter.

        Without it, every lookup reads segments, which is correct but slow.
        """
        return self._filter is not None

    def set_filters(self, filters: KeyFilters) -> None:
        """Use filters that cover all keys sealed up to some time after this index was created."""
        filters.sealed.add(self._unfiltered)
        self._unfiltered = []
        self._filter = filters.sealed
        existing = {segment.segment for segment in self.segments}
        self._segment_filters |= {
            number: segment_filter for number, segment_filter in filters.segments.items() if number in existing
        }

    # --- figures

    @property
    def memtable_keys(self) -> int:
        """Return how many keys are only in memory."""
        return len(self._memtable) + len(self._sealing_memtable)

    @property
    def segment_keys(self) -> int:
        """Return how many keys are in segments, without the keys that are being sealed."""
        return count_sealed_keys(self.segments, self._jobs.values())

    # --- inside

    def _reassign_keys(self, lanes: Mapping[int, LaneIndexState]) -> None:
        """Move memtable keys to their new state: being sealed, or sealed."""
        job = self._jobs.get(0)
        memtable: Memtable = {}
        sealing: Memtable = {}
        sealed: list[int] = []
        for key_hash, places in chain(self._sealing_memtable.items(), self._memtable.items()):
            for place in list_places(places):
                number, position = decode_place(place)
                lane = lanes[number]
                if position <= lane.sealed_position:
                    sealed.append(key_hash)
                elif job is not None and position <= lane.sealing_position:
                    add_place(sealing, key_hash, place)
                else:
                    add_place(memtable, key_hash, place)
        self._add_to_filter(sealed)
        self._memtable, self._sealing_memtable, self._sealing_order = memtable, sealing, None

    def _add_rows(self, rows: Iterable[tuple[Any, ...]], lane: LaneIndexState) -> None:
        sealing_position = lane.sealing_position if 0 in self._jobs else 0
        sealed: list[int] = []
        for place, *identity in rows:
            hashes = self.hash_record(*identity)
            position = decode_place(place)[1]
            if position <= lane.sealed_position:
                sealed += hashes
                continue
            target = self._memtable
            if position <= sealing_position:
                target, self._sealing_order = self._sealing_memtable, None
            for key_hash in hashes:
                add_place(target, key_hash, place)
        self._add_to_filter(sealed)

    def hash_record(self, policy: str, scope: str, client: str, client_sequence: int, key: bytes) -> list[int]:
        """Return the hashes of a record's key and of its client sequence."""
        identities: list[KeyIdentity | SequenceIdentity] = []
        if key:
            # A client has its own key space only if it numbers its writes (core.values.key_identity).
            identities.append((policy, scope, client if client_sequence else "", key))
        if client_sequence:
            identities.append((policy, scope, client, client_sequence))
        return list(self.hash_identities(identities).values())

    def _begin_jobs(self, connection: Any, delta: IndexDelta) -> None:
        if 0 not in delta.jobs and not self._sealing_memtable and len(self._memtable) >= self._seal_keys:
            # Sealing covers the positions before this transaction, so the transaction's keys remain in the memtable.
            connection.executemany(SQL["start_sealing"], [(position, lane) for lane, position in self._lanes.items()])
            delta.begin_job(connection, 0, (), count_places(self._memtable))
            delta.began_sealing = True
            delta.sealing_order = HashOrder(self._memtable)
        filling = {job.target for job in delta.jobs.values()}
        levels: dict[int, list[Segment]] = {}
        for segment in delta.segments:
            if segment.segment not in filling:
                levels.setdefault(segment.level, []).append(segment)
        for level, segments in levels.items():
            if len(segments) >= FAN_OUT and level + 1 not in delta.jobs:
                sources = segments[:FAN_OUT]
                keys = sum(segment.keys for segment in sources)
                delta.begin_job(connection, level + 1, tuple(segment.segment for segment in sources), keys)

    def _seal(self, connection: Any, delta: IndexDelta, job: IndexJob, count: int) -> None:
        keys = self._memtable if delta.began_sealing else self._sealing_memtable
        order = delta.sealing_order if delta.began_sealing else self._sealing_order
        if order is None:
            order = self._sealing_order = HashOrder(keys)
        hashes = order.list_after(job.cursor, count + 1)
        has_more = len(hashes) > count
        del hashes[count:]
        places = [keys[key_hash] for key_hash in hashes]
        if are_single(places):
            key_run.write_runs(connection, job.target, (hashes, cast("list[int]", places)))
        else:
            pairs = [(key_hash, place) for key_hash in hashes for place in sorted(list_places(keys[key_hash]))]
            key_run.write_runs(
                connection, job.target, ([key_hash for key_hash, _ in pairs], [place for _, place in pairs])
            )
        if has_more:
            delta.advance_job(connection, job, hashes[-1])
        else:
            connection.execute(SQL["end_sealing"])
            delta.end_job(connection, job)
            delta.sealed_segment = job.target

    def _merge(self, connection: Any, delta: IndexDelta, job: IndexJob, count: int) -> None:
        """Merge a part of the hash range.

        Hashes are uniformly distributed, so the part contains the same share of the keys.
        """
        upto = min(HASH_MAX, job.cursor + max(1, (HASH_MAX + 1) * count // max(1, job.keys)))
        merge = self._merges.get(job.level)
        if merge is None:
            merge = self._merges[job.level] = SegmentMerge(job.target, job.sources, job.cursor, job.keys)
            if merge.filter is not None:
                self._segment_filters[job.target] = merge.filter
        merge.advance(connection, upto)
        for segment in select_segments_to_clear(job, upto):
            connection.execute(SQL["drop_runs"], (segment, upto))
        if upto < HASH_MAX:
            delta.advance_job(connection, job, upto)
        else:
            del self._merges[job.level]
            for segment in job.sources:
                self._segment_filters.pop(segment, None)
            delta.end_job(connection, job)

    def _drop_stale_merges(self) -> None:
        """Drop merges that another process has continued, and filters of segments that no longer exist."""
        for level, merge in list(self._merges.items()):
            job = self._jobs.get(level)
            if job is None or (merge.target, merge.cursor) != (job.target, job.cursor):
                del self._merges[level]
                self._segment_filters.pop(merge.target, None)
        for segment in self._segment_filters.keys() - {segment.segment for segment in self.segments}:
            del self._segment_filters[segment]

    def _end_sealing(self, segment: int) -> None:
        """Add all sealed keys to the filters in one go.

        Adding them slice by slice, between other work, takes several times as long.
        """
        hashes = list(self._sealing_memtable)
        self._add_to_filter(hashes)
        self._segment_filters[segment] = segment_filter = create_segment_filter(len(hashes))
        segment_filter.update(hashes)
        self._sealing_memtable, self._sealing_order = {}, None

    def _add_to_filter(self, hashes: list[int]) -> None:
        if self._filter is None:
            self._unfiltered += hashes if self.awaits_filter else ()
        elif hashes:
            self._filter.add(hashes)
