"""The WebSocket of the Events API with real sockets, and with a server process for memory measurements."""

import asyncio
import itertools
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import WSMsgType
from msgspec.structs import replace

from cli import server_process as processes
from crash.store_history import say
from databases import BOTH_STORES, is_postgres
from deadlines import soon, until
from oncelog.server import app
from oncelog.testing.clock import ManualClock
from server.auth.auth_material import NOW_MS, token
from server.malformed_frames import malformed_frames
from server.running_server import EventStream, SocketClient, api_key, item, numbers, serving

MALFORMED_FRAMES = 20_000
"""Number of frames with --soak. Without --soak, a tenth of it."""
CONNECTIONS = 8
CONNECT_TIMEOUT_MS = 20
GROWTH_BYTES_MAX = 24 * 2**20
"""Allowance for caches and fragmentation. Only large leaks exceed it: a soak run sends about 10 MB of frames."""


@BOTH_STORES
@pytest.mark.rule("EV-1", "EV-3", "EV-4", "EV-14")
async def test_two_clients_see_the_same_order_and_a_restart_keeps_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ada, bob = await served.connected("ada"), await served.connected("bob")
        await ada.sync("a")
        await bob.sync("a")
        assert numbers(await ada.submit(item(1), item(2))) == [1, 2]
        assert [(await bob.receive())["payload"]["committed_id"] for _ in range(2)] == [1, 2]
        await served.commit(item(3))
        for client in (ada, bob):
            message = await client.receive()
            assert (message["type"], message["payload"]["committed_id"]) == ("event_broadcast", 3)
        assert numbers(await bob.submit(item(1))) == [1]

    async with serving(tmp_path) as served:
        ada = await served.connected("ada")
        assert numbers(await ada.submit(item(1), item(4))) == [1, 4]
        assert numbers((await ada.sync("a"))["events"]) == [1, 2, 3, 4]


@pytest.mark.rule("CO-24")
async def test_socket_from_another_origin_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, origins=("https://app.example.org",)) as served:
        for origin in ("https://evil.example", "null", "https://app.example.org.evil.example"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.socket({"Origin": origin})
            assert refused.value.status == 403
        for origin in ("https://app.example.org", served.url):
            client = await served.socket({"Origin": origin})
            assert "epoch" in await client.connect()


@BOTH_STORES
@pytest.mark.rule("CO-30", "CO-33")
async def test_oversized_frame_closes_only_its_own_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, frame_bytes_max=10_000) as served:
        large, other = await served.connected("large"), await served.connected("other")
        await large.socket.send_str("x" * 10_001)
        assert await large.wait_closed() == 1009
        assert numbers(await other.submit(item(1))) == [1]


@pytest.mark.rule("CO-30")
async def test_frame_of_exactly_the_maximum_size_is_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path, frame_bytes_max=10_000) as served:
        client = await served.connected()
        frame = {"type": "submit_events", "protocol_version": "1.0", "payload": {"events": [item(1)]}}
        await client.socket.send_str(json.dumps(frame).ljust(10_000))
        assert numbers((await client.receive())["payload"]["results"]) == [1]


@pytest.mark.rule("CO-30", "EV-8")
@pytest.mark.parametrize("path", ["/v1/events", "/v1/chat"])
async def test_oversized_frame_closes_the_connection_with_a_reason_log_line_and_metric(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "oncelog.doors")
    async with serving(tmp_path, frame_bytes_max=10_000) as served, aiohttp.ClientSession() as session:
        async with session.ws_connect(served.url + path) as socket:
            await socket.send_str("x" * 10_001)
            message = await soon(socket.receive())
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1009)
        assert message.extra == "limits.frame_bytes_max is 10000: send smaller requests"
        api = path.rpartition("/")[2]
        assert served.server.counts.requests[api, "websocket", "too_large"] == 1
        (line,) = [one for one in caplog.records if "a frame is larger" in one.message]
        assert (line.address, line.levelname) == ("127.0.0.1", "INFO")  # type: ignore[attr-defined]


@BOTH_STORES
@pytest.mark.rule("EV-8", "CO-30")
async def test_oversized_frame_closes_the_connection_after_the_results_of_accepted_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, frame_bytes_max=10_000) as served:
        client = await served.connected("ada")
        gate = served.hold_commits(monkeypatch)
        await client.send("submit_events", {"events": [item(1)]}, "1")
        await client.send("submit_events", {"events": [item(2)]}, "2")
        await client.socket.send_str("x" * 10_001)
        await soon(gate.reached.wait())
        await until(lambda: served.server.counts.requests["events", "websocket", "too_large"] == 1)
        gate.open()
        assert [(await client.receive())["msg_id"] for _ in range(2)] == ["1", "2"]
        assert await client.wait_closed() == 1009
        assert [one.levelname for one in caplog.records if "a frame is larger" in one.message] == ["WARNING"]


@pytest.mark.rule("CO-30")
async def test_connection_above_the_limit_is_refused_and_a_silent_one_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, connections_max=1) as served:
        first = await served.connected()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await served.socket()
        assert refused.value.status == 503
        await first.close()
        await until(lambda: len(served.server.apis.event_sessions) == 0)
        # The short `connect` timeout applies only to this connection.
        auth_gate = served.server.apis.event_sessions.auth_gate
        limits = auth_gate.limits
        auth_gate.limits = replace(limits, connect_timeout_ms=CONNECT_TIMEOUT_MS)
        silent = await served.socket()
        auth_gate.limits = limits
        assert await silent.wait_closed() == 1008
        await until(lambda: len(served.server.apis.event_sessions) == 0)
        assert "epoch" in await (await served.socket()).connect()


@BOTH_STORES
@pytest.mark.rule("CO-23")
async def test_expired_token_closes_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.01)
    clock = ManualClock(NOW_MS)
    async with serving(tmp_path, tokens=True, clock=clock) as served:
        client = await served.socket()
        expires_s = NOW_MS // 1000 + 60
        text = token("HS256", sub="ada", exp=expires_s, grants={"read": ["a"], "write": ["a"]})
        await client.connect("ada", text)
        assert numbers(await client.submit(item(1))) == [1]
        clock.advance(60_000 + 30_000)
        message = await client.receive()  # the server checks expiry periodically
        assert message["payload"]["code"] == "auth_failed"
        assert await client.wait_closed() == 1008


@BOTH_STORES
@pytest.mark.rule("CO-22", "CO-21")
async def test_revoked_key_closes_its_connection_and_others_stay_open(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        kept, gone = api_key(served, "kept", ["a"], ["a"]), api_key(served, "gone", ["a"], ["a"])
        first, second = await served.connected("kept", kept.text), await served.connected("gone", gone.text)
        assert served.api_keys is not None
        served.api_keys.revoke(gone.key.id)
        served.server.reload()
        assert (await second.receive())["payload"]["code"] == "auth_failed"
        assert await second.wait_closed() == 1008
        assert [one["status"] for one in await first.submit(item(1))] == ["committed"]


@BOTH_STORES
@pytest.mark.rule("CO-31", "EV-13")
async def test_closed_slow_reader_resumes_without_gaps(tmp_path: Path) -> None:
    async with serving(tmp_path, outbox_bytes_max=200_000, heartbeat_ms=600_000) as served:
        writer = await served.connected("writer")
        reader, stuck = await _raw_reader(served.url, "a")
        number = 0
        filling = "x" * 50_000
        while served.server.counts.slow_readers_closed == 0:
            number += 1
            event = item(number)
            event["event"]["filling"] = filling
            assert numbers(await writer.submit(event)) == [number]
            assert number < 5000
        assert served.server.counts.slow_readers_warned == 1
        await until(lambda: len(served.server.apis.event_sessions) == 1)
        got = _committed_ids(await _rest_of(reader))
        stuck.close()
        assert got == list(range(1, len(got) + 1))
        back = await served.connected("reader")
        cursor, seen = max(got, default=0), list(got)
        while True:
            found = await back.sync("a", since=cursor, limit=50)
            seen += numbers(found["events"])
            cursor = found["next_since_committed_id"]
            if not found["has_more"]:
                break
        assert seen == list(range(1, number + 1))


@pytest.mark.rule("EV-13")
async def test_reader_ahead_of_its_server_gets_no_event_twice(tmp_path: Path) -> None:
    """The second server gets no notification and polls once an hour, so its broadcasts lag behind."""
    async with serving(tmp_path, poll_ms=3_600_000) as one, serving(tmp_path, poll_ms=3_600_000) as two:
        assert await one.commit(item(1), item(2)) == [1, 2]
        reader = await two.connected("reader")
        assert (await reader.sync("a", since=2))["events"] == []
        assert two.server.apis.hub.position == 0
        assert await one.commit(item(3)) == [3]
        assert await two.commit(item(4)) == [4]
        received = [(await soon(reader.receive()))["payload"]["committed_id"] for _ in range(2)]
        assert received == [3, 4]


async def _raw_reader(url: str, partition: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a WebSocket, sync and stop reading, so that data fills the kernel buffers and then the server's queue."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(
        f"GET /v1/events HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: b25jZWxvZy1yZWFkZXItMQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    await soon(reader.readuntil(b"\r\n\r\n"))
    for kind, payload in (
        ("connect", {"client_id": "reader"}),
        ("sync", {"partitions": [partition], "since_committed_id": 0}),
    ):
        text = json.dumps({"type": kind, "protocol_version": "1.0", "payload": payload}).encode()
        writer.write(bytes((0x81, 0x80 | len(text))) + bytes(4) + text if len(text) < 126 else
                     bytes((0x81, 0xFE)) + len(text).to_bytes(2, "big") + bytes(4) + text)  # fmt: skip
        await _frame(reader)
    return reader, writer


async def _frame(reader: asyncio.StreamReader) -> bytes:
    head = await soon(reader.readexactly(2))
    length = head[1]
    if length >= 126:
        length = int.from_bytes(await soon(reader.readexactly(2 if length == 126 else 8)), "big")
    return await soon(reader.readexactly(length))


async def _rest_of(reader: asyncio.StreamReader) -> list[bytes]:
    frames = []
    while True:
        try:
            frames.append(await _frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            return frames


def _committed_ids(frames: list[bytes]) -> list[int]:
    return [json.loads(frame)["payload"]["committed_id"] for frame in frames]


@BOTH_STORES
@pytest.mark.rule("CO-33")
async def test_malformed_frames_are_all_answered_without_memory_growth(tmp_path: Path, is_soak: bool) -> None:
    """A server process answers every frame, its memory does not grow, and it continues to serve another client."""
    # Malformed frames never reach the store, so a tenth of them is enough on PostgreSQL.
    quarter = MALFORMED_FRAMES // (1 if is_soak else 10) // (10 if is_postgres() else 1) // 4
    seed = 20_261_116
    say(f"seed {seed}")
    event_numbers = itertools.count(1)
    with processes.serving(tmp_path, "--development", "--quiet", "--set", "limits.cycle_idle_ms=20") as served:
        async with aiohttp.ClientSession() as session:
            good = await _client(session, served, "good")
            await _storm(session, served, seed, quarter)
            before = _resident_bytes(served)
            for number in range(1, 4):
                storming = asyncio.ensure_future(_storm(session, served, seed + number, quarter))
                while not storming.done():
                    (result,) = await good.submit(item(next(event_numbers), "good"))
                    assert result["status"] == "committed"
                await storming
            assert _resident_bytes(served) - before < GROWTH_BYTES_MAX
            page = await good.sync("good", limit=1000)
            assert numbers(page["events"]) == sorted(numbers(page["events"]))
            assert served.process.poll() is None


async def _storm(session: aiohttp.ClientSession, served: processes.ServerProcess, seed: int, count: int) -> None:
    """Send frames on several connections and require an answer to each."""
    await asyncio.gather(
        *(_send_all(session, served, seed * 100 + number, count // CONNECTIONS) for number in range(CONNECTIONS))
    )


async def _send_all(session: aiohttp.ClientSession, served: processes.ServerProcess, seed: int, count: int) -> None:
    client = await _client(session, served, f"storm-{seed}")
    for is_text, data in malformed_frames(seed, count):
        await client.socket.send_frame(data, WSMsgType.TEXT if is_text else WSMsgType.BINARY)
        while (message := await client.receive())["type"] == "event_broadcast":
            pass
        assert message["type"] in ("error", "submit_events_result", "sync_response"), message
        if message["type"] == "error":
            code = message["payload"]["code"]
            assert code in ("bad_request", "history_changed", "protocol_version_unsupported"), message
            if code == "protocol_version_unsupported":  # the mutation changed a byte of the version
                assert await client.wait_closed() == 1008
                client = await _client(session, served, f"storm-{seed}")
    await client.close()


async def _client(session: aiohttp.ClientSession, served: processes.ServerProcess, name: str) -> SocketClient:
    client = SocketClient(await soon(session.ws_connect(served.url + "/v1/events")))
    assert "epoch" in await client.connect(name)
    return client


def _resident_bytes(served: processes.ServerProcess) -> int:
    pages = int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1])
    return pages * 4096


@BOTH_STORES
async def test_stream_and_socket_deliver_the_same_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        socket = await served.connected("s")
        await socket.sync("a")
        stream: EventStream = await served.stream("a")
        await stream.connected()
        await served.commit(item(1), item(2), item(3))
        by_socket = [(await socket.receive())["payload"] for _ in range(3)]
        assert await stream.events(3) == by_socket
