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
    target_ratio: float | None = None
    """At least so many times faster than the baseline."""
    target_us: float | None = None
    """Less than this for one operation. It depends on the machine, so a miss is shown but fails no run."""


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


FULL: Final = Effort(rounds=400, sample_ms=2)
QUICK: Final = Effort(rounds=2, sample_ms=0)


def measure(measurement: Measurement, effort: Effort) -> Result:
    """Times both contenders. Raises ValueError if they do not agree: a wrong answer has no speed."""
    if not measurement.agree(measurement.ours(), measurement.baseline()):
        raise ValueError(f"{measurement.name}: ours and {measurement.against} do not agree")
    # The collector runs, for both, as it does where the code is used: who leaves much behind pays for it. What was
    # there before is frozen, so that nobody pays for the other measurements' data.
    timers = Timer(measurement.ours, setup=gc.enable), Timer(measurement.baseline, setup=gc.enable)
    gc.collect()
    gc.freeze()
    calls = [max(1, round(effort.sample_ms / 1e3 / min(timer.repeat(5, 1)))) for timer in timers]
    rounds = [[timer.timeit(n) / n for timer, n in zip(timers, calls, strict=True)] for _ in range(effort.rounds)]
    gc.unfreeze()
    ours_us, baseline_us = (min(times) * 1e6 / measurement.count for times in zip(*rounds, strict=True))
    median_ratio = median(baseline / ours for ours, baseline in rounds)
    return Result(measurement, ours_us, baseline_us, baseline_us / ours_us, median_ratio)
