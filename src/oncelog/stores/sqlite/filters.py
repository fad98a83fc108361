"""Filters of the key index: in memory, so that most looks at the segments can be spared."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from rbloom import Bloom

from oncelog.stores.sqlite.runs import hashes_in
from oncelog.stores.sqlite.statements import SQL

FILTER_KEYS_MIN: Final = 1_000_000
FILTER_ERROR_RATE: Final = 0.005
"""For each layer."""
LAYERS_GROW: Final = 5
"""So many times as large as the one before is each layer: a new key is looked for in all of them."""
SEGMENT_ERROR_RATE: Final = 0.01
"""Of a known key's looks at segments that have not got it, so many are not spared."""
_FILL_RUNS: Final = 100
"""At a time: meanwhile nobody else has the interpreter."""


class Filter:
    """May say of a key that it is sealed though it is not, never the other way. Grows by layers."""

    def __init__(self, keys: int = 0) -> None:
        self._capacity = max(FILTER_KEYS_MIN, 2 * keys)
        self._room = self._capacity
        self._layers = [Bloom(self._capacity, FILTER_ERROR_RATE)]

    def update(self, hashes: Sequence[int]) -> None:
        """Takes in sealed keys."""
        if self._room < len(hashes):
            self._capacity = max(LAYERS_GROW * self._capacity, len(hashes))
            self._room = self._capacity
            self._layers.insert(0, Bloom(self._capacity, FILTER_ERROR_RATE))
        self._layers[0].update(hashes)
        self._room -= len(hashes)

    def among(self, hashes: Iterable[int]) -> list[int]:
        """Those of them that may be sealed."""
        asked = list(hashes)
        found = {one for layer in self._layers for one in asked if one in layer}
        return [one for one in asked if one in found] if found else []

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return sum(layer.size_in_bits // 8 for layer in self._layers)


def filter_of_segment(keys: int) -> Bloom:
    """For so many."""
    return Bloom(max(1, keys), SEGMENT_ERROR_RATE)


class Filters(NamedTuple):
    """Over all sealed keys, and over those of each segment that is complete."""

    sealed: Filter
    segments: dict[int, Bloom]


def read_filters(connection: Any, keys: int) -> Filters:
    """Of so many sealed keys. In one transaction."""
    sealed = Filter(keys)
    segments = {}
    being_filled = {row[1] for row in connection.execute(SQL["jobs"]).fetchall()}
    for segment, _, its_keys in connection.execute(SQL["segments"]).fetchall():
        inside = filter_of_segment(its_keys)
        cursor = connection.execute(SQL["segment_runs"], (segment,))
        while rows := cursor.fetchmany(_FILL_RUNS):
            hashes = hashes_in(rows)
            sealed.update(hashes)
            inside.update(hashes)
        if segment not in being_filled:
            segments[segment] = inside
    return Filters(sealed, segments)
