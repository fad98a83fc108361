"""Merges segments of the key index into one, slice by slice."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from oncelog.storage.sqlite.key_index.filters import create_segment_filter
from oncelog.storage.sqlite.key_index.key_run import NUMBER_TYPECODE, KeyPairs, unpack_run, write_runs
from oncelog.storage.sqlite.statements import SQL

READ_RUNS: Final = 4
"""How many runs are read from each source at a time."""


class SegmentMerge:
    """A running merge, with the keys that have been read from its sources but not written yet."""

    def __init__(self, target: int, sources: Sequence[int], cursor: int, keys: int) -> None:
        self.target = target
        self.cursor = cursor
        self.filter = create_segment_filter(keys) if cursor < 0 else None
        """Filter of the target, if this object wrote the target from the beginning."""
        self._sources = [_SegmentReader(segment, cursor) for segment in sources]

    def advance(self, connection: Any, upto: int) -> None:
        """Copy the keys after the cursor to the target, up to and including a hash."""
        hashes: list[int] = []
        places: list[int] = []
        for source in self._sources:
            taken = source.take(connection, upto)
            hashes += taken[0]
            places += taken[1]
        write_runs(connection, self.target, _sort_pairs(hashes, places))
        if self.filter is not None:
            self.filter.update(hashes)
        self.cursor = upto


class _SegmentReader:
    """Reads a segment from a given hash to its end, a few runs at a time."""

    def __init__(self, segment: int, cursor: int) -> None:
        self._segment = segment
        self._cursor = cursor
        self._read_upto = cursor
        self._is_at_end = False
        self._hashes = array(NUMBER_TYPECODE)
        self._places = array(NUMBER_TYPECODE)

    def take(self, connection: Any, upto: int) -> KeyPairs:
        """Remove and return the next keys, up to a hash."""
        while self._read_upto < upto and not self._is_at_end:
            self._read(connection)
        end = bisect_right(self._hashes, upto)
        taken = self._hashes[:end], self._places[:end]
        del self._hashes[:end], self._places[:end]
        self._cursor = upto
        return taken

    def _read(self, connection: Any) -> None:
        row = (self._segment, self._read_upto, READ_RUNS)
        runs = connection.execute(SQL["runs_after"], row).fetchall()
        self._is_at_end = len(runs) < READ_RUNS
        for last, packed in runs:
            hashes, places = unpack_run(packed, last)
            # An earlier reader may have consumed part of the first run.
            begin = bisect_right(hashes, self._cursor)
            self._hashes.extend(hashes[begin:])
            self._places.extend(places[begin:])
            self._read_upto = last


def _sort_pairs(hashes: list[int], places: list[int]) -> KeyPairs:
    """Sort keys by hash, and keys of one hash by place."""
    place_of = dict(zip(hashes, places, strict=True))
    if len(place_of) == len(hashes):  # the usual case: sorting numbers is faster than sorting pairs
        hashes.sort()
        return hashes, [place_of[key_hash] for key_hash in hashes]
    pairs = sorted(zip(hashes, places, strict=True))
    return [key_hash for key_hash, _ in pairs], [place for _, place in pairs]
