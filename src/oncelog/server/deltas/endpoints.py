"""The Deltas API over HTTP and JSON, under /v1/sync/{gateway}/, with live delivery over SSE or a WebSocket."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import orjson
from aiohttp import web

from oncelog.core.deltas import GATEWAY_CHARACTERS_MAX, ROW_ID_CHARACTERS_MAX, is_identifier
from oncelog.core.values import Record
from oncelog.server.api_service import EPOCH_PARAMETER, path_parameter, resume_parameter
from oncelog.server.connection_limiter import Caller
from oncelog.server.deltas import codec
from oncelog.server.deltas.codec import DELTA_ID, IDENTIFIER
from oncelog.server.deltas.service import DeltasService, parse_gateway
from oncelog.server.deltas.session import DeltasSession
from oncelog.server.endpoint import (
    TICKET,
    Call,
    Endpoint,
    Parameter,
    RequestBody,
    get_credential,
    get_path_name,
    keep,
    parse_number,
)
from oncelog.server.limits import COMPACT_DELTAS_MAX, COMPACT_ROWS_MAX
from oncelog.server.live_streams import LiveStreams, encode_event
from oncelog.server.messages import (
    NO_NUL,
    SSE_RESPONSE,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    new_decoder,
    schema_response,
)
from oncelog.server.websocket import WebSocketSessions

PATH: Final = "/v1/sync/{gateway}/"


_parse_row_id: Final = new_decoder(
    lambda text: len(text) <= ROW_ID_CHARACTERS_MAX and "\0" not in text,
    f"must have at most {ROW_ID_CHARACTERS_MAX} characters and must not contain U+0000",
    limit=ROW_ID_CHARACTERS_MAX,
)
_DELTA_ID_EXAMPLE: Final = "29d98dedefb1b13dd6dae46db9f1fe5c8526530491d38ddb42b007fdd81be847"
_DELTA_EXAMPLE: Final = {
    "deltaId": _DELTA_ID_EXAMPLE,
    "op": "UPDATE",
    "table": "products",
    "rowId": "p1",
    "clientId": "user:developer",
    "columns": [{"column": "name", "value": "Tea"}],
    "hlc": "116000000000000000",
}
_GATEWAY_PARAMETER: Final = path_parameter(
    "gateway",
    {
        "type": "string",
        "minLength": 1,
        "maxLength": GATEWAY_CHARACTERS_MAX,
        "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]*$",
    },
    "Name of the gateway, in NFC, without control characters, and not `.` or `..`.",
    "shop",
)
_CURSOR_PARAMETERS: Final = (
    Parameter(
        name="since",
        schema={**integer_schema("Cursor: a `sequence` or `cursor`. The answer has later deltas."), "default": 0},
        decode=parse_number,
        default=0,
    ),
    EPOCH_PARAMETER,
)


class DeltasEndpoints:
    """The HTTP endpoints of a server's Deltas API."""

    def __init__(self, service: DeltasService, sessions: WebSocketSessions[DeltasSession]) -> None:
        self.service = service
        self.sessions = sessions
        self.streams = LiveStreams(service.auth_gate, "deltas", codec.encode_error)

    def list_endpoints(self) -> list[Endpoint]:
        """Return the endpoint declarations."""
        service = self.service
        limit = service.page_sizes.to_parameter()

        after = Parameter(
            name="after",
            schema=_row_id_schema("`nextAfter` of the previous page: the page has the rows after this one."),
            decode=_parse_row_id,
            default="",
        )
        row_id = Parameter(name="rowId", schema=_row_id_schema("Only this row."), decode=_parse_row_id)
        read = partial(
            Endpoint,
            method="GET",
            api="deltas",
            authorize=lambda call: service.check_readable(call["gateway"], call.principal),
        )
        write = partial(Endpoint, method="POST", api="deltas", parameters=(_GATEWAY_PARAMETER,))
        follow = read(
            path=f"{PATH}live",
            name="followDeltas",
            summary="Follow deltas",
            description=(
                "Server-sent events. The first is `connected`, with the epoch; then every delta after the cursor, "
                "and new deltas as they are committed. The id of a delta is its `sequence`, so browsers resume "
                "automatically. A `snapshot` event means that the cursor is older than the compaction. An `error` "
                "event gives the reason why the server ends the stream. The same path also serves a WebSocket "
                "(docs/reference/deltas.md)."
            ),
            parameters=(_GATEWAY_PARAMETER, *_CURSOR_PARAMETERS, resume_parameter("sequence"), TICKET),
            handle=self._follow,
            responses={200: SSE_RESPONSE},
            errors=(409,),
            list_stream_names=lambda call: [parse_gateway(call["gateway"])],
            serve_websocket=self._serve_websocket,
        )
        return [
            write(
                path=f"{PATH}push",
                name="pushDeltas",
                summary="Push deltas",
                description=(
                    "The gateway commits all deltas or none. A known delta is acknowledged again and changes nothing, "
                    "so after any failure push all unanswered deltas again."
                ),
                body=RequestBody(schema="Push", decode=keep, example={"deltas": [_DELTA_EXAMPLE]}),
                authorize=lambda call: service.check_writable(call["gateway"], call.principal),
                handle=lambda call: service.push(call.scope, call.body, call.principal),
                responses={200: schema_response("Pushed", "Outcome of each delta, in the order of the request.")},
                errors=(409, 422, 507),
            ),
            read(
                path=f"{PATH}pull",
                name="pullDeltas",
                summary="Read deltas",
                description=(
                    "Deltas in the order of their arrival, which never changes. Repeat with `since` = `cursor` while "
                    "`hasMore`. With `snapshot`, the deltas have been compacted: read the snapshot, then pull from its "
                    "cursor."
                ),
                parameters=(_GATEWAY_PARAMETER, *_CURSOR_PARAMETERS, limit),
                handle=lambda call: service.pull(call.scope, call["since"], call["limit"], call["epoch"]),
                responses={200: schema_response("Pulled", "A page.")},
                errors=(409,),
            ),
            read(
                path=f"{PATH}rows/{{table}}",
                name="getRows",
                summary="Read the rows of a table",
                description="A page of the existing rows, merged, in the order of `rowId`. A page may be empty "
                "even though more pages follow.",
                parameters=(
                    _GATEWAY_PARAMETER,
                    path_parameter(
                        "table",
                        IDENTIFIER,
                        "Name of the table.",
                        "products",
                        new_decoder(
                            is_identifier, "must be an identifier (letters, digits and _, not starting with a digit)"
                        ),
                    ),
                    after,
                    limit,
                    row_id,
                ),
                handle=lambda call: service.load_rows(
                    call.scope, call["table"], call["rowId"], call["after"], call["limit"]
                ),
                responses={200: schema_response("Rows", "A page.")},
            ),
            read(
                path=f"{PATH}deltas/{{deltaId}}",
                name="getDelta",
                summary="Look up a delta by its id",
                description="Returns whether the delta was committed, and its sequence. Includes the record's proof.",
                parameters=(
                    _GATEWAY_PARAMETER,
                    path_parameter(
                        "deltaId",
                        DELTA_ID,
                        "Id of the delta.",
                        _DELTA_ID_EXAMPLE,
                        new_decoder(
                            re.compile(r"[0-9a-f]{64}", re.ASCII).fullmatch,
                            "must have 64 hexadecimal digits, in lower case",
                        ),
                    ),
                ),
                handle=lambda call: service.find_delta(call.scope, call["deltaId"]),
                responses={200: schema_response("DeltaOutcome", "Outcome of the delta.")},
                errors=(404,),
            ),
            read(
                path=f"{PATH}snapshot",
                name="getSnapshot",
                summary="Read all rows with their stamps",
                description="For readers whose cursor is older than the compaction: read all pages, then pull from "
                "`cursor`.",
                parameters=(
                    _GATEWAY_PARAMETER,
                    Parameter(
                        name="after",
                        schema={
                            **TEXT_SCHEMA,
                            "description": "`nextAfter` of the previous page. No other value is valid.",
                        },
                        default="",
                        previous_name="page",
                    ),
                    limit,
                ),
                handle=lambda call: service.load_snapshot(
                    call.scope, call["after"], call["limit"], call.get_sent_name("after")
                ),
                responses={200: schema_response("Snapshot", "A page.")},
                errors=(409,),
            ),
            follow,
            self.streams.declare_ticket(follow, "createDeltasTicket", (_GATEWAY_PARAMETER,)),
            write(
                path=f"{PATH}compact",
                name="compactDeltas",
                summary="Compact a gateway",
                description=(
                    "Drops the bodies of old deltas, then rows that were deleted long ago. Existing rows, ids and "
                    f"hashes remain. One request compacts at most {COMPACT_DELTAS_MAX} deltas and reads at most "
                    f"{COMPACT_ROWS_MAX} rows. Repeat it while `hasMore` is true or there is a `nextAfter`."
                ),
                body=RequestBody(schema="Compaction", decode=keep, example={"keep": 1000}),
                authorize=lambda call: service.check_compactable(call["gateway"], call.principal),
                handle=lambda call: service.compact(call.scope, call.body, call.principal.actor),
                responses={200: schema_response("Compacted", "Progress of the compaction.")},
            ),
        ]

    # --- live

    async def _follow(self, call: Call) -> web.StreamResponse:
        since = call["since"] if call["Last-Event-ID"] is None else call["Last-Event-ID"]
        await self.service.check_cursor(call.scope, since, call["epoch"])
        hello = b'retry: 1000\nevent: connected\ndata: {"epoch":%b}\n\n' % orjson.dumps(self.service.log.epoch)
        return await self.streams.serve(
            call, [call.scope], hello, self.service.follow(call.scope, since), _encode_chunk
        )

    async def _serve_websocket(self, request: web.Request, caller: Caller) -> web.WebSocketResponse:
        return await self.sessions.serve(
            request, caller, get_credential(request), partial(get_path_name, request, "gateway")
        )


def _encode_chunk(deltas: Sequence[Record] | None) -> bytes:
    if deltas is None:
        return b"event: snapshot\ndata: {}\n\n"
    return b"".join([encode_event(record.sequence, codec.encode_delta(record)) for record in deltas])


def _row_id_schema(description: str) -> Schema:
    return {"type": "string", "maxLength": ROW_ID_CHARACTERS_MAX, "pattern": NO_NUL, "description": description}
