"""The proxy with real sockets: each fault has its effect, is counted, and follows from the seed."""

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
from oncelog.testing.proxy_connection import CHUNK_BYTES
from oncelog.testing.proxy_faults import Break, Direction, FaultSampler
from oncelog.testing.proxy_frames import Unit

LONG_MS: Final = 10**7
"""Longer than any test runs."""
ASKED: Final = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CLOSED: Final = (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING, WSMsgType.ERROR)
FRAMES: Final = 1000
CONNECT_ERRORS: Final = (aiohttp.ClientError, ConnectionError)


class Echo:
    """A server that echoes and records all messages."""

    def __init__(self) -> None:
        self.received: list[str | bytes] = []
        self.sockets: list[web.WebSocketResponse] = []
        self.port = 0

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
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
async def echoing() -> AsyncIterator[Echo]:
    echo = Echo()
    application = web.Application()
    application.router.add_get("/ws", echo.socket)
    application.router.add_route("*", "/{path:.*}", echo.plain)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    echo.port = runner.addresses[0][1]
    try:
        yield echo
    finally:
        await runner.cleanup()


class Place:
    """An echo server, a proxy in front of it, and a client session."""

    def __init__(self, echo: Echo, proxy: FaultyProxy, session: aiohttp.ClientSession) -> None:
        self.echo = echo
        self.proxy = proxy
        self.session = session

    async def socket(self) -> aiohttp.ClientWebSocketResponse:
        return await soon(self.session.ws_connect(self.proxy.url + "/ws", max_msg_size=2**24).__aenter__())

    async def raw(self) -> tuple[StreamReader, StreamWriter]:
        """A WebSocket by hand, after its upgrade."""
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", self.proxy.port))
        writer.write(ASKED)
        assert (await soon(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 101")
        return reader, writer


@asynccontextmanager
async def through(faults: Faults = CALM, seed: int = 0) -> AsyncIterator[Place]:
    async with (
        echoing() as echo,
        FaultyProxy("127.0.0.1", echo.port, seed=seed, faults=faults) as proxy,
        aiohttp.ClientSession() as session,
    ):
        yield Place(echo, proxy, session)


async def ended(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Check that the next message is the end of the connection."""
    message = await soon(socket.receive())
    assert message.type in CLOSED, message
    await socket.close()


def masked(text: bytes) -> bytes:
    """A client's text frame, with a mask that changes nothing."""
    return bytes([0x81, 0x80 | len(text)]) + bytes(4) + text


def seed_where(wanted: Callable[[Break], bool], faults: Faults, direction: Direction = Direction.TO_SERVER) -> int:
    """A seed by which that happens to the first frame of the first connection, once the upgrade is through."""
    for seed in range(10_000):
        chance = FaultSampler(seed, 1, direction)
        chance.decide(Unit(100, is_head=True), CALM)
        decision = chance.decide(Unit(100, is_whole_text=True), faults)
        if decision.breaks is not None and wanted(decision.breaks):
            return seed
    raise AssertionError


# --- without faults --------------------------------------------------------------------------------------


async def test_calm_proxy_is_transparent() -> None:
    async with through() as place:
        socket = await place.socket()
        for text in ("", "x", "é" * 100, "x" * 70_000, "x" * 2_000_000):
            await socket.send_str(text)
            assert await soon(socket.receive_str()) == text
        await socket.send_bytes(b"\x81\x00" * 50_000)
        assert await soon(socket.receive_bytes()) == b"\x81\x00" * 50_000
        assert (place.proxy.accepted_count, place.proxy.open_count) == (1, 1)
        await socket.close(code=4001)
        await until(lambda: place.proxy.open_count == 0)
        assert place.echo.sockets[0].close_code == 4001
        assert not place.proxy.done


async def test_other_traffic_than_websockets_passes_unchanged() -> None:
    async with through(replace(CALM, duplicate_rate=1)) as place:
        for path in ("/plain", "/forbidden"):
            body = masked(b"looks like a frame") * 1000
            async with place.session.post(place.proxy.url + path, data=body) as response:
                assert await response.read() == body
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await place.session.ws_connect(place.proxy.url + "/forbidden")
        assert not place.proxy.done


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
        writer.write(ASKED)
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
        assert await soon(received) == size + len(ASKED)


# --- each fault alone ------------------------------------------------------------------------------------


async def test_connections_are_refused_at_the_refuse_rate() -> None:
    async with through(replace(CALM, refuse_rate=1)) as place:
        for _ in range(3):
            with pytest.raises(CONNECT_ERRORS):
                await place.socket()
        assert place.proxy.done == {Incident.REFUSED: place.proxy.accepted_count}
        assert not place.echo.sockets
        place.proxy.calm()
        await (await place.socket()).close()


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("incident", ["cut_in_frame", "cut_after_frame", "cut_at_answer"])
async def test_connection_is_cut_at_a_client_frame(incident: str, is_reset: bool) -> None:
    cutting = replace(CALM, cut_rate=1, answer_ms_max=LONG_MS)
    seed = seed_where(lambda cut: (cut.incident, cut.is_reset) == (incident, is_reset), cutting)
    async with through(seed=seed) as place:
        reader, writer = await place.raw()
        place.proxy.faults = cutting
        writer.write(masked(b"x" * 94))
        if is_reset:
            with pytest.raises(ConnectionResetError):
                await soon(reader.read())
        else:
            assert await soon(reader.read()) == b""
        writer.close()
        await until(lambda: place.proxy.open_count == 0)
        assert place.proxy.done == {incident: 1}
        await until(lambda: place.echo.sockets[0].closed)
        assert place.echo.received == ([] if incident == "cut_in_frame" else ["x" * 94])


async def test_cut_at_answer_waits_for_a_limited_time() -> None:
    cutting = replace(CALM, cut_rate=1, answer_ms_max=1)
    seed = seed_where(lambda cut: cut.incident is Incident.CUT_AT_ANSWER, cutting)
    async with through(seed=seed) as place:
        socket = await place.socket()
        place.proxy.faults = cutting
        await socket.pong()
        await ended(socket)
        assert place.proxy.done == {Incident.CUT_AFTER_FRAME: 1}


@pytest.mark.parametrize("incident", ["cut_in_frame", "cut_after_frame"])
async def test_connection_is_cut_at_a_server_frame(incident: str) -> None:
    cutting = replace(CALM, cut_rate=1)
    seed = seed_where(lambda cut: cut.incident == incident and cut.at > 50, cutting, Direction.TO_CLIENT)
    async with through(seed=seed) as place:
        reader, writer = await place.raw()
        place.proxy.faults = cutting
        await until(lambda: bool(place.echo.sockets))
        await place.echo.sockets[0].send_str("x" * 98)
        received = b""
        try:
            while data := await soon(reader.read(1)):
                received += data
        except ConnectionResetError:
            assert incident == "cut_in_frame"
        assert received == (b"\x81\x62" + b"x" * 98)[: len(received)]
        assert (len(received) == 100) == (incident == "cut_after_frame")
        assert place.proxy.done == {incident: 1}
        writer.close()


async def test_upgrade_is_cut_at_every_stage() -> None:
    done: Counter[str] = Counter()
    for seed in range(40):
        cut_rate = 1 if seed % 2 else 0.5  # at half the rate some requests pass, and answers are cut
        async with through(replace(CALM, cut_rate=cut_rate), seed) as place:
            for _ in range(3):
                try:
                    await (await place.socket()).close()
                except CONNECT_ERRORS:
                    continue
                else:
                    assert cut_rate < 1
            assert cut_rate < 1 or place.proxy.done.total() == place.proxy.accepted_count
            done += place.proxy.done
    assert min(done[name] for name in ("cut_in_head", "cut_after_frame", "cut_at_answer")) > 5


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("direction", list(Direction))
async def test_stalled_connection_is_cut(direction: Direction, both_ways: bool) -> None:
    stalling = replace(CALM, stall_rate=1, stall_ms_max=20)
    seed = seed_where(lambda stall: stall.both_ways is both_ways, stalling, direction)
    async with through(seed=seed) as place:
        socket = await place.socket()
        await until(lambda: bool(place.echo.sockets))
        place.proxy.faults = stalling
        if direction is Direction.TO_SERVER:
            await socket.send_str("x")
        else:
            await place.echo.sockets[0].send_str("x")
        await ended(socket)
        assert place.proxy.done == {Incident.STALLED: 1}
        assert place.echo.received == []


@pytest.mark.parametrize("both_ways", [True, False])
async def test_stalled_connection_discards_bytes_until_it_is_closed(both_ways: bool) -> None:
    stalling = replace(CALM, stall_rate=1, stall_ms_max=LONG_MS)
    seed = seed_where(lambda stall: stall.both_ways is both_ways, stalling)
    async with through(seed=seed) as place:
        reader, writer = await place.raw()
        await until(lambda: bool(place.echo.sockets))
        place.proxy.faults = stalling
        writer.write(masked(b"lost"))
        await until(lambda: place.proxy.done[Incident.STALLED] == 1)
        place.proxy.faults = CALM
        # More than all buffers on the way can hold, so the proxy must read it.
        for _ in range(20):
            writer.write(masked(b"lost too") * 100_000)
            await soon(writer.drain())
        await place.echo.sockets[0].send_str("not awaited")
        if not both_ways:
            assert await soon(reader.readexactly(13)) == b"\x81\x0bnot awaited"
        assert place.proxy.open_count == 1
        writer.close()
        await until(lambda: place.proxy.open_count == 0 and place.echo.sockets[0].closed)
        assert place.echo.received == []
        if both_ways:
            assert await soon(reader.read()) == b""


async def test_delayed_frames_stay_in_order() -> None:
    async with through(replace(CALM, delay_rate=1, delay_ms_max=3)) as place:
        socket = await place.socket()
        for number in range(200):
            await socket.send_str(str(number))
        assert [await soon(socket.receive_str()) for _ in range(200)] == [str(number) for number in range(200)]
        assert place.proxy.done == {Incident.DELAYED: 2 * (1 + 200)}
        await socket.close()


async def test_only_text_messages_are_duplicated() -> None:
    async with through(replace(CALM, duplicate_rate=1)) as place:
        socket = await place.socket()
        for text in ("a", "b" * 70_000):
            await socket.send_str(text)
            assert [await soon(socket.receive_str()) for _ in range(4)] == [text] * 4
        assert place.echo.received == ["a", "a", "b" * 70_000, "b" * 70_000]
        assert place.proxy.done == {Incident.DUPLICATED: 2 * (1 + 2)}
        await socket.send_bytes(b"c")
        assert await soon(socket.receive_bytes()) == b"c"
        await socket.ping()
        await socket.close(code=4001)
        assert place.echo.received[4:] == [b"c"]
        assert place.proxy.done == {Incident.DUPLICATED: 6}


# --- all of it -------------------------------------------------------------------------------------------


async def test_many_frames_stay_in_order_and_follow_from_the_seed() -> None:
    async def exchange() -> tuple[list[str | bytes], Counter[str]]:
        faults = replace(CALM, delay_rate=0.03, delay_ms_max=2, duplicate_rate=0.2)
        async with through(faults, seed=11) as place:
            socket = await place.socket()
            got: list[str] = []

            async def receive() -> None:
                while not got or got[-1] != "end":
                    got.append(await soon(socket.receive_str()))

            receiving = asyncio.create_task(receive())
            sent = [f"{number} {'x' * (number * 37 % 1000)}" for number in range(FRAMES)]
            for text in [*sent, "end"]:
                await socket.send_str(text)
            await receiving
            for texts in (place.echo.received, got):
                assert [text for text, _ in groupby(texts)] == [*sent, "end"]
            await socket.close()
            return place.echo.received, place.proxy.done

    received, done = await exchange()
    assert done[Incident.DUPLICATED] > FRAMES * 0.2
    assert done[Incident.DELAYED] > 20
    again, done_again = await exchange()
    assert received == again
    assert done == done_again


async def test_faults_of_a_connection_do_not_depend_on_other_connections() -> None:
    faults = replace(CALM, refuse_rate=0.1, cut_rate=0.1, stall_rate=0.05, stall_ms_max=2, duplicate_rate=0.3)

    async def fate(place: Place) -> int:
        """Return the number of answered frames. On a raw socket, because aiohttp tries an upgrade twice."""
        answered = 0
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", place.proxy.port))
        with suppress(ConnectionError, EOFError):
            writer.write(ASKED)
            await soon(reader.readuntil(b"\r\n\r\n"))
            for number in range(30):
                writer.write(masked(b"%02d" % number))
                while await soon(reader.readexactly(4)) != b"\x81\x02%02d" % number:
                    pass  # a duplicate of an earlier answer
                answered += 1
        writer.close()
        return answered

    async def fates_beside(others: int) -> list[int]:
        fates = []
        async with through(faults, seed=5) as place:
            for number in range(0, 2000, 100):
                place.proxy._accepted = number
                watched = asyncio.create_task(fate(place))
                await until(lambda before=number: place.proxy.accepted_count > before)  # type: ignore[misc]
                await asyncio.gather(*(fate(place) for _ in range(others)))
                fates.append(await watched)
            assert place.proxy.done.total() > 20
        return fates

    alone = await fates_beside(0)
    assert len(set(alone)) > 5
    assert alone == await fates_beside(0) == await fates_beside(4)


async def test_retrying_clients_get_all_answers_under_all_faults() -> None:
    faults = Faults(cut_rate=0.1, stall_rate=0.05, stall_ms_max=20, answer_ms_max=20, delay_ms_max=2)
    async with through(faults, seed=3) as place:
        waiting = [f"{client} {number}" for client in range(8) for number in range(20)]
        more = count()
        answered: set[str] = set()

        def missing() -> set[Incident]:
            """Return the incidents that have not happened. An answer may be too late for the wait of a cut."""
            return set(Incident) - set(place.proxy.done)

        async def client() -> None:
            while waiting or missing() != {Incident.UNREACHABLE}:
                text = waiting.pop() if waiting else f"one more: {next(more)}"
                try:
                    async with place.session.ws_connect(place.proxy.url + "/ws") as socket:
                        await socket.send_str(text)
                        answered.add(await soon(socket.receive_str()))
                except (*CONNECT_ERRORS, aiohttp.WSMessageTypeError):
                    waiting.append(text)

        await asyncio.gather(*(client() for _ in range(8)))
        assert answered == set(place.echo.received)
        assert len(answered) >= 160
        assert missing() == {Incident.UNREACHABLE}


# --- by hand ---------------------------------------------------------------------------------------------


async def test_calm_cuts_connections_that_lost_bytes_and_no_others() -> None:
    storm = replace(CALM, stall_rate=1, stall_ms_max=LONG_MS)
    async with through() as place:
        stalled, spared = await place.socket(), await place.socket()
        place.proxy.faults = storm
        await stalled.send_str("lost")
        await until(lambda: place.proxy.done[Incident.STALLED] == 1)
        place.proxy.calm()
        assert place.proxy.faults == CALM
        await ended(stalled)
        await spared.send_str("x")
        assert await soon(spared.receive_str()) == "x"
        assert place.echo.received == ["x"]
        await spared.close()


async def test_calm_cuts_connections_that_wait_for_an_answer() -> None:
    cutting = replace(CALM, cut_rate=1, answer_ms_max=LONG_MS)
    seed = seed_where(lambda cut: cut.incident is Incident.CUT_AT_ANSWER, cutting)
    async with through(seed=seed) as place:
        socket = await place.socket()
        place.proxy.faults = cutting
        await socket.pong()
        (connection,) = place.proxy._connections
        await until(lambda: connection._is_breaking)
        place.proxy.calm()
        await ended(socket)


async def test_cut_all_cuts_every_connection() -> None:
    async with through() as place:
        sockets = [await place.socket() for _ in range(5)]
        place.proxy.cut_all()
        for socket in sockets:
            await ended(socket)
        await until(lambda: place.proxy.open_count == 0)
        assert not place.proxy.done
        await (await place.socket()).close()


async def test_target_of_the_proxy_can_change() -> None:
    async with through() as place:
        async with echoing() as gone:
            place.proxy.target = ("127.0.0.1", gone.port)
            socket = await place.socket()
            assert len(gone.sockets) == 1
            place.proxy.cut_all()
            await ended(socket)
        with pytest.raises(CONNECT_ERRORS):
            await place.socket()
        assert place.proxy.done == {Incident.UNREACHABLE: place.proxy.accepted_count - 1}
        place.proxy.target = ("127.0.0.1", place.echo.port)
        socket = await place.socket()
        await socket.send_str("x")
        assert await soon(socket.receive_str()) == "x"
        await socket.close()


async def test_close_ends_all_connections_and_tasks() -> None:
    async with echoing() as echo, aiohttp.ClientSession() as session:
        proxy = FaultyProxy("127.0.0.1", echo.port, faults=replace(CALM, delay_rate=1, delay_ms_max=LONG_MS))
        for _ in range(2):
            with pytest.raises(RuntimeError):
                _ = proxy.url
            before = asyncio.all_tasks()
            await proxy.start()
            with pytest.raises(RuntimeError):
                await proxy.start()
            attempts = [asyncio.create_task(session.ws_connect(proxy.url + "/ws").__aenter__()) for _ in range(5)]
            held_back = proxy.done[Incident.DELAYED] + 5
            await until(lambda wanted=held_back: proxy.done[Incident.DELAYED] == wanted)  # type: ignore[misc]
            await proxy.close()
            await proxy.close()
            for attempt in attempts:
                with pytest.raises(CONNECT_ERRORS):
                    await soon(attempt)
            assert proxy.open_count == 0
            left = {task for task in asyncio.all_tasks() - before if "proxy" in repr(task)}
            assert not left
    gc.collect()


def test_repr_contains_seed_and_faults() -> None:
    proxy = FaultyProxy("localhost", 7171, seed=42, faults=CALM)
    assert proxy.seed == 42
    assert "FaultyProxy('localhost', 7171, seed=42, faults=Faults(refuse_rate=0," in repr(proxy)
