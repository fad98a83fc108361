"""Spans of an embedded log, and the trace contexts that it stores with records."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import oncelog
from databases import BOTH_STORES, is_postgres, log_at, query
from deadlines import soon
from engine.observable_store import WatchedStore
from oncelog.core.policy import FOREVER, OnReuse, Order, Policy
from oncelog.engine.batch_report import BatchReport
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.queries import traces as stored_traces
from oncelog.storage.queries.statement import Statement
from oncelog.storage.sqlite import SqliteStore
from oncelog.testing.clock import ManualClock
from server.rejecting_store import MARK, reject_marked_bodies
from storage.memory_store import MemoryStore
from traces import Traces, link_ids, parent_id, span_id, trace_id, traceparent


def event(number: int, content: int = 0) -> oncelog.Submission:
    return oncelog.event(UUID(int=number), {"type": "counted", "content": content}, ["p"])


async def submit_in(log: oncelog.Log, traces: Traces, name: str, item: oncelog.Item) -> oncelog.Verdict:
    with traces.span(name):
        return await log.submit(item)


@BOTH_STORES
async def test_commit_is_a_child_of_its_first_request_and_linked_to_all(tmp_path: Path) -> None:
    traces = Traces()
    async with oncelog.open(log_at(tmp_path / "t.db"), tracing=traces.provider) as log:
        await asyncio.gather(*[submit_in(log, traces, f"request {n}", event(n)) for n in (1, 2)], log.submit(event(3)))
    [commit] = traces.named("oncelog.commit")
    [first], [second] = traces.named("request 1"), traces.named("request 2")
    assert (trace_id(commit), parent_id(commit)) == (trace_id(first), span_id(first))
    assert link_ids(commit) == {span_id(first), span_id(second)}
    assert link_ids(second) == {span_id(commit)}, "the other requests lead to the commit by a link"
    assert commit.attributes is not None
    described = {name: commit.attributes[f"oncelog.{name}"] for name in ("requests", "items", "records", "position")}
    assert described == {"requests": 3, "items": 3, "records": 3, "position": 1}


@BOTH_STORES
async def test_contexts_are_stored_with_records_and_continue_in_another_process(tmp_path: Path) -> None:
    address, traces = log_at(tmp_path / "t.db"), Traces()
    async with oncelog.open(address, tracing=traces.provider) as log:
        await submit_in(log, traces, "request", event(1))
        await log.submit(event(2))
        in_memory = await soon(anext(aiter(log.follow(partition="p"))))
    [request], [commit] = traces.named("request"), traces.named("oncelog.commit")
    expected = oncelog.RecordTrace(traceparent(request), traceparent(commit))
    assert in_memory.trace == expected
    others = Traces()
    async with oncelog.open(address, tracing=others.provider) as log:
        assert [record.trace for record in (await log.read(partition="p")).records] == [expected, None]
        found = await log.lookup(UUID(int=1))
        assert found.record is not None
        assert found.record.trace == expected
        follower = log.follow(partition="p")
        assert (await soon(anext(follower))).trace == expected
        await follower.aclose()
    [delivery] = others.named("oncelog.follow")
    assert (trace_id(delivery), parent_id(delivery)) == (trace_id(request), span_id(request))
    assert link_ids(delivery) == {span_id(request), span_id(commit)}


async def test_a_delivery_lasts_until_the_reader_requests_the_next_batch(tmp_path: Path) -> None:
    traces = Traces()
    async with oncelog.open(tmp_path / "t.db", tracing=traces.provider) as log:
        follower = log.follow(partition="p")
        waiting = asyncio.ensure_future(anext(follower))
        await submit_in(log, traces, "request", event(1))
        assert (await soon(waiting)).position == 1
        assert not traces.named("oncelog.follow")
        await follower.aclose()
        assert len(traces.named("oncelog.follow")) == 1


@BOTH_STORES
async def test_a_retry_with_another_trace_replays_and_keeps_the_first_context(tmp_path: Path) -> None:
    traces = Traces()
    limits = oncelog.Limits(cache_entries_max=0)
    async with oncelog.open(log_at(tmp_path / "t.db"), limits=limits, tracing=traces.provider) as log:
        first = await submit_in(log, traces, "first", event(1))
        retry = await submit_in(log, traces, "retry", event(1))
        assert isinstance(first, oncelog.Committed)
        assert retry == oncelog.Replayed(first.receipt)
        [record] = (await log.read(partition="p")).records
    assert record.trace is not None
    assert record.trace.traceparent == traceparent(traces.named("first")[0])


async def test_equal_writes_in_flight_share_one_commit_regardless_of_their_traces(tmp_path: Path) -> None:
    traces = Traces()
    async with oncelog.open(tmp_path / "t.db", tracing=traces.provider) as log:
        verdicts = await asyncio.gather(*[submit_in(log, traces, f"request {n}", event(1)) for n in range(3)])
    assert sorted(type(verdict).__name__ for verdict in verdicts) == ["Committed", "Replayed", "Replayed"]


async def test_tracing_changes_no_receipt_and_no_hash(tmp_path: Path) -> None:
    found = []
    for name in ("plain", "traced"):
        traces, clock = Traces(), ManualClock()
        store = SqliteStore(tmp_path / f"{name}.db", clock=clock, draw=bytes)
        async with oncelog.Log(store, clock=clock, tracing=traces.provider if name == "traced" else False) as log:
            verdict = await submit_in(log, traces, "request", event(1))
            found.append((verdict, (await log.heads())[0]))
    assert found[0] == found[1]
    assert any(found[0][1].block_hash)


async def test_log_without_tracing_ignores_stored_contexts_and_creates_no_table(tmp_path: Path) -> None:
    path, traces = tmp_path / "t.db", Traces()
    async with oncelog.open(path) as log:
        await submit_in(log, traces, "request", event(1))
    assert traces.names() == ["request"]
    assert table_names(path, "_oncelog_traces") == []
    async with oncelog.open(path, tracing=traces.provider) as log:
        await submit_in(log, traces, "request", event(2))
    assert table_names(path, "_oncelog_traces") == ["_oncelog_traces"]
    async with oncelog.open(path) as log:
        await submit_in(log, traces, "request", event(3))
        assert [record.trace for record in (await log.read(partition="p")).records] == [None, None, None]


def table_names(path: Path, name: str) -> list[str]:
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE name = ?", [name])]


async def test_unsampled_writes_have_no_spans_and_no_stored_context(tmp_path: Path) -> None:
    traces = Traces(ALWAYS_OFF)
    async with oncelog.open(tmp_path / "t.db", tracing=traces.provider) as log:
        await submit_in(log, traces, "request", event(1))
        [record] = (await log.read(partition="p")).records
    assert record.trace is None
    assert not traces.names()


@BOTH_STORES
async def test_contexts_of_old_records_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_traces, "TRACED_POSITIONS_MAX", 2)
    traces = Traces()
    async with oncelog.open(log_at(tmp_path / "t.db"), tracing=traces.provider) as log:
        for number in range(5):
            await submit_in(log, traces, "request", event(number))
        kept = [record.trace is not None for record in (await log.read(partition="p")).records]
    assert kept == [False, False, False, True, True]


@BOTH_STORES
async def test_a_page_requests_only_the_contexts_of_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[list[int]] = []

    def watch(name: str, *parameters: Any) -> Statement:
        if name == "traces":
            requested.append(parameters[1])
        return Statement(name, *parameters)

    monkeypatch.setattr(stored_traces, "Statement", watch)
    monkeypatch.setattr(stored_traces, "POSITIONS_MAX", 2)
    traces = Traces()
    async with oncelog.open(log_at(tmp_path / "t.db"), tracing=traces.provider) as log:
        for number in range(9):
            partition = "sparse" if number % 2 else "p"
            await submit_in(log, traces, "request", oncelog.event(UUID(int=number), {"type": "counted"}, [partition]))
        page = await log.read(partition="p")
    assert [record.trace is not None for record in page.records] == [True] * 5
    assert requested == [[1, 3], [5, 7], [9]]


@BOTH_STORES
async def test_a_read_without_contexts_does_not_request_them(tmp_path: Path) -> None:
    traces = Traces()
    policy = Policy(name="notes", key_bytes=(1, 16), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=FOREVER)
    note = oncelog.Submission(policy=policy, scope="notes/1", key=b"k", fingerprint=b"x", body=b"{}")
    async with oncelog.open(log_at(tmp_path / "t.db"), policies=[policy], tracing=traces.provider) as log:
        await submit_in(log, traces, "request", note)
        [traced] = (await log.read(stream="notes/1")).records
        [untraced] = (await log.read_untraced("notes/1", after=0)).records
    assert traced.trace is not None
    assert untraced == replace(traced, trace=None)


@BOTH_STORES
async def test_a_table_that_is_dropped_meanwhile_loses_only_the_contexts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, traces = log_at(tmp_path / "t.db"), Traces()
    async with oncelog.open(place, tracing=traces.provider) as log:
        await submit_in(log, traces, "request", event(1))
        execute(place, "DROP TABLE _oncelog_traces")
        verdict = await submit_in(log, traces, "request", event(2))
        assert isinstance(verdict, oncelog.Committed)
        if isinstance(log._store, PostgresStore):
            log._store._writer.abandon()  # the next session cannot prepare statements on the table
        await submit_in(log, traces, "request", event(3))
        assert [record.trace for record in (await log.read(partition="p")).records] == [None, None, None]
        found = await log.lookup(UUID(int=1))
        assert found.record is not None
        assert found.record.trace is None
    assert list_warnings(caplog) == ["WARNING"]
    async with oncelog.open(place, tracing=traces.provider) as log:
        await submit_in(log, traces, "request", event(4))
        traced = [record.trace is not None for record in (await log.read(partition="p")).records]
        assert traced == [False, False, False, True]
        execute(place, "DROP TABLE _oncelog_traces")
        await log.read(partition="p")
        await submit_in(log, traces, "request", event(5))
    assert list_warnings(caplog) == ["WARNING"] * 2, "one for each opened log"


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if "_oncelog_traces" in record.getMessage()]


def execute(place: str, statement: str) -> None:
    if is_postgres():
        query(place, statement)
        return
    with sqlite3.connect(place) as connection:
        connection.execute(statement)


@BOTH_STORES
async def test_items_of_a_bisected_request_keep_their_contexts(tmp_path: Path) -> None:
    place, traces = log_at(tmp_path / "t.db"), Traces()
    reports: list[BatchReport] = []
    await reject_marked_bodies(place)
    unstorable = oncelog.event(UUID(int=2), {"type": MARK}, ["p"])
    async with oncelog.open(place, tracing=traces.provider) as log:
        log.watch_batches(reports.append)
        with traces.span("request"):
            verdicts = await log.submit_many([event(1), unstorable, event(3), event(4)])
        records = (await log.read(partition="p")).records
    assert [type(verdict).__name__ for verdict in verdicts] == ["Committed", "Refused", "Committed", "Committed"]
    [request], commits = traces.named("request"), traces.named("oncelog.commit")
    assert {record.trace.traceparent for record in records if record.trace} == {traceparent(request)}
    stored = [traceparent(commit) for commit in commits if commit.status.is_ok]
    assert [record.trace.commit for record in records if record.trace] == [stored[0], stored[1], stored[1]]
    assert reports[-1].sync_s > 0


async def test_a_failed_commit_has_a_span_with_the_error(tmp_path: Path) -> None:
    traces = Traces()
    store = WatchedStore(MemoryStore())

    async def fail(_: object) -> None:
        raise oncelog.StoreUnavailableError("the disk is gone")

    store.before_commit = fail
    async with oncelog.Log(store, tracing=traces.provider) as log:
        with pytest.raises(oncelog.StoreUnavailableError):
            await submit_in(log, traces, "request", event(1))
    [commit] = traces.named("oncelog.commit")
    assert commit.attributes is not None
    assert commit.attributes["error.type"] == "StoreUnavailableError"
    assert not commit.status.is_ok


async def test_requests_of_several_items_and_refused_items_are_traced(tmp_path: Path) -> None:
    traces = Traces()
    async with oncelog.open(tmp_path / "t.db", tracing=traces.provider) as log:
        with traces.span("request"):
            await log.submit_many([event(1), event(1, content=1), event(2)])
        records = (await log.read(partition="p")).records
    assert [record.trace is not None for record in records] == [True, True]
    [commit] = traces.named("oncelog.commit")
    assert commit.attributes is not None
    assert (commit.attributes["oncelog.requests"], commit.attributes["oncelog.items"]) == (1, 3)


def test_blocking_log_continues_the_span_of_the_calling_thread(tmp_path: Path) -> None:
    traces = Traces()
    with oncelog.open_blocking(tmp_path / "t.db", tracing=traces.provider) as log, traces.span("request"):
        log.submit(event(1))
    [commit], [request] = traces.named("oncelog.commit"), traces.named("request")
    assert parent_id(commit) == span_id(request)


async def test_work_that_runs_once_is_part_of_the_caller_trace(tmp_path: Path) -> None:
    traces = Traces()
    async with oncelog.open(tmp_path / "t.db", tracing=traces.provider) as log:

        @oncelog.once(log, name="double")
        async def double(number: int) -> int:
            return 2 * number

        with traces.span("request"):
            assert await double(21) == 42
    commits = traces.named("oncelog.commit")
    assert commits
    assert {trace_id(commit) for commit in commits} == {trace_id(traces.named("request")[0])}
