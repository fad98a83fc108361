"""How a time is taken here: two contenders in turn, many rounds, the best of each.

A shared machine slows both contenders down alike, and for a while at a time. So the ratio within one run is the
figure to trust, and the minimum is the time that was least disturbed.
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
    """Something to be timed against something else that is timed in the same rounds."""

    name: str
    ours: Callable[[], Any]
    baseline: Callable[[], Any]
    against: str
    """What the baseline is."""
    agree: Callable[[Any, Any], bool] = operator.eq
    """Sees what both return, and says whether both did their work."""
    count: int = 1
    """How many operations one call is; times are reported for one."""
    baseline_count: int | None = None
    """The same for the baseline, where its call is another number of them."""
    prepare_ours: Callable[[], Any] | None = None
    """Runs before every sample of ours, and is not timed."""
    prepare_baseline: Callable[[], Any] | None = None
    """The same before the baseline's, which always follows one of ours."""
    rounds: int | None = None
    """At most so many rounds, each of one call: for calls that take long."""
    target_ratio: float | None = None
    """At least so many times faster than the baseline."""
    target_us: float | None = None
    """Less than this for one operation. It depends on the machine, so a miss is shown but fails no run."""

    def answers(self) -> tuple[Any, Any]:
        """What both return, each prepared and called once."""
        return _called(self.prepare_ours, self.ours), _called(self.prepare_baseline, self.baseline)


def _called(prepare: Callable[[], Any] | None, run: Callable[[], Any]) -> Any:
    if prepare is not None:
        prepare()
    return run()


@dataclass(frozen=True)
class Result:
    """Times of one operation, and how many times faster ours is than the baseline."""

    measurement: Measurement
    ours_us: float
    baseline_us: float
    ratio: float
    """Of the best times."""
    median_ratio: float
    """Of the rounds' ratios, each of two samples taken one right after the other."""

    @property
    def is_ratio_met(self) -> bool:
        """True also where there is no such target."""
        return self.ratio >= (self.measurement.target_ratio or 0)

    @property
    def is_met(self) -> bool:
        """True if no target was missed."""
        target_us = self.measurement.target_us
        return self.is_ratio_met and (target_us is None or self.ours_us < target_us)


@dataclass(frozen=True)
class Effort:
    """How long to look: so many rounds, each with one sample of about that length from either contender."""

    rounds: int
    sample_ms: float
    records: int = 5_000_000
    """How large a log grows."""
    is_quick: bool = False
    """Only to see whether everything runs: small sizes, and nothing is judged."""


FULL: Final = Effort(rounds=400, sample_ms=2)
QUICK: Final = Effort(rounds=2, sample_ms=0, records=2000, is_quick=True)


def measure(measurement: Measurement, effort: Effort) -> Result:
    """Times both contenders. Raises ValueError if they do not agree: a wrong answer has no speed."""
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
    """What a timer runs before each sample.

    The collector runs, for both, as it does where the code is used: who leaves much behind pays for it. What was
    there before the first sample is frozen, so that nobody pays for the other measurements' data.
    """
    if prepare is None:
        return gc.enable

    def prepared() -> None:
        prepare()
        gc.enable()

    return prepared
