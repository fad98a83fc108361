"""Stays connected to a server: connects, reads, writes, gives up on a silent one, and tries again after a pause."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from oncelog import codes
from oncelog.client.limits import ClientLimits
from oncelog.client.patience import pauses_s
from oncelog.client.protocol import Phase, Protocol
from oncelog.client.tokens import Token, current_token
from oncelog.client.wire import Socket, Transport
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client")

_NOT_LET_IN: Final = frozenset({codes.AUTH_FAILED, codes.FORBIDDEN, codes.VERSION_UNSUPPORTED, codes.BAD_REQUEST})


class Connecting:
    """`run` goes on until it is cancelled. `on_change` is called after every frame, and when it stands otherwise."""

    def __init__(
        self,
        protocol: Protocol,
        transport: Transport,
        token: Token,
        limits: ClientLimits,
        chance: random.Random,
        on_change: Callable[[], None],
    ) -> None:
        self._protocol = protocol
        self._transport = transport
        self._token = token
        self._limits = limits
        self._chance = chance
        self._on_change = on_change
        self._outgoing = asyncio.Event()
        self._hurry = asyncio.Event()
        self._restart = asyncio.Event()
        self._busy_timer: asyncio.TimerHandle | None = None
        self.last_error: str | None = None
        """Why it is not connected; None while it is."""
        self.is_let_in = True
        """False while the server says that we may not."""

    def sent_soon(self) -> None:
        """The protocol may have something to say."""
        if self._protocol.outgoing:
            self._outgoing.set()

    def hurry(self) -> None:
        """Ends the pause before the next attempt."""
        self._hurry.set()

    def restart(self) -> None:
        """The protocol has begun again: the connection that there may be is of no use."""
        self._restart.set()
        self._hurry.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        protocol, limits = self._protocol, self._limits
        pauses = pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._chance)
        while True:
            retry_after_ms = 0
            before = protocol.answers
            try:
                await self._connection()
            except LostError as error:
                self._fail(str(error))
            except ProtocolError as error:
                logger.warning("%s", error)
                self._fail(str(error))
            except ServerRefusedError as error:
                retry_after_ms = min(error.retry_after_ms, limits.pause_ms_max)
                self._fail(str(error))
                # A token that has just expired: there is a new one for the asking.
                has_expired = callable(self._token) and protocol.answers - before > 1
                self.is_let_in = has_expired or error.code not in _NOT_LET_IN
                if not self.is_let_in:
                    retry_after_ms = max(retry_after_ms, limits.refused_pause_ms_min)
            self._on_change()
            if protocol.answers - before > 1:  # it was more than a greeting: the next pause is a short one again
                pauses = pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._chance)
            await self._pause(max(next(pauses), retry_after_ms / 1000))

    def _fail(self, why: str) -> None:
        if why != self.last_error:
            logger.info("not connected: %s", why)
        self.last_error = why

    async def _pause(self, pause_s: float) -> None:
        """For so long, or until somebody is in a hurry; with another history until that."""
        is_waiting = self._protocol.phase is Phase.HISTORY_CHANGED
        try:
            async with asyncio.timeout(None if is_waiting else pause_s):
                await self._hurry.wait()
        except TimeoutError:
            pass
        self._hurry.clear()

    async def _connection(self) -> None:
        """One connection, from its first byte to its last. Always ends with an error."""
        self._restart.clear()
        token = await current_token(self._token)
        socket = await self._transport.connect()
        try:
            self._protocol.begin(token)
            self.sent_soon()
            self._on_change()
            await self._conversation(socket)
        finally:
            # First of all: what is submitted while the socket is being closed waits for the next connection.
            self._protocol.lost(socket.close_code)
            self._outgoing.clear()
            self._stop_busy_timer()
            self._on_change()
            await socket.close()

    async def _conversation(self, socket: Socket) -> None:
        parts = (self._read, self._write, self._watch, self._look_at_takers, self._read_again, self._restarted)
        tasks = [asyncio.create_task(work(socket)) for work in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # raises

    async def _read(self, socket: Socket) -> None:
        protocol = self._protocol
        while True:
            protocol.receive(await socket.receive())
            if protocol.history_change is not None:
                raise LostError(protocol.history_change.message)
            if protocol.busy_ms and self._busy_timer is None:
                self._busy_timer = asyncio.get_running_loop().call_later(protocol.busy_ms / 1000, self._go_on)
            if protocol.is_submitting:
                self.last_error, self.is_let_in = None, True
            if protocol.outgoing:
                self._outgoing.set()
            self._on_change()
            if protocol.is_flooded:
                self._step_aside()

    async def _write(self, socket: Socket) -> None:
        outgoing = self._protocol.outgoing
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            frames = list(outgoing)
            outgoing.clear()
            for frame in frames:
                await socket.send(frame)

    async def _watch(self, _socket: Socket) -> None:
        """Gives up on a server that owes an answer for too long."""
        protocol, half_s = self._protocol, self._limits.answer_timeout_ms / 2000
        while True:
            before = protocol.answers if protocol.is_waiting else -1
            await asyncio.sleep(half_s)
            if protocol.is_waiting and protocol.answers == before:
                await asyncio.sleep(half_s)
                if protocol.is_waiting and protocol.answers == before:
                    raise LostError(f"the server gave no answer in {self._limits.answer_timeout_ms} ms")

    async def _look_at_takers(self, _socket: Socket) -> None:
        """Submissions must not wait for those who take events, who may wait for their outcomes."""
        protocol = self._protocol
        while True:
            before = protocol.pages
            await asyncio.sleep(self._limits.taking_timeout_ms / 1000)
            if protocol.is_page_due and protocol.pages == before and protocol.pending:
                self._step_aside()

    async def _read_again(self, _socket: Socket) -> None:
        """Where not all partitions may be read, asks again from time to time."""
        while True:
            await asyncio.sleep(self._limits.refused_pause_ms_min / 1000)
            if self._protocol.refused_reading is not None:
                self._protocol.read_again()
                self.sent_soon()

    def _step_aside(self) -> None:
        """In a sync, or following, a connection cannot stop: the next one begins by submitting what there is."""
        self._hurry.set()
        raise LostError("events are taken too slowly; the client submits first, and then goes on with them")

    async def _restarted(self, _socket: Socket) -> None:
        await self._restart.wait()
        raise LostError("the client starts over")

    def _stop_busy_timer(self) -> None:
        timer, self._busy_timer = self._busy_timer, None
        if timer is not None:
            timer.cancel()

    def _go_on(self) -> None:
        self._busy_timer = None
        self._protocol.go_on()
        self.sent_soon()
