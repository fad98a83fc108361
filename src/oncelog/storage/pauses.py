"""Pauses: short intervals in which other work of the process delays requests, such as a checkpoint.

They are recorded only while a report of latencies needs them.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Final

from msgspec import Struct

from oncelog.core.latency import Cause, Span

RECORDED_S_MIN: Final = 0.0001
"""Shorter pauses are ignored."""
PAUSES_MAX: Final = 2048
"""How many pauses are kept. A request that is older than all of them is attributed to phases only."""


class PauseFigures(Struct):
    """How often and how long a cause has paused requests."""

    count: int = 0
    total_ms: float = 0.0
    longest_ms: float = 0.0

    def add(self, other: "PauseFigures") -> None:
        """Add the figures of another period."""
        self.count += other.count
        self.total_ms += other.total_ms
        self.longest_ms = max(self.longest_ms, other.longest_ms)

    def rounded(self) -> "PauseFigures":
        """Return the figures, exact to a microsecond."""
        return PauseFigures(self.count, round(self.total_ms, 3), round(self.longest_ms, 3))


class PauseLog:
    """The newest pauses of a process. Any thread may add pauses, but only one at a time adds those of a cause.

    The log has no lock: a garbage collection can start at any allocation, also in a thread that holds a lock, and it is
    a pause too. Appending to the deque and copying it are atomic.
    """

    def __init__(self) -> None:
        self.is_on = False
        """Whether pauses are recorded."""
        self._pauses: deque[Span] = deque(maxlen=PAUSES_MAX)
        """Ordered by end."""
        self._running: dict[Cause, float] = {}
        """Start of each pause that has not ended."""
        self._figures: dict[Cause, PauseFigures] = {}

    def add(self, cause: Cause, start_s: float, end_s: float) -> None:
        """Record a pause that has just ended."""
        duration_s = end_s - start_s
        if not self.is_on or duration_s < RECORDED_S_MIN:
            return
        self._pauses.append((start_s, end_s, cause))
        self._figures.setdefault(cause, PauseFigures()).add(PauseFigures(1, 1000 * duration_s, 1000 * duration_s))

    @contextmanager
    def measure(self, cause: Cause) -> Iterator[None]:
        """Record the block as a pause, which `list_after` returns already while the block runs."""
        began_s = self._running[cause] = time.perf_counter()
        try:
            yield
        finally:
            del self._running[cause]
            self.add(cause, began_s, time.perf_counter())

    def list_after(self, time_s: float) -> list[Span]:
        """Return the pauses that ended after a time or have not ended."""
        found = [(start_s, inf, cause) for cause, start_s in self._running.copy().items()]
        for pause in reversed(list(self._pauses)):
            if pause[1] <= time_s:
                break
            found.append(pause)
        return found

    def take_figures(self) -> dict[Cause, PauseFigures]:
        """Return the figures since the last call."""
        figures, self._figures = self._figures, {}
        return figures
