"""Rate limits per key: a burst, a long-term rate, and a bounded number of keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.errors import SettingsError
from oncelog.server.rate_limiter import RateLimiter
from oncelog.testing.clock import ManualClock


def rates(clock: ManualClock, per_second: float = 2, burst: int = 3, keys_max: int = 100) -> RateLimiter:
    return RateLimiter(per_second, burst, keys_max, clock.elapsed_ms)


def test_burst_is_allowed_and_requests_beyond_it_are_refused() -> None:
    limited = rates(ManualClock())
    for _ in range(3):
        assert limited.allows("a")
        limited.take("a")
    assert not limited.allows("a")
    assert limited.allows("b")


def test_checking_consumes_no_tokens() -> None:
    limited = rates(ManualClock(), burst=1)
    assert all(limited.allows("a") for _ in range(10))
    assert len(limited) == 0


def test_tokens_refill_with_time() -> None:
    clock = ManualClock()
    limited = rates(clock)
    limited.take("a", 3)
    assert limited.retry_after_ms("a") == 500
    clock.advance(499)
    assert not limited.allows("a")
    clock.advance(1)
    assert limited.allows("a")
    assert limited.retry_after_ms("a") == 0
    limited.take("a")
    assert not limited.allows("a")


def test_refill_is_limited_to_the_burst() -> None:
    clock = ManualClock()
    limited = rates(clock)
    limited.take("a")
    clock.advance(3_600_000)
    limited.take("a", 3)
    assert not limited.allows("a")


def test_overdrawn_bucket_refuses_until_it_has_refilled() -> None:
    clock = ManualClock()
    limited = rates(clock)
    limited.take("a", 103)
    assert limited.retry_after_ms("a") == 50_500
    clock.advance(50_499)
    assert not limited.allows("a")
    clock.advance(1)
    assert limited.allows("a")


def test_fractional_intervals_are_not_rounded_up() -> None:
    clock = ManualClock()
    limited = rates(clock, per_second=7, burst=4)
    limited.take("a", 10)
    assert limited.retry_after_ms("a") == 1000
    clock.advance(1000)
    assert limited.allows("a")


def test_taking_zero_tokens_stores_no_key() -> None:
    limited = rates(ManualClock(), burst=1)
    limited.take("a", 0)
    assert limited.allows("a")
    assert len(limited) == 0


def test_zero_rate_means_no_limit() -> None:
    limited = rates(ManualClock(), per_second=0, burst=1)
    limited.take("a", 1_000_000)
    assert limited.allows("a")
    assert limited.retry_after_ms("a") == 0
    assert len(limited) == 0


@pytest.mark.rule("CO-30")
def test_least_recently_used_key_is_evicted() -> None:
    limited = rates(ManualClock(), burst=1, keys_max=2)
    for key in ("a", "b"):
        limited.take(key)
    assert not limited.allows("a")  # a check counts as a use
    limited.take("c")
    assert len(limited) == 2
    assert [limited.allows(key) for key in "abc"] == [False, True, False]


def test_taking_a_token_counts_as_use() -> None:
    limited = rates(ManualClock(), burst=1, keys_max=2)
    for key in ("a", "b", "a", "c"):
        limited.take(key)
    assert [limited.allows(key) for key in "abc"] == [False, True, False]


@pytest.mark.parametrize(("per_second", "burst", "keys_max"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_rate_out_of_range_is_refused(per_second: float, burst: int, keys_max: int) -> None:
    with pytest.raises(SettingsError):
        RateLimiter(per_second, burst, keys_max, ManualClock().elapsed_ms)


@given(
    per_second=st.floats(min_value=0.01, max_value=100_000),
    burst=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 50)), max_size=30),
)
def test_retry_after_is_exact(per_second: float, burst: int, steps: list[tuple[int, int]]) -> None:
    clock = ManualClock()
    limited = rates(clock, per_second, burst)
    for wait_ms, count in steps:
        clock.advance(wait_ms)
        retry_ms = limited.retry_after_ms("a")
        assert limited.allows("a") == (retry_ms == 0)
        if retry_ms:
            clock.advance(retry_ms - 1)
            assert not limited.allows("a")
            clock.advance(1)
        assert limited.allows("a")
        limited.take("a", count)


@given(per_second=st.integers(1, 50), burst=st.integers(1, 20), waits=st.lists(st.integers(0, 400), max_size=80))
def test_long_term_rate_is_not_exceeded(per_second: int, burst: int, waits: list[int]) -> None:
    clock = ManualClock()
    limited = rates(clock, per_second, burst)
    happened = 0
    for wait_ms in waits:
        clock.advance(wait_ms)
        if limited.allows("a"):
            limited.take("a")
            happened += 1
        assert happened * 1000 <= burst * 1000 + clock.elapsed_ms() * per_second + 1
