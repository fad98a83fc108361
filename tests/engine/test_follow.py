"""Followers receive stored records, then new ones, without gaps or repetitions."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import turns, until
from engine.follow_helpers import NO_POLL_MS, ONE_LANE, is_quiet, numbers, take
from engine.observable_store import WatchedLog, positions
from oncelog import (
    HistoryChangedError,
    Limits,
    Record,
    Replayed,
    SetMember,
    Settings,
    Submission,
)
from oncelog.core.values import Changes, LaneHead, Request
from oncelog.engine import tailer
from oncelog.engine.tailer import PAGE_RECORDS, Tailer
from oncelog.storage.store import Query
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.writes import CHANNEL, event, message, result

SCOPES: dict[str, tuple[dict[str, Any], Callable[[int], Submission], Callable[[int], Submission]]] = {
    "lane": ({}, event, result),
    "partition": (
        {"partition": "a"},
        lambda number: event(number, partitions=("a",)),
        lambda number: event(number, partitions=("b",)),
    ),
    "partitions": (
        {"partitions": ["a", "b"]},
        lambda number: event(number, partitions=(("a",), ("b",), ("a", "b"))[number % 3]),
        lambda number: event(number, partitions=("c",)),
    ),
    "stream": (
        {"stream": CHANNEL},
        message,
        result,
    ),
}


@pytest.mark.rule("CO-13", "EV-11")
@pytest.mark.parametrize("scope", SCOPES)
async def test_follower_delivers_stored_records_before_new_ones(scope: str) -> None:
    where, matching, other = SCOPES[scope]
    async with WatchedLog(settings=ONE_LANE) as log:
        await log.submit(SetMember(CHANNEL, "user:ann"))
        for number in range(1, 6):
            await log.submit(other(100 + number))
            await log.submit(matching(number))
        async with log.follow(**where) as records:
            assert numbers(await take(records, 5)) == [1, 2, 3, 4, 5]
            for number in range(6, 11):
                await log.submit(other(100 + number))
                await log.submit(matching(number))
                assert numbers(await take(records, 1)) == [number]
            assert await is_quiet(records)


class ConcurrentWriter:
    """Commits a write at chosen moments. A moment is before or after one call of the store."""

    def __init__(
        self, log: WatchedLog, write: Callable[[int], Submission], moments: set[int], is_foreign: bool
    ) -> None:
        self.committed: list[int] = []
        self._log = log
        self._write = write
        self._moments = moments
        self._is_foreign = is_foreign
        self._moment = -1
        log.store.before_read = log.store.after_read = log.store.before_heads = self

    async def __call__(self, *_: object) -> None:
        self._moment += 1
        if self._moment in self._moments:
            number = 1000 + self._moment
            if self._is_foreign:
                await self._log.store.inner.commit([Request((self._write(number),))])
            else:
                assert_committed(await self._log.submit(self._write(number)))
            self.committed.append(number)


@pytest.mark.rule("CO-13", "EV-13")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("moments", [*({moment} for moment in range(7)), set(range(7)), {1, 2}, {2, 3}])
async def test_commits_during_the_switch_from_stored_to_live_are_delivered_once(
    scope: str, is_foreign: bool, moments: set[int]
) -> None:
    """The moments are before, during and after the catch-up, the subscription, the second catch-up and the first live
    page.
    """
    where, matching, _ = SCOPES[scope]
    async with WatchedLog(settings=ONE_LANE, poll_ms=1) as log:
        await log.submit(SetMember(CHANNEL, "user:ann"))
        for number in (1, 2):
            await log.submit(matching(number))
        intruder = ConcurrentWriter(log, matching, moments, is_foreign)
        seen: list[Record] = []

        async def read() -> None:
            async with log.follow(**where) as records:
                while True:
                    seen.append(await anext(records))

        reading = asyncio.ensure_future(read())
        await turns(50)  # the follower is live now
        await log.submit(matching(3))
        await until(lambda: len(intruder.committed) == len(moments))
        await log.submit(matching(4))
        await until(lambda: len(seen) >= len(moments) + 4)
        await turns()
        reading.cancel()
        order = [record.sequence if scope == "stream" else record.position for record in seen]
        assert order == list(range(1, len(moments) + 5))
        assert sorted(numbers(seen)) == [1, 2, 3, 4, *sorted(intruder.committed)]


@pytest.mark.rule("CO-13")
async def test_followers_of_several_scopes_share_one_reader() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        followers = [log.follow(**where) for where in ({}, {"partition": "a"}, {"partitions": ["b", "a"]})]
        waiting = [asyncio.ensure_future(take(one, 2)) for one in followers]
        await turns()
        reads = len(log.store.queries)
        await asyncio.gather(
            *log.submit_concurrently(*(event(number, partitions=("a", "b")) for number in (1, 2))),
        )
        assert [numbers(seen) for seen in await asyncio.gather(*waiting)] == [[1, 2]] * 3
        assert len(log.store.queries) == reads  # local commits are not read again
        waiting = [asyncio.ensure_future(take(one, 2)) for one in followers]
        await log.commit_elsewhere(event(3, partitions=("a",)))
        await log.submit(event(4, partitions=("a",)))
        assert [numbers(seen) for seen in await asyncio.gather(*waiting)] == [[3, 4]] * 3
        assert len(log.store.queries) == reads + 1
        for one in followers:
            await one.aclose()


@pytest.mark.rule("CO-13")
async def test_follower_catches_up_page_by_page_while_the_log_grows(log: WatchedLog) -> None:
    await log.submit_many([event(number) for number in range(1, 2 * PAGE_RECORDS + 1)])
    async with log.follow() as records:
        seen = await take(records, PAGE_RECORDS + 1)
        await log.submit_many([event(10_000 + number) for number in range(PAGE_RECORDS)])
        seen += await take(records, 2 * PAGE_RECORDS - 1)
        assert positions(seen) == list(range(1, 3 * PAGE_RECORDS + 1))


@pytest.mark.rule("CO-13")
async def test_large_commit_is_delivered_completely() -> None:
    async with WatchedLog(subscription_records_max=10_000) as log:
        subscription = await log.subscribe()
        count = 2 * PAGE_RECORDS + 1
        await log.submit_many([event(number) for number in range(1, count + 1)])
        seen: list[Record] = []
        while len(seen) < count:
            seen += await subscription.next()
        assert positions(seen) == list(range(1, count + 1))


@BOTH_STORES
@pytest.mark.rule("CO-13")
async def test_followers_with_different_cursors_receive_concurrent_writes_in_order(tmp_path: Path) -> None:
    path = log_at(tmp_path / "log.db")
    async with oncelog.open(path) as log:
        # A cursor ahead of an empty log belongs to another log.
        with pytest.raises(HistoryChangedError):
            await anext(log.follow(after=5))
        await log.submit_many([event(number) for number in range(1, 21)])
    async with oncelog.open(path, limits=Limits(subscription_records_max=7)) as log:
        starts = (0, 5, 20)
        reading = [asyncio.ensure_future(take(log.follow(after=start), 60 - start)) for start in starts]
        for first in range(0, 60, 3):
            await asyncio.gather(*(log.submit(event(first + number)) for number in (1, 2, 3)))
        for start, seen in zip(starts, await asyncio.gather(*reading), strict=True):
            assert positions(seen) == list(range(start + 1, 61))


@BOTH_STORES
@pytest.mark.rule("CO-13", "CO-14")
async def test_followers_receive_commits_of_another_process(tmp_path: Path) -> None:
    limits = Limits(poll_ms=1)
    path = log_at(tmp_path / "log.db")
    async with oncelog.open(path, limits=limits) as one, oncelog.open(path) as other, one.follow() as records:
        for number in range(1, 11):
            await (one, other)[number % 2].submit(event(number))
            assert numbers(await take(records, 1)) == [number]


@pytest.mark.rule("EV-15")
async def test_retry_is_not_delivered_again() -> None:
    async with WatchedLog(cache_entries_max=0) as log, log.follow() as records:
        for number in (1, 2):
            for _ in range(3):
                await log.submit(event(number))
        assert numbers(await take(records, 2)) == [1, 2]
        assert isinstance(await log.submit(event(1)), Replayed)
        assert await is_quiet(records)


@pytest.mark.rule("CO-41")
async def test_erased_record_is_delivered_as_erased(log: WatchedLog) -> None:
    await log.submit(event(1, "secret"))
    await log.submit(event(2, "not secret"))
    await log.erase(key=event(1).key)
    async with log.follow() as records:
        assert [(record.erased, record.body) for record in await take(records, 2)] == [
            (True, b""),
            (False, b"not secret"),
        ]


@pytest.mark.rule("CO-13")
async def test_tailer_keeps_records_committed_during_a_read() -> None:
    """A poll also finds local commits and starts a read. One read must be enough."""
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        subscription = await log.subscribe()
        (tailer,) = log._tailers._tailers.values()
        number = 0

        async def commit(_: object) -> None:
            nonlocal number
            if number < 50:
                number += 1
                await log.submit(event(100 + number))

        log.store.after_read = commit  # every read overlaps with a commit
        tailer.notify_commit = lambda *_: None  # type: ignore[method-assign]
        await log.submit(event(1))
        del tailer.notify_commit
        tailer.wake(1)
        await until(lambda: number > 0 and tailer._task is None)
        seen: list[Record] = []
        while len(seen) < number + 1:
            seen += await subscription.next()
        assert positions(seen) == list(range(1, number + 2))
        assert number == 1, "records committed during the read were read again"


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("limit", ["BUFFERED_RECORDS_MAX", "BUFFERED_BYTES_MAX"])
async def test_tailer_reads_records_that_exceed_the_kept_limit(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, limit, 3)
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        subscription = await log.subscribe()
        (one,) = log._tailers._tailers.values()
        held = asyncio.Event()

        async def hold(_: object) -> None:
            await held.wait()

        log.store.before_read = hold
        one.notify_commit = lambda *_: None  # type: ignore[method-assign]
        await log.submit(event(1))
        del one.notify_commit
        one.wake(1)
        for number in range(2, 12):
            await log.submit(event(number, "x"))
            assert len(one._buffered) <= 3
        held.set()
        seen: list[Record] = []
        while len(seen) < 11:
            seen += await subscription.next()
        assert positions(seen) == list(range(1, 12))
        assert not one._buffered


@pytest.mark.rule("CO-41")
async def test_record_erased_during_a_read_is_delivered_as_erased() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        subscription = await log.subscribe()
        (one,) = log._tailers._tailers.values()
        held = asyncio.Event()

        async def hold(query: Query) -> None:
            if query.upto == 1:
                await held.wait()

        log.store.after_read = hold
        one.notify_commit = lambda *_: None  # type: ignore[method-assign]
        await log.submit(event(1))
        del one.notify_commit
        one.wake(1)
        await turns()
        await log.submit(event(2, "secret"))
        assert await log.erase(key=event(2).key) == 1
        held.set()
        seen: list[Record] = []
        while len(seen) < 2:
            seen += await subscription.next()
        assert [(record.erased, record.body) for record in seen] == [(False, seen[0].body), (True, b"")]


def hold_pages(log: WatchedLog) -> asyncio.Event:
    """Delay every page that the store reads until the event is set."""
    held = asyncio.Event()

    async def hold(_: Query) -> None:
        await held.wait()

    log.store.after_read = hold
    return held


async def submit_unnoticed(log: WatchedLog, reader: Tailer, count: int) -> None:
    """Commit events that the committer does not pass to the tailer."""
    reader.notify_commit = lambda *_: None  # type: ignore[method-assign]
    for number in range(1, count + 1):
        await log.submit(event(number))
    del reader.notify_commit


@pytest.mark.rule("CO-40", "CO-13")
async def test_page_read_before_a_history_change_is_discarded() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        old = await log.subscribe()
        (one,) = log._tailers._tailers.values()
        held = hold_pages(log)
        await submit_unnoticed(log, one, 3)
        one.wake(3)
        await turns()
        one.rewind(LaneHead(position=2, revision=2))
        with pytest.raises(HistoryChangedError):
            await old.next()
        new = one.subscribe(frozenset(), None)
        held.set()
        await until(lambda: one._task is None)
        assert one.position == 2
        one.wake(3)
        assert positions(await new.next()) == [3]


@pytest.mark.rule("CO-40", "CO-13")
async def test_commits_kept_during_a_read_are_discarded_when_the_history_changes() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        await log.subscribe()
        (one,) = log._tailers._tailers.values()
        held = hold_pages(log)
        await submit_unnoticed(log, one, 3)
        one.wake(3)
        await turns()
        for number in (4, 5):
            await log.submit(event(number))
        one.rewind(LaneHead(position=3, revision=3))
        new = one.subscribe(frozenset(), None)
        one.wake(4)
        held.set()
        await until(lambda: one._task is None)
        assert positions(await new.next()) == [4]


@pytest.mark.rule("CO-13")
async def test_commit_partly_contained_in_a_read_is_delivered_without_another_read() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        subscription = await log.subscribe()
        (one,) = log._tailers._tailers.values()
        await submit_unnoticed(log, one, 3)
        records = (await log.store.read(Query(lane=0))).records
        held = hold_pages(log)
        log.store.queries.clear()
        one.wake(2)
        await turns()
        one.notify_commit(records[1:], LaneHead(position=3, revision=3))
        held.set()
        await until(lambda: one._task is None)
        assert positions(await subscription.next()) == [1, 2, 3]
        assert len(log.store.queries) == 1


async def test_commits_without_records_are_not_kept_during_a_read() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        await log.subscribe()
        (one,) = log._tailers._tailers.values()
        held = asyncio.Event()

        async def hold(_: Query) -> None:
            await held.wait()

        log.store.before_read = hold
        one.wake(1)
        await turns()
        for revision in range(10):
            one.notify_commit([], LaneHead(position=1, revision=revision))
        assert one._buffered == []
        held.set()
        await until(lambda: one._task is None)  # the tailer found no records and stops reading
        assert len(log.store.queries) == 1


async def test_batch_is_iterated_once_for_all_followed_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountingList(list[Record]):
        times = 0

        def __iter__(self) -> Iterator[Record]:
            self.times += 1
            return super().__iter__()

    async with WatchedLog(settings=Settings(lanes=8), poll_ms=NO_POLL_MS) as log:
        scopes = [f"chat/{number}" for number in range(40)]
        await log.submit_many([SetMember(scope, "user:ann") for scope in scopes])
        followed = [await log.subscribe(lane=lane) for lane in range(1, 9)]
        batches: list[CountingList] = []

        hand_on = log._tailers.notify_commit

        def count_iterations(changes: Changes) -> None:
            batches.append(CountingList(changes.records))
            hand_on(replace(changes, records=batches[-1]))

        monkeypatch.setattr(log._tailers, "notify_commit", count_iterations)
        await log.submit_many([message(1, scope=scope) for scope in scopes])
        arrived = [record.scope for one in followed for record in await one.next()]
        assert sorted(arrived) == sorted(scopes)
        assert [batch.times for batch in batches] == [1]


async def test_polling_stops_with_the_last_subscription_and_starts_again() -> None:
    async with WatchedLog(poll_ms=1) as log:
        subscription = await log.subscribe()
        subscription.close()
        await until(lambda: log._tailers._watch_task is None)
        again = await log.subscribe()
        await log.store.inner.commit([Request((event(1),))])
        assert positions(await again.next()) == [1]
