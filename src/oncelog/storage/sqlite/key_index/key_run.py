"""Key runs: sorted keys of the key index, about 60 in one row.

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
from oncelog.storage.sqlite.statements import SQL, BulkInsert

RUN_KEYS: Final = 60
"""So many fill a quarter of a page, the most that SQLite keeps in a page of such a table and not beside it."""

VERIFY_HINT: Final = "see `oncelog verify`"
_WRONG_LAST_HASH: Final = f"the key index has a run that ends elsewhere than it says; {VERIFY_HINT}"
NUMBER_TYPECODE: Final = "q"
_NUMBER_BYTES: Final = 8
_IS_SWAPPED: Final = sys.byteorder == "big"
_insert_runs: Final = BulkInsert("oncelog_key_runs", ("segment", "last", "keys"))

KeyPairs = tuple[Sequence[int], Sequence[int]]
"""Hashes in their order, and the place of each."""


def write_runs(connection: Any, segment: int, keys: KeyPairs) -> None:
    """Writes keys behind those that a segment has."""
    rows = [(segment, last, packed) for last, packed in pack_runs(keys)]
    _insert_runs(connection, rows, len(rows))


def pack_runs(keys: KeyPairs) -> Iterator[tuple[int, bytes]]:
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
        yield hashes[end - 1], _pack_numbers(hashes[begin:end]) + _pack_numbers(places[begin:end])
        begin = end


def unpack_run(packed: bytes, last: int | None = None) -> KeyPairs:
    """What a run has. Raises CorruptError if it is no run, or not the one that ends with a hash."""
    numbers = _unpack_numbers(packed)
    middle = len(numbers) // 2
    if last is not None and numbers[middle - 1] != last:
        raise CorruptError(_WRONG_LAST_HASH)
    return numbers[:middle], numbers[middle:]


def find_in_segment(connection: Any, segment: int, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of some hashes those that are in a segment, each with its place."""
    parameters = {"hashes": orjson.dumps(hashes).decode(), "segment": segment}
    for key_hash, packed in connection.execute(SQL["find_runs"], parameters).fetchall():
        if packed is None:
            continue
        numbers = _unpack_numbers(packed)
        middle = len(numbers) // 2
        if numbers[middle - 1] < key_hash:
            raise CorruptError(_WRONG_LAST_HASH)
        at = bisect_left(numbers, key_hash, 0, middle)
        while at < middle and numbers[at] == key_hash:
            yield key_hash, numbers[middle + at]
            at += 1


def unpack_hashes(runs: Iterable[tuple[int, bytes]]) -> list[int]:
    """The hashes of several runs, each with its last one."""
    hashes: list[int] = []
    for last, packed in runs:
        hashes += unpack_run(packed, last)[0]
    return hashes


def _unpack_numbers(packed: bytes) -> "array[int]":
    """The hashes, and as many places."""
    if not packed or len(packed) % (2 * _NUMBER_BYTES):
        message = f"the key index has a run of {len(packed)} bytes, which are no whole keys"
        raise CorruptError(f"{message}; {VERIFY_HINT}")
    numbers = array(NUMBER_TYPECODE, packed)
    if _IS_SWAPPED:
        numbers.byteswap()
    return numbers


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    packed = array(NUMBER_TYPECODE, numbers)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tobytes()
