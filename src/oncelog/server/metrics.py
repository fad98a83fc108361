"""A server's metrics for Prometheus.

The server increments the plain numbers in `Counts`, and a scrape converts them to metrics. All increments happen on the
event loop's thread, so they need no lock. `_DECLARATIONS` declares each metric.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oncelog.core.tenants import Tenant, Usage
from oncelog.engine.batch_report import BatchReport
from oncelog.engine.log import Log
from oncelog.engine.write_gate import ReadOnlyReason
from oncelog.storage.store import Consumer
from oncelog.version import __version__

BATCH_ITEMS_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
COMMIT_SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
HISTOGRAMS: Final = (
    ("oncelog_commit_batch_items", "Writes of one group commit.", BATCH_ITEMS_BOUNDS),
    (
        "oncelog_commit_duration_seconds",
        "Time from the start of a group commit until it was durable.",
        COMMIT_SECONDS_BOUNDS,
    ),
    (
        "oncelog_sync_duration_seconds",
        "Time that COMMIT took: the sync of the file, or of the database and its standbys.",
        COMMIT_SECONDS_BOUNDS,
    ),
    (
        "oncelog_queue_wait_seconds",
        "Wait of the oldest write of each group commit, from its arrival to the start of the commit.",
        COMMIT_SECONDS_BOUNDS,
    ),
)
"""Name, help text and bucket bounds of each histogram."""

CONSUMERS_SHOWN_MAX: Final = 100
"""Maximum number of consumers in the metrics. Applications can create any number of consumers."""
_PRIVATE_LABELS: Final = frozenset({"tenant", "consumer", "stream", "version"})
"""Labels whose values only callers with the grant may see: names in the log, and the version of the server."""
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
"""Reasons for refusing or closing a connection. Each has a sample from the start, so that its first increase is
visible."""


@dataclass(slots=True, eq=False)
class Counts:
    """Plain numbers that the server adds to: `counts.frames_received += 1`."""

    frames_received: int = 0
    events_committed: int = 0
    events_replayed: int = 0
    events_rejected: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By reason. The reasons come from the API's table, so clients cannot choose them."""
    requests: defaultdict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    """By API, transport and outcome. Clients cannot choose a label, because the number of series must be limited."""
    ledger_writes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By outcome: new, answered from memory or from the store, or the code of an error."""
    deltas: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By outcome: committed, known, or known under a different op."""
    messages: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By outcome: committed, known, or known with different content."""
    deliveries: int = 0
    bytes_sent: int = 0
    slow_readers_warned: int = 0
    slow_readers_closed: int = 0
    auth_failures: int = 0
    auth_failures_limited: int = 0
    """Failed authentications that were answered with RATE_LIMITED."""
    unauthenticated_requests: int = 0
    connections_refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CONNECTION_REFUSALS, 0))


class Metrics(Collector):
    """The metrics of one server. `render` calls the given functions, which must not raise or block."""

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self,
        counts: Counts,
        log: Log,
        *,
        connections: Callable[[], Mapping[str, int]],
        unauthenticated: Callable[[], int],
        subscribers: Callable[[], int],
        failed_files: Callable[[], Mapping[str, int]],
    ) -> None:
        self.counts = counts
        self.log = log
        self.connections = connections
        self.unauthenticated = unauthenticated
        self.subscribers = subscribers
        self.failed_files = failed_files
        self.positions: Mapping[int, int] = {}
        """Newest position of each lane when the server last read it from the log."""
        self.usage: Sequence[tuple[Tenant, Usage]] = ()
        """Usage of the tenants when the server last read it from the log."""
        self.consumers: Sequence[Consumer] = ()
        """Named consumers when the server last read them from the log."""
        self._shows_names = True
        registry = CollectorRegistry()
        registry.register(self)
        # Observed once per group commit, so their locks cost little.
        self._batch_items, self._commit_seconds, self._sync_seconds, self._wait_seconds = (
            Histogram(name, text, buckets=bounds, registry=registry) for name, text, bounds in HISTOGRAMS
        )
        ProcessCollector(registry=registry)
        self._registry = registry

    def observe_commit(self, batch: BatchReport) -> None:
        """Record a group commit that has become durable."""
        self._batch_items.observe(batch.items)
        self._commit_seconds.observe(batch.duration_s)
        self._wait_seconds.observe(batch.wait_s)
        if batch.sync_s:
            self._sync_seconds.observe(batch.sync_s)

    def render(self, *, shows_names: bool = True) -> bytes:
        """Return all metrics in Prometheus' text format, to be sent as `content_type`.

        Without `shows_names`, metrics with names of tenants, streams or consumers, or the version, are left out.
        """
        self._shows_names = shows_names
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See Prometheus' `Collector`."""
        for declaration in _DECLARATIONS:
            if not self._shows_names and not _PRIVATE_LABELS.isdisjoint(declaration.labels):
                continue
            found = declaration.read(self)
            if found is None:
                continue
            family = declaration.family(f"oncelog_{declaration.name}", declaration.text, labels=declaration.labels)
            for labels, value in found.items() if isinstance(found, Mapping) else [((), found)]:
                family.add_metric([labels] if isinstance(labels, str) else labels, value)
            yield family


Values = Mapping[str, int] | Mapping[tuple[str, str], int] | Mapping[tuple[str, str, str], int]
"""Values by label, or by several labels."""


class _Declaration(Struct, frozen=True):
    """Declaration of a metric, whose name in Prometheus begins with `oncelog_`."""

    family: type[CounterMetricFamily | GaugeMetricFamily]
    name: str
    text: str
    read: Callable[[Metrics], float | Values | None]
    """Returns the value, or the values by label. None omits the metric."""
    labels: tuple[str, ...] = ()


def _read_outcomes(metrics: Metrics) -> Mapping[str, int]:
    counts = metrics.counts
    rejected = {f"rejected_{reason}": count for reason, count in counts.events_rejected.items()}
    return {"committed": counts.events_committed, "replayed": counts.events_replayed, **rejected}


def _get_lag(consumer: Consumer) -> int:
    return consumer.lag


def _tenant_reader(read: Callable[[Tenant, Usage], int | None]) -> Callable[[Metrics], Mapping[str, int] | None]:
    """Return a function that reads a number from each tenant that has one."""

    def read_all(metrics: Metrics) -> Mapping[str, int] | None:
        found = {tenant.prefix: read(tenant, usage) for tenant, usage in metrics.usage}
        return {prefix: number for prefix, number in found.items() if number is not None} if found else None

    return read_all


_COUNTER: Final = CounterMetricFamily
_GAUGE: Final = GaugeMetricFamily
_DECLARATIONS: Final = (
    _Declaration(
        _GAUGE,
        "read_only",
        "1 for each reason why the log accepts no new writes: operator, free, size, full.",
        lambda metrics: {reason.value: int(reason in metrics.log.write_gate.reasons) for reason in ReadOnlyReason},
        ("reason",),
    ),
    _Declaration(
        _GAUGE,
        "disk_free_bytes",
        "Free bytes of the log file's file system, minus the size of the -wal file.",
        lambda metrics: metrics.log.write_gate.free_bytes,
    ),
    _Declaration(
        _GAUGE,
        "store_bytes",
        "Bytes of the file or the database at the last measurement.",
        lambda metrics: metrics.log.write_gate.store_bytes,
    ),
    _Declaration(
        _GAUGE,
        "credential_files_failed",
        "Credential files with unreadable new content: api_keys, signing_keys. Their previous content is used.",
        lambda metrics: metrics.failed_files(),
        ("kind",),
    ),
    _Declaration(
        _GAUGE,
        "tenant_bytes",
        "Bytes of records, members and side state of each tenant with a quota.",
        _tenant_reader(lambda _, usage: usage.bytes),
        ("tenant",),
    ),
    _Declaration(
        _GAUGE,
        "tenant_records",
        "Records and members of each tenant with a quota.",
        _tenant_reader(lambda _, usage: usage.records),
        ("tenant",),
    ),
    _Declaration(
        _GAUGE,
        "tenant_bytes_max",
        "Maximum number of bytes of each tenant with a limit.",
        _tenant_reader(lambda tenant, _: tenant.bytes_max or None),
        ("tenant",),
    ),
    _Declaration(
        _GAUGE,
        "tenant_records_max",
        "Maximum number of records of each tenant with a limit.",
        _tenant_reader(lambda tenant, _: tenant.records_max or None),
        ("tenant",),
    ),
    _Declaration(
        _GAUGE,
        "connections",
        "Open connections: ws (WebSocket), sse (server-sent events).",
        lambda metrics: metrics.connections(),
        ("kind",),
    ),
    _Declaration(
        _COUNTER,
        "frames_received",
        "WebSocket frames that clients have sent.",
        lambda metrics: metrics.counts.frames_received,
    ),
    _Declaration(
        _COUNTER,
        "requests",
        "Requests by API, kind and outcome.",
        lambda metrics: metrics.counts.requests,
        ("door", "kind", "outcome"),
    ),
    _Declaration(
        _COUNTER,
        "events",
        "Submitted events by outcome: committed, replayed, and rejected_ with the reason.",
        _read_outcomes,
        ("outcome",),
    ),
    _Declaration(
        _COUNTER,
        "ledger_writes",
        "Ledger writes by outcome: committed, from_memory and from_store (retries), and codes of errors.",
        lambda metrics: metrics.counts.ledger_writes,
        ("outcome",),
    ),
    _Declaration(
        _COUNTER,
        "deltas",
        "Pushed deltas by outcome: committed, known, known_under_another_op.",
        lambda metrics: metrics.counts.deltas,
        ("outcome",),
    ),
    _Declaration(
        _COUNTER,
        "messages",
        "Chat messages by outcome: committed, known, known_with_other_content.",
        lambda metrics: metrics.counts.messages,
        ("outcome",),
    ),
    _Declaration(
        _COUNTER,
        "deliveries",
        "Events, deltas and messages that were sent to readers.",
        lambda metrics: metrics.counts.deliveries,
    ),
    _Declaration(
        _COUNTER, "sent_bytes", "Bytes of frames and bodies that were sent.", lambda metrics: metrics.counts.bytes_sent
    ),
    _Declaration(
        _COUNTER,
        "slow_readers",
        "Readers that fell behind, by step: warned, closed.",
        lambda metrics: {"warned": metrics.counts.slow_readers_warned, "closed": metrics.counts.slow_readers_closed},
        ("step",),
    ),
    _Declaration(_COUNTER, "auth_failures", "Wrong credentials.", lambda metrics: metrics.counts.auth_failures),
    _Declaration(
        _COUNTER,
        "auth_failures_limited",
        "Wrong credentials that were answered with RATE_LIMITED.",
        lambda metrics: metrics.counts.auth_failures_limited,
    ),
    _Declaration(
        _COUNTER,
        "connections_refused",
        "Connections that were refused, or closed before they were authenticated.",
        lambda metrics: metrics.counts.connections_refused,
        ("reason",),
    ),
    _Declaration(
        _GAUGE,
        "unauthenticated_connections",
        "Open connections that have not authenticated.",
        lambda metrics: metrics.unauthenticated(),
    ),
    _Declaration(
        _COUNTER,
        "unauthenticated_requests",
        "Requests without a credential that needed one. They are not throttled.",
        lambda metrics: metrics.counts.unauthenticated_requests,
    ),
    _Declaration(_GAUGE, "queue_items", "Writes waiting for their commit.", lambda metrics: metrics.log.queue_length),
    _Declaration(
        _GAUGE,
        "queue_age_seconds",
        "Age of the oldest write without a verdict. 0 if no write is waiting.",
        lambda metrics: metrics.log.queue_age_s,
    ),
    _Declaration(
        _COUNTER,
        "commit_failures",
        "Group commits that the store could not make durable.",
        lambda metrics: metrics.log.failed_batches,
    ),
    _Declaration(
        _COUNTER,
        "replays",
        "Retries that got the original receipt, by where it was found: memory, in_flight (with an equal write), store.",
        lambda metrics: structs.asdict(metrics.log.replays),
        ("source",),
    ),
    _Declaration(
        _GAUGE,
        "consumer_lag_records",
        f"Records after the stored cursor of each named consumer. The {CONSUMERS_SHOWN_MAX} greatest lags are shown.",
        lambda metrics: {
            (one.name, one.scope): one.lag for one in nlargest(CONSUMERS_SHOWN_MAX, metrics.consumers, _get_lag)
        },
        ("consumer", "stream"),
    ),
    _Declaration(_GAUGE, "consumers", "Named consumers of the log.", lambda metrics: len(metrics.consumers)),
    _Declaration(_GAUGE, "build_info", "1, with the version of the server.", lambda _: {__version__: 1}, ("version",)),
    _Declaration(
        _GAUGE,
        "last_committed_position",
        "Position of the newest commit of each lane. In lane 0, the newest event that this server has delivered.",
        lambda metrics: {str(lane): position for lane, position in metrics.positions.items()},
        ("lane",),
    ),
    _Declaration(
        _COUNTER,
        "evictions",
        "Evictions at positions that this server committed.",
        lambda metrics: metrics.log.evictions,
    ),
    _Declaration(
        _COUNTER,
        "evicted_clients",
        "Entries of forgotten ledger clients that this server deleted from the store, during later commits.",
        lambda metrics: metrics.log.client_evictions,
    ),
    _Declaration(_GAUGE, "subscribers", "Readers that follow the log.", lambda metrics: metrics.subscribers()),
)
