"""Many subscribers in one process that only count frames, with epoll, one shared buffer, and parsing of headers only.

A sample of the subscribers stores the received bytes, which are decoded afterwards to check the events.
"""

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

import msgspec

from bench.wire import Slice, Watch, WireEvent, wire_events
from bench.ws_load import PING, PONG, TEXT, decoded, frame, handshake, message, submission

PARTITION: Final = "building-0"
SAMPLE: Final = 20
"""Every twentieth subscriber stores the bytes that it receives."""
BUFFER_BYTES: Final = 256 * 1024
STALLED_S: Final = 30
PAUSE_S: Final = 0.01
"""Pause between polls, so that not every delivery wakes the client. Real subscribers would not use the CPU of this
machine.

The measurement of one event at a time polls without a pause.
"""


class Subscriber:
    """A connection that follows one partition."""

    __slots__ = ("_begun", "_body_left", "frames", "kept", "socket")

    def __init__(self, connection: socket.socket, *, keeps: bool) -> None:
        self.socket = connection
        self.frames = 0
        self.kept = bytearray() if keeps else None
        self._body_left = 0
        """Number of bytes of a frame's body that have not arrived yet."""
        self._begun = b""
        """A header that has not arrived completely."""

    def receive(self, buffer: bytearray, view: memoryview) -> int:
        """Read once. Return the number of texts that are now complete."""
        at = len(self._begun)
        buffer[:at] = self._begun
        end = at + self.socket.recv_into(view[at:])
        if end == at:
            raise ConnectionError("the server closed a subscriber's connection")
        if self.kept is not None:
            self.kept += view[at:end]
        self._begun = b""
        at = self._body_left
        texts = 1 if at else 0
        while at < end:
            opcode, length = buffer[at], buffer[at + 1] if end - at >= 2 else 0
            begin = at + (2 if length < 126 else 4 if length == 126 else 10)
            if end < begin:
                self._begun = bytes(view[at:end])
                at = end
                break
            if length >= 126:
                length = int.from_bytes(view[at + 2 : begin], "big")
            at = begin + length
            if opcode == TEXT:
                texts += 1
            else:
                self._control(opcode, bytes(view[begin : min(at, end)]), is_whole=at <= end)
        self._body_left = at - end
        texts -= 1 if at > end else 0
        self.frames += texts
        return texts

    def _control(self, opcode: int, payload: bytes, *, is_whole: bool) -> None:
        if opcode != PING or not is_whole:
            raise ConnectionError(f"frame {opcode:#x} from the server: {payload!r}")
        self.socket.send(frame(payload, PONG))

    def texts(self) -> Iterator[bytes]:
        """Yield the stored texts from the beginning."""
        assert self.kept is not None
        at = 0
        while at < len(self.kept):
            opcode, length = self.kept[at], self.kept[at + 1]
            begin = at + (2 if length < 126 else 4 if length == 126 else 10)
            if length >= 126:
                length = int.from_bytes(self.kept[at + 2 : begin], "big")
            at = begin + length
            if opcode == TEXT:
                yield bytes(self.kept[begin:at])


class FanOut:
    """All subscribers, and one connection that submits."""

    def __init__(self, server: int, subscribers: list[Subscriber], submitter: socket.socket) -> None:
        self._server = server
        self._subscribers = subscribers
        self._submitter = submitter
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._events = (event._replace(partition=PARTITION) for event in wire_events())
        self._submitted: list[WireEvent] = []
        self._answers = Subscriber(submitter, keeps=True)
        self._poll = select.epoll()
        for subscriber in subscribers:
            self._poll.register(subscriber.socket, select.EPOLLIN)
        self._poll.register(submitter, select.EPOLLIN)
        self._by_file = {one.socket.fileno(): one for one in subscribers}

    def close(self) -> None:
        self._poll.close()

    def run(self, count: int, window: int) -> Slice:
        """Submit events one by one, each to all subscribers. Return the deliveries.

        At most `window` events are in flight, so that the server does not have to buffer events that it cannot deliver
        in time. `waited` is the time from an event's submission until all subscribers have it.
        """
        number_of = len(self._subscribers)
        watch = Watch(self._server)
        began: list[float] = []
        waited: list[float] = []
        delivered = 0
        while delivered < count * number_of:
            while len(began) < count and delivered >= (len(began) - window + 1) * number_of:
                event = next(self._events)
                self._submitted.append(event)
                began.append(time.perf_counter())
                self._submitter.sendall(submission(len(self._submitted), [event]))
            if window > 1:
                time.sleep(PAUSE_S)
            delivered += self._wait()
            now = time.perf_counter()
            waited += [now - one for one in began[len(waited) : delivered // number_of]]
        result = watch.slice(delivered, waited)
        self._check_answers()
        return result

    def _wait(self) -> int:
        """Read the available data. Return the number of deliveries."""
        ready = self._poll.poll(STALLED_S)
        if not ready:
            raise TimeoutError(f"no delivery for {STALLED_S} seconds")
        buffer, view, by_file, delivered = self._buffer, self._view, self._by_file, 0
        for file, _ in ready:
            subscriber = by_file.get(file)
            if subscriber is None:
                self._answers.receive(buffer, view)
            else:
                delivered += subscriber.receive(buffer, view)
        return delivered

    def _check_answers(self) -> None:
        while self._answers.frames < len(self._submitted):
            self._wait()

    def check_all(self) -> None:
        """Check the counts of all subscribers, and the events of the sample in order. Raises ValueError if they are
        wrong.
        """
        counts = {subscriber.frames for subscriber in self._subscribers}
        if counts != {len(self._submitted)}:
            raise ValueError(f"{len(self._submitted)} events were submitted, and subscribers received {counts}")
        answers = [decoded(text).payload.results for text in self._answers.texts()]
        committed = sorted((one.committed_id, one.id) for results in answers for one in results)
        if {one for _, one in committed} != {event.id for event in self._submitted}:
            raise ValueError("not every event was committed")
        for subscriber in self._subscribers:
            if subscriber.kept is not None:
                got = [_broadcast(text) for text in subscriber.texts()]
                if got != committed:
                    raise ValueError("a subscriber received other events than were committed, or in another order")


def _broadcast(text: bytes) -> tuple[int, str]:
    told: dict[str, Any] = msgspec.json.decode(text)
    if told["type"] != "event_broadcast" or told["payload"]["partitions"] != [PARTITION]:
        raise ValueError(f"a subscriber received {text!r}")
    return told["payload"]["committed_id"], told["payload"]["id"]


@contextmanager
def fan_out(host: str, port: int, server: int, subscribers: int) -> Iterator[FanOut]:
    """Connect all subscribers and the submitter."""
    with ExitStack() as stack:
        listeners = []
        for number in range(subscribers):
            connection = stack.enter_context(closing(_connected(host, port, f"subscriber-{number}")))
            _subscribe(connection)
            listeners.append(Subscriber(connection, keeps=number % SAMPLE == 0))
        submitter = stack.enter_context(closing(_connected(host, port, "submitter")))
        yield stack.enter_context(closing(FanOut(server, listeners, submitter)))


def _connected(host: str, port: int, client: str) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=STALLED_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(handshake(host, port))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += _exactly(connection, 1)
    if b" 101 " not in head:
        raise ConnectionError(f"the server refused the WebSocket: {head!r}")
    connection.sendall(message("connect", 1, {"token": "", "client_id": client}))
    _check(_text(connection), "connected")
    return connection


def _subscribe(connection: socket.socket) -> None:
    """Read an empty page, and follow the partition from there."""
    connection.sendall(message("sync", 2, {"partitions": [PARTITION], "since_committed_id": 0, "limit": 1}))
    answer = _check(_text(connection), "sync_response")
    if answer["payload"]["events"] or answer["payload"]["has_more"]:
        raise ValueError(f"a subscriber of an empty log received {answer}")
    connection.setblocking(False)


def _check(text: bytes, kind: str) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(text)
    if answer["type"] != kind:
        raise ValueError(f"the server answered with {answer}, not with {kind}")
    return answer


def _text(connection: socket.socket) -> bytes:
    """Wait for one message and return it."""
    _, length = _exactly(connection, 2)
    if length >= 126:
        length = int.from_bytes(_exactly(connection, 2 if length == 126 else 8), "big")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the server closed the connection")
        data += more
    return data
