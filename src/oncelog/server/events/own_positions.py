"""Positions of the events that one connection submitted, so that they are not broadcast to it (EV-14)."""

from array import array
from bisect import bisect_left
from typing import Final

RANGES_MAX: Final = 4096
"""Ranges of consecutive positions that one connection keeps: 64 KiB. The lower half is forgotten beyond it."""


class OwnPositions:
    """Ranges of positions, in ascending order. Bounded: `known_after` is the highest position that was forgotten."""

    __slots__ = ("_firsts", "_lasts", "known_after")

    def __init__(self) -> None:
        self._firsts = array("q")
        self._lasts = array("q")
        self.known_after = 0

    def add(self, position: int) -> None:
        """Add a position. Most are higher than all before."""
        last_positions = self._lasts
        if not last_positions or position > last_positions[-1] + 1:
            self._firsts.append(position)
            last_positions.append(position)
            if len(last_positions) > RANGES_MAX:
                self._evict_half()
        elif position == last_positions[-1] + 1:
            last_positions[-1] = position
        elif position > self.known_after and position not in self:
            at = bisect_left(last_positions, position)
            self._firsts.insert(at, position)
            last_positions.insert(at, position)
            if len(last_positions) > RANGES_MAX:
                self._evict_half()

    def __contains__(self, position: int) -> bool:
        at = bisect_left(self._lasts, position)
        return at < len(self._lasts) and self._firsts[at] <= position

    def _evict_half(self) -> None:
        half = len(self._lasts) // 2
        self.known_after = self._lasts[half - 1]
        del self._firsts[:half], self._lasts[:half]
