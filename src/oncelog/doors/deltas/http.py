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

from oncelog import codes
from oncelog.core.values import Record
from oncelog.doors.connections import Caller
from oncelog.doors.deltas import words
from oncelog.doors.deltas.door import DeltasDoor, check_row_id, row_token
from oncelog.doors.faults import DoorError, stopping
from oncelog.doors.limits import CONNECT_BYTES_MAX
from oncelog.doors.principal import Principal
from oncelog.doors.requests import JSON, body_of, credential_of, demand_json, number_of, parameters_of, path_name
from oncelog.doors.streams import SocketWire, Streams

logger: Final = logging.getLogger("oncelog.doors")

Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
PATH: Final = "/v1/sync/"
LIVE: Final = "live"
"""Behind a gateway's name: where readers stay."""


class _Connect(Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of a WebSocket, and the only one that a client sends."""

    type: str
    since: int = 0
    epoch: str = ""
    token: str | None = None


_ENDS: Final = frozenset({WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR})
_CONNECT: Final = msgspec.json.Decoder(_Connect)


class DeltasHttp:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, door: DeltasDoor) -> None:
        self.door = door
        self.streams = Streams(door.entrance, door.limits, door.counts)
        self.is_closing = False
        self._arriving: set[asyncio.Task[_Connect]] = set()
        """First frames of WebSockets that have not come yet."""
        self._newcomers = 0

    def __len__(self) -> int:
        """Who is connected to stay, also those who have not said yet who they are."""
        return len(self.streams) + self._newcomers

    def routes(self) -> dict[str, tuple[str, Handler]]:
        """Method and handler of each path."""
        return {
            "push": ("POST", self._push),
            "compact": ("POST", self._compact),
            "pull": ("GET", self._pull),
            "rows/{table}": ("GET", self._rows),
            "snapshot": ("GET", self._snapshot),
            LIVE: ("GET", self._live),
        }

    def _principal(self, request: web.Request, caller: Caller) -> Principal:
        return self.door.entrance.authenticate(credential_of(request), caller)

    # --- writing

    async def _push(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.door
        scope, body, principal = await self._asked(request, caller, door.demand_writable)
        results = await door.push(scope, body, principal)
        previous = await door.previous_epochs()
        return self._ok(words.pushed_json(results, door.log.epoch, previous, door.entrance.clock.wall_ms()))

    async def _compact(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.door
        scope, body, principal = await self._asked(request, caller, door.demand_compactable)
        done = await door.compact(scope, body, principal.actor)
        return self._ok(words.compacted_json(done, row_token(done.next_row)))

    async def _asked(
        self, request: web.Request, caller: Caller, demand: Callable[[str, Principal], str]
    ) -> tuple[str, bytes, Principal]:
        """The stream, the body and who sends it. Rights come before the body, and may be gone when it is there."""
        principal = self._principal(request, caller)
        demand(_gateway(request), principal)
        demand_json(request)
        body = await body_of(request)
        principal = self.door.entrance.still(principal)
        if self.is_closing:
            raise stopping()
        return demand(_gateway(request), principal), body, principal

    # --- reading

    async def _pull(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.door
        principal = self._principal(request, caller)
        given = parameters_of(request, ("since", "limit", "epoch"))
        scope = door.demand_readable(_gateway(request), principal)
        since = number_of(given.get("since", "0"), "since")
        pulled = await door.pull(scope, since, _limit(given), given.get("epoch", ""))
        body = words.pull_json(
            pulled.deltas, pulled.cursor, door.log.epoch, has_more=pulled.has_more, is_snapshot=pulled.is_snapshot
        )
        return self._ok(body)

    async def _rows(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.door
        principal = self._principal(request, caller)
        given = parameters_of(request, ("after", "limit", "rowId"))
        scope, table = door.demand_readable(_gateway(request), principal), path_name(request, "table")
        limit, after = _limit(given), given.get("after", "")
        check_row_id(after, "after")
        if "rowId" in given:
            return self._ok(words.rows_json(await door.row(scope, table, given["rowId"]), ""))
        return self._ok(words.rows_json(*await door.rows(scope, table, after, limit)))

    async def _snapshot(self, request: web.Request, caller: Caller) -> web.Response:
        door = self.door
        principal = self._principal(request, caller)
        given = parameters_of(request, ("page", "limit"))
        scope = door.demand_readable(_gateway(request), principal)
        found = await door.snapshot(scope, given.get("page", ""), _limit(given))
        return self._ok(words.snapshot_json(found.rows, found.cursor, found.following, door.log.epoch, found.horizon))

    def _ok(self, body: bytes) -> web.Response:
        self.door.counts.requests["deltas", "http", "ok"] += 1
        self.door.counts.bytes_sent += len(body)
        return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})

    # --- live

    def finish(self) -> None:
        """Sends all readers away: they come back with their cursors."""
        self.streams.finish()
        for arriving in self._arriving:
            arriving.cancel()

    async def _live(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._serve_socket(request, caller)
        door = self.door
        principal = self._principal(request, caller)
        given = parameters_of(request, ("since", "epoch"))
        since = number_of(given.get("since", "0"), "since")
        resumed = request.headers.get("Last-Event-ID")
        if resumed:
            since = number_of(resumed, "Last-Event-ID")
        scope = door.demand_readable(_gateway(request), principal)
        await door.demand_cursor(scope, since, given.get("epoch", ""))
        principal = self._still(principal)
        door.counts.requests["deltas", "http", "ok"] += 1
        chunks = partial(self._events, scope, since)
        return await self.streams.serve(request, principal, _reader_of(scope), chunks, words.error_json)

    def _still(self, principal: Principal) -> Principal:
        """Whoever has waited for the store is looked at once more: it does not know of him yet who ends readers."""
        if self.is_closing:
            raise stopping()
        return self.door.entrance.still(principal)

    async def _events(self, scope: str, since: int) -> AsyncGenerator[bytes, None]:
        yield b'retry: 1000\nevent: connected\ndata: {"epoch":%b}\n\n' % orjson.dumps(self.door.log.epoch)
        async with aclosing(self.door.follow(scope, since)) as several:
            async for deltas in several:
                yield b"event: snapshot\ndata: {}\n\n" if deltas is None else _chunk(deltas)

    async def _serve_socket(self, request: web.Request, caller: Caller) -> web.WebSocketResponse:
        limits, counts = self.door.limits, self.door.counts
        socket = web.WebSocketResponse(
            compress=False, heartbeat=limits.heartbeat_ms / 1000, max_msg_size=CONNECT_BYTES_MAX
        )
        await socket.prepare(request)
        counts.ws_connections += 1
        try:
            await socket.close(code=await self._served(socket, request, caller))
        except ConnectionError:
            pass  # it is gone
        finally:
            counts.ws_connections -= 1
            self._let_go(request)
        return socket

    def _let_go(self, request: web.Request) -> None:
        """aiohttp lets one go who does not answer its beats, but only when all that waits for it has been taken."""
        if request.transport is not None and request.transport.get_write_buffer_size():
            logger.warning("a slow reader is closed", extra={"path": request.path})
            self.door.counts.slow_readers_closed += 1
            request.transport.abort()

    async def _served(self, socket: web.WebSocketResponse, request: web.Request, caller: Caller) -> WSCloseCode:
        """Serves a reader until it goes or is sent away; with which code that is."""
        try:
            await self._follow_on(socket, request, caller)
        except DoorError as error:
            self.door.counts.requests["deltas", "ws", error.code] += 1
            await socket.send_str(_error_frame(error).decode())
            return WSCloseCode.POLICY_VIOLATION
        except ConnectionError:
            raise
        except Exception:  # nothing that HTTP could answer with may be written to what is a WebSocket by now
            logger.exception("a live reader could not be served", extra={"path": request.path})
            return WSCloseCode.INTERNAL_ERROR
        return WSCloseCode.GOING_AWAY if self.is_closing else WSCloseCode.OK

    async def _follow_on(self, socket: web.WebSocketResponse, request: web.Request, caller: Caller) -> None:
        self._newcomers += 1
        try:
            admitted = await self._admitted(socket, request, caller)
        finally:
            self._newcomers -= 1
        if admitted is None:
            return
        principal, scope, since = admitted
        self.door.counts.requests["deltas", "ws", "ok"] += 1
        wire = SocketWire(request, socket, _error_frame)
        chunks = partial(self._frames, scope, since)
        following = asyncio.ensure_future(self.streams.run(wire, principal, _reader_of(scope), chunks))
        leaving = asyncio.ensure_future(_gone(socket))
        try:
            await asyncio.wait([following, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (following, leaving):
                task.cancel()
            await asyncio.wait([following, leaving])
        if not following.cancelled():
            following.result()  # what went wrong in it is not kept from the log

    async def _admitted(
        self, socket: web.WebSocketResponse, request: web.Request, caller: Caller
    ) -> tuple[Principal, str, int] | None:
        """Who reads which stream from where on; None if the server is stopped before that is said. Raises DoorError."""
        connect = await self._first_frame(socket)
        if connect is None:
            return None
        credential = credential_of(request) if connect.token is None else connect.token
        principal = self.door.entrance.authenticate(credential, caller)
        scope = self.door.demand_readable(_gateway(request), principal)
        await self.door.demand_cursor(scope, connect.since, connect.epoch)
        return self._still(principal), scope, connect.since

    async def _first_frame(self, socket: web.WebSocketResponse) -> _Connect | None:
        """What the client says first; None if the server is stopped before that. Raises DoorError."""
        reading = _connect_of(socket, self.door.limits.connect_timeout_ms / 1000)
        arriving = asyncio.get_running_loop().create_task(reading)
        self._arriving.add(arriving)
        try:
            await asyncio.wait([arriving])
        finally:
            self._arriving.discard(arriving)
            arriving.cancel()
        return None if arriving.cancelled() else arriving.result()

    async def _frames(self, scope: str, since: int) -> AsyncGenerator[bytes, None]:
        yield b'{"type":"connected","epoch":%b}' % orjson.dumps(self.door.log.epoch)
        async with aclosing(self.door.follow(scope, since)) as several:
            async for deltas in several:
                yield b'{"type":"snapshot"}' if deltas is None else _frame(deltas)


async def _connect_of(socket: web.WebSocketResponse, timeout_s: float) -> _Connect:
    """The first frame. Raises DoorError."""
    try:
        message = await socket.receive(timeout=timeout_s)
    except TimeoutError:
        raise DoorError(codes.BAD_REQUEST, "no connect message arrived in time") from None
    if message.type in _ENDS:
        raise ConnectionResetError("it is gone")
    if message.type is not WSMsgType.TEXT:
        raise DoorError(codes.BAD_REQUEST, "the first frame must be a connect message, in JSON")
    try:
        connect = _CONNECT.decode(message.data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DoorError(codes.BAD_REQUEST, f"the first frame must be a connect message: {error}") from error
    if connect.type != "connect" or not 0 <= connect.since < 2**53:
        raise DoorError(codes.BAD_REQUEST, "type: must be connect, and since a whole number from 0 to 2^53−1")
    return connect


async def _gone(socket: web.WebSocketResponse) -> None:
    """Returns when the client has gone. What else it sends has no meaning, and is not kept."""
    async for _ in socket:
        pass


def _reader_of(scope: str) -> Callable[[Principal], bool]:
    return lambda principal: principal.grants.may_read(scope)


def _chunk(deltas: Sequence[Record]) -> bytes:
    return b"".join([b"id: %d\ndata: %b\n\n" % (one.sequence, words.delta_json(one)) for one in deltas])


def _frame(deltas: Sequence[Record]) -> bytes:
    shown = b",".join(map(words.delta_json, deltas))
    return b'{"type":"deltas","deltas":[%b],"cursor":%d}' % (shown, deltas[-1].sequence)


def _error_frame(error: DoorError) -> bytes:
    return words.error_json(error, type="error")


def _gateway(request: web.Request) -> str:
    return path_name(request, "gateway")


def _limit(given: dict[str, str]) -> int | None:
    return number_of(given["limit"], "limit") if "limit" in given else None
