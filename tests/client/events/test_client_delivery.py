"""Delivery of events to handlers, loops and `apply`: in order, and without loss after a failure."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from client.events import event_clients
from client.events.event_clients import client_of, numbered_draft, take
from deadlines import WAIT_S, turns, until
from oncelog.client import Client, Committed, Event
from oncelog.client.events import store as store_module
from oncelog.client.events.deliverer import EventHandlers, EventStream
from oncelog.client.runtime import backoff
from oncelog.errors import ClientError, StoreUnavailableError
from server.running_server import Serving, item, serving


async def commit(served: Serving, first: int, count: int) -> list[int]:
    return await served.commit(*(item(number) for number in range(first, first + count)))


async def wait_until_delivered(client: Client, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        await client.reached(number)


def event(number: int) -> Event:
    return Event(str(number), "other", ("a",), number, {"type": "t"}, 1)


# --- handlers ---------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-17")
async def test_each_event_reaches_all_handlers_before_the_next_event(tmp_path: Path) -> None:
    called: list[tuple[str, int]] = []
    async with serving(tmp_path) as served:
        await commit(served, 1, 3)
        client = client_of(served.url)

        @client.on_event
        async def handle_slowly(event: Event) -> None:
            await turns(3)
            called.append(("slow", event.committed_id))

        @client.on_event
        def handle_quickly(event: Event) -> None:
            called.append(("quick", event.committed_id))

        async with client:
            await wait_until_delivered(client, 3)
            await commit(served, 4, 2)
            await wait_until_delivered(client, 5)
    assert called == [(name, number) for number in range(1, 6) for name in ("slow", "quick")]


async def test_failing_handler_stops_neither_other_handlers_nor_later_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[int] = []
    again: list[int] = []
    store = tmp_path / "client.db"
    async with serving(tmp_path) as served:
        await commit(served, 1, 4)
        async with client_of(served.url, store) as client:

            @client.on_event
            async def raise_error(event: Event) -> None:
                if event.committed_id in (2, 3):
                    raise ValueError(f"not {event.committed_id}")

            client.on_event(lambda event: taken.append(event.committed_id), name="takes")
            await wait_until_delivered(client, 4)
            assert taken == [1, 2, 3, 4]
            assert client.status().set_aside == 2
            (first, second) = await client.set_aside()
            assert (first.event.committed_id, first.error) == (2, "ValueError: not 2")
            assert first.handler.endswith("raise_error")
            assert second.event.event == numbered_draft(3)
            assert [one.event.committed_id for one in await client.hand_over_set_aside()] == [2, 3]

        async with client_of(served.url, store) as client:
            assert client.status().set_aside == 2, "the events remain set aside after a restart"
            left = await client.hand_over_set_aside()
            assert all("does not exist" in one.error for one in left)

            def raise_at_one(event: Event) -> None:
                if event.committed_id == 3:
                    raise ValueError("still not")
                again.append(event.committed_id)

            client.on_event(raise_at_one, name=first.handler)
            (one,) = await client.hand_over_set_aside()
            assert (one.event.committed_id, one.error) == (3, "ValueError: still not")
            assert again == [2]
            assert client.status().set_aside == 1
            assert len(await client.set_aside()) == 1
    assert "failed" in caplog.text


async def test_cancellation_inside_a_handler_sets_the_event_aside(served: Serving, client: Client) -> None:
    await commit(served, 1, 2)

    async def cancel_while_waiting(event: Event) -> None:
        task = asyncio.ensure_future(asyncio.sleep(WAIT_S))
        task.cancel()
        await task

    client.on_event(cancel_while_waiting, name="waits")
    await wait_until_delivered(client, 2)
    assert [one.error.partition(":")[0] for one in await client.set_aside()] == ["CancelledError"] * 2


def test_handler_names_are_unique() -> None:
    client = client_of(event_clients.UNREACHABLE_URL)
    client.on_event(print)
    with pytest.raises(ValueError, match="another handler has the name 'print'"):
        client.on_event(print)
    with pytest.raises(ValueError, match="'apply' is reserved"):
        client.on_event(print, name="apply")


@pytest.mark.rule("EV-17")
async def test_handler_can_submit_and_wait_for_the_outcome(tmp_path: Path) -> None:
    seen: list[int] = []
    outcomes: list[Any] = []
    async with serving(tmp_path) as served, client_of(served.url) as client:

        async def submit_reply(event: Event) -> None:
            assert event.event is not None
            seen.append(event.event["number"])
            if event.event["number"] < 5:
                pending = await client.submit(numbered_draft(event.event["number"] + 1))
                outcomes.append(await pending.outcome())

        client.on_event(submit_reply)
        await client.submit(numbered_draft(1))
        await wait_until_delivered(client, 5)
    assert seen == [1, 2, 3, 4, 5]
    assert [one.committed_id for one in outcomes if isinstance(one, Committed)] == [2, 3, 4, 5]


# --- loops ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-17")
async def test_new_iteration_repeats_the_last_event(tmp_path: Path) -> None:
    """The client cannot know whether the loop body finished the last event or raised."""
    store = tmp_path / "client.db"
    async with serving(tmp_path) as served:
        await commit(served, 1, 13)
        async with client_of(served.url, store) as client:
            assert await iterate_and_raise(client, 2) == [1, 2]
            assert await iterate_and_raise(client, 2) == [2, 3]
            await wait_until_delivered(client, 2)
        async with client_of(served.url, store) as client:
            assert await iterate_and_raise(client, 3) == [3, 4, 5]
            assert await iterate_and_raise(client, 3) == [5, 6, 7]
            await wait_until_delivered(client, 6)
        async with client_of(served.url, store) as client:
            assert await iterate_and_raise(client, 4) == [7, 8, 9, 10]
            assert await iterate_and_raise(client, 4) == [10, 11, 12, 13]
            await wait_until_delivered(client, 12)


async def iterate_and_raise(client: Client, count: int) -> list[int]:
    """Iterate over `count` events, raise in the loop body at the last one, and return the committed ids."""
    found: list[int] = []
    with suppress(ZeroDivisionError):
        async with asyncio.timeout(WAIT_S):
            async for one in client.events():
                found.append(one.committed_id)
                if len(found) == count:
                    raise ZeroDivisionError
    return found


async def test_undelivered_events_wait_for_the_next_loop(served: Serving, client: Client) -> None:
    await commit(served, 1, 4)
    first: Any = client.events()
    assert await take(first, 2) == [1, 2]
    await first.aclose()
    await wait_until_delivered(client, 1)
    assert client.status().cursor == 1, "later events of the page wait"
    second: Any = client.events()
    assert await take(second, 3) == [2, 3, 4]
    await second.aclose()


async def test_cancelled_wait_for_an_event_loses_no_event(tmp_path: Path) -> None:
    chance, last = Random(1), 30
    found: list[int] = []
    async with serving(tmp_path) as served, client_of(served.url) as client:
        committing = asyncio.ensure_future(_commit_one_by_one(served, last))
        while not found or found[-1] < last:
            events: Any = client.events()
            for _ in range(chance.randint(1, 4)):
                found += await take(events, 1)
                if found[-1] == last:
                    break
            waiting = asyncio.ensure_future(anext(events))
            await turns(chance.randint(0, 5))
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                found.append((await waiting).committed_id)
            await events.aclose()
        await committing
    assert sorted(set(found)) == list(range(1, last + 1))
    assert all(after - before in (0, 1) for before, after in pairwise(found))


async def _commit_one_by_one(served: Serving, count: int) -> None:
    for number in range(1, count + 1):
        await served.commit(item(number))


async def test_event_passed_to_an_ending_loop_is_not_lost() -> None:
    streams: list[EventStream] = []
    handlers = EventHandlers(streams)
    stream = EventStream(streams)
    waiting = asyncio.ensure_future(stream.__anext__())
    await turns()
    handing = asyncio.ensure_future(handlers.deliver(event(1)))
    await turns(1)  # The event is in the stream, but the loop has not resumed.
    waiting.cancel()
    stream.finish()
    assert await handing == ([], False)
    stream = EventStream(streams)
    handing = asyncio.ensure_future(handlers.deliver(event(1)))
    assert await anext(stream) == event(1)
    asking = asyncio.ensure_future(stream.__anext__())
    assert await handing == ([], True)
    handing = asyncio.ensure_future(handlers.deliver(event(2)))
    assert await asking == event(2)
    stream.finish()
    assert await handing == ([], False), "the loop body may have raised"


async def test_event_taken_by_a_handler_is_delivered_even_if_a_loop_ends() -> None:
    streams: list[EventStream] = []
    handlers = EventHandlers(streams)
    taken: list[Event] = []
    handlers.add(taken.append, "takes")
    stream = EventStream(streams)
    handing = asyncio.ensure_future(handlers.deliver(event(1)))
    await turns()
    stream.finish()
    assert await handing == ([], True)
    assert taken == [event(1)]


@pytest.mark.rule("EV-17")
async def test_events_wait_until_there_is_a_handler_or_a_loop(served: Serving, tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    await commit(served, 1, 3)
    async with client_of(served.url, store) as client:
        async with asyncio.timeout(WAIT_S):
            await client.until_live()
        outcome = await (await client.submit(numbered_draft(4))).outcome()
        assert isinstance(outcome, Committed)
        assert outcome.committed_id == 4
        assert client.status().cursor == 0
    async with client_of(served.url, store) as client:
        assert await take(client.events(), 4) == [1, 2, 3, 4]


async def test_two_loops_receive_the_same_events(served: Serving, client: Client) -> None:
    loops: list[Any] = [client.events(), client.events()]
    taking = [asyncio.ensure_future(take(one, 5)) for one in loops]
    await turns()
    await commit(served, 1, 5)
    assert await asyncio.gather(*taking) == [[1, 2, 3, 4, 5]] * 2
    for one in loops:
        await one.aclose()


async def test_close_ends_loops_and_unfinished_events_are_delivered_again(served: Serving, tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    await commit(served, 1, 3)
    async with client_of(served.url, store) as client:
        events: Any = client.events()
        assert await take(events, 2) == [1, 2]
        await client.close()
        assert [one async for one in events] == []
    async with client_of(served.url, store) as client:
        # The loop had not finished processing event 2.
        assert await take(client.events(), 2) == [2, 3]


# --- apply -----------------------------------------------------------------------------------------------------


def insert_rows(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS made (number INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])
    if any(one.event == numbered_draft(2) for one in events):
        raise ValueError("not 2")


def rows(store: Path) -> list[int]:
    connection = sqlite3.connect(store)
    try:
        return [row[0] for row in connection.execute("SELECT number FROM made ORDER BY number")]
    finally:
        connection.close()


async def test_apply_writes_events_into_the_store_and_failing_ones_are_set_aside(
    served: Serving, tmp_path: Path
) -> None:
    store = tmp_path / "client.db"
    await commit(served, 1, 4)
    async with client_of(served.url, store, apply=insert_rows) as client:
        await wait_until_delivered(client, 4)
        assert rows(store) == [1, 3, 4]
        assert [one.handler for one in await client.set_aside()] == ["apply"]
        assert client.status().set_aside == 1
        assert len(await client.hand_over_set_aside()) == 1

    def apply_fixed(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])

    async with client_of(served.url, store, apply=apply_fixed) as client:
        assert await client.hand_over_set_aside() == []
        assert client.status().set_aside == 0
    assert rows(store) == [1, 2, 3, 4]


async def test_apply_that_ends_the_transaction_closes_the_client_with_an_error(tmp_path: Path) -> None:
    def commit_transaction(connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
        connection.commit()

    async with serving(tmp_path) as served, client_of(served.url, apply=commit_transaction) as client:
        events: Any = client.events()
        waiting = asyncio.ensure_future(anext(events))
        await turns()
        await commit(served, 1, 1)
        assert (await waiting).committed_id == 1
        with pytest.raises(ClientError, match="apply ended the client's transaction"):
            await anext(events)
        with pytest.raises(ClientError, match="apply ended the client's transaction"):
            await client.submit(numbered_draft(2))
        with pytest.raises(ClientError, match="apply ended the client's transaction"):
            await client.until_live()
        assert "apply ended" in str(client.status().last_error)


async def test_temporarily_unwritable_store_delays_delivery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "STORE_PAUSE", backoff.RetryPause(1))
    failures = iter(range(3))

    def failing_once(inner: Any) -> Any:
        def called(*arguments: Any) -> Any:
            if next(failures, None) is not None:
                raise StoreUnavailableError("the disk is full")
            return inner(*arguments)

        return called

    store = tmp_path / "client.db"
    errors: list[str | None] = []
    async with serving(tmp_path) as served, client_of(served.url, store, apply=insert_rows) as client:
        client.on_status(lambda status: errors.append(status.last_error))
        monkeypatch.setattr(
            store_module.ClientStore, "save_delivery", failing_once(store_module.ClientStore.save_delivery)
        )
        await commit(served, 11, 3)
        await wait_until_delivered(client, 3)
        await until(lambda: client.status().last_error is None)
        assert rows(store) == [1, 2, 3]
        assert "the disk is full" in errors


async def test_client_closes_while_its_store_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "STORE_PAUSE", backoff.RetryPause(1))

    def fail_with_full_disk(*_: Any) -> int:
        raise StoreUnavailableError("the disk is full")

    store = tmp_path / "client.db"
    async with serving(tmp_path) as served:
        await commit(served, 1, 1)
        with monkeypatch.context() as patched:
            patched.setattr(store_module.ClientStore, "save_delivery", fail_with_full_disk)
            async with client_of(served.url, store, apply=insert_rows) as client:
                await until(lambda: client.status().last_error == "the disk is full")
        assert not [task for task in asyncio.all_tasks() if "oncelog events" in task.get_name()]
        async with client_of(served.url, store) as client:
            assert await take(client.events(), 1) == [1]
