"""Attribution of latency: every moment of a request belongs to one cause."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.core.latency import (
    CAUSES,
    PAUSED_PHASES,
    Cause,
    LatencyTable,
    PhaseTimes,
    RequestTimes,
    Span,
    build_spans,
    cut_pauses,
    split_latency,
)

TIMES = st.integers(0, 60).map(float)
PHASES = st.sampled_from([Cause.GATHER, Cause.PREPARE, Cause.COMMIT, Cause.SETTLE, Cause.EVENT_LOOP])


@st.composite
def timelines(draw: st.DrawFn) -> list[Span]:
    """Return phases in order. Some follow each other immediately, and some after a gap."""
    bounds = sorted(draw(st.lists(TIMES, max_size=14)))
    spans = [(start_s, end_s, draw(PHASES)) for start_s, end_s in pairwise(bounds) if start_s < end_s]
    return [span for span in spans if draw(st.integers(0, 4))]


@st.composite
def pauses_of(draw: st.DrawFn) -> list[Span]:
    """Return pauses in any order, which may overlap each other and may not have ended."""
    kinds = st.sampled_from(list(PAUSED_PHASES))
    ends = st.one_of(TIMES, st.just(math.inf))
    found = draw(st.lists(st.tuples(TIMES, ends, kinds), max_size=6))
    return [(start_s, end_s, cause) for start_s, end_s, cause in found if start_s < end_s]


def seconds_of(parts: list[float]) -> dict[str, float]:
    """Return the parts that are not 0, by name."""
    return {cause.name: parts[cause] for cause in CAUSES if parts[cause]}


@settings(max_examples=30)
@given(timelines(), pauses_of(), st.tuples(TIMES, TIMES, TIMES, TIMES).map(sorted))
def test_parts_of_a_request_add_up_to_its_latency_and_none_is_negative(
    commits: list[Span], pauses: list[Span], moments: list[float]
) -> None:
    arrived_s, queued_s, settled_s, answered_s = moments
    spans = build_spans(commits, pauses, settled_s, answered_s)
    parts = split_latency(RequestTimes(arrived_s, queued_s), spans, pauses)
    assert min(parts) >= 0
    end_s = max([queued_s, *(end_s for _, end_s, _ in spans)])
    assert sum(parts) == pytest.approx(end_s - arrived_s)
    assert end_s <= max(answered_s, queued_s)


@settings(max_examples=30)
@given(timelines(), pauses_of(), TIMES, TIMES)
def test_spans_are_ordered_and_disjoint(commits: list[Span], pauses: list[Span], first_s: float, more_s: float) -> None:
    spans = build_spans(commits, pauses, first_s, first_s + more_s)
    assert all(start_s < end_s for start_s, end_s, _ in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@settings(max_examples=30)
@given(st.tuples(TIMES, TIMES).map(sorted).filter(lambda pair: pair[0] < pair[1]), st.sampled_from(CAUSES), pauses_of())
def test_pauses_take_time_only_from_phases_that_they_interrupt(
    bounds: list[float], phase: Cause, pauses: list[Span]
) -> None:
    start_s, end_s = bounds
    parts = cut_pauses((start_s, end_s, phase), pauses)
    assert parts[0][0] == start_s
    assert parts[-1][1] == end_s
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    for part_start_s, part_end_s, cause in parts:
        covering = {
            pause[2]
            for pause in pauses
            if pause[0] <= part_start_s and part_end_s <= pause[1] and phase in PAUSED_PHASES[pause[2]]
        }
        assert cause in (covering or {phase})


def test_request_waits_for_the_phases_of_the_commit_before_its_own() -> None:
    first = PhaseTimes(1.0, 1.0, [(Cause.PREPARE, 2.0), (Cause.COMMIT, 5.0), (Cause.SETTLE, 6.0)])
    second = PhaseTimes(6.5, 7.0, [(Cause.PREPARE, 8.0), (Cause.COMMIT, 11.0), (Cause.SETTLE, 12.0)])
    commits = [*first.list_spans(0.5), *second.list_spans(first.end_s)]
    assert commits[0] == (0.5, 1.0, Cause.EVENT_LOOP)
    spans = build_spans(commits, [], second.end_s, 12.25)
    assert seconds_of(split_latency(RequestTimes(1.25, 1.5), spans)) == {
        "DECODE": 0.25,
        "PREPARE": 0.5 + 1.0,
        "COMMIT": 3.0 + 3.0,
        "SETTLE": 2.0,
        "EVENT_LOOP": 0.5,
        "GATHER": 0.5,
        "ANSWER": 0.25,
    }


def test_answers_that_are_written_after_the_next_batch_was_prepared_waited_for_it() -> None:
    commits = [(0.0, 4.0, Cause.COMMIT), (4.0, 7.0, Cause.PREPARE), (7.0, 9.0, Cause.COMMIT)]
    spans = build_spans(commits, [], 4.0, 8.0)
    assert seconds_of(split_latency(RequestTimes(1.0, 1.0), spans)) == {"COMMIT": 3.0, "PREPARE": 3.0, "ANSWER": 1.0}


def test_garbage_collection_interrupts_a_phase_but_not_the_sync() -> None:
    commits = [(0.0, 4.0, Cause.PREPARE), (4.0, 8.0, Cause.COMMIT)]
    pauses = [(3.0, 5.0, Cause.GC), (4.0, 6.0, Cause.CHECKPOINT), (0.0, 9.0, Cause.EVENT_LOOP)]
    spans = build_spans(commits, pauses, 8.0, 8.0)
    assert seconds_of(split_latency(RequestTimes(0.0, 0.0), spans)) == {
        "PREPARE": 3.0,
        "GC": 1.0,
        "CHECKPOINT": 2.0,
        "COMMIT": 2.0,
    }


def test_garbage_collection_can_interrupt_the_decoding_of_a_request() -> None:
    parts = split_latency(RequestTimes(0.0, 3.0), [(3.0, 4.0, Cause.PREPARE)], [(1.0, 2.0, Cause.GC)])
    assert seconds_of(parts) == {"DECODE": 2.0, "GC": 1.0, "PREPARE": 1.0}


def test_time_of_forgotten_commits_is_not_attributed() -> None:
    assert seconds_of(split_latency(RequestTimes(0.0, 0.0), [(5.0, 6.0, Cause.COMMIT)])) == {
        "OTHER": 5.0,
        "COMMIT": 1.0,
    }


def add_requests(table: LatencyTable, count: int, cause: Cause, latency_s: float) -> None:
    for _ in range(count):
        parts = [0.0] * len(CAUSES)
        parts[cause] = latency_s
        table.add(parts, latency_s / 2)


def test_slowest_requests_are_summarized_separately() -> None:
    table = LatencyTable()
    add_requests(table, 990, Cause.PREPARE, 0.001)
    add_requests(table, 10, Cause.COMMIT, 0.1)
    slowest, everything = table.summarize(0.01), table.summarize()
    assert (slowest.requests, everything.requests) == (10, 1000)
    assert slowest.shares["commit"] == 1
    assert slowest.mean_ms == pytest.approx(100)
    assert 100 / 2 ** (1 / 8) <= slowest.above_ms <= 100
    assert everything.shares["prepare"] == pytest.approx(0.99 / 1.99, abs=0.0001)
    assert everything.mean_ms == pytest.approx(1.99)
    assert slowest.before_own_commit == everything.before_own_commit == 0.5


def test_slowest_requests_get_a_part_of_a_bucket_that_has_more() -> None:
    table = LatencyTable()
    add_requests(table, 300, Cause.COMMIT, 0.1)
    slowest = table.summarize(0.01)
    assert slowest.requests == 3
    assert slowest.mean_ms == pytest.approx(100)
    add_requests(table, 1, Cause.GC, 0.5)
    slowest = table.summarize(0.01)
    assert slowest.requests == 4
    assert slowest.mean_ms == pytest.approx((500 + 3 * 100) / 4)
    assert slowest.shares["gc"] == pytest.approx(5 / 8)


def test_table_without_requests_has_no_shares() -> None:
    summary = LatencyTable().summarize(0.01)
    assert (summary.requests, summary.mean_ms, summary.above_ms) == (0, 0, 0)
    assert set(summary.shares.values()) == {0}


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1e9), max_size=50), st.lists(st.floats(0, 1e9), max_size=50))
def test_merged_tables_summarize_like_one(some_s: list[float], more_s: list[float]) -> None:
    one, other, both = LatencyTable(), LatencyTable(), LatencyTable()
    for table, latencies_s in ((one, some_s), (other, more_s), (both, some_s + more_s)):
        for latency_s in latencies_s:
            add_requests(table, 1, Cause.COMMIT, latency_s)
    one.merge(other)
    merged, expected = one.summarize(0.1), both.summarize(0.1)
    assert (merged.requests, merged.above_ms) == (expected.requests, expected.above_ms)
    assert merged.mean_ms == pytest.approx(expected.mean_ms)
    assert len(one._buckets) <= 321, "the memory does not depend on the number of requests"
