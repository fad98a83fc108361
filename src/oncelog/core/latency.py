"""Attribution of latency: splits the time of a request over the causes for which the request waited.

A request waits for the phases of earlier commits, and then for the phases of the commit that contains it. A pause, such
as a garbage collection, can interrupt a phase. The time of the pause then belongs to the pause and not to the phase.
Every moment of a request belongs to one cause, so the parts of a request add up to its latency.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, auto
from math import ceil, log2
from typing import Final

from msgspec import Struct

BUCKETS_PER_OCTAVE: Final = 8
"""A bucket of a `LatencyTable` is 9 % wide."""
_BUCKET_MAX: Final = 40 * BUCKETS_PER_OCTAVE
"""Highest bucket, of latencies above twelve days. It limits the memory of a table."""


class Cause(IntEnum):
    """What a request waits for: a phase, or a pause that interrupts one."""

    DECODE = 0
    """From the arrival of the request until its write enters the queue: decode, authorize, canonicalize."""
    GATHER = auto()
    """The committer waits for further writes to share the commit."""
    PREPARE = auto()
    """Load, plan and save a batch, before COMMIT."""
    COMMIT = auto()
    """COMMIT, which syncs the write-ahead log."""
    SETTLE = auto()
    """The committer passes the verdicts to the requests, which encode their answers."""
    ANSWER = auto()
    """The answers are written to the connections."""
    EVENT_LOOP = auto()
    """The event loop is busy with other work, such as the requests of other connections."""
    GC = auto()
    """The garbage collector runs."""
    MERGE = auto()
    """The key index seals or merges segments, in the transaction of a commit."""
    CHECKPOINT = auto()
    """A COMMIT syncs while the checkpointer writes to the same disk."""
    OTHER = auto()
    """Not measured."""


CAUSES: Final = tuple(Cause)
PAUSED_PHASES: Final[Mapping[Cause, frozenset[Cause]]] = {
    Cause.GC: frozenset(CAUSES) - {Cause.COMMIT},
    Cause.MERGE: frozenset({Cause.PREPARE, Cause.COMMIT}),
    Cause.CHECKPOINT: frozenset({Cause.COMMIT}),
    Cause.EVENT_LOOP: frozenset({Cause.GATHER}),
}
"""The phases that each kind of pause interrupts, most important first. A COMMIT needs neither the interpreter nor the
event loop while it syncs."""

Span = tuple[float, float, Cause]
"""Start and end in seconds, and the cause."""


class RequestTimes(Struct, frozen=True, gc=False):
    """When a request arrived, and when its write entered the queue of the committer."""

    arrived_s: float
    queued_s: float


class PhaseTimes(Struct, frozen=True):
    """The phases of one commit, without gaps."""

    gathered_s: float
    """When the committer began to wait for further writes. Equal to `began_s` if it did not wait."""
    began_s: float
    ends: Sequence[tuple[Cause, float]]
    """Each phase with its end. The first phase starts at `began_s`."""

    @property
    def end_s(self) -> float:
        """When the last phase ended, and all writes had their verdicts."""
        return self.ends[-1][1] if self.ends else self.began_s

    def list_spans(self, after_s: float) -> list[Span]:
        """Return the phases as spans, and the time since the previous commit ended at `after_s`."""
        spans: list[Span] = []
        ends = ((Cause.EVENT_LOOP, self.gathered_s), (Cause.GATHER, self.began_s), *self.ends)
        for cause, end_s in ends:
            if end_s > after_s:
                spans.append((after_s, end_s, cause))
                after_s = end_s
        return spans


def cut_pauses(span: Span, pauses: Sequence[Span]) -> list[Span]:
    """Split the span of a phase into the parts that pauses interrupt and the rest, in order."""
    start_s, end_s, phase = span
    parts = [span]
    for pausing, phases in PAUSED_PHASES.items():
        if phase not in phases:
            continue
        for pause_start_s, pause_end_s, cause in pauses:
            if cause is pausing and pause_start_s < end_s and pause_end_s > start_s:
                parts = [piece for part in parts for piece in _cut(part, phase, (pause_start_s, pause_end_s, cause))]
    return parts


def _cut(part: Span, phase: Cause, pause: Span) -> Iterator[Span]:
    """Yield the pieces of a part. A part that already belongs to another pause remains as it is."""
    start_s, end_s, cause = part
    pause_start_s, pause_end_s = max(start_s, pause[0]), min(end_s, pause[1])
    if cause is not phase or pause_start_s >= pause_end_s:
        yield part
        return
    if start_s < pause_start_s:
        yield start_s, pause_start_s, phase
    yield pause_start_s, pause_end_s, pause[2]
    if pause_end_s < end_s:
        yield pause_end_s, end_s, phase


def build_spans(commits: Sequence[Span], pauses: Sequence[Span], settled_s: float, answered_s: float) -> list[Span]:
    """Return what the requests of one commit wait for until their answers are written, in order.

    `commits` are the phases of this commit and of those before and after it. After the verdicts, at `settled_s`, the
    event loop may prepare the next commit before it writes the answers.
    """
    spans: list[Span] = []
    answering_s = settled_s
    for start_s, end_s, cause in commits:
        if start_s < settled_s:
            spans.append((start_s, min(end_s, settled_s), cause))
        start_s, end_s = max(start_s, settled_s), min(end_s, answered_s)  # noqa: PLW2901 - the part after the verdicts
        if cause is Cause.PREPARE and start_s < end_s:
            if answering_s < start_s:
                spans.append((answering_s, start_s, Cause.ANSWER))
            spans.append((start_s, end_s, cause))
            answering_s = end_s
    if answering_s < answered_s:
        spans.append((answering_s, answered_s, Cause.ANSWER))
    return [part for span in spans for part in cut_pauses(span, pauses)] if pauses else spans


def split_latency(times: RequestTimes, spans: Sequence[Span], pauses: Sequence[Span] = ()) -> list[float]:
    """Return how long a request waited for each cause, in seconds, in the order of `Cause`.

    `spans` must be ordered and disjoint. The request ends with the last one. `pauses` may interrupt the decoding of
    the request. The parts add up to the latency, and none is negative.
    """
    parts = [0.0] * len(CAUSES)
    queued_s = times.queued_s
    decoding = (times.arrived_s, queued_s, Cause.DECODE)
    for start_s, end_s, cause in cut_pauses(decoding, pauses) if pauses else (decoding,):
        parts[cause] += end_s - start_s
    before_s = max(queued_s, spans[-1][1]) if spans else queued_s
    for start_s, span_end_s, cause in reversed(spans):
        if span_end_s <= queued_s:
            break
        start_s = max(start_s, queued_s)  # noqa: PLW2901 - the part of the span that the request waited for
        parts[cause] += span_end_s - start_s
        parts[Cause.OTHER] += before_s - span_end_s
        before_s = start_s
    parts[Cause.OTHER] += before_s - queued_s
    return parts


class LatencySummary(Struct, frozen=True):
    """Where a group of requests spent their time."""

    requests: int
    above_ms: float
    """Lower bound of their latencies, exact to 9 %."""
    mean_ms: float
    shares: dict[str, float]
    """Share of each cause in the sum of their latencies, from 0 to 1."""
    before_own_commit: float
    """Share of the time before their own commit began, which the causes above include."""


class _Bucket(Struct):
    requests: float = 0
    queue_s: float = 0.0
    parts: list[float] = []

    def add(self, other: "_Bucket", fraction: float = 1.0) -> None:
        self.requests += other.requests * fraction
        self.queue_s += other.queue_s * fraction
        mine = self.parts or [0.0] * len(CAUSES)
        self.parts = [part + fraction * more for part, more in zip(mine, other.parts, strict=True)]


class LatencyTable:
    """Sums of the parts of many requests, by latency. Its memory does not depend on the number of requests."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    @property
    def requests(self) -> int:
        """How many requests the table contains."""
        return round(sum(bucket.requests for bucket in self._buckets.values()))

    def add(self, parts: Sequence[float], queue_s: float, count: int = 1) -> None:
        """Add requests that were split by `split_latency` and waited `queue_s` before their commit began."""
        latency_us = sum(parts) * 1e6
        number = min(_BUCKET_MAX, int(log2(latency_us) * BUCKETS_PER_OCTAVE)) if latency_us > 1 else 0
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket(parts=[0.0] * len(CAUSES))
        bucket.requests += count
        bucket.queue_s += queue_s * count
        sums = bucket.parts
        for cause, part in enumerate(parts):
            if part:
                sums[cause] += part * count

    def merge(self, other: "LatencyTable") -> None:
        """Add all requests of another table."""
        for number, bucket in other._buckets.items():  # noqa: SLF001 - of the same class
            self._buckets.setdefault(number, _Bucket()).add(bucket)

    def summarize(self, fraction: float = 1.0) -> LatencySummary:
        """Summarize the slowest requests, at least one if there is any.

        If only some requests of a bucket belong to them, they get the same share of the bucket's time.
        """
        wanted = missing = ceil(self.requests * fraction)
        total, lowest = _Bucket(parts=[0.0] * len(CAUSES)), 0
        for number in sorted(self._buckets, reverse=True):
            if missing <= 0:
                break
            bucket, lowest = self._buckets[number], number
            total.add(bucket, min(1.0, missing / bucket.requests))
            missing -= round(bucket.requests)
        latency_s = sum(total.parts)
        divisor_s = latency_s or 1.0
        return LatencySummary(
            wanted,
            above_ms=round(2 ** (lowest / BUCKETS_PER_OCTAVE) / 1000, 3) if lowest else 0.0,
            mean_ms=round(1000 * latency_s / max(1, wanted), 3),
            shares={cause.name.lower(): round(total.parts[cause] / divisor_s, 4) for cause in CAUSES},
            before_own_commit=round(total.queue_s / divisor_s, 4),
        )
