"""A server that stops answers all requests that it has got, and says on which connections no more are taken."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from doors.serving import Serving, item, run, serving, soon, until
from doors.test_quick import Plain, plain, post, write
from engine.watched import Gate
from oncelog.doors import server as servers
from oncelog.doors.server import Server
from oncelog.stores.protocol import BriefPage
from oncelog.stores.sqlite import SqliteStore

SHUTDOWN_MS: Final = 600_000
SHUTDOWN_S: Final = 50.0
"""Far less than a server may wait, and far more than one needs that has nothing to wait for."""


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


EVENT: Final = post(json.dumps({"events": [item(1)]}).encode(), path="/v1/events")
MESSAGE: Final = json.dumps({"client_message_id": "2d8e6b3a-52a5-4c70-9c2e-0a8b6f1d7e55", "content": "hi"}).encode()
REQUESTS: Final = {
    "ledger, quick": post(write(1)),
    "ledger": post(write(1), "X-Forwarded-For: 10.0.0.1"),
    "ledger, reading": get("/v1/ledger/client-state?organization=acme&client_id=c1"),
    "events": EVENT,
    "events, reading": get("/v1/events?partition=a"),
    "events, stream": get("/v1/events/stream?partition=a"),
    "deltas": post(b'{"deltas": []}', path="/v1/sync/shop/push"),
    "deltas, reading": get("/v1/sync/shop/rows/products"),
    "chat": post(MESSAGE, "Authorization: Bearer ann", path="/v1/chats/tea/messages"),
    "chat, reading": get("/v1/chats/tea/messages"),
}


@asynccontextmanager
async def stopping(served: Serving) -> AsyncIterator["asyncio.Task[None]"]:
    """A server that has begun to stop. It must have come to its end at that of the block."""
    task = asyncio.create_task(served.server.stop())
    await until(lambda: served.server._door.is_closing)
    yield task
    async with asyncio.timeout(SHUTDOWN_S):
        await task


async def refused(client: Plain) -> None:
    """The next answer is a refusal for now, and the last one."""
    status, headers, _ = await client.answer()
    assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
    assert await soon(client.reader.read()) == b""


@asynccontextmanager
async def kept(served: Serving, count: int, first: bytes) -> AsyncIterator[list[Plain]]:
    """Connections that have been used before."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(plain(served)) for _ in range(count)]
        for client in clients:
            client.send(first)
            assert "Connection" not in (await client.answer())[1]
        yield clients


def a_server(tmp_path: Path, **settings: Any) -> Any:
    return serving(tmp_path, development=True, shutdown_ms=SHUTDOWN_MS, **settings)


@pytest.mark.parametrize("first", [post(write(1, client="before")), get("/healthz")], ids=["quick", "aiohttp"])
def test_who_asks_while_it_waits_for_a_commit_is_told_at_every_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    async def main() -> None:
        async with a_server(tmp_path) as served, kept(served, len(REQUESTS) + 2, first) as clients:
            gate = served.hold_commits(monkeypatch)
            clients[0].send(EVENT)
            clients[1].send(post(write(2, client="before")))
            await until(lambda: served.server.log.queued == 2)
            async with stopping(served) as task:
                for client, request in zip(clients[2:], REQUESTS.values(), strict=True):
                    client.send(request)
                    await refused(client)
                assert not task.done()
                gate.open()
                for client in clients[:2]:
                    status, headers, _ = await client.answer()
                    assert (status, headers["Connection"]) == (200, "close")
                    assert await soon(client.reader.read()) == b""

    run(main())


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_was_on_its_way_gets_an_answer_and_the_last_one_ends_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is in flight when it begins to stop, and it does not wait for longer than anybody is connected."""
    monkeypatch.setattr(servers, "LINGER_S", SHUTDOWN_MS / 1000)

    async def main() -> None:
        async with (
            a_server(tmp_path) as served,
            kept(served, 1, get("/healthz")) as (late,),
            plain(served) as new,
            stopping(served),
        ):
            for client in (late, new):
                client.send(REQUESTS[name])
                await refused(client)

    run(main())


def test_connections_that_ask_for_nothing_do_not_hold_it_up_for_long(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            a_server(tmp_path) as served,
            kept(served, 2, get("/healthz")) as clients,
            kept(served, 2, post(write(1))) as quick,
            stopping(served),
        ):
            for client in (*clients, *quick):
                assert await soon(client.reader.read()) == b""

    run(main())


def test_what_is_read_for_long_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_brief, linger = SqliteStore.read_brief, Server._linger
    gate, order = Gate(), list[str]()
    gate.shut()

    async def held(*arguments: Any) -> BriefPage:
        await gate()
        order.append("read")
        return await read_brief(*arguments)

    async def lingering(server: Server, until_s: float) -> None:
        order.append("lingers")
        await linger(server, until_s)

    monkeypatch.setattr(Server, "_linger", lingering)

    async def main() -> None:
        async with a_server(tmp_path) as served, kept(served, 2, get("/healthz")) as (client, other):
            monkeypatch.setattr(SqliteStore, "read_brief", held)
            client.send(get("/v1/events?partition=a"))
            await soon(gate.reached.wait())
            async with stopping(served):
                other.send(get("/readyz"))
                status, headers, answer = await other.answer()
                assert (status, headers["Connection"], answer) == (503, "close", b'{"status": "stopping"}')
                gate.open()
                status, headers, _ = await client.answer()
                assert (status, headers["Connection"]) == (200, "close")
            assert order == ["read", "lingers"]

    run(main())


def test_a_body_that_does_not_come_holds_nothing_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_server(tmp_path) as served, plain(served) as client:
            client.send(post(b'{"events": [', "Content-Length: 100", path="/v1/events"))
            await until(lambda: bool(served.server._asked))
            async with stopping(served):
                pass

    run(main())


def test_a_socket_and_a_stream_are_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_server(tmp_path) as served:
            socket = await served.connected()
            stream = await served.stream("a")
            await stream.connected()
            assert not served.server._asked
            async with stopping(served):
                assert await socket.closed() == 1001

    run(main())


def test_who_has_connected_and_not_been_heard_is_answered(tmp_path: Path) -> None:
    """The system has taken the connection and the request; closing the listener would cut it off."""

    async def main() -> None:
        async with serving(tmp_path, shutdown_ms=SHUTDOWN_MS) as served:
            clients = []
            for _ in range(50):  # without a turn of the event loop, which would take them
                client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
                client.sendall(EVENT)
                client.setblocking(False)
                clients.append(client)
            async with stopping(served):
                loop = asyncio.get_running_loop()
                answers = [await soon(loop.sock_recv(client, 100)) for client in clients]
                assert {answer.split(b" ", 2)[1] for answer in answers} <= {b"200", b"503"}
            for client in clients:
                client.close()

    run(main())
