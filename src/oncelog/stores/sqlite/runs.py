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

VERIFY: Final = "see `oncelog verify`"
_ENDS_ELSEWHERE: Final = f"the key index has a run that ends elsewhere than it says; {VERIFY}"
NUMBER: Final = "q"
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


def keys_of(packed: bytes, last: int | None = None) -> Pairs:
    """What a run has. Raises CorruptError if it is no run, or not the one that ends with a hash."""
    numbers = _numbers_of(packed)
    middle = len(numbers) // 2
    if last is not None and numbers[middle - 1] != last:
        raise CorruptError(_ENDS_ELSEWHERE)
    return numbers[:middle], numbers[middle:]


def find(connection: Any, segment: int, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of some hashes those that are in a segment, each with its place."""
    sought = {"hashes": orjson.dumps(hashes).decode(), "segment": segment}
    for one, packed in connection.execute(SQL["find_runs"], sought).fetchall():
        if packed is None:
            continue
        numbers = _numbers_of(packed)
        middle = len(numbers) // 2
        if numbers[middle - 1] < one:
            raise CorruptError(_ENDS_ELSEWHERE)
        at = bisect_left(numbers, one, 0, middle)
        while at < middle and numbers[at] == one:
            yield one, numbers[middle + at]
            at += 1


def hashes_in(runs: Iterable[tuple[int, bytes]]) -> list[int]:
    """The hashes of several runs, each with its last one."""
    hashes: list[int] = []
    for last, packed in runs:
        hashes += keys_of(packed, last)[0]
    return hashes


def _numbers_of(packed: bytes) -> "array[int]":
    """The hashes, and as many places."""
    if not packed or len(packed) % (2 * _NUMBER_BYTES):
        what = f"the key index has a run of {len(packed)} bytes, which are no whole keys"
        raise CorruptError(f"{what}; {VERIFY}")
    numbers = array(NUMBER, packed)
    if _IS_SWAPPED:
        numbers.byteswap()
    return numbers


def _bytes_of(numbers: Sequence[int]) -> bytes:
    packed = array(NUMBER, numbers)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tobytes()
