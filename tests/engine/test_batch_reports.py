"""Measurements of group commits: waiting time, sync, replays and failures."""

import asyncio
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from engine.observable_store import Gate, WatchedStore
from oncelog.core.latency import Cause
from oncelog.engine.batch_report import ArrivalTimes, BatchReport, ReplayCounts
from storage.memory_store import MemoryStore


def event(number: int) -> oncelog.Submission:
    return oncelog.event(UUID(int=number), {"type": "counted"}, ["p"])


def test_arrival_times_follow_the_oldest_waiting_write() -> None:
    times = ArrivalTimes()
    assert times.get_oldest_s(5.0) == 5.0, "nothing waits"
    times.mark_first(10.0)
    assert times.take(taken=2, waiting=3, now_s=11.0) == 10.0
    assert times.get_oldest_s(12.0) == 10.0, "the three waiting writes arrived after the first one"
    assert times.take(taken=3, waiting=0, now_s=12.0) == 10.0
    assert times.take(taken=1, waiting=4, now_s=15.0) == 12.0, "it arrived after the previous batch was formed"
    assert times.take(taken=4, waiting=0, now_s=16.0) == 12.0
    times.mark_first(100.0)
    assert times.take(taken=1, waiting=0, now_s=101.0) == 100.0


def test_arrival_times_of_a_queue_that_is_never_empty_stay_exact_to_a_batch() -> None:
    times = ArrivalTimes()
    times.mark_first(0.0)
    for number in range(1, 100):  # each batch takes two writes, and two arrive during it
        oldest_s = times.take(taken=2, waiting=2, now_s=float(number))
        assert number - oldest_s <= 3
    assert len(times._marks) <= 3


@BOTH_STORES
async def test_report_has_the_duration_of_the_sync(tmp_path: Path) -> None:
    reports: list[BatchReport] = []
    async with oncelog.open(
        log_at(tmp_path / "t.db"), limits=oncelog.Limits(cache_entries_max=0), validate=None
    ) as log:
        log.watch_batches(reports.append)
        await log.submit(event(1))
        await log.submit(event(1))
    committed, replayed = reports
    assert 0 < committed.sync_s <= committed.duration_s
    assert replayed.sync_s == 0, "a retry changes nothing"
    assert committed.items == replayed.items == 1
    assert committed.wait_s >= 0


@BOTH_STORES
async def test_report_has_phases_and_requests_while_latencies_are_measured(tmp_path: Path) -> None:
    reports: list[BatchReport] = []
    async with oncelog.open(log_at(tmp_path / "t.db"), limits=oncelog.Limits(cache_entries_max=0)) as log:
        log.watch_batches(reports.append)
        await log.submit(event(1))
        log.measure_latency()
        await asyncio.gather(log.submit(event(2)), log.submit_many([event(3), event(4)]))
        await log.submit(event(2))
    before, committed, replayed = reports
    assert (before.phases, list(before.requests)) == (None, [])
    assert committed.phases is not None
    assert replayed.phases is not None
    assert [cause for cause, _ in committed.phases.ends] == [
        Cause.PREPARE,
        Cause.EVENT_LOOP,
        Cause.COMMIT,
        Cause.EVENT_LOOP,
        Cause.SETTLE,
    ]
    times_s = [committed.phases.began_s, *(end_s for _, end_s in committed.phases.ends)]
    assert all(before_s <= after_s + 1e-6 for before_s, after_s in pairwise(times_s))
    assert [cause for cause, _ in replayed.phases.ends] == [Cause.PREPARE, Cause.SETTLE]
    assert len(committed.requests) == 2
    assert all(one.arrived_s == one.queued_s <= committed.phases.began_s for one in committed.requests)


async def test_sync_is_measured_when_the_writer_thread_commits(tmp_path: Path) -> None:
    reports: list[BatchReport] = []
    # A validation runs in the writer thread, so the event loop does not prepare the batch.
    async with oncelog.open(tmp_path / "t.db", validate=lambda _: None) as log:
        log.watch_batches(reports.append)
        await log.submit(event(1))
    assert 0 < reports[0].sync_s <= reports[0].duration_s


async def test_replays_are_counted_by_source(tmp_path: Path) -> None:
    async with oncelog.open(tmp_path / "t.db") as log:
        log.watch_batches(lambda _: None)
        await asyncio.gather(log.submit(event(1)), log.submit(event(1)))
        assert log.replays == ReplayCounts(in_flight=1)
        await log.submit(event(1))
        await log.submit_many([event(1)])
        assert log.replays == ReplayCounts(memory=2, in_flight=1)
    async with oncelog.open(tmp_path / "t.db") as log:
        log.watch_batches(lambda _: None)
        await log.submit_many([event(1), event(2)])
        assert log.replays == ReplayCounts(store=1)


async def test_queue_age_grows_while_a_commit_hangs() -> None:
    store, gate = WatchedStore(MemoryStore()), Gate()
    gate.shut()

    async def wait(_: object) -> None:
        await gate()

    store.before_commit = wait
    async with oncelog.Log(store) as log:
        assert log.queue_age_s == 0
        waiting = asyncio.ensure_future(log.submit(event(1)))
        await gate.reached.wait()
        first_s = log.queue_age_s
        assert 0 < first_s < log.queue_age_s
        gate.open()
        await waiting
        await log.wait_idle()
        assert log.queue_age_s == 0


async def test_failed_batches_are_counted() -> None:
    store = WatchedStore(MemoryStore())

    async def fail(_: object) -> None:
        raise oncelog.StoreUnavailableError("the disk is gone")

    async with oncelog.Log(store) as log:
        store.before_commit = fail
        with pytest.raises(oncelog.StoreUnavailableError):
            await log.submit(event(1))
        assert log.failed_batches == 1
