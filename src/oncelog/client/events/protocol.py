"""The client side of the Events API, without I/O and without a clock.

Frames go in (`receive`). Frames to send (`outgoing`), events in their order (`take_events`) and outcomes of submissions
(`take_settled`) come out. `connect` begins a connection and `disconnect` ends it, any number of times.

The client sends one request at a time. Submissions that arrive meanwhile go into the next request. So the server
commits submissions in the order of the application, and many submissions cost little more than one.

Order of own and foreign events: the server does not broadcast an event to the connection that submitted it. The answer
has the committed id of the event. The answer arrives after the broadcasts of lower ids and before the broadcasts of
higher ids (EV-14). For a request with one event, the order of arrival is therefore the order of committed ids. In a
request with several events that is certain only for the highest id: an earlier connection of this client may have sent
the other events, and their ids may be lower than those of earlier broadcasts. Therefore the protocol holds broadcasts
back while such a request is under way, and sorts them together with the own events of the answer.

The protocol also holds broadcasts back from the moment when a busy server sends a request away until the request has
its answer. An earlier connection or another client may have sent the same ids, and the server may have committed them
while it had the request. Then the server did not broadcast them to this connection.
"""

import logging
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
from oncelog.client.runtime.http import CLOSE_TOO_LARGE
from oncelog.client.runtime.protocol import BaseProtocol
from oncelog.errors import ProtocolError, ServerRefusedError

logger: Final = logging.getLogger("oncelog.client")

PAGE_EVENTS: Final = 1000
READY_EVENTS_MAX: Final = 5000
"""Number of undelivered events from which the protocol requests no further page."""
REQUEST_EVENTS_MAX: Final = 500
REQUEST_BYTES_MAX: Final = 1024 * 1024
"""Size of a request with more than one event."""
ITEM_BYTES: Final = 100
"""Upper bound of the size of an event in a request, without its body and its partitions."""
GROWTH_REQUESTS: Final = 64
"""Number of accepted requests after which the protocol tries larger requests again."""
BUSY_MS_MIN: Final = 10
BUSY_MS_MAX: Final = 60_000
TOO_LARGE: Final = "too_large"
"""Reason for the refusal of an event that exceeds the frame limit of the server."""


class EventsPhase(Enum):
    """Phase of a connection."""

    NONE = "none"
    CONNECTING = "connecting"
    ASIDE = "aside"
    """Connected and submitting. The client requests events once the application wants them and has room for them."""
    CATCHING_UP = "catching up"
    LIVE = "live"
    HISTORY_CHANGED = "history changed"
    """The client sends nothing until `start_over`."""


class _Request(Struct, gc=False):
    """The request that has no answer yet."""

    entries: list[OutboxEntry]
    cursor: int
    """Cursor of the client when the request was sent."""
    holds_broadcasts: bool
    """Whether broadcasts wait for the answer."""
    held_broadcasts: list[Event]
    msg_id: str = ""
    is_under_way: bool = False
    """False before the request is sent, and from the moment when a busy server sends it away."""


class EventsProtocol(BaseProtocol):
    """State of one events client."""

    def __init__(self, client_id: str, partitions: Sequence[str], cursor: int, epoch: str) -> None:
        super().__init__(logger)
        self.phase = EventsPhase.NONE
        self.client_id = client_id
        self._visible_client_id = client_id
        self._actor = ""
        self.partitions = tuple(partitions)
        self.epoch = epoch
        """Epoch of the history that the cursor belongs to; empty before the first connection."""
        self.history_change: HistoryChange | None = None
        self.busy_ms = 0
        """Pause that a busy server asked for. The connector calls `resume` after it. 0 without a pause."""
        self.last_committed_id = cursor
        """Highest committed id that the server has reported."""
        self.wants_events = True
        """Whether the application takes events. If not, the client does not request them until `want_events`."""
        self.page_count = 0
        """Number of requested pages. If it does not grow while `is_page_due`, the application takes no events."""
        self._scope = frozenset(partitions)
        self._cursor = cursor
        """All events of the partitions up to this committed id have arrived."""
        self._queue: deque[OutboxEntry] = deque()
        self._request: _Request | None = None
        self.ready: deque[Event] = deque()
        """Events that the application can take."""
        self.settled: list[SettledEntry] = []
        """Outcomes since the last `take_settled`."""
        self._page_request_id: str | None = None
        """Id of the page request that has no answer yet."""
        self.is_page_due = False
        """Whether the server has further events and the client has no room for them."""
        self._request_events_max = REQUEST_EVENTS_MAX
        """Maximum number of events in a request that the server is expected to accept."""
        self._accepted_requests = 0

    # --- the connection

    def connect(self, token: str | None) -> None:
        """Begin a connection."""
        self.disconnect()
        self.phase = EventsPhase.CONNECTING
        self._append_request(codec.encode_connect, token, self.client_id)

    def disconnect(self, close_code: int | None = None) -> None:
        """End the connection. The next one sends unanswered submissions again, under the same ids."""
        self.outgoing.clear()
        self._page_request_id, self.is_page_due, self.busy_ms, self.read_error = None, False, 0, None
        request, self._request = self._request, None
        if request is not None:
            if request.holds_broadcasts:
                self._cursor = request.cursor  # the next sync brings the held broadcasts again, in order
            if close_code == CLOSE_TOO_LARGE and request.is_under_way:
                self._split(request, TOO_LARGE, "the message is larger than the server accepts")
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
        """All events up to this committed id have arrived in order: the application has them or can take them."""
        request = self._request
        return request.cursor if request is not None and request.holds_broadcasts else self._cursor

    def start_over(self, since: int, epoch: str) -> None:
        """Continue from another cursor in another history. Drop the events that wait in memory."""
        self.disconnect()
        self.ready.clear()
        self._cursor = since
        self.epoch = epoch
        self.history_change = None
        self.phase = EventsPhase.NONE

    # --- the application's side

    def enqueue(self, entries: Sequence[OutboxEntry]) -> None:
        """Send submissions of the outbox, in its order."""
        self._queue.extend(entries)
        self._send_request()

    @property
    def outbox_count(self) -> int:
        """Number of submissions without an outcome."""
        return len(self._queue) + (0 if self._request is None else len(self._request.entries))

    @property
    def is_flooded(self) -> bool:
        """Whether too many events wait in memory. The connection must end, and the next one begins in phase ASIDE."""
        held_count = 0 if self._request is None else len(self._request.held_broadcasts)
        return self.phase is EventsPhase.LIVE and len(self.ready) + held_count > 2 * READY_EVENTS_MAX

    @property
    def is_submitting(self) -> bool:
        """Whether the connection is ready for submissions."""
        return self.phase in (EventsPhase.LIVE, EventsPhase.ASIDE)

    def want_events(self) -> None:
        """Request events from now on: the application takes them."""
        self.wants_events = True
        self._catch_up_if_ready()

    def retry_read(self) -> None:
        """Request events again after a refusal. The client may have the right to read them by now."""
        self.read_error = None
        self._catch_up_if_ready()

    def take_events(self, count_max: int) -> tuple[list[Event], int]:
        """Return the next events and the cursor after them."""
        ready = self.ready
        events = [ready.popleft() for _ in range(min(count_max, len(ready)))]
        if len(ready) < READY_EVENTS_MAX:
            if self.is_page_due:
                self._request_page()
            self._catch_up_if_ready()
        return events, events[-1].committed_id if ready else self.cursor

    def return_events(self, events: Sequence[Event]) -> None:
        """Put events back that could not be delivered. `take_events` returns them first."""
        self.ready.extendleft(reversed(events))

    def take_settled(self) -> list[SettledEntry]:
        """Return the outcomes since the last call."""
        settled, self.settled = self.settled, []
        return settled

    def resume(self) -> None:
        """End the pause that a busy server asked for."""
        self.busy_ms = 0
        self._send_request()

    # --- frames in

    def receive(self, data: str | bytes) -> None:
        """Handle a text frame. Raises ProtocolError; ServerRefusedError if the server ends the connection."""
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
            return  # repeated
        self.answer_count += 1
        self.last_committed_id = connected.server_last_committed_id
        if self.epoch and connected.epoch != self.epoch:
            reason = "the log on the server is another one than before"
            self._change_history(connected.epoch, connected.server_last_committed_id, reason)
            return
        self.epoch = connected.epoch
        self._visible_client_id, self._actor = connected.client_id or self.client_id, connected.actor
        self.history_change = None  # the server may have the previous history again
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
                raise ProtocolError(f"a page has event {event.committed_id} behind event {last}")
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
        """Handle a page that arrived twice, or the answer to a request that the network has repeated."""
        if self.phase is not EventsPhase.LIVE:
            return
        if page.has_more:
            raise ProtocolError("the server began a sync that the client did not request and would not end")
        for event in page.events:  # the server no longer broadcasts them
            self._handle_broadcast(event)
        self._cursor = max(self._cursor, page.next_since_committed_id)

    def _handle_broadcast(self, event: Event) -> None:
        if event.committed_id <= self._cursor:
            return  # repeated
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
            # A repeated answer, or the answer to a request that the network has repeated. In the second case the server
            # may have sent the request away once and committed it once. Then only the next sync brings its events.
            if self.phase is not EventsPhase.ASIDE and any(result.committed_id > self._cursor for result in results):
                raise ProtocolError("the server answered a request that the client did not send")
            return
        if len(results) != len(request.entries):
            raise ProtocolError(f"the server answered {len(request.entries)} events with {len(results)} results")
        # All results are checked before the state changes: after a malformed answer the request is still pending.
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
            self._catch_up_if_ready()  # the sync brings the own events, too
        else:
            self._place_own_events(request, results, outcomes)
            # The answer arrives after all broadcasts of lower ids, also if its events have other partitions.
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
            # Events up to the cursor of the request had arrived before. All broadcasts since then are held.
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
                # The client may still have the right to submit.
                self.answer_count += 1
                self._page_request_id = None
                self.phase = EventsPhase.ASIDE
                self.read_error = f"{error.code}: {error.message}"
                self._send_request()
            case error_codes.BAD_REQUEST if self.phase is not EventsPhase.CONNECTING and not is_about_page:
                pass  # about a message that the network has repeated
            case _:
                if is_about_request and error.code == error_codes.RATE_LIMITED:
                    # The server admits the next connection, and does not report the reason there.
                    self.blocked_writes.block(error.code, error.message)
                raise ServerRefusedError(error.code, error.message, error.details.retry_after_ms)

    # --- frames out

    def _catch_up_if_ready(self) -> None:
        """Leave the phase ASIDE, unless a request is under way: the events of its answer would have no place."""
        if self.phase is not EventsPhase.ASIDE or not self.wants_events or self.read_error is not None:
            return
        request = self._request
        if (request is None or not request.is_under_way) and len(self.ready) < READY_EVENTS_MAX:
            if request is not None:  # a busy server has sent it away
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
        """Hold broadcasts back until the request has its answer: a busy server has sent it away (see above)."""
        request.is_under_way = False
        if not request.holds_broadcasts and self.phase is EventsPhase.LIVE:
            request.holds_broadcasts, request.cursor = True, self._cursor

    def _split(self, request: _Request, reason: str, message: str) -> None:
        """Send fewer events at a time until the event at fault is alone, and refuse that one."""
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
        raise ProtocolError(f"the server answered event {entry.id} with a result of event {result.id}")
    if result.status == "committed" and result.committed_id > 0:
        return Committed(result.committed_id, result.status_updated_at)
    if result.status == "rejected":
        return Refused(result.reason, result.errors)
    raise ProtocolError(f"the server answered event {entry.id} with the status {result.status!r}")
