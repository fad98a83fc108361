"""The task that stays connected: it reads, writes, gives up on a silent server, and tries again after a pause."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from oncelog.client.chat import words
from oncelog.client.chat.desk import Desk
from oncelog.client.chat.keeper import Keeper, now_ms
from oncelog.client.chat.protocol import WRONG_USER, Phase
from oncelog.client.chat.values import Listed
from oncelog.client.patience import Patience, Pause
from oncelog.client.wire import Socket
from oncelog.errors import LostError, OncelogError, ProtocolError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client.chat")

_NOT_LET_IN: Final = frozenset({words.AUTH_FAILED, WRONG_USER, "FORBIDDEN", "INVALID_REQUEST"})


class Wire(Protocol):
    """A server, as the link sees it."""

    async def token(self) -> str | None:
        """Who we are. Raises LostError."""

    async def socket(self) -> Socket:
        """A connection on which nothing has been said. Raises LostError, or ServerRefusedError."""

    async def chats(self) -> list[Listed]:
        """Our chats. Raises LostError, ServerRefusedError or ProtocolError."""


class Link:
    """`run` goes on until it is cancelled."""

    def __init__(
        self, desk: Desk, keeper: Keeper, wire: Wire, chance: random.Random, wall_ms: Callable[[], int]
    ) -> None:
        self._desk = desk
        self._keeper = keeper
        self._wire = wire
        self._wall_ms = wall_ms
        self._closing_ms = 0
        self._patience = Patience(desk.limits, chance)
        self._outgoing = asyncio.Event()
        self._drained = asyncio.Event()
        self._alarm = asyncio.Event()
        self._hurry = asyncio.Event()
        self.connections = 0
        """How often we were let in: what was asked over HTTP before may be old."""
        self.last_error: str | None = None
        """Why it is not connected; None while it is."""
        self.is_let_in = True
        """False while the server says that we may not."""

    @property
    def is_connected(self) -> bool:
        """Whether the server has let us in."""
        return self._desk.protocol_at_end.phase in (Phase.LISTING, Phase.READY)

    def hurry(self) -> None:
        """Ends the pause before the next attempt."""
        self._hurry.set()

    def changed(self) -> None:
        """The protocol may have something to say, or another time to be called at."""
        if self._desk.protocol_at_end.outgoing:
            self._drained.clear()
            self._outgoing.set()
        self._alarm.set()

    async def drained(self) -> None:
        """Returns when all that there was to say has been said, or there is nobody to say it to."""
        if self._desk.protocol_at_end.phase is Phase.READY and self._desk.protocol_at_end.outgoing:
            self.changed()
            await self._drained.wait()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            pause = Pause()
            before, was_let_in = self._desk.protocol.answers, self.connections
            try:
                await self._connection()
            except LostError as error:
                self._fail(str(error))
                pause = Pause(self._closing_ms)
            except ProtocolError as error:
                logger.warning("%s", error)
                self._fail(str(error))
            except ServerRefusedError as error:
                self._fail(str(error))
                # Whoever was in, and is not any more, has a token that has just expired: there may be a new one.
                self.is_let_in = self.connections > was_let_in or error.code.upper() not in _NOT_LET_IN
                pause = Pause(error.retry_after_ms, is_long=not self.is_let_in)
            self._desk.wake()
            if self._desk.protocol.answers - before > 1:  # it was more than a greeting
                self._patience.renew()
            await self._wait(pause)

    def _fail(self, why: str) -> None:
        if why != self.last_error:
            logger.info("not connected: %s", why)
        self.last_error = why

    async def _wait(self, pause: Pause) -> None:
        try:
            async with asyncio.timeout(self._patience.pause_s(pause)):
                await self._hurry.wait()
        except TimeoutError:
            pass
        self._hurry.clear()

    async def _connection(self) -> None:
        """One connection, from its first byte to its last. Always ends with an error."""
        self._closing_ms = 0
        token = await self._wire.token()
        socket = await self._wire.socket()
        protocol = self._desk.protocol
        try:
            protocol.begin(token, self._wall_ms() - now_ms())
            self.changed()
            await self._conversation(socket)
        finally:
            # First of all: what is sent while the socket is being closed waits for the next connection.
            self._closing_ms = protocol.closing_ms
            protocol.lost(socket.close_code)
            self._outgoing.clear()
            self._drained.set()
            self._keeper.work()
            self._desk.wake()
            await socket.close()

    async def _conversation(self, socket: Socket) -> None:
        parts: tuple[Callable[[Socket], Awaitable[None]], ...] = (
            self._read, self._write, self._watch, self._be_on_time, self._list
        )  # fmt: skip
        tasks = [asyncio.ensure_future(work(socket)) for work in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # raises

    async def _read(self, socket: Socket) -> None:
        protocol = self._desk.protocol
        while True:
            data = await socket.receive()
            try:
                protocol.receive(data, now_ms())
            finally:
                self._received()
            await self._keeper.room()

    def _received(self) -> None:
        protocol = self._desk.protocol_at_end
        if protocol.phase is Phase.READY:
            self.last_error, self.is_let_in = None, True
        if protocol.has_changes:
            self._keeper.work()
        self.changed()
        self._desk.wake()

    async def _write(self, socket: Socket) -> None:
        outgoing = self._desk.protocol.outgoing
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            while outgoing:
                frames = list(outgoing)
                outgoing.clear()
                for frame in frames:
                    await socket.send(frame)
            self._drained.set()

    async def _watch(self, _socket: Socket) -> None:
        """Gives up on a server that owes an answer for too long."""
        protocol, half_s = self._desk.protocol, self._desk.limits.answer_timeout_ms / 2000
        while True:
            before = protocol.answers if protocol.is_waiting else -1
            await asyncio.sleep(half_s)
            if protocol.is_waiting and protocol.answers == before:
                await asyncio.sleep(half_s)
                if protocol.is_waiting and protocol.answers == before:
                    raise LostError(f"the server gave no answer in {self._desk.limits.answer_timeout_ms} ms")

    async def _be_on_time(self, _socket: Socket) -> None:
        """Calls the protocol when its time has come."""
        protocol = self._desk.protocol
        while True:
            self._alarm.clear()
            at_ms = protocol.next_at_ms
            try:
                async with asyncio.timeout(None if at_ms is None else max(0, at_ms - now_ms()) / 1000):
                    await self._alarm.wait()
            except TimeoutError:
                protocol.tick(now_ms())
                self._received()

    async def _list(self, _socket: Socket) -> None:
        """Asks for our chats when the protocol wants them."""
        protocol = self._desk.protocol
        while True:
            await self._desk.until(lambda: protocol.wants_list)
            is_first = protocol.phase is Phase.LISTING
            protocol.list_asked()
            try:
                chats = await self._wire.chats()
            except OncelogError as error:
                if is_first:
                    raise
                logger.info("the list of chats could not be had: %s", error)  # it is asked for again
                continue
            protocol.listed(chats, now_ms())
            if is_first:
                self.connections += 1
            self._received()
