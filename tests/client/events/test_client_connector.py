"""A client's connections to servers that stop, are busy, do not answer, or refuse it."""

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli import server_process as processes
from client.events.event_clients import (
    LIMITS,
    UNREACHABLE_URL,
    SilentTransport,
    client_of,
    committed,
    numbered_draft,
    restart_connection,
    take,
    wait_until_live,
    wait_until_settled,
)
from client.events.model_server import frame
from databases import BOTH_STORES
from deadlines import WAIT_S, soon, turns, until
from oncelog.client import (
    Client,
    ClientLimits,
    Committed,
    ConnectionState,
    Draft,
    Refused,
    Status,
)
from server.running_server import api_key, item, serving

# --- connections --------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_offline_submissions_are_sent_when_the_server_is_available(tmp_path: Path, port: int) -> None:
    store = tmp_path / "client.db"
    url = f"http://127.0.0.1:{port}"
    async with client_of(url, store) as client:
        ids = [(await client.submit(numbered_draft(number))).id for number in range(5)]
        await until(lambda: "cannot be reached" in str(client.status().last_error))
        assert client.status().state in (ConnectionState.OFFLINE, ConnectionState.CONNECTING)
        assert client.status().pending == 5
    async with client_of(url, store) as client:
        assert [one.id for one in client.pending()] == ids
        last = await client.submit(numbered_draft(5))
        pending = client.pending()
        assert pending[-1] is last
        async with serving(tmp_path, port=port) as served:
            client.reconnect_now()
            async with asyncio.timeout(WAIT_S):
                found = [await one.outcome() for one in pending]
            assert [one.committed_id for one in found if isinstance(one, Committed)] == [1, 2, 3, 4, 5, 6]
            assert [one["id"] for one in (await served.page("a")).json["events"]] == [*ids, last.id]
            await wait_until_settled(client)
            assert client.status().last_error is None
            assert client.status().pending == 0


@BOTH_STORES
async def test_status_handler_is_called_for_each_change(tmp_path: Path, port: int) -> None:
    reports: list[Status] = []
    client: Client | None = None
    async with serving(tmp_path, port=port) as served:
        await served.commit(item(1), item(2))
        client = client_of(served.url)
        assert client.status().state is ConnectionState.CLOSED
        client.on_status(reports.append)
        client.on_event(lambda _: None, name="takes")
        await client.__aenter__()
        await wait_until_live(client)
        assert client.status().is_connected
        assert await committed(client, numbered_draft(3)) == 3
        await until(lambda: client.status().cursor == 3)
        assert client.status().server_last_committed_id == 3
    await until(lambda: not client.status().is_connected)
    await until(lambda: client.status().last_error is not None)
    await client.close()
    assert client.status().state is ConnectionState.CLOSED
    states = [one.state for one in reports]
    assert ConnectionState.OFFLINE in states[states.index(ConnectionState.LIVE) :]
    assert ConnectionState.LIVE not in states[len(states) - states[::-1].index(ConnectionState.OFFLINE) :]
    assert all(one != other for one, other in pairwise(reports)), "each report differs from the previous one"
    assert any(one.last_error is not None for one in reports)  # a status with the error is reported


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_two_clients_lose_no_events_when_the_server_is_killed_repeatedly(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, str]]] = {"ada": [], "bob": []}
    ids: list[str] = []

    def recorder_of(name: str) -> Any:
        return lambda event: seen[name].append((event.committed_id, event.id))

    with processes.serving(tmp_path) as served:
        async with (
            client_of(served.url, tmp_path / "ada.db", client_id="ada") as ada,
            client_of(served.url, tmp_path / "bob.db", ("a", "b"), client_id="bob") as bob,
        ):
            ada.on_event(recorder_of("ada"), name="takes")
            bob.on_event(recorder_of("bob"), name="takes")
            for enough in (1, 30, 0):
                for number in range(20):
                    ids.append((await ada.submit(numbered_draft(number))).id)
                    ids.append((await bob.submit(numbered_draft(number), ["a", "b"])).id)
                if enough:
                    await until(lambda enough=enough: len(seen["ada"]) > enough)  # type: ignore[misc]
                    await asyncio.to_thread(served.kill)
                    await asyncio.to_thread(served.start)
            await wait_until_settled(ada)
            await wait_until_settled(bob)
            await until(lambda: all(len(one) == len(ids) for one in seen.values()))
    assert seen["ada"] == seen["bob"]
    assert [number for number, _ in seen["ada"]] == list(range(1, len(ids) + 1))
    order = [one for _, one in seen["ada"]]
    assert [one for one in order if one in set(ids[::2])] == ids[::2]
    assert [one for one in order if one in set(ids[1::2])] == ids[1::2]


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_commit_of_the_old_connection_after_the_new_sync_is_received_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(tmp_path) as served,
        client_of(served.url, client_id="ada") as client,
        AsyncExitStack() as at_the_end,
    ):
        other = await served.connected("bob")
        await wait_until_live(client)
        gate = served.hold_commits(monkeypatch)
        at_the_end.callback(gate.open)  # The server waits for its commits when it stops.
        first = await client.submit(numbered_draft(1))
        await soon(gate.reached.wait())
        await restart_connection(client)
        second = await client.submit(numbered_draft(2))
        await wait_until_live(client)
        await other.send("submit_events", {"events": [item(9)]}, 1)
        gate.open()
        await wait_until_settled(client)
        order = [one["id"] for one in (await served.page("a")).json["events"]]
        assert await take(client.events(), 3) == [1, 2, 3]
        assert {first.id, second.id, item(9)["id"]} == set(order)
        assert order.index(first.id) < order.index(second.id)
        assert all(isinstance(one.result, Committed) for one in (first, second))


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_commit_of_the_old_connection_after_a_busy_answer_is_received_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new connection also submits the event. It gets no broadcast, only a `server_busy` answer."""
    async with (
        serving(tmp_path, queue_items_max=2) as served,
        client_of(served.url, client_id="ada") as client,
        AsyncExitStack() as at_the_end,
    ):
        counts = served.server.apis.events_service.counts
        other = await served.connected("bob")
        seen: list[str] = []
        client.on_event(lambda event: seen.append(event.id), name="seen")
        await wait_until_live(client)
        gate = served.hold_commits(monkeypatch)
        at_the_end.callback(gate.open)  # the server waits for its commits when it stops
        first = await client.submit(numbered_draft(1))
        await soon(gate.reached.wait())
        before = counts.frames_received
        second = await client.submit(numbered_draft(2))  # waits for the answer to the first
        client._connector.restart()
        # Connect, sync, and both events in one request.
        await until(lambda: counts.frames_received >= before + 3)
        await other.send("submit_events", {"events": [item(9)]}, 1)
        await until(lambda: served.server.log.queue_length == 2)
        gate.open()
        await wait_until_settled(client)
        assert counts.requests["events", "websocket", "server_busy"] >= 1
        order = [one["id"] for one in (await served.page("a")).json["events"]]
        assert order == [first.id, item(9)["id"], second.id]
        await until(lambda: len(seen) == 3)
        assert seen == order


@BOTH_STORES
@pytest.mark.rule("EV-17")
async def test_clients_that_submit_concurrently_see_the_same_order(tmp_path: Path) -> None:
    seen: list[list[tuple[int, str, str]]] = [[], []]
    async with (
        serving(tmp_path) as served,
        client_of(served.url, client_id="ada") as ada,
        client_of(served.url, client_id="bob") as bob,
    ):
        for client, taken in ((ada, seen[0]), (bob, seen[1])):
            client.on_event(
                lambda event, taken=taken: taken.append((event.committed_id, event.id, event.client_id)),  # type: ignore[misc]
                name="takes",
            )
        await asyncio.gather(
            *(client.submit(numbered_draft(number)) for number in range(60) for client in (ada, bob)),
            *(served.commit(item(100 + number)) for number in range(20)),
        )
        await until(lambda: all(len(one) == 140 for one in seen))
    assert seen[0] == seen[1]
    assert [number for number, _, _ in seen[0]] == list(range(1, 141))


@BOTH_STORES
async def test_events_of_unsubscribed_partitions_advance_the_cursor(client: Client) -> None:
    client.on_event(lambda _: None, name="takes")
    number = await committed(client, numbered_draft(1), ["b"])
    await soon(client.reached(number))


async def test_connection_without_answers_is_closed_after_the_answer_timeout() -> None:
    transport = SilentTransport()
    limits = ClientLimits(answer_timeout_ms=10, pause_ms_min=1, pause_ms_max=2)
    async with client_of(UNREACHABLE_URL, limits=limits, transport=transport) as client:
        client.on_event(print)
        await until(lambda: len(transport.sockets) > 2)
        assert "did not answer within 10 ms" in str(client.status().last_error)
        assert all(one.is_closed for one in transport.sockets[:2])
        await until(lambda: bool(transport.sockets[-1].sent))
        connected = {"client_id": "x", "server_last_committed_id": 0, "epoch": "e"}
        count = len(transport.sockets)
        transport.sockets[-1].frames.put_nowait(frame("connected", connected))
        await until(lambda: len(transport.sockets) > count)
    assert transport.is_closed
    assert all(one.is_closed for one in transport.sockets)


async def test_client_waits_for_retry_after_of_a_busy_server() -> None:
    transport = SilentTransport()
    async with client_of(UNREACHABLE_URL, partitions=(), transport=transport) as client:
        await client.submit(numbered_draft(1), ["b"])
        await until(lambda: bool(transport.sockets) and bool(transport.sockets[0].sent))
        socket = transport.sockets[0]
        connected = {"client_id": "x", "server_last_committed_id": 0, "epoch": "e"}
        socket.frames.put_nowait(frame("connected", connected))

        async def refuse_as_busy(count: int, retry_after_ms: int) -> None:
            await until(lambda: len(socket.sent) == count)
            request = json.loads(socket.sent[-1])
            details = {"code": "server_busy", "message": "later", "details": {"retry_after_ms": retry_after_ms}}
            socket.frames.put_nowait(frame("error", details, request["msg_id"]))

        await refuse_as_busy(2, 20)
        socket.frames.put_nowait(frame("other", {}))
        await refuse_as_busy(3, 600_000)
        await until(lambda: client._runtime.protocol.busy_ms > 0)
        socket.frames.put_nowait(frame("other", {}))  # other messages do not end the pause
        await until(socket.frames.empty)
        await turns()
        assert client._runtime.protocol.busy_ms == 60_000  # the longest pause
        assert len(socket.sent) == 3
        assert client.status().state is ConnectionState.LIVE
        assert len(transport.sockets) == 1


@BOTH_STORES
async def test_outbox_is_sent_in_requests_that_are_small_enough_for_the_server(tmp_path: Path, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    async with client_of(url) as client:
        await client.submit_many([Draft(numbered_draft(number)) for number in range(25)])
        async with serving(tmp_path, port=port, request_events_max=3):
            await wait_until_settled(client)
            assert client.status().refused == 0
            assert await take(client.events(), 25) == list(range(1, 26))


async def test_only_the_event_above_the_frame_limit_is_rejected(tmp_path: Path, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    async with client_of(url) as client:
        drafts = [Draft(numbered_draft(number)) for number in range(6)]
        drafts[3] = Draft({"type": "large", "text": "x" * 500_000})
        pending = await client.submit_many(drafts)
        async with serving(tmp_path, port=port, frame_bytes_max=300_000, body_bytes_max=200_000):
            await wait_until_settled(client)
        found = [one.result for one in pending]
        large = found.pop(3)
        assert isinstance(large, Refused)
        assert large.reason == "too_large"
        assert [one.committed_id for one in found if isinstance(one, Committed)] == [1, 2, 3, 4, 5]


# --- authorization ------------------------------------------------------------------------------------------


async def test_wrong_token_is_reported_without_showing_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "geheim-geheim-geheim"  # noqa: S105
    reports: list[Status] = []
    async with (
        serving(tmp_path, api_keys=True) as served,
        client_of(served.url, token=secret, client_id="laptop") as client,
    ):
        client.on_status(reports.append)
        await until(lambda: client.status().state is ConnectionState.REFUSED)
        assert "auth_failed" in str(client.status().last_error)
        await client.submit(numbered_draft(1))
    assert reports
    assert all(secret not in repr(one) for one in reports)
    assert secret not in caplog.text


async def test_token_function_is_called_for_each_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        key = api_key(served, "laptop", read=["a"], write=["a"])
        attempts = 0

        async def token() -> str | None:
            nonlocal attempts
            attempts += 1
            match attempts:
                case 1:
                    raise ValueError("none yet")
                case 2:
                    return "wrong"
                case 3:
                    raise asyncio.CancelledError
                case _:
                    return key.text

        async with client_of(served.url, token=token, client_id="laptop") as client:
            assert await committed(client, numbered_draft(1)) == 1
            assert attempts == 4
            client._connector.restart()
            await until(lambda: attempts == 5)
            await wait_until_live(client)


async def test_unreadable_partition_is_reported_and_does_not_block_submissions(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        key = api_key(served, "laptop", read=["b"], write=["a"])
        limits = replace(
            LIMITS, refused_pause_ms_min=60_000, refused_pause_ms_max=60_000
        )  # the sync is not repeated during the test
        async with client_of(served.url, token=key.text, client_id="laptop", limits=limits) as client:
            client.on_event(print)
            await until(lambda: client.status().state is ConnectionState.REFUSED)
            assert "forbidden" in str(client.status().last_error)
            pending = await client.submit(numbered_draft(1))
            async with asyncio.timeout(WAIT_S):
                assert isinstance(await pending.outcome(), Committed), "the right to write is separate"


async def test_transport_is_closed_even_if_the_last_save_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = SilentTransport()
    client = client_of(UNREACHABLE_URL, transport=transport)

    async def fail(*_arguments: Any) -> None:
        raise RuntimeError("unexpected")

    with pytest.raises(RuntimeError, match="unexpected"):
        async with client:
            monkeypatch.setattr(client._outbox, "_save", fail)
    assert transport.is_closed
