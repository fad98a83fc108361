"""Histogram of latencies with logarithmic buckets, in constant memory."""

from bisect import bisect_left
from collections import Counter
from math import ceil
from typing import Final

from msgspec import Struct

_NARROW_BUCKETS: Final = 1000
"""Buckets of 1 µs at the low end. Each further decade has 900 buckets, whose width is at most 1 % of the latency."""
_ROW_STEPS: Final = (1, 2, 5)


class Bucket(Struct, frozen=True):
    """Number of latencies up to a bound and above the bound of the previous bucket."""

    up_to_us: int
    count: int


class LatencyHistogram:
    """Counts latencies in buckets that are at most 1 % wide.

    The number of buckets depends on the range of the latencies, not on their number: 6,400 from 1 µs to 1,000 s.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._counts = Counter[int]()
        """Counts by upper bound in µs."""

    def record(self, latency_s: float) -> None:
        """Count a latency."""
        self.count += 1
        self.max_s = max(self.max_s, latency_s)
        self._counts[compute_bound_us(latency_s)] += 1

    def compute_percentile_s(self, share: float) -> float | None:
        """Return the latency that this share of all latencies does not exceed, or None without latencies.

        The result is the upper bound of a bucket, so it is at most 1 % (or 1 µs) above the exact percentile.
        """
        rank = max(1, ceil(share * self.count))
        for bucket in self.list_buckets():
            rank -= bucket.count
            if rank <= 0:
                return min(bucket.up_to_us / 1e6, self.max_s)
        return None

    def list_buckets(self) -> list[Bucket]:
        """Return the buckets that are not empty, in ascending order."""
        return [Bucket(bound_us, self._counts[bound_us]) for bound_us in sorted(self._counts)]

    def list_rows(self) -> list[Bucket]:
        """Merge the buckets into rows for human readers, whose bounds are 1, 2 or 5 times a power of ten."""
        buckets = self.list_buckets()
        if not buckets:
            return []
        bounds_us = [1]
        while bounds_us[-1] < buckets[-1].up_to_us:
            decade, step = divmod(len(bounds_us), len(_ROW_STEPS))
            bounds_us.append(_ROW_STEPS[step] * 10**decade)
        counts = [0] * len(bounds_us)
        for bucket in buckets:
            counts[bisect_left(bounds_us, bucket.up_to_us)] += bucket.count
        first = bisect_left(bounds_us, buckets[0].up_to_us)
        return [Bucket(bound_us, count) for bound_us, count in zip(bounds_us, counts, strict=True)][first:]


def compute_bound_us(latency_s: float) -> int:
    """Return the upper bound of the bucket of a latency. Bounds have at most three significant digits.

    Every row bound of `LatencyHistogram.list_rows` is a bucket bound, so rows never split a bucket.
    """
    latency_us = ceil(round(latency_s * 1e6, 3))  # rounding to ns removes errors such as 999.0000000001
    width_us = 1
    while latency_us > _NARROW_BUCKETS * width_us:
        width_us *= 10
    return -(-latency_us // width_us) * width_us
