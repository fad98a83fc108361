"""WebSocket sessions of the Deltas API: the client sends one frame to connect, then the server sends deltas."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from aiohttp import WSCloseCode
from msgspec import Meta, Struct

from oncelog import error_codes
from oncelog.core.canonical import INTEGER_MAX
from oncelog.core.values import Record
from oncelog.errors import OncelogError
from oncelog.server import logger
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.deltas import codec
from oncelog.server.deltas.service import DeltasService
from oncelog.server.errors import UNREADABLE, ApiError, to_api_error
from oncelog.server.send_queue import SessionTransport
from oncelog.server.websocket_frames import encode_frame
from oncelog.server.websocket_session import WebSocketSession


class Connect(Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame, which is the only one that the server decodes."""

    type: Literal["connect"]
    since: Annotated[int, Meta(ge=0, le=INTEGER_MAX)] = 0
    epoch: str = ""
    token: str | None = None


_CONNECT_DECODER: Final = msgspec.json.Decoder(Connect)


class DeltasSession(WebSocketSession[Connect | None, None]):
    """One Deltas API connection. Frames after the first are decoded as None and ignored."""

    api: ClassVar = "deltas"
    transport_name: ClassVar = "ws"
    connect_kind: ClassVar = "connect"
    frame_noun: ClassVar = "frame"
    write_noun: ClassVar = "deltas"

    def __init__(
        self,
        service: DeltasService,
        transport: SessionTransport,
        caller: Caller,
        credential: str | None,
        parse_gateway_name: Callable[[], str],
    ) -> None:
        super().__init__(service.auth_gate, transport, caller)
        self.service = service
        self._credential = credential
        """The credential of the HTTP request, for a `connect` without a token."""
        self._parse_gateway_name = parse_gateway_name
        self._scope = ""
        self._slow_after_s = 2 * service.limits.heartbeat_ms / 1000
        self._follow_task: asyncio.Task[None] | None = None

    # --- frames in

    def _decode(self, data: bytes) -> Connect | None:
        if self.principal is not None:
            return None
        try:
            return _CONNECT_DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = f"the first frame must be a connect message: {error}"
            raise ApiError(error_codes.BAD_REQUEST, message) from error

    def receive_binary(self) -> None:
        """Refuse a binary first frame. Later binary frames are ignored, like text frames."""
        if self.principal is None:
            message = "the first frame must be a connect message, in JSON"
            self._send_error(ApiError(error_codes.BAD_REQUEST, message))

    def _get_kind(self, message: Connect | None) -> str:
        return "ignored" if message is None else "connect"

    def _get_reply_to(self, message: Connect | None) -> None:
        """Return None, because the connection has only one request."""

    async def _connect(self, request: Connect) -> None:
        service = self.service
        principal = self.auth_gate.authenticate(
            self._credential if request.token is None else request.token, self.caller
        )
        self._scope = service.check_readable(self._parse_gateway_name(), principal)
        self._set_principal(principal)
        await service.check_cursor(self._scope, request.since, request.epoch)
        if self._is_closing:  # the connection was closed during the checks
            return
        self._count_request("ok")
        self._follow_task = asyncio.get_running_loop().create_task(self._follow(request.since))

    def _ignore(self, _: None) -> None:
        """Do nothing."""

    handlers: ClassVar = {"connect": _connect, "ignored": _ignore}

    # --- frames out

    async def _follow(self, since: int) -> None:
        """Send deltas until the connection is closed or the next deltas have been compacted."""
        try:
            await self._send(b'{"type":"connected","epoch":%b}' % msgspec.json.encode(self.service.log.epoch))
            async with aclosing(self.service.follow(self._scope, since)) as batches:
                async for deltas in batches:
                    await self._send(b'{"type":"snapshot"}' if deltas is None else _encode_deltas(deltas))
            self.close(WSCloseCode.OK, "")
        except (ApiError, OncelogError) as error:
            self._send_error(to_api_error(error, UNREADABLE))
        except (ConnectionError, TimeoutError):
            self.on_disconnect()
        except Exception:
            logger.exception("a live reader failed", extra=self._describe())
            self.close(WSCloseCode.INTERNAL_ERROR, "")

    async def _send(self, message: bytes) -> None:
        """Send a message and wait until the transport has room. Raises TimeoutError after two heartbeats."""
        self.send_queue.put(encode_frame(message))
        self.send_queue.flush()
        async with asyncio.timeout(self._slow_after_s):
            await self.transport.drain()

    def _send_error(self, error: ApiError, reply_to: None = None) -> None:  # noqa: ARG002 - there is only one request
        if not self._is_closing:
            self._count_request(error.code)
            self.send_queue.put(encode_frame(codec.encode_error(error, type="error")))
            self.close(WSCloseCode.POLICY_VIOLATION, "")

    # --- the end

    def refuse_silence(self) -> None:
        """See the base class. The client first receives an error frame."""
        self._send_error(ApiError(error_codes.BAD_REQUEST, "no connect message arrived in time"))

    def _may_continue(self, principal: Principal) -> bool:
        return principal.grants.may_read(self._scope)

    def fail(self, error: Exception) -> None:
        """See the base class."""
        self._send_error(to_api_error(error, UNREADABLE))

    def on_disconnect(self) -> None:
        """See the base class. Aborts the connection if the client does not read its data (CO-31).

        aiohttp closes a connection that does not answer pings, but only after it has sent all buffered data.
        """
        is_slow = not self._is_closing and self.transport.count_buffered_bytes() > 0
        super().on_disconnect()
        if is_slow:
            logger.warning("a slow reader is closed", extra=self._describe())
            self.service.counts.slow_readers_closed += 1
            self.transport.abort()

    def _stop_delivery(self) -> None:
        if self._follow_task is not None:
            self._follow_task.cancel()


def _encode_deltas(deltas: Sequence[Record]) -> bytes:
    return b'{"type":"deltas","deltas":%b,"cursor":%d}' % (codec.encode_deltas(deltas), deltas[-1].sequence)
