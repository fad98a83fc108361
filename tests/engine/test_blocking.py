"""The blocking log has the methods of the async log, callable from any thread."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from engine.observable_store import positions
from oncelog import (
    BlockingLog,
    ClosedError,
    Committed,
    Consumer,
    Cursor,
    HistoryChangedError,
    Limits,
    Log,
    Mode,
    NotALogError,
    Policy,
    PolicyError,
    Replayed,
    Status,
)
from oncelog.core.policy import EVENTS, FOREVER, OnReuse, Order
from oncelog.engine.blocking import BlockingLeaseManager, BlockingStateReader
from oncelog.engine.leases import LeaseManager
from oncelog.engine.state_reader import StateReader
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.writes import event, key

ASYNC_ONLY = {
    "subscribe",
    "follow_several",
    "read_views",
    "read_untraced",
    "queue_length",
    "wait_idle",
    "watch_batches",
    "watch_commits",
    "measure_latency",
    "tracer",
    "queue_age_s",
    "failed_batches",
    "replays",
    "listen",
    "listen_members",
    "unlisten",
    "write_gate",
    "evictions",
    "client_evictions",
    "submit_nowait",
    "recall",
    "submit_many_nowait",
}
"""Methods for servers, which have many clients on one event loop."""
DEPRECATED = {"books", "evicted_clients", "guard", "queued", "read_brief", "settled", "works"}


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - DEPRECATED


def test_blocking_log_has_every_method_of_the_log_with_the_same_signature() -> None:
    assert public_names(BlockingLog) == public_names(Log) - ASYNC_ONLY
    for name in public_names(BlockingLog):
        ours, theirs = inspect.getattr_static(BlockingLog, name), inspect.getattr_static(Log, name)
        assert isinstance(ours, property) == isinstance(theirs, property)
        if isinstance(ours, property) and isinstance(theirs, property):
            ours, theirs = ours.fget, theirs.fget
        mine, his = inspect.signature(ours), inspect.signature(theirs)
        assert mine.parameters == his.parameters, name
        if name not in ("follow", "leases", "state"):  # these methods return a blocking or an async object
            assert mine.return_annotation == his.return_annotation, name
        assert not inspect.iscoroutinefunction(ours)
        assert ours.__doc__.startswith(f"Like `Log.{name}`")
    assert public_names(BlockingLeaseManager) == {"recall", "begin", "run", "complete", "release"}
    for name in public_names(BlockingLeaseManager) - {"run"}:  # these methods take a blocking or an async callback
        assert inspect.signature(getattr(BlockingLeaseManager, name)) == inspect.signature(
            getattr(LeaseManager, name)
        ), name
    assert public_names(BlockingStateReader) == public_names(StateReader)
    for name in public_names(BlockingStateReader) - {"follow_blocks"}:
        assert inspect.signature(getattr(BlockingStateReader, name)) == inspect.signature(getattr(StateReader, name)), (
            name
        )
    assert inspect.signature(oncelog.open_blocking).parameters == inspect.signature(oncelog.open).parameters


def test_every_blocking_method_works(place: str) -> None:
    with oncelog.open_blocking(place) as log:
        receipt = assert_committed(log.submit(event(1, partitions=("a",))))
        assert log.submit(event(1, partitions=("a",))) == Replayed(receipt)
        assert [type(verdict) for verdict in log.submit_many([event(2), event(3)], Mode.ALL)] == [Committed] * 2
        assert positions(log.read(limit=2).records) == [1, 2]
        assert positions(log.read(partition="a").records) == [1]
        assert log.lookup(key(2)).status is Status.COMMITTED
        proven = log.prove(receipt)
        assert oncelog.verify(proven.record, proven.salt, proven.proof, proven.block)
        assert log.heads()[0].position == 3
        log.commit_cursor("c", 2)
        assert log.cursor_of("c") == Cursor(2, log.epoch)
        assert log.consumers() == [Consumer("", "c", 2, 1)]
        assert log.erase(key=key(1)) == 1
        log.confirm_clock()
        assert log.settings == oncelog.Settings()
        assert log.policies["events"] == EVENTS
        assert next(log.follow(consumer="c")).position == 3


@BOTH_STORES
@pytest.mark.rule("CO-14")
def test_duplicate_writes_from_eight_threads_commit_once(tmp_path: Path) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log, ThreadPoolExecutor(8) as threads:
        together = threading.Barrier(8)

        def write(first: int) -> list[Any]:
            together.wait()
            return [
                log.submit(event(number)) for number in range(first, first + 40)
            ]  # each write is submitted by two threads

        verdicts = [verdict for told in threads.map(write, range(1, 161, 20)) for verdict in told]
        assert sum(isinstance(verdict, Committed) for verdict in verdicts) == 180
        assert sum(isinstance(verdict, Replayed) for verdict in verdicts) == 140
        assert positions(log.read(limit=1000).records) == list(range(1, 181))


@pytest.mark.rule("CO-13")
def test_blocking_follow_waits_for_records_and_ends_on_break() -> None:
    with oncelog.open_blocking(":memory:") as log, ThreadPoolExecutor(1) as thread:
        log.submit(event(1))
        seen = []
        for record in log.follow():
            seen.append(record.position)
            if record.position == 5:
                break
            thread.submit(log.submit, event(record.position + 1))
        assert seen == [1, 2, 3, 4, 5]
        assert not any(map(len, log._log._tailers._tailers.values()))
        log.submit(event(6))


def test_blocking_log_raises_the_errors_of_the_log() -> None:
    first = Policy(name="own", key_bytes=(1, 9), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=FOREVER)
    other = Policy(name="own", key_bytes=(1, 8), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=FOREVER)
    with oncelog.open_blocking(":memory:", policies=[first], limits=Limits(poll_ms=1)) as log:
        with pytest.raises(PolicyError):
            log.submit(oncelog.write(other, "s", "k", 1))
        with pytest.raises(HistoryChangedError):
            log.read(after=Cursor(1, "another"))
        with pytest.raises(ValueError, match="one of key, partition and stream"):
            log.erase()
        with pytest.raises(HistoryChangedError):
            next(log.follow(after=7))
        assert_committed(log.submit(event(1)))


def test_closing_ends_followers_in_other_threads() -> None:
    log = oncelog.open_blocking(":memory:")
    with log, ThreadPoolExecutor(2) as threads:
        log.submit(event(1))
        arrived = threading.Barrier(3)

        closed = threading.Event()

        def read(is_late: bool) -> list[int]:
            seen = []
            for record in log.follow():
                seen.append(record.position)
                arrived.wait()
                if is_late:
                    closed.wait()  # Request the next record after the log was closed.
            return seen

        reading = [threads.submit(read, is_late) for is_late in (False, True)]
        arrived.wait()
        log.close()
        closed.set()
        assert [one.result() for one in reading] == [[1], [1]]


@BOTH_STORES
def test_closing_under_load_gives_every_caller_an_answer_or_an_error(tmp_path: Path) -> None:
    path = log_at(tmp_path / "log.db")
    log = oncelog.open_blocking(path)
    begun = threading.Event()

    def write(first: int) -> list[int]:
        done: list[int] = []
        for number in range(first, first + 10_000):
            try:
                done.append(assert_committed(log.submit(event(number))).position)
            except ClosedError:
                break
            begun.set()
        return done

    with log, ThreadPoolExecutor(4) as threads:
        writing = [threads.submit(write, first) for first in (1, 20_001, 40_001, 60_001)]
        begun.wait()
        log.close()
        told = sorted(position for one in writing for position in one.result())
    with oncelog.open_blocking(path) as again:
        stored = again.heads()[0].position
        assert told == list(range(1, stored + 1))  # every stored record was answered


def test_blocking_log_can_be_closed_twice_and_refuses_calls_afterwards() -> None:
    log = oncelog.open_blocking(":memory:")
    with pytest.raises(ClosedError):
        log.submit(event(1))
    with log:
        assert_committed(log.submit(event(1)))
        log.close()
        log.close()
        with pytest.raises(ClosedError):
            log.submit(event(2))
        with pytest.raises(ClosedError):
            log.follow()
    with pytest.raises(ClosedError), log:
        pass


def test_failed_open_leaves_no_thread_running(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Ann, " * 1000, encoding="utf-8")
    before = set(threading.enumerate())
    with pytest.raises(NotALogError), oncelog.open_blocking(path):
        pass
    assert set(threading.enumerate()) <= before
