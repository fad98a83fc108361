"""Rates: so many at once, so many in the long run, by key, for a bounded number of keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.doors.rates import Rates
from oncelog.errors import SettingsError
from oncelog.testing.clock import ManualClock


def rates(clock: ManualClock, per_second: float = 2, burst: int = 3, keys_max: int = 100) -> Rates:
    return Rates(per_second, burst, keys_max, clock.elapsed_ms)


def test_a_burst_is_allowed_and_no_more() -> None:
    limited = rates(ManualClock())
    for _ in range(3):
        assert limited.allows("a")
        limited.take("a")
    assert not limited.allows("a")
    assert limited.allows("b")


def test_to_ask_takes_nothing() -> None:
    limited = rates(ManualClock(), burst=1)
    assert all(limited.allows("a") for _ in range(10))
    assert len(limited) == 0


def test_what_was_taken_comes_back_with_time() -> None:
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


def test_no_more_comes_back_than_a_burst() -> None:
    clock = ManualClock()
    limited = rates(clock)
    limited.take("a")
    clock.advance(3_600_000)
    limited.take("a", 3)
    assert not limited.allows("a")


def test_more_than_there_is_can_be_taken_and_is_waited_for() -> None:
    clock = ManualClock()
    limited = rates(clock)
    limited.take("a", 103)
    assert limited.retry_after_ms("a") == 50_500
    clock.advance(50_499)
    assert not limited.allows("a")
    clock.advance(1)
    assert limited.allows("a")


def test_a_seventh_of_a_second_is_no_whole_number_and_costs_nobody_a_millisecond() -> None:
    clock = ManualClock()
    limited = rates(clock, per_second=7, burst=4)
    limited.take("a", 10)
    assert limited.retry_after_ms("a") == 1000
    clock.advance(1000)
    assert limited.allows("a")


def test_nothing_taken_is_nothing() -> None:
    limited = rates(ManualClock(), burst=1)
    limited.take("a", 0)
    assert limited.allows("a")
    assert len(limited) == 0


def test_zero_a_second_is_no_limit() -> None:
    limited = rates(ManualClock(), per_second=0, burst=1)
    limited.take("a", 1_000_000)
    assert limited.allows("a")
    assert limited.retry_after_ms("a") == 0
    assert len(limited) == 0


@pytest.mark.rule("CO-30")
def test_keys_are_bounded_and_the_least_recently_used_goes() -> None:
    limited = rates(ManualClock(), burst=1, keys_max=2)
    for key in ("a", "b"):
        limited.take(key)
    assert not limited.allows("a")  # used, by being asked for
    limited.take("c")
    assert len(limited) == 2
    assert [limited.allows(key) for key in "abc"] == [False, True, False]


def test_taking_again_is_use_too() -> None:
    limited = rates(ManualClock(), burst=1, keys_max=2)
    for key in ("a", "b", "a", "c"):
        limited.take(key)
    assert [limited.allows(key) for key in "abc"] == [False, True, False]


@pytest.mark.parametrize(("per_second", "burst", "keys_max"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_rate_out_of_range_is_refused(per_second: float, burst: int, keys_max: int) -> None:
    with pytest.raises(SettingsError):
        Rates(per_second, burst, keys_max, ManualClock().elapsed_ms)


@given(
    per_second=st.floats(min_value=0.01, max_value=100_000),
    burst=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 50)), max_size=30),
)
def test_who_waits_as_told_is_let_in_and_not_a_moment_earlier(
    per_second: float, burst: int, steps: list[tuple[int, int]]
) -> None:
    clock = ManualClock()
    limited = rates(clock, per_second, burst)
    for wait_ms, count in steps:
        clock.advance(wait_ms)
        told_ms = limited.retry_after_ms("a")
        assert limited.allows("a") == (told_ms == 0)
        if told_ms:
            clock.advance(told_ms - 1)
            assert not limited.allows("a")
            clock.advance(1)
        assert limited.allows("a")
        limited.take("a", count)


@given(per_second=st.integers(1, 50), burst=st.integers(1, 20), waits=st.lists(st.integers(0, 400), max_size=80))
def test_in_the_long_run_it_is_no_more_than_the_rate(per_second: int, burst: int, waits: list[int]) -> None:
    clock = ManualClock()
    limited = rates(clock, per_second, burst)
    happened = 0
    for wait_ms in waits:
        clock.advance(wait_ms)
        if limited.allows("a"):
            limited.take("a")
            happened += 1
        assert happened * 1000 <= burst * 1000 + clock.elapsed_ms() * per_second + 1
