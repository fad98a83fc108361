"""The system clock, the manual clock, and the clock mark that detects jumps."""

import pytest

from oncelog.errors import ClockJumpedError
from oncelog.storage.clock import JUMP_MS_MAX, ClockMark, SystemClock
from oncelog.testing.clock import ManualClock


def test_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    before = (clock.wall_ms(), clock.elapsed_ms())
    assert before[0] > 1_700_000_000_000
    assert clock.elapsed_ms() >= before[1]
    assert clock.boot() == SystemClock().boot()


def test_manual_clock_advances_only_when_set() -> None:
    clock = ManualClock(1000)
    clock.advance(5)
    assert (clock.wall_ms(), clock.elapsed_ms()) == (1005, 5)
    clock.jump(-10)
    assert (clock.wall_ms(), clock.elapsed_ms()) == (995, 5)
    boot = clock.boot()
    clock.restart()
    assert (clock.wall_ms(), clock.elapsed_ms(), clock.boot() == boot) == (995, 0, False)
    with pytest.raises(ValueError, match="ms must be at least 0"):
        clock.advance(-1)


@pytest.mark.rule("CO-17")
@pytest.mark.parametrize("passed_ms", [0, 1, 10**9])
def test_clock_jump_is_a_change_of_wall_time_without_elapsed_time(passed_ms: int) -> None:
    clock = ManualClock()
    mark = ClockMark.read(clock)
    clock.advance(passed_ms)
    clock.jump(JUMP_MS_MAX)
    assert mark.advance(ClockMark.read(clock)) == ClockMark(clock.boot(), passed_ms, clock.wall_ms())
    clock.jump(1)
    with pytest.raises(ClockJumpedError) as jumped:
        mark.advance(ClockMark.read(clock))
    assert (jumped.value.ahead_ms, jumped.value.limit_ms) == (JUMP_MS_MAX + 1, JUMP_MS_MAX)
    believed, error = mark.propose(ClockMark.read(clock))
    assert believed.time_ms == mark.time_ms + passed_ms
    assert isinstance(error, ClockJumpedError)


@pytest.mark.rule("CO-17")
def test_small_jumps_are_accepted_and_the_clock_mark_never_goes_back() -> None:
    clock = ManualClock()
    mark = ClockMark.read(clock)
    for ms in (1000, -5000, 100, 4000, -1, 0, 3000):
        clock.jump(ms)
        later = mark.advance(ClockMark.read(clock))
        assert later.time_ms == max(mark.time_ms, clock.wall_ms())
        mark = later
