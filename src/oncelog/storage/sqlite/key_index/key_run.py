"""Key runs: sorted keys of the key index, about 60 in one row.

With one row per key, SQLite's overhead per row would exceed the cost of the key itself when it is inserted, moved
during a merge, or deleted. In a run, a key takes 16 bytes. `last` is the highest hash of a run, so a hash can only be
in the first run whose `last` is not below it. Keys with the same hash are always in the same run.

    keys      all hashes in order, then their places in the same order: 8-byte numbers, little endian
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import orjson

from oncelog.errors import CorruptError
from oncelog.storage.metadata import DAMAGE_HINT
from oncelog.storage.sqlite.statements import SQL, BulkInsert

RUN_KEYS: Final = 60
"""60 keys fill about a quarter of an SQLite page, the largest row that such a table stores without overflow pages."""

_WRONG_LAST_HASH: Final = f"the last hash of a run in the key index does not match its row; {DAMAGE_HINT}"
NUMBER_TYPECODE: Final = "q"
_NUMBER_BYTES: Final = 8
_IS_SWAPPED: Final = sys.byteorder == "big"
_insert_runs: Final = BulkInsert("oncelog_key_runs", ("segment", "last", "keys"))

KeyPairs = tuple[Sequence[int], Sequence[int]]
"""Hashes in order, and the place of each."""


def write_runs(connection: Any, segment: int, keys: KeyPairs) -> None:
    """Append keys to a segment."""
    rows = [(segment, last, packed) for last, packed in pack_runs(keys)]
    _insert_runs(connection, rows, len(rows))


def pack_runs(keys: KeyPairs) -> Iterator[tuple[int, bytes]]:
    """Pack keys into as few runs of similar size as possible."""
    hashes, places = keys
    runs = -(-len(hashes) // RUN_KEYS)
    begin = 0
    for number in range(1, runs + 1):
        end = number * len(hashes) // runs
        if end <= begin:
            continue  # the previous run has all keys with this hash
        if end < len(hashes) and hashes[end] == hashes[end - 1]:
            end = bisect_right(hashes, hashes[end], end)
        yield hashes[end - 1], _pack_numbers(hashes[begin:end]) + _pack_numbers(places[begin:end])
        begin = end


def unpack_run(packed: bytes, last: int | None = None) -> KeyPairs:
    """Return the keys of a run. Raises CorruptError if the run is invalid, or its last hash differs from `last`."""
    numbers = _unpack_numbers(packed)
    middle = len(numbers) // 2
    if last is not None and numbers[middle - 1] != last:
        raise CorruptError(_WRONG_LAST_HASH)
    return numbers[:middle], numbers[middle:]


def find_in_segment(connection: Any, segment: int, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the hashes that are in a segment, each with its place."""
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
    """Return the hashes of several runs, each given with its last hash."""
    hashes: list[int] = []
    for last, packed in runs:
        hashes += unpack_run(packed, last)[0]
    return hashes


def _unpack_numbers(packed: bytes) -> "array[int]":
    """Return the hashes, followed by their places."""
    if not packed or len(packed) % (2 * _NUMBER_BYTES):
        message = f"the key index has a run of {len(packed)} bytes, which is not a valid length"
        raise CorruptError(f"{message}; {DAMAGE_HINT}")
    numbers = array(NUMBER_TYPECODE, packed)
    if _IS_SWAPPED:
        numbers.byteswap()
    return numbers


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    packed = array(NUMBER_TYPECODE, numbers)
    if _IS_SWAPPED:
        packed.byteswap()
    return packed.tobytes()
