"""A minimal client of the Events API, and the loads that it puts on a server.

This is not a client for applications. The benchmark measures the server, which shares the machine with the client, so
the client saves CPU time. It masks frames with zeros (which RFC 6455, 5.3 allows, and which does not change the bytes),
decodes only the needed fields of an answer, and uses callbacks instead of tasks.
"""

import asyncio
import itertools
import re
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import msgspec

from bench.wire import PARTITIONS, Slice, Watch, WireEvent, wire_events
from oncelog.cli.load.pacer import ClosedLoopPacer, OpenLoopPacer, Pacer, Schedule
from oncelog.client.runtime.backoff import run_until_first_ends

TEXT: Final = 0x81
PING: Final = 0x89
PONG: Final = 0x8A
PATH: Final = "/v1/events"
ANSWER_S: Final = 60
PACED_IN_FLIGHT_MAX: Final = 1000
"""Requests in flight of a connection at a fixed rate. A server reaches it only if it does not keep up."""

HANDSHAKE: Final = (
    "GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: b25jZWxvZy1iZW5jaC0wMQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
NEXT_SINCE: Final = re.compile(rb'"next_since_committed_id": ?([0-9]+)')


class Result(msgspec.Struct):
    """Result of one event."""

    id: str
    status: str
    committed_id: int = 0


class AnswerPayload(msgspec.Struct):
    """The fields that the client reads from a `submit_events_result` or an `error`."""

    results: list[Result] = []
    code: str = ""
    message: str = ""


class Answer(msgspec.Struct):
    """Answer to a submission."""

    type: str
    payload: AnswerPayload
    msg_id: str = ""


decoded: Final = msgspec.json.Decoder(Answer).decode


def handshake(host: str, port: int, path: str = PATH) -> bytes:
    """Return the request for a WebSocket upgrade."""
    return HANDSHAKE.format(path=path, host=host, port=port).encode()


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """Return a complete client message with an all-zero mask."""
    length = len(payload)
    if length < 126:
        return struct.pack(">BB4x", opcode, 0x80 | length) + payload
    if length < 65536:
        return struct.pack(">BBH4x", opcode, 0xFE, length) + payload
    return struct.pack(">BBQ4x", opcode, 0xFF, length) + payload


def message(kind: str, number: int, payload: dict[str, Any]) -> bytes:
    """Return a frame of the Events API."""
    envelope = {"type": kind, "protocol_version": "1.0", "msg_id": str(number), "payload": payload}
    return frame(msgspec.json.encode(envelope))


def submission(number: int, events: Iterable[WireEvent]) -> bytes:
    """Return a frame that submits events. The bodies are already JSON text and are inserted unchanged."""
    items = b",".join(
        b'{"id":"%b","partitions":["%b"],"event":%b}' % (event.id.encode(), event.partition.encode(), event.body)
        for event in events
    )
    return frame(
        b'{"type":"submit_events","protocol_version":"1.0","msg_id":"%d","payload":{"events":[%b]}}' % (number, items)
    )


class Connection(asyncio.Protocol):
    """A WebSocket. It passes every text message to `on_text`."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport
        self._chunks: list[bytes] = []
        self._missing = 0
        """Minimum number of bytes that are missing in the incomplete frame."""
        self._is_open = False
        self._waiting: asyncio.Future[bytes] | None = None
        self._numbers = itertools.count(1)
        self.on_text: Callable[[bytes], None] = self._answered
        self.on_lost: Callable[[Exception], None] = self._failed

    async def ask(self, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Send one message and return the complete answer. No other request may be in flight."""
        text = await self.ask_raw(message(kind, next(self._numbers), payload))
        answer: dict[str, Any] = msgspec.json.decode(text)
        if answer["type"] == "error":
            raise ValueError(f"{kind} was answered with {answer}")
        return answer

    async def ask_raw(self, data: bytes) -> bytes:
        """Send one frame and return the answer as bytes."""
        self._waiting = asyncio.get_running_loop().create_future()
        self.send(data)
        return await asyncio.wait_for(self._waiting, ANSWER_S)

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def pause(self) -> None:
        """Stop reading. Data fills the system's buffers first, and then the server's."""
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    def close(self) -> None:
        self.on_lost = lambda _: None
        self._transport.close()

    async def opened(self) -> None:
        """Wait until the server has accepted the WebSocket."""
        await self.ask_raw(self._request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface, but is not a subclass.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.on_lost(error or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        data = b"".join(self._chunks) if len(self._chunks) > 1 else data
        self._chunks.clear()
        rest = self._frames(data) if self._is_open else self._agreed(data)
        if rest:
            self._chunks.append(rest)

    def _agreed(self, data: bytes) -> bytes:
        """Read the handshake answer. Return the unconsumed bytes."""
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            return data
        if b" 101 " not in head:
            self._failed(ConnectionError(f"the server refused the WebSocket: {head!r}"))
            return b""
        self._is_open = True
        self._answered(head)
        return self._frames(rest)

    def _frames(self, data: bytes) -> bytes:
        """Pass on all complete frames. Return the rest."""
        at, end = 0, len(data)
        self._missing = 0
        while end - at >= 2:
            opcode, length = data[at], data[at + 1]
            begin = at + 2
            if length >= 126:
                begin = at + (4 if length == 126 else 10)
                length = int.from_bytes(data[at + 2 : begin], "big") if begin <= end else 0
            if begin + length > end:
                self._missing = begin + length - end
                break
            at = begin + length
            if opcode == TEXT:
                self.on_text(data[begin:at])
            else:
                self._control(opcode, data[begin:at])
        return data[at:]

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            self.send(frame(payload, PONG))
        else:
            self.on_lost(ConnectionError(f"frame {opcode:#x} from the server: {payload[:200]!r}"))

    def _answered(self, text: bytes) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(text)

    def _failed(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


@asynccontextmanager
async def opened(host: str, port: int, count: int, path: str = PATH) -> AsyncIterator[list[Connection]]:
    """Yield open WebSockets."""
    connections: list[Connection] = []
    loop = asyncio.get_running_loop()
    request = handshake(host, port, path)
    try:
        for _ in range(count):
            _, connection = await loop.create_connection(lambda: Connection(request), host, port)
            connections.append(connection)
            await connection.opened()
        yield connections
    finally:
        for connection in connections:
            connection.close()
        await asyncio.sleep(0.01)  # The loop closes the sockets. A stopping server would otherwise wait for them.


@asynccontextmanager
async def connected(host: str, port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Yield authenticated connections."""
    async with opened(host, port, count) as connections:
        for number, connection in enumerate(connections):
            answer = await connection.ask("connect", {"token": "", "client_id": f"bench-{number}"})
            assert answer["type"] == "connected", answer
        yield connections


class Requests:
    """Requests in flight on many connections, and their answers. Subclasses define the requests."""

    per_request = 1
    """Events per request."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = connections
        self._in_flight: dict[str, tuple[int, float]] = {}
        """Connection and start of each request, by the id of its answer, which may arrive on another connection."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waited: list[float] = []

    def request(self, number: int) -> tuple[str, bytes]:
        """Return the next request of the connection with this number: the id of its answer, and its frame."""
        raise NotImplementedError

    def answer(self, number: int, text: bytes) -> str | None:
        """Return the id of the answered request, or None for other messages. Raises ValueError for a wrong answer."""
        raise NotImplementedError

    async def rest(self) -> None:
        """Wait for everything else that the requests cause. The slice includes this time."""

    async def keep_busy(self, server: int, in_flight: int, seconds: float) -> Slice:
        """Keep several requests in flight on each connection for this time, and wait for all answers."""
        watch = Watch(server)
        return await self._run(
            watch, ClosedLoopPacer(self._submit, len(self.connections), in_flight, watch.began + seconds)
        )

    async def pace(self, server: int, per_s: float, seconds: float) -> Slice:
        """Send requests at a fixed rate, independent of the arrival of answers.

        Raises ValueError if the server does not keep up.
        """
        watch = Watch(server)
        schedule = Schedule(watch.began, per_s, seconds)
        pacer = OpenLoopPacer(self._submit, len(self.connections), PACED_IN_FLIGHT_MAX, schedule)
        result = await self._run(watch, pacer)
        if pacer.unsent:
            raise ValueError(f"at {per_s:.0f} per second, {pacer.unsent} of {schedule.requests} requests were not sent")
        return result

    async def _run(self, watch: Watch, pacer: Pacer) -> Slice:
        for number, connection in enumerate(self.connections):
            connection.on_text = self._answers(number, pacer.finish)
            connection.on_lost = self._fail
        await run_until_first_ends([pacer.run(), self._failure])
        await self.rest()
        return watch.slice(self.per_request * len(self.waited), self.waited)

    def _submit(self, number: int, began: float) -> None:
        name, data = self.request(number)
        self._in_flight[name] = number, began
        self.connections[number].send(data)

    def _answers(self, number: int, finish: Callable[[int], None]) -> Callable[[bytes], None]:
        def answered(text: bytes) -> None:
            try:
                name = self.answer(number, text)
                if name is None:
                    return
                sender, began = self._in_flight.pop(name)
            except (ValueError, KeyError) as error:
                self._fail(error)
                return
            self.waited.append(time.perf_counter() - began)
            finish(sender)

        return answered

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)


class Load(Requests):
    """Submissions with a fixed number of events each."""

    def __init__(self, connections: Sequence[Connection], batch: int, partitions: Sequence[str] = PARTITIONS) -> None:
        super().__init__(connections)
        self.per_request = batch
        self._numbers = itertools.count(1)
        self._events = wire_events(partitions)

    def request(self, number: int) -> tuple[str, bytes]:  # noqa: ARG002 - all connections send the same
        """See `Requests`."""
        msg_id = next(self._numbers)
        return str(msg_id), submission(msg_id, itertools.islice(self._events, self.per_request))

    def answer(self, number: int, text: bytes) -> str:  # noqa: ARG002 - all connections get the same answers
        """See `Requests`."""
        answer = decoded(text)
        results = answer.payload.results
        if len(results) != self.per_request or any(one.status != "committed" for one in results):
            raise ValueError(f"new events were answered with {text[:1000]!r}")
        return answer.msg_id


async def check_once(connection: Connection) -> None:
    """Raise ValueError unless a retry gets the number of the first write and different content is refused."""
    event, other = itertools.islice(wire_events(), 2)
    first, second, third = [
        decoded(await connection.ask_raw(submission(number, [one]))).payload.results
        for number, one in enumerate((event, event, event._replace(body=other.body)), 1)
    ]
    if not first or first != second or [one.status for one in third] != ["rejected"]:
        raise ValueError(f"an event, its retry and another with its id were answered with {first}, {second}, {third}")


async def catch_up(
    connection: Connection, partitions: Sequence[str], limit: int, since: int = 0
) -> AsyncIterator[bytes]:
    """Yield the pages after a cursor, as bytes."""
    has_more = True
    while has_more:
        request = {"partitions": partitions, "since_committed_id": since, "limit": limit}
        page = await connection.ask_raw(message("sync", 1, request))
        # Both names follow the events, which contain neither of them.
        tail = page[-400:]
        found = NEXT_SINCE.search(tail) or NEXT_SINCE.search(page)
        if found is None:
            raise ValueError(f"sync was answered with {page[:1000]!r}")
        since, has_more = int(found[1]), _has_more(tail if b'"has_more"' in tail else page)
        yield page


def _has_more(text: bytes) -> bool:
    return b'"has_more":true' in text or b'"has_more": true' in text


def events_of(page: bytes) -> int:
    """Return the number of events in a page without decoding it."""
    return page.count(b'"committed_id":')
