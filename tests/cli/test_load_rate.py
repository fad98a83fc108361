"""`oncelog load --rate` sends at a fixed rate, counts latencies from when requests are due, and reports overload."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.faulty_events_server import committed, faulty_server
from cli.runner import COMMAND, RUNNER
from cli.server_process import oncelog, serving
from databases import BOTH_STORES
from deadlines import WAIT_S
from oncelog.cli.load import runner

FEW = ["--connections", "1", "--in-flight", "1", "--retries", "0"]
MANY = ["--connections", "1", "--in-flight", "200", "--retries", "0"]
"""More requests in flight than a test sends, so that no request is late on a busy machine."""


def run_load(url: str, *options: str) -> tuple[int, str, str]:
    done = RUNNER.invoke(COMMAND, ["load", "--url", url, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.stderr
    return done.exit_code, done.stdout, done.stderr


def load_figures(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    status, output, _ = run_load(url, *options, "--json")
    return status, json.loads(output)


@BOTH_STORES
def test_every_event_of_the_schedule_is_committed(tmp_path: Path) -> None:
    options = ["--rate", "600", "--seconds", "0.5", "--batch", "3", "--retries", "20", "--connections", "3"]
    with serving(tmp_path) as served:
        done = oncelog("load", "--url", served.url, "--in-flight", "100", "--partitions", "2", "--json", *options)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert (figures["rate"], figures["rate_reached"], figures["late"], figures["unsent"]) == (600, True, 0, 0)
        assert figures["events"] == 300
        assert (figures["lost"], figures["differing"], figures["rejected"]) == (0, 0, {})
        # Retries come in addition. A connection may end while one is due.
        assert figures["retried"] == pytest.approx(60, abs=3)
        # A request of three events has one latency. Retries have none.
        assert sum(bucket["requests"] for bucket in figures["latency_buckets"]) == 100
        # The last request is due after 0.495 s.
        assert figures["took_s"] >= 0.495
        assert figures["events_per_s"] <= 300 / 0.494
        command = ["tail", "--url", served.url, "--partition", "load/0", "--partition", "load/1", "--limit", "300"]
        assert len({json.loads(line)["id"] for line in oncelog(*command).stdout.splitlines()}) == 300


@pytest.mark.parametrize("in_flight", [1, 200])
def test_stall_of_the_server_delays_every_request_that_is_due_during_it(in_flight: int) -> None:
    """With one request in flight, the other requests are sent after the stall, but their latencies include it."""

    def answer(ids: list[str], request: int) -> dict[str, Any]:
        if request == 1:
            time.sleep(0.5)
        return committed(ids, request)

    options = ["--connections", "1", "--in-flight", str(in_flight), "--retries", "0"]
    with faulty_server(answer) as url:
        _, figures = load_figures(url, *options, "--rate", "100", "--seconds", "1.2")
    # The eleven requests that are due in the first 0.1 s of the stall wait at least 0.4 s for its end.
    assert sum(bucket["requests"] for bucket in figures["latency_buckets"] if bucket["up_to_ms"] >= 400) >= 11
    assert figures["latency_ms"]["p99"] >= 400
    assert figures["latency_ms"]["max"] >= 500
    assert (figures["late"] >= 40) is (in_flight == 1)
    if in_flight > 1:
        assert (figures["events"], figures["rate_reached"]) == (120, True)


def test_slow_server_does_not_reach_the_rate() -> None:
    def answer(ids: list[str], request: int) -> dict[str, Any]:
        time.sleep(0.05)
        return committed(ids, *range(len(ids) * request, len(ids) * (request + 1)))

    with faulty_server(answer) as url:
        status, figures = load_figures(url, *FEW, "--rate", "2000", "--seconds", "0.4", "--batch", "2")
        assert (status, figures["rate_reached"], figures["lost"]) == (1, False, 0)
        # At most 9 requests were sent one after another in 0.42 s. The others of the 400 remained unsent.
        assert figures["events"] <= 2 * 9
        assert figures["unsent"] == 800 - figures["events"]
        assert figures["late"] >= figures["unsent"]
        assert figures["events_per_s"] < 100

        status, output, _ = run_load(url, *FEW, "--rate", "2000", "--seconds", "0.4")
    assert status == 1
    first, schedule, problem, *_ = output.splitlines()
    assert re.fullmatch(r"\d events in [\d.]+ s: \d+ events/s, requested 2000 events/s", first)
    assert re.fullmatch(r"schedule: 79\d events late, 79\d of them never sent", schedule)
    assert re.fullmatch(
        r"rate not reached: 79\d events were due but not sent, because their connections had reached --in-flight 1\. "
        r"The latencies do not include them\. Lower --rate, or raise --in-flight if the server can do more\.",
        problem,
    )


def test_latency_at_a_fixed_rate_includes_repeated_attempts() -> None:
    def answer(ids: list[str], request: int) -> dict[str, Any]:
        if request == 1:
            return {"code": "server_busy", "message": "too much", "details": {"retry_after_ms": 300}}
        return committed(ids, request)

    with faulty_server(answer) as url:
        status, figures = load_figures(url, *MANY, "--rate", "10", "--seconds", "0.3")
    assert (status, figures["events"], figures["errors"]) == (0, 3, {"server_busy": 1})
    assert sum(bucket["requests"] for bucket in figures["latency_buckets"]) == 3
    assert figures["latency_ms"]["max"] >= 300


def test_progress_shows_the_events_that_are_due_but_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers only after such a report."""
    is_reported = threading.Event()
    reports: list[str] = []

    def show(report: str) -> None:
        reports.append(report)
        if not report.endswith("unsent 0"):
            is_reported.set()

    @contextmanager
    def open_display() -> Iterator[tuple[float, Callable[[str], None]]]:
        yield 0.001, show

    def answer(ids: list[str], request: int) -> dict[str, Any]:
        is_reported.wait(WAIT_S)
        return committed(ids, request)

    monkeypatch.setattr(runner, "_open_display", open_display)
    monkeypatch.setattr(runner, "GRACE_S", WAIT_S)
    with faulty_server(answer) as url:
        run_load(url, *FEW, "--rate", "1000", "--seconds", "0.1")
    (first,) = [report for report in reports if not report.endswith("unsent 0")][:1]
    assert re.fullmatch(r" +[\d.]+ of 0\.1 s +0 events +0/s  p50 -  p99 -  errors 0  unsent \d+", first)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--rate", "10", "--seconds", "1", "--batch", "1000"],
            "less than one request is due in --seconds 1: --rate × --seconds must be at least --batch (1000)",
        ),
        (["--rate", "5", "--seconds", "inf"], "--rate needs a finite number of --seconds. Nothing was sent"),
        (["--rate", "0"], "greater than or equal to 0.01"),
        (["--rate", "2000000"], "less than or equal to 1000000"),
        (["--rate", "nan"], "less than or equal to 1000000"),
    ],
)
def test_unusable_rate_is_refused(options: list[str], sentence: str) -> None:
    status, output, errors = run_load("http://127.0.0.1:1", *options)
    assert (status, output) == (2, "")
    assert sentence in re.sub(r"[\s│]+", " ", errors)
    assert "Writing real events" not in errors
