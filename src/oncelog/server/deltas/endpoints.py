"""The Deltas API over HTTP and JSON, under /v1/sync/{gateway}/. Live delivery by server-sent events or a WebSocket."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec
import orjson
from aiohttp import WSCloseCode, WSMsgType, web
from msgspec import Struct

from oncelog import error_codes
from oncelog.core.deltas import GATEWAY_CHARACTERS_MAX, ROW_ID_CHARACTERS_MAX
from oncelog.core.values import Record
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.deltas import codec
from oncelog.server.deltas.message_schemas import DELTA_ID, IDENTIFIER
from oncelog.server.deltas.service import DeltasService, check_row_id, encode_row_token
from oncelog.server.endpoint import Call, Endpoint, Parameter, RequestBody, keep
from oncelog.server.errors import ApiError, shutdown_error
from oncelog.server.http_requests import get_credential, get_path_name, parse_number
from oncelog.server.json_schemas import (
    NO_NUL,
    SSE_RESPONSE,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    last_event_id_schema,
    schema_response,
)
from oncelog.server.limits import COMPACT_DELTAS_MAX, COMPACT_ROWS_MAX, CONNECT_BYTES_MAX
from oncelog.server.live_streams import LiveStreams, WebSocketStreamTransport
from oncelog.server.lookups import describe_outcome

logger: Final = logging.getLogger("oncelog.doors")

PATH: Final = "/v1/sync/{gateway}/"
_DELTA_ID_PATTERN: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def _parse_delta_id(text: str, name: str) -> str:
    if _DELTA_ID_PATTERN.fullmatch(text) is None:
        raise ApiError(error_codes.BAD_REQUEST, f"{name}: must have 64 hexadecimal digits, in lower case", field=name)
    return text


_PUSH_DESCRIPTION: Final = (
    "All deltas are taken, or none. One that the gateway knows is acknowledged again and changes nothing, so after any "
    "failure push everything again that has no answer."
)
_COMPACT_DESCRIPTION: Final = (
    "Drops the bodies of old deltas, then rows that were deleted long ago; rows that exist, ids and hashes stay. One "
    f"request compacts at most {COMPACT_DELTAS_MAX} deltas and reads at most {COMPACT_ROWS_MAX} rows: ask again while "
    "`hasMore` is true or there is a `nextAfter`."
)
_PULL_DESCRIPTION: Final = (
    "In the order of arrival at the gateway, which never changes. Ask again with `since` = `cursor` while `hasMore`. "
    "With `snapshot` the deltas have been compacted: read the snapshot, and go on from its cursor."
)
_LIVE_DESCRIPTION: Final = (
    "Server-sent events. First `connected`, with the epoch; then every delta after the cursor, and those to come. The "
    "id of each is its `sequence`, so a browser resumes by itself where it was. An event `snapshot` says that the "
    "cursor is older than the compaction, an event `error` why the server ends the stream. The same address is a "
    "WebSocket too (docs/deltas.md)."
)
_GATEWAY: Final[Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": GATEWAY_CHARACTERS_MAX,
    "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$",
    "description": "Which gateway. In NFC, without control characters, and neither `.` nor `..`.",
}
_TABLE: Final = {**IDENTIFIER, "description": "Of which table."}
_SINCE: Final = {**integer_schema("The cursor: deltas after it. A `sequence`, or a `cursor`."), "default": 0}
_EPOCH: Final = {**TEXT_SCHEMA, "description": "That of the history which the cursor is of. Another one gets 409."}
_SNAPSHOT_AFTER: Final = {**TEXT_SCHEMA, "description": "`nextAfter` of the page before. Nothing else."}
_TABLE_PARAMETER: Final = Parameter(name="table", place="path", schema=_TABLE, is_required=True, example="products")
_SNAPSHOT_AFTER_PARAMETER: Final = Parameter(name="after", schema=_SNAPSHOT_AFTER, default="", previous_name="page")
_DELTA_EXAMPLE: Final = {
    "deltaId": "29d98dedefb1b13dd6dae46db9f1fe5c8526530491d38ddb42b007fdd81be847",
    "op": "UPDATE",
    "table": "products",
    "rowId": "p1",
    "clientId": "user:developer",
    "columns": [{"column": "name", "value": "Tea"}],
    "hlc": "116000000000000000",
}
_DELTA_ID_PARAMETER: Final = Parameter(
    name="deltaId",
    place="path",
    schema={**DELTA_ID, "description": "Id of the delta."},
    parse=_parse_delta_id,
    is_required=True,
    example=_DELTA_EXAMPLE["deltaId"],
)
_GATEWAY_PARAMETER: Final = Parameter(name="gateway", place="path", schema=_GATEWAY, is_required=True, example="shop")
_CURSOR_PARAMETERS: Final = (
    Parameter(name="since", schema=_SINCE, parse=parse_number, default=0),
    Parameter(name="epoch", schema=_EPOCH, default=""),
)


class _Connect(Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of a WebSocket, and the only one that a client sends."""

    type: str
    since: int = 0
    epoch: str = ""
    token: str | None = None


_CLOSE_TYPES: Final = frozenset({WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR})
_CONNECT_DECODER: Final = msgspec.json.Decoder(_Connect)


class DeltasEndpoints:
    """The Deltas API of a server over HTTP."""

    def __init__(self, service: DeltasService) -> None:
        self.service = service
        self.streams = LiveStreams(service.auth_gate, service.limits, service.counts, "deltas")
        self.is_closing = False
        self._connect_tasks: set[asyncio.Task[_Connect]] = set()
        """First frames of WebSockets that have not come yet."""
        self._connecting_count = 0

    def __len__(self) -> int:
        """Who is connected to stay, also those who have not said yet who they are."""
        return len(self.streams) + self._connecting_count

    def list_endpoints(self) -> list[Endpoint]:
        """Return the declarations."""
        limits = self.service.limits
        limit_schema = {
            **integer_schema(),
            "default": min(limits.page_events_default, limits.page_events_max),
            "description": f"How many at most. 0 is taken as 1, more than {limits.page_events_max} as that.",
        }
        limit = Parameter(name="limit", schema=limit_schema, parse=parse_number)
        resumed = Parameter(
            name="Last-Event-ID", place="header", schema=last_event_id_schema("sequence"), parse=parse_number
        )
        after = Parameter(
            name="after",
            schema=_row_id_schema("Rows behind this one: `nextAfter` of the page before."),
            parse=_parse_row_id,
            default="",
        )
        row_id = Parameter(name="rowId", schema=_row_id_schema("Only this row."), parse=_parse_row_id)
        read = partial(Endpoint, method="GET", api="deltas", authorize=self._authorize_read)
        write = partial(Endpoint, method="POST", api="deltas", parameters=(_GATEWAY_PARAMETER,))
        return [
            write(
                path=f"{PATH}push",
                name="pushDeltas",
                summary="Push deltas",
                description=_PUSH_DESCRIPTION,
                body=RequestBody(schema="Push", decode=keep, example={"deltas": [_DELTA_EXAMPLE]}),
                authorize=lambda call: self.service.check_writable(call["gateway"], call.principal),
                handle=self._push,
                responses={200: schema_response("Pushed", "What became of each delta, in the order of the request.")},
                errors=(409, 422, 507),
            ),
            read(
                path=f"{PATH}pull",
                name="pullDeltas",
                summary="Read deltas",
                description=_PULL_DESCRIPTION,
                parameters=(_GATEWAY_PARAMETER, *_CURSOR_PARAMETERS, limit),
                handle=self._pull,
                responses={200: schema_response("Pulled", "A page.")},
                errors=(409,),
            ),
            read(
                path=f"{PATH}rows/{{table}}",
                name="getRows",
                summary="Read the rows of a table",
                description="Those that exist, merged, by `rowId`. A page may be empty though there are more.",
                parameters=(_GATEWAY_PARAMETER, _TABLE_PARAMETER, after, limit, row_id),
                handle=self._get_rows,
                responses={200: schema_response("Rows", "A page.")},
            ),
            read(
                path=f"{PATH}deltas/{{deltaId}}",
                name="getDelta",
                summary="Look a delta up by its id",
                description="Whether it was committed, and where; with the proof of its record.",
                parameters=(_GATEWAY_PARAMETER, _DELTA_ID_PARAMETER),
                handle=self._get_delta,
                responses={200: schema_response("DeltaOutcome", "What became of it.")},
                errors=(404,),
            ),
            read(
                path=f"{PATH}snapshot",
                name="getSnapshot",
                summary="Read all rows with their stamps",
                description="For whoever's cursor is older than the compaction: all pages, then a pull from `cursor`.",
                parameters=(_GATEWAY_PARAMETER, _SNAPSHOT_AFTER_PARAMETER, limit),
                handle=self._get_snapshot,
                responses={200: schema_response("Snapshot", "A page.")},
                errors=(409,),
            ),
            read(
                path=f"{PATH}live",
                name="followDeltas",
                summary="Follow deltas",
                description=_LIVE_DESCRIPTION,
                parameters=(_GATEWAY_PARAMETER, *_CURSOR_PARAMETERS, resumed),
                handle=self._follow_events,
                responses={200: SSE_RESPONSE},
                errors=(409,),
                is_stream=True,
                serve_websocket=self._serve_websocket,
            ),
            write(
                path=f"{PATH}compact",
                name="compactDeltas",
                summary="Compact a gateway",
                description=_COMPACT_DESCRIPTION,
                body=RequestBody(schema="Compaction", decode=keep, example={"keep": 1000}),
                authorize=lambda call: self.service.check_compactable(call["gateway"], call.principal),
                handle=self._compact,
                responses={200: schema_response("Compacted", "How far it is.")},
            ),
        ]

    def _authorize_read(self, call: Call) -> str:
        return self.service.check_readable(call["gateway"], call.principal)

    # --- writing

    async def _push(self, call: Call) -> bytes:
        service = self.service
        results = await service.push(call.scope, call.body, call.principal)
        previous = await service.load_previous_epochs()
        return codec.encode_push(results, service.log.epoch, previous, service.auth_gate.clock.wall_ms())

    async def _compact(self, call: Call) -> bytes:
        compaction = await self.service.compact(call.scope, call.body, call.principal.actor)
        return codec.encode_compaction(compaction, encode_row_token(compaction.next_row))

    # --- reading

    async def _pull(self, call: Call) -> bytes:
        service = self.service
        page = await service.pull(call.scope, call["since"], call["limit"], call["epoch"])
        return codec.encode_pull(
            page.deltas, page.cursor, service.log.epoch, has_more=page.has_more, is_snapshot=page.is_snapshot
        )

    async def _get_rows(self, call: Call) -> bytes:
        service, table = self.service, call["table"]
        if call["rowId"] is not None:
            return codec.encode_rows(await service.load_row(call.scope, table, call["rowId"]), "")
        return codec.encode_rows(*await service.load_rows(call.scope, table, call["after"], call["limit"]))

    async def _get_delta(self, call: Call) -> Mapping[str, Any]:
        outcome = await self.service.find_delta(call.scope, call["deltaId"])
        record = outcome.record
        assert record is not None  # noqa: S101 - found
        delta = None if record.erased else orjson.Fragment(codec.encode_delta(record))
        return await describe_outcome(self.service.log, outcome, {"delta": delta})

    async def _get_snapshot(self, call: Call) -> bytes:
        page = await self.service.load_snapshot(call.scope, call["after"], call["limit"], call.get_sent_name("after"))
        return codec.encode_snapshot(page.rows, page.cursor, page.following, self.service.log.epoch, page.horizon)

    # --- live

    def close_all(self) -> None:
        """Sends all readers away: they come back with their cursors."""
        self.streams.close_all()
        for task in self._connect_tasks:
            task.cancel()

    async def _follow_events(self, call: Call) -> web.StreamResponse:
        resumed = call["Last-Event-ID"]
        since = call["since"] if resumed is None else resumed
        await self.service.check_cursor(call.scope, since, call["epoch"])
        principal = self._recheck_principal(call.principal)
        chunks = partial(self._iterate_events, call.scope, since)
        return await self.streams.serve(
            call.request, principal, _new_read_check(call.scope), chunks, codec.encode_error
        )

    def _recheck_principal(self, principal: Principal) -> Principal:
        """Whoever has waited for the store is looked at once more: it does not know of him yet who ends readers."""
        if self.is_closing:
            raise shutdown_error()
        return self.service.auth_gate.recheck_principal(principal)

    async def _iterate_events(self, scope: str, since: int) -> AsyncGenerator[bytes, None]:
        yield b'retry: 1000\nevent: connected\ndata: {"epoch":%b}\n\n' % orjson.dumps(self.service.log.epoch)
        async with aclosing(self.service.follow(scope, since)) as batches:
            async for deltas in batches:
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
            admission = await self._admit(socket, request, caller)
        finally:
            self._connecting_count -= 1
        if admission is None:
            return
        principal, scope, since = admission
        self.service.counts.requests["deltas", "ws", "ok"] += 1
        transport = WebSocketStreamTransport(request, socket, _encode_error_frame)
        chunks = partial(self._iterate_frames, scope, since)
        following = asyncio.ensure_future(self.streams.run(transport, principal, _new_read_check(scope), chunks))
        close_task = asyncio.ensure_future(_wait_for_close(socket))
        try:
            await asyncio.wait([following, close_task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (following, close_task):
                task.cancel()
            await asyncio.wait([following, close_task])
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
        read = _read_connect(socket, self.service.limits.connect_timeout_ms / 1000)
        task = asyncio.get_running_loop().create_task(read)
        self._connect_tasks.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._connect_tasks.discard(task)
            task.cancel()
        return None if task.cancelled() else task.result()

    async def _iterate_frames(self, scope: str, since: int) -> AsyncGenerator[bytes, None]:
        yield b'{"type":"connected","epoch":%b}' % orjson.dumps(self.service.log.epoch)
        async with aclosing(self.service.follow(scope, since)) as batches:
            async for deltas in batches:
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
    return b"".join([b"id: %d\ndata: %b\n\n" % (record.sequence, codec.encode_delta(record)) for record in deltas])


def _encode_frame(deltas: Sequence[Record]) -> bytes:
    shown = b",".join(map(codec.encode_delta, deltas))
    return b'{"type":"deltas","deltas":[%b],"cursor":%d}' % (shown, deltas[-1].sequence)


def _encode_error_frame(error: ApiError) -> bytes:
    return codec.encode_error(error, type="error")


def _row_id_schema(description: str) -> Schema:
    return {"type": "string", "maxLength": ROW_ID_CHARACTERS_MAX, "pattern": NO_NUL, "description": description}


def _parse_row_id(text: str, name: str) -> str:
    check_row_id(text, name)
    return text


def _get_gateway(request: web.Request) -> str:
    return get_path_name(request, "gateway")
