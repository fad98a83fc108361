"""Live delivery, by server-sent events and over a WebSocket (DE-9, DE-12)."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.web_protocol import RequestHandler
from msgspec.structs import replace

from databases import BOTH_STORES
from deadlines import soon, until
from engine.observable_store import LoopClock
from server.deltas.delta_servers import (
    DeltasServer,
    Json,
    SharedServer,
    as_delivered,
    change,
    read_deltas,
    refusal,
    run_server,
)

pytestmark = BOTH_STORES

LONG_HEARTBEAT_MS = 3_600_000
DELTAS = [change(number, f"r{number}", a=number) for number in range(1, 10)]


def numbered(first: int, last: int) -> list[Json]:
    return [as_delivered(DELTAS[number - 1], number) for number in range(first, last + 1)]


# --- server-sent events -----------------------------------------------------------------------------------------


@pytest.mark.rule("DE-9")
async def test_stream_delivers_stored_and_then_new_deltas(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS[:3])
    stream = await gateway.stream(since=1)
    assert stream.response.status == 200
    assert stream.response.headers["Content-Type"] == "text/event-stream"
    assert await stream.connected() == {"epoch": shared_server.server.log.epoch}
    assert stream.retry_ms == 1000
    assert await read_deltas(stream, 2) == numbered(2, 3)
    await gateway.push_accepted(DELTAS[0], *DELTAS[3:5], DELTAS[3])  # known deltas are not delivered again
    await gateway.push_accepted(DELTAS[5])
    assert await read_deltas(stream, 3) == numbered(4, 6)
    await shared_server.gateway("other").push_accepted(DELTAS[8])
    await gateway.push_accepted(DELTAS[6])
    assert await read_deltas(stream, 1) == numbered(7, 7)
    stream.close()


@pytest.mark.rule("DE-9")
async def test_last_event_id_resumes_a_stream_without_gaps_or_repeats(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS[:6])
    for last, first in (("0", 1), ("2", 3), ("6", 7), ("", 5)):
        stream = await gateway.stream(since=4, headers={"Last-Event-ID": last})
        await stream.connected()
        assert await read_deltas(stream, 7 - first) == numbered(first, 6)
        stream.close()
    answer = await gateway.request("GET", "live", headers={"Last-Event-ID": "x"})
    assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
    assert answer.json["error"].startswith("Last-Event-ID: ")


@pytest.mark.rule("DE-12")
async def test_stream_from_before_the_compaction_ends_with_a_snapshot_event(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS[:5])
    await gateway.compact(upto=3)
    stream = await gateway.stream(since=2)
    await stream.connected()
    message = await stream.next()
    assert message is not None
    assert (message.kind, message.json, message.id) == ("snapshot", {}, "")
    assert await stream.next() is None
    stream = await gateway.stream(since=3)
    await stream.connected()
    assert await read_deltas(stream, 2) == numbered(4, 5)
    stream.close()


@pytest.mark.rule("DE-9")
async def test_idle_stream_sends_heartbeats(tmp_path: Path) -> None:
    async with run_server(tmp_path, heartbeat_ms=20) as server:
        stream = await server.gateway().stream()
        await stream.connected()
        await stream.comment()
        await server.gateway().push_accepted(DELTAS[0])
        assert await read_deltas(stream, 1) == numbered(1, 1)
        stream.close()


# --- the WebSocket ----------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-9")
async def test_socket_delivers_stored_and_then_new_deltas(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    epoch = shared_server.server.log.epoch
    await gateway.push_accepted(*DELTAS[:3])
    live = await gateway.live()
    assert await live.connect(since=1, epoch=epoch) == {"type": "connected", "epoch": epoch}
    assert await live.deltas(2) == numbered(2, 3)
    await gateway.push_accepted(DELTAS[0], *DELTAS[3:5], DELTAS[3])
    assert await live.deltas(2) == numbered(4, 5)
    await live.send(type="whatever")  # is ignored
    await gateway.push_accepted(DELTAS[5])
    assert await live.deltas(1) == numbered(6, 6)
    readers = len(shared_server.server.server.apis.deltas.sessions)
    await soon(live.socket.close())
    await until(lambda: shared_server.server.server.apis.count_connections()["ws"] == 0)
    assert len(shared_server.server.server.apis.deltas.sessions) == readers - 1


@pytest.mark.rule("DE-12")
async def test_socket_from_before_the_compaction_closes_with_a_snapshot_frame(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS[:5])
    await gateway.compact(upto=3)
    live = await gateway.live()
    await live.connect()
    assert await live.receive() == {"type": "snapshot"}
    assert await live.wait_closed() == 1000


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ("", "the first frame"),
        ("{", "the first frame"),
        ("[]", "the first frame"),
        ('{"type":"hello"}', "the first frame must be a connect message: Invalid enum value"),
        ('{"since":1}', "the first frame"),
        ('{"type":"connect","since":-1}', "the first frame must be a connect message: Expected `int` >= 0"),
        ('{"type":"connect","since":"1"}', "the first frame"),
        (
            '{"type":"connect","since":9007199254740992}',
            "the first frame must be a connect message: Expected `int` <= 9007199254740991",
        ),
        ('{"type":"connect","sinse":1}', "the first frame"),
        (b'{"type":"connect"}', "the first frame"),
    ],
)
async def test_malformed_first_frame_is_refused(shared_server: SharedServer, frame: str | bytes, words: str) -> None:
    live = await shared_server.gateway().live()
    await (live.socket.send_str(frame) if isinstance(frame, str) else live.socket.send_bytes(frame))
    error = await live.receive()
    assert (error["type"], error["code"]) == ("error", "BAD_REQUEST")
    assert error["error"].startswith(words)
    assert await live.wait_closed() == 1008


@pytest.mark.rule("DE-9", "CO-40")
async def test_socket_refuses_a_cursor_of_another_history(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(DELTAS[0])
    for members, newest in (({"since": 2}, 1), ({"since": 1, "epoch": "other"}, None)):
        live = await gateway.live()
        error = await live.connect(**members)
        assert (error["type"], error["code"], error["epoch"]) == (
            "error", "HISTORY_CHANGED", shared_server.server.log.epoch,
        )  # fmt: skip
        assert error.get("newest") == newest
        assert await live.wait_closed() == 1008


async def test_socket_without_a_first_frame_is_closed(tmp_path: Path) -> None:
    async with run_server(tmp_path, connect_timeout_ms=50) as server:
        live = await server.gateway().live()
        error = await live.receive()
        assert (error["type"], error["code"]) == ("error", "BAD_REQUEST")
        assert await live.wait_closed() == 1008


async def test_socket_closed_before_its_first_frame_is_not_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(tmp_path) as server:
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            for is_abrupt in (False, True):
                live = await server.gateway().live()
                await until(lambda: server.server.apis.count_connections()["ws"] == 1)
                if is_abrupt:
                    transport: Any = live.socket._response.connection
                    transport.transport.abort()
                else:
                    await soon(live.socket.close())
                await until(lambda: server.server.apis.count_connections()["ws"] == 0)
        assert [record.getMessage() for record in caplog.records] == []
        assert not [kind for api, kind, _ in server.counts.requests if (api, kind) == ("deltas", "ws")]


async def test_internal_error_on_a_socket_is_logged_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(tmp_path) as server:

        def failing(*_: Any, **__: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(server.log, "follow_several", failing)
        live = await server.gateway().live()
        assert (await live.connect())["type"] == "connected"
        assert await live.wait_closed() == 1011
        assert "a live reader failed" in caplog.text


# --- all readers --------------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-9")
async def test_streams_and_sockets_deliver_each_delta_once_during_writes(shared_server: SharedServer) -> None:
    gateway, writers, each = shared_server.gateway(), 3, 20

    async def write(writer: int) -> None:
        for number in range(each):
            await gateway.push_accepted(change(1000 - number, f"r{number}", client=f"c{writer}", a=number))

    live, stream = await gateway.live(), await gateway.stream()
    await live.connect()
    await stream.connected()
    _, *found = await asyncio.gather(
        asyncio.gather(*map(write, range(writers))), live.deltas(writers * each), read_deltas(stream, writers * each)
    )
    expected = await gateway.pull_all()
    assert found == [expected, expected]
    assert [one["sequence"] for one in expected] == list(range(1, writers * each + 1))
    stream.close()
    await soon(live.socket.close())


async def test_stopping_server_ends_all_streams(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        stream, live, silent = await gateway.stream(), await gateway.live(), await gateway.live()
        await stream.connected()
        await live.connect()
        await gateway.push_accepted(DELTAS[0])
        assert await read_deltas(stream, 1) == await live.deltas(1) == numbered(1, 1)

        stopping = asyncio.ensure_future(server.server.stop())
        assert await stream.next() is None
        assert await live.wait_closed() == await silent.wait_closed() == 1001
        await soon(stopping)


CONNECT = b'{"type":"connect"}'
REQUEST = b"GET /v1/sync/shop/live HTTP/1.1\r\nHost: localhost\r\n"
UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: " + b"A" * 22 + b"==\r\n"
)
FOLLOWS = {
    "sse": REQUEST + b"\r\n",
    "ws": REQUEST + UPGRADE + b"\r\n" + bytes([0x81, 0x80 | len(CONNECT)]) + bytes(4) + CONNECT,
}
"""The bytes that a client sends to follow the gateway `shop`."""


@asynccontextmanager
async def unread(server: DeltasServer, kind: str, heartbeat_ms: int) -> AsyncIterator[None]:
    """Follow the gateway on a connection that is never read. The server allows it two heartbeats to read.

    The ping interval of a WebSocket remains unchanged. This client does not answer pings.
    """
    deltas = server.server.apis.deltas
    limits = replace(deltas.service.limits, heartbeat_ms=heartbeat_ms)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.served.port))
        with pytest.MonkeyPatch.context() as patched:  # for this connection only
            patched.setattr(deltas.service if kind == "ws" else deltas.streams.auth_gate, "limits", limits)
            raw.sendall(FOLLOWS[kind])
            await until(lambda: len(server.server.apis) == 1)
        yield


def connections(server: DeltasServer) -> list[RequestHandler]:
    """Return the server's connections."""
    runner = server.server._http.runner
    assert runner is not None
    assert runner.server is not None
    return runner.server.connections


def has_unsent_data(connection: RequestHandler) -> bool:
    return connection.transport is not None and connection.transport.get_write_buffer_size() > 0


@pytest.mark.rule("CO-31")
@pytest.mark.parametrize("kind", FOLLOWS)
async def test_slow_reader_is_disconnected_without_affecting_others(tmp_path: Path, kind: str) -> None:
    # Pings are disabled, so the server can only close a WebSocket because it is not read.
    async with (
        run_server(tmp_path, heartbeat_ms=LONG_HEARTBEAT_MS) as server,
        unread(server, kind, heartbeat_ms=500),
    ):
        gateway = server.gateway()
        reader = await gateway.stream()
        await reader.connected()
        for number in range(1, 25):
            await gateway.push_accepted(change(number, a="x" * 250_000, n=number))
            message = await reader.next()
            assert message is not None
            assert message.id == str(number)
        await until(lambda: len(server.server.apis) == 1)
        # Only the connections of reader and writer remain: unsent data must not keep the slow reader's socket open.
        await until(lambda: len(connections(server)) == 2)
        assert server.counts.slow_readers_closed == 1
        reader.close()


@pytest.mark.rule("CO-31")
async def test_websocket_with_unsent_data_is_closed_if_it_answers_no_pings(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server, unread(server, "ws", heartbeat_ms=LONG_HEARTBEAT_MS):
        gateway = server.gateway()
        for number in range(1, 25):
            await gateway.push_accepted(change(number, a="x" * 250_000, n=number))
        (stuck,) = await until(lambda: [one for one in connections(server) if has_unsent_data(one)])
        time = LoopClock(asyncio.get_running_loop())
        await time.advance_until(lambda: stuck not in connections(server), step_s=5)
        assert server.counts.slow_readers_closed == 1
        assert len(server.server.apis) == 0


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-30")
async def test_number_of_grpc_connections_is_limited(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_max=2) as server:
        gateway = server.gateway()
        await gateway.push_accepted(change(1, "r1", table="live", a=1))
        stream = await gateway.stream()
        await stream.connected()
        other = await gateway.live()
        assert (await other.connect())["type"] == "connected"
        refused = await gateway.request("GET", "live")
        assert refusal(refused) == (503, "SERVER_BUSY")
        assert refused.json["error"] == "too many open connections: connections_max is 2"
        assert await gateway.rows("live") == {"r1": {"a": 1}}  # the limit does not apply to plain requests
        assert len(server.server.apis) == 2
        await soon(other.socket.close())
        await until(lambda: len(server.server.apis) == 1)
        stream.close()
