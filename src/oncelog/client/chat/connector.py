"""The task that stays connected: it reads, writes, gives up on a silent server, and tries again after a pause."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from oncelog.client.chat import codec
from oncelog.client.chat.persister import Persister, now_ms
from oncelog.client.chat.protocol import WRONG_USER, ChatPhase
from oncelog.client.chat.runtime import ChatRuntime
from oncelog.client.chat.values import ListedChat
from oncelog.client.runtime.backoff import Backoff, RetryPause
from oncelog.client.runtime.websocket import Socket
from oncelog.errors import LostError, OncelogError, ProtocolError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client.chat")

_ACCESS_DENIED_CODES: Final = frozenset({codec.AUTH_FAILED, WRONG_USER, "FORBIDDEN", "INVALID_REQUEST"})


class ChatTransport(Protocol):
    """A server, as the link sees it."""

    async def get_token(self) -> str | None:
        """Who we are. Raises LostError."""

    async def connect(self) -> Socket:
        """A connection on which nothing has been said. Raises LostError, or ServerRefusedError."""

    async def list_chats(self) -> list[ListedChat]:
        """Our chats. Raises LostError, ServerRefusedError or ProtocolError."""


class ChatConnector:
    """`run` goes on until it is cancelled."""

    def __init__(
        self,
        runtime: ChatRuntime,
        persister: Persister,
        transport: ChatTransport,
        chance: random.Random,
        wall_ms: Callable[[], int],
    ) -> None:
        self._runtime = runtime
        self._persister = persister
        self._transport = transport
        self._wall_ms = wall_ms
        self._reconnect_ms = 0
        self._backoff = Backoff(runtime.limits, chance)
        self._write_wakeup = asyncio.Event()
        self._drained_event = asyncio.Event()
        self._timer_wakeup = asyncio.Event()
        self._skip_pause_event = asyncio.Event()
        self.connection_count = 0
        """How often we were let in: what was asked over HTTP before may be old."""
        self.last_error: str | None = None
        """Why it is not connected; None while it is."""
        self.is_admitted = True
        """False while the server says that we may not."""

    @property
    def is_connected(self) -> bool:
        """Whether the server has let us in."""
        return self._runtime.last_protocol.phase in (ChatPhase.LISTING, ChatPhase.READY)

    def skip_pause(self) -> None:
        """Ends the pause before the next attempt."""
        self._skip_pause_event.set()

    def wake(self) -> None:
        """The protocol may have something to say, or another time to be called at."""
        if self._runtime.last_protocol.outgoing:
            self._drained_event.clear()
            self._write_wakeup.set()
        self._timer_wakeup.set()

    async def drain(self) -> None:
        """Returns when all that there was to say has been said, or there is nobody to say it to."""
        if self._runtime.last_protocol.phase is ChatPhase.READY and self._runtime.last_protocol.outgoing:
            self.wake()
            await self._drained_event.wait()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            pause = RetryPause()
            before, was_let_in = self._runtime.protocol.answer_count, self.connection_count
            try:
                await self._run_connection()
            except LostError as error:
                self._record_error(str(error))
                pause = RetryPause(self._reconnect_ms)
            except ProtocolError as error:
                logger.warning("%s", error)
                self._record_error(str(error))
            except ServerRefusedError as error:
                self._record_error(str(error))
                # Whoever was in, and is not any more, has a token that has just expired: there may be a new one.
                self.is_admitted = self.connection_count > was_let_in or error.code.upper() not in _ACCESS_DENIED_CODES
                pause = RetryPause(error.retry_after_ms, is_long=not self.is_admitted)
            self._runtime.wake_waiters()
            if self._runtime.protocol.answer_count - before > 1:  # it was more than a greeting
                self._backoff.reset()
            await self._pause(pause)

    def _record_error(self, error: str) -> None:
        if error != self.last_error:
            logger.info("not connected: %s", error)
        self.last_error = error

    async def _pause(self, pause: RetryPause) -> None:
        try:
            async with asyncio.timeout(self._backoff.next_pause_s(pause)):
                await self._skip_pause_event.wait()
        except TimeoutError:
            pass
        self._skip_pause_event.clear()

    async def _run_connection(self) -> None:
        """One connection, from its first byte to its last. Always ends with an error."""
        self._reconnect_ms = 0
        token = await self._transport.get_token()
        socket = await self._transport.connect()
        protocol = self._runtime.protocol
        try:
            protocol.connect(token, self._wall_ms() - now_ms())
            self.wake()
            await self._run_tasks(socket)
        finally:
            # First of all: what is sent while the socket is being closed waits for the next connection.
            self._reconnect_ms = protocol.reconnect_ms
            protocol.disconnect(socket.close_code)
            self._write_wakeup.clear()
            self._drained_event.set()
            self._persister.wake()
            self._runtime.wake_waiters()
            await socket.close()

    async def _run_tasks(self, socket: Socket) -> None:
        parts: tuple[Callable[[Socket], Awaitable[None]], ...] = (
            self._read, self._write, self._watch_answers, self._run_timer, self._load_lists
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
        protocol = self._runtime.protocol
        while True:
            data = await socket.receive()
            try:
                protocol.receive(data, now_ms())
            finally:
                self._process_changes()
            await self._persister.wait_for_capacity()

    def _process_changes(self) -> None:
        protocol = self._runtime.last_protocol
        if protocol.phase is ChatPhase.READY:
            self.last_error, self.is_admitted = None, True
        if protocol.has_changes:
            self._persister.wake()
        self.wake()
        self._runtime.wake_waiters()

    async def _write(self, socket: Socket) -> None:
        outgoing = self._runtime.protocol.outgoing
        while True:
            await self._write_wakeup.wait()
            self._write_wakeup.clear()
            while outgoing:
                frames = list(outgoing)
                outgoing.clear()
                for frame in frames:
                    await socket.send(frame)
            self._drained_event.set()

    async def _watch_answers(self, _socket: Socket) -> None:
        """Gives up on a server that owes an answer for too long."""
        protocol, half_s = self._runtime.protocol, self._runtime.limits.answer_timeout_ms / 2000
        while True:
            before = protocol.answer_count if protocol.is_waiting else -1
            await asyncio.sleep(half_s)
            if protocol.is_waiting and protocol.answer_count == before:
                await asyncio.sleep(half_s)
                if protocol.is_waiting and protocol.answer_count == before:
                    raise LostError(f"the server gave no answer in {self._runtime.limits.answer_timeout_ms} ms")

    async def _run_timer(self, _socket: Socket) -> None:
        """Calls the protocol when its time has come."""
        protocol = self._runtime.protocol
        while True:
            self._timer_wakeup.clear()
            at_ms = protocol.next_at_ms
            try:
                async with asyncio.timeout(None if at_ms is None else max(0, at_ms - now_ms()) / 1000):
                    await self._timer_wakeup.wait()
            except TimeoutError:
                protocol.tick(now_ms())
                self._process_changes()

    async def _load_lists(self, _socket: Socket) -> None:
        """Asks for our chats when the protocol wants them."""
        protocol = self._runtime.protocol
        while True:
            await self._runtime.wait_until(lambda: protocol.wants_list)
            is_first = protocol.phase is ChatPhase.LISTING
            protocol.start_list()
            try:
                chats = await self._transport.list_chats()
            except OncelogError as error:
                if is_first:
                    raise
                logger.info("the list of chats could not be had: %s", error)  # it is asked for again
                continue
            protocol.apply_list(chats, now_ms())
            if is_first:
                self.connection_count += 1
            self._process_changes()
