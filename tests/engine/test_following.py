"""Readers: what is stored, then what comes, with no hole and no repeat, whatever happens in between."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import oncelog
from databases import BOTH_STORES, log_at
from engine.watched import WatchedLog, nothing, positions, run, turns, until
from oncelog import (
    ClosedError,
    Cursor,
    HistoryChangedError,
    LimitExceededError,
    Limits,
    Record,
    Replayed,
    SetMember,
    Settings,
    SlowReaderError,
    StoreUnavailableError,
    Submission,
)
from oncelog.core.identity import lane_of
from oncelog.core.values import Changes, LaneHead, Request
from oncelog.engine import tailer
from oncelog.engine.follower import Follower
from oncelog.engine.subscription import Subscription
from oncelog.engine.tailer import LOOKS_IN_VAIN_MAX, PAGE_RECORDS
from oncelog.stores.protocol import Query
from oncelog.testing.contract.writes import CHANNEL, committed, event, message, result

ONE_LANE = Settings(lanes=1)


async def take(records: Follower, count: int) -> list[Record]:
    return [await anext(records) for _ in range(count)]


async def is_quiet(records: Follower) -> bool:
    """Whether nothing more arrives. The follower cannot be used after this."""
    more = asyncio.ensure_future(anext(records))
    await turns(50)
    is_waiting = not more.done()
    more.cancel()
    await asyncio.gather(more, return_exceptions=True)
    return is_waiting


def subscriptions(log: oncelog.Log) -> list[Subscription]:
    return [one for tailer in log._tailers._tailers.values() for one in tailer._subscriptions]


def is_slow(subscription: Subscription) -> bool:
    return subscription.is_slow


def numbers(records: list[Record]) -> list[int]:
    return [int.from_bytes(record.key, "big") for record in records]


# --- from what is stored to what comes -----------------------------------------------------------------

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
def test_stored_records_come_first_and_live_ones_follow(scope: str) -> None:
    where, matching, other = SCOPES[scope]

    async def main() -> None:
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

    run(main())


class Intruder:
    """Commits a write at every moment that it is told: each look at the store, before and after, is one."""

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
                committed(await self._log.submit(self._write(number)))
            self.committed.append(number)


@pytest.mark.rule("CO-13", "EV-13")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("moments", [*({moment} for moment in range(7)), set(range(7)), {1, 2}, {2, 3}])
def test_commits_that_race_with_the_hand_over_are_seen_once(scope: str, is_foreign: bool, moments: set[int]) -> None:
    """Before, in and after the catch-up, the subscription, the second catch-up and the first live page."""
    where, matching, _ = SCOPES[scope]

    async def main() -> None:
        async with WatchedLog(settings=ONE_LANE, poll_ms=1) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            for number in (1, 2):
                await log.submit(matching(number))
            intruder = Intruder(log, matching, moments, is_foreign)
            seen: list[Record] = []

            async def read() -> None:
                async with log.follow(**where) as records:
                    while True:
                        seen.append(await anext(records))

            reading = asyncio.ensure_future(read())
            await turns(50)  # it is in the live part now
            await log.submit(matching(3))
            await until(lambda: len(intruder.committed) == len(moments))
            await log.submit(matching(4))
            await until(lambda: len(seen) >= len(moments) + 4)
            await turns()
            reading.cancel()
            order = [record.sequence if scope == "stream" else record.position for record in seen]
            assert order == list(range(1, len(moments) + 5))
            assert sorted(numbers(seen)) == [1, 2, 3, 4, *sorted(intruder.committed)]

    run(main())


@pytest.mark.rule("CO-13")
def test_followers_of_many_scopes_share_one_reader() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            followers = [log.follow(**where) for where in ({}, {"partition": "a"}, {"partitions": ["b", "a"]})]
            waiting = [asyncio.ensure_future(take(one, 2)) for one in followers]
            await turns()
            reads = len(log.store.queries)
            await asyncio.gather(
                *log.submitting(*(event(number, partitions=("a", "b")) for number in (1, 2))),
            )
            assert [numbers(seen) for seen in await asyncio.gather(*waiting)] == [[1, 2]] * 3
            assert len(log.store.queries) == reads  # what was committed here is not read again
            waiting = [asyncio.ensure_future(take(one, 2)) for one in followers]
            await log.commit_elsewhere(event(3, partitions=("a",)))
            await log.submit(event(4, partitions=("a",)))
            assert [numbers(seen) for seen in await asyncio.gather(*waiting)] == [[3, 4]] * 3
            assert len(log.store.queries) == reads + 1
            for one in followers:
                await one.aclose()

    run(main())


@pytest.mark.rule("CO-13")
def test_a_follower_catches_up_page_by_page_while_the_log_grows() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.submit_many([event(number) for number in range(1, 2 * PAGE_RECORDS + 1)])
            async with log.follow() as records:
                seen = await take(records, PAGE_RECORDS + 1)
                await log.submit_many([event(10_000 + number) for number in range(PAGE_RECORDS)])
                seen += await take(records, 2 * PAGE_RECORDS - 1)
                assert positions(seen) == list(range(1, 3 * PAGE_RECORDS + 1))

    run(main())


@pytest.mark.rule("CO-13")
def test_a_large_commit_is_delivered_page_by_page() -> None:
    async def main() -> None:
        async with WatchedLog(subscription_records_max=10_000) as log:
            subscription = await log.subscribe()
            count = 2 * PAGE_RECORDS + 1
            await log.submit_many([event(number) for number in range(1, count + 1)])
            seen: list[Record] = []
            while len(seen) < count:
                seen += await subscription.next()
            assert positions(seen) == list(range(1, count + 1))

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-13")
def test_many_followers_and_writers_on_a_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with oncelog.open(log_at(tmp_path / "log.db"), limits=Limits(subscription_records_max=7)) as log:
            followers = [log.follow(after=after) for after in (0, 5, 20)]
            reading = [
                asyncio.ensure_future(take(one, 60 - after)) for one, after in zip(followers, (0, 5, 20), strict=True)
            ]
            for first in range(0, 60, 3):
                await asyncio.gather(*(log.submit(event(first + number)) for number in (1, 2, 3)))
            for after, seen in zip((0, 5, 20), await asyncio.gather(*reading), strict=True):
                assert positions(seen) == list(range(after + 1, 61))

    # A cursor ahead of an empty log is another log's: so there must be something first.
    async def prepared() -> None:
        async with oncelog.open(log_at(tmp_path / "log.db")) as log:
            with pytest.raises(HistoryChangedError):
                await anext(log.follow(after=5))
            await log.submit_many([event(number) for number in range(1, 21)])
        await main()

    run(prepared())


@BOTH_STORES
@pytest.mark.rule("CO-13", "CO-14")
def test_what_another_log_on_the_store_commits_reaches_followers(tmp_path: Path) -> None:
    async def main() -> None:
        limits = Limits(poll_ms=1)
        path = log_at(tmp_path / "log.db")
        async with oncelog.open(path, limits=limits) as one, oncelog.open(path) as other, one.follow() as records:
            for number in range(1, 11):
                await (one, other)[number % 2].submit(event(number))
                assert numbers(await take(records, 1)) == [number]

    run(main())


@pytest.mark.rule("EV-15")
def test_a_retry_is_not_delivered_again() -> None:
    async def main() -> None:
        async with WatchedLog(cache_entries_max=0) as log, log.follow() as records:
            for number in (1, 2):
                for _ in range(3):
                    await log.submit(event(number))
            assert numbers(await take(records, 2)) == [1, 2]
            assert isinstance(await log.submit(event(1)), Replayed)
            assert await is_quiet(records)

    run(main())


@pytest.mark.rule("CO-41")
def test_an_erased_record_is_delivered_as_erased() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.submit(event(1, "secret"))
            await log.submit(event(2, "not secret"))
            await log.erase(key=event(1).key)
            async with log.follow() as records:
                assert [(record.erased, record.body) for record in await take(records, 2)] == [
                    (True, b""),
                    (False, b"not secret"),
                ]

    run(main())


@pytest.mark.rule("CO-13")
def test_a_tailer_that_has_to_read_keeps_what_is_committed_meanwhile() -> None:
    """A look at what others have done finds commits of this process too, and begins to read: once, not for ever."""

    async def main() -> None:
        async with WatchedLog() as log:
            subscription = await log.subscribe()
            (tailer,) = log._tailers._tailers.values()
            number = 0

            async def commit(_: object) -> None:
                nonlocal number
                if number < 50:
                    number += 1
                    await log.submit(event(100 + number))

            log.store.after_read = commit  # there is never a reading during which nothing is committed
            tailer.committed = lambda *_: None  # type: ignore[method-assign]
            await log.submit(event(1))
            del tailer.committed
            tailer.wake(1)
            await until(lambda: number > 0 and tailer._running is None)
            seen: list[Record] = []
            while len(seen) < number + 1:
                seen += await subscription.next()
            assert positions(seen) == list(range(1, number + 2))
            assert number == 1, "what came meanwhile was read as well, and so was what came during that"

    run(main())


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("limit", ["KEPT_RECORDS_MAX", "KEPT_BYTES_MAX"])
def test_too_much_that_is_committed_during_a_reading_is_read(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, limit, 3)

    async def main() -> None:
        async with WatchedLog() as log:
            subscription = await log.subscribe()
            (one,) = log._tailers._tailers.values()
            held = asyncio.Event()

            async def hold(_: object) -> None:
                await held.wait()

            log.store.before_read = hold
            one.committed = lambda *_: None  # type: ignore[method-assign]
            await log.submit(event(1))
            del one.committed
            one.wake(1)
            for number in range(2, 12):
                await log.submit(event(number, "x"))
                assert len(one._kept) <= 3
            held.set()
            seen: list[Record] = []
            while len(seen) < 11:
                seen += await subscription.next()
            assert positions(seen) == list(range(1, 12))
            assert not one._kept

    run(main())


@pytest.mark.rule("CO-41")
def test_what_is_erased_during_a_reading_is_delivered_as_erased() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            subscription = await log.subscribe()
            (one,) = log._tailers._tailers.values()
            held = asyncio.Event()

            async def hold(query: Query) -> None:
                if query.upto == 1:
                    await held.wait()

            log.store.after_read = hold
            one.committed = lambda *_: None  # type: ignore[method-assign]
            await log.submit(event(1))
            del one.committed
            one.wake(1)
            await turns()
            await log.submit(event(2, "secret"))
            assert await log.erase(key=event(2).key) == 1
            held.set()
            seen: list[Record] = []
            while len(seen) < 2:
                seen += await subscription.next()
            assert [(record.erased, record.body) for record in seen] == [(False, seen[0].body), (True, b"")]

    run(main())


@pytest.mark.rule("CO-40", "CO-13")
def test_what_was_read_of_a_history_that_is_no_more_is_delivered_to_nobody() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            old = await log.subscribe()
            (one,) = log._tailers._tailers.values()
            held = asyncio.Event()

            async def hold(_: Query) -> None:
                await held.wait()

            log.store.after_read = hold
            one.committed = lambda *_: None  # type: ignore[method-assign]
            for number in (1, 2, 3):
                await log.submit(event(number))
            del one.committed
            one.wake(3)
            await turns()
            one.gone_back(LaneHead(position=2, revision=2))
            with pytest.raises(HistoryChangedError):
                await old.next()
            new = one.subscribe(frozenset(), None)
            held.set()
            await until(lambda: one._running is None)
            one.wake(3)
            assert positions(await new.next()) == [3]

    run(main())


def test_commits_without_records_are_not_kept_during_a_reading() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.subscribe()
            (one,) = log._tailers._tailers.values()
            held = asyncio.Event()

            async def hold(_: Query) -> None:
                await held.wait()

            log.store.before_read = hold
            one.wake(1)
            await turns()
            for revision in range(10):
                one.committed([], LaneHead(position=1, revision=revision))
            assert one._kept == []
            held.set()
            await until(lambda: one._running is None)  # there is no record, and it does not ask for ever
            assert len(log.store.queries) == 1

    run(main())


# --- slow readers --------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31")
@pytest.mark.parametrize(
    ("limits", "body"), [({"subscription_records_max": 4}, "x"), ({"subscription_bytes_max": 40}, "x" * 10)]
)
def test_a_slow_reader_is_warned_then_closed_and_resumes_without_loss(
    limits: dict[str, Any], body: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with WatchedLog(**limits) as log:
            subscription = await log.subscribe()
            await log.submit(event(1, body))
            await log.submit(event(2, body))
            await turns()
            assert not is_slow(subscription)
            assert positions(await subscription.next()) == [1, 2]
            await log.submit_many([event(number, body) for number in (3, 4, 5)])
            await turns()
            assert is_slow(subscription)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "slow" in caplog.text
            await log.submit(event(6, body))
            await turns()
            assert len(caplog.records) == 1  # said once
            await log.submit_many([event(number, body) for number in (7, 8)])
            await turns()
            with pytest.raises(SlowReaderError) as raised:
                await subscription.next()
            assert raised.value.cursor == Cursor(2, log.epoch)
            assert str(raised.value).endswith(f"resume after {log.epoch}:2")
            assert not subscriptions(log)
            assert positions((await log.read(after=raised.value.cursor)).records) == [3, 4, 5, 6, 7, 8]

    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        run(main())


@pytest.mark.rule("CO-31")
def test_a_reader_that_caught_up_again_is_no_longer_slow() -> None:
    async def main() -> None:
        async with WatchedLog(subscription_records_max=4) as log:
            subscription = await log.subscribe()
            await log.submit_many([event(number) for number in (1, 2, 3)])
            await turns()
            assert is_slow(subscription)
            assert positions(await subscription.next()) == [1, 2, 3]
            assert not is_slow(subscription)

    run(main())


@pytest.mark.rule("CO-31")
def test_the_cursor_of_a_slow_reader_is_in_the_order_that_it_reads() -> None:
    """Sequences of a stream are not positions of its lane."""

    async def main() -> None:
        async with WatchedLog(settings=ONE_LANE, subscription_records_max=2) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            await log.submit_many([result(number) for number in range(1, 9)])
            await log.submit_many([message(number) for number in (1, 2)])
            subscription = await log.subscribe(stream=CHANNEL)
            await log.submit_many([message(number) for number in (3, 4, 5)])
            await turns()
            with pytest.raises(SlowReaderError) as raised:
                await subscription.next()
            assert raised.value.cursor == Cursor(2, log.epoch, f"stream/{CHANNEL}")
            resumed = await log.read(stream=CHANNEL, after=raised.value.cursor)
            assert [record.sequence for record in resumed.records] == [3, 4, 5]

    run(main())


@pytest.mark.rule("CO-31", "CO-40")
def test_the_cursors_of_a_reader_do_not_fit_another_history() -> None:
    async def main() -> None:
        async with WatchedLog(subscription_records_max=2) as log:
            lane = lane_of(CHANNEL, log.settings.lanes)
            live = await log.subscribe()
            of_stream = await log.subscribe(stream=CHANNEL)
            assert of_stream.start == Cursor(0, log.epoch, f"lane/{lane}")
            with pytest.raises(ValueError, match=f"the cursor is of 'lane/{lane}'"):  # a position is no sequence
                await log.read(stream=CHANNEL, after=of_stream.start)
            assert not (await log.read(lane=lane, after=of_stream.start)).records
            await log.submit_many([event(number) for number in (1, 2, 3)])
            await turns()
            with pytest.raises(SlowReaderError) as raised:
                await live.next()
        async with WatchedLog() as restored:
            await restored.submit(event(1))
            for cursor in (live.start, raised.value.cursor, str(raised.value.cursor)):
                with pytest.raises(HistoryChangedError):
                    await restored.read(after=cursor)
                with pytest.raises(HistoryChangedError):
                    await anext(restored.follow(after=cursor))

    run(main())


def test_a_subscription_is_for_one_reader_at_a_time() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            subscription = await log.subscribe()
            first = asyncio.ensure_future(subscription.next())
            await turns()
            with pytest.raises(RuntimeError, match="another task is waiting"):
                await subscription.next()
            await log.submit(event(1))
            while not first.done():  # also when it has been woken and is on its way
                with pytest.raises(RuntimeError, match="another task is waiting"):
                    await subscription.next()
                await asyncio.sleep(0)
            assert positions(first.result()) == [1]
            given_up = asyncio.ensure_future(subscription.next())
            await turns()
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            await log.submit(event(2))
            assert positions(await subscription.next()) == [2]  # who has gone does not stand in the way

    run(main())


@pytest.mark.rule("CO-31")
def test_one_record_larger_than_the_limit_is_still_delivered() -> None:
    async def main() -> None:
        async with WatchedLog(subscription_bytes_max=5) as log:
            subscription = await log.subscribe()
            await log.submit(event(1, "much more than five"))
            await turns()
            assert positions(await subscription.next()) == [1]

    run(main())


@pytest.mark.rule("CO-31")
@pytest.mark.parametrize("where", [{}, {"stream": CHANNEL}])
def test_a_slow_follower_goes_back_to_the_store_and_loses_nothing(where: dict[str, str]) -> None:
    write = message if where else event

    async def main() -> None:
        async with WatchedLog(subscription_records_max=3) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            most = 0
            async with log.follow(**where) as records:  # type: ignore[arg-type]
                seen: list[int] = []
                for first in range(1, 100, 11):
                    for number in range(first, first + 11):
                        await log.submit(write(number))
                        await turns(3)
                        most = max([most, *(len(one._queue) for one in subscriptions(log))])
                    seen += numbers(await take(records, 5))
                seen += numbers(await take(records, 99 - len(seen)))
            assert seen == list(range(1, 100))
            assert most == 3
            assert not subscriptions(log)

    run(main())


@pytest.mark.rule("CO-30")
def test_subscriptions_are_limited_by_name() -> None:
    async def main() -> None:
        async with WatchedLog(subscriptions_max=2) as log:
            first = await log.subscribe(partitions=["a"])
            await log.subscribe(stream=CHANNEL)
            with pytest.raises(LimitExceededError) as raised:
                await log.subscribe()
            assert (raised.value.name, raised.value.limit) == ("subscriptions_max", 2)
            first.close()
            await log.subscribe()

    run(main())


def test_a_subscription_says_what_it_wants_and_from_where() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.submit(event(1, partitions=("a",)))
            live = await log.subscribe(partitions=["a", "b"])
            assert live.start == Cursor(1, log.epoch)
            assert [record.position for record in (await log.read(upto=live.start.position)).records] == [1]
            await log.submit(event(2, partitions=("b", "c")))
            await log.submit(event(3, partitions=("c",)))
            (second,) = await live.next()
            assert second.position == 2
            assert live.wants(second)
            stream = await log.subscribe(stream=CHANNEL)
            everything = await log.subscribe()
            assert not stream.wants(second)
            assert everything.wants(second)
            third = (await log.read(after=2)).records[0]
            assert not live.wants(third)
            live.close()
            with pytest.raises(ClosedError):
                await live.next()
            live.close()

    run(main())


# --- ends ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31")
def test_leaving_a_follower_ends_its_subscription_at_once() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            async with log.follow() as records:
                await log.submit(event(1))
                await anext(records)
                more = asyncio.ensure_future(anext(records))
                await turns()
                assert len(subscriptions(log)) == 1
                await log.submit(event(2))
                assert (await more).position == 2
            assert not subscriptions(log)
            with pytest.raises(StopAsyncIteration):
                await anext(records)

    run(main())


def test_a_follower_that_is_cancelled_ends_its_subscription() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            reading = asyncio.ensure_future(anext(log.follow()))
            await until(lambda: bool(subscriptions(log)))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert not subscriptions(log)

    run(main())


def test_a_follower_that_never_began_can_be_closed() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.follow().aclose()

    run(main())


@pytest.mark.parametrize("hook", ["before_read", "before_heads", None])
def test_closing_the_log_ends_followers_wherever_they_are(hook: str | None) -> None:
    """In the catch-up, on the way to the subscription, in the live part."""

    async def main() -> None:
        async with WatchedLog(poll_ms=600_000) as log:
            await log.submit(event(1))
            if hook is not None:
                log.gate.shut()
                setattr(log.store, hook, log.gate)

            async def read_all() -> list[int]:
                return [record.position async for record in log.follow()]

            reading = asyncio.ensure_future(read_all())
            await turns()
            assert not reading.done()
            await log.close()
            log.gate.open()
            assert await reading == ([] if hook == "before_read" else [1])
            assert not subscriptions(log)

    run(main())


def test_no_subscription_is_made_on_a_log_that_was_closed_meanwhile() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            log.gate.shut()
            log.store.before_heads = log.gate
            subscribing = asyncio.ensure_future(log.subscribe())
            await log.gate.reached.wait()
            # A store whose look at the heads was under way when it was closed.
            closing = asyncio.ensure_future(log._tailers.close())
            await turns()
            log.gate.open()
            with pytest.raises(ClosedError):
                await subscribing
            await closing
            with pytest.raises(ClosedError):
                await log.subscribe()

    run(main())


def test_a_store_that_was_closed_by_others_is_told_to_the_follower() -> None:
    async def main() -> None:
        async with WatchedLog() as log:
            await log.store.inner.close()
            with pytest.raises(ClosedError):
                await anext(log.follow())
            await log.store.inner.open()

    run(main())


# --- stores that fail ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-13")
def test_a_page_that_could_not_be_read_is_read_at_the_next_wake(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is away")

        async with WatchedLog(poll_ms=600_000) as log:
            subscription = await log.subscribe()
            log.store.before_read = fail
            await log.commit_elsewhere(event(1))
            await log.submit(event(2))
            await turns()
            assert "lane 0 could not be read" in caplog.text
            log.store.before_read = nothing
            await log.submit(event(3))
            await turns()
            assert positions(await subscription.next()) == [1, 2, 3]

    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        run(main())


@pytest.mark.rule("CO-13")
def test_a_look_that_failed_is_taken_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        failures = 0

        async def fail_twice() -> None:
            nonlocal failures
            failures += 1
            if failures <= 2:
                raise StoreUnavailableError("the disk is away")

        async with WatchedLog(poll_ms=1) as log:
            subscription = await log.subscribe()
            log.store.before_heads = fail_twice
            await log.store.inner.commit([Request((event(1),))])  # of which this log does not know
            assert positions(await subscription.next()) == [1]
            assert failures > 2
            assert "could not be looked at" in caplog.text

    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        run(main())


async def away(*_: object) -> None:
    raise StoreUnavailableError("the disk is away")


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("hook", ["before_read", "before_heads"])
def test_a_store_that_cannot_be_read_for_long_is_told_to_those_who_follow(
    hook: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailer, "LOOKS_IN_VAIN_MAX", 5)

    async def main() -> None:
        async with WatchedLog(poll_ms=1) as log:
            await log.submit(event(1))
            records, others = log.follow(), log.follow(partition="a")
            assert positions(await take(records, 1)) == [1]
            subscription = await log.subscribe()
            waiting = [asyncio.ensure_future(one) for one in (anext(records), anext(others), subscription.next())]
            await until(lambda: len(subscriptions(log)) == 3)
            setattr(log.store, hook, away)
            await log.store.inner.commit([Request((event(2),))])  # of which this log does not know
            for one in waiting:
                with pytest.raises(StoreUnavailableError, match="the disk is away"):
                    await one
            assert not subscriptions(log)
            with pytest.raises(StopAsyncIteration):
                await anext(records)
            with pytest.raises(StoreUnavailableError):
                await subscription.next()
            setattr(log.store, hook, nothing)
            async with log.follow(after=1) as again:
                assert positions(await take(again, 1)) == [2]
                await log.store.inner.commit([Request((event(3),))])
                assert positions(await take(again, 1)) == [3]

    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        run(main())
    assert sum("could not be" in record.message for record in caplog.records) == 1  # not once a look


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("hook", ["before_read", "before_heads"])
def test_followers_bear_with_a_store_that_comes_back_in_time(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often that happens."""
    monkeypatch.setattr(tailer, "LOOKS_IN_VAIN_MAX", 3)

    async def main() -> None:
        async with WatchedLog(poll_ms=1) as log, log.follow() as records:
            failures = 0

            async def fail_twice(*_: object) -> None:
                nonlocal failures
                failures += 1
                if failures <= 2:
                    await away()

            for number in range(1, 6):
                waiting = asyncio.ensure_future(anext(records))
                await until(lambda: bool(subscriptions(log)))
                failures = 0
                setattr(log.store, hook, fail_twice)
                await log.store.inner.commit([Request((event(number),))])
                assert (await waiting).position == number
                assert failures > 2
                setattr(log.store, hook, nothing)

    run(main())


@pytest.mark.rule("CO-13")
def test_looks_in_vain_count_in_a_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there was nothing to read in between."""
    monkeypatch.setattr(tailer, "LOOKS_IN_VAIN_MAX", 3)

    async def main() -> None:
        looks = 0

        async def fail_twice_in_three() -> None:
            nonlocal looks
            looks += 1
            if looks % 3:
                await away()

        async with WatchedLog(poll_ms=1) as log:
            subscription = await log.subscribe()
            log.store.before_heads = fail_twice_in_three
            await until(lambda: looks > 12)
            assert subscriptions(log) == [subscription]

    run(main())


@pytest.mark.rule("CO-13")
def test_a_look_counts_what_failed_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, "LOOKS_IN_VAIN_MAX", 2)

    async def main() -> None:
        async with WatchedLog(poll_ms=600_000) as log:
            subscription = await log.subscribe()
            of_lane = log._tailers._tailers[0]
            for number in (1, 3, 5):  # what failed was read before anybody looked
                log.store.before_read = away
                await log.submit(event(number))
                await turns()
                log.store.before_read = nothing
                await log.submit(event(number + 1))
                await turns()
                of_lane.look(number + 1)
            assert positions(await subscription.next()) == [1, 2, 3, 4, 5, 6]
            log.store.before_read = away
            await log.submit(event(7))
            await turns()
            log.gate.shut()
            log.store.before_read = log.gate
            for _ in range(5):  # a reading that takes long has not failed again
                of_lane.look(7)
                await turns()
            assert subscriptions(log) == [subscription]
            log.store.before_read = away
            log.gate.open()
            await turns()
            assert positions(await subscription.next()) == [7]

    run(main())


@pytest.mark.rule("CO-13")
def test_many_commits_do_not_use_up_the_patience_with_a_store() -> None:
    async def main() -> None:
        async with WatchedLog(poll_ms=600_000) as log:
            subscription = await log.subscribe()
            log.store.before_read = away
            for number in range(1, 2 * LOOKS_IN_VAIN_MAX):
                await log.submit(event(number))
                await turns(5)
            log.store.before_read = nothing
            await log.submit(event(2 * LOOKS_IN_VAIN_MAX))
            assert positions(await subscription.next()) == list(range(1, 2 * LOOKS_IN_VAIN_MAX + 1))

    run(main())


def test_what_had_arrived_before_a_store_failed_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, "LOOKS_IN_VAIN_MAX", 2)

    async def main() -> None:
        async with WatchedLog(poll_ms=1) as log:
            subscription = await log.subscribe()
            await log.submit(event(1))
            await turns()
            log.store.before_heads = away
            await until(lambda: not subscriptions(log))
            assert positions(await subscription.next()) == [1]
            with pytest.raises(StoreUnavailableError):
                await subscription.next()

    run(main())


@pytest.mark.rule("CO-40")
def test_a_history_that_changed_underneath_is_told_at_once() -> None:
    async def main() -> None:
        async def changed(_: object) -> None:
            raise HistoryChangedError("the cursor is ahead", "another", 0)

        async with WatchedLog(poll_ms=600_000) as log:
            waiting = asyncio.ensure_future(anext(log.follow()))
            await until(lambda: bool(subscriptions(log)))
            await turns()
            log.store.before_read = changed
            await log.commit_elsewhere(event(1))
            await log.submit(event(2))
            with pytest.raises(HistoryChangedError):
                await waiting

    run(main())


def test_a_batch_is_gone_through_once_however_many_lanes_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(list[Record]):
        times = 0

        def __iter__(self) -> Iterator[Record]:
            self.times += 1
            return super().__iter__()

    async def main() -> None:
        async with WatchedLog(settings=Settings(lanes=8), poll_ms=600_000) as log:
            followed = [await log.subscribe(lane=lane) for lane in range(1, 9)]
            batches: list[Counted] = []

            hand_on = log._tailers.committed

            def counted(changes: Changes) -> None:
                batches.append(Counted(changes.records))
                hand_on(replace(changes, records=batches[-1]))

            scopes = [f"chat/{number}" for number in range(40)]
            await log.submit_many([SetMember(scope, "user:ann") for scope in scopes])
            monkeypatch.setattr(log._tailers, "committed", counted)
            await log.submit_many([message(1, scope=scope) for scope in scopes])
            arrived = [record.scope for one in followed for record in await one.next()]
            assert sorted(arrived) == sorted(scopes)
            assert [batch.times for batch in batches] == [1]

    run(main())


def test_the_look_at_others_commits_ends_with_the_last_subscription() -> None:
    async def main() -> None:
        async with WatchedLog(poll_ms=1) as log:
            subscription = await log.subscribe()
            subscription.close()
            await until(lambda: log._tailers._watching is None)
            again = await log.subscribe()
            await log.store.inner.commit([Request((event(1),))])
            assert positions(await again.next()) == [1]

    run(main())
