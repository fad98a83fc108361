"""The blocking client, used from threads."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from client.events.event_clients import LIMITS, UNREACHABLE_URL, numbered_draft
from databases import BOTH_STORES
from deadlines import WAIT_S, wait_until
from oncelog.client import BlockingClient, Committed, ConnectionState, Draft, Event, Refused, Status
from oncelog.errors import CanonicalError, ClosedError, StoreInUseError
from oncelog.portal import Portal
from server.running_server import serving


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The URL of a server that runs in a separate thread."""
    portal = Portal("server")
    served = serving(tmp_path)
    try:
        found = portal.call(served.__aenter__)
        yield found.url
        portal.call(served.__aexit__, None, None, None)
    finally:
        portal.close()


def client_of(url: str, store: Path | str = ":memory:", **options: Any) -> BlockingClient:
    return BlockingClient(url, path=store, **{"partitions": ["a"], "limits": LIMITS, **options})


def committed(client: BlockingClient, number: int, **options: Any) -> int:
    found = client.submit(numbered_draft(number), **options).outcome(WAIT_S)
    assert isinstance(found, Committed)
    return found.committed_id


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_blocking_client_submits_and_receives_events_in_order(url: str) -> None:
    with client_of(url, client_id="laptop") as client:
        assert client.client_id == "laptop"
        pending = client.submit(numbered_draft(1), id=UUID(int=1))
        assert pending.id == str(UUID(int=1))
        assert pending.outcome(WAIT_S) == pending.result
        assert committed(client, 2) == 2
        assert committed(client, 1, id=UUID(int=1)) == 1
        found = []
        for event in client.events():
            found.append(event.committed_id)
            if len(found) == 2:
                break
        assert found == [1, 2]
        client.reached(1, WAIT_S)
        client.until_settled(WAIT_S)
        assert client.pending() == []


def test_new_iteration_repeats_the_last_event(url: str) -> None:
    with client_of(url) as client:
        client.submit_many([Draft(numbered_draft(number)) for number in range(9)])
        found = []
        for length in (2, 3, 6):
            loop = client.events()
            found += [next(loop).committed_id for _ in range(length)]
            loop.close()  # type: ignore[attr-defined]
        assert found == [1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9], "a new loop repeats the last event"


def test_close_in_a_handler_is_refused(url: str) -> None:
    with client_of(url) as client:
        client.on_event(lambda _: client.close(), name="closes")
        assert committed(client, 1) == 1
        client.reached(1, WAIT_S)
        (aside,) = client.set_aside()
        assert "must not be called by a handler" in aside.error


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_threads_share_a_client(url: str) -> None:
    seen: list[int] = []
    with client_of(url) as client:
        client.on_event(lambda event: seen.append(event.committed_id), name="takes")
        with ThreadPoolExecutor(8) as pool:
            numbers = list(pool.map(lambda number: committed(client, number), range(40)))
        client.reached(40, WAIT_S)
    assert sorted(numbers) == list(range(1, 41))
    assert seen == list(range(1, 41))


def test_handlers_run_in_threads_and_can_submit_and_wait(url: str) -> None:
    threads: set[str] = set()
    seen: list[int] = []
    with client_of(url) as client:

        def submit_reply(event: Event) -> None:
            threads.add(threading.current_thread().name)
            assert event.event is not None
            seen.append(event.event["number"])
            if event.event["number"] < 4:
                assert isinstance(client.submit(numbered_draft(event.event["number"] + 1)).outcome(WAIT_S), Committed)

        assert client.on_event(submit_reply) is submit_reply
        client.submit(numbered_draft(1))
        client.reached(4, WAIT_S)
        with pytest.raises(ValueError, match="another handler has the name"):
            client.on_event(submit_reply)
    assert seen == [1, 2, 3, 4]
    assert not any(name.startswith(("oncelog", "MainThread")) for name in threads)


def test_event_of_a_failing_handler_is_set_aside(url: str) -> None:
    is_well = threading.Event()
    with client_of(url) as client:

        def raise_error(_event: Event) -> None:
            if not is_well.is_set():
                raise ValueError("not yet")

        client.on_event(raise_error, name="fails")
        assert committed(client, 1) == 1
        client.reached(1, WAIT_S)
        assert [one.error for one in client.set_aside()] == ["ValueError: not yet"]
        assert len(client.hand_over_set_aside()) == 1
        is_well.set()
        assert client.hand_over_set_aside() == []
        assert client.status().set_aside == 0


def test_waits_raise_timeout_error() -> None:
    with client_of(UNREACHABLE_URL) as client:
        pending = client.submit(numbered_draft(1))
        for wait in (pending.outcome, client.until_live, client.until_settled):
            with pytest.raises(TimeoutError):
                wait(0.01)
        with pytest.raises(TimeoutError):
            client.reached(1, 0.01)
        assert pending.result is None
        assert [one.id for one in client.pending()] == [pending.id]
        client.reconnect_now()


@pytest.mark.rule("EV-17")
def test_outbox_is_sent_by_the_next_client_of_the_store(url: str, tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    with client_of(UNREACHABLE_URL, store) as client:
        ids = [client.submit(numbered_draft(number)).id for number in range(3)]
    with client_of(url, store) as client:
        client.until_settled(WAIT_S)
        events = client.events()
        assert [next(events).id for _ in range(3)] == ids


def test_close_ends_all_waits_with_closed_error(tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    with client_of(UNREACHABLE_URL, store) as client, ThreadPoolExecutor(4) as pool:
        pending = client.submit(numbered_draft(1))
        waiting: list[Future[Any]] = [
            pool.submit(wait) for wait in (pending.outcome, client.until_live, client.until_settled)
        ]
        loop = pool.submit(lambda: list(client.events()))
        wait_until(lambda: loop.running() and all(one.running() for one in waiting))
        client.close()
        for one in waiting:
            with pytest.raises(ClosedError):
                one.result(WAIT_S)
        with suppress(ClosedError):  # the loop may begin after the close
            assert loop.result(WAIT_S) == []
    client.close()
    for call in (lambda: client.submit(numbered_draft(2)), client.refused, client.set_aside, pending.outcome):
        with pytest.raises(ClosedError):
            call()
    assert client.status().state is ConnectionState.CLOSED
    with client_of(UNREACHABLE_URL, store) as again:
        assert [one.id for one in again.pending()] == [pending.id]


def test_client_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    before = set(threading.enumerate())
    with client_of(UNREACHABLE_URL, store), pytest.raises(StoreInUseError):
        client_of(UNREACHABLE_URL, store).__enter__()
    # Check only the package's threads, because threads left behind by other tests may start more threads.
    assert [one.name for one in set(threading.enumerate()) - before if one.name.startswith("oncelog")] == []


def test_refused_event_is_kept_until_it_is_forgotten(url: str) -> None:
    with client_of(url) as client:
        found = client.submit(numbered_draft(1), expected_committed_id=9).outcome(WAIT_S)
        assert isinstance(found, Refused)
        (rejection,) = client.refused()
        assert rejection.outcome == found
        with pytest.warns(DeprecationWarning, match="forget_rejected"):
            client.forget_rejected()  # the deprecated method forgets nothing
        assert client.status().refused == 1
        with pytest.warns(DeprecationWarning, match="forget_rejected"):
            client.forget_rejected(rejection.id)
        assert client.refused() == []
        with pytest.raises(CanonicalError):
            client.submit("none")


def test_status_handler_runs_in_a_thread(url: str) -> None:
    reports: list[tuple[ConnectionState, str]] = []
    is_live = threading.Event()

    def report(status: Status) -> None:
        reports.append((status.state, threading.current_thread().name))
        if status.state is ConnectionState.LIVE:
            is_live.set()

    client = client_of(url)
    client.on_status(report)
    client.on_history_changed(lambda _: None)
    with client:
        assert is_live.wait(WAIT_S)
        assert client.history_change is None
    assert all(not name.startswith("oncelog") for _, name in reports)


def test_start_over_applies_all_events_again_after_reset(url: str, tmp_path: Path) -> None:
    store = tmp_path / "client.db"

    def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS made (number INTEGER)")
        connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])

    def reset(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM made")

    with client_of(url, store, apply=apply) as client:
        client.submit_many([Draft(numbered_draft(number)) for number in range(3)])
        client.until_settled(WAIT_S)
        client.reached(3, WAIT_S)
        client.start_over(reset=reset)
        client.reached(3, WAIT_S)
    connection = sqlite3.connect(store)
    assert connection.execute("SELECT number FROM made").fetchall() == [(1,), (2,), (3,)]
    connection.close()


async def test_blocking_client_works_while_an_event_loop_is_running() -> None:
    with client_of(UNREACHABLE_URL) as client:
        assert client.submit(numbered_draft(1)).result is None
