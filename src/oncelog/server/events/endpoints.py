"""The Events API over HTTP (EV-16): submit events, read pages, and follow with server-sent events."""

from collections.abc import Sequence
from typing import Final

from aiohttp import web

from oncelog.core.builders import parse_uuid
from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.values import Record, Verdict
from oncelog.server.api_service import EPOCH_PARAMETER, path_parameter, resume_parameter
from oncelog.server.auth.principal import Principal
from oncelog.server.endpoint import TICKET, Call, Endpoint, Parameter, RequestBody, WebSocketHandler, parse_number
from oncelog.server.events.dialect import Submit, Sync, find_request_error, merge_results, select_submissions
from oncelog.server.events.hub import is_event
from oncelog.server.events.native_dialect import UUID_SCHEMA, declare_submission, decode_partitions, to_submit
from oncelog.server.events.service import EventsService
from oncelog.server.live_streams import LiveStreams, encode_event
from oncelog.server.messages import (
    NO_NUL,
    SSE_RESPONSE,
    integer_schema,
    schema_response,
)

_EVENT_ID: Final = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a17"
_PARTITION_PARAMETER: Final = Parameter(
    name="partition",
    schema={
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "minLength": 1, "maxLength": PARTITION_CHARACTERS_MAX, "pattern": NO_NUL},
        "description": f"Repeat it for each partition: at most {PARTITIONS_MAX} different partitions, compared in NFC.",
    },
    decode=decode_partitions,
    is_required=True,
    example=["orders/1"],
)
_SCOPE_PARAMETERS: Final = (
    _PARTITION_PARAMETER,
    Parameter(
        name="since",
        schema={
            **integer_schema("Cursor: a `committed_id` or `next_since_committed_id`. The answer has later events."),
            "default": 0,
        },
        decode=parse_number,
        default=0,
    ),
    EPOCH_PARAMETER,
)


class EventsEndpoints:
    """The HTTP endpoints of a server's Events API."""

    def __init__(self, service: EventsService, serve_websocket: WebSocketHandler) -> None:
        self._service = service
        self._serve_websocket = serve_websocket
        self.streams = LiveStreams(service.auth_gate, "events")

    def list_endpoints(self) -> list[Endpoint]:
        """Return the endpoint declarations."""
        service = self._service
        limit = service.page_sizes.to_parameter("Maximum number of events in the page.")
        follow = Endpoint(
            method="GET",
            path="/v1/events/stream",
            api="events",
            name="follow",
            summary="Follow events",
            description=(
                "Server-sent events. The first is `connected`, with the epoch; then every event after the cursor, "
                "and new events as they are committed. The id of an event is its `committed_id`, so browsers "
                "resume automatically. The server sends a comment when the stream is idle. An `error` event gives "
                "the reason why the server ends the stream. A server that is stopping ends the stream without one."
            ),
            parameters=(*_SCOPE_PARAMETERS, resume_parameter("committed_id"), TICKET),
            authorize=self._authorize_read,
            handle=self._follow,
            responses={200: SSE_RESPONSE},
            errors=(409,),
            list_stream_names=lambda call: call["partition"],
        )
        return [
            Endpoint(
                method="POST",
                path="/v1/events",
                api="events",
                name="submit",
                summary="Submit events",
                description=(
                    "The server commits each event once. A retry gets the first answer again. A rejected event does "
                    "not affect the others. A request that repeats an id is refused as a whole."
                ),
                body=RequestBody(
                    schema="Submission",
                    decode=self._decode,
                    example={
                        "events": [
                            {
                                "id": _EVENT_ID,
                                "partitions": ["orders/1"],
                                "event": {"type": "order.placed", "total": 12},
                            }
                        ]
                    },
                ),
                handle=self._submit,
                responses={200: schema_response("Results", "Outcome of each event, in the order of the request.")},
                errors=(507,),
            ),
            Endpoint(
                method="GET",
                path="/v1/events",
                api="events",
                name="page",
                summary="Read a page of events",
                description=(
                    "Events with any of the partitions, in ascending order, each once. To read all events, request "
                    "pages with `since` = `next_since_committed_id` and `to` = `sync_to_committed_id` while "
                    "`has_more`. The bound `to` of the first page stays fixed, so the paging ends even while the log "
                    "grows."
                ),
                parameters=(
                    *_SCOPE_PARAMETERS,
                    limit,
                    Parameter(
                        name="to",
                        schema=integer_schema("Bound of the paging: `sync_to_committed_id` of its first page."),
                        decode=parse_number,
                    ),
                ),
                authorize=self._authorize_read,
                handle=self._get_page,
                responses={200: schema_response("Page", "A page.")},
                errors=(409,),
                serve_websocket=self._serve_websocket,
            ),
            Endpoint(
                method="GET",
                path="/v1/events/{id}",
                api="events",
                name="getEvent",
                summary="Look up an event by its id",
                description=(
                    "Returns whether the event was committed, its position, and whether the log still remembers "
                    "its id. Includes the proof of the record unless `show_actors` is off. An event of other "
                    "partitions gets 404, like an unknown event."
                ),
                parameters=(
                    path_parameter("id", UUID_SCHEMA, "Id of the event.", _EVENT_ID, parse_uuid),
                    _PARTITION_PARAMETER,
                ),
                authorize=self._authorize_read,
                handle=lambda call: service.find_event(call["id"], call["partition"]),
                responses={200: schema_response("EventOutcome", "Outcome of the event.")},
                errors=(404,),
            ),
            follow,
            self.streams.declare_ticket(follow, "createEventsTicket", (_PARTITION_PARAMETER,)),
        ]

    # --- submit

    async def _submit(self, call: Call) -> bytes:
        service = self._service
        requested, client_id, submit = call.body
        if client_id is None:
            raise service.auth_gate.reject_client(call.caller, requested)
        allowed = service.authorize(submit, call.principal.grants.may_write)
        new = select_submissions(allowed)
        if len(new) == 1:
            verdicts: Sequence[Verdict] = [await service.log.submit(new[0])]
        else:
            verdicts = await service.log.submit_many(new, is_admitted_whole=True)
        results = merge_results(allowed, verdicts)
        error = find_request_error(results)
        if error is not None:
            raise error
        service.count_results(results)
        return service.native.encode_results(submit.ids, results)

    def _decode(self, body: bytes, principal: Principal) -> tuple[str | None, str | None, Submit]:
        """Return the requested client id, that of the events (None if the principal may not use it) and the events."""
        service = self._service
        requested, items = declare_submission(service.limits.request_events_max).decode_body(body)
        client_id = service.auth_gate.get_event_client(principal, requested)
        return requested, client_id, to_submit(items, principal.actor, client_id or "")

    # --- read

    def _authorize_read(self, call: Call) -> str:
        self._service.check_readable(call["partition"], call.principal)
        return ""

    async def _get_page(self, call: Call) -> bytes:
        self._service.check_epoch(call["epoch"])
        sync = Sync(call["partition"], call["since"], call["limit"], call["epoch"], call["to"])
        # Read to the end of the store, not only to the position that this server has broadcast, so that a client with
        # an answer from any server finds its event.
        return b"".join(self._service.encode_page(sync, await self._service.load_page(sync, sync.upto)))

    # --- follow

    async def _follow(self, call: Call) -> web.StreamResponse:
        service, principal, partitions = self._service, call.principal, call["partition"]
        service.check_epoch(call["epoch"])
        since = call["since"] if call["Last-Event-ID"] is None else call["Last-Event-ID"]
        # This read refuses a cursor ahead of the log before the stream begins.
        await service.load_page(Sync(partitions, since, limit=1), since)
        connected = service.native.encode_connected(
            principal.client_id or "", principal.actor, service.hub.position, service.log.epoch
        )
        hello = b"retry: 1000\nevent: connected\ndata: %b\n\n" % connected
        batches = service.log.follow_several(partitions=partitions, after=since)
        return await self.streams.serve(call, partitions, hello, batches, self._encode_chunk)

    def _encode_chunk(self, records: Sequence[Record]) -> bytes:
        self._service.counts.deliveries += len(records)
        encode = self._service.native.encode_event
        return b"".join([encode_event(record.position, encode(record)) for record in filter(is_event, records)])
