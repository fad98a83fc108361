"""The key index: at which places the record of an identity may stand.

The records are the truth, this is derived from them. A B-tree over millions of random keys costs more with every
million, because every insert touches a page of its own. So keys come to it in three steps:

    hot       the newest keys, in memory alone; made anew from the records when a file is opened
    sealed    sorted into a segment of their own, in runs of some dozens (runs.py), appended in one direction
    merged    FAN_OUT segments of a level become one of the next, so that there are never many

Sealing and merging are done in slices inside the transactions of commits, in proportion to what each commit adds: no
commit waits for a large one. Whatever is under way is written down in the same transaction, and any process can go
on with it. A filter in memory over all sealed keys lets a new key pass without a look at any segment, and one for each
segment says where a known key may be.

Keys are known here by a keyed hash (`key_hash`); a hit is checked against the record itself.
"""

import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, cast

from rbloom import Bloom

from oncelog.core.values import KeyIdentity, SequenceIdentity
from oncelog.stores.key_hash import HASH_MAX, hashes_of
from oncelog.stores.sqlite import runs
from oncelog.stores.sqlite.filters import Filter, Filters, filter_of_segment
from oncelog.stores.sqlite.hot import Hot, Order, are_alone, count_of, listed, put
from oncelog.stores.sqlite.jobs import Job, Next, Segment, demand_possible, job_of, to_be_cleared
from oncelog.stores.sqlite.merging import Merge
from oncelog.stores.sqlite.statements import SQL

SEAL_KEYS: Final = 32_768
"""A segment of the lowest level has about this many keys; about twice as many can be hot."""
FAN_OUT: Final = 16
"""Each level is so many times larger than the one below, and every key is written once more for each of them: with 16
twice from 8 million keys on. There may be as many segments of each to look for a known key in."""
PACE: Final = 1.1
"""Keys that each level's work moves on for every new key. Above 1, so that it ends before the next begins; and not by
much, so that commits take as long while there is work as while there is none."""
SLICE_KEYS: Final = 480
"""Work is done for so many keys at a time at least, or an eighth of a segment: each time begins and ends with pages
that the next one takes up again."""
POSITION_BITS: Final = 48


def place_of(lane: int, position: int) -> int:
    """Lane and position as one number."""
    return lane << POSITION_BITS | position


def lane_and_position(place: int) -> tuple[int, int]:
    """What a place is made of."""
    return place >> POSITION_BITS, place & (1 << POSITION_BITS) - 1


class Lane(NamedTuple):
    """How far a lane's keys have come."""

    position: int
    sealed_position: int
    sealing_position: int


SOON_KEYS: Final = 1000
"""So many of others' are taken in soon."""


class KeyIndex:
    """One process's view of the index. Used inside transactions only, by one thread.

    Within a transaction call `catch_up` first; `find` then is complete. What the transaction adds is told by `stage`
    before `maintain`, and counts from `confirm` on, after COMMIT. After any error throw the whole index away.
    """

    def __init__(self, secret: bytes, seal_keys: int = SEAL_KEYS) -> None:
        self._secret = secret
        self._seal_keys = seal_keys
        self._hot: Hot = {}
        self._sealing: Hot = {}
        self._sealing_order: Order | None = None
        self._lanes: dict[int, int] = {}
        self._borders: dict[int, tuple[int, int]] = {}
        self._segments: list[Segment] = []
        self._jobs: dict[int, Job] = {}
        self._merges: dict[int, Merge] = {}
        self._commits = -1
        self._staged: list[tuple[int, int]] = []
        self._next: Next | None = None
        self._unfiltered: list[int] = []
        self._awaits_filter = True
        self._slice_keys = max(1, min(SLICE_KEYS, seal_keys // 8))
        self._owed = float(self._slice_keys)
        """For how many keys work is to be done. At first for some, also if this process ends after a single commit."""
        self._filter: Filter | None = None
        self._segment_filters: dict[int, Bloom] = {}
        """A filter of each segment that this process has read, or has made from its beginning."""

    def hash_of(self, identity: KeyIdentity | SequenceIdentity) -> int:
        """What an identity is known by. A number in place of the key makes it that of a client's sequence."""
        return self.hashes_of((identity,))[identity]

    def hashes_of(
        self, identities: Iterable[KeyIdentity | SequenceIdentity]
    ) -> dict[KeyIdentity | SequenceIdentity, int]:
        """What each of them is known by."""
        return hashes_of(self._secret, identities)

    # --- in a transaction

    def catch_up(self, connection: Any, commits: int, lanes: Mapping[int, Lane]) -> None:
        """Takes in what other processes have committed, sealed and merged since the last time."""
        if commits == self._commits:
            return
        self._segments = [Segment(*row) for row in connection.execute(SQL["segments"]).fetchall()]
        self._jobs = {row[0]: job_of(row) for row in connection.execute(SQL["jobs"]).fetchall()}
        demand_possible(self._segments, self._jobs.values(), sum(lane.position for lane in lanes.values()))
        self._forget_merges()
        borders = {number: (lane.sealed_position, lane.sealing_position) for number, lane in lanes.items()}
        if any(self._borders.get(number, (0, 0)) != border for number, border in borders.items()):
            self._split(lanes)
        self._borders = borders
        is_new = self._commits < 0
        for number, lane in lanes.items():
            # What was sealed before this index was made is in its filter, or the index has none. What others have
            # both committed and sealed since is not: it is read here, or it would pass for new.
            known = self._lanes.get(number, lane.sealed_position if is_new else 0)
            if known < lane.position:
                bounds = (place_of(number, known), place_of(number, lane.position))
                self._take_in(connection.execute(SQL["identities"], bounds).fetchall(), lane)
            self._lanes[number] = lane.position
        self._commits = commits

    def is_soon_caught_up(self, lanes: Mapping[int, Lane]) -> bool:
        """Whether `catch_up` would have little to do."""
        missing = 0
        for number, lane in lanes.items():
            if self._borders.get(number, (0, 0)) != (lane.sealed_position, lane.sealing_position):
                return False
            missing += lane.position - self._lanes.get(number, 0)
        return missing <= SOON_KEYS

    def find(self, connection: Any, hashes: Collection[int]) -> dict[int, list[int]]:
        """The places of those that may be known, and nothing of those that are certainly new."""
        found: dict[int, list[int]] = {}
        for keys in (self._hot, self._sealing):
            if not keys.keys().isdisjoint(hashes):  # new ones, as most are, are asked for all at once
                for one in hashes:
                    places = keys.get(one)
                    if places is not None:
                        found.setdefault(one, []).extend(listed(places))
        # Also what was found: another identity of the same hash may be sealed.
        sealed = [] if not self._segments else [*hashes] if self._filter is None else self._filter.among(hashes)
        for segment, some in self._where(sorted(sealed)) if sealed else ():
            inside = self._segment_filters.get(segment)
            likely = some if inside is None else [one for one in some if one in inside]
            for one, place in runs.find(connection, segment, likely) if likely else ():
                found.setdefault(one, []).append(place)
        return found

    def _where(self, hashes: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Segments, and which of the hashes may be in each. They come in the order in which they lie there.

        Of a merge that is under way, the target has those up to its cursor, and the sources the others. What is being
        sealed is in memory as well.
        """
        ranges: dict[int, tuple[int, int]] = {}
        for job in self._jobs.values():
            done = bisect_right(hashes, job.cursor)
            ranges.update((source, (done, len(hashes))) for source in job.sources)
            ranges[job.target] = (0, done if job.sources else 0)
        for segment in self._segments:
            first, end = ranges.get(segment.segment, (0, len(hashes)))
            if first < end:
                yield segment.segment, hashes[first:end]

    def stage(self, added: list[tuple[int, int]], positions: Mapping[int, int]) -> None:
        """Notes what the transaction adds: hashes with their places, and the new positions of the lanes."""
        self._staged = added
        self._next = Next(dict(self._jobs), list(self._segments), dict(positions))

    @property
    def commits(self) -> int:
        """How many of the log's commits it knows."""
        return self._commits

    @property
    def is_staged(self) -> bool:
        """There is something that waits for `confirm`."""
        return self._next is not None

    def maintain(self, connection: Any) -> None:
        """Does a slice of the work that is due, in the same transaction. Call after the lanes have been saved."""
        state = self._next
        if state is None:
            return
        self._owed += PACE * len(self._staged)
        if self._owed < self._slice_keys:
            return
        keys, self._owed = int(self._owed), 0.0
        self._begin_jobs(connection, state)
        for job in list(state.jobs.values()):
            if job.level == 0:
                self._seal(connection, state, job, keys)
            else:
                self._merge(connection, state, job, keys)

    def confirm(self) -> None:
        """The transaction has been committed."""
        state = self._next
        if state is None:
            return
        if state.began_sealing:
            self._sealing, self._hot, self._sealing_order = self._hot, {}, state.sealing_order
        added: Hot = dict(self._staged)
        if len(added) == len(self._staged) and self._hot.keys().isdisjoint(added):
            self._hot.update(added)
        else:
            for one, place in self._staged:
                put(self._hot, one, place)
        if state.ended_sealing_of:
            self._end_sealing(state.ended_sealing_of)
        self._jobs, self._segments = state.jobs, state.segments
        self._lanes.update(state.positions)
        self._commits += 1
        self._staged, self._next = [], None

    # --- the filter

    @property
    def has_filter(self) -> bool:
        """Without it every look goes to the segments: right, but slower."""
        return self._filter is not None

    def do_without_filter(self) -> None:
        """Nobody will fill one, so what should be in it need not be remembered."""
        self._awaits_filter = False

    def use_filters(self, filters: Filters) -> None:
        """Takes filters over all keys that had been sealed at some time after this index was made."""
        filters.sealed.update(self._unfiltered)
        self._unfiltered = []
        self._filter = filters.sealed
        there = {segment.segment for segment in self._segments}
        self._segment_filters |= {one: inside for one, inside in filters.segments.items() if one in there}

    # --- figures

    @property
    def hot_keys(self) -> int:
        """How many keys are in memory alone."""
        return len(self._hot) + len(self._sealing)

    @property
    def sealed_keys(self) -> int:
        """How many keys are in segments, those that are being sealed left out."""
        # What is being merged is in source or target, and counted in both.
        return sum(segment.keys for segment in self._segments) - sum(job.keys for job in self._jobs.values())

    @property
    def memory_bytes(self) -> int:
        """What all of it takes, to within the interpreter's own book-keeping."""
        hot = sum(sys.getsizeof(keys) for keys in (self._hot, self._sealing))
        numbers = 2 * sys.getsizeof(2**62) * self.hot_keys
        sealing_order = self._sealing_order  # once: the writer's thread may let go of it at any moment
        order = sealing_order.memory_bytes if sealing_order is not None else 0
        merges = sum(merge.memory_bytes for merge in list(self._merges.values()))
        filters = sum(one.size_in_bits // 8 for one in list(self._segment_filters.values()))
        return hot + numbers + order + merges + filters + (self._filter.memory_bytes if self._filter else 0)

    @property
    def segments(self) -> Sequence[Segment]:
        """All segments, complete or being filled."""
        return self._segments

    # --- inside

    def _split(self, lanes: Mapping[int, Lane]) -> None:
        """Moves hot keys to where the lanes say they are by now: being sealed, or sealed."""
        job = self._jobs.get(0)
        hot: Hot = {}
        sealing: Hot = {}
        sealed: list[int] = []
        for one, places in chain(self._sealing.items(), self._hot.items()):
            for place in listed(places):
                number, position = lane_and_position(place)
                lane = lanes[number]
                if position <= lane.sealed_position:
                    sealed.append(one)
                elif job is not None and position <= lane.sealing_position:
                    put(sealing, one, place)
                else:
                    put(hot, one, place)
        self._filter_sealed(sealed)
        self._hot, self._sealing, self._sealing_order = hot, sealing, None

    def _take_in(self, rows: Iterable[tuple[Any, ...]], lane: Lane) -> None:
        sealing_position = lane.sealing_position if 0 in self._jobs else 0
        sealed: list[int] = []
        for place, *identity in rows:
            hashes = self.hashes_of_record(*identity)
            position = lane_and_position(place)[1]
            if position <= lane.sealed_position:
                sealed += hashes
                continue
            target = self._hot
            if position <= sealing_position:
                target, self._sealing_order = self._sealing, None
            for one in hashes:
                put(target, one, place)
        self._filter_sealed(sealed)

    def hashes_of_record(self, policy: str, scope: str, client: str, client_sequence: int, key: bytes) -> list[int]:
        """Under what a record can be found: its key, and the number its client gave it."""
        hashes = []
        if key:
            # Only clients that number their writes have keys of their own (core.values.key_identity).
            hashes.append(self.hash_of((policy, scope, client if client_sequence else "", key)))
        if client_sequence:
            hashes.append(self.hash_of((policy, scope, client, client_sequence)))
        return hashes

    def _begin_jobs(self, connection: Any, state: Next) -> None:
        if 0 not in state.jobs and not self._sealing and len(self._hot) >= self._seal_keys:
            # What this transaction adds stays hot: the border is where the lanes stood before it.
            connection.executemany(SQL["start_sealing"], [(position, lane) for lane, position in self._lanes.items()])
            state.begin(connection, 0, (), count_of(self._hot))
            state.began_sealing = True
            state.sealing_order = Order(self._hot)
        filling = {job.target for job in state.jobs.values()}
        levels: dict[int, list[Segment]] = {}
        for segment in state.segments:
            if segment.segment not in filling:
                levels.setdefault(segment.level, []).append(segment)
        for level, segments in levels.items():
            if len(segments) >= FAN_OUT and level + 1 not in state.jobs:
                sources = segments[:FAN_OUT]
                keys = sum(segment.keys for segment in sources)
                state.begin(connection, level + 1, tuple(segment.segment for segment in sources), keys)

    def _seal(self, connection: Any, state: Next, job: Job, count: int) -> None:
        keys = self._hot if state.began_sealing else self._sealing
        order = state.sealing_order if state.began_sealing else self._sealing_order
        if order is None:
            order = self._sealing_order = Order(keys)
        hashes = order.after(job.cursor, count + 1)
        has_more = len(hashes) > count
        del hashes[count:]
        places = [keys[one] for one in hashes]
        if are_alone(places):
            runs.write_runs(connection, job.target, (hashes, cast("list[int]", places)))
        else:
            pairs = [(one, place) for one in hashes for place in sorted(listed(keys[one]))]
            runs.write_runs(connection, job.target, ([one for one, _ in pairs], [place for _, place in pairs]))
        if has_more:
            state.advance(connection, job, hashes[-1])
        else:
            connection.execute(SQL["end_sealing"])
            state.end(connection, job)
            state.ended_sealing_of = job.target

    def _merge(self, connection: Any, state: Next, job: Job, count: int) -> None:
        """Hashes are spread evenly, so a part of their range is that part of the keys."""
        upto = min(HASH_MAX, job.cursor + max(1, (HASH_MAX + 1) * count // max(1, job.keys)))
        merge = self._merges.get(job.level)
        if merge is None:
            merge = self._merges[job.level] = Merge(job.target, job.sources, job.cursor, job.keys)
            if merge.filter is not None:
                self._segment_filters[job.target] = merge.filter
        merge.advance(connection, upto)
        for segment in to_be_cleared(job, upto):
            connection.execute(SQL["drop_runs"], (segment, upto))
        if upto < HASH_MAX:
            state.advance(connection, job, upto)
        else:
            del self._merges[job.level]
            for segment in job.sources:
                self._segment_filters.pop(segment, None)
            state.end(connection, job)

    def _forget_merges(self) -> None:
        """What this process has of merges that another has gone on with, and of segments that are gone."""
        for level, merge in list(self._merges.items()):
            job = self._jobs.get(level)
            if job is None or (merge.target, merge.cursor) != (job.target, job.cursor):
                del self._merges[level]
                self._segment_filters.pop(merge.target, None)
        for segment in self._segment_filters.keys() - {segment.segment for segment in self._segments}:
            del self._segment_filters[segment]

    def _end_sealing(self, segment: int) -> None:
        """Takes them into the filters all at once: slice by slice, among other work, it takes several times as long."""
        hashes = list(self._sealing)
        self._filter_sealed(hashes)
        self._segment_filters[segment] = inside = filter_of_segment(len(hashes))
        inside.update(hashes)
        self._sealing, self._sealing_order = {}, None

    def _filter_sealed(self, hashes: list[int]) -> None:
        if self._filter is None:
            self._unfiltered += hashes if self._awaits_filter else ()
        elif hashes:
            self._filter.update(hashes)
