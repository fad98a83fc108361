"""Stays connected to a server: connects, reads, writes, gives up on a silent one, and tries again after a pause."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from oncelog import error_codes
from oncelog.client.events.limits import ClientLimits
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.runtime.backoff import iterate_pauses_s
from oncelog.client.runtime.tokens import Token, resolve_token
from oncelog.client.runtime.websocket import Socket, Transport
from oncelog.errors import LostError, ProtocolError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client")

_ACCESS_DENIED_CODES: Final = frozenset(
    {error_codes.AUTH_FAILED, error_codes.FORBIDDEN, error_codes.VERSION_UNSUPPORTED, error_codes.BAD_REQUEST}
)


class Connector:
    """`run` goes on until it is cancelled. `on_change` is called after every frame, and when it stands otherwise."""

    def __init__(
        self,
        protocol: EventsProtocol,
        transport: Transport,
        token: Token,
        limits: ClientLimits,
        random_source: random.Random,
        on_change: Callable[[], None],
    ) -> None:
        self._protocol = protocol
        self._transport = transport
        self._token = token
        self._limits = limits
        self._random = random_source
        self._on_change = on_change
        self._write_wakeup = asyncio.Event()
        self._skip_pause_event = asyncio.Event()
        self._restart_event = asyncio.Event()
        self._busy_timer: asyncio.TimerHandle | None = None
        self.last_error: str | None = None
        """Why it is not connected; None while it is."""
        self.is_admitted = True
        """False while the server says that we may not."""

    def wake_writer(self) -> None:
        """The protocol may have something to say."""
        if self._protocol.outgoing:
            self._write_wakeup.set()

    def skip_pause(self) -> None:
        """Ends the pause before the next attempt."""
        self._skip_pause_event.set()

    def restart(self) -> None:
        """The protocol has begun again: the connection that there may be is of no use."""
        self._restart_event.set()
        self._skip_pause_event.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        protocol, limits = self._protocol, self._limits
        pauses = iterate_pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._random)
        while True:
            retry_after_ms = 0
            before = protocol.answer_count
            try:
                await self._run_connection()
            except LostError as error:
                self._record_error(str(error))
            except ProtocolError as error:
                logger.warning("%s", error)
                self._record_error(str(error))
            except ServerRefusedError as error:
                retry_after_ms = min(error.retry_after_ms, limits.pause_ms_max)
                self._record_error(str(error))
                # A token that has just expired: there is a new one for the asking.
                has_expired = callable(self._token) and protocol.answer_count - before > 1
                self.is_admitted = has_expired or error.code not in _ACCESS_DENIED_CODES
                if not self.is_admitted:
                    retry_after_ms = max(retry_after_ms, limits.refused_pause_ms_min)
            self._on_change()
            if protocol.answer_count - before > 1:  # it was more than a greeting: the next pause is a short one again
                pauses = iterate_pauses_s(limits.pause_ms_min, limits.pause_ms_max, self._random)
            await self._pause(max(next(pauses), retry_after_ms / 1000))

    def _record_error(self, error: str) -> None:
        if error != self.last_error:
            logger.info("not connected: %s", error)
        self.last_error = error

    async def _pause(self, pause_s: float) -> None:
        """For so long, or until somebody is in a hurry; with another history until that."""
        is_waiting = self._protocol.phase is EventsPhase.HISTORY_CHANGED
        try:
            async with asyncio.timeout(None if is_waiting else pause_s):
                await self._skip_pause_event.wait()
        except TimeoutError:
            pass
        self._skip_pause_event.clear()

    async def _run_connection(self) -> None:
        """One connection, from its first byte to its last. Always ends with an error."""
        self._restart_event.clear()
        token = await resolve_token(self._token)
        socket = await self._transport.connect()
        try:
            self._protocol.connect(token)
            self.wake_writer()
            self._on_change()
            await self._run_tasks(socket)
        finally:
            # First of all: what is submitted while the socket is being closed waits for the next connection.
            self._protocol.disconnect(socket.close_code)
            self._write_wakeup.clear()
            self._stop_busy_timer()
            self._on_change()
            await socket.close()

    async def _run_tasks(self, socket: Socket) -> None:
        parts = (
            self._read,
            self._write,
            self._watch_answers,
            self._watch_delivery,
            self._retry_read,
            self._wait_for_restart,
        )
        tasks = [asyncio.create_task(function(socket)) for function in parts]
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
                self._busy_timer = asyncio.get_running_loop().call_later(protocol.busy_ms / 1000, self._resume)
            if protocol.is_submitting:
                self.last_error, self.is_admitted = None, True
            if protocol.outgoing:
                self._write_wakeup.set()
            self._on_change()
            if protocol.is_flooded:
                self._yield_to_submissions()

    async def _write(self, socket: Socket) -> None:
        outgoing = self._protocol.outgoing
        while True:
            await self._write_wakeup.wait()
            self._write_wakeup.clear()
            frames = list(outgoing)
            outgoing.clear()
            for frame in frames:
                await socket.send(frame)

    async def _watch_answers(self, _socket: Socket) -> None:
        """Gives up on a server that owes an answer for too long."""
        protocol, half_s = self._protocol, self._limits.answer_timeout_ms / 2000
        while True:
            before = protocol.answer_count if protocol.is_waiting else -1
            await asyncio.sleep(half_s)
            if protocol.is_waiting and protocol.answer_count == before:
                await asyncio.sleep(half_s)
                if protocol.is_waiting and protocol.answer_count == before:
                    raise LostError(f"the server gave no answer in {self._limits.answer_timeout_ms} ms")

    async def _watch_delivery(self, _socket: Socket) -> None:
        """Submissions must not wait for those who take events, who may wait for their outcomes."""
        protocol = self._protocol
        while True:
            before = protocol.page_count
            await asyncio.sleep(self._limits.taking_timeout_ms / 1000)
            if protocol.is_page_due and protocol.page_count == before and protocol.outbox_count:
                self._yield_to_submissions()

    async def _retry_read(self, _socket: Socket) -> None:
        """Where not all partitions may be read, asks again from time to time."""
        while True:
            await asyncio.sleep(self._limits.refused_pause_ms_min / 1000)
            if self._protocol.read_error is not None:
                self._protocol.retry_read()
                self.wake_writer()

    def _yield_to_submissions(self) -> None:
        """In a sync, or following, a connection cannot stop: the next one begins by submitting what there is."""
        self._skip_pause_event.set()
        raise LostError("events are taken too slowly; the client submits first, and then goes on with them")

    async def _wait_for_restart(self, _socket: Socket) -> None:
        await self._restart_event.wait()
        raise LostError("the client starts over")

    def _stop_busy_timer(self) -> None:
        timer, self._busy_timer = self._busy_timer, None
        if timer is not None:
            timer.cancel()

    def _resume(self) -> None:
        self._busy_timer = None
        self._protocol.resume()
        self.wake_writer()
