"""The events door over plain HTTP (EV-16): submit, read a page, follow by server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from aiohttp import web

from oncelog import error_codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Record, Submission, Verdict
from oncelog.errors import OncelogError
from oncelog.server.auth.principal import Principal
from oncelog.server.connection_limiter import Caller
from oncelog.server.errors import ApiError, shutdown_error, to_api_error
from oncelog.server.events import codec
from oncelog.server.events.codec import ItemResult, RejectedItem
from oncelog.server.events.decode import Submit, Sync, decode_body, decode_partitions, decode_submit, get_client_id
from oncelog.server.events.hub import is_event
from oncelog.server.events.service import EventsService, merge_results
from oncelog.server.http_requests import JSON, check_json, get_credential, parse_number, parse_query, read_body
from oncelog.server.limits import LONG_FRAME_BYTES
from oncelog.server.live_streams import LiveStreams

_STREAM_PARAMETERS: Final = frozenset({"partition", "since", "epoch"})
_PAGE_PARAMETERS: Final = _STREAM_PARAMETERS | {"limit", "to"}


class EventsEndpoints:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, service: EventsService) -> None:
        self._service = service
        self.streams = LiveStreams(service.auth_gate, service.limits, service.counts)

    # --- submit

    async def submit(self, request: web.Request, caller: Caller) -> web.Response:
        """`POST /v1/events`."""
        principal = self._authenticate(request, caller)
        check_json(request)
        body = await read_body(request)
        door = self._service
        read = partial(self._decode, body, principal)
        # What is long is read in a thread: others must not wait for it.
        client_id, submit = await asyncio.to_thread(read) if len(body) > LONG_FRAME_BYTES else read()
        if client_id is None:
            raise door.auth_gate.reject_client(caller, "another")
        principal = door.auth_gate.recheck_principal(principal)
        if door.is_closing:
            raise shutdown_error()
        items = door.authorize(submit, principal)
        results = await self._submit(items)
        error = codec.find_request_error(results)
        if error is not None:
            raise error
        door.count_results(results)
        door.counts.requests["events", "http", "ok"] += 1
        return web.Response(body=codec.encode_results(submit.ids, results), content_type=JSON)

    def _decode(self, body: bytes, principal: Principal) -> tuple[str | None, Submit]:
        """Whose events they are (None: not one that the principal may be), and the events. Raises ApiError."""
        members = decode_body(body)
        client_id = self._service.auth_gate.get_event_client(principal, get_client_id(members))
        return client_id, decode_submit(
            members, principal.actor, client_id or "", self._service.limits.request_events_max, "$"
        )

    async def _submit(self, items: Sequence[Submission | RejectedItem]) -> Sequence[ItemResult]:
        new = [item for item in items if isinstance(item, Submission)]
        verdicts: Sequence[Verdict]
        try:
            log = self._service.log
            verdicts = (
                [await log.submit(new[0])] if len(new) == 1 else await log.submit_many(new, is_admitted_whole=True)
            )
        except OncelogError as error:
            raise to_api_error(error) from error
        return merge_results(items, verdicts)

    # --- read

    async def get_page(self, request: web.Request, caller: Caller) -> web.Response:
        """`GET /v1/events`."""
        principal = self._authenticate(request, caller)
        sync = _parse_sync(request, _PAGE_PARAMETERS)
        door = self._service
        door.check_readable(sync.partitions, principal)
        door.check_epoch(sync.epoch)
        # Up to what the store has, not up to what has been broadcast here: whoever got an answer, from this gateway or
        # from another, finds what it says.
        body = b"".join(door.encode_page(sync, await door.load_page(sync, sync.upto)))
        door.counts.requests["events", "http", "ok"] += 1
        door.counts.bytes_sent += len(body)
        return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})

    # --- follow

    async def follow(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """`GET /v1/events/stream`."""
        principal = self._authenticate(request, caller)
        sync = _parse_sync(request, _STREAM_PARAMETERS)
        resumed = request.headers.get("Last-Event-ID")
        if resumed:
            sync = Sync(sync.partitions, parse_number(resumed, "Last-Event-ID"), epoch=sync.epoch)
        door = self._service
        door.check_readable(sync.partitions, principal)
        door.check_epoch(sync.epoch)
        await door.load_page(
            Sync(sync.partitions, sync.since, limit=1), sync.since
        )  # a cursor ahead of the log is told now
        door.counts.requests["events", "http", "ok"] += 1

        def may_read(current: Principal) -> bool:
            return all(map(current.grants.may_read, sync.partitions))

        return await self.streams.serve(request, principal, may_read, partial(self._iterate_chunks, principal, sync))

    async def _iterate_chunks(self, principal: Principal, sync: Sync) -> AsyncGenerator[bytes, None]:
        door = self._service
        hello = door.native.encode_connected(
            principal.client_id or "", principal.actor, door.hub.position, door.log.epoch
        )
        yield b"retry: 1000\nevent: connected\ndata: %b\n\n" % hello
        async with aclosing(door.log.follow_several(partitions=sync.partitions, after=sync.since)) as several:
            async for records in several:
                yield self._encode_chunk(records)
                door.counts.deliveries += len(records)

    def _encode_chunk(self, records: Sequence[Record]) -> bytes:
        event = self._service.native.encode_event
        return b"".join(
            b"id: %d\ndata: %b\n\n" % (record.position, event(record)) for record in filter(is_event, records)
        )

    def _authenticate(self, request: web.Request, caller: Caller) -> Principal:
        """Raises ApiError."""
        return self._service.auth_gate.authenticate(get_credential(request), caller)


# --- requests ------------------------------------------------------------------------------------------


def _parse_sync(request: web.Request, parameters: frozenset[str]) -> Sync:
    """A page as a query asks for it. Raises ApiError."""
    partitions: list[JsonValue] = []
    given: dict[str, str] = {}
    for name, value in parse_query(request):
        if name not in parameters:
            raise ApiError(error_codes.BAD_REQUEST, f"{name}: is no parameter of this request", field=name)
        if name in given:
            raise ApiError(error_codes.BAD_REQUEST, f"{name}: must be there once", field=name)
        if name == "partition":
            partitions.append(value)
        else:
            given[name] = value
    return Sync(
        decode_partitions(partitions, "partition"),
        parse_number(given.get("since", "0"), "since"),
        parse_number(given["limit"], "limit") if "limit" in given else None,
        given.get("epoch"),
        parse_number(given["to"], "to") if "to" in given else None,
    )
