"""Measurements of group commits, for the metrics of servers."""

from collections import deque

from msgspec import Struct


class BatchReport(Struct, frozen=True):
    """Measurements of a group commit."""

    items: int
    duration_s: float
    """From the start of the commit until all of its writes are answered."""
    sync_s: float
    """Duration of COMMIT, which makes the batch durable. 0 if the batch changed nothing."""
    wait_s: float
    """How long the oldest write waited for the start of the commit. Exact to the duration of the previous batch."""


class ReplayCounts(Struct):
    """How many retries were answered with the original receipt."""

    memory: int = 0
    """From cached answers."""
    in_flight: int = 0
    """Together with an equal write in flight."""
    store: int = 0
    """By a commit. Counted only while the log is watched."""


class ArrivalTimes:
    """Tells when the oldest waiting write arrived, from one time per batch instead of one per write."""

    __slots__ = ("_marks", "_taken")

    def __init__(self) -> None:
        self._taken = 0
        """How many entries batches have taken so far."""
        self._marks: deque[tuple[int, float]] = deque()
        """Ordinal numbers of entries, each with a time before which the entry did not arrive."""

    def mark_first(self, now_s: float) -> None:
        """Note that an entry arrived in an empty queue, without a batch in progress."""
        self._marks.clear()
        self._marks.append((self._taken, now_s))

    def take(self, taken: int, waiting: int, now_s: float) -> float:
        """Note that a batch took entries and left others waiting. Return when the oldest taken entry arrived."""
        oldest_s = self.get_oldest_s(now_s)
        self._taken += taken
        self._marks.append((self._taken + waiting, now_s))
        while len(self._marks) > 1 and self._marks[1][0] <= self._taken:
            self._marks.popleft()
        return oldest_s

    def get_oldest_s(self, now_s: float) -> float:
        """Return when the oldest waiting entry arrived."""
        return self._marks[0][1] if self._marks else now_s
