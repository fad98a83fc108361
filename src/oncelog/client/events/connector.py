"""The task that keeps an events client connected to its server."""

import asyncio
from collections.abc import Sequence

from oncelog.client.events.outbox import EventsRuntime
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.runtime.backoff import RetryPause
from oncelog.client.runtime.connector import BaseConnector, ConnectionPart
from oncelog.client.runtime.http import Socket, Transport
from oncelog.client.runtime.options import Token, resolve_token
from oncelog.errors import LostError


class Connector(BaseConnector[EventsRuntime, EventsProtocol]):
    """Connector of an events client."""

    def __init__(
        self,
        runtime: EventsRuntime,
        transport: Transport,
        token: Token,
    ) -> None:
        super().__init__(runtime, may_renew_token=callable(token))
        self._transport = transport
        self._token = token
        self._restart_event = asyncio.Event()
        self._busy_event = asyncio.Event()

    def restart(self) -> None:
        """Close the connection and open a new one, because the protocol has started over."""
        self._restart_event.set()
        self.skip_pause()

    async def _connect(self) -> Socket:
        self._restart_event.clear()
        self._busy_event.clear()
        token = await resolve_token(self._token)
        socket = await self._transport.connect()
        self._protocol.connect(token)
        return socket

    def _list_parts(self) -> Sequence[ConnectionPart]:
        return self._watch_delivery, self._retry_read, self._resume_requests, self._wait_for_restart

    async def _wait(self, pause: RetryPause) -> None:
        if self._protocol.phase is EventsPhase.HISTORY_CHANGED:
            await self._backoff.sleep(None)
        else:
            await super()._wait(pause)

    async def _read(self, socket: Socket) -> None:
        protocol = self._protocol
        while True:
            protocol.receive(await socket.receive())
            if protocol.history_change is not None:
                raise LostError(protocol.history_change.message)
            if protocol.busy_ms:
                self._busy_event.set()
            self._process_changes()
            if protocol.is_flooded:
                self._yield_to_submissions()

    async def _watch_delivery(self, _socket: Socket) -> None:
        """Reconnect while handlers are slow, to send submissions first: a handler may be waiting for an outcome."""
        protocol = self._protocol
        while True:
            before = protocol.page_count
            await asyncio.sleep(self._runtime.limits.taking_timeout_ms / 1000)
            if protocol.is_page_due and protocol.page_count == before and protocol.outbox_count:
                self._yield_to_submissions()

    async def _retry_read(self, _socket: Socket) -> None:
        """Retry the request for events at intervals while the client is not allowed to read all partitions."""
        while True:
            await asyncio.sleep(self._runtime.limits.refused_pause_ms_min / 1000)
            if self._protocol.read_error is not None:
                self._protocol.retry_read()
                self.wake_writer()

    def _yield_to_submissions(self) -> None:
        """Drop the connection, because a sync cannot be interrupted. The next connection first sends the outbox."""
        self.skip_pause()
        raise LostError("handlers are too slow; the client reconnects to submit before it requests further events")

    async def _wait_for_restart(self, _socket: Socket) -> None:
        await self._restart_event.wait()
        raise LostError("the client starts over")

    async def _resume_requests(self, _socket: Socket) -> None:
        """Resume sending requests after the pause that a busy server requested."""
        while True:
            await self._busy_event.wait()
            await asyncio.sleep(self._protocol.busy_ms / 1000)
            self._busy_event.clear()
            self._protocol.resume()
            self.wake_writer()
