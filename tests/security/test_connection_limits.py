"""Unauthenticated connections use little memory and take no slots from authenticated connections (CO-27)."""

import gc
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web_ws
from aiohttp._websocket.reader import WebSocketReader

from deadlines import soon, until
from oncelog.ledger.v1 import ledger_pb2 as pb
from oncelog.ledger.v1 import ledger_pb2_grpc
from oncelog.server import app
from oncelog.server.limits import CONNECT_BYTES_MAX
from oncelog.server.preauth_limiter import HEAD_BYTES_MAX
from oncelog.testing.clock import ManualClock
from security.raw_websocket import connect_frame, count_refusals, frame, upgrade, wait_closed
from server.ledger.ledger_servers import token
from server.raw_http import RawConnection, post, raw_connection, write
from server.running_server import Serving, event_id, item, serving
from server.test_server_app import make_certificate

MIB: Final = 2**20


@asynccontextmanager
async def unauthenticated_sockets(served: Serving, count: int) -> AsyncIterator[list[RawConnection]]:
    """Open WebSockets, each with an unfinished frame."""
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(raw_connection(served)) for _ in range(count)]
        for one in opened:
            await upgrade(one)
            one.send(frame(b"x" * 1000, declared=3 * MIB))
        yield opened


# --- bytes before authentication ----------------------------------------------------------------------------


@pytest.mark.rule("CO-27")
@pytest.mark.parametrize("path", ["/v1/events", "/v1/chat", "/v1/sync/g/live"])
async def test_unfinished_first_frame_is_refused_above_a_small_limit(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, tokens=True) as served, raw_connection(served) as connection:
        await upgrade(connection, path)
        connection.send(frame(b"x" * (CONNECT_BYTES_MAX + 2000), declared=3 * MIB))
        assert await wait_closed(connection)
        await until(lambda: not served.server._limiter.unauthenticated_count)


@pytest.mark.rule("CO-27")
async def test_unfinished_request_head_is_refused_above_its_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served, raw_connection(served) as connection:
        connection.send(b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 8000) for n in range(17)))
        assert await wait_closed(connection)
        assert HEAD_BYTES_MAX < 17 * 8000
        await until(lambda: served.server.counts.connections_refused["too_large"] == 1)


@pytest.mark.rule("CO-27")
async def test_large_body_without_a_credential_is_refused_and_not_buffered(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True) as served, raw_connection(served) as connection:
        for _ in range(2):  # The second request uses a connection on which the server has already refused a request.
            connection.send(post(b" " * 3 * MIB, path="/v1/events"))
            assert (await connection.read_answer())[0] == 401
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await connection.read_answer())[0] == 200


@pytest.mark.rule("CO-27")
async def test_large_first_request_with_a_credential_is_accepted(tmp_path: Path) -> None:
    authorization = f"Authorization: Bearer {token()}"
    async with serving(tmp_path, tokens=True) as served:
        async with raw_connection(served) as connection:
            connection.send(post(write(1, client="user:ada") + b" " * 3 * MIB, authorization))
            assert await connection.read_committed_sequence() == 1
        async with raw_connection(served) as connection:  # The first message and a long second one arrive in one write.
            await upgrade(connection)
            events = [item(number, event={"text": "x" * 10_000}) for number in range(1, 101)]
            submit = {"type": "submit_events", "protocol_version": "1.0", "payload": {"events": events}}
            connection.send(connect_frame(token()), frame(json.dumps(submit).encode()))
            received = await soon(connection.reader.readuntil(event_id(100).encode()))
            assert b"connected" in received
        assert not any(served.server.counts.connections_refused.values())


# --- number and duration ------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-27")
async def test_number_of_unauthenticated_connections_is_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, unauthenticated_connections_max=10) as served:
        served.credential = None
        async with unauthenticated_sockets(served, 10) as first:
            limiter = served.server._limiter
            assert limiter.unauthenticated_count == 10
            async with unauthenticated_sockets(served, 5):
                assert limiter.unauthenticated_count == 10
                assert [await wait_closed(one) for one in first[:5]] == [True] * 5
                assert count_refusals(served) == {"evicted": 5}
        assert b"oncelog_connections_refused_total" in served.server.metrics.render()
        await until(lambda: len(limiter) == 0)


@pytest.mark.rule("CO-27")
async def test_connections_without_a_tls_handshake_are_counted_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RENEW_S", 0.01)
    clock, tls = ManualClock(), make_certificate(tmp_path, "server")
    async with serving(tmp_path, clock=clock, tls=tls, connect_timeout_ms=1000) as served:
        async with raw_connection(served) as silent, raw_connection(served) as started:
            started.send(b"\x16\x03\x01\x02\x00\x01")  # the start of a handshake
            await until(lambda: served.server._limiter.unauthenticated_count == 2)
            clock.advance(1001)
            assert [await wait_closed(one) for one in (silent, started)] == [True, True]
            assert served.server.counts.connections_refused["timeout"] == 2
        async with raw_connection(served) as garbage:
            garbage.send(b"GET / HTTP/1.1\r\n\r\n")
            assert await wait_closed(garbage)
            await until(lambda: served.server.counts.connections_refused["tls_handshake"] >= 1)
        await until(lambda: len(served.server._limiter) == 0)
        answer = await served.get("/healthz", ssl=False)
        assert answer.status == 200


# --- other principals -----------------------------------------------------------------------------------------


async def streams(served: Serving, credential: str, count: int, **options: Any) -> list[int]:
    """Open streams, leave them open, and return the status of each."""
    return [(await served.stream("a", credential=credential, **options)).response.status for _ in range(count)]


@pytest.mark.rule("CO-27")
async def test_streams_of_one_principal_leave_room_for_others(tmp_path: Path) -> None:
    ada, bob = token("ada"), token("bob")
    connector = aiohttp.TCPConnector(limit=0)
    settings = {"connections_max": 20, "connections_per_address_max": 0, "connector": connector}
    async with serving(tmp_path, tokens=True, **settings) as served:  # type: ignore[arg-type]
        assert await streams(served, ada, 20) == [200] * 10 + [503] * 10
        assert await streams(served, bob, 5) == [200] * 5
        answer = await served.page("a", credential=bob)
        assert answer.status == 200
        assert count_refusals(served) == {"principal": 10}


@pytest.mark.rule("CO-27")
async def test_sockets_of_one_principal_are_limited_with_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, connections_per_principal_max=2) as served:
        first = await served.connected("ada", token("ada", client_id="ada"))
        await served.connected("ada", token("ada", client_id="ada"))
        refused = await served.socket()
        answer = await refused.connect("ada", token("ada", client_id="ada"))
        assert (answer["code"], answer["details"]["limit"]) == ("server_busy", 2)
        assert "connections_per_principal_max is 2" in answer["message"]
        await served.connected("bob", token("bob", client_id="bob"))
        await first.close()
        await until(lambda: len(served.server.apis.event_sessions) <= 3)
        served.server._limiter.close_expired()
        await served.connected("ada", token("ada", client_id="ada"))


@pytest.mark.rule("CO-27")
async def test_unauthenticated_sockets_do_not_exhaust_the_connection_limit(tmp_path: Path) -> None:
    settings = {"connections_max": 3, "connections_per_address_max": 0}
    async with serving(tmp_path, tokens=True, **settings) as served, unauthenticated_sockets(served, 3):  # type: ignore[arg-type]
        for number in range(3):
            name = f"user-{number}"
            await served.connected(name, token(name, client_id=name))
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await served.socket()
        assert served.server.counts.connections_refused["evicted"] == 3


@pytest.mark.rule("CO-27")
async def test_proxied_streams_are_limited_by_client_address(tmp_path: Path) -> None:
    settings = {"trusted_proxies": ("127.0.0.0/8",), "connections_per_address_max": 2}
    connector = aiohttp.TCPConnector(limit=0)
    async with serving(tmp_path, tokens=True, connector=connector, **settings) as served:  # type: ignore[arg-type]
        for host in ("192.0.2.1", "192.0.2.2"):
            headers = {"X-Forwarded-For": host}
            assert await streams(served, token(), 3, headers=headers) == [200, 200, 503]
        # A proxy reuses its connections, so the limit for the first message also applies to reused connections.
        async with raw_connection(served) as connection:
            connection.send(post(write(1, client="user:ada"), f"Authorization: Bearer {token()}"))
            assert await connection.read_committed_sequence() == 1
            before = served.server._limiter.unauthenticated_count
            await upgrade(connection, headers="X-Forwarded-For: 192.0.2.3\r\n")
            assert served.server._limiter.unauthenticated_count == before + 1
            connection.send(frame(b"x" * (CONNECT_BYTES_MAX + 2000), declared=3 * MIB))
            assert await wait_closed(connection)


@pytest.mark.rule("CO-27")
async def test_grpc_streams_of_one_principal_are_limited(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, tokens=True, connections_per_principal_max=2) as served,
        grpc.aio.insecure_channel(served.server.grpc_address) as channel,
    ):
        stub: Any = ledger_pb2_grpc.LedgerStub(channel)

        def watch(name: str) -> Any:
            request = pb.WatchBlocksRequest(organization="acme")
            return stub.WatchBlocks(request, metadata=[("authorization", f"Bearer {token(name)}")])

        calls = [watch("ada") for _ in range(2)]
        await until(lambda: len(served.server.grpc_service or ()) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await soon(watch("ada").read())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "connections_per_principal_max is 2" in str(refused.value.details())
        calls.append(watch("bob"))
        await until(lambda: len(served.server.grpc_service or ()) == 3)
        calls[0].cancel()
        await until(lambda: len(served.server.grpc_service or ()) == 2)
        calls.append(watch("ada"))
        await until(lambda: len(served.server.grpc_service or ()) == 3)
        for call in calls:
            call.cancel()
        await until(lambda: not served.server._limiter._by_principal)


@pytest.mark.rule("CO-27")
async def test_unfinished_frame_of_a_closed_socket_is_freed_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of a closed connection form reference cycles, and full collections are rare."""
    freed: list[bool] = []

    class Reader(WebSocketReader):
        def __del__(self) -> None:
            freed.append(True)

    monkeypatch.setattr(web_ws, "WebSocketReader", Reader)
    gc.disable()
    try:
        async with serving(tmp_path, tokens=True) as served, unauthenticated_sockets(served, 3) as sockets:
            for one in sockets:
                one.writer.close()
            await until(lambda: len(freed) == 3)
            assert served.server.connections_closed == 3
    finally:
        gc.enable()
