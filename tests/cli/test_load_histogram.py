"""The latency histogram and the set of ids of `oncelog load`."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.cli.load.histogram import LatencyHistogram, compute_bound_us
from oncelog.cli.load.id_set import IdSet

LATENCIES_S = st.floats(min_value=0, max_value=1e5, allow_nan=False) | st.integers(0, 10**9).map(lambda us: us / 1e6)


def histogram_of(latencies_s: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for latency_s in latencies_s:
        histogram.record(latency_s)
    return histogram


@given(st.lists(LATENCIES_S, min_size=1, max_size=30), st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999, 1.0]))
def test_percentile_is_at_most_one_percent_above_the_exact_one(latencies_s: list[float], share: float) -> None:
    exact_s = sorted(latencies_s)[max(1, ceil(share * len(latencies_s))) - 1]
    found_s = histogram_of(latencies_s).compute_percentile_s(share)
    assert found_s is not None
    assert exact_s - 1e-9 <= found_s <= exact_s * 1.01 + 1e-6


@given(st.lists(LATENCIES_S, max_size=30))
def test_buckets_and_rows_contain_every_latency_once(latencies_s: list[float]) -> None:
    histogram = histogram_of(latencies_s)
    assert (histogram.count, histogram.max_s) == (len(latencies_s), max(latencies_s, default=0.0))
    latencies_us = [ceil(round(latency_s * 1e6, 3)) for latency_s in latencies_s]
    for buckets in (histogram.list_buckets(), histogram.list_rows()):
        below_us = -1
        for bucket in buckets:
            assert bucket.count == sum(below_us < latency_us <= bucket.up_to_us for latency_us in latencies_us)
            below_us = bucket.up_to_us
        assert sum(bucket.count for bucket in buckets) == len(latencies_s)


@given(LATENCIES_S)
def test_bound_has_three_significant_digits_and_is_its_own_bound(latency_s: float) -> None:
    bound_us = compute_bound_us(latency_s)
    assert len(str(bound_us).rstrip("0")) <= 3
    assert compute_bound_us(bound_us / 1e6) in {bound_us, compute_bound_us((bound_us + 1) / 1e6)}


def test_bounds_around_the_powers_of_ten() -> None:
    bounds_us = [compute_bound_us(us / 1e6) for us in (0, 1, 999, 1000, 1001, 1010, 1011, 9991, 10_000, 10_001)]
    assert bounds_us == [0, 1, 999, 1000, 1010, 1010, 1020, 10_000, 10_000, 10_100]


def test_number_of_buckets_is_bounded() -> None:
    histogram = histogram_of([1.001**power * 1e-6 for power in range(20_700)])
    assert 900 < histogram.max_s < 1000
    assert len(histogram.list_buckets()) <= 1000 + 6 * 900


def test_rows_are_steps_of_1_2_and_5_from_the_smallest_to_the_largest_latency() -> None:
    rows = histogram_of([0.0005, 0.0012, 0.002, 0.0021, 0.03]).list_rows()
    assert [(row.up_to_us / 1000, row.count) for row in rows] == [
        *((0.5, 1), (1, 0), (2, 2), (5, 1), (10, 0), (20, 0), (50, 1))
    ]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_histogram_without_latencies_has_no_percentiles(share: float) -> None:
    histogram = LatencyHistogram()
    assert histogram.compute_percentile_s(share) is None
    assert (histogram.list_buckets(), histogram.list_rows(), histogram.max_s) == ([], [], 0.0)


@given(st.lists(st.integers(0, 3000) | st.integers(0, 2**63 - 1), max_size=30))
def test_id_set_agrees_with_a_set(numbers: list[int]) -> None:
    seen, ids = set[int](), IdSet()
    for number in numbers:
        assert ids.add(number) is (number not in seen)
        seen.add(number)
