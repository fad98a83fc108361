"""A stopping server answers the requests that it has received, and closes each connection after its last answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from deadlines import soon, until
from engine.observable_store import Gate
from oncelog.server import app as servers
from oncelog.server.app import Server
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import RecordViewPage
from server.raw_http import RawConnection, post, raw_connection, write
from server.running_server import Serving, item, serving

SHUTDOWN_MS: Final = 600_000
SHUTDOWN_S: Final = 60.0
"""Guards against a hang. It is less than `SHUTDOWN_MS`, because a server without pending requests stops immediately."""


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


EVENT: Final = post(json.dumps({"events": [item(1)]}).encode(), path="/v1/events")
MESSAGE: Final = json.dumps({"client_message_id": "2d8e6b3a-52a5-4c70-9c2e-0a8b6f1d7e55", "content": "hi"}).encode()
REQUESTS: Final = {
    "ledger, fast path": post(write(1)),
    "ledger": post(write(1), "X-Forwarded-For: 10.0.0.1"),
    "ledger, read": get("/v1/ledger/client-state?organization=acme&client_id=c1"),
    "events": EVENT,
    "events, read": get("/v1/events?partition=a"),
    "events, stream": get("/v1/events/stream?partition=a"),
    "deltas": post(b'{"deltas": []}', path="/v1/sync/shop/push"),
    "deltas, read": get("/v1/sync/shop/rows/products"),
    "chat": post(MESSAGE, "Authorization: Bearer ann", path="/v1/chats/tea/messages"),
    "chat, read": get("/v1/chats/tea/messages"),
}


@asynccontextmanager
async def stop_in_background(served: Serving) -> AsyncIterator["asyncio.Task[None]"]:
    """Begin to stop the server. At the end of the block, assert that it has stopped."""
    task = asyncio.create_task(served.server.stop())
    await until(lambda: served.server.is_closing)
    yield task
    async with asyncio.timeout(SHUTDOWN_S):
        await task


async def expect_final_refusal(client: RawConnection) -> None:
    """Assert that the next answer is a temporary refusal and the last answer on the connection."""
    status, headers, _ = await client.read_answer()
    assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
    assert await soon(client.reader.read()) == b""


@asynccontextmanager
async def open_connections(served: Serving, count: int, first: bytes) -> AsyncIterator[list[RawConnection]]:
    """Open connections and send one request on each."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw_connection(served)) for _ in range(count)]
        for client in clients:
            client.send(first)
            assert "Connection" not in (await client.read_answer())[1]
        yield clients


def run_server(tmp_path: Path, **settings: Any) -> Any:
    return serving(tmp_path, development=True, shutdown_ms=SHUTDOWN_MS, **settings)


@pytest.mark.parametrize("first", [post(write(1, client="before")), get("/healthz")], ids=["fast-path", "aiohttp"])
async def test_requests_during_a_pending_commit_are_refused_by_every_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    async with run_server(tmp_path) as served, open_connections(served, len(REQUESTS) + 2, first) as clients:
        gate = served.hold_commits(monkeypatch)
        clients[0].send(EVENT)
        clients[1].send(post(write(2, client="during", sequence=1)))
        await until(lambda: served.server.log.queue_length == 2)
        async with stop_in_background(served) as task:
            for client, request in zip(clients[2:], REQUESTS.values(), strict=True):
                client.send(request)
                await expect_final_refusal(client)
            assert not task.done()
            gate.open()
            for client in clients[:2]:
                status, headers, _ = await client.read_answer()
                assert (status, headers["Connection"]) == (200, "close")
                assert await soon(client.reader.read()) == b""


@pytest.mark.parametrize("name", REQUESTS)
async def test_request_that_arrives_during_shutdown_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No request is in flight when the stop begins, and the server exits once the last client has disconnected."""
    monkeypatch.setattr(servers, "LINGER_S", SHUTDOWN_MS / 1000)
    async with (
        run_server(tmp_path) as served,
        open_connections(served, 1, get("/healthz")) as (late,),
        raw_connection(served) as new,
        stop_in_background(served),
    ):
        for client in (late, new):
            client.send(REQUESTS[name])
            await expect_final_refusal(client)


async def test_idle_connections_do_not_delay_shutdown(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as served,
        open_connections(served, 2, get("/healthz")) as clients,
        open_connections(served, 2, post(write(1))) as quick,
        stop_in_background(served),
    ):
        for client in (*clients, *quick):
            assert await soon(client.reader.read()) == b""


async def test_stopping_server_answers_a_slow_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_brief, linger = SqliteStore.read_views, Server._linger
    gate, order = Gate(), list[str]()
    gate.shut()

    async def hold_read(*arguments: Any) -> RecordViewPage:
        await gate()
        order.append("read")
        return await read_brief(*arguments)

    async def lingering(server: Server, until_s: float) -> None:
        order.append("lingers")
        await linger(server, until_s)

    monkeypatch.setattr(Server, "_linger", lingering)
    async with run_server(tmp_path) as served, open_connections(served, 2, get("/healthz")) as (client, other):
        monkeypatch.setattr(SqliteStore, "read_views", hold_read)
        client.send(get("/v1/events?partition=a"))
        await soon(gate.reached.wait())
        async with stop_in_background(served):
            other.send(get("/readyz"))
            status, headers, answer = await other.read_answer()
            assert (status, headers["Connection"], answer) == (503, "close", b'{"status": "stopping"}')
            gate.open()
            status, headers, _ = await client.read_answer()
            assert (status, headers["Connection"]) == (200, "close")
        assert order == ["read", "lingers"]


async def test_incomplete_body_does_not_delay_shutdown(tmp_path: Path) -> None:
    async with run_server(tmp_path) as served, raw_connection(served) as client:
        client.send(post(b'{"events": [', "Content-Length: 100", path="/v1/events"))
        await until(lambda: bool(served.server._gate.open_requests))
        async with stop_in_background(served):
            pass


async def test_open_socket_and_stream_do_not_delay_shutdown(tmp_path: Path) -> None:
    async with run_server(tmp_path) as served:
        socket = await served.connected()
        stream = await served.stream("a")
        await stream.connected()
        assert not served.server._gate.open_requests
        async with stop_in_background(served):
            assert await socket.wait_closed() == 1001


async def test_connections_in_the_accept_queue_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has accepted the connection and the request, so closing the listener would reset the connection."""
    monkeypatch.setattr(servers, "LINGER_S", SHUTDOWN_MS / 1000)
    async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
        clients = []
        for _ in range(50):  # The event loop does not iterate in between, so the server has not accepted them.
            client = socket.create_connection(("127.0.0.1", served.port))
            client.sendall(EVENT)
            client.setblocking(False)
            clients.append(client)
        async with stop_in_background(served):
            loop = asyncio.get_running_loop()
            answers = [await soon(loop.sock_recv(client, 100)) for client in clients]
            assert {answer.split(b" ", 2)[1] for answer in answers} <= {b"200", b"503"}
            for client in clients:
                client.close()
