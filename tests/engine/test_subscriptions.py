"""Subscriptions: slow readers, limits and closing."""

import asyncio
import logging
from typing import Any

import pytest

from deadlines import turns, until
from engine.follow_helpers import NO_POLL_MS, ONE_LANE, is_slow, numbers, subscriptions, take
from engine.observable_store import WatchedLog, positions
from oncelog import (
    ClosedError,
    Cursor,
    HistoryChangedError,
    LimitExceededError,
    SetMember,
    SlowReaderError,
)
from oncelog.core.identity import compute_lane
from oncelog.testing.contract.writes import CHANNEL, event, message, result

# --- slow readers --------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31")
@pytest.mark.parametrize(
    ("limits", "body"), [({"subscription_records_max": 4}, "x"), ({"subscription_bytes_max": 40}, "x" * 10)]
)
async def test_slow_subscription_is_logged_then_closed_and_resumes_without_loss(
    limits: dict[str, Any], body: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "oncelog.engine"):
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
            assert len(caplog.records) == 1  # logged once
            await log.submit_many([event(number, body) for number in (7, 8)])
            await turns()
            with pytest.raises(SlowReaderError) as raised:
                await subscription.next()
            assert raised.value.cursor == Cursor(2, log.epoch)
            assert str(raised.value).endswith(f"resume after {log.epoch}:2")
            assert not subscriptions(log)
            assert positions((await log.read(after=raised.value.cursor)).records) == [3, 4, 5, 6, 7, 8]


@pytest.mark.rule("CO-31")
async def test_subscription_is_not_slow_after_catching_up() -> None:
    async with WatchedLog(subscription_records_max=4) as log:
        subscription = await log.subscribe()
        await log.submit_many([event(number) for number in (1, 2, 3)])
        await turns()
        assert is_slow(subscription)
        assert positions(await subscription.next()) == [1, 2, 3]
        assert not is_slow(subscription)


@pytest.mark.rule("CO-31")
async def test_slow_stream_subscription_gets_a_stream_cursor() -> None:
    """Sequences of a stream differ from positions of its lane."""
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


@pytest.mark.rule("CO-31", "CO-40")
async def test_cursors_of_a_subscription_are_refused_in_another_history() -> None:
    async with WatchedLog(subscription_records_max=2) as log:
        lane = compute_lane(CHANNEL, log.settings.lanes)
        live = await log.subscribe()
        of_stream = await log.subscribe(stream=CHANNEL)
        assert of_stream.start == Cursor(0, log.epoch, f"lane/{lane}")
        with pytest.raises(
            ValueError, match=f"the cursor belongs to 'lane/{lane}'"
        ):  # a position cannot be used as a sequence
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


async def test_subscription_allows_one_waiting_task(log: WatchedLog) -> None:
    subscription = await log.subscribe()
    first = asyncio.ensure_future(subscription.next())
    await turns()
    with pytest.raises(RuntimeError, match="another task is waiting"):
        await subscription.next()
    await log.submit(event(1))
    while not first.done():  # even after it was woken
        with pytest.raises(RuntimeError, match="another task is waiting"):
            await subscription.next()
        await asyncio.sleep(0)
    assert positions(first.result()) == [1]
    given_up = asyncio.ensure_future(subscription.next())
    await turns()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await log.submit(event(2))
    assert positions(await subscription.next()) == [2]  # a cancelled task does not block later ones


@pytest.mark.rule("CO-31")
async def test_record_larger_than_the_subscription_limit_is_delivered() -> None:
    async with WatchedLog(subscription_bytes_max=5) as log:
        subscription = await log.subscribe()
        await log.submit(event(1, "much more than five"))
        await turns()
        assert positions(await subscription.next()) == [1]


@pytest.mark.rule("CO-31")
@pytest.mark.parametrize("where", [{}, {"stream": CHANNEL}])
async def test_slow_follower_returns_to_the_store_without_loss(where: dict[str, str]) -> None:
    write = message if where else event
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


@pytest.mark.rule("CO-30")
async def test_error_names_the_exceeded_subscription_limit() -> None:
    async with WatchedLog(subscriptions_max=2) as log:
        first = await log.subscribe(partitions=["a"])
        await log.subscribe(stream=CHANNEL)
        with pytest.raises(LimitExceededError) as raised:
            await log.subscribe()
        assert (raised.value.name, raised.value.limit) == ("subscriptions_max", 2)
        first.close()
        await log.subscribe()


async def test_subscription_exposes_its_start_and_scope(log: WatchedLog) -> None:
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


# --- closing -------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31")
async def test_leaving_a_follower_ends_its_subscription(log: WatchedLog) -> None:
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


async def test_cancelling_a_follower_ends_its_subscription(log: WatchedLog) -> None:
    reading = asyncio.ensure_future(anext(log.follow()))
    await until(lambda: bool(subscriptions(log)))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not subscriptions(log)


async def test_unused_follower_can_be_closed(log: WatchedLog) -> None:
    await log.follow().aclose()


@pytest.mark.parametrize("hook", ["before_read", "before_heads", None])
async def test_closing_the_log_ends_followers_in_every_phase(hook: str | None) -> None:
    """The phases are the catch-up, the subscription and live delivery."""
    async with WatchedLog(poll_ms=NO_POLL_MS) as log:
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


async def test_subscribe_fails_when_the_log_is_closed_meanwhile(log: WatchedLog) -> None:
    log.gate.shut()
    log.store.before_heads = log.gate
    subscribing = asyncio.ensure_future(log.subscribe())
    await log.gate.reached.wait()
    # The tailers are closed while the store reads the heads.
    closing = asyncio.ensure_future(log._tailers.close())
    await turns()
    log.gate.open()
    with pytest.raises(ClosedError):
        await subscribing
    await closing
    with pytest.raises(ClosedError):
        await log.subscribe()


async def test_follower_raises_when_its_store_is_closed(log: WatchedLog) -> None:
    await log.store.inner.close()
    with pytest.raises(ClosedError):
        await anext(log.follow())
    await log.store.inner.open()
