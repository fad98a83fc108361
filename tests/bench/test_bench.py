"""The benchmarks run, and their contenders do the same work. Only `make bench` measures time."""

import asyncio
import gc
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import uvloop

from bench import growth, server, ws_idle
from bench.__main__ import ALONE, BENCHMARKS, Measured, main
from bench.bare import BareFile, batches_of
from bench.disk import directory, file_system, find_directory_for_files
from bench.measure import QUICK, Effort, Measurement, Result, measure
from bench.report import plain, report_of
from bench.server_report import Figures
from bench.wire import EVENTS, Slice
from oncelog import event, open_blocking
from oncelog.storage.sqlite.key_index.key_run import unpack_run

MEASURED = {
    name: benchmark for name, benchmark in BENCHMARKS.items() if isinstance(benchmark, Measured) and name not in ALONE
}


@pytest.mark.parametrize("name", MEASURED)
def test_quick_run_has_a_row_for_every_measurement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--quick", "--no-save"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    expected = [measurement.name for measurement in MEASURED[name].measurements(QUICK)]
    assert [row.split("  ")[0] for row in rows] == expected
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("name", MEASURED)
def test_contenders_agree(name: str) -> None:
    for measurement in MEASURED[name].measurements(QUICK):
        assert measurement.agree(*measurement.answers()), measurement.name


def test_disagreeing_contenders_are_not_timed() -> None:
    unequal = Measurement("sum", lambda: 1, lambda: 2, "peer")
    with pytest.raises(ValueError) as caught:
        measure(unequal, QUICK)
    assert str(caught.value) == "sum: ours and peer do not agree"


def test_result_has_best_times_and_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours() -> None: ...
    def baseline() -> None: ...

    seconds: dict[Callable[[], object], Iterator[float]] = {
        ours: iter([4e-6, 2e-6, 3e-6]),
        baseline: iter([30e-6, 40e-6, 20e-6]),
    }

    class ScriptedTimer:
        def __init__(self, run: Callable[[], object], setup: object) -> None:
            assert setup is gc.enable
            self.run = run

        def repeat(self, repeat: int, number: int) -> list[float]:
            return [1e-3 * number] * repeat

        def timeit(self, number: int) -> float:
            return next(seconds[self.run]) * number

    monkeypatch.setattr("bench.measure.Timer", ScriptedTimer)
    measurement = Measurement("a", ours, baseline, "peer", count=2)
    result = measure(measurement, Effort(rounds=3, sample_ms=5))
    assert result.ours_us == pytest.approx(1)
    assert result.baseline_us == pytest.approx(10)
    assert result.ratio == pytest.approx(10)
    assert result.median_ratio == pytest.approx(7.5)


def test_long_calls_have_few_rounds_and_preparation_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    clock = iter(range(1000))

    class CountingTimer:
        def __init__(self, run: Callable[[], object], setup: Callable[[], object]) -> None:
            self.run, self.setup = run, setup

        def timeit(self, number: int) -> float:
            assert number == 1
            self.setup()
            seen.append("began")
            self.run()
            return 10.0 + next(clock)

    def step(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    monkeypatch.setattr("bench.measure.Timer", CountingTimer)
    measurement = Measurement(
        "a",
        step("ours"),
        step("baseline"),
        "peer",
        count=10,
        baseline_count=1,
        prepare_ours=step("prepare ours"),
        prepare_baseline=step("prepare baseline"),
        rounds=2,
    )
    result = measure(measurement, Effort(rounds=400, sample_ms=2))
    answered = ["prepare ours", "ours", "prepare baseline", "baseline"]
    sampled = ["prepare ours", "began", "ours", "prepare baseline", "began", "baseline"]
    assert seen == answered + 2 * sampled
    assert result.ours_us == pytest.approx(1e6)
    assert result.baseline_us == pytest.approx(11e6)


@pytest.mark.parametrize(
    ("target_ratio", "target_us", "cells", "is_met", "is_ratio_met"),
    [
        (None, None, [], True, True),
        (8, None, ["≥ 8×", "met"], True, True),
        (8.5, None, ["≥ 8.5×", "NOT MET"], False, False),
        (None, 6, ["< 6 µs", "met"], True, True),
        (None, 5, ["< 5 µs", "NOT MET"], False, True),
        (8, 5, ["≥ 8×, < 5 µs", "NOT MET"], False, True),
    ],
)
def test_report_compares_results_with_targets(
    target_ratio: float | None, target_us: float | None, cells: list[str], is_met: bool, is_ratio_met: bool
) -> None:
    measurement = Measurement("a", int, int, "peer", target_ratio=target_ratio, target_us=target_us)
    result = Result(measurement, ours_us=5, baseline_us=40, ratio=8, median_ratio=7)
    assert (result.is_met, result.is_ratio_met) == (is_met, is_ratio_met)
    times = ["a", "5.00 µs", "40.00 µs peer", "8.00×", "7.00×"]
    for judged, shown in ((True, cells), (False, cells[:1])):
        report = report_of([result], judged=judged)
        assert re.split(r"\s{2,}", plain(report).splitlines()[-1]) == times + shown
        assert report.is_met is (is_ratio_met or not judged)


def test_only_a_missed_ratio_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.__main__.FULL", Effort(rounds=2, sample_ms=0))
    missed_ratio = Measurement("a", int, int, "peer", target_ratio=1e9)
    missed_time = Measurement("b", int, int, "peer", target_us=0)
    monkeypatch.setitem(BENCHMARKS, "ratio", Measured("ratio", lambda _: [missed_time, missed_ratio]))
    monkeypatch.setitem(BENCHMARKS, "time", Measured("time", lambda _: [missed_time]))
    assert main(["time", "--no-save"]) == 0
    assert main(["time", "ratio", "--no-save"]) == 1
    assert main(["ratio", "--quick"]) == 0


def test_page_names_the_command_and_no_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement("a", int, int, "peer")
    monkeypatch.setitem(BENCHMARKS, "small", Measured("small", lambda _: [measurement]))
    assert main(["small", "--quick", "--output", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "small.md").read_text()
    assert page.startswith("# Results: small\n\n- date: ")
    assert "- command: `python -m bench small --quick`\n" in page
    assert re.search(r"^- commit: ([0-9a-f]{7,}(\+changes)?|unknown)$", page, re.MULTILINE)
    assert re.search(r"^\| a \| ", page, re.MULTILINE)
    assert str(tmp_path) not in page


def test_unknown_benchmark_is_refused_with_the_available_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cors"])
    assert caught.value.code == 2
    assert "there is no benchmark 'cors'; known names: core" in capsys.readouterr().err


# --- growth ------------------------------------------------------------------------------------------


def test_growth_has_a_row_for_every_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["growth", "--quick", "--records", "1000", "--output", str(tmp_path)]) == 0
    windows, findings = capsys.readouterr().out.split("\n\n")
    assert [row.split()[0] for row in windows.splitlines()[2:]] == ["100", "200", "400", "1000"]
    assert "events/s, 1000 / 100, normalised" in findings
    assert "MET" not in findings
    page = (tmp_path / "growth.md").read_text()
    assert "- command: `python -m bench growth --quick --records 1000`\n" in page
    assert len(re.findall(r"^\| --- \|", page, re.MULTILINE)) == 2


def test_growth_of_too_few_records_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for records in ("999", "-5000", "many"):
        with pytest.raises(SystemExit) as caught:
            main(["growth", "--records", records])
        assert caught.value.code == 2
        assert "must be a whole number from 1000 on" in capsys.readouterr().err


SPEED = growth.Speed(events_per_s=20_000, p50_ms=10, p99_ms=20)
WINDOW = growth.Window(500_000, SPEED, SPEED, index_bytes_a_key=15.5, file_bytes=2**28)
OPENING = growth.Opening(opened_s=1, committed_s=2, replayed_s=3)


@pytest.mark.parametrize(
    ("ours", "bare", "results", "is_met"),
    [
        (SPEED, SPEED, ["met", "met", "met", "met"], True),
        (replace(SPEED, events_per_s=17_000), SPEED, ["NOT MET", "NOT MET", "met", "met"], False),
        (replace(SPEED, p99_ms=41), SPEED, ["met", "met", "NOT MET", "NOT MET"], False),
        # A slower machine slows down both the log and the bare file.
        (growth.Speed(10_000, 20, 80), growth.Speed(10_000, 20, 60), ["met", "NOT MET", "met", "NOT MET"], True),
        # The bare file has become faster, but the log has not.
        (SPEED, growth.Speed(40_000, 5, 5), ["NOT MET", "met", "NOT MET", "met"], False),
    ],
)
def test_growth_fails_only_for_slowdowns_beyond_the_bare_file(
    ours: growth.Speed, bare: growth.Speed, results: list[str], is_met: bool
) -> None:
    last = replace(WINDOW, stored=5_000_000, ours=ours, bare=bare)
    report = growth.report_of([WINDOW, last], OPENING, judged=True)
    windows, findings = report.tables
    assert windows.rows[0] == ("500000", "20000", "10.00", "20.00", "20000", "10.00", "20.00", "15.5", "256")
    assert [row[-1] for row in findings.rows] == [*results, "met", "met", "met", "met"]
    assert report.is_met is is_met
    unjudged = growth.report_of([WINDOW, last], OPENING, judged=False)
    assert unjudged.is_met
    assert {row[-1] for row in unjudged.tables[1].rows} == {""}


def test_missed_time_or_memory_is_shown_without_failing_growth() -> None:
    large = replace(WINDOW, index_bytes_a_key=17)
    report = growth.report_of([large, large], growth.Opening(5, 6, 7), judged=True)
    assert [row[-1] for row in report.tables[1].rows[4:]] == ["NOT MET"] * 4
    assert report.is_met


# --- the server, without peers -----------------------------------------------------------------------


def test_server_measurements_without_peers_run() -> None:
    """The measurements verify the answers that they receive."""
    figures = Figures()
    sizes = replace(server.QUICK_SIZES, slice_s=0.15, idle=20, subscribers=25, stored=2000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for part in (server._idle, server._batches, server._catching_up):
            runner.run(part(sizes, figures))
    server._broadcasts(sizes, figures)
    assert (figures.idle, figures.writers, figures.subscribers) == (20, 4, 25)
    every = [*figures.crowd.values(), *figures.batches.values(), *figures.catching_up.values()]
    assert figures.broadcasts is not None
    assert figures.lone_broadcasts is not None
    for one in (*every, figures.broadcasts, figures.lone_broadcasts):
        assert len(one.slices) == 1
        assert one.best > 0
    assert figures.broadcasts.slices[0].events == sizes.subscribers * sizes.broadcasts


def test_client_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "--quick", "--no-save"]) == 0
    shown = capsys.readouterr().out
    for name in ("the client, outbox on", "load generator, single events", "the client catches up", "share"):
        assert name in shown


def test_gateways_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateways", "--quick", "--no-save", "--records", "1000"]) == 0
    shown = capsys.readouterr().out
    for name in ("by hand on PostgreSQL", "4 processes", "one process", "events/s, 1000 / 100, normalised"):
        assert name in shown


def test_single_events_measurement_runs() -> None:
    async def run_half_load() -> tuple[Slice, Slice]:
        with directory() as place:
            async with server._ours(place, connections=2, in_flight=3) as ours:
                return await ours.half_load(0.2)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        full, half = runner.run(run_half_load())
    assert full.events == len(full.waited) >= 6
    assert half.events == len(half.waited) == max(1, round(full.per_s / 2 * 0.2))


def test_latency_report_of_half_load_has_every_event() -> None:
    sizes = replace(server.QUICK_SIZES, paced_rounds=1, paced_s=0.2)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        attribution = runner.run(server._attribution(sizes, per_s=100.0))
    assert attribution.measured.events == attribution.window.all.requests == 20


def test_returning_reader_must_receive_every_event() -> None:
    def events(*numbers: int) -> list[dict[str, Any]]:
        return [{"committed_id": one, "event": EVENTS[0], "partitions": [ws_idle.WRITTEN]} for one in numbers]

    ws_idle.check_all(events(5, 6, 7), since=4, written=3)
    ws_idle.check_all([], since=4, written=0)
    for wrong in (events(5, 6), events(5, 7, 6), events(5, 5, 6), events(5, 6, 7, 8), events(4, 5, 6)):
        with pytest.raises(ValueError) as caught:
            ws_idle.check_all(wrong, since=4, written=3)
        assert str(caught.value).startswith("of 3 events after 4, a reader received ")
    for changed in ({"event": {"type": "another"}}, {"partitions": [ws_idle.UNWRITTEN]}):
        with pytest.raises(ValueError) as caught:
            ws_idle.check_all([{**events(5)[0], **changed}], since=4, written=1)
        assert str(caught.value) == "a reader received other events than were written"


# --- the bare loop and the directory for files -----------------------------------------------------------


def test_bare_loop_writes_the_rows_of_the_log_in_its_batches(tmp_path: Path) -> None:
    ours, bare = tmp_path / "ours.db", tmp_path / "bare.db"
    with open_blocking(ours) as log:
        for request in (range(3), range(3, 5)):
            log.submit_many([event(UUID(int=number), {"type": "a", "n": number}, ["p"]) for number in request])
    batches = batches_of(ours)
    assert [len(batch.records) for batch in batches] == [3, 2]
    assert [len(batch.records) for batch in batches_of(ours, 1, 4)] == [1, 1, 1, 1]
    with closing(BareFile(bare)) as file:
        assert len(file.insert_timed(batches)) == 2
    for columns in (
        "* FROM oncelog_records",
        "* FROM oncelog_partition_records",
        "first_position, count FROM oncelog_blocks",
    ):
        assert _rows(bare, columns) == _rows(ours, columns)
    assert _rows(bare, "position, height FROM oncelog_lanes") == _rows(ours, "position, height FROM oncelog_lanes")


def test_bare_loop_appends_in_order_of_time(tmp_path: Path) -> None:
    ours, bare = tmp_path / "ours.db", tmp_path / "bare.db"
    with open_blocking(ours) as log:
        log.submit_many([event(UUID(int=number), {"type": "a"}, ["p"]) for number in (2, 1, 3)])
    with closing(BareFile(bare)) as file:
        for _ in range(2):
            file.insert_timed(list(file.following(batches_of(ours))))
    assert _rows(bare, "place FROM oncelog_records ORDER BY key") == [(place,) for place in range(1, 7)]
    packed = [keys for (keys,) in _rows(bare, "keys FROM oncelog_key_runs") if isinstance(keys, bytes)]
    assert [[*map(list, unpack_run(keys))] for keys in packed] == [[[1, 2, 3]] * 2, [[4, 5, 6]] * 2]
    assert _rows(bare, "height, first_position FROM oncelog_blocks") == [(1, 1), (2, 4)]


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {query}").fetchall()


def test_files_are_created_on_disk_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with directory() as place:
        (place / "a.db").touch()
        assert place.parent == find_directory_for_files()
    assert not place.exists()
    monkeypatch.setattr("bench.disk.tempfile.gettempdir", lambda: "/memory")
    monkeypatch.setattr("bench.disk.file_system", lambda path: "ext4" if path == Path.cwd() else "tmpfs")
    assert find_directory_for_files() == Path.cwd()
    monkeypatch.setattr("bench.disk.file_system", lambda _: "tmpfs")
    assert find_directory_for_files() == Path("/memory")  # The page reports the fallback.


def test_type_of_the_file_system_is_found_for_a_path() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/nowhere/at/all")) == file_system(Path("/"))
