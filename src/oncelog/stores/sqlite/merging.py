"""Several segments of the key index become one, slice by slice."""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from oncelog.stores.sqlite.filters import filter_of_segment
from oncelog.stores.sqlite.runs import NUMBER, Pairs, keys_of, write_runs
from oncelog.stores.sqlite.statements import SQL

RUNS_AT_ONCE: Final = 4
"""So many are read at once from each source."""


class Merge:
    """A merge that is under way: what has been read of its sources and not been written yet."""

    def __init__(self, target: int, sources: Sequence[int], cursor: int, keys: int) -> None:
        self.target = target
        self.cursor = cursor
        self.filter = filter_of_segment(keys) if cursor < 0 else None
        """Of what the target has, if all of it was written by this one."""
        self._sources = [_Source(segment, cursor) for segment in sources]

    def advance(self, connection: Any, upto: int) -> None:
        """Copies what lies between the cursor and a hash to the target."""
        hashes: list[int] = []
        places: list[int] = []
        for source in self._sources:
            some = source.taken(connection, upto)
            hashes += some[0]
            places += some[1]
        write_runs(connection, self.target, _in_order(hashes, places))
        if self.filter is not None:
            self.filter.update(hashes)
        self.cursor = upto

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return sum(source.memory_bytes for source in self._sources)


class _Source:
    """A segment that is read from a hash on, some runs at a time."""

    def __init__(self, segment: int, cursor: int) -> None:
        self._segment = segment
        self._cursor = cursor
        self._read_upto = cursor
        self._is_at_end = False
        self._hashes = array(NUMBER)
        self._places = array(NUMBER)

    def taken(self, connection: Any, upto: int) -> Pairs:
        """What lies behind what was taken before, up to a hash."""
        while self._read_upto < upto and not self._is_at_end:
            self._read(connection)
        end = bisect_right(self._hashes, upto)
        some = self._hashes[:end], self._places[:end]
        del self._hashes[:end], self._places[:end]
        self._cursor = upto
        return some

    def _read(self, connection: Any) -> None:
        row = (self._segment, self._read_upto, RUNS_AT_ONCE)
        runs = connection.execute(SQL["runs_after"], row).fetchall()
        self._is_at_end = len(runs) < RUNS_AT_ONCE
        for last, packed in runs:
            hashes, places = keys_of(packed, last)
            # Of the first run a part may have been taken before this was made.
            begin = bisect_right(hashes, self._cursor)
            self._hashes.extend(hashes[begin:])
            self._places.extend(places[begin:])
            self._read_upto = last

    @property
    def memory_bytes(self) -> int:
        return sys.getsizeof(self._hashes) + sys.getsizeof(self._places)


def _in_order(hashes: list[int], places: list[int]) -> Pairs:
    """Keys by hash, and those of one hash by place."""
    place_of = dict(zip(hashes, places, strict=True))
    if len(place_of) == len(hashes):  # as nearly always: numbers are sorted sooner than pairs
        hashes.sort()
        return hashes, [place_of[one] for one in hashes]
    pairs = sorted(zip(hashes, places, strict=True))
    return [one for one, _ in pairs], [place for _, place in pairs]
