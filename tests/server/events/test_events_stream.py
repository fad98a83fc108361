"""The Events API over server-sent events, parsed by the rules of the HTML standard."""

import asyncio
import socket
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from databases import BOTH_STORES
from deadlines import soon, until
from oncelog.server import app
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.auth.auth_material import token
from server.running_server import Serving, api_key, item, numbers, serving

STREAM: Final = "/v1/events/stream"


@pytest.mark.rule("EV-16")
async def test_stream_begins_with_a_connected_event(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1), item(2))
        stream = await served.stream("a", since=2)
        assert stream.response.status == 200
        assert stream.response.headers["Content-Type"] == "text/event-stream"
        assert stream.response.headers["Cache-Control"] == "no-store"
        epoch = served.server.log.epoch
        assert await stream.connected() == {
            "client_id": "",
            "actor": "user:developer",
            "server_last_committed_id": 2,
            "epoch": epoch,
        }
        assert stream.retry_ms == 1000
        assert stream.last_event_id == ""  # `connected` must not move the cursor


@BOTH_STORES
@pytest.mark.rule("EV-16", "CO-13")
async def test_stream_sends_stored_events_first_and_then_new_ones(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1), item(2, "b"), item(3, "a", "b"))
        stream = await served.stream("a")
        await stream.connected()
        assert numbers(await stream.events(2)) == [1, 3]
        await served.commit(item(4, "b"))
        await served.commit(item(5, "c", "a"), item(6))
        events = await stream.events(2)
        assert numbers(events) == [5, 6]
        assert events == (await served.page("a", since=3)).json["events"]
        # A stream also delivers events that its author has submitted, because it is not tied to the submitting
        # connection.
        assert await served.commit(item(6), item(7)) == [6, 7]
        assert numbers(await stream.events(1)) == [7]


@BOTH_STORES
@pytest.mark.rule("EV-16")
async def test_last_event_id_resumes_without_gaps_or_repeats(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        found: list[int] = []
        number = 0
        last_event_id = ""
        for _ in range(5):
            await served.commit(item(number := number + 1), item(number := number + 1))
            # A browser reconnects to the same URL, which still contains `since`.
            headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
            stream = await served.stream("a", since=0, headers=headers)
            await stream.connected()
            await served.commit(item(number := number + 1))
            found += numbers(await stream.events(2))
            last_event_id = stream.last_event_id
            stream.close()
        stream = await served.stream("a", headers={"Last-Event-ID": last_event_id})
        await stream.connected()
        found += numbers(await stream.events(number - len(found)))
        assert found == list(range(1, number + 1))


@BOTH_STORES
@pytest.mark.rule("EV-16", "EV-3")
async def test_stream_resumes_across_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        stream = await served.stream("a")
        epoch = (await stream.connected())["epoch"]
        await served.commit(item(1), item(2))
        assert numbers(await stream.events(1)) == [1]
    async with serving(tmp_path) as served:
        resumed = await served.stream("a", epoch=epoch, headers={"Last-Event-ID": stream.last_event_id})
        await resumed.connected()
        assert numbers(await resumed.events(1)) == [2]


@pytest.mark.rule("EV-16")
async def test_idle_stream_sends_heartbeat_comments(tmp_path: Path) -> None:
    async with serving(tmp_path, heartbeat_ms=20) as served:
        stream = await served.stream("a")
        await stream.connected()
        await stream.comment()
        await stream.comment()
        await served.commit(item(1))
        assert numbers(await stream.events(1)) == [1]


@BOTH_STORES
@pytest.mark.rule("CO-40")
async def test_stream_of_another_history_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.commit(item(1))
        for query, headers in (
            ("epoch=another", {}),
            ("since=2", {}),
            ("since=0", {"Last-Event-ID": "2"}),
            (f"epoch={served.server.log.epoch}", {"Last-Event-ID": "2"}),
        ):
            answer = await served.get(f"{STREAM}?partition=a&{query}", headers=headers)
            assert answer.refusal == (409, "history_changed")
            assert answer.error["details"]["epoch"] == served.server.log.epoch


@pytest.mark.rule("CO-33")
async def test_malformed_stream_request_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for query in ("", "partition=a&limit=5", "partition=a&to=5", "partition=a&since=x", "partition=a&x=y"):
            assert (await served.get(f"{STREAM}?{query}")).refusal == (400, "bad_request")
        for resumed in ("x", "-1", "1.5", str(2**53)):
            answer = await served.get(f"{STREAM}?partition=a", headers={"Last-Event-ID": resumed})
            assert answer.refusal == (400, "bad_request")
            assert answer.error["details"] == {"field": "Last-Event-ID"}
        head = await served.request("HEAD", f"{STREAM}?partition=a")
        assert (head.status, head.content_type) == (200, "text/event-stream")
        assert len(served.server.apis.events.streams) == 0


@pytest.mark.rule("CO-22", "EV-11")
async def test_stream_of_an_unreadable_partition_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served:
        assert (await served.get(f"{STREAM}?partition=orders/1")).refusal == (401, "auth_failed")
        served.credential = token()
        answers = [await served.get(f"{STREAM}?partition={one}&since=9") for one in ("secret", "nothing")]
        assert {one.refusal for one in answers} == {(403, "forbidden")}
        assert answers[0].body == answers[1].body


# --- end of a stream -------------------------------------------------------------------------------------


async def read_error(stream: Any) -> Any:
    """Assert that the next event is `error` and the last event of the stream, and return its data."""
    message = await stream.next()
    assert message is not None
    assert message.kind == "error"
    assert await stream.next() is None
    return message.json


@pytest.mark.rule("CO-23")
async def test_stream_ends_when_its_token_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.01)
    settings = {"leeway_ms": 0}
    async with serving(tmp_path, tokens=True, token_settings=settings) as served:
        short = await served.stream("orders/1", credential=token(exp=auth_material.NOW_S + 5))
        long = await served.stream("orders/1", credential=token())
        for stream in (short, long):
            await stream.connected()
        assert isinstance(served.clock, ManualClock)
        served.clock.advance(5000)
        error = await read_error(short)
        assert error["code"] == "auth_failed"
        writer = token(grants={"write": ["*"]})
        await served.submit(item(1, "orders/1"), credential=writer)
        assert numbers(await long.events(1)) == [1]


@pytest.mark.rule("CO-22", "CO-23")
async def test_stream_ends_when_its_key_or_grant_is_revoked(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        keys = [api_key(served, name, ["a", "b"], ["*"]) for name in ("revoked", "changed", "kept")]
        streams = [await served.stream("a", credential=key.text) for key in keys]
        for stream in streams:
            await stream.connected()
        assert served.api_keys is not None
        served.api_keys.revoke(keys[0].key.id)
        path = tmp_path / "keys.json"
        before, after = path.read_text().split('"changed"', 1)
        path.write_text(before + '"changed"' + after.replace('"a"', '"c"', 1))
        served.server.reload()
        for stream in streams[:2]:
            assert (await read_error(stream))["code"] == "auth_failed"
        await served.submit(item(1), credential=keys[2].text)
        assert [one["id"] for one in await streams[2].events(1)] == [item(1)["id"]]
        assert (await served.get(f"{STREAM}?partition=a", credential=keys[0].text)).status == 401
        assert (await served.get(f"{STREAM}?partition=a", credential=keys[1].text)).status == 403


@BOTH_STORES
async def test_stream_ends_when_the_server_stops(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        streams = [await served.stream("a") for _ in range(3)]
        for stream in streams:
            await stream.connected()
        await served.commit(item(1))
        for stream in streams:
            assert numbers(await stream.events(1)) == [1]
        await soon(served.server.stop())
        for stream in streams:
            assert await stream.next() is None  # No error event is sent, so that the browser reconnects automatically.


async def test_stream_is_removed_when_its_reader_disconnects(tmp_path: Path) -> None:
    async with serving(tmp_path, heartbeat_ms=20) as served:
        stream = await served.stream("a")
        await stream.connected()
        assert served.server.apis.count_connections()["sse"] == len(served.server.apis.events.streams) == 1
        stream.close()
        await until(lambda: not len(served.server.apis.events.streams))
        assert served.server.apis.count_connections()["sse"] == 0


@pytest.mark.rule("CO-30")
async def test_stream_above_the_connection_limit_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, connections_max=2) as served:
        streams = [await served.stream("a") for _ in range(2)]
        for stream in streams:
            await stream.connected()
        answer = await served.get(f"{STREAM}?partition=a")
        assert answer.refusal == (503, "server_busy")
        assert answer.headers["Retry-After"] == "1"
        assert (await served.page("a")).status == 200


# --- slow readers ----------------------------------------------------------------------------------------


def large(number: int) -> dict[str, Any]:
    return {**item(number), "event": {"type": "large", "text": "x" * 100_000}}


LONG_HEARTBEAT_MS: Final = 3_600_000


async def slow_stream(served: Serving, heartbeat_ms: int) -> socket.socket:
    """Open a stream and do not read it. The server allows this reader, and no other, two heartbeats to catch up."""
    streams = served.server.apis.events.streams
    auth_gate = streams.auth_gate
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(auth_gate, "limits", replace(auth_gate.limits, heartbeat_ms=heartbeat_ms))
        raw = unread_stream(served)
        await until(lambda: len(streams) == 1)
    return raw


def unread_stream(served: Serving) -> socket.socket:
    """Open a stream and do not read it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", served.port))
    raw.sendall(f"GET {STREAM}?partition=a HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return raw


@BOTH_STORES
@pytest.mark.rule("CO-31")
async def test_slow_reader_is_disconnected_without_delaying_others(tmp_path: Path) -> None:
    async with serving(tmp_path, heartbeat_ms=LONG_HEARTBEAT_MS, subscription_bytes_max=1_000_000) as served:
        with await slow_stream(served, heartbeat_ms=500):
            reader = await served.stream("a")
            await reader.connected()
            await until(lambda: len(served.server.apis.events.streams) == 2)
            for number in range(1, 61):
                await served.commit(large(number))
                assert numbers(await reader.events(1)) == [number]
            await until(lambda: len(served.server.apis.events.streams) == 1)
            assert served.server.counts.slow_readers_closed == 1
            runner = served.server._http.runner
            assert runner is not None
            served_by = runner.server
            assert served_by is not None
            # Only the reader's and the writer's sockets remain: queued bytes must not keep the third one open.
            await until(lambda: len(served_by.connections) == 2)


@BOTH_STORES
@pytest.mark.rule("CO-31")
async def test_reader_that_pauses_misses_no_event(tmp_path: Path) -> None:
    async with serving(tmp_path, subscription_bytes_max=500_000) as served:
        stream = await served.stream("a")
        await stream.connected()
        for number in range(1, 101, 5):
            await served.commit(*(large(one) for one in range(number, number + 5)))
        assert numbers(await stream.events(100)) == list(range(1, 101))


@BOTH_STORES
async def test_server_stops_with_a_reader_that_does_not_read(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        with unread_stream(served):
            await until(lambda: len(served.server.apis.events.streams) == 1)
            await asyncio.gather(*(served.commit(large(number)) for number in range(1, 61)))
            await soon(served.server.stop())
