"""The events door over plain HTTP (EV-16): submit, read a page, follow by server-sent events."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final
from urllib.parse import parse_qsl

from aiohttp import web

from oncelog import codes
from oncelog.core.canonical import JsonValue
from oncelog.core.values import Record, Submission, Verdict
from oncelog.doors.events import words
from oncelog.doors.events.door import EventsDoor, error_of, merged, stopping
from oncelog.doors.events.hub import is_event
from oncelog.doors.events.reading import Submit, Sync, read_body, read_client_id, read_partitions, read_submit
from oncelog.doors.events.words import DoorError, Rejected, Result
from oncelog.doors.limits import LONG_FRAME_BYTES
from oncelog.doors.principal import Principal
from oncelog.errors import OncelogError

logger: Final = logging.getLogger("oncelog.doors")

JSON: Final = "application/json"
ENCODINGS: Final = ("identity", "gzip", "deflate")
BODY_S: Final = 60
"""How long the body of a request may take to come."""
STATUS: Final = {
    codes.BAD_REQUEST: 400,
    codes.AUTH_FAILED: 401,
    codes.FORBIDDEN: 403,
    codes.HISTORY_CHANGED: 409,
    codes.RATE_LIMITED: 429,
    codes.SERVER_BUSY: 503,
    codes.SERVER_ERROR: 500,
}
"""The one table from the door's errors to HTTP's."""
_DIGITS_MAX: Final = 16
_STREAM_PARAMETERS: Final = frozenset({"partition", "since", "epoch"})
_PAGE_PARAMETERS: Final = _STREAM_PARAMETERS | {"limit", "to"}
_FIELDS_MAX: Final = 1000
"""Of a query. One that is shorter than its line may be can have no more that mean anything."""


def error_response(error: DoorError, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as HTTP has it: the same words as on the WebSocket, in the body. `status` is told by HTTP itself."""
    headers = dict(headers or {})
    details = dict(error.details)
    status = details.pop("status", STATUS[error.code])
    retry_after_ms = details.get("retry_after_ms")
    if retry_after_ms is not None:
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    if error.code == codes.AUTH_FAILED:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        body=b'{"error":%b}' % words.error_json(DoorError(error.code, error.message, **details)),
        status=status,
        content_type=JSON,
        headers=headers,
    )
    if details.get("field") == "body":
        response.force_close()  # what is left of it was not read, and is in the way of a next request
    return response


class EventsHttp:
    """The handlers. Who comes is asked at every request."""

    def __init__(self, door: EventsDoor) -> None:
        self._door = door
        self._streams: set[_Stream] = set()

    # --- submit

    async def submit(self, request: web.Request, address: str) -> web.Response:
        """`POST /v1/events`."""
        principal = self._principal(request, address)
        if request.content_type != JSON:
            # A page of another origin can send a form without asking, but not this (CO-24).
            raise DoorError(codes.BAD_REQUEST, f"Content-Type: must be {JSON}", field="Content-Type", status=415)
        body = await _body(request)
        door = self._door
        read = partial(self._read, body, principal)
        # What is long is read in a thread: others must not wait for it.
        client_id, submit = await asyncio.to_thread(read) if len(body) > LONG_FRAME_BYTES else read()
        if client_id is None:
            raise door.refuse_client(address, "another")
        principal = self._still(principal)
        if door.is_closing:
            raise stopping()
        items = door.authorized(submit, principal)
        results = await self._results(items)
        error = words.request_error(results)
        if error is not None:
            door.count_committed(results)
            raise error
        door.count(results)
        door.counts.requests["events", "http", "ok"] += 1
        return web.Response(body=words.results_json(submit.ids, results), content_type=JSON)

    def _read(self, body: bytes, principal: Principal) -> tuple[str | None, Submit]:
        """Whose events they are (None: not one that the principal may be), and the events. Raises DoorError."""
        members = read_body(body)
        client_id = self._client_id(read_client_id(members), principal)
        return client_id, read_submit(
            members, principal.actor, client_id or "", self._door.limits.request_events_max, "$"
        )

    def _still(self, principal: Principal) -> Principal:
        """The principal with the rights of now: they may have been taken away while the body came."""
        current = self._door.authenticator.current(principal, self._door.clock.wall_ms())
        if current is None:
            raise DoorError(codes.AUTH_FAILED, "the token has expired, or its rights have changed")
        return current

    async def _results(self, items: Sequence[Submission | Rejected]) -> Sequence[Result]:
        new = [item for item in items if isinstance(item, Submission)]
        verdicts: Sequence[Verdict]
        try:
            verdicts = [await self._door.log.submit(new[0])] if len(new) == 1 else await self._door.log.submit_many(new)
        except OncelogError as error:
            raise error_of(error) from error
        return merged(items, verdicts)

    @staticmethod
    def _client_id(asked: str | None, principal: Principal) -> str | None:
        """Whose events they are: as they say, if they may, else as their credential says."""
        if asked is None:
            return principal.client_id or principal.actor.partition(":")[2]
        return asked if principal.may_connect_as(asked) else None

    # --- read

    async def page(self, request: web.Request, address: str) -> web.Response:
        """`GET /v1/events`."""
        principal = self._principal(request, address)
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

    async def stream(self, request: web.Request, address: str) -> web.StreamResponse:
        """`GET /v1/events/stream`."""
        principal = self._principal(request, address)
        sync = _sync_of(request, _STREAM_PARAMETERS)
        resumed = request.headers.get("Last-Event-ID")
        if resumed:
            sync = Sync(sync.partitions, _number(resumed, "Last-Event-ID"), epoch=sync.epoch)
        door = self._door
        door.demand_readable(sync.partitions, principal)
        door.demand_epoch(sync.epoch)
        await door.read(Sync(sync.partitions, sync.since, limit=1), sync.since)  # a cursor ahead of the log is told now
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        door.counts.requests["events", "http", "ok"] += 1
        if request.method == "HEAD":
            return response
        stream = _Stream(door, request, response, principal, sync)
        self._streams.add(stream)
        door.counts.sse_connections += 1
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            door.counts.sse_connections -= 1
        return response

    def __len__(self) -> int:
        return len(self._streams)

    def renew(self) -> None:
        """Ends the streams of those whose rights have ended."""
        now_ms = self._door.clock.wall_ms()
        for stream in list(self._streams):
            current = self._door.authenticator.current(stream.principal, now_ms)
            if current is None or not all(map(current.grants.may_read, stream.partitions)):
                stream.end(DoorError(codes.AUTH_FAILED, "the token has expired, or its rights have changed"))

    def finish(self) -> None:
        """Ends all streams: their readers come back with the id of the last event they got."""
        for stream in list(self._streams):
            stream.end(None)

    def _principal(self, request: web.Request, address: str) -> Principal:
        """Raises DoorError."""
        kind, _, credential = request.headers.get("Authorization", "").partition(" ")
        return self._door.authenticate(credential.strip() if kind.lower() == "bearer" else None, address)


class _Stream:
    """One reader of server-sent events. The id of each is its `committed_id`."""

    def __init__(
        self, door: EventsDoor, request: web.Request, response: web.StreamResponse, principal: Principal, sync: Sync
    ) -> None:
        self._door = door
        self._request = request
        self._response = response
        self.principal = principal
        self.partitions = sync.partitions
        self._since = sync.since
        self._sending: asyncio.Task[None] | None = None
        self._is_ended = False
        self._last_words = b""

    async def run(self) -> None:
        """Until the reader goes, or is sent away."""
        try:
            await self._send_until_ended()
            await self._write(self._last_words)
        except ConnectionError:
            pass  # it is gone
        except TimeoutError:
            # It does not read. What waits for it would keep the connection open for as long as it likes; so it is cut
            # off, and can come back with the id of the last event it got (CO-31).
            logger.warning("a slow reader is closed", extra={"actor": self.principal.actor})
            self._door.counts.slow_readers_closed += 1
            if self._request.transport is not None:
                self._request.transport.abort()

    async def _send_until_ended(self) -> None:
        if self._is_ended:
            return
        self._sending = asyncio.get_running_loop().create_task(self._send_all())
        try:
            await asyncio.wait([self._sending])
        finally:
            self._sending.cancel()  # if it is us who were cancelled
        if not self._sending.cancelled():
            self._sending.result()

    def end(self, error: DoorError | None) -> None:
        """Sends the reader away, with a reason if there is one."""
        self._is_ended = True
        if error is not None:
            self._last_words = _error_event(error)
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        door = self._door
        hello = words.connected_json(self.principal.client_id or "", door.hub.position, door.log.epoch)
        await self._write(b"retry: 1000\nevent: connected\ndata: %b\n\n" % hello)
        heartbeat_s = door.limits.heartbeat_ms / 1000
        async with aclosing(door.log.follow_several(partitions=self.partitions, after=self._since)) as several:
            while True:
                coming = asyncio.ensure_future(anext(several))
                try:
                    while not (await asyncio.wait([coming], timeout=heartbeat_s))[0]:
                        await self._write(b":\n\n")
                    records = await coming
                except StopAsyncIteration:
                    return
                except OncelogError as error:
                    self._last_words = _error_event(error_of(error))
                    return
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait([coming])
                await self._write(_chunk(records))
                door.counts.deliveries += len(records)

    async def _write(self, data: bytes) -> None:
        """One who does not read for as long as two heartbeats is let go."""
        if data:
            self._door.counts.bytes_sent += len(data)
            async with asyncio.timeout(2 * self._door.limits.heartbeat_ms / 1000):
                await self._response.write(data)


def _chunk(records: Sequence[Record]) -> bytes:
    return b"".join(
        b"id: %d\ndata: %b\n\n" % (record.position, words.event_json(record)) for record in filter(is_event, records)
    )


def _error_event(error: DoorError) -> bytes:
    return b"event: error\ndata: %b\n\n" % words.error_json(error)


# --- requests ------------------------------------------------------------------------------------------


async def _body(request: web.Request) -> bytes:
    """Raises DoorError for one that is not what its headers say: half of a chunk, no gzip."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        message = f"Content-Encoding: must be one of {', '.join(ENCODINGS)}"
        raise DoorError(codes.BAD_REQUEST, message, field="Content-Encoding", status=415)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        message = f"body: must be there within {BODY_S} seconds"
        raise DoorError(codes.BAD_REQUEST, message, field="body", status=408) from None
    except web.RequestPayloadError:
        raise DoorError(codes.BAD_REQUEST, "body: is not what the headers say that it is", field="body") from None


def _sync_of(request: web.Request, parameters: frozenset[str]) -> Sync:
    """A page as a query asks for it. Raises DoorError."""
    partitions: list[JsonValue] = []
    given: dict[str, str] = {}
    for name, value in _query_of(request):
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
        _number(given.get("since", "0"), "since"),
        _number(given["limit"], "limit") if "limit" in given else None,
        given.get("epoch"),
        _number(given["to"], "to") if "to" in given else None,
    )


def _query_of(request: web.Request) -> list[tuple[str, str]]:
    """As it was sent. aiohttp's own puts another character in place of what is not UTF-8, and so another partition."""
    try:
        return parse_qsl(
            request.rel_url.raw_query_string, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX
        )
    except ValueError as error:
        is_text = isinstance(error, UnicodeDecodeError)
        message = "the query must be UTF-8" if is_text else f"the query must have at most {_FIELDS_MAX} parameters"
        raise DoorError(codes.BAD_REQUEST, message, field="query") from None


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX or int(text) >= 2**53:
        raise DoorError(codes.BAD_REQUEST, f"{name}: must be a whole number from 0 to 2^53−1", field=name)
    return int(text)
