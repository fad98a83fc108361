"""The client's side of the Events API, without I/O and without a clock.

Frames go in (`receive`), frames to be sent come out (`outgoing`), and so does what the application is to have: events
in their order (`take_events`), outcomes of its submissions (`take_settled`). `connect` begins a connection and
`disconnect` ends it, any number of times.

One request is under way at a time, and what is submitted meanwhile goes with the next: submissions are committed in the
order in which they were made, and many cost little more than one.

The order of own and foreign events. The server does not broadcast an event to the connection that submitted it; its
number comes with the answer, which stands after the broadcasts of lower numbers and before those of higher ones
(EV-14). So for a request of one event the order of arrival is the order of numbers. Of several events only the highest
number stands in its place: one that another connection had sent before (ours, before it was cut) may have a number
below broadcasts that came already. So while such a request is under way broadcasts are held back, and put in order
with what its answer says. So they are from the moment that a busy server sends a request away until it has been
answered: what an earlier connection or another client had sent under the same ids may have been committed while the
request was there, and then it was not broadcast to us.
"""

import logging
from collections import deque
from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from typing import Final

import msgspec
from msgspec import Struct

from oncelog import error_codes
from oncelog.client.events import codec
from oncelog.client.events.values import (
    Committed,
    Event,
    Fault,
    HistoryChange,
    OutboxEntry,
    Outcome,
    Refused,
    SettledEntry,
)
from oncelog.client.runtime.blocked_writes import BlockedWrites
from oncelog.client.runtime.websocket import CLOSE_TOO_LARGE
from oncelog.errors import ProtocolError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client")

PAGE_EVENTS: Final = 1000
READY_EVENTS_MAX: Final = 5000
"""When so many events wait to be handed over, no further page is asked for."""
REQUEST_EVENTS_MAX: Final = 500
REQUEST_BYTES_MAX: Final = 1024 * 1024
"""Of one request, unless one event alone is larger."""
ITEM_BYTES: Final = 100
"""Of an event in a request, beside its body and its partitions, at most."""
GROWTH_REQUESTS: Final = 64
"""After so many requests in a row that were not too large, larger ones are tried again."""
BUSY_MS_MIN: Final = 10
BUSY_MS_MAX: Final = 60_000
TOO_LARGE: Final = "too_large"
"""The reason of an event that the server's limit of a frame does not let through."""


class EventsPhase(Enum):
    """Of a connection."""

    NONE = "none"
    CONNECTING = "connecting"
    ASIDE = "aside"
    """Connected, and submitting. Events stay with the server until they are wanted, and there is room for them."""
    CATCHING_UP = "catching up"
    LIVE = "live"
    HISTORY_CHANGED = "history changed"
    """Nothing is asked or sent until `start_over`."""


class _Request(Struct, gc=False):
    """What is under way."""

    msg_id: str
    entries: list[OutboxEntry]
    cursor: int
    """Where we were when it was sent."""
    held_broadcasts: list[Event]
    """Broadcasts that came since, if they have to wait for the answer."""
    holds_broadcasts: bool
    """Whether they have to."""
    is_under_way: bool = True
    """False from when a busy server has sent it away until it is sent again."""


class EventsProtocol:
    """One client. Never used by two threads at a time."""

    def __init__(self, client_id: str, partitions: Sequence[str], cursor: int, epoch: str) -> None:
        self.phase = EventsPhase.NONE
        self.client_id = client_id
        self._visible_client_id = client_id
        self._actor = ""
        self.partitions = tuple(partitions)
        self.epoch = epoch
        """Of the history that the cursor belongs to; empty before the first connection."""
        self.outgoing: list[bytes] = []
        """Frames to be sent, in order. Whoever sends them empties the list."""
        self.history_change: HistoryChange | None = None
        self.busy_ms = 0
        """The server is busy: call `resume` after this time. 0 if it is not busy."""
        self.answer_count = 0
        """How many awaited answers have come: while it stands still and `is_waiting`, the server is silent."""
        self.last_committed_id = cursor
        """The highest number that we have heard of."""
        self.wants_events = True
        """Whether somebody takes events. While nobody does, a connection does not ask for them (`want_events`)."""
        self.page_count = 0
        """How many pages have been asked for: while it stands still and `is_page_due`, nobody takes the events."""
        self._scope = frozenset(partitions)
        self._cursor = cursor
        """All up to here that is in our partitions has arrived."""
        self._queue: deque[OutboxEntry] = deque()
        self._request: _Request | None = None
        self._ready: deque[Event] = deque()
        self._settled: list[SettledEntry] = []
        self._page_request_id: str | None = None
        """The `msg_id` of the page that is on its way."""
        self.is_page_due = False
        """There is more, but no room for it."""
        self.read_error: str | None = None
        """Why this connection gets no events though they are wanted: not all partitions may be read."""
        self.blocked_writes = BlockedWrites(logger)
        self._request_events_max = REQUEST_EVENTS_MAX
        """As many as the server takes, by all that is known."""
        self._accepted_requests = 0
        self._last_request_number = 0

    # --- the connection

    def connect(self, token: str | None) -> None:
        """A connection has been made: says who we are."""
        self.disconnect()
        self.phase = EventsPhase.CONNECTING
        self.outgoing.append(codec.encode_connect(token, self.client_id, self._next_id()))

    def disconnect(self, close_code: int | None = None) -> None:
        """The connection is gone. What was under way is sent again over the next one, under the same ids."""
        self.outgoing.clear()
        self._page_request_id, self.is_page_due, self.busy_ms, self.read_error = None, False, 0, None
        request, self._request = self._request, None
        if request is not None:
            if request.holds_broadcasts:
                # What was held back comes again with the next sync, in its place.
                self._cursor = request.cursor
            if close_code == CLOSE_TOO_LARGE and request.is_under_way:
                self._split(request, TOO_LARGE, "the server takes no message as large as this")
            else:
                self._queue.extendleft(reversed(request.entries))
        if self.phase is not EventsPhase.HISTORY_CHANGED:
            self.phase = EventsPhase.NONE

    @property
    def is_waiting(self) -> bool:
        """Whether the server owes an answer."""
        is_request_under_way = self._request is not None and self._request.is_under_way
        return self.phase is EventsPhase.CONNECTING or self._page_request_id is not None or is_request_under_way

    @property
    def cursor(self) -> int:
        """All up to here has arrived and is in order: taken, or ready to be taken."""
        request = self._request
        return request.cursor if request is not None and request.holds_broadcasts else self._cursor

    def start_over(self, since: int, epoch: str) -> None:
        """Goes on from another point, with another history. What had arrived of the old one is thrown away."""
        self.disconnect()
        self._ready.clear()
        self._cursor = since
        self.epoch = epoch
        self.history_change = None
        self.phase = EventsPhase.NONE

    # --- the application's side

    def enqueue(self, entries: Sequence[OutboxEntry]) -> None:
        """Submissions that are in the outbox, in its order."""
        self._queue.extend(entries)
        self._send_request()

    @property
    def outbox_count(self) -> int:
        """Submissions without an outcome."""
        return len(self._queue) + (0 if self._request is None else len(self._request.entries))

    @property
    def ready_count(self) -> int:
        """Events that wait to be taken."""
        return len(self._ready)

    @property
    def is_flooded(self) -> bool:
        """So many events wait that no more may come: the next connection is to be one that stands aside."""
        held_count = 0 if self._request is None else len(self._request.held_broadcasts)
        return self.phase is EventsPhase.LIVE and len(self._ready) + held_count > 2 * READY_EVENTS_MAX

    @property
    def is_submitting(self) -> bool:
        """Whether what is submitted now is sent."""
        return self.phase in (EventsPhase.LIVE, EventsPhase.ASIDE)

    def want_events(self) -> None:
        """Somebody takes events from now on."""
        self.wants_events = True
        self._catch_up_if_ready()

    def retry_read(self) -> None:
        """What may not be read may have been allowed meanwhile."""
        self.read_error = None
        self._catch_up_if_ready()

    @property
    def has_settled(self) -> bool:
        """Whether there are outcomes to be taken."""
        return bool(self._settled)

    def take_events(self, count_max: int) -> tuple[list[Event], int]:
        """The next events, and the cursor behind them."""
        ready = self._ready
        events = [ready.popleft() for _ in range(min(count_max, len(ready)))]
        if len(ready) < READY_EVENTS_MAX:
            if self.is_page_due:
                self._request_page()
            self._catch_up_if_ready()
        return events, events[-1].committed_id if ready else self.cursor

    def return_events(self, events: Sequence[Event]) -> None:
        """Events that were taken and could not be handed over: they are the next again."""
        self._ready.extendleft(reversed(events))

    def take_settled(self) -> list[SettledEntry]:
        """The outcomes since the last time."""
        settled, self._settled = self._settled, []
        return settled

    def resume(self) -> None:
        """The pause that a busy server asked for is over."""
        self.busy_ms = 0
        self._send_request()

    # --- frames in

    def receive(self, data: str | bytes) -> None:
        """A text frame. Raises ProtocolError, or ServerRefusedError for a server that ends the connection."""
        try:
            message = codec.decode_envelope(data)
            match message.type:
                case "event_broadcast":
                    self._handle_broadcast(codec.decode_event(message.payload))
                case "submit_events_result":
                    self._handle_result(message)
                case "sync_response":
                    self._handle_page(message)
                case "connected":
                    self._handle_connected(codec.decode_connected(message.payload))
                case "error":
                    self._handle_error(message.msg_id, codec.decode_error(message.payload))
            # Other messages are of a newer server, which says everything necessary in messages of this version.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the server does not speak as an Oncelog server does: {error}") from error

    def _handle_connected(self, connected: codec.Connected) -> None:
        if self.phase is not EventsPhase.CONNECTING:
            return  # said twice
        self.answer_count += 1
        self.last_committed_id = connected.server_last_committed_id
        if self.epoch and connected.epoch != self.epoch:
            self._change_history(
                connected.epoch, connected.server_last_committed_id, "the log on the server is another one than before"
            )
            return
        self.epoch = connected.epoch
        self._visible_client_id, self._actor = connected.client_id or self.client_id, connected.actor
        self.history_change = None  # if there was one: the server has the old history again
        self.phase = EventsPhase.ASIDE if self.partitions else EventsPhase.LIVE
        self._catch_up_if_ready()
        self._send_request()

    def _handle_page(self, message: codec.Envelope) -> None:
        page = codec.decode_page(message.payload)
        if self._page_request_id is None or message.msg_id != self._page_request_id:
            self._handle_unrequested_page(page)
            return
        self.answer_count += 1
        self._page_request_id = None
        cursor, last = self._cursor, 0
        for event in page.events:
            if event.committed_id <= last:
                raise ProtocolError(f"a page has event {event.committed_id} behind event {last}")
            last = event.committed_id
            if last > cursor:
                cursor = last
                self._ready.append(event)
        self._cursor = max(cursor, page.next_since_committed_id)
        self._raise_last_committed_id(max(self._cursor, page.sync_to_committed_id))
        if not page.has_more:
            self.phase = EventsPhase.LIVE
            self._send_request()
        elif len(self._ready) < READY_EVENTS_MAX:
            self._request_page()
        else:
            self.is_page_due = True

    def _handle_unrequested_page(self, page: codec.SyncPage) -> None:
        """A page that came twice, or our question was doubled on its way."""
        if self.phase is not EventsPhase.LIVE:
            return
        if page.has_more:
            raise ProtocolError("the server has begun a sync that was not asked for, and that nobody would end")
        # What it brings that is new is not broadcast any more.
        for event in page.events:
            self._handle_broadcast(event)
        self._cursor = max(self._cursor, page.next_since_committed_id)

    def _handle_broadcast(self, event: Event) -> None:
        if event.committed_id <= self._cursor:
            return  # it has arrived before
        if self.phase is not EventsPhase.LIVE:
            raise ProtocolError(f"event {event.committed_id} was broadcast before the sync was over")
        self._cursor = event.committed_id
        self._raise_last_committed_id(event.committed_id)
        request = self._request
        if request is not None and request.holds_broadcasts:
            request.held_broadcasts.append(event)
        else:
            self._ready.append(event)

    def _handle_result(self, message: codec.Envelope) -> None:
        request = self._request
        results = codec.decode_results(message.payload).results
        if request is None or message.msg_id != request.msg_id:
            # An answer that came twice. Or the request did, and was sent away once and taken once: then its events are
            # not broadcast to us, and come with the next sync alone.
            if self.phase is not EventsPhase.ASIDE and any(result.committed_id > self._cursor for result in results):
                raise ProtocolError("an answer came that nobody waits for")
            return
        if len(results) != len(request.entries):
            raise ProtocolError(f"{len(request.entries)} events were answered with {len(results)} results")
        # All of it is read before any of it counts: an answer that makes no sense leaves the request as it is.
        outcomes = [_to_outcome(entry, result) for entry, result in zip(request.entries, results, strict=True)]
        self.answer_count += 1
        self._request = None
        self._settled.extend(map(SettledEntry, request.entries, outcomes))
        self.blocked_writes.unblock()
        self._accepted_requests += 1
        if self._accepted_requests % GROWTH_REQUESTS == 0:
            self._request_events_max = min(2 * self._request_events_max, REQUEST_EVENTS_MAX)
        numbers = [outcome.committed_id for outcome in outcomes if isinstance(outcome, Committed)]
        self._raise_last_committed_id(max(numbers, default=0))
        if self.phase is EventsPhase.ASIDE:
            # Nothing else has come meanwhile: own events come with the rest, when we sync.
            self._catch_up_if_ready()
        else:
            self._place_own_events(request, results, outcomes)
        self._send_request()

    def _place_own_events(
        self, request: _Request, results: Sequence[codec.SubmitResult], outcomes: Sequence[Outcome]
    ) -> None:
        own: list[Event] = []
        for entry, result, outcome in zip(request.entries, results, outcomes, strict=True):
            if isinstance(outcome, Committed) and not self._scope.isdisjoint(entry.partitions):
                own.append(codec.to_own_event(entry, result, self._visible_client_id, self._actor))
        if request.holds_broadcasts:
            # What stood before the request was sent has arrived by then. Since then, what has been broadcast is held.
            seen = {event.committed_id for event in request.held_broadcasts}
            new = {event.committed_id: event for event in own if event.committed_id > request.cursor}
            events = request.held_broadcasts + [event for number, event in new.items() if number not in seen]
            events.sort(key=attrgetter("committed_id"))
        else:
            events = [event for event in own if event.committed_id > self._cursor]
        self._ready.extend(events)
        # The answer arrives after all broadcasts with lower numbers, also if its events are of other partitions.
        highest = max((outcome.committed_id for outcome in outcomes if isinstance(outcome, Committed)), default=0)
        self._cursor = max(self._cursor, highest)
        self._raise_last_committed_id(self._cursor)

    def _handle_error(self, msg_id: str | int | None, error: codec.ServerError) -> None:
        request = self._request
        is_about_request = request is not None and msg_id == request.msg_id
        is_about_page = self._page_request_id is not None and msg_id == self._page_request_id
        match error.code:
            case error_codes.HISTORY_CHANGED:
                self._change_history(error.details.epoch, error.details.server_last_committed_id, error.message)
            case error_codes.SERVER_BUSY | error_codes.READ_ONLY | error_codes.QUOTA_EXCEEDED if is_about_request:
                # The request is sent again on the same connection.
                self.answer_count += 1
                self.blocked_writes.block(error.code, error.message)
                self._postpone_request()
                self.busy_ms = min(max(error.details.retry_after_ms, BUSY_MS_MIN), BUSY_MS_MAX)
                self._catch_up_if_ready()
            case error_codes.BAD_REQUEST if request is not None and is_about_request:
                self.answer_count += 1
                self._request = None
                self._ready.extend(request.held_broadcasts)
                self._split(request, error.code, error.message)
                self._send_request()
            case error_codes.FORBIDDEN if is_about_page:
                # To submit is another right.
                self.answer_count += 1
                self._page_request_id = None
                self.phase = EventsPhase.ASIDE
                self.read_error = f"{error.code}: {error.message}"
                self._send_request()
            case error_codes.BAD_REQUEST if self.phase is not EventsPhase.CONNECTING and not is_about_page:
                pass  # about something that was sent twice on its way
            case _:
                if is_about_request and error.code == error_codes.RATE_LIMITED:
                    # The next connection is admitted, and does not report the reason.
                    self.blocked_writes.block(error.code, error.message)
                raise ServerRefusedError(error.code, error.message, error.details.retry_after_ms)

    # --- frames out

    def _catch_up_if_ready(self) -> None:
        """Ends standing aside. Not while a request is under way: its answer would come with no place in the order."""
        if self.phase is not EventsPhase.ASIDE or not self.wants_events or self.read_error is not None:
            return
        request = self._request
        if (request is None or not request.is_under_way) and len(self._ready) < READY_EVENTS_MAX:
            if request is not None:  # a busy server has sent it away
                self._queue.extendleft(reversed(request.entries))
                self._request = None
            self.phase = EventsPhase.CATCHING_UP
            self._request_page()

    def _request_page(self) -> None:
        self.page_count += 1
        self._page_request_id = self._next_id()
        self.is_page_due = False
        self.outgoing.append(
            codec.encode_sync(self.partitions, self._cursor, PAGE_EVENTS, self.epoch, self._page_request_id)
        )

    def _send_request(self) -> None:
        if not self.is_submitting or self.busy_ms:
            return
        request = self._request
        if request is None and self._queue:
            request = self._request = self._build_request()
        elif request is None or request.is_under_way:
            return
        request.msg_id = self._next_id()
        request.is_under_way = True
        self.outgoing.append(codec.encode_submit(request.entries, request.msg_id))

    def _build_request(self) -> _Request:
        entries: list[OutboxEntry] = []
        size = 0
        while self._queue and len(entries) < self._request_events_max:
            size += ITEM_BYTES + len(self._queue[0].body) + sum(map(len, self._queue[0].partitions))
            if entries and size > REQUEST_BYTES_MAX:
                break
            entries.append(self._queue.popleft())
        return _Request(
            "", entries, self._cursor, [], holds_broadcasts=len(entries) > 1 and self.phase is EventsPhase.LIVE
        )

    # --- requests that come to nothing

    def _postpone_request(self) -> None:
        """A busy server has sent the request away. Broadcasts from now on wait for its answer (see above)."""
        request = self._request
        assert request is not None  # noqa: S101 - the error is about it
        request.is_under_way = False
        if not request.holds_broadcasts and self.phase is EventsPhase.LIVE:
            request.holds_broadcasts, request.cursor = True, self._cursor

    def _split(self, request: _Request, reason: str, message: str) -> None:
        """Something is wrong with one of them: fewer at a time, until the one at fault is alone, and is refused."""
        if len(request.entries) == 1:
            self._settled.append(SettledEntry(request.entries[0], Refused(reason, (Fault("$", message),))))
            self.blocked_writes.unblock()
        else:
            self._request_events_max = max(1, len(request.entries) // 2)
            self._accepted_requests = 0
            self._queue.extendleft(reversed(request.entries))

    # --- other

    def _change_history(self, epoch: str, last_committed_id: int, message: str) -> None:
        self.history_change = HistoryChange(self.epoch, epoch, self.cursor, last_committed_id, message)
        self.disconnect()
        self.phase = EventsPhase.HISTORY_CHANGED

    def _raise_last_committed_id(self, number: int) -> None:
        self.last_committed_id = max(self.last_committed_id, number)

    def _next_id(self) -> str:
        self._last_request_number += 1
        return str(self._last_request_number)


def _to_outcome(entry: OutboxEntry, result: codec.SubmitResult) -> Committed | Refused:
    if result.id != entry.id:
        raise ProtocolError(f"the result of {entry.id} is about {result.id}")
    if result.status == "committed" and result.committed_id > 0:
        return Committed(result.committed_id, result.status_updated_at)
    if result.status == "rejected":
        return Refused(result.reason, result.errors)
    raise ProtocolError(f"{entry.id} was answered with the status {result.status!r}")
