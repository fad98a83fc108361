"""Hybrid logical clocks: strictly monotonic, close to the wall clock, and with one spelling on the wire."""

import copy

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oncelog.core.hlc import (
    HLC_MAX,
    ClockDrift,
    ClockExhausted,
    check_drift,
    parse_hlc,
    receive,
    tick,
    wall_ms,
)
from oncelog.core.identity import delta_id
from oncelog.core.merge import Op, RowDelta
from oncelog.core.policy import DELTAS
from oncelog.core.values import Committed, Mode, Reason, Refused, Request, Submission
from oncelog.errors import CanonicalError
from oncelog.testing.memory_log import MemoryLog

# Written as numbers, because the rule states these numbers.
DRIFT_LIMIT_MS = 5000
COUNTER_MAX = 65_535
WALL_MS_MAX = 2**48 - 1
NOON_MS = 1_800_000_000_000


def reading(wall: int, count: int = 0) -> int:
    """Build a reading from its two parts with arithmetic instead of bit operations."""
    return wall * 65_536 + count


# Few distinct times, so that readings collide; the limits, so that counters overflow; and arbitrary values.
near_walls = st.integers(NOON_MS - 3, NOON_MS + 3) | st.integers(NOON_MS - 6000, NOON_MS + 6000)
walls = near_walls | st.sampled_from([0, 1, WALL_MS_MAX - 1, WALL_MS_MAX]) | st.integers(0, WALL_MS_MAX)
counts = st.sampled_from([0, 1, COUNTER_MAX - 1, COUNTER_MAX]) | st.integers(0, COUNTER_MAX)
readings = st.builds(reading, walls, counts)


# --- now and receive -----------------------------------------------------------------------------------


@pytest.mark.rule("DE-8")
@given(readings, st.lists(st.tuples(walls, st.none() | readings), max_size=30))
@example(reading(NOON_MS), [(NOON_MS, None), (NOON_MS - 3_600_000, None), (0, None), (NOON_MS, None)])
@example(reading(NOON_MS, COUNTER_MAX), [(0, None), (NOON_MS, reading(NOON_MS + 5, COUNTER_MAX)), (0, None)])
def test_hlc_never_goes_back(start: int, steps: list[tuple[int, int | None]]) -> None:
    last = start
    for wall, remote in steps:
        taken = tick(last, wall) if remote is None else receive(last, remote, wall)
        if isinstance(taken, ClockDrift | ClockExhausted):
            continue
        assert last < taken <= HLC_MAX
        assert remote is None or remote < taken
        assert taken >= reading(wall)
        last = taken


Parts = tuple[int, int]


def model_of_now(last: Parts, wall: int) -> Parts:
    """The algorithm of the HLC paper, with separate wall time and counter, and with the carry that DE-8 adds."""
    newest = max(last[0], wall)
    return apply_carry(newest, last[1] + 1 if newest == last[0] else 0)


def model_of_receive(last: Parts, remote: Parts, wall: int) -> Parts:
    newest = max(last[0], remote[0], wall)
    if newest == last[0] == remote[0]:
        return apply_carry(newest, max(last[1], remote[1]) + 1)
    if newest == last[0]:
        return apply_carry(newest, last[1] + 1)
    return apply_carry(newest, remote[1] + 1 if newest == remote[0] else 0)


def apply_carry(wall: int, count: int) -> Parts:
    return (wall, count) if count <= COUNTER_MAX else (wall + 1, 0)


@pytest.mark.rule("DE-8")
@given(near_walls, counts, near_walls, counts, near_walls)
def test_packed_hlc_equals_the_algorithm_of_the_paper(
    last_wall: int, last_count: int, remote_wall: int, remote_count: int, wall: int
) -> None:
    last, remote = reading(last_wall, last_count), reading(remote_wall, remote_count)
    assert tick(last, wall) == reading(*model_of_now((last_wall, last_count), wall))
    taken = receive(last, remote, wall)
    if remote_wall - wall > DRIFT_LIMIT_MS:
        assert taken == ClockDrift(remote_wall - wall, DRIFT_LIMIT_MS)
    else:
        assert taken == reading(*model_of_receive((last_wall, last_count), (remote_wall, remote_count), wall))


@pytest.mark.rule("DE-8")
@pytest.mark.parametrize(
    ("last", "wall", "taken"),
    [
        pytest.param(reading(7, 3), 9, reading(9), id="the wall clock advanced, so the counter restarts"),
        pytest.param(reading(7, 3), 7, reading(7, 4), id="same millisecond, so the counter increases"),
        pytest.param(reading(7, 3), 2, reading(7, 4), id="the wall clock went back, so the counter increases"),
        pytest.param(reading(7, COUNTER_MAX), 7, reading(8), id="a full counter carries into the wall part"),
        pytest.param(reading(7, COUNTER_MAX), 8, reading(8), id="the carry meets the wall clock"),
        pytest.param(
            reading(7, COUNTER_MAX), 0, reading(8), id="a full counter carries even if the wall clock went back"
        ),
        pytest.param(0, 0, 1, id="the first reading"),
    ],
)
def test_local_tick_follows_wall_clock_counter_and_carry(last: int, wall: int, taken: int) -> None:
    assert tick(last, wall) == taken


@pytest.mark.rule("DE-8")
@pytest.mark.parametrize(
    ("last", "remote", "wall", "taken"),
    [
        pytest.param(reading(7, 3), reading(9, 5), 8, reading(9, 6), id="the remote clock leads"),
        pytest.param(reading(9, 3), reading(7, 5), 8, reading(9, 4), id="the local clock leads"),
        pytest.param(reading(7, 3), reading(7, 5), 7, reading(7, 6), id="all clocks are equal"),
        pytest.param(reading(7, 3), reading(6, 5), 8, reading(8), id="the wall clock leads"),
        pytest.param(reading(7, 3), reading(9, COUNTER_MAX), 8, reading(10), id="the remote counter carries"),
        pytest.param(reading(9, COUNTER_MAX), reading(7), 8, reading(10), id="the local counter carries"),
    ],
)
def test_remote_tick_follows_the_highest_clock(last: int, remote: int, wall: int, taken: int) -> None:
    assert receive(last, remote, wall) == taken


@pytest.mark.rule("DE-8")
def test_order_holds_while_the_wall_clock_goes_back() -> None:
    last = reading(NOON_MS, COUNTER_MAX - 100)
    for step in range(300):
        taken = tick(last, NOON_MS - step * 12_000)
        assert taken == last + 1
        last = taken
    assert (wall_ms(last), last % 65_536) == (NOON_MS + 1, 199)


@pytest.mark.rule("DE-8")
@pytest.mark.parametrize("wall", [0, WALL_MS_MAX])
def test_tick_after_the_largest_hlc_is_refused(wall: int) -> None:
    assert tick(HLC_MAX, wall) == ClockExhausted()
    assert receive(HLC_MAX, 0, wall) == ClockExhausted()
    assert tick(HLC_MAX - 1, wall) == HLC_MAX


@pytest.mark.rule("DE-8")
def test_wall_clock_beyond_48_bits_is_refused() -> None:
    assert tick(0, WALL_MS_MAX) == reading(WALL_MS_MAX)
    assert tick(0, WALL_MS_MAX + 1) == ClockExhausted()
    assert receive(0, HLC_MAX, WALL_MS_MAX) == ClockExhausted()


# --- drift ---------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-8")
@given(readings, st.integers(0, WALL_MS_MAX - 5002), counts)
def test_drift_limit_is_inclusive(last: int, wall: int, count: int) -> None:
    at_the_limit, beyond = reading(wall + 5000, count), reading(wall + 5001, count)
    assert check_drift(at_the_limit, wall) is None
    assert not isinstance(receive(last, at_the_limit, wall), ClockDrift)
    assert check_drift(beyond, wall) == ClockDrift(ahead_ms=5001, limit_ms=5000)
    assert receive(last, beyond, wall) == ClockDrift(ahead_ms=5001, limit_ms=5000)


@pytest.mark.rule("DE-8")
@given(readings, walls)
def test_clock_that_is_behind_is_within_the_drift_limit(remote: int, wall: int) -> None:
    behind = min(remote, reading(wall, COUNTER_MAX))
    assert check_drift(behind, wall) is None


def build_delta(hlc: int, column: str = "title") -> Submission:
    """Return a delta as the Deltas API submits it."""
    key = delta_id("client-1", str(hlc), "todos", "row-1", [{"column": column, "value": 1}])
    delta = RowDelta(Op.UPDATE, "todos", "row-1", "client-1", hlc, ((column, b"1"),), key)
    return Submission(policy=DELTAS, scope="gateway", key=key, fingerprint=key, delta=delta)


@pytest.mark.rule("DE-8")
def test_push_beyond_the_drift_limit_writes_nothing() -> None:
    log = MemoryLog(draw=bytes)
    before = copy.deepcopy(log.snapshot)
    fine, beyond = build_delta(reading(NOON_MS)), build_delta(reading(NOON_MS + 5001))
    ((_, refused),) = log.submit([Request((fine, beyond), Mode.ALL)], NOON_MS)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.field) == (Reason.CLOCK_DRIFT, "hlc")
    assert "5001 ms ahead" in refused.message
    assert "5000 ms" in refused.message
    assert (log.snapshot, log.records, log.blocks) == (before, [], [])


@pytest.mark.rule("DE-8")
def test_push_at_the_drift_limit_is_committed() -> None:
    log = MemoryLog(draw=bytes)
    ((verdict,),) = log.submit([Request((build_delta(reading(NOON_MS + 5000, COUNTER_MAX)),))], NOON_MS)
    assert isinstance(verdict, Committed)
    assert log.snapshot.rows["gateway", "todos", "row-1"].values == {"title": b"1"}


# --- 64 bits and their decimal text --------------------------------------------------------------------


@pytest.mark.rule("DE-1")
@given(st.integers(0, WALL_MS_MAX), st.integers(0, COUNTER_MAX))
def test_hlc_has_48_bits_of_time_and_16_of_counter(wall: int, count: int) -> None:
    hlc = reading(wall, count)
    assert (wall_ms(hlc), hlc % 65_536) == (wall, count)
    assert 0 <= hlc <= HLC_MAX == 2**64 - 1


@pytest.mark.rule("DE-1", "DE-10")
@given(st.integers(0, HLC_MAX))
@example(0)
@example(HLC_MAX)
def test_hlc_round_trips_through_decimal_text(hlc: int) -> None:
    assert parse_hlc(str(hlc)) == hlc


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize(
    "spelling",
    [
        *("", " ", "-", "+", "-1", "-0", "+1", "00", "01", "007", " 1", "1 ", "1\n", "\n1", "1\x00"),
        *(
            "1.0",
            "1.",
            ".5",
            "1e3",
            "1E3",
            "0x10",
            "0b1",
            "1_000",
            "1,000",
            "١",
            "1٢",
            "１",
            "²",
            "½",
            "NaN",
            "null",
            '"1"',
        ),
        *(str(HLC_MAX + 1), str(HLC_MAX * 10), "99999999999999999999", "9" * 21, "9" * 5000, "0" * 21),
    ],
)
def test_other_spellings_of_an_hlc_are_refused(spelling: str) -> None:
    with pytest.raises(CanonicalError) as refused:
        parse_hlc(spelling)
    assert refused.value.path == "$.hlc"
    assert refused.value.reason == "must be a decimal string from 0 to 2^64−1 without leading zeros"
    with pytest.raises(CanonicalError) as refused:
        parse_hlc(spelling, "$.deltas[3].hlc")
    assert refused.value.path == "$.deltas[3].hlc"


@pytest.mark.rule("DE-10")
@given(st.text(alphabet="0123456789+-. e\n١", max_size=22) | st.text())
def test_any_text_is_the_canonical_spelling_or_refused(text: str) -> None:
    try:
        hlc = parse_hlc(text)
    except CanonicalError:
        return
    assert str(hlc) == text
    assert hlc <= HLC_MAX
