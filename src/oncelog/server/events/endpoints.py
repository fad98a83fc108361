"""The Events API over plain HTTP (EV-16): submit, read a page, follow by server-sent events."""

from collections.abc import Sequence
from typing import Final

from aiohttp import web

from oncelog.core.builders import parse_uuid
from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.values import Record, Verdict
from oncelog.server.api_service import EPOCH_PARAMETER, path_parameter, resume_parameter
from oncelog.server.auth.principal import Principal
from oncelog.server.endpoint import Call, Endpoint, Parameter, RequestBody, WebSocketHandler
from oncelog.server.events.dialect import Sync
from oncelog.server.events.hub import is_event
from oncelog.server.events.native_dialect import UUID_SCHEMA, declare_submission, decode_partitions, to_submit
from oncelog.server.events.results import Submit, find_request_error, merge_results, select_submissions
from oncelog.server.events.service import EventsService
from oncelog.server.http_requests import parse_number
from oncelog.server.json_schemas import (
    NO_NUL,
    SSE_RESPONSE,
    integer_schema,
    schema_response,
)
from oncelog.server.live_streams import LiveStreams, encode_event

_EVENT_ID: Final = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a17"
_PARTITION_PARAMETER: Final = Parameter(
    name="partition",
    schema={
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "minLength": 1, "maxLength": PARTITION_CHARACTERS_MAX, "pattern": NO_NUL},
        "description": f"Once for each partition. At most {PARTITIONS_MAX} different ones, in Unicode's normal form C.",
    },
    parse=decode_partitions,
    is_required=True,
    example=["orders/1"],
)
_SCOPE_PARAMETERS: Final = (
    _PARTITION_PARAMETER,
    Parameter(
        name="since",
        schema={
            **integer_schema("The cursor: events after it. A `committed_id`, or `next_since_committed_id`."),
            "default": 0,
        },
        parse=parse_number,
        default=0,
    ),
    EPOCH_PARAMETER,
)


class EventsEndpoints:
    """The Events API of a server over HTTP."""

    def __init__(self, service: EventsService, serve_websocket: WebSocketHandler) -> None:
        self._service = service
        self._serve_websocket = serve_websocket
        self.streams = LiveStreams(service.auth_gate, "events")

    def list_endpoints(self) -> list[Endpoint]:
        """Return the declarations."""
        service = self._service
        limit = service.page_sizes.to_parameter("Events of a page at most.")

        return [
            Endpoint(
                method="GET",
                path="/v1/events",
                api="events",
                name="page",
                summary="Read a page of events",
                description=(
                    "Events that touch any of the partitions, ascending, each once. To read all there is: ask again "
                    "with `since` = `next_since_committed_id` and `to` = `sync_to_committed_id` while `has_more`. The "
                    "bound `to` stays as it was at the first page, so this ends however fast the log grows."
                ),
                parameters=(
                    *_SCOPE_PARAMETERS,
                    limit,
                    Parameter(
                        name="to",
                        schema=integer_schema(
                            "The bound of a paging that has begun: `sync_to_committed_id` of its first page."
                        ),
                        parse=parse_number,
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
                summary="Look an event up by its id",
                description=(
                    "Whether the event was committed, where, and whether its id is still remembered; with the proof "
                    "of its record, unless actors are not shown (`show_actors`). An event that touches none of the "
                    "partitions gets 404, like an unknown one."
                ),
                parameters=(
                    path_parameter("id", UUID_SCHEMA, "Id of the event.", _EVENT_ID, parse_uuid),
                    _PARTITION_PARAMETER,
                ),
                authorize=self._authorize_read,
                handle=lambda call: service.find_event(call["id"], call["partition"]),
                responses={200: schema_response("EventOutcome", "What became of it.")},
                errors=(404,),
            ),
            Endpoint(
                method="POST",
                path="/v1/events",
                api="events",
                name="submit",
                summary="Submit events",
                description=(
                    "Each event is committed once, however often it is sent: a retry gets the answer of the first "
                    "time. One that is rejected does not stop the others. The same id twice in a request refuses all "
                    "of it."
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
                responses={200: schema_response("Results", "What became of each event, in the order of the request.")},
                errors=(507,),
            ),
            Endpoint(
                method="GET",
                path="/v1/events/stream",
                api="events",
                name="follow",
                summary="Follow events",
                description=(
                    "Server-sent events. First `connected`, with the epoch; then every event after the cursor, and "
                    "those to come. The id of each is its `committed_id`, so a browser resumes by itself where it "
                    "was. A comment comes when nothing else has for a while. An event `error` says why the server "
                    "ends the stream; without one it is being stopped."
                ),
                parameters=(*_SCOPE_PARAMETERS, resume_parameter("committed_id")),
                authorize=self._authorize_read,
                handle=self._follow,
                responses={200: SSE_RESPONSE},
                errors=(409,),
                is_stream=True,
            ),
        ]

    # --- submit

    async def _submit(self, call: Call) -> bytes:
        service = self._service
        client_id, submit = call.body
        if client_id is None:
            raise service.auth_gate.reject_client(call.caller, "another")
        items = service.authorize(submit, call.principal)
        new = select_submissions(items)
        if len(new) == 1:
            verdicts: Sequence[Verdict] = [await service.log.submit(new[0])]
        else:
            verdicts = await service.log.submit_many(new, is_admitted_whole=True)
        results = merge_results(items, verdicts)
        error = find_request_error(results)
        if error is not None:
            raise error
        service.count_results(results)
        return service.native.encode_results(submit.ids, results)

    def _decode(self, body: bytes, principal: Principal) -> tuple[str | None, Submit]:
        """Return the client id of the events (None if the principal may not use it) and the events."""
        service = self._service
        requested, items = declare_submission(service.limits.request_events_max).decode_body(body)
        client_id = service.auth_gate.get_event_client(principal, requested)
        return client_id, to_submit(items, principal.actor, client_id or "")

    # --- read

    def _authorize_read(self, call: Call) -> str:
        self._service.check_readable(call["partition"], call.principal)
        return ""

    async def _get_page(self, call: Call) -> bytes:
        self._service.check_epoch(call["epoch"])
        sync = Sync(call["partition"], call["since"], call["limit"], call["epoch"], call["to"])
        # Up to the end of the store, not of the broadcasts here: a client that got an answer, from this server or from
        # another, finds what it says.
        return b"".join(self._service.encode_page(sync, await self._service.load_page(sync, sync.upto)))

    # --- follow

    async def _follow(self, call: Call) -> web.StreamResponse:
        service, principal, partitions = self._service, call.principal, call["partition"]
        service.check_epoch(call["epoch"])
        since = call["since"] if call["Last-Event-ID"] is None else call["Last-Event-ID"]
        # Refuses a cursor ahead of the log before the stream begins.
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
