"""The deltas door over HTTP and JSON, under /v1/sync/{gateway}/. Live delivery by server-sent events or a WebSocket."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

import msgspec
import orjson
from aiohttp import WSCloseCode, WSMsgType, web
from msgspec import Struct

from oncelog import error_codes
from oncelog.core.values import Record
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.deltas import codec
from oncelog.server.deltas.service import DeltasService, check_row_id, encode_row_token
from oncelog.server.errors import ApiError, shutdown_error
from oncelog.server.http_requests import (
    JSON,
    check_json,
    get_credential,
    get_path_name,
    parse_number,
    parse_parameters,
    read_body,
)
from oncelog.server.limits import CONNECT_BYTES_MAX
from oncelog.server.live_streams import LiveStreams, WebSocketStreamTransport

logger: Final = logging.getLogger("oncelog.doors")

Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
PATH: Final = "/v1/sync/"
LIVE_PATH: Final = "live"
"""Behind a gateway's name: where readers stay."""


class _Connect(Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of a WebSocket, and the only one that a client sends."""

    type: str
    since: int = 0
    epoch: str = ""
    token: str | None = None


_CLOSE_TYPES: Final = frozenset({WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR})
_CONNECT_DECODER: Final = msgspec.json.Decoder(_Connect)


class DeltasEndpoints:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, service: DeltasService) -> None:
        self.service = service
        self.streams = LiveStreams(service.auth_gate, service.limits, service.counts)
        self.is_closing = False
        self._connect_tasks: set[asyncio.Task[_Connect]] = set()
        """First frames of WebSockets that have not come yet."""
        self._connecting_count = 0

    def __len__(self) -> int:
        """Who is connected to stay, also those who have not said yet who they are."""
        return len(self.streams) + self._connecting_count

    def list_routes(self) -> dict[str, tuple[str, Handler]]:
        """Method and handler of each path."""
        return {
            "push": ("POST", self._push),
            "compact": ("POST", self._compact),
            "pull": ("GET", self._pull),
            "rows/{table}": ("GET", self._get_rows),
            "snapshot": ("GET", self._get_snapshot),
            LIVE_PATH: ("GET", self._handle_live),
        }

    def _authenticate(self, request: web.Request, caller: Caller) -> Principal:
        return self.service.auth_gate.authenticate(get_credential(request), caller)

    # --- writing

    async def _push(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.service
        scope, body, principal = await self._read_request(request, caller, door.check_writable)
        results = await door.push(scope, body, principal)
        previous = await door.load_previous_epochs()
        return self._respond(codec.encode_push(results, door.log.epoch, previous, door.auth_gate.clock.wall_ms()))

    async def _compact(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.service
        scope, body, principal = await self._read_request(request, caller, door.check_compactable)
        done = await door.compact(scope, body, principal.actor)
        return self._respond(codec.encode_compaction(done, encode_row_token(done.next_row)))

    async def _read_request(
        self, request: web.Request, caller: Caller, demand: Callable[[str, Principal], str]
    ) -> tuple[str, bytes, Principal]:
        """The stream, the body and who sends it. Rights come before the body, and may be gone when it is there."""
        principal = self._authenticate(request, caller)
        demand(_get_gateway(request), principal)
        check_json(request)
        body = await read_body(request)
        principal = self.service.auth_gate.recheck_principal(principal)
        if self.is_closing:
            raise shutdown_error()
        return demand(_get_gateway(request), principal), body, principal

    # --- reading

    async def _pull(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.service
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("since", "limit", "epoch"))
        scope = door.check_readable(_get_gateway(request), principal)
        since = parse_number(given.get("since", "0"), "since")
        pulled = await door.pull(scope, since, _get_limit(given), given.get("epoch", ""))
        body = codec.encode_pull(
            pulled.deltas, pulled.cursor, door.log.epoch, has_more=pulled.has_more, is_snapshot=pulled.is_snapshot
        )
        return self._respond(body)

    async def _get_rows(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.service
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("after", "limit", "rowId"))
        scope, table = door.check_readable(_get_gateway(request), principal), get_path_name(request, "table")
        limit, after = _get_limit(given), given.get("after", "")
        check_row_id(after, "after")
        if "rowId" in given:
            return self._respond(codec.encode_rows(await door.load_row(scope, table, given["rowId"]), ""))
        return self._respond(codec.encode_rows(*await door.load_rows(scope, table, after, limit)))

    async def _get_snapshot(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.service
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("page", "limit"))
        scope = door.check_readable(_get_gateway(request), principal)
        found = await door.load_snapshot(scope, given.get("page", ""), _get_limit(given))
        return self._respond(
            codec.encode_snapshot(found.rows, found.cursor, found.following, door.log.epoch, found.horizon)
        )

    def _respond(self, body: bytes) -> web.Response:
        self.service.counts.requests["deltas", "http", "ok"] += 1
        self.service.counts.bytes_sent += len(body)
        return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})

    # --- live

    def close_all(self) -> None:
        """Sends all readers away: they come back with their cursors."""
        self.streams.close_all()
        for arriving in self._connect_tasks:
            arriving.cancel()

    async def _handle_live(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._serve_websocket(request, caller)
        door = self.service
        principal = self._authenticate(request, caller)
        given = parse_parameters(request, ("since", "epoch"))
        since = parse_number(given.get("since", "0"), "since")
        resumed = request.headers.get("Last-Event-ID")
        if resumed:
            since = parse_number(resumed, "Last-Event-ID")
        scope = door.check_readable(_get_gateway(request), principal)
        await door.check_cursor(scope, since, given.get("epoch", ""))
        principal = self._recheck_principal(principal)
        door.counts.requests["deltas", "http", "ok"] += 1
        chunks = partial(self._iterate_events, scope, since)
        return await self.streams.serve(request, principal, _new_read_check(scope), chunks, codec.encode_error)

    def _recheck_principal(self, principal: Principal) -> Principal:
        """Whoever has waited for the store is looked at once more: it does not know of him yet who ends readers."""
        if self.is_closing:
            raise shutdown_error()
        return self.service.auth_gate.recheck_principal(principal)

    async def _iterate_events(self, scope: str, since: int) -> AsyncGenerator[bytes, None]:
        yield b'retry: 1000\nevent: connected\ndata: {"epoch":%b}\n\n' % orjson.dumps(self.service.log.epoch)
        async with aclosing(self.service.follow(scope, since)) as several:
            async for deltas in several:
                yield b"event: snapshot\ndata: {}\n\n" if deltas is None else _encode_chunk(deltas)

    async def _serve_websocket(self, request: web.Request, caller: Caller) -> web.WebSocketResponse:
        limits, counts = self.service.limits, self.service.counts
        socket = web.WebSocketResponse(
            compress=False, heartbeat=limits.heartbeat_ms / 1000, max_msg_size=CONNECT_BYTES_MAX
        )
        await socket.prepare(request)
        counts.ws_connections += 1
        try:
            await socket.close(code=await self._serve_reader(socket, request, caller))
        except ConnectionError:
            pass  # it is gone
        finally:
            counts.ws_connections -= 1
            self._abort_slow(request)
        return socket

    def _abort_slow(self, request: web.Request) -> None:
        """aiohttp lets one go who does not answer its beats, but only when all that waits for it has been taken."""
        if request.transport is not None and request.transport.get_write_buffer_size():
            logger.warning("a slow reader is closed", extra={"path": request.path})
            self.service.counts.slow_readers_closed += 1
            request.transport.abort()

    async def _serve_reader(self, socket: web.WebSocketResponse, request: web.Request, caller: Caller) -> WSCloseCode:
        """Serves a reader until it goes or is sent away; with which code that is."""
        try:
            await self._follow(socket, request, caller)
        except ApiError as error:
            self.service.counts.requests["deltas", "ws", error.code] += 1
            await socket.send_str(_encode_error_frame(error).decode())
            return WSCloseCode.POLICY_VIOLATION
        except ConnectionError:
            raise
        except Exception:  # nothing that HTTP could answer with may be written to what is a WebSocket by now
            logger.exception("a live reader could not be served", extra={"path": request.path})
            return WSCloseCode.INTERNAL_ERROR
        return WSCloseCode.GOING_AWAY if self.is_closing else WSCloseCode.OK

    async def _follow(self, socket: web.WebSocketResponse, request: web.Request, caller: Caller) -> None:
        self._connecting_count += 1
        try:
            admitted = await self._admit(socket, request, caller)
        finally:
            self._connecting_count -= 1
        if admitted is None:
            return
        principal, scope, since = admitted
        self.service.counts.requests["deltas", "ws", "ok"] += 1
        wire = WebSocketStreamTransport(request, socket, _encode_error_frame)
        chunks = partial(self._iterate_frames, scope, since)
        following = asyncio.ensure_future(self.streams.run(wire, principal, _new_read_check(scope), chunks))
        leaving = asyncio.ensure_future(_wait_for_close(socket))
        try:
            await asyncio.wait([following, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (following, leaving):
                task.cancel()
            await asyncio.wait([following, leaving])
        if not following.cancelled():
            following.result()  # what went wrong in it is not kept from the log

    async def _admit(
        self, socket: web.WebSocketResponse, request: web.Request, caller: Caller
    ) -> tuple[Principal, str, int] | None:
        """Who reads which stream from where on; None if the server is stopped before that is said. Raises ApiError."""
        connect = await self._receive_connect(socket)
        if connect is None:
            return None
        credential = get_credential(request) if connect.token is None else connect.token
        principal = self.service.auth_gate.authenticate(credential, caller)
        scope = self.service.check_readable(_get_gateway(request), principal)
        await self.service.check_cursor(scope, connect.since, connect.epoch)
        return self._recheck_principal(principal), scope, connect.since

    async def _receive_connect(self, socket: web.WebSocketResponse) -> _Connect | None:
        """What the client says first; None if the server is stopped before that. Raises ApiError."""
        reading = _read_connect(socket, self.service.limits.connect_timeout_ms / 1000)
        arriving = asyncio.get_running_loop().create_task(reading)
        self._connect_tasks.add(arriving)
        try:
            await asyncio.wait([arriving])
        finally:
            self._connect_tasks.discard(arriving)
            arriving.cancel()
        return None if arriving.cancelled() else arriving.result()

    async def _iterate_frames(self, scope: str, since: int) -> AsyncGenerator[bytes, None]:
        yield b'{"type":"connected","epoch":%b}' % orjson.dumps(self.service.log.epoch)
        async with aclosing(self.service.follow(scope, since)) as several:
            async for deltas in several:
                yield b'{"type":"snapshot"}' if deltas is None else _encode_frame(deltas)


async def _read_connect(socket: web.WebSocketResponse, timeout_s: float) -> _Connect:
    """The first frame. Raises ApiError."""
    try:
        message = await socket.receive(timeout=timeout_s)
    except TimeoutError:
        raise ApiError(error_codes.BAD_REQUEST, "no connect message arrived in time") from None
    if message.type in _CLOSE_TYPES:
        raise ConnectionResetError("it is gone")
    if message.type is not WSMsgType.TEXT:
        raise ApiError(error_codes.BAD_REQUEST, "the first frame must be a connect message, in JSON")
    try:
        connect = _CONNECT_DECODER.decode(message.data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(error_codes.BAD_REQUEST, f"the first frame must be a connect message: {error}") from error
    if connect.type != "connect" or not 0 <= connect.since < 2**53:
        raise ApiError(error_codes.BAD_REQUEST, "type: must be connect, and since a whole number from 0 to 2^53−1")
    return connect


async def _wait_for_close(socket: web.WebSocketResponse) -> None:
    """Returns when the client has gone. What else it sends has no meaning, and is not kept."""
    async for _ in socket:
        pass


def _new_read_check(scope: str) -> Callable[[Principal], bool]:
    return lambda principal: principal.grants.may_read(scope)


def _encode_chunk(deltas: Sequence[Record]) -> bytes:
    return b"".join([b"id: %d\ndata: %b\n\n" % (one.sequence, codec.encode_delta(one)) for one in deltas])


def _encode_frame(deltas: Sequence[Record]) -> bytes:
    shown = b",".join(map(codec.encode_delta, deltas))
    return b'{"type":"deltas","deltas":[%b],"cursor":%d}' % (shown, deltas[-1].sequence)


def _encode_error_frame(error: ApiError) -> bytes:
    return codec.encode_error(error, type="error")


def _get_gateway(request: web.Request) -> str:
    return get_path_name(request, "gateway")


def _get_limit(parameters: dict[str, str]) -> int | None:
    return parse_number(parameters["limit"], "limit") if "limit" in parameters else None
