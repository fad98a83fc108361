"""Clients of real servers: what they promise holds across everything that can happen to either side."""

import asyncio
import json
import logging
import sqlite3
from contextlib import AsyncExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from cli import served as processes
from client import clients
from client.clients import LIMITS, NOWHERE, WAIT_S, SilentTransport, client_of, counted, run, take, turns, until
from client.model_server import frame
from crash.processes import started
from databases import BOTH_STORES
from doors.serving import Serving, api_key, item, serving
from oncelog.cli import app
from oncelog.client import (
    Client,
    ClientLimits,
    Committed,
    Draft,
    Event,
    HistoryChange,
    Outcome,
    Rejected,
    State,
    Status,
)
from oncelog.client import client as client_module
from oncelog.client import protocol as protocols
from oncelog.client import store as store_module
from oncelog.errors import (
    CanonicalError,
    ClosedError,
    IdReusedError,
    LimitExceededError,
    SettingsError,
    StoreInUseError,
    StoreUnavailableError,
)

HERE = Path(__file__).parent


async def outcome(client: Client, *arguments: Any, **options: Any) -> Outcome:
    async with asyncio.timeout(WAIT_S):
        return await (await client.submit(*arguments, **options)).outcome()


async def committed(client: Client, *arguments: Any, **options: Any) -> int:
    found = await outcome(client, *arguments, **options)
    assert isinstance(found, Committed), found
    return found.committed_id


async def live(client: Client) -> None:
    async with asyncio.timeout(WAIT_S):
        await client.until_live()


async def settled(client: Client) -> None:
    async with asyncio.timeout(WAIT_S):
        await client.until_settled()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


# --- submitting --------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_a_submission_has_its_outcome_and_comes_back_as_an_event(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url, client_id="laptop") as client:
            assert client.client_id == "laptop"
            pending = await client.submit({"type": "placed", "order": 17})
            async with asyncio.timeout(WAIT_S):
                found = await pending.outcome()
            assert found == pending.result
            assert isinstance(found, Committed)
            async with asyncio.timeout(WAIT_S):
                event = await anext(client.events())
            assert event == Event(
                pending.id, "laptop", ("a",), 1, {"type": "placed", "order": 17}, found.status_updated_at
            )
            assert client.pending() == []
            (shown,) = (await served.page("a")).json["events"]
            assert shown["id"] == pending.id

    run(main())


@BOTH_STORES
def test_events_of_any_shape_come_back_as_they_were(tmp_path: Path) -> None:
    deep: Any = {"type": "deep"}
    for _ in range(500):
        deep = {"type": "deep", "in": deep}
    shapes: list[Any] = [
        deep,
        {"type": "text", "text": '\0 \u2028 \U0001f600 é\\"</script>', "": [None, True, []]},
        {"type": "numbers", "numbers": [0, -1, 1.5, 1e300, 5e-324, 2**53 - 1]},
        {"type": "long", "text": "x" * 200_000},
    ]

    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url) as own, client_of(served.url) as other:
            for shape in shapes:
                assert await committed(own, shape)
            for client in (own, other):
                events = client.events()
                async with asyncio.timeout(WAIT_S):
                    assert [(await anext(events)).event for _ in shapes] == shapes

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_the_same_id_is_one_event_with_one_outcome(tmp_path: Path) -> None:
    async def main() -> None:
        one = UUID(int=7)
        async with serving(tmp_path) as served, client_of(served.url) as client:
            first, second = await asyncio.gather(
                client.submit(counted(1), id=one), client.submit(counted(1), id=str(one).upper())
            )
            assert first is second
            number = await committed(client, counted(1), id=one)
            assert await committed(client, counted(1), id=one) == number == 1
            assert await committed(client, counted(2)) == 2
            assert await take(client.events(), 2) == [1, 2]
            found = await outcome(client, counted(3), id=one)
            assert isinstance(found, Rejected)
            assert found.reason == "validation_failed"
            (rejection,) = await client.rejected()
            assert (rejection.id, rejection.event) == (str(one), counted(3))

    run(main())


def test_another_event_under_an_id_that_waits_is_refused() -> None:
    async def main() -> None:
        one = UUID(int=7)
        async with client_of(NOWHERE) as client:
            await client.submit(counted(1), id=one)
            with pytest.raises(IdReusedError, match=str(one)):
                await client.submit(counted(2), id=one)
            with pytest.raises(IdReusedError):
                await client.submit(counted(1), id=one, expected_committed_id=3)
            with pytest.raises(IdReusedError):
                await client.submit_many([Draft(counted(3)), Draft(counted(4), id=one)])
            other = UUID(int=8)
            with pytest.raises(IdReusedError):
                await client.submit_many([Draft(counted(5), id=other), Draft(counted(6), id=other)])
            assert len(client.pending()) == 1, "all or none"
            first, again = await client.submit_many([Draft(counted(5), id=other), Draft(counted(5), id=other)])
            assert first is again

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_what_was_rejected_is_kept_until_the_application_has_seen_to_it(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        async with serving(tmp_path, api_keys=True) as served:
            key = api_key(served, "laptop", read=["a"], write=["a"])
            async with client_of(served.url, store, client_id="laptop", token=key.text) as client:
                forbidden = await outcome(client, counted(1), ["b"])
                assert isinstance(forbidden, Rejected)
                assert forbidden.reason == "forbidden"
                stale = await outcome(client, counted(2), expected_committed_id=99)
                assert isinstance(stale, Rejected)
                assert stale.errors[0].current_committed_id == 0
                assert await committed(client, counted(3)) == 1
                assert client.status().rejected == 2
            async with client_of(served.url, store, client_id="laptop", token=key.text) as client:
                assert client.status().rejected == 2
                first, second = await client.rejected()
                assert (first.outcome, first.event, first.partitions) == (forbidden, counted(1), ("b",))
                await client.forget_rejected(first.id)
                assert [one.id for one in await client.rejected()] == [second.id]
                assert client.status().rejected == 1
                await client.forget_rejected()  # none
                assert client.status().rejected
                await client.forget_all_rejected()
                assert client.status().rejected == 0

    run(main())


@pytest.mark.parametrize(
    ("arguments", "options", "where"),
    [
        (("no event",), {}, r"\$\.event"),
        (({},), {}, r"\$\.event\.type"),
        (({"type": ""},), {}, r"\$\.event\.type"),
        (({"type": 7},), {}, r"\$\.event\.type"),
        (({"type": "t", "x": float("nan")},), {}, r"\$\.event\.x"),
        (({"type": "t", "x": [2**60]},), {}, r"\$\.event\.x\[0\]"),
        (({"type": "t", "x": "\ud800"},), {}, r"\$\.event\.x"),
        (({"type": "t", "x": object()},), {}, r"\$\.event\.x"),
        (({"type": "t"}, []), {}, r"\$\.partitions"),
        (({"type": "t"}, [""]), {}, r"\$\.partitions"),
        (({"type": "t"}, "orders"), {}, r"\$\.partitions"),
        (({"type": "t"}, ["\ud800"]), {}, r"\$\.partitions"),
        (({"type": "t"}, [f"p{number}" for number in range(65)]), {}, r"\$\.partitions"),
        (({"type": "t"},), {"id": "7"}, r"\$\.id"),
        (({"type": "t"},), {"expected_committed_id": -1}, r"\$\.expected_committed_id"),
        (({"type": "t"},), {"expected_committed_id": 2**70}, r"\$\.expected_committed_id"),
        (({"type": "t"},), {"expected_committed_id": "7"}, r"\$\.expected_committed_id"),
        (({"type": "t"},), {"expected_committed_id": True}, r"\$\.expected_committed_id"),
    ],
)
def test_what_is_no_event_is_refused_with_the_field_and_hurts_nobody(
    arguments: tuple[Any, ...], options: dict[str, Any], where: str
) -> None:
    async def main() -> None:
        async with client_of(NOWHERE) as client:
            with pytest.raises(CanonicalError, match=where):
                await client.submit(*arguments, **options)
            assert client.pending() == []
            await client.submit(counted(1))

    run(main())


def test_partitions_must_be_given_where_it_is_not_clear_which() -> None:
    async def main() -> None:
        for partitions in ((), ("a", "b")):
            async with client_of(NOWHERE, partitions=partitions) as client:
                with pytest.raises(ValueError, match="partitions must be given"):
                    await client.submit(counted(1))
                await client.submit(counted(1), ["c"])

    run(main())


def test_settings_that_cannot_be_are_refused() -> None:
    for url in ("", "localhost:7171", "ftp://host", "http://", "http://host:0", "http://host:x", "http://host/?a=1"):
        with pytest.raises(SettingsError, match="url must be"):
            client_of(url)
    with pytest.raises(SettingsError) as caught:
        client_of("http://ada:geheim@host:1")
    assert "geheim" not in str(caught.value)
    with pytest.raises(SettingsError, match="partitions must be several texts"):
        client_of(NOWHERE, partitions="orders")
    with pytest.raises(SettingsError, match="pause_ms_min"):
        ClientLimits(pause_ms_min=0)
    with pytest.raises(SettingsError, match="pause_ms_max"):
        ClientLimits(pause_ms_min=10, pause_ms_max=9)


def test_limits_of_the_outbox_and_of_an_event() -> None:
    async def main() -> None:
        limits = ClientLimits(outbox_events_max=2, body_bytes_max=100, pause_ms_min=1)
        async with client_of(NOWHERE, limits=limits) as client:
            with pytest.raises(CanonicalError, match=r"at most 100 bytes \(body_bytes_max\)"):
                await client.submit({"type": "t", "x": "x" * 100})
            with pytest.raises(LimitExceededError, match="outbox_events_max is 2"):
                await client.submit_many([Draft(counted(number)) for number in range(3)])
            await client.submit(counted(1), id=UUID(int=1))
            await client.submit(counted(2))
            with pytest.raises(LimitExceededError):
                await client.submit(counted(3))
            await client.submit(counted(1), id=UUID(int=1))
            assert len(client.pending()) == 2

    run(main())


def test_whoever_submits_the_same_while_the_store_fails_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STORE_PAUSE_S", 0.001)
    write = store_module.ClientStore.write_outbox
    failures = iter(range(1))

    def fails_once(*arguments: Any) -> None:
        if next(failures, None) is not None:
            raise StoreUnavailableError("the disk is full")
        write(*arguments)

    async def main() -> None:
        async with client_of(NOWHERE) as client:
            monkeypatch.setattr(store_module.ClientStore, "write_outbox", fails_once)
            first = asyncio.ensure_future(client.submit(counted(1), id=UUID(int=1)))
            await turns(3)  # the first is being written
            second = asyncio.ensure_future(client.submit(counted(1), id=UUID(int=1)))
            for one in (first, second):
                with pytest.raises(StoreUnavailableError, match="full"):
                    await one
            assert client.pending() == []
            await client.submit(counted(1), id=UUID(int=1))
            assert len(client.pending()) == 1

    run(main())


# --- the server comes and goes --------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_what_is_submitted_without_a_server_is_sent_when_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        async with serving(tmp_path) as served:
            url = served.url
        async with client_of(url, store) as client:
            ids = [(await client.submit(counted(number))).id for number in range(5)]
            await until(lambda: "cannot be reached" in str(client.status().last_error))
            assert client.status().state in (State.OFFLINE, State.CONNECTING)
            assert client.status().pending == 5
        async with client_of(url, store) as client:
            assert [one.id for one in client.pending()] == ids
            last = await client.submit(counted(5))
            pending = client.pending()
            assert pending[-1] is last
            async with serving(tmp_path, port=port_of(url)) as served:
                client.reconnect_now()
                async with asyncio.timeout(WAIT_S):
                    found = [await one.outcome() for one in pending]
                assert [one.committed_id for one in found if isinstance(one, Committed)] == [1, 2, 3, 4, 5, 6]
                assert [one["id"] for one in (await served.page("a")).json["events"]] == [*ids, last.id]
                await settled(client)
                assert client.status().last_error is None
                assert client.status().pending == 0

    run(main())


@BOTH_STORES
def test_how_it_stands_is_told_as_it_changes(tmp_path: Path) -> None:
    async def main() -> None:
        told: list[Status] = []
        client: Client | None = None
        async with serving(tmp_path) as served:
            await served.commit(item(1), item(2))
            client = client_of(served.url)
            assert client.status().state is State.CLOSED
            client.on_status(told.append)
            client.on_event(lambda _: None, name="takes")
            await client.__aenter__()
            await live(client)
            assert client.status().is_connected
            assert await committed(client, counted(3)) == 3
            await until(lambda: client.status().cursor == 3)
            assert client.status().server_last_committed_id == 3
        await until(lambda: not client.status().is_connected)
        await until(lambda: client.status().last_error is not None)
        await client.close()
        assert client.status().state is State.CLOSED
        states = [one.state for one in told]
        assert State.OFFLINE in states[states.index(State.LIVE) :]
        assert State.LIVE not in states[len(states) - states[::-1].index(State.OFFLINE) :]
        assert all(one != other for one, other in pairwise(told)), "it is told when it changes, and not else"
        assert any(one.last_error is not None for one in told)  # the next attempt, which it may be in, has none yet

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_a_server_killed_again_and_again_loses_nothing_for_two_clients(tmp_path: Path) -> None:
    async def main(served: processes.Served) -> None:
        seen: dict[str, list[tuple[int, str]]] = {"ada": [], "bob": []}
        ids: list[str] = []

        def taker(name: str) -> Any:
            return lambda event: seen[name].append((event.committed_id, event.id))

        async with (
            client_of(served.url, tmp_path / "ada.db", client_id="ada") as ada,
            client_of(served.url, tmp_path / "bob.db", ("a", "b"), client_id="bob") as bob,
        ):
            ada.on_event(taker("ada"), name="takes")
            bob.on_event(taker("bob"), name="takes")
            for enough in (1, 30, 0):
                for number in range(20):
                    ids.append((await ada.submit(counted(number))).id)
                    ids.append((await bob.submit(counted(number), ["a", "b"])).id)
                if enough:
                    await until(lambda enough=enough: len(seen["ada"]) > enough)  # type: ignore[misc]
                    served.kill()
                    served.start()
            await settled(ada)
            await settled(bob)
            await until(lambda: all(len(one) == len(ids) for one in seen.values()))
        assert seen["ada"] == seen["bob"]
        assert [number for number, _ in seen["ada"]] == list(range(1, len(ids) + 1))
        order = [one for _, one in seen["ada"]]
        assert [one for one in order if one in set(ids[::2])] == ids[::2]
        assert [one for one in order if one in set(ids[1::2])] == ids[1::2]

    with processes.serving(tmp_path) as served:
        run(main(served))


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_a_commit_that_comes_after_the_next_connection_has_synced_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path) as served,
            client_of(served.url, client_id="ada") as client,
            AsyncExitStack() as at_the_end,
        ):
            other = await served.connected("bob")
            await live(client)
            gate = served.hold_commits(monkeypatch)
            at_the_end.callback(gate.open)  # a server waits for its commits
            first = await client.submit(counted(1))
            await asyncio.wait_for(gate.reached.wait(), WAIT_S)
            client._connecting.restart()
            await until(lambda: client.status().state is not State.LIVE)
            second = await client.submit(counted(2))
            await live(client)
            await other.send("submit_events", {"events": [item(9)]}, 1)
            gate.open()
            await settled(client)
            order = [one["id"] for one in (await served.page("a")).json["events"]]
            assert await take(client.events(), 3) == [1, 2, 3]
            assert {first.id, second.id, item(9)["id"]} == set(order)
            assert order.index(first.id) < order.index(second.id)
            assert all(isinstance(one.result, Committed) for one in (first, second))

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_a_commit_of_the_old_connection_behind_a_busy_answer_to_the_next_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is hidden from the next connection, which has it in flight too, and is told that the server is busy."""

    async def main() -> None:
        async with (
            serving(tmp_path, queue_items_max=2) as served,
            client_of(served.url, client_id="ada") as client,
            AsyncExitStack() as at_the_end,
        ):
            counts = served.server._door.counts
            other = await served.connected("bob")
            seen: list[str] = []
            client.on_event(lambda event: seen.append(event.id), name="seen")
            await live(client)
            gate = served.hold_commits(monkeypatch)
            at_the_end.callback(gate.open)  # a server waits for its commits
            first = await client.submit(counted(1))
            await asyncio.wait_for(gate.reached.wait(), WAIT_S)
            before = counts.frames_received
            second = await client.submit(counted(2))  # it waits for the answer to the first
            client._connecting.restart()
            # Connect, sync, and both events in one request.
            await until(lambda: counts.frames_received >= before + 3)
            await other.send("submit_events", {"events": [item(9)]}, 1)
            gate.open()
            await settled(client)
            assert counts.requests["events", "websocket", "server_busy"] >= 1
            order = [one["id"] for one in (await served.page("a")).json["events"]]
            assert order == [first.id, item(9)["id"], second.id]
            await until(lambda: len(seen) == 3)
            assert seen == order

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_two_clients_that_submit_at_once_see_one_order(tmp_path: Path) -> None:
    async def main() -> None:
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
                *(client.submit(counted(number)) for number in range(60) for client in (ada, bob)),
                *(served.commit(item(100 + number)) for number in range(20)),
            )
            await until(lambda: all(len(one) == 140 for one in seen))
        assert seen[0] == seen[1]
        assert [number for number, _, _ in seen[0]] == list(range(1, 141))

    run(main())


@BOTH_STORES
def test_what_is_not_of_its_partitions_moves_the_cursor_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url) as client:
            client.on_event(lambda _: None, name="takes")
            number = await committed(client, counted(1), ["b"])
            async with asyncio.timeout(WAIT_S):
                await client.reached(number)

    run(main())


def test_a_server_that_gives_no_answer_is_given_up() -> None:
    async def main() -> None:
        transport = SilentTransport()
        limits = ClientLimits(answer_timeout_ms=10, pause_ms_min=1, pause_ms_max=2)
        async with client_of(NOWHERE, limits=limits, transport=transport) as client:
            client.on_event(print)
            await until(lambda: len(transport.sockets) > 2)
            assert "no answer in 10 ms" in str(client.status().last_error)
            assert all(one.is_closed for one in transport.sockets[:2])
            await until(lambda: bool(transport.sockets[-1].sent))
            connected = {"client_id": "x", "server_last_committed_id": 0, "epoch": "e"}
            count = len(transport.sockets)
            transport.sockets[-1].frames.put_nowait(frame("connected", connected))
            await until(lambda: len(transport.sockets) > count)
        assert transport.is_closed
        assert all(one.is_closed for one in transport.sockets)

    run(main())


def test_a_busy_server_is_given_the_time_it_asks_for() -> None:
    async def main() -> None:
        transport = SilentTransport()
        async with client_of(NOWHERE, partitions=(), transport=transport) as client:
            await client.submit(counted(1), ["b"])
            await until(lambda: bool(transport.sockets) and bool(transport.sockets[0].sent))
            socket = transport.sockets[0]
            connected = {"client_id": "x", "server_last_committed_id": 0, "epoch": "e"}
            socket.frames.put_nowait(frame("connected", connected))

            async def busy(count: int, retry_after_ms: int) -> None:
                await until(lambda: len(socket.sent) == count)
                asked = json.loads(socket.sent[-1])
                details = {"code": "server_busy", "message": "later", "details": {"retry_after_ms": retry_after_ms}}
                socket.frames.put_nowait(frame("error", details, asked["msg_id"]))

            await busy(2, 20)
            await asyncio.sleep(0.01)
            socket.frames.put_nowait(frame("other", {}))  # what comes meanwhile changes nothing
            await busy(3, 60_000)
            await asyncio.sleep(0.04)
            assert len(socket.sent) == 3
            assert client.status().state is State.LIVE
            assert len(transport.sockets) == 1

    run(main())


@BOTH_STORES
def test_events_that_the_server_takes_only_a_few_of_at_a_time_all_go_through(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            url = served.url
        async with client_of(url) as client:
            await client.submit_many([Draft(counted(number)) for number in range(25)])
            async with serving(tmp_path, port=port_of(url), request_events_max=3):
                await settled(client)
                assert client.status().rejected == 0
                assert await take(client.events(), 25) == list(range(1, 26))

    run(main())


def test_an_event_that_is_too_large_for_the_server_is_rejected_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            url = served.url
        async with client_of(url) as client:
            drafts = [Draft(counted(number)) for number in range(6)]
            drafts[3] = Draft({"type": "large", "text": "x" * 500_000})
            pending = await client.submit_many(drafts)
            async with serving(tmp_path, port=port_of(url), frame_bytes_max=300_000, body_bytes_max=200_000):
                await settled(client)
            found = [one.result for one in pending]
            large = found.pop(3)
            assert isinstance(large, Rejected)
            assert large.reason == "too_large"
            assert [one.committed_id for one in found if isinstance(one, Committed)] == [1, 2, 3, 4, 5]

    run(main())


# --- who may ----------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_told_and_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "geheim-geheim-geheim"  # noqa: S105

    async def main() -> None:
        told: list[Status] = []
        async with (
            serving(tmp_path, api_keys=True) as served,
            client_of(served.url, token=secret, client_id="laptop") as client,
        ):
            client.on_status(told.append)
            await until(lambda: client.status().state is State.REFUSED)
            assert "auth_failed" in str(client.status().last_error)
            await client.submit(counted(1))
        assert told
        assert all(secret not in repr(one) for one in told)

    run(main())
    assert secret not in caplog.text


def test_the_token_is_asked_for_anew_for_each_connection(tmp_path: Path) -> None:
    async def main() -> None:
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
                assert await committed(client, counted(1)) == 1
                assert attempts == 4
                client._connecting.restart()
                await until(lambda: attempts == 5)
                await live(client)

    run(main())


def test_a_partition_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, api_keys=True) as served:
            key = api_key(served, "laptop", read=["b"], write=["a"])
            async with client_of(served.url, token=key.text, client_id="laptop") as client:
                client.on_event(print)
                await until(lambda: client.status().state is State.REFUSED)
                assert "forbidden" in str(client.status().last_error)
                pending = await client.submit(counted(1))
                async with asyncio.timeout(WAIT_S):
                    assert isinstance(await pending.outcome(), Committed), "to write is another right"

    run(main())


# --- another history ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known_before", [True, False])
def test_after_a_restored_backup_nothing_is_handed_over_until_the_application_says_so(
    tmp_path: Path, is_known_before: bool
) -> None:
    def rows() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "client.db")) as connection:
            return [row[0] for row in connection.execute("SELECT number FROM made ORDER BY number")]

    def apply(connection: sqlite3.Connection, events: Any) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS made (number INTEGER)")
        connection.executemany("INSERT INTO made VALUES (?)", [(one.committed_id,) for one in events])

    def reset(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM made WHERE number > 2")

    async def main() -> None:
        changes: list[HistoryChange] = []
        log, backup = str(tmp_path / "events.db"), str(tmp_path / "backup.db")
        client = client_of("http://127.0.0.1:9", tmp_path / "client.db", apply=apply)
        async with serving(tmp_path) as served:
            url = served.url
            await served.commit(item(1), item(2))
            await command("backup", log, backup)
            await served.commit(item(3), item(4))
            client = client_of(url, tmp_path / "client.db", apply=apply)
            await client.__aenter__()
            async with asyncio.timeout(WAIT_S):
                await client.reached(4)
            if not is_known_before:
                await client.close()
        await command("restore", "--force", backup, log)
        async with serving(tmp_path, port=port_of(url)) as served:
            await served.commit(item(5))
            if not is_known_before:
                client = client_of(url, tmp_path / "client.db", apply=apply)
                await client.__aenter__()
            client.on_history_changed(changes.append)
            await until(lambda: client.status().state is State.HISTORY_CHANGED)
            pending = await client.submit(counted(6))
            client.reconnect_now()
            await until(lambda: bool(changes))
            await until(lambda: client.status().state is State.HISTORY_CHANGED)
            assert rows() == [1, 2, 3, 4]
            change = client.history_change
            assert change is not None
            # One that has been there all the time may come back before the server has its third event.
            assert (change.cursor, change.server_last_committed_id in (3, 3 - is_known_before)) == (4, True)
            assert change.epoch != change.known_epoch
            await client.start_over(since=2, reset=reset)
            async with asyncio.timeout(WAIT_S):
                assert isinstance(await pending.outcome(), Committed)
                await client.reached(4)
            assert client.history_change is None
            assert rows() == [1, 2, 3, 4]
            await client.close()
        async with serving(tmp_path, port=port_of(url)), client_of(url, tmp_path / "client.db", apply=apply) as client:
            await live(client)
            assert client.history_change is None, "the new epoch is kept"

    run(main())


async def command(*arguments: str) -> None:
    done = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    assert done.exit_code == 0, done.output


@BOTH_STORES
def test_starting_over_hands_everything_over_again(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main())


# --- crashes and ends -----------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("EV-17")
def test_an_application_killed_before_the_cursor_is_saved_makes_of_each_event_one_row(tmp_path: Path) -> None:
    count = 20

    async def main(served: Serving) -> None:
        store = str(tmp_path / "client.db")
        for rows in (1, 5, 6, 0):
            arguments = (store, served.url, str(rows), str(count))
            with started(str(HERE / "apply_worker.py"), *arguments) as process:
                status = await asyncio.to_thread(process.wait, clients.RUN_S)
            assert status == (0 if rows == 0 else -9)
        with closing(sqlite3.connect(store)) as connection:
            made = [row[0] for row in connection.execute("SELECT number FROM made ORDER BY place")]
        assert made == list(range(1, count + 1))

    async def whole() -> None:
        async with serving(tmp_path) as served:
            await served.commit(*(item(number) for number in range(1, count + 1)))
            await main(served)

    run(whole())


def test_a_client_that_is_closed_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        client = client_of(NOWHERE, store)
        with pytest.raises(ClosedError):
            await client.submit(counted(1))
        async with client:
            pending = await client.submit(counted(1))
            waiting = [
                asyncio.ensure_future(one) for one in (pending.outcome(), client.until_live(), client.reached(5))
            ]
            await turns()
            await client.close()
            for one in waiting:
                with pytest.raises(ClosedError):
                    await one
        for call in (client.submit(counted(2)), client.until_settled(), client.rejected(), client.start_over()):
            with pytest.raises(ClosedError):
                await call
        with pytest.raises(ClosedError, match="opened once"):
            await client.__aenter__()
        async with client_of(NOWHERE, store) as again:
            assert [one.id for one in again.pending()] == [pending.id]

    run(main())


def test_two_clients_on_one_file_are_refused_and_giving_up_lets_go_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "client.db"
        async with client_of(NOWHERE, store):
            with pytest.raises(StoreInUseError):
                await client_of(NOWHERE, store).__aenter__()
        opening = asyncio.ensure_future(client_of(NOWHERE, store).__aenter__())
        await turns(1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        async with client_of(NOWHERE, store):
            pass

    run(main())


# --- too much at once ----------------------------------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "READY_EVENTS_MAX", 10)
    monkeypatch.setattr(protocols, "PAGE_EVENTS", 5)


async def fill_up(served: Serving, count: int) -> None:
    other = await served.connected("filler")
    for number in range(count):
        await other.submit(item(1000 + number))


@BOTH_STORES
@pytest.mark.rule("EV-17")
@pytest.mark.usefixtures("little_room")
def test_who_takes_no_events_submits_however_many_there_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            await fill_up(served, 40)
            async with client_of(served.url) as client:
                pending = await client.submit(counted(1))
                async with asyncio.timeout(WAIT_S):
                    assert isinstance(await pending.outcome(), Committed)
                    await client.until_live()
                    events = client.events()
                    numbers = await take(events, 41)
                assert numbers == list(range(1, 42))

    run(main())


@pytest.mark.rule("EV-17")
@pytest.mark.usefixtures("little_room")
def test_a_handler_may_wait_for_its_own_outcome_however_many_events_there_are(tmp_path: Path) -> None:
    async def main() -> None:
        seen: list[int] = []
        limits = replace(LIMITS, taking_timeout_ms=5)
        async with serving(tmp_path) as served:
            await fill_up(served, 40)
            async with client_of(served.url, limits=limits) as client:

                async def answer(event: Event) -> None:
                    seen.append(event.committed_id)
                    if event.committed_id in (1, 20):
                        pending = await client.submit(counted(event.committed_id))
                        assert isinstance(await pending.outcome(), Committed)

                client.on_event(answer)
                await until(lambda: len(seen) == 42)
                assert seen == list(range(1, 43))
                assert await client.set_aside() == []

    run(main())


@BOTH_STORES
@pytest.mark.rule("EV-17")
@pytest.mark.usefixtures("little_room")
def test_who_is_flooded_while_it_follows_still_gets_its_outcomes_and_misses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        seen: list[int] = []
        gate = asyncio.Event()
        async with serving(tmp_path) as served, client_of(served.url) as client:

            async def slow(event: Event) -> None:
                await gate.wait()
                seen.append(event.committed_id)

            client.on_event(slow)
            await live(client)
            await fill_up(served, 60)
            pending = await client.submit(counted(1))
            async with asyncio.timeout(WAIT_S):
                assert isinstance(await pending.outcome(), Committed)
            gate.set()
            await until(lambda: len(seen) == 61)
            assert seen == list(range(1, 62))

    run(main())


# --- the end, at bad moments ---------------------------------------------------------------------------------------


def test_a_message_that_is_too_large_for_us_is_not_taken_for_the_servers_word_on_ours(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            other = await served.connected("bob")
            await other.submit(item(1, event={"type": "t", "text": "x" * 5000}))
            limits = replace(LIMITS, message_bytes_max=2000)
            async with client_of(served.url, limits=limits) as client:
                client.on_event(print)
                await until(lambda: "message_bytes_max (2000)" in str(client.status().last_error))
                await client.submit(counted(1))
                assert await client.rejected() == []
                assert len(client.pending()) == 1

    run(main())


@pytest.mark.parametrize("kind", ["on_event", "on_status"])
def test_a_handler_may_close_the_client(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            store = tmp_path / "client.db"
            async with client_of(served.url, store) as client:

                async def closes(_: object) -> None:
                    await client.close()
                    await asyncio.Event().wait()  # until it is cancelled

                getattr(client, kind)(closes)
                with suppress(ClosedError):
                    await client.submit(counted(1))
                await until(lambda: client.status().state is State.CLOSED)
            async with client_of(served.url, store) as client:  # the file has been let go of
                async with asyncio.timeout(WAIT_S):
                    await client.until_settled()

    run(main())


def test_closing_that_is_cancelled_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            store = tmp_path / "client.db"
            client = client_of(served.url, store)
            await client.__aenter__()
            await live(client)
            first = asyncio.ensure_future(client.close())
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(client.close(), client.close())
            with pytest.raises(ClosedError):
                await client.submit(counted(1))
            async with client_of(served.url, store):
                pass

    run(main())


def test_starting_over_does_not_wait_for_a_handler_that_waits_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        outcomes: list[Outcome] = []
        waiting = asyncio.Event()
        async with serving(tmp_path) as served, client_of(served.url) as client:

            async def answers(event: Event) -> None:
                if event.event == counted(1) and not waiting.is_set():
                    # Its epoch is the one that the server has, so that the client goes on by itself afterwards.
                    epoch = client._protocol.epoch
                    client._protocol._change_history(epoch, 0, "the log on the server is another one than before")
                    pending = await client.submit(counted(2))
                    waiting.set()
                    outcomes.append(await pending.outcome())

            client.on_event(answers)
            await client.submit(counted(1))
            await asyncio.wait_for(waiting.wait(), WAIT_S)
            async with asyncio.timeout(WAIT_S):
                await client.start_over()
                await client.until_settled()
            assert outcomes == []

    run(main())


@pytest.mark.parametrize("method", ["start_over", "hand_over_set_aside", "reached"])
def test_a_handler_that_would_wait_for_itself_is_told(tmp_path: Path, method: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, client_of(served.url) as client:

            async def waits(_: Event) -> None:
                await getattr(client, method)(*([10] if method == "reached" else []))

            client.on_event(waits, name="waits")
            await client.submit(counted(1))
            await until(lambda: client.status().set_aside == 1)
            (aside,) = await client.set_aside()
            assert f"{method} must not be called by a handler" in aside.error

    run(main())
