"""Bloom filters of the key index: in memory, so that most lookups read no segment."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from rbloom import Bloom

from oncelog.storage.sqlite.key_index.key_run import unpack_hashes
from oncelog.storage.sqlite.statements import SQL

GLOBAL_CAPACITY_MIN: Final = 1_000_000
GLOBAL_FALSE_POSITIVE_RATE: Final = 0.005
"""For each layer."""
LAYER_GROWTH: Final = 5
"""So many times as large as the one before is each layer: a new key is looked for in all of them."""
SEGMENT_FALSE_POSITIVE_RATE: Final = 0.01
"""Of a known key's looks at segments that have not got it, so many are not spared."""
_FILL_BATCH_ROWS: Final = 100
"""At a time: meanwhile nobody else has the interpreter."""


class LayeredBloomFilter:
    """May say of a key that it is sealed though it is not, never the other way. Grows by layers."""

    def __init__(self, expected_keys: int = 0) -> None:
        self._capacity = max(GLOBAL_CAPACITY_MIN, 2 * expected_keys)
        self._free = self._capacity
        self._layers = [Bloom(self._capacity, GLOBAL_FALSE_POSITIVE_RATE)]

    def add(self, hashes: Sequence[int]) -> None:
        """Takes in sealed keys."""
        if self._free < len(hashes):
            self._capacity = max(LAYER_GROWTH * self._capacity, len(hashes))
            self._free = self._capacity
            self._layers.insert(0, Bloom(self._capacity, GLOBAL_FALSE_POSITIVE_RATE))
        self._layers[0].update(hashes)
        self._free -= len(hashes)

    def possible_members(self, hashes: Iterable[int]) -> list[int]:
        """Those of them that may be sealed."""
        candidates = list(hashes)
        hits = {key_hash for layer in self._layers for key_hash in candidates if key_hash in layer}
        return [key_hash for key_hash in candidates if key_hash in hits] if hits else []


def create_segment_filter(keys: int) -> Bloom:
    """For so many."""
    return Bloom(max(1, keys), SEGMENT_FALSE_POSITIVE_RATE)


class KeyFilters(NamedTuple):
    """Over all sealed keys, and over those of each segment that is complete."""

    sealed: LayeredBloomFilter
    segments: dict[int, Bloom]


def load_filters(connection: Any, keys: int) -> KeyFilters:
    """Of so many sealed keys. In one transaction."""
    sealed = LayeredBloomFilter(keys)
    segments = {}
    being_filled = {row[1] for row in connection.execute(SQL["jobs"]).fetchall()}
    for segment, _, segment_keys in connection.execute(SQL["segments"]).fetchall():
        segment_filter = create_segment_filter(segment_keys)
        cursor = connection.execute(SQL["segment_runs"], (segment,))
        while rows := cursor.fetchmany(_FILL_BATCH_ROWS):
            hashes = unpack_hashes(rows)
            sealed.add(hashes)
            segment_filter.update(hashes)
        if segment not in being_filled:
            segments[segment] = segment_filter
    return KeyFilters(sealed, segments)
