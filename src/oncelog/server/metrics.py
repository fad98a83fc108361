"""What the server counts, for Prometheus.

On the way of a frame nothing is done but an addition: the server adds to the plain numbers of `Counts`, and they become
metrics when somebody asks. All of it is on the event loop's thread, so no addition is lost, and no lock is needed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oncelog.core.tenants import Tenant, Usage
from oncelog.engine.write_gate import ReadOnlyReason, WriteGate

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BATCH_ITEMS_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
COMMIT_SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


CONNECTION_REFUSALS: Final = (
    "connections_max",
    "address",
    "principal",
    "evicted",
    "timeout",
    "too_large",
    "tls_handshake",
    "open_files",
)
"""Reasons of refused and closed connections. Each has a sample from the start, so that its first increase is seen."""


class Counts:
    """Plain numbers that the server adds to: `counts.frames_received += 1`. Only those of connections go down again."""

    __slots__ = (
        "auth_failures",
        "auth_failures_limited",
        "bytes_sent",
        "connections_refused",
        "deliveries",
        "deltas",
        "events_committed",
        "events_rejected",
        "events_replayed",
        "frames_received",
        "ledger_writes",
        "messages",
        "requests",
        "slow_readers_closed",
        "slow_readers_warned",
        "sse_connections",
        "unauthenticated_connections",
        "unauthenticated_requests",
        "ws_connections",
    )

    def __init__(self) -> None:
        self.ws_connections = 0
        self.sse_connections = 0
        self.frames_received = 0
        self.events_committed = 0
        self.events_replayed = 0
        self.events_rejected: defaultdict[str, int] = defaultdict(int)
        """By reason, a name from the API's table and never one that a client chose."""
        self.requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """By API, kind and outcome. No label comes from a client, as the number of series would grow without limit."""
        self.ledger_writes: defaultdict[str, int] = defaultdict(int)
        """By what became of them: new, answered from memory or from the store, or an error's code."""
        self.deltas: defaultdict[str, int] = defaultdict(int)
        """By what became of them: committed, known, known under another op."""
        self.messages: defaultdict[str, int] = defaultdict(int)
        """By what became of them: committed, known, known with other content."""
        self.deliveries = 0
        self.bytes_sent = 0
        self.slow_readers_warned = 0
        self.slow_readers_closed = 0
        self.auth_failures = 0
        self.auth_failures_limited = 0
        """Those of the failures that were answered with RATE_LIMITED."""
        self.unauthenticated_connections = 0
        self.unauthenticated_requests = 0
        self.connections_refused = dict.fromkeys(CONNECTION_REFUSALS, 0)


class Metrics:
    """The metrics of one server. What it is given to ask is asked at every `render`, and must not raise or wait."""

    content_type: Final = CONTENT_TYPE

    def __init__(
        self,
        counts: Counts,
        *,
        queue_items: Callable[[], int],
        positions: Callable[[], Mapping[int, int]],
        subscribers: Callable[[], int],
        evictions: Callable[[], tuple[int, int]],
        write_gate: WriteGate | None = None,
        failed_files: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self.counts = counts
        self.usage: Sequence[tuple[Tenant, Usage]] = ()
        """What tenants have, as far as somebody has asked for it."""
        self.registry = CollectorRegistry()
        if write_gate is not None:
            self.registry.register(_WriteGateCollector(write_gate))
        if failed_files is not None:
            self.registry.register(_CredentialFilesCollector(failed_files))
        self.registry.register(_TenantCollector(self))
        self.registry.register(_CountsCollector(counts))
        self.registry.register(_GaugeCollector(queue_items, positions, subscribers, evictions))
        # Once a group commit, not once an event: here a lock costs nothing.
        self._batch_items = Histogram(
            "oncelog_commit_batch_items",
            "Writes of one group commit.",
            buckets=BATCH_ITEMS_BOUNDS,
            registry=self.registry,
        )
        self._commit_seconds = Histogram(
            "oncelog_commit_duration_seconds",
            "Time from the start of a group commit until it was durable.",
            buckets=COMMIT_SECONDS_BOUNDS,
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def observe_commit(self, items: int, duration_s: float) -> None:
        """A group commit of that many writes has become durable."""
        self._batch_items.observe(items)
        self._commit_seconds.observe(duration_s)

    def render(self) -> bytes:
        """All of it in Prometheus' text format, to be sent as `content_type`."""
        return generate_latest(self.registry)


class _CountsCollector(Collector):
    """Makes metrics of counts."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' `Collector` says."""
        counts = self._counts
        yield _new_gauge(
            "connections", "Open connections.", "kind", {"ws": counts.ws_connections, "sse": counts.sse_connections}
        )
        yield _new_counter("frames_received", "WebSocket frames that clients have sent.", counts.frames_received)
        yield _new_requests_counter(counts.requests)
        yield _new_labeled_counter(
            "events", "Submitted events by what became of them.", "outcome", _count_outcomes(counts)
        )
        yield _new_labeled_counter(
            "ledger_writes", "Ledger writes by what became of them.", "outcome", counts.ledger_writes
        )
        yield _new_labeled_counter("deltas", "Pushed deltas by what became of them.", "outcome", counts.deltas)
        yield _new_labeled_counter("messages", "Chat messages by what became of them.", "outcome", counts.messages)
        yield _new_counter("deliveries", "Events, deltas and messages that were sent to readers.", counts.deliveries)
        yield _new_counter("sent_bytes", "Bytes of frames and bodies that were sent.", counts.bytes_sent)
        steps = {"warned": counts.slow_readers_warned, "closed": counts.slow_readers_closed}
        yield _new_labeled_counter("slow_readers", "Readers that fell behind.", "step", steps)
        yield _new_counter("auth_failures", "Credentials that were not good.", counts.auth_failures)
        text = "Wrong credentials that were answered as rate limited."
        yield _new_counter("auth_failures_limited", text, counts.auth_failures_limited)
        text = "Connections that were refused, or closed before they were authenticated."
        yield _new_labeled_counter("connections_refused", text, "reason", counts.connections_refused)
        text, count = "Connections before authentication.", counts.unauthenticated_connections
        yield GaugeMetricFamily("oncelog_unauthenticated_connections", text, count)
        text = "Requests without a credential that needed one."
        yield _new_counter("unauthenticated_requests", text, counts.unauthenticated_requests)


class _GaugeCollector(Collector):
    """Makes metrics of what somebody else knows."""

    def __init__(
        self,
        queue_items: Callable[[], int],
        positions: Callable[[], Mapping[int, int]],
        subscribers: Callable[[], int],
        evictions: Callable[[], tuple[int, int]],
    ) -> None:
        self._queue_items = queue_items
        self._positions = positions
        self._evictions = evictions
        self._subscribers = subscribers

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' `Collector` says."""
        queue, subscribers = self._queue_items(), self._subscribers()
        positions = {str(lane): position for lane, position in self._positions().items()}
        evictions, evicted_clients = self._evictions()
        yield GaugeMetricFamily("oncelog_queue_items", "Writes that wait for their commit.", queue)
        yield _new_gauge("last_committed_position", "Position of the newest commit of each lane.", "lane", positions)
        yield _new_counter("evictions", "Evictions at positions that this server committed.", evictions)
        text = "Entries of forgotten ledger clients that this server deleted from the store."
        yield _new_counter("evicted_clients", text, evicted_clients)
        yield GaugeMetricFamily("oncelog_subscribers", "Readers that follow the log.", subscribers)


class _WriteGateCollector(Collector):
    """Makes metrics of whether new writes are taken."""

    def __init__(self, write_gate: WriteGate) -> None:
        self._write_gate = write_gate

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' `Collector` says."""
        reasons, free, size = self._write_gate.reasons, self._write_gate.free_bytes, self._write_gate.store_bytes
        text = "1 for each reason for which no new writes are taken."
        yield _new_gauge("read_only", text, "reason", {why.value: int(why in reasons) for why in ReadOnlyReason})
        if free is not None:
            yield GaugeMetricFamily("oncelog_disk_free_bytes", "Free bytes of the log's disk, less its -wal.", free)
        if size is not None:
            yield GaugeMetricFamily("oncelog_store_bytes", "Bytes of the file or the database.", size)


class _CredentialFilesCollector(Collector):
    """Makes metrics of credential files that could not be reloaded."""

    def __init__(self, count_failed: Callable[[], Mapping[str, int]]) -> None:
        self._count_failed = count_failed

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' `Collector` says."""
        text = "Credential files whose newest content could not be loaded; their previous content is in use."
        yield _new_gauge("credential_files_failed", text, "kind", self._count_failed())


class _TenantCollector(Collector):
    """Makes metrics of what tenants have."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' `Collector` says."""
        usage = self._metrics.usage
        if not usage:
            return
        yield _new_gauge(
            "tenant_bytes",
            "Bytes of records, members and side state.",
            "tenant",
            {tenant.prefix: has.bytes for tenant, has in usage},
        )
        yield _new_gauge(
            "tenant_records", "Records and members.", "tenant", {tenant.prefix: has.records for tenant, has in usage}
        )
        limits = {tenant.prefix: tenant.bytes_max for tenant, _ in usage if tenant.bytes_max}
        yield _new_gauge("tenant_bytes_max", "Bytes that a tenant may have.", "tenant", limits)
        limits = {tenant.prefix: tenant.records_max for tenant, _ in usage if tenant.records_max}
        yield _new_gauge("tenant_records_max", "Records that a tenant may have.", "tenant", limits)


def _count_outcomes(counts: Counts) -> dict[str, int]:
    rejected = {f"rejected_{reason}": count for reason, count in counts.events_rejected.items()}
    return {"committed": counts.events_committed, "replayed": counts.events_replayed, **rejected}


def _new_requests_counter(requests: Mapping[tuple[str, str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "oncelog_requests", "Requests by door, kind and outcome.", labels=["door", "kind", "outcome"]
    )
    for labels, count in requests.items():
        family.add_metric(labels, count)
    return family


def _new_counter(name: str, text: str, count: int) -> Metric:
    return CounterMetricFamily(f"oncelog_{name}", text, count)


def _new_labeled_counter(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"oncelog_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _new_gauge(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"oncelog_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
