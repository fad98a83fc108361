"""Bloom filters of the key index. They are kept in memory, so that most lookups read no segment."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from rbloom import Bloom

from oncelog.storage.sqlite.key_index.key_run import unpack_hashes
from oncelog.storage.sqlite.statements import SQL

GLOBAL_CAPACITY_MIN: Final = 1_000_000
GLOBAL_FALSE_POSITIVE_RATE: Final = 0.005
"""Per layer. Every layer is checked for a new key, so the rates add up."""
LAYER_GROWTH: Final = 5
"""Each layer is this many times as large as the previous one, which keeps the number of layers small."""
SEGMENT_FALSE_POSITIVE_RATE: Final = 0.01
"""False-positive rate of a segment's filter."""
_FILL_BATCH_ROWS: Final = 100
"""Rows per step while filling. A step holds the GIL, so it must be short."""


class LayeredBloomFilter:
    """Bloom filter that grows by adding layers. False positives are possible, false negatives are not."""

    def __init__(self, expected_keys: int = 0) -> None:
        self._capacity = max(GLOBAL_CAPACITY_MIN, 2 * expected_keys)
        self._free = self._capacity
        self._layers = [Bloom(self._capacity, GLOBAL_FALSE_POSITIVE_RATE)]

    def add(self, hashes: Sequence[int]) -> None:
        """Add sealed keys. Starts a new layer if the newest one is full."""
        if self._free < len(hashes):
            self._capacity = max(LAYER_GROWTH * self._capacity, len(hashes))
            self._free = self._capacity
            self._layers.insert(0, Bloom(self._capacity, GLOBAL_FALSE_POSITIVE_RATE))
        self._layers[0].update(hashes)
        self._free -= len(hashes)

    def possible_members(self, hashes: Iterable[int]) -> list[int]:
        """Return the hashes that may be sealed, in their original order."""
        candidates = list(hashes)
        hits = {key_hash for layer in self._layers for key_hash in candidates if key_hash in layer}
        return [key_hash for key_hash in candidates if key_hash in hits] if hits else []


def create_segment_filter(keys: int) -> Bloom:
    """Return an empty filter that is sized for a number of keys."""
    return Bloom(max(1, keys), SEGMENT_FALSE_POSITIVE_RATE)


class KeyFilters(NamedTuple):
    """Filter over all sealed keys, and the filters of complete segments."""

    sealed: LayeredBloomFilter
    segments: dict[int, Bloom]


def load_filters(connection: Any, keys: int) -> KeyFilters:
    """Build the filters from the segments, in one transaction. `keys` is the number of sealed keys."""
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
