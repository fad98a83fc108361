"""Anonymous connections never lock out valid callers from the same address (CO-25).

The tests do not depend on time: the server's clock is stopped, and a flood is a number of accepted connections.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from deadlines import soon, until
from oncelog.server.connection_limiter import HELD_BYTES
from oncelog.server.limits import TLS_HANDSHAKE_BYTES_MAX
from security.flood_worker import UPGRADE, unfinished
from security.raw_websocket import connect_frame, count_refusals, upgrade, wait_closed
from server.ledger.ledger_servers import token
from server.raw_http import RawConnection, post, raw_connection, write
from server.running_server import Serving, serving
from server.test_server_app import make_certificate

SLOTS: Final = 20
"""`unauthenticated_connections_max` of the servers in these tests."""
NON_EVICTING_COUNT: Final = SLOTS // 2 - 1
"""Number of new connections that do not evict a connection accepted before them."""
ROUNDS: Final = 2
ANY_CERTIFICATE: Final = ssl.create_default_context()
ANY_CERTIFICATE.check_hostname, ANY_CERTIFICATE.verify_mode = False, ssl.CERT_NONE
SHAPES: Final = {
    "silent": (b"", None),
    "unfinished-head": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", None),
    "unfinished-frame": (UPGRADE + unfinished("frame", 1000), None),
    "tls-silent": (b"", False),
    "tls-unfinished-handshake": (unfinished("hello", 1000), False),
    "tls-unfinished-frame": (UPGRADE + unfinished("frame", 1000), True),
}
"""The data that each connection of a flood sends, and whether its TLS handshake completes. None means no TLS."""


class Flood:
    """Anonymous connections to a server. They stay open until the server closes them."""

    def __init__(self, served: Serving, stack: AsyncExitStack, shape: str) -> None:
        self._served = served
        self._stack = stack
        self._data, has_handshake = SHAPES[shape]
        self._tls = ANY_CERTIFICATE if has_handshake else None
        self.connections: list[RawConnection] = []

    @property
    def accepted(self) -> int:
        """The number of connections that the server has accepted so far."""
        limiter = self._served.server._limiter
        return limiter.closed_count + len(limiter)

    async def add(self, count: int) -> None:
        """Open connections and wait until the server has accepted all of them."""
        accepted = self.accepted
        for _ in range(count):
            made = await self._stack.enter_async_context(raw_connection(self._served, self._tls))
            made.send(self._data)
            self.connections.append(made)
        await until(lambda: self.accepted >= accepted + count)


Call = Callable[[Serving, Flood], Awaitable[None]]
"""Makes a call with a valid credential, and extends the flood between two steps of the call."""


def _tls(served: Serving) -> ssl.SSLContext | None:
    return None if served.server._certificate.context is None else ANY_CERTIFICATE


async def send_request(served: Serving, flood: Flood) -> None:
    async with raw_connection(served, _tls(served)) as connection:
        head = f"GET /v1/events?partition=a HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token()}\r\n\r\n"
        connection.send(head[:20].encode())
        await flood.add(NON_EVICTING_COUNT)
        connection.send(head[20:].encode())
        status, _, answer = await connection.read_answer()
        assert status == 200, answer


async def send_write(served: Serving, flood: Flood) -> None:
    async with raw_connection(served, _tls(served)) as connection:
        await flood.add(NON_EVICTING_COUNT)
        connection.send(post(write(1, client="user:ada"), f"Authorization: Bearer {token()}"))
        assert await connection.read_committed_sequence() == 1


async def open_websocket(served: Serving, flood: Flood) -> None:
    async with raw_connection(served, _tls(served)) as connection:
        await upgrade(connection)
        await flood.add(NON_EVICTING_COUNT)
        connection.send(connect_frame(token()))
        assert b'"connected"' in await soon(connection.reader.readuntil(b"}"))


@asynccontextmanager
async def flooded_server(
    tmp_path: Path, shape: str = "silent", **settings: Any
) -> AsyncIterator[tuple[Serving, Flood]]:
    """Run a server, and fill all slots for unauthenticated connections with a flood."""
    settings = {"unauthenticated_connections_max": SLOTS, **settings}
    if SHAPES[shape][1] is not None:
        settings["tls"] = make_certificate(tmp_path, "server")
    async with serving(tmp_path, tokens=True, **settings) as served, AsyncExitStack() as stack:
        flood = Flood(served, stack, shape)
        await flood.add(SLOTS + 10)
        yield served, flood


@pytest.mark.rule("CO-25", "CO-27")
@pytest.mark.parametrize("shape", SHAPES)
async def test_flood_does_not_lock_out_valid_callers_from_the_same_address(tmp_path: Path, shape: str) -> None:
    calls: tuple[Call, ...] = (send_request, send_write, open_websocket)
    async with flooded_server(tmp_path, shape) as (served, flood):
        for call in calls * ROUNDS:
            await call(served, flood)
            await flood.add(SLOTS)
            assert served.server._limiter.unauthenticated_count <= SLOTS
        assert set(count_refusals(served)) == {"evicted"}


@pytest.mark.rule("CO-25", "CO-27")
async def test_flood_does_not_close_authenticated_keep_alive_connections(tmp_path: Path) -> None:
    async with flooded_server(tmp_path) as (served, flood), raw_connection(served) as connection:
        for number in range(1, 4):
            connection.send(post(write(number, client="user:ada"), f"Authorization: Bearer {token()}"))
            assert await connection.read_committed_sequence() == number
            await flood.add(3 * SLOTS)


@pytest.mark.rule("CO-25", "CO-27")
async def test_flood_does_not_exhaust_the_connection_limit_of_its_address(tmp_path: Path) -> None:
    """The limit per address is lower than the limit for unauthenticated connections."""
    authorization = f"Authorization: Bearer {token()}"
    async with flooded_server(tmp_path, connections_per_address_max=5) as (served, flood), AsyncExitStack() as stack:
        for number in range(1, 6):
            connection = await stack.enter_async_context(raw_connection(served))
            connection.send(post(write(number, client="user:ada"), authorization))
            assert await connection.read_committed_sequence() == number
            await flood.add(1 if number < 5 else 0)
        async with raw_connection(served) as refused:  # all others are authenticated
            assert await wait_closed(refused)
        assert set(count_refusals(served)) == {"evicted", "address"}


@pytest.mark.rule("CO-25", "CO-27")
async def test_flood_through_a_proxy_does_not_exhaust_the_stream_limit_of_its_address(tmp_path: Path) -> None:
    settings = {"trusted_proxies": ("127.0.0.0/8",), "connections_per_address_max": 5}
    client = "X-Forwarded-For: 192.0.2.1\r\n"
    async with serving(tmp_path, tokens=True, **settings) as served, AsyncExitStack() as stack:  # type: ignore[arg-type]
        for _ in range(20):
            await upgrade(await stack.enter_async_context(raw_connection(served)), headers=client)
        async with raw_connection(served) as connection:
            await upgrade(connection, headers=client)
            connection.send(connect_frame(token()))
            assert b'"connected"' in await soon(connection.reader.readuntil(b"}"))
        assert set(count_refusals(served)) == {"evicted"}


@pytest.mark.rule("CO-27")
async def test_unauthenticated_connections_that_hold_the_most_data_are_closed(tmp_path: Path) -> None:
    """Together, these connections hold at most `HELD_BYTES` per unauthenticated connection that the server allows."""
    async with flooded_server(tmp_path, "unfinished-head") as (served, flood):
        limiter = served.server._limiter
        # Each header is valid, but the server would refuse a longer header that arrived in a single read.
        headers = (b"X: " + b"a" * 1019 + b"\r\n") * (3 * HELD_BYTES // 1024)
        for one in flood.connections[-SLOTS:]:
            one.send(headers)
        await until(lambda: limiter._held_bytes > SLOTS * HELD_BYTES - 4 * HELD_BYTES)
        assert limiter._held_bytes <= SLOTS * HELD_BYTES
        await send_request(served, flood)


@pytest.mark.rule("CO-27")
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_unread_responses_count_as_held_until_the_client_reads_them(tmp_path: Path, *, with_tls: bool) -> None:
    requests = 100  # Each response has 120 KB, which is more than the kernel buffers.
    settings = {"tls": make_certificate(tmp_path, "server")} if with_tls else {}
    async with serving(tmp_path, tokens=True, **settings) as served:  # type: ignore[arg-type]
        with socket.socket() as small:
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.setblocking(False)
            await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", served.port))
            reader, writer = await soon(
                asyncio.open_connection(
                    sock=small, limit=4096, ssl=_tls(served), server_hostname="localhost" if with_tls else None
                )
            )
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * requests)
            await until(lambda: served.server._limiter._held_bytes > HELD_BYTES)
            received = b""
            for _ in range(requests):
                head = await soon(reader.readuntil(b"\r\n\r\n"))
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                received = await soon(reader.readexactly(length))
            assert json.loads(received)["openapi"]
            await until(lambda: served.server._limiter._held_bytes == 0)
            writer.close()
            await soon(writer.wait_closed())


@pytest.mark.rule("CO-27")
async def test_large_tls_handshake_is_refused(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path, "server")
    async with serving(tmp_path, tokens=True, tls=tls) as served, raw_connection(served) as connection:
        data = unfinished("hello", TLS_HANDSHAKE_BYTES_MAX)
        connection.send(data[:-200])
        await until(lambda: served.server._limiter.unauthenticated_count == 1)
        connection.send(data[-200:], b"\x16\x03\x01\x00\x80" + bytes(128))
        assert await wait_closed(connection)
        await until(lambda: count_refusals(served) == {"tls_handshake": 1})


class RawTls:
    """A TLS client that sends only data that the test passes to it."""

    def __init__(self, connection: RawConnection) -> None:
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = ANY_CERTIFICATE.wrap_bio(self._incoming, self._outgoing)

    async def start(self) -> None:
        """Perform the handshake, but hold back its last bytes until the next `send`."""
        for _ in range(2):
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.send(b"")
                await self._receive()

    def send(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
        self._connection.send(self._outgoing.read())

    async def read_until(self, expected: bytes) -> bytes:
        """Return received data up to and including the expected bytes."""
        received = b""
        while expected not in received:
            await self._receive()
            try:
                received += self._tls.read()
            except ssl.SSLWantReadError:  # The server sends session tickets first.
                await asyncio.sleep(0)
        return received

    async def _receive(self) -> None:
        self._incoming.write(await soon(self._connection.reader.read(65536)))


@pytest.mark.rule("CO-27")
async def test_connection_that_does_not_answer_the_tls_close_is_still_counted(tmp_path: Path) -> None:
    async with flooded_server(tmp_path, "tls-silent") as (served, flood), raw_connection(served) as connection:
        client = RawTls(connection)
        await client.start()
        client.send(b"no HTTP\r\n\r\n")
        await client.read_until(b" 400 ")
        served.server._limiter.close_expired()
        assert served.server._limiter.unauthenticated_count == SLOTS
        await flood.add(SLOTS)
        assert await wait_closed(connection)


@pytest.mark.rule("CO-27")
async def test_large_request_right_after_the_tls_handshake_is_accepted(tmp_path: Path) -> None:
    """The server gets the end of the handshake and the start of the request in one read."""
    tls = make_certificate(tmp_path, "server")
    async with serving(tmp_path, tokens=True, tls=tls) as served, raw_connection(served) as connection:
        client = RawTls(connection)
        await client.start()
        body = write(1, client="user:ada") + b" " * 8 * TLS_HANDSHAKE_BYTES_MAX
        client.send(post(body, f"Authorization: Bearer {token()}"))
        assert (await client.read_until(b"assigned_sequence")).startswith(b"HTTP/1.1 200 ")
