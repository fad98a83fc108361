"""Runs: sorted keys of the key index, some dozens in one row.

A row for each key costs SQLite more than the key is worth: to write, to move when segments are merged, and to take out
again. In a run it is sixteen bytes among others. `last` is the highest hash of a run, so the run that may have a hash
is the first whose `last` is not below it. Keys of one hash are never divided between two runs.

    keys      all hashes in their order, then as many places: numbers of 8 bytes, the lowest byte first
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import orjson

from oncelog.errors import CorruptError
from oncelog.stores.sqlite.statements import SQL, Insert

RUN_KEYS: Final = 60
"""So many fill a quarter of a page, the most that SQLite keeps in a page of such a table and not beside it."""
RUNS_AT_ONCE: Final = 4
"""So many are read at once from each source of a merge."""

_NUMBER: Final = "q"
_NUMBER_BYTES: Final = 8
_IS_SWAPPED: Final = sys.byteorder == "big"
_insert: Final = Insert("oncelog_key_runs", ("segment", "last", "keys"))

Pairs = tuple[Sequence[int], Sequence[int]]
"""Hashes in their order, and the place of each."""


def write_runs(connection: Any, segment: int, keys: Pairs) -> None:
    """Writes keys behind those that a segment has."""
    rows = [(segment, last, packed) for last, packed in packed_runs(keys)]
    _insert(connection, rows, len(rows))


def packed_runs(keys: Pairs) -> Iterator[tuple[int, bytes]]:
    """Keys in as few runs as they need, all about as long."""
    hashes, places = keys
    runs = -(-len(hashes) // RUN_KEYS)
    begin = 0
    for number in range(1, runs + 1):
        end = number * len(hashes) // runs
        if end <= begin:
            continue  # those of one hash have gone before
        if end < len(hashes) and hashes[end] == hashes[end - 1]:
            end = bisect_right(hashes, hashes[end], end)
        yield hashes[end - 1], _bytes_of(hashes[begin:end]) + _bytes_of(places[begin:end])
        begin = end


def keys_of(packed: bytes) -> Pairs:
    """What a run has."""
    numbers = _numbers_of(packed)
    middle = len(numbers) // 2
    return numbers[:middle], numbers[middle:]


def find(connection: Any, segment: int, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of some hashes those that are in a segment, each with its place."""
    sought = {"hashes": orjson.dumps(hashes).decode(), "segment": segment}
    for one, packed in connection.execute(SQL["find_runs"], sought).fetchall():
        if packed is None:
            continue
        numbers = _numbers_of(packed)
        middle = len(numbers) // 2
        at = bisect_left(numbers, one, 0, middle)
        while at < middle and numbers[at] == one:
            yield one, numbers[middle + at]
            at += 1


def hashes_in(rows: Iterable[tuple[bytes]]) -> list[int]:
    """The hashes of several runs."""
    hashes: list[int] = []
    for (packed,) in rows:
        hashes += keys_of(packed)[0]
    return hashes


class Merge:
    """A merge that is under way: what has been read of its sources and not been written yet."""

    def __init__(self, target: int, sources: Sequence[int], cursor: int) -> None:
        self.target = target
        self.cursor = cursor
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
        self._hashes = array(_NUMBER)
        self._places = array(_NUMBER)

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
            numbers = _numbers_of(packed)
            middle = len(numbers) // 2
            # Of the first run a part may have been taken before this was made.
            begin = bisect_right(numbers, self._cursor, 0, middle)
            self._hashes += numbers[begin:middle]
            self._places += numbers[middle + begin :]
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


def _numbers_of(packed: bytes) -> "array[int]":
    """The hashes, and as many places."""
    if not packed or len(packed) % (2 * _NUMBER_BYTES):
        raise CorruptError(f"the key index has a run of {len(packed)} bytes, which are no whole keys")
    numbers = array(_NUMBER, packed)
    if _IS_SWAPPED:
        numbers.byteswap()
    return numbers


def _bytes_of(numbers: Sequence[int]) -> bytes:
    packed = array(_NUMBER, numbers)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tobytes()
