"""Numbers that a leap skips, compared with a list of the numbers that exist."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.invariants import History, find_violations
from core.item_builders import Log, event, message
from oncelog.core.internal_records import Gap, check_restore_record, count_missing_numbers, find_gap, find_last_eviction
from oncelog.core.values import Applied, Leap, Reason, Record, Refused, Request, SetMember

RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=4)
"""For each leap: the number of records committed before it, and its distance."""


def history(runs: list[tuple[int, int]], rest: int) -> tuple[list[int], list[Gap]]:
    """Return the existing numbers and the gaps between them."""
    numbers: list[int] = []
    gaps: list[Gap] = []
    last = 0
    for records, distance in runs:
        numbers += range(last + 1, last + records + 1)
        last += records
        gaps.append((last, last + distance))
        last += distance
        numbers.append(last)
    return [*numbers, *range(last + 1, last + rest + 1)], gaps


@pytest.mark.rule("CO-12")
@given(RUNS, st.integers(0, 5), st.integers(0, 150), st.integers(0, 150))
def test_gaps_contain_exactly_the_numbers_without_a_record(
    runs: list[tuple[int, int]], rest: int, after: int, upto: int
) -> None:
    numbers, gaps = history(runs, rest)
    newest = max(numbers, default=0)
    after, upto = sorted((min(after, newest), min(upto, newest)))
    wanted = [number for number in range(after + 1, upto + 1) if number not in numbers]
    assert count_missing_numbers(gaps, after, upto) == len(wanted)
    assert [number for number in range(after + 1, upto + 1) if find_gap(gaps, number) is not None] == wanted


@pytest.mark.rule("CO-12", "LG-15")
@given(RUNS, st.integers(0, 5), st.integers(0, 150), st.integers(1, 12))
def test_last_evicting_position_has_a_record(runs: list[tuple[int, int]], rest: int, upto: int, interval: int) -> None:
    numbers, gaps = history(runs, rest)
    upto = min(upto, max(numbers, default=0))
    evicting = [number for number in numbers if number <= upto and number % interval == 0]
    assert find_last_eviction(upto, interval, gaps) == max(evicting, default=0)


def log_with_a_leap() -> Log:
    log = Log()
    log(SetMember("chat/1", "user:ann"))
    for write in (event(1), event(2), message(1)):
        log(write)
    assert log(Leap(1000, b"{}")) == Applied(changed=True)
    for write in (event(3), message(2)):
        log(write)
    return log


def history_of(records: list[Record], log: Log) -> History:
    return History(
        records=records,
        settings=log.snapshot.settings,
        streams=dict(log.snapshot.streams),
        positions={lane: head.position for lane, head in log.snapshot.heads.items()},
    )


@pytest.mark.rule("CO-12")
def test_invariants_accept_a_gap_only_at_a_restore_record() -> None:
    log = log_with_a_leap()
    assert find_violations(history_of(list(log.records), log)) == []
    without = [record for record in log.records if record.position != 1001]
    found = find_violations(history_of(without, log))
    assert any("are not dense: 1002 follows 2, without a leap" in one.message for one in found)


@pytest.mark.rule("CO-12")
@pytest.mark.parametrize(
    "changed", [{"height": 7}, {"actor": "user:eve"}, {"key": b"k"}, {"partitions": ("p",)}, {"sequence": 1}]
)
def test_header_of_a_restore_record_contains_no_other_field(changed: dict[str, object]) -> None:
    record = next(one for one in log_with_a_leap().records if one.position == 1001)
    assert check_restore_record(record) is None
    assert check_restore_record(replace(record, **changed)) is not None


@pytest.mark.rule("CO-12")
def test_leap_must_be_alone_in_its_batch_and_go_forward() -> None:
    log = log_with_a_leap()
    for above in (-1, 2**47 + 1, True):
        refused = log(Leap(above))
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.MALFORMED
    refused = log(Leap(1001))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.current) == (Reason.UNEXPECTED_POSITION, 1002)
    (verdicts,) = log.submit([Request((event(7), Leap(5000)))], 1)
    assert isinstance(verdicts[1], Refused)
    with pytest.raises(ValueError, match="only item in its batch"):
        log.submit([Request((Leap(5000), event(8)))], 1)
