"""The benchmarks run and compare like with like. Nothing here looks at a time: that is for `make bench`."""

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS, main
from bench.measure import QUICK, Effort, Measurement, Result, measure
from bench.report import table


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_run_has_a_row_for_every_measurement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--quick", "--no-save"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    expected = [measurement.name for measurement in BENCHMARKS[name]()]
    assert [row.split("  ")[0] for row in rows] == expected
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_contenders_agree(name: str) -> None:
    for measurement in BENCHMARKS[name]():
        assert measurement.agree(measurement.ours(), measurement.baseline()), measurement.name


def test_contenders_that_disagree_are_not_timed() -> None:
    unequal = Measurement("sum", lambda: 1, lambda: 2, "peer")
    with pytest.raises(ValueError) as caught:
        measure(unequal, QUICK)
    assert str(caught.value) == "sum: ours and peer do not agree"


def test_best_times_and_median_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_targets(
    target_ratio: float | None, target_us: float | None, cells: list[str], is_met: bool, is_ratio_met: bool
) -> None:
    measurement = Measurement("a", int, int, "peer", target_ratio=target_ratio, target_us=target_us)
    result = Result(measurement, ours_us=5, baseline_us=40, ratio=8, median_ratio=7)
    assert (result.is_met, result.is_ratio_met) == (is_met, is_ratio_met)
    times = ["a", "5.00 µs", "40.00 µs peer", "8.00×", "7.00×"]
    assert re.split(r"\s{2,}", table([result], judged=True).splitlines()[-1]) == times + cells
    assert re.split(r"\s{2,}", table([result], judged=False).splitlines()[-1]) == times + cells[:1]


def test_only_a_missed_ratio_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.__main__.FULL", QUICK)
    missed_ratio = Measurement("a", int, int, "peer", target_ratio=1e9)
    missed_time = Measurement("b", int, int, "peer", target_us=0)
    monkeypatch.setitem(BENCHMARKS, "ratio", lambda: [missed_time, missed_ratio])
    monkeypatch.setitem(BENCHMARKS, "time", lambda: [missed_time])
    assert main(["time", "--no-save"]) == 0
    assert main(["time", "ratio", "--no-save"]) == 1
    assert main(["ratio", "--quick"]) == 0


def test_page_says_what_ran_and_not_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement("a", int, int, "peer")
    monkeypatch.setitem(BENCHMARKS, "small", lambda: [measurement])
    assert main(["small", "--quick", "--output", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "small.md").read_text()
    assert page.startswith("# Results: small\n\n- date: ")
    assert "- command: `python -m bench small --quick`\n" in page
    assert re.search(r"^- commit: ([0-9a-f]{7,}(\+changes)?|unknown)$", page, re.MULTILINE)
    assert re.search(r"^\| a \| ", page, re.MULTILINE)
    assert str(tmp_path) not in page


def test_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cors"])
    assert caught.value.code == 2
    assert "there is no benchmark 'cors'; there is: core" in capsys.readouterr().err
