"""Clients of the Events API against real servers: history changes, crashes, flow control and closing."""

import asyncio
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from client.events.event_clients import LIMITS, UNREACHABLE_URL, client_of, numbered_draft, take, wait_until_live
from databases import BOTH_STORES
from deadlines import WAIT_S, soon, turns, until
from oncelog.client import Client, Committed, ConnectionState, Event, HistoryChange, Outcome
from oncelog.client.events import protocol as protocols
from oncelog.client.runtime.http import WebSocketTransport
from oncelog.errors import (
    ClosedError,
    ProtocolError,
    StoreInUseError,
)
from scripts import start_script
from server.cli_commands import oncelog
from server.running_server import Serving, item, serving

HERE = Path(__file__).parent


# --- history changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known_before", [True, False])
async def test_no_events_are_delivered_after_a_restored_backup_until_start_over(
    tmp_path: Path, port: int, is_known_before: bool
) -> None:
    def rows() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "client.db")) as connection:
            return [row[0] for row in connection.execute("SELECT number FROM made ORDER BY number")]

    def apply(connection: sqlite3.Connection, events: Any) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS made (number INTEGER)")
        connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])

    def reset(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM made WHERE number > 2")

    changes: list[HistoryChange] = []
    log, backup = str(tmp_path / "events.db"), str(tmp_path / "backup.db")
    client = client_of("http://127.0.0.1:9", tmp_path / "client.db", apply=apply)
    async with serving(tmp_path, port=port) as served:
        url = served.url
        await served.commit(item(1), item(2))
        await restore_backup("backup", log, backup)
        await served.commit(item(3), item(4))
        client = client_of(url, tmp_path / "client.db", apply=apply)
        await client.__aenter__()
        await soon(client.reached(4))
        if not is_known_before:
            await client.close()
    await restore_backup("restore", "--force", "--above=100", backup, log)
    async with serving(tmp_path, port=port) as served:
        await served.commit(item(5))
        if not is_known_before:
            client = client_of(url, tmp_path / "client.db", apply=apply)
            await client.__aenter__()
        client.on_history_changed(changes.append)
        await until(lambda: client.status().state is ConnectionState.HISTORY_CHANGED)
        pending = await client.submit(numbered_draft(6))
        client.reconnect_now()
        await until(lambda: bool(changes))
        await until(lambda: client.status().state is ConnectionState.HISTORY_CHANGED)
        assert rows() == [1, 2, 3, 4]
        change = client.history_change
        assert change is not None
        # A client that stayed open may reconnect before the third event is committed.
        assert (change.cursor, change.server_last_committed_id in (102, 102 - is_known_before)) == (4, True)
        assert change.epoch != change.known_epoch
        await client.start_over(since=2, reset=reset)
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await pending.outcome(), Committed)
            await client.reached(103)
        assert client.history_change is None
        assert rows() == [1, 2, 102, 103]
        await client.close()
    async with serving(tmp_path, port=port), client_of(url, tmp_path / "client.db", apply=apply) as client:
        await wait_until_live(client)
        assert client.history_change is None, "the new epoch is stored"


async def restore_backup(*arguments: str) -> None:
    done = await oncelog(*arguments)
    assert done.exit_code == 0, done.output


@BOTH_STORES
async def test_start_over_delivers_events_again_from_the_given_id(tmp_path: Path) -> None:
    seen: list[int] = []
    async with serving(tmp_path) as served, client_of(served.url) as client:
        client.on_event(lambda event: seen.append(event.committed_id), name="takes")
        await served.commit(item(1), item(2), item(3))
        await until(lambda: len(seen) == 3)
        await client.start_over(since=1)
        await until(lambda: len(seen) == 5)
        await served.commit(item(4))
        await until(lambda: len(seen) == 6)
    assert seen == [1, 2, 3, 2, 3, 4]


# --- crashes and closing ------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_apply_inserts_one_row_per_event_even_if_the_application_is_killed(tmp_path: Path) -> None:
    count = 20

    store = str(tmp_path / "client.db")
    async with serving(tmp_path) as served:
        await served.commit(*(item(number) for number in range(1, count + 1)))
        for rows in (1, 5, 6, 0):
            arguments = (store, served.url, str(rows), str(count))
            with start_script(HERE / "apply_worker.py", *arguments) as process:
                status = await asyncio.to_thread(process.wait, WAIT_S)
            assert status == (0 if rows == 0 else -9)
    with closing(sqlite3.connect(store)) as connection:
        made = [row[0] for row in connection.execute("SELECT number FROM made ORDER BY place")]
    assert made == list(range(1, count + 1))


async def test_closed_client_raises_closed_error_and_keeps_its_outbox(tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    client = client_of(UNREACHABLE_URL, store)
    with pytest.raises(ClosedError):
        await client.submit(numbered_draft(1))
    async with client:
        pending = await client.submit(numbered_draft(1))
        waiting = [asyncio.ensure_future(one) for one in (pending.outcome(), client.until_live(), client.reached(5))]
        await turns()
        await client.close()
        for one in waiting:
            with pytest.raises(ClosedError):
                await one
    for call in (client.submit(numbered_draft(2)), client.until_settled(), client.refused(), client.start_over()):
        with pytest.raises(ClosedError):
            await call
    with pytest.raises(ClosedError, match="opened only once"):
        await client.__aenter__()
    async with client_of(UNREACHABLE_URL, store) as again:
        assert [one.id for one in again.pending()] == [pending.id]


async def test_store_is_used_by_one_client_and_released_when_opening_is_cancelled(tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    async with client_of(UNREACHABLE_URL, store):
        with pytest.raises(StoreInUseError):
            await client_of(UNREACHABLE_URL, store).__aenter__()
    opening = asyncio.ensure_future(client_of(UNREACHABLE_URL, store).__aenter__())
    await turns(1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with client_of(UNREACHABLE_URL, store):
        pass


# --- flow control -------------------------------------------------------------------------------------------


@pytest.fixture
def small_event_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "READY_EVENTS_MAX", 10)
    monkeypatch.setattr(protocols, "PAGE_EVENTS", 5)


async def fill_event_queue(served: Serving, count: int) -> None:
    other = await served.connected("filler")
    for number in range(count):
        await other.submit(item(1000 + number))


@BOTH_STORES
@pytest.mark.rule("EV-17")
@pytest.mark.usefixtures("small_event_queue")
async def test_client_without_event_handlers_submits_despite_a_full_event_queue(served: Serving) -> None:
    await fill_event_queue(served, 40)
    async with client_of(served.url) as client:
        pending = await client.submit(numbered_draft(1))
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await pending.outcome(), Committed)
            await client.until_live()
            events = client.events()
            numbers = await take(events, 41)
        assert numbers == list(range(1, 42))


@pytest.mark.rule("EV-17")
@pytest.mark.usefixtures("small_event_queue")
async def test_handler_can_wait_for_an_outcome_despite_a_full_event_queue(served: Serving) -> None:
    seen: list[int] = []
    limits = replace(LIMITS, taking_timeout_ms=5)
    await fill_event_queue(served, 40)
    async with client_of(served.url, limits=limits) as client:

        async def submit_answer(event: Event) -> None:
            seen.append(event.committed_id)
            if event.committed_id in (1, 20):
                pending = await client.submit(numbered_draft(event.committed_id))
                assert isinstance(await pending.outcome(), Committed)

        client.on_event(submit_answer)
        await until(lambda: len(seen) == 42)
        assert seen == list(range(1, 43))
        assert await client.set_aside() == []


@BOTH_STORES
@pytest.mark.rule("EV-17")
@pytest.mark.usefixtures("small_event_queue")
async def test_client_with_a_full_event_queue_gets_outcomes_and_all_events(served: Serving, client: Client) -> None:
    seen: list[int] = []
    gate = asyncio.Event()

    async def handle_slowly(event: Event) -> None:
        await gate.wait()
        seen.append(event.committed_id)

    client.on_event(handle_slowly)
    await wait_until_live(client)
    await fill_event_queue(served, 60)
    pending = await client.submit(numbered_draft(1))
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await pending.outcome(), Committed)
    gate.set()
    await until(lambda: len(seen) == 61)
    assert seen == list(range(1, 62))


# --- closing ------------------------------------------------------------------------------------------------


async def test_message_above_the_limit_of_the_client_rejects_no_submission(served: Serving) -> None:
    other = await served.connected("bob")
    await other.submit(item(1, event={"type": "t", "text": "x" * 5000}))
    limits = replace(LIMITS, message_bytes_max=2000)
    async with client_of(served.url, limits=limits) as client:
        client.on_event(print)
        await until(lambda: "message_bytes_max (2000)" in str(client.status().last_error))
        await client.submit(numbered_draft(1))
        assert await client.refused() == []
        assert len(client.pending()) == 1


async def test_message_of_exactly_the_limit_is_received() -> None:
    async def send(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("x" * 2000)
        await socket.send_str("x" * 2001)
        await socket.receive()
        return socket

    application = web.Application()
    application.router.add_get("/v1/events", send)
    async with TestServer(application) as server:
        transport = WebSocketTransport(str(server.make_url("")), replace(LIMITS, message_bytes_max=2000))
        socket = await transport.connect()
        assert await soon(socket.receive()) == "x" * 2000
        with pytest.raises(ProtocolError, match="message_bytes_max"):
            await soon(socket.receive())
        await transport.close()


@pytest.mark.parametrize("kind", ["on_event", "on_status"])
async def test_handler_can_close_the_client(served: Serving, tmp_path: Path, kind: str) -> None:
    store = tmp_path / "client.db"
    async with client_of(served.url, store) as client:

        async def close_client(_: object) -> None:
            await client.close()
            await asyncio.Event().wait()  # until cancelled

        getattr(client, kind)(close_client)
        with suppress(ClosedError):
            await client.submit(numbered_draft(1))
        await until(lambda: client.status().state is ConnectionState.CLOSED)
    async with client_of(served.url, store) as client:  # the first client closed the store
        await soon(client.until_settled())


async def test_cancelled_close_still_closes_the_client(served: Serving, tmp_path: Path) -> None:
    store = tmp_path / "client.db"
    client = client_of(served.url, store)
    await client.__aenter__()
    await wait_until_live(client)
    first = asyncio.ensure_future(client.close())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(client.close(), client.close())
    with pytest.raises(ClosedError):
        await client.submit(numbered_draft(1))
    async with client_of(served.url, store):
        pass


async def test_start_over_cancels_a_handler_that_waits_for_an_outcome(client: Client) -> None:
    outcomes: list[Outcome] = []
    waiting = asyncio.Event()

    async def submit_answer(event: Event) -> None:
        if event.event == numbered_draft(1) and not waiting.is_set():
            # Use the server's epoch, so that the client continues without a history change.
            epoch = client._runtime.protocol.epoch
            client._runtime.protocol._change_history(epoch, 0, "the server has a different log than before")
            pending = await client.submit(numbered_draft(2))
            waiting.set()
            outcomes.append(await pending.outcome())

    client.on_event(submit_answer)
    await client.submit(numbered_draft(1))
    await soon(waiting.wait())
    await soon(client.start_over())
    await soon(client.until_settled())
    assert outcomes == []


@pytest.mark.parametrize("method", ["start_over", "hand_over_set_aside", "reached"])
async def test_handler_that_would_wait_for_its_own_event_gets_an_error(client: Client, method: str) -> None:

    async def wait_for_itself(_: Event) -> None:
        await getattr(client, method)(*([10] if method == "reached" else []))

    client.on_event(wait_for_itself, name="waits")
    await client.submit(numbered_draft(1))
    await until(lambda: client.status().set_aside == 1)
    (aside,) = await client.set_aside()
    assert f"{method} must not be called by an event handler" in aside.error
