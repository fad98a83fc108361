"""Counters of a load test, and the figures that the command prints."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from oncelog.cli.load.histogram import LatencyHistogram
from oncelog.cli.load.id_set import IdSet
from oncelog.cli.load.pacer import Pacer
from oncelog.cli.load.plan import LoadPlan, SentEvent
from oncelog.cli.output import format_table

PROBLEMS_SHOWN_MAX: Final = 10
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
BAR_CHARACTERS_MAX: Final = 40


class Tally:
    """Counters of a load test."""

    def __init__(self, plan: LoadPlan, now_s: Callable[[], float]) -> None:
        self._plan = plan
        self._now_s = now_s
        self.start_s = now_s()
        self.took_s = 0.0
        self.committed = 0
        self.retried = 0
        self.latencies = LatencyHistogram()
        self.errors: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.lost = 0
        self.late = 0
        """Events whose connection had too many requests in flight when they were due. Only in an open loop."""
        self.unsent = 0
        """Events that were due but never sent. Only in an open loop."""
        self.differing = 0
        self.problems: list[str] = []
        self._recent_latencies = LatencyHistogram()
        self._last_id_before: int | None = None
        self._used_ids = IdSet()

    def note_last_id(self, last_committed_id: int) -> None:
        """Record the last committed_id before the test. All new events get higher ones."""
        if self._last_id_before is None:
            self._last_id_before = last_committed_id

    def start(self) -> None:
        """Note the beginning of the test, when all connections are open."""
        self.start_s = self._now_s()

    def end(self, pacer: Pacer) -> None:
        """Note the end of the test."""
        self.took_s = self._now_s() - self.start_s
        self.late = self._plan.batch * pacer.late
        self.unsent = self._plan.batch * pacer.unsent

    @property
    def has_failed(self) -> bool:
        """Whether an event was not committed exactly once, or the rate was not reached."""
        return bool(self.lost or self.differing or self.rejected or self.unsent)

    def record_latency(self, latency_s: float) -> None:
        """Count the latency of a request."""
        self.latencies.record(latency_s)
        self._recent_latencies.record(latency_s)

    def take_recent_latencies(self) -> LatencyHistogram:
        """Return the latencies since the previous call."""
        recent, self._recent_latencies = self._recent_latencies, LatencyHistogram()
        return recent

    def commit(self, event: SentEvent, committed_id: int) -> None:
        """Count a committed event, and check that its committed_id belongs to this event only and never changes."""
        if event.committed_id:
            self.retried += 1
            if event.committed_id != committed_id:
                self.count_difference(
                    f"{event.id} got committed_id {event.committed_id}, but {committed_id} after a retry"
                )
            return
        event.committed_id = committed_id
        self.committed += 1
        is_new = self._used_ids.add(committed_id)
        if committed_id <= (self._last_id_before or 0):
            self.count_difference(f"{event.id} got committed_id {committed_id}, which was used before the test")
        elif not is_new:
            self.count_difference(f"committed_id {committed_id} was given to {event.id} and to another event")

    def count_difference(self, problem: str) -> None:
        """Count a wrong committed_id or result."""
        self.differing += 1
        self.note_problem(problem)

    def note_problem(self, problem: str) -> None:
        """Keep the descriptions of the first few problems."""
        if len(self.problems) < PROBLEMS_SHOWN_MAX:
            self.problems.append(problem)

    # --- figures ------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        latencies = self.latencies
        percentiles_s = {name: latencies.compute_percentile_s(share) or 0.0 for name, share in PERCENTILES.items()}
        percentiles_s["max"] = latencies.max_s
        return {
            "took_s": round(self.took_s, 3),
            "events": self.committed,
            "events_per_s": round(self.committed / self.took_s, 1) if self.took_s else 0.0,
            "rate_reached": None if self._plan.rate is None else not self.unsent,
            "late": self.late,
            "unsent": self.unsent,
            "latency_ms": {name: round(1000 * seconds, 3) for name, seconds in percentiles_s.items()},
            "latency_buckets": [
                {"up_to_ms": bucket.up_to_us / 1000, "requests": bucket.count} for bucket in latencies.list_buckets()
            ],
            "retried": self.retried,
            "differing": self.differing,
            "rejected": dict(self.rejected),
            "lost": self.lost,
            "errors": dict(self.errors),
            "problems": self.problems,
        }

    def format_lines(self) -> list[str]:
        """Return the figures as lines for human readers."""
        figures = self.to_json()
        latency = figures["latency_ms"]
        counted = {**figures["rejected"], **figures["errors"]}
        return [
            f"{self.committed} events in {self.took_s:.1f} s: {figures['events_per_s']:.0f} events/s"
            + ("" if self._plan.rate is None else f", requested {self._plan.rate:g} events/s"),
            *self._format_schedule(),
            "latency: " + ", ".join(f"{name} {latency[name]:.1f} ms" for name in latency),
            *_format_histogram(self.latencies),
            f"retries: {self.retried} sent a second time, {self.differing} with a different committed_id",
            f"lost: {self.lost}",
            "errors: " + (", ".join(f"{count} {code}" for code, count in counted.items()) or "none"),
            *(f"wrong: {problem}" for problem in self.problems),
        ]

    def _format_schedule(self) -> list[str]:
        plan = self._plan
        if plan.rate is None:
            return []
        lines = [f"schedule: {self.late} events late, {self.unsent} of them never sent"]
        if self.unsent:
            lines.append(
                f"rate not reached: {self.unsent} events were due but not sent, because their connections had reached "
                f"--in-flight {plan.in_flight}. The latencies do not include them. Lower --rate, or raise --in-flight "
                "if the server can do more."
            )
        return lines


def _format_histogram(latencies: LatencyHistogram) -> list[str]:
    rows = latencies.list_rows()
    largest = max((row.count for row in rows), default=0)
    return format_table(
        ("up to", "requests", ""),
        [
            (f"{row.up_to_us / 1000:g} ms", row.count, "#" * -(-BAR_CHARACTERS_MAX * row.count // largest))
            for row in rows
        ],
        indent="  ",
    )
