"""Followers of a store that fails to read for a while."""

import asyncio
import logging

import pytest

from deadlines import turns, until
from engine.follow_helpers import NO_POLL_MS, subscriptions, take
from engine.observable_store import WatchedLog, do_nothing, positions
from oncelog import (
    HistoryChangedError,
    StoreUnavailableError,
)
from oncelog.core.values import Request
from oncelog.engine import tailer
from oncelog.engine.tailer import FAILED_POLLS_MAX
from oncelog.testing.contract.writes import event


@pytest.mark.rule("CO-13")
async def test_failed_page_read_is_retried_at_the_next_commit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oncelog.engine"):

        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is unavailable")

        async with WatchedLog(poll_ms=NO_POLL_MS) as log:
            subscription = await log.subscribe()
            log.store.before_read = fail
            await log.commit_elsewhere(event(1))
            await log.submit(event(2))
            await turns()
            assert "lane 0 could not be read" in caplog.text
            log.store.before_read = do_nothing
            await log.submit(event(3))
            await turns()
            assert positions(await subscription.next()) == [1, 2, 3]


@pytest.mark.rule("CO-13")
async def test_failed_poll_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        failures = 0

        async def fail_twice() -> None:
            nonlocal failures
            failures += 1
            if failures <= 2:
                raise StoreUnavailableError("the disk is unavailable")

        async with WatchedLog(poll_ms=1) as log:
            subscription = await log.subscribe()
            log.store.before_heads = fail_twice
            await log.store.inner.commit([Request((event(1),))])  # as another process
            assert positions(await subscription.next()) == [1]
            assert failures > 2
            assert "polling the log for its subscribers failed" in caplog.text


async def fail_poll(*_: object) -> None:
    raise StoreUnavailableError("the disk is unavailable")


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("hook", ["before_read", "before_heads"])
async def test_followers_fail_after_repeated_failed_polls(
    hook: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailer, "FAILED_POLLS_MAX", 5)

    with caplog.at_level(logging.WARNING, "oncelog.engine"):
        async with WatchedLog(poll_ms=1) as log:
            await log.submit(event(1))
            records, others = log.follow(), log.follow(partition="a")
            assert positions(await take(records, 1)) == [1]
            subscription = await log.subscribe()
            waiting = [asyncio.ensure_future(one) for one in (anext(records), anext(others), subscription.next())]
            await until(lambda: len(subscriptions(log)) == 3)
            setattr(log.store, hook, fail_poll)
            await log.store.inner.commit([Request((event(2),))])  # as another process
            for one in waiting:
                with pytest.raises(StoreUnavailableError, match="the disk is unavailable"):
                    await one
            assert not subscriptions(log)
            with pytest.raises(StopAsyncIteration):
                await anext(records)
            with pytest.raises(StoreUnavailableError):
                await subscription.next()
            setattr(log.store, hook, do_nothing)
            async with log.follow(after=1) as again:
                assert positions(await take(again, 1)) == [2]
                await log.store.inner.commit([Request((event(3),))])
                assert positions(await take(again, 1)) == [3]
    messages = [record.message for record in caplog.records]
    failures = [message for message in messages if "could not be read" in message or "polling the log" in message]
    assert len(failures) == 1  # not once per poll


@pytest.mark.rule("CO-13")
@pytest.mark.parametrize("hook", ["before_read", "before_heads"])
async def test_followers_survive_short_store_outages(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, "FAILED_POLLS_MAX", 3)
    async with WatchedLog(poll_ms=1) as log, log.follow() as records:
        failures = 0

        async def fail_twice(*_: object) -> None:
            nonlocal failures
            failures += 1
            if failures <= 2:
                await fail_poll()

        for number in range(1, 6):
            waiting = asyncio.ensure_future(anext(records))
            await until(lambda: bool(subscriptions(log)))
            failures = 0
            setattr(log.store, hook, fail_twice)
            await log.store.inner.commit([Request((event(number),))])
            assert (await waiting).position == number
            assert failures > 2
            setattr(log.store, hook, do_nothing)


@pytest.mark.rule("CO-13")
async def test_only_consecutive_failed_polls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Successful polls reset the count even if there was nothing to read."""
    monkeypatch.setattr(tailer, "FAILED_POLLS_MAX", 3)
    looks = 0

    async def fail_twice_in_three() -> None:
        nonlocal looks
        looks += 1
        if looks % 3:
            await fail_poll()

    async with WatchedLog(poll_ms=1) as log:
        subscription = await log.subscribe()
        log.store.before_heads = fail_twice_in_three
        await until(lambda: looks > 12)
        assert subscriptions(log) == [subscription]


@pytest.mark.rule("CO-13")
async def test_poll_counts_reads_that_failed_since_the_last_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, "FAILED_POLLS_MAX", 2)
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        subscription = await log.subscribe()
        of_lane = log._tailers._tailers[0]
        for number in (1, 3, 5):  # a failed read is repeated before the next poll
            log.store.before_read = fail_poll
            await log.submit(event(number))
            await turns()
            log.store.before_read = do_nothing
            await log.submit(event(number + 1))
            await turns()
            of_lane.poll(number + 1)
        assert positions(await subscription.next()) == [1, 2, 3, 4, 5, 6]
        log.store.before_read = fail_poll
        await log.submit(event(7))
        await turns()
        log.gate.shut()
        log.store.before_read = log.gate
        for _ in range(5):  # a slow read is not a failed read
            of_lane.poll(7)
            await turns()
        assert subscriptions(log) == [subscription]
        log.store.before_read = fail_poll
        log.gate.open()
        await turns()
        assert positions(await subscription.next()) == [7]


@pytest.mark.rule("CO-13")
async def test_reads_that_fail_between_polls_do_not_count_as_failed_polls() -> None:
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        subscription = await log.subscribe()
        log.store.before_read = fail_poll
        for number in range(1, 2 * FAILED_POLLS_MAX):
            await log.submit(event(number))
            await turns(5)
        log.store.before_read = do_nothing
        await log.submit(event(2 * FAILED_POLLS_MAX))
        assert positions(await subscription.next()) == list(range(1, 2 * FAILED_POLLS_MAX + 1))


async def test_queued_records_are_delivered_before_the_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tailer, "FAILED_POLLS_MAX", 2)
    async with WatchedLog(poll_ms=1) as log:
        subscription = await log.subscribe()
        await log.submit(event(1))
        await turns()
        log.store.before_heads = fail_poll
        await until(lambda: not subscriptions(log))
        assert positions(await subscription.next()) == [1]
        with pytest.raises(StoreUnavailableError):
            await subscription.next()


@pytest.mark.rule("CO-40")
async def test_history_change_fails_followers_immediately() -> None:
    async def report_history_change(_: object) -> None:
        raise HistoryChangedError("the cursor is ahead", "another", 0)

    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
        waiting = asyncio.ensure_future(anext(log.follow()))
        await until(lambda: bool(subscriptions(log)))
        await turns()
        log.store.before_read = report_history_change
        await log.commit_elsewhere(event(1))
        await log.submit(event(2))
        with pytest.raises(HistoryChangedError):
            await waiting
