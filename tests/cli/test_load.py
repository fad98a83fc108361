"""`oncelog load` reports correct figures, survives server restarts, and detects wrong answers."""

import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from cli.faulty_events_server import committed, faulty_server
from cli.load_programs import BY_TICKS, UNTIL_STOPPED
from cli.runner import COMMAND, RUNNER
from cli.server_process import oncelog, serving, start_command, wait_for_exit
from databases import BOTH_STORES
from deadlines import wait_until
from oncelog.cli.load import runner, sender

SMALL = ["--connections", "2", "--in-flight", "3", "--seconds", "0.5"]


def last_committed_id(url: str) -> int:
    def read() -> bytes | None:
        try:
            with urlopen(f"{url}/readyz") as answer:  # noqa: S310
                return bytes(answer.read())
        except HTTPError as error:
            assert error.code == 503, error  # noqa: PT017 - the store is slow: poll again
            return None

    number: int = json.loads(wait_until(read))["last_committed_id"]
    return number


def wait_for_events(url: str, number: int) -> None:
    """Poll until the server has committed `number` events."""
    wait_until(lambda: last_committed_id(url) >= number, lambda: last_committed_id(url))


@BOTH_STORES
def test_figures_of_a_load_match_the_log(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        options = ["--batch", "3", "--size", "200", "--partitions", "2", "--retries", "20", "--json"]
        done = oncelog("load", "--url", served.url, *SMALL, *options, program=BY_TICKS)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert figures["events"] == last_committed_id(served.url) > 0
        assert figures["events"] % 3 == 0
        # A connection may end while one retry is due.
        assert figures["retried"] == pytest.approx(figures["events"] / 5, abs=2)
        assert (figures["differing"], figures["lost"], figures["errors"], figures["rejected"]) == (0, 0, {}, {})
        latency = figures["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
        assert sum(bucket["requests"] for bucket in figures["latency_buckets"]) == figures["events"] / 3
        assert (figures["rate"], figures["rate_reached"], figures["late"], figures["unsent"]) == (None, None, 0, 0)
        assert figures["events_per_s"] == pytest.approx(figures["events"] / figures["took_s"], rel=0.01)
        output = f"Writing real events to {served.url}, into the partitions load/0 to load/1.\n"
        assert done.stderr.startswith(output)
        command = ["tail", "--url", served.url, "--partition", "load/0", "--partition", "load/1", "--limit"]
        events = [json.loads(line) for line in oncelog(*command, str(figures["events"])).stdout.splitlines()]
        assert len(events) == figures["events"]
        sizes = {len(json.dumps(one["event"], separators=(",", ":"))) for one in events}
        assert sizes == {200}


def test_load_prints_a_summary(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        done = oncelog("load", "--url", served.url, *SMALL, "--retries", "0", program=BY_TICKS)
    assert done.returncode == 0
    assert re.fullmatch(
        r"\d+ events in \d\.\d s: \d+ events/s\n"
        r"latency: p50 [\d.]+ ms, p90 [\d.]+ ms, p99 [\d.]+ ms, p99.9 [\d.]+ ms, max [\d.]+ ms\n"
        r"  up to +requests\n"
        r"(  [\d.]+ ms +[\d,]+  #*\n)+"
        r"retries: 0 sent a second time, 0 with a different committed_id\n"
        r"lost: 0\n"
        r"errors: none\n",
        done.stdout,
    )


def test_load_loses_no_event_when_the_server_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        options = ["--connections", "2", "--in-flight", "4", "--seconds", "4", "--json"]
        stop = tmp_path / "stop"
        with start_command(str(stop), "load", "--url", served.url, *options, program=UNTIL_STOPPED) as process:
            assert process.stderr is not None
            process.stderr.readline()
            assert "of 4 s" in process.stderr.readline()
            wait_for_events(served.url, 1)
            served.kill()
            served.start()
            wait_for_events(served.url, last_committed_id(served.url) + 1)
            stop.touch()
            status, output, errors = wait_for_exit(process)
        assert status == 0, errors
        figures = json.loads(output)
        assert figures["lost"] == figures["differing"] == 0
        assert figures["errors"]["connection_lost"] >= 1
        # A retry after the kill is a duplicate or the first commit, so every event commits once.
        assert figures["events"] == last_committed_id(served.url)


def test_load_without_a_duration_is_refused() -> None:
    done = RUNNER.invoke(COMMAND, ["load", "--url", "http://127.0.0.1:1", "--seconds", "0"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--seconds must be more than 0" in done.stderr


def test_load_of_an_unreachable_server_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.kill()
        done = oncelog("load", "--url", served.url, *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.splitlines()[-1]
        == f"oncelog: {served.url} cannot be reached: Connection refused (is the server running at this URL?)"
    )


def test_load_counts_forbidden_events_as_rejected(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    key = oncelog("apikey", "create", keys, "--client-id", "c", "--name", "n", "--write", "a").stdout.strip()
    with serving(tmp_path, "--set", f"api_keys.file={keys}") as served:
        options = ["--client-id", "c", "--json"]
        done = oncelog("load", "--url", served.url, *SMALL, *options, program=BY_TICKS, ONCELOG_TOKEN=key)
        assert done.returncode == 1
        figures = json.loads(done.stdout)
        assert figures["rejected"]["forbidden"] > 0
        assert figures["events"] == last_committed_id(served.url) == 0


# --- servers with wrong answers -----------------------------------------------------------------------


def figures_of(url: str, *options: str, clock: Callable[[], float] | None = None) -> tuple[int, dict[str, Any]]:
    """Run a load in this process. By default its clock advances by 1 ms per reading."""
    ticks = count()
    one = ["--connections", "1", "--in-flight", "1", "--seconds", "0.1", "--json"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "perf_counter", clock or (lambda: next(ticks) / 1000))
        done = RUNNER.invoke(COMMAND, ["load", "--url", url, *one, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.stderr
    return done.exit_code, json.loads(done.stdout)


def test_load_detects_a_retry_with_a_different_number() -> None:
    with faulty_server(committed) as url:
        status, figures = figures_of(url, "--retries", "100")
    assert status == 1
    assert figures["differing"] == figures["retried"] > 0
    assert re.fullmatch(r"[0-9a-f-]{36} got committed_id \d+, but \d+ after a retry", figures["problems"][0])


def test_load_detects_two_events_with_one_number() -> None:
    with faulty_server(lambda ids, _: committed(ids, 7)) as url:
        status, figures = figures_of(url, "--retries", "0")
    assert status == 1
    assert figures["differing"] == figures["events"] - 1 > 0
    assert "committed_id 7 was given to " in figures["problems"][0]


def test_load_detects_results_of_other_events() -> None:
    with faulty_server(lambda ids, request: committed(["x"] * len(ids), request)) as url:
        status, figures = figures_of(url)
    assert (status, figures["events"]) == (1, 0)
    assert figures["differing"] > 0


def test_load_counts_unanswered_events_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load's time is over after the first request, whether or not the server has received it."""
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    requests = list[bytes]()
    ask = sender.Sender._request

    async def count_request(worker: sender.Sender, payload: bytes) -> Any:
        requests.append(payload)
        return await ask(worker, payload)

    monkeypatch.setattr(sender.Sender, "_request", count_request)
    with faulty_server(lambda *_: None) as url:
        status, figures = figures_of(url, "--batch", "4", clock=lambda: 0.2 if requests else 0.0)
    assert (status, figures["events"], figures["lost"]) == (1, 0, 4)
    assert figures["problems"][0].endswith(" got no answer")


def test_load_counts_busy_answers_without_failing() -> None:
    def answer(ids: list[str], request: int) -> dict[str, Any]:
        if request == 1:
            return {"code": "server_busy", "message": "too much", "details": {}}
        return committed(ids, request)

    with faulty_server(answer) as url:
        status, figures = figures_of(url, "--retries", "0")
    assert (status, figures["errors"], figures["lost"]) == (0, {"server_busy": 1}, 0)
    assert figures["events"] >= 1


def test_load_counts_a_refusal_too_late_for_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 60)
    requests = list[int]()

    def refuse(_ids: list[str], request: int) -> dict[str, Any]:
        requests.append(request)
        return {"code": "server_busy", "message": "too much", "details": {"retry_after_ms": 3_600_000}}

    with faulty_server(refuse) as url:
        status, figures = figures_of(url, "--retries", "0", clock=lambda: 0.2 if requests else 0.0)
    assert (status, figures["errors"], figures["events"]) == (1, {"server_busy": 1}, 0)
    assert "was not committed: server_busy" in figures["problems"][0]
