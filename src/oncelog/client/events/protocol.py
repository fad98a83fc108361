"""The client side of the Events API, without I/O and without a clock.

Frames go in (`receive`). Frames to send (`outgoing`), events in order (`take_events`) and submission outcomes
(`take_settled`) come out. `connect` begins a connection and `disconnect` ends it, any number of times.

The client sends one request at a time. Submissions that arrive in the meantime go into the next request. The server
therefore commits submissions in the application's order, and many submissions cost little more than one.

How this client's events are ordered relative to those of others: the server does not broadcast an event to the
connection that submitted it. Instead, its answer contains the committed id of the event, and arrives after the
broadcasts of lower ids and before the broadcasts of higher ids (EV-14). For a request with one event, the order of
arrival is therefore the order of committed ids. For a request with several events, this is guaranteed only for the
highest id: an earlier connection of this client may have sent the other events, and their ids may be lower than those
of earlier broadcasts. The protocol therefore holds broadcasts back while such a request is in flight, and sorts them
together with the events from the answer.

The protocol also holds broadcasts back when a busy server turns a request away, until the request is answered. An
earlier connection or another client may have sent the same ids, and the server may have committed them while it held
the request. In that case the server did not broadcast them to this connection.
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from typing import Final

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
from oncelog.client.runtime import logger
from oncelog.client.runtime.http import CLOSE_TOO_LARGE
from oncelog.client.runtime.protocol import BaseProtocol
from oncelog.errors import ProtocolError, ServerRefusedError

PAGE_EVENTS: Final = 1000
READY_EVENTS_MAX: Final = 5000
"""Number of undelivered events at which the protocol stops requesting pages."""
REQUEST_EVENTS_MAX: Final = 500
REQUEST_BYTES_MAX: Final = 1024 * 1024
"""Largest size of a request with more than one event."""
ITEM_BYTES: Final = 100
"""Upper bound for the size of an event in a request, excluding its body and its partitions."""
GROWTH_REQUESTS: Final = 64
"""Number of accepted requests after which the protocol tries larger ones again."""
BUSY_MS_MIN: Final = 10
BUSY_MS_MAX: Final = 60_000
TOO_LARGE: Final = "too_large"
"""Refusal reason for an event that exceeds the server's frame limit."""


class EventsPhase(Enum):
    """Phase of a connection."""

    NONE = "none"
    CONNECTING = "connecting"
    ASIDE = "aside"
    """Connected and submitting. The client requests events once the application wants them and `ready` has room."""
    CATCHING_UP = "catching up"
    LIVE = "live"
    HISTORY_CHANGED = "history changed"
    """The client sends nothing until `start_over` is called."""


class _Request(Struct, gc=False):
    """The submission request that has no answer yet."""

    entries: list[OutboxEntry]
    cursor: int
    """The client's cursor when the request was built or, if later, when broadcasts were first held back."""
    holds_broadcasts: bool
    """Whether broadcasts are held back until the answer arrives."""
    held_broadcasts: list[Event]
    msg_id: str = ""
    is_under_way: bool = False
    """False until the request is sent, and again after a busy server turns it away."""


class EventsProtocol(BaseProtocol):
    """Protocol state of one events client."""

    def __init__(self, client_id: str, partitions: Sequence[str], cursor: int, epoch: str) -> None:
        super().__init__(logger)
        self.phase = EventsPhase.NONE
        self.client_id = client_id
        self._visible_client_id = client_id
        self._actor = ""
        self.partitions = tuple(partitions)
        self.epoch = epoch
        """Epoch of the history that the cursor belongs to. Empty before the first connection."""
        self.history_change: HistoryChange | None = None
        self.busy_ms = 0
        """Pause that a busy server requested, or 0. The connector calls `resume` after it."""
        self.last_committed_id = cursor
        """Highest committed id that the server has reported."""
        self.wants_events = True
        """Whether the application consumes events. If not, the client requests none until `want_events` is called."""
        self.page_count = 0
        """Number of requested pages. If it stays the same while `is_page_due`, the application is not taking events."""
        self._scope = frozenset(partitions)
        self._cursor = cursor
        """All events in the partitions up to this committed id have arrived."""
        self._queue: deque[OutboxEntry] = deque()
        self._request: _Request | None = None
        self.ready: deque[Event] = deque()
        """Events that are ready for the application."""
        self.settled: list[SettledEntry] = []
        """Outcomes since the last `take_settled`."""
        self._page_request_id: str | None = None
        """Id of the page request that has no answer yet."""
        self.is_page_due = False
        """Whether the server has further events for which the client has no room yet."""
        self._request_events_max = REQUEST_EVENTS_MAX
        """Largest number of events per request that the server is expected to accept."""
        self._accepted_requests = 0

    # --- the connection

    def connect(self, token: str | None) -> None:
        """Begin a connection."""
        self.disconnect()
        self.phase = EventsPhase.CONNECTING
        self._append_request(codec.encode_connect, token, self.client_id)

    def disconnect(self, close_code: int | None = None) -> None:
        """Record the end of the connection. The next one resends unanswered submissions under the same ids."""
        self.outgoing.clear()
        self._page_request_id, self.is_page_due, self.busy_ms, self.read_error = None, False, 0, None
        request, self._request = self._request, None
        if request is not None:
            if request.holds_broadcasts:
                self._cursor = request.cursor  # the next sync returns the held broadcasts again, in order
            if close_code == CLOSE_TOO_LARGE and request.is_under_way:
                self._split(request, TOO_LARGE, "the message is larger than the server accepts")
            else:
                self._queue.extendleft(reversed(request.entries))
        if self.phase is not EventsPhase.HISTORY_CHANGED:
            self.phase = EventsPhase.NONE

    @property
    def is_waiting(self) -> bool:
        """Whether the client is waiting for an answer from the server."""
        is_request_under_way = self._request is not None and self._request.is_under_way
        return self.phase is EventsPhase.CONNECTING or self._page_request_id is not None or is_request_under_way

    @property
    def cursor(self) -> int:
        """All events up to this committed id have arrived in order: the application has taken them or can take them."""
        request = self._request
        return request.cursor if request is not None and request.holds_broadcasts else self._cursor

    def start_over(self, since: int, epoch: str) -> None:
        """Continue from the cursor `since` in the history `epoch`. Drop the events waiting in memory."""
        self.disconnect()
        self.ready.clear()
        self._cursor = since
        self.epoch = epoch
        self.history_change = None
        self.phase = EventsPhase.NONE

    # --- the application's side

    def enqueue(self, entries: Sequence[OutboxEntry]) -> None:
        """Queue submissions from the outbox, in order, and send them as soon as possible."""
        self._queue.extend(entries)
        self._send_request()

    @property
    def outbox_count(self) -> int:
        """Number of submissions without an outcome."""
        return len(self._queue) + (0 if self._request is None else len(self._request.entries))

    @property
    def is_flooded(self) -> bool:
        """Whether too many events are in memory. If so, reconnect: the next connection begins in phase ASIDE."""
        held_count = 0 if self._request is None else len(self._request.held_broadcasts)
        return self.phase is EventsPhase.LIVE and len(self.ready) + held_count > 2 * READY_EVENTS_MAX

    @property
    def is_submitting(self) -> bool:
        """Whether the connection is ready for submissions."""
        return self.phase in (EventsPhase.LIVE, EventsPhase.ASIDE)

    def want_events(self) -> None:
        """Start requesting events, because the application now consumes them."""
        self.wants_events = True
        self._catch_up_if_ready()

    def retry_read(self) -> None:
        """Request events again after a refusal. The client may have been granted access in the meantime."""
        self.read_error = None
        self._catch_up_if_ready()

    def take_events(self, count_max: int) -> tuple[list[Event], int]:
        """Return up to `count_max` events and the cursor after them."""
        ready = self.ready
        events = [ready.popleft() for _ in range(min(count_max, len(ready)))]
        if len(ready) < READY_EVENTS_MAX:
            if self.is_page_due:
                self._request_page()
            self._catch_up_if_ready()
        return events, events[-1].committed_id if ready else self.cursor

    def return_events(self, events: Sequence[Event]) -> None:
        """Put back events that could not be delivered. `take_events` returns them first."""
        self.ready.extendleft(reversed(events))

    def take_settled(self) -> list[SettledEntry]:
        """Return the outcomes since the last call."""
        settled, self.settled = self.settled, []
        return settled

    def resume(self) -> None:
        """End the pause that a busy server requested."""
        self.busy_ms = 0
        self._send_request()

    # --- frames in

    def receive(self, data: str | bytes) -> None:
        """Handle a text frame. Raises ProtocolError, or ServerRefusedError if the server ends the connection."""
        message, msg_id = codec.decode_message(data)
        match message:
            case Event():
                self._handle_broadcast(message)
            case codec.SubmitResults(results):
                self._handle_results(results, msg_id)
            case codec.SyncPage():
                self._handle_page(message, msg_id)
            case codec.Connected():
                self._handle_connected(message)
            case codec.ServerError():
                self._handle_error(message, msg_id)

    def _handle_connected(self, connected: codec.Connected) -> None:
        if self.phase is not EventsPhase.CONNECTING:
            return  # duplicate
        self.answer_count += 1
        self.last_committed_id = connected.server_last_committed_id
        if self.epoch and connected.epoch != self.epoch:
            reason = "the server has a different log than before"
            self._change_history(connected.epoch, connected.server_last_committed_id, reason)
            return
        self.epoch = connected.epoch
        self._visible_client_id, self._actor = connected.client_id or self.client_id, connected.actor
        self.history_change = None  # the server may be back on the previous history
        self.phase = EventsPhase.ASIDE if self.partitions else EventsPhase.LIVE
        self._catch_up_if_ready()
        self._send_request()

    def _handle_page(self, page: codec.SyncPage, msg_id: str | int | None) -> None:
        if self._page_request_id is None or msg_id != self._page_request_id:
            self._handle_unrequested_page(page)
            return
        self.answer_count += 1
        self._page_request_id = None
        last = 0
        for event in page.events:
            if event.committed_id <= last:
                raise ProtocolError(f"a page has event {event.committed_id} after event {last}")
            last = event.committed_id
            if last > self._cursor:
                self._cursor = last
                self.ready.append(event)
        self._cursor = max(self._cursor, page.next_since_committed_id)
        self._raise_last_committed_id(max(self._cursor, page.sync_to_committed_id))
        if not page.has_more:
            self.phase = EventsPhase.LIVE
            self._send_request()
        elif len(self.ready) < READY_EVENTS_MAX:
            self._request_page()
        else:
            self.is_page_due = True

    def _handle_unrequested_page(self, page: codec.SyncPage) -> None:
        """Handle a duplicated page, or the answer to a request that the network duplicated."""
        if self.phase is not EventsPhase.LIVE:
            return
        if page.has_more:
            raise ProtocolError("the server began a sync with further pages that the client did not request")
        for event in page.events:  # the server no longer broadcasts them
            self._handle_broadcast(event)
        self._cursor = max(self._cursor, page.next_since_committed_id)

    def _handle_broadcast(self, event: Event) -> None:
        if event.committed_id <= self._cursor:
            return  # duplicate
        if self.phase is not EventsPhase.LIVE:
            raise ProtocolError(f"the server broadcast event {event.committed_id} before the end of the sync")
        self._cursor = event.committed_id
        self._raise_last_committed_id(event.committed_id)
        request = self._request
        if request is not None and request.holds_broadcasts:
            request.held_broadcasts.append(event)
        else:
            self.ready.append(event)

    def _handle_results(self, results: Sequence[codec.SubmitResult], msg_id: str | int | None) -> None:
        request = self._request
        if request is None or msg_id != request.msg_id:
            # A duplicated answer, or the answer to a request that the network duplicated. In the second case the server
            # may have turned one copy away and committed the other. Then only the next sync returns its events.
            if self.phase is not EventsPhase.ASIDE and any(result.committed_id > self._cursor for result in results):
                raise ProtocolError("the server answered a request that the client did not send")
            return
        if len(results) != len(request.entries):
            raise ProtocolError(f"the server answered {len(request.entries)} events with {len(results)} results")
        # Check all results before changing the state, so that the request is still pending after a malformed answer.
        outcomes = [_to_outcome(entry, result) for entry, result in zip(request.entries, results, strict=True)]
        self.answer_count += 1
        self._request = None
        self.settled.extend(map(SettledEntry, request.entries, outcomes))
        self.blocked_writes.unblock()
        self._accepted_requests += 1
        if self._accepted_requests % GROWTH_REQUESTS == 0:
            self._request_events_max = min(2 * self._request_events_max, REQUEST_EVENTS_MAX)
        highest = max((outcome.committed_id for outcome in outcomes if isinstance(outcome, Committed)), default=0)
        self._raise_last_committed_id(highest)
        if self.phase is EventsPhase.ASIDE:
            self._catch_up_if_ready()  # the sync also returns this client's events
        else:
            self._place_own_events(request, results, outcomes)
            # The answer arrives after all broadcasts of lower ids, even if its events are in other partitions.
            self._cursor = max(self._cursor, highest)
        self._send_request()

    def _place_own_events(
        self, request: _Request, results: Sequence[codec.SubmitResult], outcomes: Sequence[Outcome]
    ) -> None:
        own: list[Event] = []
        for entry, result, outcome in zip(request.entries, results, outcomes, strict=True):
            if isinstance(outcome, Committed) and not self._scope.isdisjoint(entry.partitions):
                own.append(codec.to_own_event(entry, result, self._visible_client_id, self._actor))
        if request.holds_broadcasts:
            # Events up to the request's cursor had already arrived. All broadcasts since then are held.
            seen = {event.committed_id for event in request.held_broadcasts}
            new = {event.committed_id: event for event in own if event.committed_id > request.cursor}
            events = request.held_broadcasts + [event for number, event in new.items() if number not in seen]
            events.sort(key=attrgetter("committed_id"))
        else:
            events = [event for event in own if event.committed_id > self._cursor]
        self.ready.extend(events)

    def _handle_error(self, error: codec.ServerError, msg_id: str | int | None) -> None:
        request = self._request
        is_about_request = request is not None and msg_id == request.msg_id
        is_about_page = self._page_request_id is not None and msg_id == self._page_request_id
        match error.code:
            case error_codes.HISTORY_CHANGED:
                self._change_history(error.details.epoch, error.details.server_last_committed_id, error.message)
            case error_codes.SERVER_BUSY | error_codes.READ_ONLY | error_codes.QUOTA_EXCEEDED if (
                request is not None and is_about_request
            ):
                self.answer_count += 1
                self.blocked_writes.block(error.code, error.message)
                self.busy_ms = min(max(error.details.retry_after_ms, BUSY_MS_MIN), BUSY_MS_MAX)
                self._postpone(request)
                self._catch_up_if_ready()
            case error_codes.BAD_REQUEST if request is not None and is_about_request:
                self.answer_count += 1
                self._request = None
                self.ready.extend(request.held_broadcasts)
                self._split(request, error.code, error.message)
                self._send_request()
            case error_codes.FORBIDDEN if is_about_page:
                # The client may still be allowed to submit.
                self.answer_count += 1
                self._page_request_id = None
                self.phase = EventsPhase.ASIDE
                self.read_error = f"{error.code}: {error.message}"
                self._send_request()
            case error_codes.BAD_REQUEST if self.phase is not EventsPhase.CONNECTING and not is_about_page:
                pass  # the error is about a message that the network duplicated
            case _:
                if is_about_request and error.code == error_codes.RATE_LIMITED:
                    # The server will admit the next connection without repeating the reason.
                    self.blocked_writes.block(error.code, error.message)
                raise ServerRefusedError(error.code, error.message, error.details.retry_after_ms)

    # --- frames out

    def _catch_up_if_ready(self) -> None:
        """Leave phase ASIDE unless a request is in flight: the client could not order the events in its answer."""
        if self.phase is not EventsPhase.ASIDE or not self.wants_events or self.read_error is not None:
            return
        request = self._request
        if (request is None or not request.is_under_way) and len(self.ready) < READY_EVENTS_MAX:
            if request is not None:  # a busy server has turned it away
                self._queue.extendleft(reversed(request.entries))
                self._request = None
            self.phase = EventsPhase.CATCHING_UP
            self._request_page()

    def _request_page(self) -> None:
        self.page_count += 1
        self.is_page_due = False
        self._page_request_id = self._append_request(
            codec.encode_sync, self.partitions, self._cursor, PAGE_EVENTS, self.epoch
        )

    def _send_request(self) -> None:
        if not self.is_submitting or self.busy_ms:
            return
        if self._request is None and self._queue:
            self._request = self._build_request()
        request = self._request
        if request is not None and not request.is_under_way:
            request.msg_id = self._append_request(codec.encode_submit, request.entries)
            request.is_under_way = True

    def _build_request(self) -> _Request:
        entries: list[OutboxEntry] = []
        size = 0
        while self._queue and len(entries) < self._request_events_max:
            size += ITEM_BYTES + len(self._queue[0].body) + sum(map(len, self._queue[0].partitions))
            if entries and size > REQUEST_BYTES_MAX:
                break
            entries.append(self._queue.popleft())
        return _Request(entries, self._cursor, len(entries) > 1 and self.phase is EventsPhase.LIVE, [])

    # --- requests that the server does not accept

    def _postpone(self, request: _Request) -> None:
        """Hold broadcasts back until the request is answered, because a busy server turned it away."""
        request.is_under_way = False
        if not request.holds_broadcasts and self.phase is EventsPhase.LIVE:
            request.holds_broadcasts, request.cursor = True, self._cursor

    def _split(self, request: _Request, reason: str, message: str) -> None:
        """Retry with half as many events until a request contains only the faulty event, then refuse that event."""
        if len(request.entries) == 1:
            self.settled.append(SettledEntry(request.entries[0], Refused(reason, (Fault("$", message),))))
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


def _to_outcome(entry: OutboxEntry, result: codec.SubmitResult) -> Committed | Refused:
    if result.id != entry.id:
        raise ProtocolError(f"the server answered event {entry.id} with a result for event {result.id}")
    if result.status == "committed" and result.committed_id > 0:
        return Committed(result.committed_id, result.status_updated_at)
    if result.status == "rejected":
        return Refused(result.reason, result.errors)
    raise ProtocolError(f"the server answered event {entry.id} with the status {result.status!r}")
