"""Events to those who take them: in order, once, and whoever fails or leaves loses nothing for others or for later."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from client import clients
from client.clients import WAIT_S, client_of, counted, run, take, turns, until
from doors.serving import Serving, item, serving
from oncelog.client import Client, Committed, Event
from oncelog.client import client as client_module
from oncelog.client import store as store_module
from oncelog.client.handlers import Handlers
from oncelog.errors import ClientError, StoreUnavailableError


async def commit(served: Serving, first: int, count: int) -> list[int]:
    return await served.commit(*(item(number) for number in range(first, first + count)))


async def reached(client: Client, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        await client.reached(number)


def event(number: int) -> Event:
    return Event(str(number), "other", ("a",), number, {"type": "t"}, 1)


# --- functions ---------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-17")
def test_handlers_get_every_event_in_order_each_before_the_next_goes_to_any(tmp_path: Path) -> None:
    async def main() -> None:
        called: list[tuple[str, int]] = []
        async with serving(tmp_path) as served:
            await commit(served, 1, 3)
            client = client_of(served.url)

            @client.on_event
            async def slow(event: Event) -> None:
                await turns(3)
                called.append(("slow", event.committed_id))

            @client.on_event
            def quick(event: Event) -> None:
                called.append(("quick", event.committed_id))

            async with client:
                await reached(client, 3)
                await commit(served, 4, 2)
                await reached(client, 5)
        assert called == [(name, number) for number in range(1, 6) for name in ("slow", "quick")]

    run(main())


def test_a_handler_that_fails_stops_neither_the_others_nor_what_comes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        taken: list[int] = []
        again: list[int] = []
        store = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            await commit(served, 1, 4)
            async with client_of(served.url, store) as client:

                @client.on_event
                async def fails(event: Event) -> None:
                    if event.committed_id in (2, 3):
                        raise ValueError(f"not {event.committed_id}")

                client.on_event(lambda event: taken.append(event.committed_id), name="takes")
                await reached(client, 4)
                assert taken == [1, 2, 3, 4]
                assert client.status().set_aside == 2
                (first, second) = await client.set_aside()
                assert (first.event.committed_id, first.error) == (2, "ValueError: not 2")
                assert first.handler.endswith("fails")
                assert second.event.event == counted(3)
                assert [one.event.committed_id for one in await client.hand_over_set_aside()] == [2, 3]

            async with client_of(served.url, store) as client:
                assert client.status().set_aside == 2, "also after a restart"
                left = await client.hand_over_set_aside()
                assert all("there is no handler" in one.error for one in left)

                def takes_one(event: Event) -> None:
                    if event.committed_id == 3:
                        raise ValueError("still not")
                    again.append(event.committed_id)

                client.on_event(takes_one, name=first.handler)
                (one,) = await client.hand_over_set_aside()
                assert (one.event.committed_id, one.error) == (3, "ValueError: still not")
                assert again == [2]
                assert client.status().set_aside == 1
                assert len(await client.set_aside()) == 1

    run(main())
    assert "failed" in caplog.text


def test_something_that_was_cancelled_inside_a_handler_ends_the_handler_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url) as client:
            await commit(served, 1, 2)

            async def waits(event: Event) -> None:
                task = asyncio.ensure_future(asyncio.sleep(WAIT_S))
                task.cancel()
                await task

            client.on_event(waits, name="waits")
            await reached(client, 2)
            assert [one.error.partition(":")[0] for one in await client.set_aside()] == ["CancelledError"] * 2

    run(main())


def test_names_are_used_once(tmp_path: Path) -> None:
    client = client_of(clients.NOWHERE)
    client.on_event(print)
    with pytest.raises(ValueError, match="'print' already"):
        client.on_event(print)
    with pytest.raises(ValueError, match="'apply' is the name"):
        client.on_event(print, name="apply")


@pytest.mark.rule("EV-17")
def test_a_handler_may_submit_and_wait_for_the_outcome(tmp_path: Path) -> None:
    async def main() -> None:
        seen: list[int] = []
        outcomes: list[Any] = []
        async with serving(tmp_path) as served, client_of(served.url) as client:

            async def replies(event: Event) -> None:
                assert event.event is not None
                seen.append(event.event["number"])
                if event.event["number"] < 5:
                    pending = await client.submit(counted(event.event["number"] + 1))
                    outcomes.append(await pending.outcome())

            client.on_event(replies)
            await client.submit(counted(1))
            await reached(client, 5)
        assert seen == [1, 2, 3, 4, 5]
        assert [one.committed_id for one in outcomes if isinstance(one, Committed)] == [2, 3, 4, 5]

    run(main())


# --- loops ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-17")
def test_a_loop_that_is_left_and_begun_again_misses_nothing_and_begins_with_the_last_one(tmp_path: Path) -> None:
    """Nobody can tell whether the body of a loop that was left had come to its end, or raised."""

    async def main() -> None:
        found: list[int] = []
        async with serving(tmp_path) as served:
            await commit(served, 1, 13)
            store = tmp_path / "client.db"
            for length in (2, 3, 4):
                async with client_of(served.url, store) as client:
                    for _ in range(2):
                        before = len(found)
                        with suppress(ZeroDivisionError):
                            async with asyncio.timeout(WAIT_S):
                                async for one in client.events():
                                    found.append(one.committed_id)
                                    if len(found) == before + length:
                                        raise ZeroDivisionError
                    await reached(client, found[-1] - 1)
        assert found == [1, 2, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 10, 10, 11, 12, 13]

    run(main())


def test_while_there_is_no_loop_the_rest_waits_for_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url) as client:
            await commit(served, 1, 4)
            first: Any = client.events()
            assert await take(first, 2) == [1, 2]
            await first.aclose()
            await reached(client, 1)
            assert client.status().cursor == 1, "what had come with them waits"
            second: Any = client.events()
            assert await take(second, 3) == [2, 3, 4]
            await second.aclose()

    run(main())


def test_whoever_gives_up_waiting_for_an_event_loses_none(tmp_path: Path) -> None:
    async def main() -> None:
        found: list[int] = []
        async with serving(tmp_path) as served, client_of(served.url) as client:
            committing = asyncio.ensure_future(_commit_slowly(served, 30))
            while not found or found[-1] < 30:
                events: Any = client.events()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        while True:
                            found.append((await anext(events)).committed_id)
                await events.aclose()
            await committing
        assert sorted(set(found)) == list(range(1, 31))
        assert all(after - before in (0, 1) for before, after in pairwise(found))

    run(main())


async def _commit_slowly(served: Serving, count: int) -> None:
    for number in range(1, count + 1):
        await served.commit(item(number))


def test_a_loop_that_is_left_just_when_an_event_has_come_leaves_it_to_the_next() -> None:
    async def main() -> None:
        handlers = Handlers()
        stream = handlers.stream()
        waiting = asyncio.ensure_future(stream.__anext__())
        await turns()
        handing = asyncio.ensure_future(handlers.hand_over(event(1)))
        await turns(1)  # it is put there, and the loop has not been told
        waiting.cancel()
        stream.finish()
        assert await handing == ([], False)
        stream = handlers.stream()
        handing = asyncio.ensure_future(handlers.hand_over(event(1)))
        assert await anext(stream) == event(1)
        asking = asyncio.ensure_future(stream.__anext__())
        assert await handing == ([], True)
        handing = asyncio.ensure_future(handlers.hand_over(event(2)))
        assert await asking == event(2)
        stream.finish()
        assert await handing == ([], False), "its body may have raised"

    run(main())


def test_with_a_handler_beside_it_an_event_counts_whether_a_loop_takes_it_or_not() -> None:
    async def main() -> None:
        handlers = Handlers()
        taken: list[Event] = []
        handlers.add(taken.append, "takes")
        stream = handlers.stream()
        handing = asyncio.ensure_future(handlers.hand_over(event(1)))
        await turns()
        stream.finish()
        assert await handing == ([], True)
        assert taken == [event(1)]

    run(main())


@pytest.mark.rule("EV-17")
def test_without_anybody_who_takes_them_events_wait(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            await commit(served, 1, 3)
            async with client_of(served.url, store) as client:
                async with asyncio.timeout(WAIT_S):
                    await client.until_live()
                outcome = await (await client.submit(counted(4))).outcome()
                assert isinstance(outcome, Committed)
                assert outcome.committed_id == 4
                assert client.status().cursor == 0
            async with client_of(served.url, store) as client:
                assert await take(client.events(), 4) == [1, 2, 3, 4]

    run(main())


def test_two_loops_get_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url) as client:
            loops: list[Any] = [client.events(), client.events()]
            taking = [asyncio.ensure_future(take(one, 5)) for one in loops]
            await turns()
            await commit(served, 1, 5)
            assert await asyncio.gather(*taking) == [[1, 2, 3, 4, 5]] * 2
            for one in loops:
                await one.aclose()

    run(main())


def test_loops_end_when_the_client_is_closed_and_what_was_not_taken_comes_again(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            await commit(served, 1, 3)
            async with client_of(served.url, store) as client:
                events: Any = client.events()
                assert await take(events, 2) == [1, 2]
                await client.close()
                assert [one async for one in events] == []
            async with client_of(served.url, store) as client:
                # 2 was still being dealt with.
                assert await take(client.events(), 2) == [2, 3]

    run(main())


# --- apply -----------------------------------------------------------------------------------------------------


def made(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS made (number INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])
    if any(one.event == counted(2) for one in events):
        raise ValueError("not 2")


def rows(store: Path) -> list[int]:
    connection = sqlite3.connect(store)
    try:
        return [row[0] for row in connection.execute("SELECT number FROM made ORDER BY number")]
    finally:
        connection.close()


def test_apply_gets_events_in_the_store_and_what_it_cannot_take_is_set_aside(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            await commit(served, 1, 4)
            async with client_of(served.url, store, apply=made) as client:
                await reached(client, 4)
                assert rows(store) == [1, 3, 4]
                assert [one.handler for one in await client.set_aside()] == ["apply"]
                assert client.status().set_aside == 1
                assert len(await client.hand_over_set_aside()) == 1

            def better(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
                connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])

            async with client_of(served.url, store, apply=better) as client:
                assert await client.hand_over_set_aside() == []
                assert client.status().set_aside == 0
            assert rows(store) == [1, 2, 3, 4]

    run(main())


def test_an_apply_that_ends_the_transaction_ends_the_client_loudly(tmp_path: Path) -> None:
    async def main() -> None:
        def commits(connection: sqlite3.Connection, _events: Sequence[Event]) -> None:
            connection.commit()

        async with serving(tmp_path) as served, client_of(served.url, apply=commits) as client:
            events: Any = client.events()
            waiting = asyncio.ensure_future(anext(events))
            await turns()
            await commit(served, 1, 1)
            assert (await waiting).committed_id == 1
            with pytest.raises(ClientError, match="apply has ended the transaction"):
                await anext(events)
            with pytest.raises(ClientError, match="apply has ended the transaction"):
                await client.submit(counted(2))
            with pytest.raises(ClientError, match="apply has ended the transaction"):
                await client.until_live()
            assert "apply has ended" in str(client.status().last_error)

    run(main())


def test_a_store_that_cannot_be_written_for_a_while_delays_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "STORE_PAUSE_S", 0.001)
    failures = iter(range(3))

    def failing(inner: Any) -> Any:
        def called(*arguments: Any) -> Any:
            if next(failures, None) is not None:
                raise StoreUnavailableError("the disk is full")
            return inner(*arguments)

        return called

    async def main() -> None:
        store = tmp_path / "client.db"
        told: list[str | None] = []
        async with serving(tmp_path) as served, client_of(served.url, store, apply=made) as client:
            client.on_status(lambda status: told.append(status.last_error))
            monkeypatch.setattr(store_module.ClientStore, "hand_over", failing(store_module.ClientStore.hand_over))
            await commit(served, 11, 3)
            await reached(client, 3)
            await until(lambda: client.status().last_error is None)
            assert rows(store) == [1, 2, 3]
            assert "the disk is full" in told

    run(main())


def test_a_client_is_closed_while_its_store_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STORE_PAUSE_S", 0.001)

    def full(*_: Any) -> int:
        raise StoreUnavailableError("the disk is full")

    async def main() -> None:
        store = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            await commit(served, 1, 1)
            with monkeypatch.context() as patched:
                patched.setattr(store_module.ClientStore, "hand_over", full)
                async with client_of(served.url, store, apply=made) as client:
                    await until(lambda: client.status().last_error == "the disk is full")
            await asyncio.sleep(0.01)  # what was left behind would raise now
            assert asyncio.all_tasks() == {asyncio.current_task()} | {
                task for task in asyncio.all_tasks() if "oncelog client" not in task.get_name()
            }
            async with client_of(served.url, store) as client:
                assert await take(client.events(), 1) == [1]

    run(main())
