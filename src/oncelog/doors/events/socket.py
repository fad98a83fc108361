"""The WebSocket of the events door: aiohttp's socket on one side, a session on the other."""

import asyncio
from typing import Final

from aiohttp import WSMsgType, web

from oncelog.doors.events import words
from oncelog.doors.events.door import EventsDoor
from oncelog.doors.events.outbox import WIRE_BYTES_HIGH
from oncelog.doors.events.session import CloseCode, Session

CLOSE_WAIT_S: Final = 2.0
"""How long a client that is sent away has to agree."""


class SocketWire:
    """Writes frames straight to the transport: one that goes to a thousand readers is encoded once, for all of them.

    aiohttp answers pings and closes; every write of its and of ours is of whole frames, so that they do not mix.
    """

    def __init__(self, request: web.Request, transport: asyncio.Transport) -> None:
        self._request = request
        self._transport = transport
        # Of TLS the limits are others, and one would wait for room that is there by that measure.
        transport.set_write_buffer_limits(high=WIRE_BYTES_HIGH)

    def write(self, data: bytes) -> None:
        """As `Wire` says."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def waiting_bytes(self) -> int:
        """As `Wire` says."""
        return self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """As `Wire` says."""
        await self._request.writer.drain()

    def close(self, code: int, reason: str) -> None:
        """As `Wire` says: tells the client, and waits for it to agree. The socket is not shut before.

        If it were while the client still sends, the client's system would throw away what it has not read yet, and
        with it the reason.
        """
        self.write(words.close_frame(code, reason))
        asyncio.get_running_loop().call_later(CLOSE_WAIT_S, self.abort)

    def abort(self) -> None:
        """As `Wire` says."""
        self._transport.abort()


class Sockets:
    """All connections of a server."""

    def __init__(self, door: EventsDoor) -> None:
        self._door = door
        self._sessions: set[Session] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def serve(self, request: web.Request, address: str) -> web.WebSocketResponse:
        """One connection, from its first frame to its last."""
        limits = self._door.limits
        socket = web.WebSocketResponse(
            # Frames are written by us, and the same bytes go to all: there is no state of a compression in them.
            compress=False,
            heartbeat=limits.heartbeat_ms / 1000,
            max_msg_size=limits.frame_bytes_max,
            decode_text=False,
        )
        await socket.prepare(request)
        transport = request.transport
        if transport is None:  # it is gone already
            return socket
        session = Session(self._door, SocketWire(request, transport), address)
        self._sessions.add(session)
        self._door.counts.ws_connections += 1
        timer = asyncio.get_running_loop().call_later(limits.connect_timeout_ms / 1000, _demand_connected, session)
        try:
            await _receive_all(socket, session)
        finally:
            timer.cancel()
            session.closed()
            self._sessions.discard(session)
            self._door.counts.ws_connections -= 1
        return socket

    def renew(self) -> None:
        """Looks at the rights of all: expired ones end (CO-23), changed ones are those of now."""
        entrance = self._door.entrance
        for session in list(self._sessions):
            principal = session.principal
            if principal is not None:
                current = entrance.current(principal)
                if current is not principal:
                    session.renew(current)

    async def drained(self) -> None:
        """Returns when what has been answered is on its way to all who read."""
        waiting = [session.outbox.drained() for session in self._sessions]
        await asyncio.gather(*waiting)

    def fail(self, error: Exception) -> None:
        """Lets all of them go: the log cannot be read."""
        for session in list(self._sessions):
            session.end(error)

    def finish(self) -> None:
        """Tells all that the server goes away. Their answers have been written before."""
        for session in list(self._sessions):
            session.finish(CloseCode.GOING_AWAY, "the server is being stopped")


async def _receive_all(socket: web.WebSocketResponse, session: Session) -> None:
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            waiting = session.receive(message.data)
            if waiting is not None:
                await waiting
        elif message.type is WSMsgType.BINARY:
            session.receive_binary()
        else:
            break


def _demand_connected(session: Session) -> None:
    if session.principal is None:
        session.finish(CloseCode.POLICY, "no connect message came in time")
