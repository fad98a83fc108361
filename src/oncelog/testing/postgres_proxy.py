"""A proxy for PostgreSQL sessions, which cuts them at chosen messages, mainly around COMMIT.

    async with PostgresProxy(server.address) as proxy:
        store = PostgresStore(proxy.address)
        proxy.commit_faults.append(CommitFault.CUT_AT_ANSWER)  # the next COMMIT succeeds; its answer is lost
        ...
        assert proxy.done[CommitFault.CUT_AT_ANSWER]

The proxy splits the streams into messages (type, length, body; before the session starts, length and code) and
recognises a COMMIT that is sent as a simple query. The next entry in `commit_faults` determines the fault of a COMMIT.
Without an entry, the fault depends only on the rates, the seed, the connection's number and the message's place in it.
The proxy can hold answers (`hold`), stall open sessions (`stall_all`, `stalled_sessions`) and make the server
unreachable (`is_unreachable`). It counts requests to cancel a statement. It does not support TLS, so the server must
not offer TLS either.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from oncelog.testing.proxy_server import CHUNK_BYTES, HOST, ProxyServer, close_writer

CANCEL_REQUEST: Final = 80877102
_ENCRYPTION_REQUESTS: Final = (80877103, 80877104)
_COMMIT: Final = b"COMMIT"
_SIMPLE_QUERY: Final = ord("Q")
_READY: Final = ord("Z")
_REQUEST_ENDS: Final = b"QSHdcf"
"""Messages that complete a request, so the client may then pause for a long time (Sync, Flush, part of a COPY)."""


class CommitFault(StrEnum):
    """Fault of a COMMIT."""

    CUT_BEFORE = "cut_before"
    """The COMMIT does not reach the server."""
    CUT_AFTER = "cut_after"
    """The COMMIT reaches the server, and the connection is cut immediately."""
    CUT_AT_ANSWER = "cut_at_answer"
    """The server answers, but the connection is cut before the client gets the answer."""
    CUT_IN_ANSWER = "cut_in_answer"
    """The client gets only the first half of the answer."""
    STALLED = "stalled"
    """The COMMIT reaches the server. Its answer and all later answers are lost, but the connection remains open."""


class Incident(StrEnum):
    """Other events that `PostgresProxy.done` counts."""

    REFUSED = "refused"
    """A connection was accepted and immediately closed."""
    CUT = "cut"
    """The connection was cut inside or after a message other than COMMIT."""
    PASSED = "passed"
    """A COMMIT and its answer were forwarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresFaults:
    """Fault rates, from 0 (never) to 1 (always)."""

    refuse_rate: float = 0.0
    """Per connection."""
    commit_rate: float = 0.0
    """Per COMMIT, with a random `CommitFault`."""
    cut_rate: float = 0.0
    """Per other message to the server."""


NO_FAULTS: Final = PostgresFaults()


class HeldMessage:
    """A query or an answer that the proxy holds."""

    def __init__(self, statement: bytes, *, is_query: bool, requests: int = 0) -> None:
        self.statement = statement
        self.is_query = is_query
        self.requests = requests
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def wait_reached(self) -> None:
        """Wait until the message reaches the proxy. If it is an answer, the server has then executed the request."""
        await self._reached.wait()

    def release(self) -> None:
        """Forward the message."""
        self._released.set()

    async def wait_released(self) -> None:
        """Wait for `release`. The proxy calls this."""
        self._reached.set()
        await self._released.wait()


class PostgresProxy(ProxyServer["_ProxiedSession", PostgresFaults]):
    """Asynchronous context manager that listens on a separate port. `target` is the address of a database."""

    def __init__(self, target: str, *, seed: int = 0, faults: PostgresFaults = NO_FAULTS) -> None:
        super().__init__(seed, faults)
        self.target = target
        """Address for new connections. Only its first host is used."""
        self.commit_faults: deque[CommitFault] = deque()
        """Faults for the next COMMITs on any connection."""
        self.is_unreachable = False
        """Whether new connections to the server fail."""
        self.stalled_sessions = 0
        """How many of the next sessions get no answers after they start."""
        self.cancel_requests = 0
        self.held: list[HeldMessage] = []

    def __repr__(self) -> str:
        return f"PostgresProxy(seed={self.seed}, faults={self.faults}, done={dict(self.done)})"

    @property
    def address(self) -> str:
        """Return the address of the target through the proxy."""
        parts = urlsplit(self.target)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{HOST}:{self.port}"))

    def hold(self, statement: str, *, is_query: bool = False) -> HeldMessage:
        """Hold the answer to the next simple query that starts with `statement`, or the query itself."""
        message = HeldMessage(statement.encode(), is_query=is_query)
        self.held.append(message)
        return message

    def hold_after(self, statement: str, requests: int) -> HeldMessage:
        """Hold the answers after some requests, counted from the next simple query that starts with `statement`."""
        message = HeldMessage(statement.encode(), is_query=True, requests=requests)
        self.held.append(message)
        return message

    def stall_all(self) -> None:
        """Drop all server answers to the current connections, but keep the connections open."""
        for link in self._connections:
            link.is_stalled = True

    def calm(self) -> None:
        """Stop all faults. Connections that have lost bytes are cut."""
        self.faults = NO_FAULTS
        self.commit_faults.clear()
        for link in list(self._connections):
            if link.is_stalled:
                link.cut()

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.accepted_count += 1
        chance = Random(f"{self.seed}/{self.accepted_count}")  # noqa: S311 - repeatable
        if self._server is None or self.is_unreachable or chance.random() < self.faults.refuse_rate:
            self.done[Incident.REFUSED] += 1
            close_writer(writer, is_reset=False)
            return
        link = _ProxiedSession(self, chance, reader, writer)
        self._add(link)


class _CutError(Exception):
    """Cuts a connection on purpose. Bytes that were forwarded still arrive."""


class _ProxiedSession:
    """One connection: two sockets, and a task for each direction."""

    def __init__(self, proxy: PostgresProxy, random: Random, reader: StreamReader, writer: StreamWriter) -> None:
        self.is_stalled = False
        self._proxy = proxy
        self._random = random
        self._client = reader
        self._writers = [writer]
        self._client_messages = MessageSplitter(has_started=False)
        self._server_messages = MessageSplitter(has_started=True)
        self._commit_fault: CommitFault | None = None
        """Fault of a forwarded COMMIT that has not been answered yet."""
        self._held: HeldMessage | None = None
        self._held_after: HeldMessage | None = None
        self._requests = 0
        """Requests since `_held_after` matched."""
        self._will_stall = proxy.stalled_sessions > 0
        proxy.stalled_sessions -= self._will_stall
        self.task = asyncio.get_running_loop().create_task(self._run())

    def cut(self, *, is_reset: bool = True) -> None:
        self._close_sockets(is_reset=is_reset)
        self.task.cancel()

    async def _run(self) -> None:
        parts = urlsplit(self._proxy.target)
        try:
            server, to_server = await asyncio.open_connection(parts.hostname, parts.port, limit=CHUNK_BYTES)
            self._writers.append(to_server)
            for writer in self._writers:
                # With this limit, `drain` waits until the kernel has all bytes, so that a cut does not lose them.
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
        """Decide the fault of a message. Raises an error to cut the connection before the message is forwarded."""
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
    """Splits the stream from one end into messages."""

    def __init__(self, *, has_started: bool) -> None:
        self.has_started = has_started
        """Whether the session has started, after which messages have a type."""
        self.awaits_one_byte = False
        """Whether the next byte is the answer to a request for encryption."""
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the complete messages. The caller may set `has_started` only between two calls."""
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
