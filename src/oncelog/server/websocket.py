"""Connects aiohttp's WebSockets with the sessions of an API."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from aiohttp import WSCloseCode, WSMsgType, web

from oncelog.server.auth_gate import AuthGate, OpenConnections
from oncelog.server.connection_limiter import Caller
from oncelog.server.limits import CONNECT_BYTES_MAX
from oncelog.server.send_queue import TRANSPORT_BYTES_HIGH
from oncelog.server.websocket_frames import encode_close_frame
from oncelog.server.websocket_session import WebSocketSession

_TEXT: Final = WSMsgType.TEXT  # enum member look-ups are slow in Python 3.11
FRAME_OVERHEAD_BYTES: Final = 1024
"""Allowance for frame headers and pings around the first message."""
CLOSE_WAIT_S: Final = 2.0
"""How long the server waits for the client to answer a close frame."""


S = TypeVar("S", bound=WebSocketSession[Any, Any])


class WebSocketSessionTransport:
    """Writes frames directly to the transport, bypassing aiohttp, so that a broadcast is encoded once for all readers.

    aiohttp answers pings and close frames. It also writes only whole frames, so frames do not interleave.
    """

    def __init__(self, request: web.Request, transport: asyncio.Transport) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = transport
        # TLS transports have different limits, which would make `drain` wait even though the queue has room.
        transport.set_write_buffer_limits(high=TRANSPORT_BYTES_HIGH)

    def write(self, data: bytes) -> None:
        """See `SessionTransport`."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def count_buffered_bytes(self) -> int:
        """See `SessionTransport`."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def drain(self) -> None:
        """See `SessionTransport`."""
        await self._request.writer.drain()

    def close(self, code: int, reason: str) -> None:
        """See `SessionTransport`. Sends a close frame and waits for the client's answer.

        If the server closed the socket while the client was still sending, the client's operating system would discard
        unread data, including the reason.
        """
        self.write(encode_close_frame(code, reason))
        asyncio.get_running_loop().call_later(CLOSE_WAIT_S, self.abort)

    def abort(self) -> None:
        """See `SessionTransport`."""
        if self._transport is not None:
            self._transport.abort()

    def release(self) -> None:
        """Release the transport once the connection has been closed."""
        self._transport = None

    def refuse_first_message(self) -> None:
        """Close the connection because too many bytes arrived before authentication. They are discarded."""
        self.write(
            encode_close_frame(
                WSCloseCode.MESSAGE_TOO_BIG, f"the first message must have at most {CONNECT_BYTES_MAX} bytes"
            )
        )
        if self._transport is not None:
            self._transport.close()


class _WebSocket(web.WebSocketResponse):
    """An aiohttp WebSocket that sends a reason when it closes the connection because a frame is too large."""

    session: WebSocketSession[Any, Any] | None = None
    session_transport: WebSocketSessionTransport | None = None

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        """See aiohttp."""
        if code == WSCloseCode.MESSAGE_TOO_BIG and self.session is not None and not self.closed:
            principal, auth_gate = self.session.principal, self.session.auth_gate
            auth_gate.log_limiter.log(
                logging.INFO if principal is None else logging.WARNING,
                "a frame is larger than limits.frame_bytes_max; the connection is closed",
                address=self.session.caller.address,
                actor=None if principal is None else principal.actor,
            )
            await self.session.receive_oversize()
            message = b"limits.frame_bytes_max is %d: send smaller requests" % auth_gate.limits.frame_bytes_max
        return await super().close(code=code, message=message, drain=drain)

    async def write_eof(self) -> None:  # type: ignore[override]  # as in aiohttp
        """Finish the response, and release the received bytes and the transport with its buffers.

        This object is part of a reference cycle, so the garbage collector may release it much later.
        """
        await super().write_eof()
        if self.session_transport is not None:
            self.session_transport.release()
        self.session = self.session_transport = None
        self._parser = self._reader = self._writer = self._exception = None


class WebSocketSessions(OpenConnections[S]):
    """The WebSocket connections of an API.

    `new_session` creates a session from a transport, a caller, and the details passed to `serve`.
    """

    def __init__(self, auth_gate: AuthGate, new_session: Callable[..., S]) -> None:
        super().__init__(auth_gate)
        self._new_session = new_session

    async def serve(self, request: web.Request, caller: Caller, *details: object) -> web.WebSocketResponse:
        """Serve one connection until it closes."""
        limits = self.auth_gate.limits
        socket = _WebSocket(
            # All readers get the same bytes, so frames cannot be compressed: compression is stateful per connection.
            compress=False,
            heartbeat=limits.heartbeat_ms / 1000,
            max_msg_size=limits.frame_bytes_max + 1,  # aiohttp refuses a message of exactly `max_msg_size`
            decode_text=False,
        )
        await socket.prepare(request)
        transport = request.transport
        if transport is None:  # the connection is lost
            return socket
        session_transport = WebSocketSessionTransport(request, transport)
        session = self._new_session(session_transport, caller, *details)
        caller.limit_first_message(CONNECT_BYTES_MAX + FRAME_OVERHEAD_BYTES, session_transport.refuse_first_message)
        socket.session, socket.session_transport = session, session_transport
        self.connections.add(session)
        timer = asyncio.get_running_loop().call_later(limits.connect_timeout_ms / 1000, self._check_connected, session)
        try:
            await _receive_all(socket, session)
        finally:
            timer.cancel()
            session.on_disconnect()
            self.connections.discard(session)
        return socket

    def _check_connected(self, session: S) -> None:
        if session.principal is None:
            self.auth_gate.counts.connections_refused["timeout"] += 1
            session.refuse_silence()

    async def wait_for_replies(self) -> None:
        """Wait until the replies to all accepted requests have been handed to the connections."""
        await asyncio.gather(*(session.wait_for_replies() for session in self.connections))

    def fail_all(self, error: Exception) -> None:
        """Close all sessions because the log cannot be read."""
        for session in list(self.connections):
            session.fail(error)

    def close_all(self) -> None:
        """Close all sessions because the server is stopping. Their replies have been written by now."""
        for session in list(self.connections):
            session.close(WSCloseCode.GOING_AWAY, "the server is stopping")


async def _receive_all(socket: web.WebSocketResponse, session: WebSocketSession[Any, Any]) -> None:
    async for message in socket:
        if message.type is _TEXT:
            receive_task = session.receive(message.data)
            if receive_task is not None:
                await receive_task
        elif message.type is WSMsgType.BINARY:
            session.receive_binary()
        else:
            break
