"""Measure two contenders in turn, in many rounds, and report the best time of each.

A busy machine slows down both contenders for a while. The ratio within one run is therefore the reliable figure, and
the minimum is the time with the least disturbance.
"""

import gc
import operator
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from timeit import Timer
from typing import Any, Final


@dataclass(frozen=True)
class Measurement:
    """A function to measure, and a baseline that is measured in the same rounds."""

    name: str
    ours: Callable[[], Any]
    baseline: Callable[[], Any]
    against: str
    """Name of the baseline."""
    agree: Callable[[Any, Any], bool] = operator.eq
    """Returns whether the results show that both did the same work."""
    count: int = 1
    """Operations per call. Reported times are per operation."""
    baseline_count: int | None = None
    """Operations per call of the baseline, if different."""
    prepare_ours: Callable[[], Any] | None = None
    """Runs before every sample of `ours`. The measured time does not include it."""
    prepare_baseline: Callable[[], Any] | None = None
    """Runs before every sample of the baseline. A sample of the baseline always follows a sample of `ours`."""
    rounds: int | None = None
    """Maximum number of rounds, for slow calls. Each round then makes one call."""
    target_ratio: float | None = None
    """Minimum ratio to the baseline."""
    target_us: float | None = None
    """Maximum time of one operation. A longer time is shown but fails no run, because the time depends on the machine.
    """

    def answers(self) -> tuple[Any, Any]:
        """Prepare and call both once, and return their results."""
        return _called(self.prepare_ours, self.ours), _called(self.prepare_baseline, self.baseline)


def _called(prepare: Callable[[], Any] | None, run: Callable[[], Any]) -> Any:
    if prepare is not None:
        prepare()
    return run()


@dataclass(frozen=True)
class Result:
    """Times of one operation, and the ratio to the baseline."""

    measurement: Measurement
    ours_us: float
    baseline_us: float
    ratio: float
    """Ratio of the best times."""
    median_ratio: float
    """Median of the ratios of the rounds, each from two consecutive samples."""

    @property
    def is_ratio_met(self) -> bool:
        """Whether the ratio meets its target, or has none."""
        return self.ratio >= (self.measurement.target_ratio or 0)

    @property
    def is_met(self) -> bool:
        """Whether all targets are met."""
        target_us = self.measurement.target_us
        return self.is_ratio_met and (target_us is None or self.ours_us < target_us)


@dataclass(frozen=True)
class Effort:
    """Duration of a measurement: the number of rounds, and the approximate length of each contender's sample in a
    round.
    """

    rounds: int
    sample_ms: float
    records: int = 5_000_000
    """Number of records to which a log grows."""
    is_quick: bool = False
    """Whether to check only that everything runs. Sizes are then small, and targets are not judged."""


FULL: Final = Effort(rounds=400, sample_ms=2)
QUICK: Final = Effort(rounds=2, sample_ms=0, records=2000, is_quick=True)


def measure(measurement: Measurement, effort: Effort) -> Result:
    """Measure both contenders. Raises ValueError if they disagree, because a wrong answer has no meaningful time."""
    if not measurement.agree(*measurement.answers()):
        raise ValueError(f"{measurement.name}: ours and {measurement.against} do not agree")
    timers = (
        Timer(measurement.ours, setup=_setup(measurement.prepare_ours)),
        Timer(measurement.baseline, setup=_setup(measurement.prepare_baseline)),
    )
    gc.collect()
    gc.freeze()
    if measurement.rounds is None:
        calls = [max(1, round(effort.sample_ms / 1e3 / min(timer.repeat(5, 1)))) for timer in timers]
    else:
        calls = [1, 1]
    rounds = [
        [timer.timeit(n) / n for timer, n in zip(timers, calls, strict=True)]
        for _ in range(min(effort.rounds, measurement.rounds or effort.rounds))
    ]
    gc.unfreeze()
    counts = measurement.count, measurement.baseline_count or measurement.count
    times_us = [[seconds * 1e6 / n for seconds, n in zip(times, counts, strict=True)] for times in rounds]
    ours_us, baseline_us = map(min, zip(*times_us, strict=True))
    median_ratio = median(baseline / ours for ours, baseline in times_us)
    return Result(measurement, ours_us, baseline_us, baseline_us / ours_us, median_ratio)


def _setup(prepare: Callable[[], Any] | None) -> Callable[[], Any]:
    """Return the function that a timer runs before each sample.

    The garbage collector is on for both, as in production, so code that leaves many objects behind pays for them.
    Objects from before the first sample are frozen, so that data of other measurements costs nothing.
    """
    if prepare is None:
        return gc.enable

    def prepared() -> None:
        prepare()
        gc.enable()

    return prepared
