"""Measurements of group commits, for the metrics and the latency report of servers."""

import time
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Final

from msgspec import Struct

from oncelog.core.latency import Cause, PhaseTimes, RequestTimes
from oncelog.storage.store import BatchResult


class BatchReport(Struct, frozen=True):
    """Measurements of a group commit."""

    items: int
    duration_s: float
    """From the start of the commit until all of its writes are answered."""
    sync_s: float
    """Duration of COMMIT, which makes the batch durable. 0 if the batch changed nothing."""
    wait_s: float
    """How long the oldest write waited for the start of the commit. Exact to the duration of the previous batch."""
    phases: PhaseTimes | None = None
    """The phases of the commit, while the log measures latencies."""
    requests: Sequence[RequestTimes] = ()
    """The times of its requests, while the log measures latencies."""


class PhaseRecorder:
    """Records the phases of the batch in progress."""

    def __init__(self) -> None:
        self._gathered_s = self._began_s = 0.0
        self._ends: list[tuple[Cause, float]] = []

    def start(self, gathered_s: float, began_s: float) -> None:
        """Note that a batch begins, after the committer has waited for further writes since `gathered_s`."""
        self._gathered_s, self._began_s, self._ends = gathered_s, began_s, []

    def add_commit(self, result: BatchResult) -> None:
        """Note that the event loop has the result of a transaction. A batch that was bisected has several."""
        ends = self._ends
        if result.synced_s:
            # Between these times, the writer thread waits for the event loop to release the interpreter, and after
            # COMMIT the event loop may be busy.
            ends += [
                (Cause.PREPARE, result.prepared_s),
                (Cause.EVENT_LOOP, result.synced_s - result.sync_s),
                (Cause.COMMIT, result.synced_s),
                (Cause.EVENT_LOOP, time.perf_counter()),
            ]
        else:
            ends.append((Cause.PREPARE, time.perf_counter()))

    def finish(self, end_s: float) -> PhaseTimes:
        """Return the phases of the batch, whose writes have their verdicts. Without a result, the store failed."""
        ends, self._ends = self._ends, []
        ends.append((Cause.SETTLE if ends else Cause.COMMIT, end_s))
        return PhaseTimes(self._gathered_s, self._began_s, ends)


_current_arrival: Final[ContextVar["RequestArrival | None"]] = ContextVar("oncelog_request_arrival", default=None)


class RequestArrival:
    """The arrival of a request: writes that are submitted in the `with` block belong to the request."""

    __slots__ = ("_arrived_s", "_is_open", "_token")

    def __init__(self) -> None:
        self._arrived_s = time.perf_counter()
        self._is_open = True
        self._token: Token[RequestArrival | None] | None = None

    def __enter__(self) -> None:
        self._token = _current_arrival.set(self)

    def __exit__(self, *_: object) -> None:
        # Tasks and timers that the request has started keep their copy of the context. Their writes are not part of the
        # request any more.
        self._is_open = False
        if self._token is not None:
            _current_arrival.reset(self._token)

    @staticmethod
    def read_times() -> RequestTimes:
        """Return the times of a write that enters the queue now. Outside of a request, it arrives now, too."""
        now_s, arrival = time.perf_counter(), _current_arrival.get()
        return RequestTimes(arrival._arrived_s if arrival is not None and arrival._is_open else now_s, now_s)  # noqa: SLF001


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
