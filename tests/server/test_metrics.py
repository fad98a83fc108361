"""Metrics: values, labels and documented names, as Prometheus reads them."""

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from oncelog.core.tenants import Tenant, Usage
from oncelog.engine.batch_report import BatchReport, ReplayCounts
from oncelog.engine.write_gate import WriteGate
from oncelog.server.metrics import Counts, Metrics
from oncelog.storage.store import Consumer
from storage.memory_store import MemoryStore
from tools.site.reference import generate_page


class MeasuredLog:
    """The attributes of a log that the metrics read."""

    def __init__(self, queue_length: int = 0) -> None:
        self.queue_length = queue_length
        self.evictions, self.client_evictions = 2, 5
        self.queue_age_s, self.failed_batches = 0.25, 3
        self.replays = ReplayCounts(memory=4, in_flight=1, store=2)
        self.write_gate = WriteGate(MemoryStore(), None)
        self.write_gate.free_bytes = self.write_gate.store_bytes = 1


def metrics_of(counts: Counts, queue_items: int = 0, position: int = 0, subscribers: int = 0) -> Metrics:
    log: Any = MeasuredLog(queue_items)
    metrics = Metrics(
        counts,
        log,
        connections=lambda: {"ws": 2, "sse": 3},
        unauthenticated=lambda: 4,
        subscribers=lambda: subscribers,
        failed_files=lambda: {"api_keys": 0},
    )
    metrics.positions = {0: position, 3: 7}
    metrics.usage = [(Tenant("acme", bytes_max=5, records_max=6), Usage(3, 4))]
    return metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the samples by name and label values, as Prometheus reads them."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_every_counter_is_exported_under_its_own_name() -> None:
    """Each counter is increased by a different amount, so that a counter exported under a wrong name is found."""
    shown_as = {
        "frames_received": ("oncelog_frames_received_total",),
        "events_committed": ("oncelog_events_total", "committed"),
        "events_replayed": ("oncelog_events_total", "replayed"),
        "deliveries": ("oncelog_deliveries_total",),
        "bytes_sent": ("oncelog_sent_bytes_total",),
        "slow_readers_warned": ("oncelog_slow_readers_total", "warned"),
        "slow_readers_closed": ("oncelog_slow_readers_total", "closed"),
        "auth_failures": ("oncelog_auth_failures_total",),
        "auth_failures_limited": ("oncelog_auth_failures_limited_total",),
        "unauthenticated_requests": ("oncelog_unauthenticated_requests_total",),
    }
    assert set(shown_as) == set(Counts.__slots__) - {
        "connections_refused",
        "events_rejected",
        "requests",
        "ledger_writes",
        "deltas",
        "messages",
    }
    counts = Counts()
    metrics = metrics_of(counts)
    for amount, name in enumerate(shown_as, start=1):
        assert samples(metrics)[shown_as[name]] == 0
        setattr(counts, name, getattr(counts, name) + amount)
    found = samples(metrics)
    assert {name: found[key] for name, key in shown_as.items()} == {
        name: amount for amount, name in enumerate(shown_as, start=1)
    }


def test_reasons_and_requests_are_labels() -> None:
    counts = Counts()
    counts.events_rejected["forbidden"] += 2
    counts.ledger_writes["from_memory"] += 4
    counts.deltas["known"] += 5
    counts.messages["known"] += 6
    counts.requests["events", "submit_events", "ok"] += 3
    counts.requests["events", "sync", "forbidden"] += 1
    found = samples(metrics_of(counts))
    assert found["oncelog_events_total", "rejected_forbidden"] == 2
    assert found["oncelog_ledger_writes_total", "from_memory"] == 4
    assert found["oncelog_deltas_total", "known"] == 5
    assert found["oncelog_messages_total", "known"] == 6
    assert found["oncelog_requests_total", "events", "submit_events", "ok"] == 3
    assert found["oncelog_requests_total", "events", "sync", "forbidden"] == 1


def test_gauges_are_evaluated_at_every_scrape() -> None:
    known = {"subscribers": 3}
    log: Any = MeasuredLog(queue_length=1)
    metrics = Metrics(
        Counts(),
        log,
        connections=lambda: {"ws": 2, "sse": 3},
        unauthenticated=lambda: 4,
        subscribers=lambda: known["subscribers"],
        failed_files=dict,
    )
    names = (
        ("oncelog_queue_items",),
        ("oncelog_subscribers",),
        ("oncelog_evictions_total",),
    )
    assert [samples(metrics)[name] for name in names] == [1, 3, 2]
    known.update(subscribers=6)
    log.queue_length, log.evictions = 4, 5
    assert [samples(metrics)[name] for name in names] == [4, 6, 5]


def test_commits_are_observed_by_size_and_duration() -> None:
    metrics = metrics_of(Counts())
    metrics.observe_commit(BatchReport(items=7, duration_s=0.003, sync_s=0.0, wait_s=0.5))
    metrics.observe_commit(BatchReport(items=100, duration_s=0.03, sync_s=0.02, wait_s=0.0))
    found = samples(metrics)
    assert found["oncelog_commit_batch_items_sum",] == 107
    assert found["oncelog_commit_batch_items_count",] == 2
    assert found["oncelog_commit_batch_items_bucket", "10.0"] == 1
    assert found["oncelog_commit_duration_seconds_sum",] == pytest.approx(0.033)
    assert found["oncelog_commit_duration_seconds_bucket", "0.005"] == 1
    assert found["oncelog_commit_duration_seconds_bucket", "+Inf"] == 2
    assert found["oncelog_sync_duration_seconds_count",] == 1, "a batch without changes is not synced"
    assert found["oncelog_sync_duration_seconds_sum",] == pytest.approx(0.02)
    assert found["oncelog_queue_wait_seconds_sum",] == pytest.approx(0.5)


def test_largest_lags_are_shown_without_names_to_anonymous_callers() -> None:
    metrics = metrics_of(Counts())
    metrics.consumers = [Consumer("", f"c{number}", 0, number) for number in range(150)]
    shown = {name[1]: value for name, value in samples(metrics).items() if name[0] == "oncelog_consumer_lag_records"}
    assert shown == {f"c{number}": number for number in range(50, 150)}
    assert samples(metrics)["oncelog_consumers",] == 150
    anonymous = metrics.render(shows_names=False)
    assert b"acme" not in anonymous
    assert b"oncelog_consumer_lag_records" not in anonymous
    assert b"oncelog_consumers 150.0" in anonymous
    assert b"oncelog_build_info" in metrics.render()
    assert b"oncelog_build_info" not in anonymous, "anonymous callers do not learn the version"


def test_queue_failures_and_replays_come_from_the_log() -> None:
    found = samples(metrics_of(Counts()))
    assert found["oncelog_queue_age_seconds",] == 0.25
    assert found["oncelog_commit_failures_total",] == 3
    assert [found["oncelog_replays_total", source] for source in ("memory", "in_flight", "store")] == [4, 1, 2]


def test_two_servers_in_a_process_have_separate_metrics() -> None:
    first, second = Counts(), Counts()
    one, other = metrics_of(first), metrics_of(second)
    first.frames_received += 1
    assert samples(one)["oncelog_frames_received_total",] == 1
    assert samples(other)["oncelog_frames_received_total",] == 0


def test_process_metrics_are_exported() -> None:
    assert samples(metrics_of(Counts()))["process_resident_memory_bytes",] > 0


def test_metrics_are_in_the_prometheus_text_format() -> None:
    metrics = metrics_of(Counts())
    assert metrics.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# TYPE oncelog_frames_received_total counter\n" in metrics.render()


def test_every_metric_is_documented() -> None:
    families = list(metrics_of(Counts())._registry.collect())
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    documented = set(re.findall(r"^\| `(oncelog_[a-z_]+)`", generate_page("metrics"), re.MULTILINE))
    assert documented == {name for name in names if not name.startswith("process_")}
