"""The events door over plain HTTP (EV-16): submit, read a page, follow by server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from aiohttp import web

from oncelog import codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Record, Submission, Verdict
from oncelog.doors.connections import Caller
from oncelog.doors.events import words
from oncelog.doors.events.door import EventsDoor, merged
from oncelog.doors.events.hub import is_event
from oncelog.doors.events.reading import Submit, Sync, read_body, read_client_id, read_partitions, read_submit
from oncelog.doors.events.words import Rejected, Result
from oncelog.doors.faults import DoorError, error_of, stopping
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.principal import Principal
from oncelog.doors.requests import JSON, body_of, credential_of, demand_json, number_of, query_of
from oncelog.doors.streams import Streams
from oncelog.errors import OncelogError

_STREAM_PARAMETERS: Final = frozenset({"partition", "since", "epoch"})
_PAGE_PARAMETERS: Final = _STREAM_PARAMETERS | {"limit", "to"}


class EventsHttp:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, door: EventsDoor) -> None:
        self._door = door
        self.streams = Streams(door.entrance, door.limits, door.counts)

    # --- submit

    async def submit(self, request: web.Request, caller: Caller) -> web.Response:
        """`POST /v1/events`."""
        principal = self._principal(request, caller)
        demand_json(request)
        body = await body_of(request)
        door = self._door
        read = partial(self._read, body, principal)
        # What is long is read in a thread: others must not wait for it.
        client_id, submit = await asyncio.to_thread(read) if len(body) > LONG_FRAME_BYTES else read()
        if client_id is None:
            raise door.entrance.refuse_client(caller, "another")
        principal = door.entrance.still(principal)
        if door.is_closing:
            raise stopping()
        items = door.authorized(submit, principal)
        results = await self._results(items)
        error = words.request_error(results)
        if error is not None:
            raise error
        door.count(results)
        door.counts.requests["events", "http", "ok"] += 1
        return web.Response(body=words.results_json(submit.ids, results), content_type=JSON)

    def _read(self, body: bytes, principal: Principal) -> tuple[str | None, Submit]:
        """Whose events they are (None: not one that the principal may be), and the events. Raises DoorError."""
        members = read_body(body)
        client_id = self._door.entrance.event_client(principal, read_client_id(members))
        return client_id, read_submit(
            members, principal.actor, client_id or "", self._door.limits.request_events_max, "$"
        )

    async def _results(self, items: Sequence[Submission | Rejected]) -> Sequence[Result]:
        new = [item for item in items if isinstance(item, Submission)]
        verdicts: Sequence[Verdict]
        try:
            log = self._door.log
            verdicts = (
                [await log.submit(new[0])] if len(new) == 1 else await log.submit_many(new, is_admitted_whole=True)
            )
        except OncelogError as error:
            raise error_of(error) from error
        return merged(items, verdicts)

    # --- read

    async def page(self, request: web.Request, caller: Caller) -> web.Response:
        """`GET /v1/events`."""
        principal = self._principal(request, caller)
        sync = _sync_of(request, _PAGE_PARAMETERS)
        door = self._door
        door.demand_readable(sync.partitions, principal)
        door.demand_epoch(sync.epoch)
        # Up to what the store has, not up to what has been broadcast here: whoever got an answer, from this gateway or
        # from another, finds what it says.
        body = b"".join(door.page(sync, await door.read(sync, sync.upto)))
        door.counts.requests["events", "http", "ok"] += 1
        door.counts.bytes_sent += len(body)
        return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-store"})

    # --- follow

    async def stream(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """`GET /v1/events/stream`."""
        principal = self._principal(request, caller)
        sync = _sync_of(request, _STREAM_PARAMETERS)
        resumed = request.headers.get("Last-Event-ID")
        if resumed:
            sync = Sync(sync.partitions, number_of(resumed, "Last-Event-ID"), epoch=sync.epoch)
        door = self._door
        door.demand_readable(sync.partitions, principal)
        door.demand_epoch(sync.epoch)
        await door.read(Sync(sync.partitions, sync.since, limit=1), sync.since)  # a cursor ahead of the log is told now
        door.counts.requests["events", "http", "ok"] += 1

        def may_read(current: Principal) -> bool:
            return all(map(current.grants.may_read, sync.partitions))

        return await self.streams.serve(request, principal, may_read, partial(self._chunks, principal, sync))

    async def _chunks(self, principal: Principal, sync: Sync) -> AsyncGenerator[bytes, None]:
        door = self._door
        hello = door.first.connected(principal.client_id or "", principal.actor, door.hub.position, door.log.epoch)
        yield b"retry: 1000\nevent: connected\ndata: %b\n\n" % hello
        async with aclosing(door.log.follow_several(partitions=sync.partitions, after=sync.since)) as several:
            async for records in several:
                yield self._chunk(records)
                door.counts.deliveries += len(records)

    def _chunk(self, records: Sequence[Record]) -> bytes:
        event = self._door.first.event
        return b"".join(
            b"id: %d\ndata: %b\n\n" % (record.position, event(record)) for record in filter(is_event, records)
        )

    def _principal(self, request: web.Request, caller: Caller) -> Principal:
        """Raises DoorError."""
        return self._door.entrance.authenticate(credential_of(request), caller)


# --- requests ------------------------------------------------------------------------------------------


def _sync_of(request: web.Request, parameters: frozenset[str]) -> Sync:
    """A page as a query asks for it. Raises DoorError."""
    partitions: list[JsonValue] = []
    given: dict[str, str] = {}
    for name, value in query_of(request):
        if name not in parameters:
            raise DoorError(codes.BAD_REQUEST, f"{name}: is no parameter of this request", field=name)
        if name in given:
            raise DoorError(codes.BAD_REQUEST, f"{name}: must be there once", field=name)
        if name == "partition":
            partitions.append(value)
        else:
            given[name] = value
    return Sync(
        read_partitions(partitions, "partition"),
        number_of(given.get("since", "0"), "since"),
        number_of(given["limit"], "limit") if "limit" in given else None,
        given.get("epoch"),
        number_of(given["to"], "to") if "to" in given else None,
    )
