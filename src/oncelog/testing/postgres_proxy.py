"""A proxy for sessions with PostgreSQL that ends them at chosen moments: most of all around COMMIT.

    async with PostgresProxy(server.address) as proxy:
        store = PostgresStore(proxy.address)
        proxy.commit_faults.append(CommitFault.CUT_AT_ANSWER)  # the next COMMIT succeeds; its answer is lost
        ...
        assert proxy.done[CommitFault.CUT_AT_ANSWER]

It reads the messages that pass (a type, a length, a body; before the session begins a length and a code) and knows a
COMMIT that is sent as a simple query. The next entry of `commit_faults` decides what becomes of a COMMIT, else the
faults and the seed: that follows from the number of the connection and the place of the message there, and from
nothing else. Answers can be held back (`hold`), sessions can be left open without answers (`stall_all`,
`stalled_sessions`), and the server can be out of reach (`is_unreachable`). Requests to cancel a statement are counted.
It speaks no TLS: the server must not either.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

from oncelog.testing.proxy_connection import CHUNK_BYTES, close_writer

HOST: Final = "127.0.0.1"
CANCEL_REQUEST: Final = 80877102
_ENCRYPTION_REQUESTS: Final = (80877103, 80877104)
_COMMIT: Final = b"COMMIT"
_SIMPLE_QUERY: Final = ord("Q")
_READY: Final = ord("Z")
_REQUEST_ENDS: Final = b"QSHdcf"
"""What a client may stop after for long: it has said all that it says at once. (Sync, Flush, a part of a COPY.)"""


class CommitFault(StrEnum):
    """What becomes of a COMMIT."""

    CUT_BEFORE = "cut_before"
    """It does not reach the server."""
    CUT_AFTER = "cut_after"
    """It is passed on, and the connection ends at once."""
    CUT_AT_ANSWER = "cut_at_answer"
    """The server has answered; nothing of that is passed on."""
    CUT_IN_ANSWER = "cut_in_answer"
    """The first half of the answer's bytes is passed on."""
    STALLED = "stalled"
    """It is passed on; its answer vanishes, and all that comes after it, while the connection stays open."""


class Incident(StrEnum):
    """What else can happen, as `PostgresProxy.done` counts it."""

    REFUSED = "refused"
    """A connection was accepted and closed at once."""
    CUT = "cut"
    """The connection was ended at another message, in the middle of it or behind it."""
    PASSED = "passed"
    """A COMMIT was passed on, and so was its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresFaults:
    """How often what happens: 0 is never, 1 is always."""

    refuse_rate: float = 0.0
    """Per connection."""
    commit_rate: float = 0.0
    """Per COMMIT: one of `CommitFault`, chosen at random."""
    cut_rate: float = 0.0
    """Per other message to the server."""


NO_FAULTS: Final = PostgresFaults()


class HeldMessage:
    """A query, or the answer to one, that is held back: `reached` returns when it has come as far as the proxy."""

    def __init__(self, statement: bytes, *, is_query: bool, requests: int = 0) -> None:
        self.statement = statement
        self.is_query = is_query
        self.requests = requests
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def wait_reached(self) -> None:
        """It is here. Of an answer: the server has done what it was asked for, and its client does not know yet."""
        await self._reached.wait()

    def release(self) -> None:
        """It goes on."""
        self._released.set()

    async def wait_released(self) -> None:
        """For the proxy: until it is let go."""
        self._reached.set()
        await self._released.wait()


class PostgresProxy:
    """Listens on a port of its own, as an asynchronous context manager. `target` is the address of a database."""

    def __init__(self, target: str, *, seed: int = 0, faults: PostgresFaults = NO_FAULTS) -> None:
        self.target = target
        """Where new connections go; the first host of it."""
        self.seed = seed
        self.faults = faults
        self.commit_faults: deque[CommitFault] = deque()
        """Of the next COMMITs, whichever connections they come on."""
        self.is_unreachable = False
        """Whether the server is out of reach for new connections."""
        self.stalled_sessions = 0
        """So many of the next sessions hear nothing once they have begun."""
        self.cancel_requests = 0
        self.accepted_count = 0
        self.done: Counter[str] = Counter()
        self.held: list[HeldMessage] = []
        self._server: asyncio.Server | None = None
        self._connections: set[_ProxiedSession] = set()

    def __repr__(self) -> str:
        return f"PostgresProxy(seed={self.seed}, faults={self.faults}, done={dict(self.done)})"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, 0, limit=CHUNK_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [link.task for link in self._connections]
        self.cut_all()
        if tasks:
            await asyncio.wait(tasks)
        await server.wait_closed()

    @property
    def address(self) -> str:
        """The target's address, through the proxy."""
        if self._server is None:
            raise RuntimeError("the proxy has no address before it is started, or after it was closed")
        parts = urlsplit(self.target)
        user, at, _ = parts.netloc.rpartition("@")
        port = self._server.sockets[0].getsockname()[1]
        return urlunsplit(parts._replace(netloc=f"{user}{at}{HOST}:{port}"))

    def hold(self, statement: str, *, is_query: bool = False) -> HeldMessage:
        """The answer to the next simple query that begins so is held back; or the query itself."""
        message = HeldMessage(statement.encode(), is_query=is_query)
        self.held.append(message)
        return message

    def hold_after(self, statement: str, requests: int) -> HeldMessage:
        """Held back is what is said after so many requests, the first being the next simple query that begins so."""
        message = HeldMessage(statement.encode(), is_query=True, requests=requests)
        self.held.append(message)
        return message

    def stall_all(self) -> None:
        """Nothing that the server says reaches those who are connected now; their connections stay open."""
        for link in self._connections:
            link.is_stalled = True

    def cut_all(self) -> None:
        """Ends every connection that is open, with a RST to both ends."""
        for link in list(self._connections):
            link.cut()

    def calm(self) -> None:
        """No fault happens from here on. Connections that have lost bytes are cut."""
        self.faults = NO_FAULTS
        self.commit_faults.clear()
        for link in list(self._connections):
            if link.is_stalled:
                link.cut()

    @property
    def open_count(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.accepted_count += 1
        chance = Random(f"{self.seed}/{self.accepted_count}")  # noqa: S311 - it must be repeatable
        if self._server is None or self.is_unreachable or chance.random() < self.faults.refuse_rate:
            self.done[Incident.REFUSED] += 1
            close_writer(writer, is_reset=False)
            return
        link = _ProxiedSession(self, chance, reader, writer)
        self._connections.add(link)
        link.task.add_done_callback(lambda _: self._connections.discard(link))


class _CutError(Exception):
    """The connection is to be ended; not an error of anybody's. What has been passed on is to arrive."""


class _ProxiedSession:
    """One connection: two sockets, and a task for each direction between them."""

    def __init__(self, proxy: PostgresProxy, random: Random, reader: StreamReader, writer: StreamWriter) -> None:
        self.is_stalled = False
        self._proxy = proxy
        self._random = random
        self._client = reader
        self._writers = [writer]
        self._client_messages = MessageSplitter(has_started=False)
        self._server_messages = MessageSplitter(has_started=True)
        self._commit_fault: CommitFault | None = None
        """Of a COMMIT that was passed on and is not answered yet."""
        self._held: HeldMessage | None = None
        self._held_after: HeldMessage | None = None
        self._requests = 0
        """Since `_held_after` was met."""
        self._will_stall = proxy.stalled_sessions > 0
        proxy.stalled_sessions -= self._will_stall
        self.task = asyncio.get_running_loop().create_task(self._run())

    def cut(self) -> None:
        self._close_sockets(is_reset=True)
        self.task.cancel()

    async def _run(self) -> None:
        parts = urlsplit(self._proxy.target)
        try:
            server, to_server = await asyncio.open_connection(parts.hostname, parts.port, limit=CHUNK_BYTES)
            self._writers.append(to_server)
            for writer in self._writers:
                # What `drain` has waited for is with the kernel, even if we cut a moment later.
                writer.transport.set_write_buffer_limits(high=0)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward_to_server(to_server))
                directions.create_task(self._forward_to_client(server, self._writers[0]))
        except* (_CutError, OSError):
            pass
        finally:
            self._close_sockets(is_reset=False)
            for writer in self._writers:
                with suppress(OSError):
                    await writer.wait_closed()

    def _close_sockets(self, *, is_reset: bool) -> None:
        for writer in self._writers:
            close_writer(writer, is_reset=is_reset)

    # --- to the server

    async def _forward_to_server(self, writer: StreamWriter) -> None:
        while data := await self._client.read(CHUNK_BYTES):
            for message in self._client_messages.feed(data):
                self._note_startup(message)
                if self._client_messages.has_started:
                    await self._decide(message, writer)
                await _forward(message, writer)
                if self._commit_fault is CommitFault.CUT_AFTER:
                    raise _CutError
        raise _CutError

    def _note_startup(self, message: bytes) -> None:
        if not self._client_messages.has_started:
            code = int.from_bytes(message[4:8], "big")
            self._proxy.cancel_requests += code == CANCEL_REQUEST
            self._server_messages.awaits_one_byte = code in _ENCRYPTION_REQUESTS
            self._client_messages.has_started = not self._server_messages.awaits_one_byte

    async def _decide(self, message: bytes, writer: StreamWriter) -> None:
        """What happens to a message; raises to end the connection before it is passed on."""
        is_cut, where, which = (self._random.random() for _ in range(3))
        proxy = self._proxy
        if self._held_after is not None and self._requests == self._held_after.requests:
            held_message, self._held_after = self._held_after, None
            await held_message.wait_released()
        self._requests += message[0] in _REQUEST_ENDS
        query = message[5:] if message[0] == _SIMPLE_QUERY else b""
        self._held = next(
            (held_message for held_message in proxy.held if query and query.startswith(held_message.statement)), None
        )
        if self._held is not None:
            proxy.held.remove(self._held)
            if self._held.requests:
                self._held_after, self._held, self._requests = self._held, None, 1
            elif self._held.is_query:
                held_message, self._held = self._held, None
                await held_message.wait_released()
        if query.startswith(_COMMIT):
            self._commit_fault = None
            if proxy.commit_faults:
                self._commit_fault = proxy.commit_faults.popleft()
            elif is_cut < proxy.faults.commit_rate:
                self._commit_fault = list(CommitFault)[int(which * len(CommitFault))]
            proxy.done[self._commit_fault or Incident.PASSED] += 1
            self.is_stalled = self.is_stalled or self._commit_fault is CommitFault.STALLED
            if self._commit_fault is CommitFault.CUT_BEFORE:
                raise _CutError
        elif is_cut < proxy.faults.cut_rate:
            proxy.done[Incident.CUT] += 1
            await _forward(message[: int(where * (len(message) + 1))], writer)
            raise _CutError

    # --- to the client

    async def _forward_to_client(self, reader: StreamReader, writer: StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self._held is not None:
                held_message, self._held = self._held, None
                await held_message.wait_released()
            if self.is_stalled:
                continue
            if self._commit_fault is CommitFault.CUT_AT_ANSWER:
                raise _CutError
            if self._commit_fault is CommitFault.CUT_IN_ANSWER:
                await _forward(data[: len(data) // 2], writer)
                raise _CutError
            messages = self._server_messages.feed(data)
            await _forward(b"".join(messages), writer)
            self.is_stalled = self.is_stalled or (
                self._will_stall and any(message[0] == _READY for message in messages)
            )
        raise _CutError


class MessageSplitter:
    """Divides what one end says into messages."""

    def __init__(self, *, has_started: bool) -> None:
        self.has_started = has_started
        """Whether messages have a type; before that they have none."""
        self.awaits_one_byte = False
        """The answer to a request for encryption is one byte."""
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole by now. The caller may set `has_begun` between two calls only."""
        found = []
        data, self._rest = self._rest + data, b""
        if self.awaits_one_byte and data:
            if data[:1] != b"N":
                raise RuntimeError("the server speaks TLS, and the proxy does not: set sslmode=disable")
            self.awaits_one_byte = False
            found.append(data[:1])
            data = data[1:]
        start, head = 0, 5 if self.has_started else 4
        while len(data) >= start + head:
            end = start + head - 4 + int.from_bytes(data[start + head - 4 : start + head], "big")
            if len(data) < end:
                break
            found.append(data[start:end])
            start = end
        self._rest = data[start:]
        return found


async def _forward(data: bytes, writer: StreamWriter) -> None:
    writer.write(data)
    await writer.drain()
