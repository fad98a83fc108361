"""The proxy with real sockets: each fault takes effect, is counted, and is determined by the seed."""

import asyncio
import gc
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count, groupby
from typing import Any, Final, cast

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from deadlines import soon, until
from oncelog.testing.proxy import CALM, Faults, FaultyProxy, Incident
from oncelog.testing.proxy_faults import Break, Direction, FaultSampler
from oncelog.testing.proxy_frames import Unit
from oncelog.testing.proxy_server import CHUNK_BYTES

LONG_MS: Final = 10**7
"""Longer than any test."""
UPGRADE_REQUEST: Final = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CLOSED: Final = (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING, WSMsgType.ERROR)
FRAMES: Final = 1000
CONNECT_ERRORS: Final = (aiohttp.ClientError, ConnectionError)


class Echo:
    """Server that echoes and records all messages."""

    def __init__(self) -> None:
        self.received: list[str | bytes] = []
        self.sockets: list[web.WebSocketResponse] = []
        self.port = 0

    async def open_socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False, max_msg_size=2**24)
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            self.received.append(message.data)
            try:
                await (socket.send_str if message.type is WSMsgType.TEXT else socket.send_bytes)(message.data)
            except ConnectionError:
                break
        return socket

    async def plain(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), status=403 if request.path == "/forbidden" else 200)


@asynccontextmanager
async def run_echo_server() -> AsyncIterator[Echo]:
    echo = Echo()
    application = web.Application()
    application.router.add_get("/ws", echo.open_socket)
    application.router.add_route("*", "/{path:.*}", echo.plain)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    echo.port = runner.addresses[0][1]
    try:
        yield echo
    finally:
        await runner.cleanup()


class ProxySetup:
    """An echo server, a proxy in front of it, and a client session."""

    def __init__(self, echo: Echo, proxy: FaultyProxy, session: aiohttp.ClientSession) -> None:
        self.echo = echo
        self.proxy = proxy
        self.session = session

    async def open_socket(self) -> aiohttp.ClientWebSocketResponse:
        return await soon(self.session.ws_connect(self.proxy.url + "/ws", max_msg_size=2**24).__aenter__())

    async def open_raw_socket(self) -> tuple[StreamReader, StreamWriter]:
        """Open a raw socket and upgrade it to a WebSocket."""
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", self.proxy.port))
        writer.write(UPGRADE_REQUEST)
        assert (await soon(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 101")
        return reader, writer


@asynccontextmanager
async def open_proxy(faults: Faults = CALM, seed: int = 0) -> AsyncIterator[ProxySetup]:
    async with (
        run_echo_server() as echo,
        FaultyProxy("127.0.0.1", echo.port, seed=seed, faults=faults) as proxy,
        aiohttp.ClientSession() as session,
    ):
        yield ProxySetup(echo, proxy, session)


async def expect_closed(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Assert that the next message closes the connection."""
    message = await soon(socket.receive())
    assert message.type in CLOSED, message
    await socket.close()


def masked_frame(text: bytes) -> bytes:
    """Return a client's text frame with an all-zero mask."""
    return bytes([0x81, 0x80 | len(text)]) + bytes(4) + text


def seed_where(wanted: Callable[[Break], bool], faults: Faults, direction: Direction = Direction.TO_SERVER) -> int:
    """Return a seed with which `wanted` is true for the first frame after the upgrade of the first connection."""
    for seed in range(10_000):
        chance = FaultSampler(seed, 1, direction)
        chance.decide(Unit(100, is_head=True), CALM)
        decision = chance.decide(Unit(100, is_whole_text=True), faults)
        if decision.breaks is not None and wanted(decision.breaks):
            return seed
    raise AssertionError


# --- without faults --------------------------------------------------------------------------------------


async def test_calm_proxy_is_transparent() -> None:
    async with open_proxy() as setup:
        socket = await setup.open_socket()
        for text in ("", "x", "é" * 100, "x" * 70_000, "x" * 2_000_000):
            await socket.send_str(text)
            assert await soon(socket.receive_str()) == text
        await socket.send_bytes(b"\x81\x00" * 50_000)
        assert await soon(socket.receive_bytes()) == b"\x81\x00" * 50_000
        assert (setup.proxy.accepted_count, setup.proxy.open_count) == (1, 1)
        await socket.close(code=4001)
        await until(lambda: setup.proxy.open_count == 0)
        assert setup.echo.sockets[0].close_code == 4001
        assert not setup.proxy.done


async def test_traffic_other_than_websockets_passes_unchanged() -> None:
    async with open_proxy(replace(CALM, duplicate_rate=1)) as setup:
        for path in ("/plain", "/forbidden"):
            body = masked_frame(b"looks like a frame") * 1000
            async with setup.session.post(setup.proxy.url + path, data=body) as response:
                assert await response.read() == body
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await setup.session.ws_connect(setup.proxy.url + "/forbidden")
        assert not setup.proxy.done


async def test_half_closed_connection_is_still_answered() -> None:
    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(await reader.read() + b", all of it")
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        FaultyProxy(*server.sockets[0].getsockname(), faults=CALM) as proxy,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"GET nothing")
        writer.write_eof()
        assert await soon(reader.read()) == b"GET nothing, all of it"
        writer.close()
        await until(lambda: proxy.open_count == 0)


async def test_server_that_does_not_read_applies_backpressure() -> None:
    size = 48 * 2**20
    may_read = asyncio.Event()
    received = asyncio.get_running_loop().create_future()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await may_read.wait()
        total = 0
        while data := await reader.read(2**20):
            total += len(data)
        writer.close()
        received.set_result(total)

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        FaultyProxy(*server.sockets[0].getsockname(), faults=CALM) as proxy,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(UPGRADE_REQUEST)
        writer.write(b"\x82\x7f" + (size - 10).to_bytes(8, "big") + bytes(size - 10))
        await until(lambda: proxy.open_count == 1)
        (connection,) = proxy._connections
        await until(lambda: len(connection._writers) == 2)
        incoming, outgoing = (cast("asyncio.Transport", each.transport) for each in connection._writers)
        await until(lambda: outgoing.get_write_buffer_size() > 0 and not incoming.is_reading())
        assert outgoing.get_write_buffer_size() <= CHUNK_BYTES
        assert len(cast("Any", connection._reader)._buffer) <= 8 * CHUNK_BYTES
        assert not received.done()
        may_read.set()
        await soon(writer.drain())
        writer.close()
        assert await soon(received) == size + len(UPGRADE_REQUEST)


# --- each fault alone ------------------------------------------------------------------------------------


async def test_connections_are_refused_at_the_configured_rate() -> None:
    async with open_proxy(replace(CALM, refuse_rate=1)) as setup:
        for _ in range(3):
            with pytest.raises(CONNECT_ERRORS):
                await setup.open_socket()
        assert setup.proxy.done == {Incident.REFUSED: setup.proxy.accepted_count}
        assert not setup.echo.sockets
        setup.proxy.calm()
        await (await setup.open_socket()).close()


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("incident", ["cut_in_frame", "cut_after_frame", "cut_at_answer"])
async def test_connection_is_cut_at_a_client_frame(incident: str, is_reset: bool) -> None:
    cutting = replace(CALM, cut_rate=1, answer_ms_max=LONG_MS)
    seed = seed_where(lambda cut: (cut.incident, cut.is_reset) == (incident, is_reset), cutting)
    async with open_proxy(seed=seed) as setup:
        reader, writer = await setup.open_raw_socket()
        setup.proxy.faults = cutting
        writer.write(masked_frame(b"x" * 94))
        if is_reset:
            with pytest.raises(ConnectionResetError):
                await soon(reader.read())
        else:
            assert await soon(reader.read()) == b""
        writer.close()
        await until(lambda: setup.proxy.open_count == 0)
        assert setup.proxy.done == {incident: 1}
        await until(lambda: setup.echo.sockets[0].closed)
        assert setup.echo.received == ([] if incident == "cut_in_frame" else ["x" * 94])


async def test_cut_at_answer_has_a_timeout() -> None:
    cutting = replace(CALM, cut_rate=1, answer_ms_max=1)
    seed = seed_where(lambda cut: cut.incident is Incident.CUT_AT_ANSWER, cutting)
    async with open_proxy(seed=seed) as setup:
        socket = await setup.open_socket()
        setup.proxy.faults = cutting
        await socket.pong()
        await expect_closed(socket)
        assert setup.proxy.done == {Incident.CUT_AFTER_FRAME: 1}


@pytest.mark.parametrize("incident", ["cut_in_frame", "cut_after_frame"])
async def test_connection_is_cut_at_a_server_frame(incident: str) -> None:
    cutting = replace(CALM, cut_rate=1)
    seed = seed_where(lambda cut: cut.incident == incident and cut.at > 50, cutting, Direction.TO_CLIENT)
    async with open_proxy(seed=seed) as setup:
        reader, writer = await setup.open_raw_socket()
        setup.proxy.faults = cutting
        await until(lambda: bool(setup.echo.sockets))
        await setup.echo.sockets[0].send_str("x" * 98)
        received = b""
        try:
            while data := await soon(reader.read(1)):
                received += data
        except ConnectionResetError:
            assert incident == "cut_in_frame"
        assert received == (b"\x81\x62" + b"x" * 98)[: len(received)]
        assert (len(received) == 100) == (incident == "cut_after_frame")
        assert setup.proxy.done == {incident: 1}
        writer.close()


async def test_upgrade_is_cut_at_every_stage() -> None:
    done: Counter[str] = Counter()
    for seed in range(40):
        cut_rate = 1 if seed % 2 else 0.5  # At half the rate, some requests pass, and answers are cut.
        async with open_proxy(replace(CALM, cut_rate=cut_rate), seed) as setup:
            for _ in range(3):
                try:
                    await (await setup.open_socket()).close()
                except CONNECT_ERRORS:
                    continue
                else:
                    assert cut_rate < 1
            assert cut_rate < 1 or setup.proxy.done.total() == setup.proxy.accepted_count
            done += setup.proxy.done
    assert min(done[name] for name in ("cut_in_head", "cut_after_frame", "cut_at_answer")) > 5


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("direction", list(Direction))
async def test_stalled_connection_is_cut(direction: Direction, both_ways: bool) -> None:
    stalling = replace(CALM, stall_rate=1, stall_ms_max=20)
    seed = seed_where(lambda stall: stall.both_ways is both_ways, stalling, direction)
    async with open_proxy(seed=seed) as setup:
        socket = await setup.open_socket()
        await until(lambda: bool(setup.echo.sockets))
        setup.proxy.faults = stalling
        if direction is Direction.TO_SERVER:
            await socket.send_str("x")
        else:
            await setup.echo.sockets[0].send_str("x")
        await expect_closed(socket)
        assert setup.proxy.done == {Incident.STALLED: 1}
        assert setup.echo.received == []


@pytest.mark.parametrize("both_ways", [True, False])
async def test_stalled_connection_discards_bytes_until_it_is_closed(both_ways: bool) -> None:
    stalling = replace(CALM, stall_rate=1, stall_ms_max=LONG_MS)
    seed = seed_where(lambda stall: stall.both_ways is both_ways, stalling)
    async with open_proxy(seed=seed) as setup:
        reader, writer = await setup.open_raw_socket()
        await until(lambda: bool(setup.echo.sockets))
        setup.proxy.faults = stalling
        writer.write(masked_frame(b"lost"))
        await until(lambda: setup.proxy.done[Incident.STALLED] == 1)
        setup.proxy.faults = CALM
        # The test sends more than all buffers on the path can hold, so the proxy must read the data.
        for _ in range(20):
            writer.write(masked_frame(b"lost too") * 100_000)
            await soon(writer.drain())
        await setup.echo.sockets[0].send_str("not awaited")
        if not both_ways:
            assert await soon(reader.readexactly(13)) == b"\x81\x0bnot awaited"
        assert setup.proxy.open_count == 1
        writer.close()
        await until(lambda: setup.proxy.open_count == 0 and setup.echo.sockets[0].closed)
        assert setup.echo.received == []
        if both_ways:
            assert await soon(reader.read()) == b""


async def test_delayed_frames_stay_in_order() -> None:
    async with open_proxy(replace(CALM, delay_rate=1, delay_ms_max=3)) as setup:
        socket = await setup.open_socket()
        for number in range(200):
            await socket.send_str(str(number))
        assert [await soon(socket.receive_str()) for _ in range(200)] == [str(number) for number in range(200)]
        assert setup.proxy.done == {Incident.DELAYED: 2 * (1 + 200)}
        await socket.close()


async def test_only_text_messages_are_duplicated() -> None:
    async with open_proxy(replace(CALM, duplicate_rate=1)) as setup:
        socket = await setup.open_socket()
        for text in ("a", "b" * 70_000):
            await socket.send_str(text)
            assert [await soon(socket.receive_str()) for _ in range(4)] == [text] * 4
        assert setup.echo.received == ["a", "a", "b" * 70_000, "b" * 70_000]
        assert setup.proxy.done == {Incident.DUPLICATED: 2 * (1 + 2)}
        await socket.send_bytes(b"c")
        assert await soon(socket.receive_bytes()) == b"c"
        await socket.ping()
        await socket.close(code=4001)
        assert setup.echo.received[4:] == [b"c"]
        assert setup.proxy.done == {Incident.DUPLICATED: 6}


# --- all faults together ---------------------------------------------------------------------------------


async def test_frames_stay_in_order_and_faults_are_determined_by_the_seed() -> None:
    async def exchange() -> tuple[list[str | bytes], Counter[str]]:
        faults = replace(CALM, delay_rate=0.03, delay_ms_max=2, duplicate_rate=0.2)
        async with open_proxy(faults, seed=11) as setup:
            socket = await setup.open_socket()
            got: list[str] = []

            async def receive() -> None:
                while not got or got[-1] != "end":
                    got.append(await soon(socket.receive_str()))

            receiving = asyncio.create_task(receive())
            sent = [f"{number} {'x' * (number * 37 % 1000)}" for number in range(FRAMES)]
            for text in [*sent, "end"]:
                await socket.send_str(text)
            await receiving
            for texts in (setup.echo.received, got):
                assert [text for text, _ in groupby(texts)] == [*sent, "end"]
            await socket.close()
            return setup.echo.received, setup.proxy.done

    received, done = await exchange()
    assert done[Incident.DUPLICATED] > FRAMES * 0.2
    assert done[Incident.DELAYED] > 20
    again, done_again = await exchange()
    assert received == again
    assert done == done_again


async def test_faults_of_a_connection_do_not_depend_on_other_connections() -> None:
    faults = replace(CALM, refuse_rate=0.1, cut_rate=0.1, stall_rate=0.05, stall_ms_max=2, duplicate_rate=0.3)

    async def count_answers(setup: ProxySetup) -> int:
        """Return the number of answered frames on a raw socket. (aiohttp would try an upgrade twice.)"""
        answered = 0
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", setup.proxy.port))
        with suppress(ConnectionError, EOFError):
            writer.write(UPGRADE_REQUEST)
            await soon(reader.readuntil(b"\r\n\r\n"))
            for number in range(30):
                writer.write(masked_frame(b"%02d" % number))
                while await soon(reader.readexactly(4)) != b"\x81\x02%02d" % number:
                    pass  # skip duplicates of earlier answers
                answered += 1
        writer.close()
        return answered

    async def count_answers_beside(others: int) -> list[int]:
        fates = []
        async with open_proxy(faults, seed=5) as setup:
            for number in range(0, 2000, 100):
                setup.proxy.accepted_count = number
                watched = asyncio.create_task(count_answers(setup))
                await until(lambda before=number: setup.proxy.accepted_count > before)  # type: ignore[misc]
                await asyncio.gather(*(count_answers(setup) for _ in range(others)))
                fates.append(await watched)
            assert setup.proxy.done.total() > 20
        return fates

    alone = await count_answers_beside(0)
    assert len(set(alone)) > 5
    assert alone == await count_answers_beside(0) == await count_answers_beside(4)


async def test_retrying_clients_get_all_answers_under_all_faults() -> None:
    faults = Faults(cut_rate=0.1, stall_rate=0.05, stall_ms_max=20, answer_ms_max=20, delay_ms_max=2)
    async with open_proxy(faults, seed=3) as setup:
        waiting = [f"{client} {number}" for client in range(8) for number in range(20)]
        more = count()
        answered: set[str] = set()

        def missing() -> set[Incident]:
            """Return the incidents that have not happened yet. An answer may arrive too late to be cut."""
            return set(Incident) - set(setup.proxy.done)

        async def client() -> None:
            while waiting or missing() != {Incident.UNREACHABLE}:
                text = waiting.pop() if waiting else f"one more: {next(more)}"
                try:
                    async with setup.session.ws_connect(setup.proxy.url + "/ws") as socket:
                        await socket.send_str(text)
                        answered.add(await soon(socket.receive_str()))
                except (*CONNECT_ERRORS, aiohttp.WSMessageTypeError):
                    waiting.append(text)

        await asyncio.gather(*(client() for _ in range(8)))
        assert answered == set(setup.echo.received)
        assert len(answered) >= 160
        assert missing() == {Incident.UNREACHABLE}


# --- manual control --------------------------------------------------------------------------------------


async def test_calm_cuts_only_connections_that_lost_bytes() -> None:
    storm = replace(CALM, stall_rate=1, stall_ms_max=LONG_MS)
    async with open_proxy() as setup:
        stalled, spared = await setup.open_socket(), await setup.open_socket()
        setup.proxy.faults = storm
        await stalled.send_str("lost")
        await until(lambda: setup.proxy.done[Incident.STALLED] == 1)
        setup.proxy.calm()
        assert setup.proxy.faults == CALM
        await expect_closed(stalled)
        await spared.send_str("x")
        assert await soon(spared.receive_str()) == "x"
        assert setup.echo.received == ["x"]
        await spared.close()


async def test_calm_cuts_connections_that_wait_for_an_answer() -> None:
    cutting = replace(CALM, cut_rate=1, answer_ms_max=LONG_MS)
    seed = seed_where(lambda cut: cut.incident is Incident.CUT_AT_ANSWER, cutting)
    async with open_proxy(seed=seed) as setup:
        socket = await setup.open_socket()
        setup.proxy.faults = cutting
        await socket.pong()
        (connection,) = setup.proxy._connections
        await until(lambda: connection._is_breaking)
        setup.proxy.calm()
        await expect_closed(socket)


async def test_cut_all_cuts_every_connection() -> None:
    async with open_proxy() as setup:
        sockets = [await setup.open_socket() for _ in range(5)]
        setup.proxy.cut_all()
        for socket in sockets:
            await expect_closed(socket)
        await until(lambda: setup.proxy.open_count == 0)
        assert not setup.proxy.done
        await (await setup.open_socket()).close()


async def test_target_of_the_proxy_can_change() -> None:
    async with open_proxy() as setup:
        async with run_echo_server() as gone:
            setup.proxy.target = ("127.0.0.1", gone.port)
            socket = await setup.open_socket()
            assert len(gone.sockets) == 1
            setup.proxy.cut_all()
            await expect_closed(socket)
        with pytest.raises(CONNECT_ERRORS):
            await setup.open_socket()
        assert setup.proxy.done == {Incident.UNREACHABLE: setup.proxy.accepted_count - 1}
        setup.proxy.target = ("127.0.0.1", setup.echo.port)
        socket = await setup.open_socket()
        await socket.send_str("x")
        assert await soon(socket.receive_str()) == "x"
        await socket.close()


async def test_close_ends_all_connections_and_tasks() -> None:
    async with run_echo_server() as echo, aiohttp.ClientSession() as session:
        proxy = FaultyProxy("127.0.0.1", echo.port, faults=replace(CALM, delay_rate=1, delay_ms_max=LONG_MS))
        for _ in range(2):
            with pytest.raises(RuntimeError):
                _ = proxy.url
            before = asyncio.all_tasks()
            await proxy.start()
            with pytest.raises(RuntimeError):
                await proxy.start()
            attempts = [asyncio.create_task(session.ws_connect(proxy.url + "/ws").__aenter__()) for _ in range(5)]
            delayed = proxy.done[Incident.DELAYED] + 5
            await until(lambda wanted=delayed: proxy.done[Incident.DELAYED] == wanted)  # type: ignore[misc]
            await proxy.close()
            await proxy.close()
            for attempt in attempts:
                with pytest.raises(CONNECT_ERRORS):
                    await soon(attempt)
            assert proxy.open_count == 0
            remaining = {task for task in asyncio.all_tasks() - before if "proxy" in repr(task)}
            assert not remaining
    gc.collect()


def test_repr_contains_seed_and_faults() -> None:
    proxy = FaultyProxy("localhost", 7171, seed=42, faults=CALM)
    assert proxy.seed == 42
    assert "FaultyProxy('localhost', 7171, seed=42, faults=Faults(refuse_rate=0," in repr(proxy)
