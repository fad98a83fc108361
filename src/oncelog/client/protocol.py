"""The client's side of the events door, without I/O and without a clock.

Frames go in (`receive`), frames to be sent come out (`outgoing`), and so does what the application is to have: events
in their order (`take_events`), outcomes of its submissions (`take_settled`). A connection is begun by `begin` and ended
by `lost`, as often as it takes.

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
from typing import Final

import msgspec
from msgspec import Struct

from oncelog import codes
from oncelog.client import words
from oncelog.client.holdups import HoldUps
from oncelog.client.values import Committed, Entry, Event, Fault, HistoryChange, Outcome, Rejected, Settled
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
CEILING_REQUESTS: Final = 64
"""After so many requests in a row that were not too large, larger ones are tried again."""
_LATER: Final = (codes.SERVER_BUSY, codes.READ_ONLY, codes.QUOTA_EXCEEDED)
"""Errors of a request after which it is sent again on the same connection."""
BUSY_MS_MIN: Final = 10
BUSY_MS_MAX: Final = 60_000
TOO_LARGE: Final = "too_large"
"""The reason of an event that the server's limit of a frame does not let through."""


class Phase(Enum):
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
    entries: list[Entry]
    cursor: int
    """Where we were when it was sent."""
    held: list[Event]
    """Broadcasts that came since, if they have to wait for the answer."""
    holds: bool
    """Whether they have to."""
    is_under_way: bool = True
    """False from when a busy server has sent it away until it is sent again."""


class Protocol:
    """One client. Never used by two threads at a time."""

    def __init__(self, client_id: str, partitions: Sequence[str], cursor: int, epoch: str) -> None:
        self.phase = Phase.NONE
        self.client_id = client_id
        self._shown_id = client_id
        self._actor = ""
        self.partitions = tuple(partitions)
        self.epoch = epoch
        """Of the history that the cursor belongs to; empty before the first connection."""
        self.outgoing: list[bytes] = []
        """Frames to be sent, in order. Whoever sends them empties the list."""
        self.history_change: HistoryChange | None = None
        self.busy_ms = 0
        """The server has too much to do: `go_on` is to be called after so long. 0 if it has not."""
        self.answers = 0
        """How many awaited answers have come: while it stands still and `is_waiting`, the server is silent."""
        self.last_committed_id = cursor
        """The highest number that we have heard of."""
        self.wants_events = True
        """Whether somebody takes events. While nobody does, a connection does not ask for them (`want_events`)."""
        self.pages = 0
        """How many pages have been asked for: while it stands still and `is_page_due`, nobody takes the events."""
        self._scope = frozenset(partitions)
        self._cursor = cursor
        """All up to here that is in our partitions has arrived."""
        self._queue: deque[Entry] = deque()
        self._request: _Request | None = None
        self._ready: deque[Event] = deque()
        self._settled: list[Settled] = []
        self._page: str | None = None
        """The `msg_id` of the page that is on its way."""
        self.is_page_due = False
        """There is more, but no room for it."""
        self.refused_reading: str | None = None
        """Why this connection gets no events though they are wanted: not all partitions may be read."""
        self.hold_ups = HoldUps(logger)
        self._request_events_max = REQUEST_EVENTS_MAX
        """As many as the server takes, by all that is known."""
        self._requests_taken = 0
        self._number = 0

    # --- the connection

    def begin(self, token: str | None) -> None:
        """A connection has been made: says who we are."""
        self.lost()
        self.phase = Phase.CONNECTING
        self.outgoing.append(words.connect(token, self.client_id, self._next_id()))

    def lost(self, close_code: int | None = None) -> None:
        """The connection is gone. What was under way is sent again over the next one, under the same ids."""
        self.outgoing.clear()
        self._page, self.is_page_due, self.busy_ms, self.refused_reading = None, False, 0, None
        request = self._take_request()
        if request is not None:
            if request.holds:
                # What was held back comes again with the next sync, in its place.
                self._cursor = request.cursor
            if close_code == words.CLOSED_TOO_LARGE and request.is_under_way:
                self._divide(request, TOO_LARGE, "the server takes no message as large as this")
            else:
                self._queue.extendleft(reversed(request.entries))
        if self.phase is not Phase.HISTORY_CHANGED:
            self.phase = Phase.NONE

    @property
    def is_waiting(self) -> bool:
        """Whether the server owes an answer."""
        is_request_under_way = self._request is not None and self._request.is_under_way
        return self.phase is Phase.CONNECTING or self._page is not None or is_request_under_way

    @property
    def cursor(self) -> int:
        """All up to here has arrived and is in order: taken, or ready to be taken."""
        request = self._request
        return request.cursor if request is not None and request.holds else self._cursor

    def start_over(self, since: int, epoch: str) -> None:
        """Goes on from another point, with another history. What had arrived of the old one is thrown away."""
        self.lost()
        self._ready.clear()
        self._cursor = since
        self.epoch = epoch
        self.history_change = None
        self.phase = Phase.NONE

    # --- the application's side

    def offer(self, entries: Sequence[Entry]) -> None:
        """Submissions that are in the outbox, in its order."""
        self._queue.extend(entries)
        self._send_request()

    @property
    def pending(self) -> int:
        """Submissions without an outcome."""
        return len(self._queue) + (0 if self._request is None else len(self._request.entries))

    @property
    def ready(self) -> int:
        """Events that wait to be taken."""
        return len(self._ready)

    @property
    def is_flooded(self) -> bool:
        """So many events wait that no more may come: the next connection is to be one that stands aside."""
        held = 0 if self._request is None else len(self._request.held)
        return self.phase is Phase.LIVE and len(self._ready) + held > 2 * READY_EVENTS_MAX

    @property
    def is_submitting(self) -> bool:
        """Whether what is submitted now is sent."""
        return self.phase in (Phase.LIVE, Phase.ASIDE)

    def want_events(self) -> None:
        """Somebody takes events from now on."""
        self.wants_events = True
        self._catch_up_if_there_is_room()

    def read_again(self) -> None:
        """What may not be read may have been allowed meanwhile."""
        self.refused_reading = None
        self._catch_up_if_there_is_room()

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
                self._ask_page()
            self._catch_up_if_there_is_room()
        return events, events[-1].committed_id if ready else self.cursor

    def put_back(self, events: Sequence[Event]) -> None:
        """Events that were taken and could not be handed over: they are the next again."""
        self._ready.extendleft(reversed(events))

    def take_settled(self) -> list[Settled]:
        """The outcomes since the last time."""
        settled, self._settled = self._settled, []
        return settled

    def go_on(self) -> None:
        """The pause that a busy server asked for is over."""
        self.busy_ms = 0
        self._send_request()

    # --- frames in

    def receive(self, data: str | bytes) -> None:
        """A text frame. Raises ProtocolError, or ServerRefusedError for a server that ends the connection."""
        try:
            message = words.read_message(data)
            if message.type == "event_broadcast":
                self._broadcast(words.read_event(message.payload))
            elif message.type == "submit_events_result":
                self._result(message)
            elif message.type == "sync_response":
                self._synced(message)
            elif message.type == "connected":
                self._connected(words.read_connected(message.payload))
            elif message.type == "error":
                self._error(message.msg_id, words.read_error(message.payload))
            # Other messages are of a newer server: what we must know it says in words that we know.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the server does not speak as an Oncelog server does: {error}") from error

    def _connected(self, connected: words.Connected) -> None:
        if self.phase is not Phase.CONNECTING:
            return  # said twice
        self.answers += 1
        self.last_committed_id = connected.server_last_committed_id
        if self.epoch and connected.epoch != self.epoch:
            self._change_history(
                connected.epoch, connected.server_last_committed_id, "the log on the server is another one than before"
            )
            return
        self.epoch = connected.epoch
        self._shown_id, self._actor = connected.client_id or self.client_id, connected.actor
        self.history_change = None  # if there was one: the server has the old history again
        self.phase = Phase.ASIDE if self.partitions else Phase.LIVE
        self._catch_up_if_there_is_room()
        self._send_request()

    def _synced(self, message: words.Message) -> None:
        page = words.read_page(message.payload)
        if self._page is None or message.msg_id != self._page:
            self._synced_unasked(page)
            return
        self.answers += 1
        self._page = None
        cursor, last = self._cursor, 0
        for event in page.events:
            if event.committed_id <= last:
                raise ProtocolError(f"a page has event {event.committed_id} behind event {last}")
            last = event.committed_id
            if last > cursor:
                cursor = last
                self._ready.append(event)
        self._cursor = max(cursor, page.next_since_committed_id)
        self._heard_of(max(self._cursor, page.sync_to_committed_id))
        if not page.has_more:
            self.phase = Phase.LIVE
            self._send_request()
        else:
            self._ask_page_if_there_is_room()

    def _synced_unasked(self, page: words.Page) -> None:
        """A page that came twice, or our question was doubled on its way."""
        if self.phase is not Phase.LIVE:
            return
        if page.has_more:
            raise ProtocolError("the server has begun a sync that was not asked for, and that nobody would end")
        # What it brings that is new is not broadcast any more.
        for event in page.events:
            self._broadcast(event)
        self._cursor = max(self._cursor, page.next_since_committed_id)

    def _broadcast(self, event: Event) -> None:
        if event.committed_id <= self._cursor:
            return  # it has arrived before
        if self.phase is not Phase.LIVE:
            raise ProtocolError(f"event {event.committed_id} was broadcast before the sync was over")
        self._cursor = event.committed_id
        self._heard_of(event.committed_id)
        request = self._request
        if request is not None and request.holds:
            request.held.append(event)
        else:
            self._ready.append(event)

    def _result(self, message: words.Message) -> None:
        request = self._request
        results = words.read_results(message.payload).results
        if request is None or message.msg_id != request.msg_id:
            # An answer that came twice. Or the request did, and was sent away once and taken once: then its events are
            # not broadcast to us, and come with the next sync alone.
            if self.phase is not Phase.ASIDE and any(one.committed_id > self._cursor for one in results):
                raise ProtocolError("an answer came that nobody waits for")
            return
        if len(results) != len(request.entries):
            raise ProtocolError(f"{len(request.entries)} events were answered with {len(results)} results")
        # All of it is read before any of it counts: an answer that makes no sense leaves the request as it is.
        outcomes = [_outcome(entry, result) for entry, result in zip(request.entries, results, strict=True)]
        self.answers += 1
        self._request = None
        self._settled.extend(map(Settled, request.entries, outcomes))
        self.hold_ups.went_through()
        self._requests_taken += 1
        if self._requests_taken % CEILING_REQUESTS == 0:
            self._request_events_max = min(2 * self._request_events_max, REQUEST_EVENTS_MAX)
        numbers = [outcome.committed_id for outcome in outcomes if isinstance(outcome, Committed)]
        self._heard_of(max(numbers, default=0))
        if self.phase is Phase.ASIDE:
            # Nothing else has come meanwhile: own events come with the rest, when we sync.
            self._catch_up_if_there_is_room()
        else:
            self._place(request, results, outcomes)
        self._send_request()

    def _place(self, request: _Request, results: Sequence[words.Result], outcomes: Sequence[Outcome]) -> None:
        own: list[Event] = []
        for entry, result, outcome in zip(request.entries, results, outcomes, strict=True):
            if isinstance(outcome, Committed) and not self._scope.isdisjoint(entry.partitions):
                own.append(words.own_event(entry, result, self._shown_id, self._actor))
        self._arrange(request, own)
        # The answer stands behind all that has a lower number, also where its events are not of our partitions.
        highest = max((outcome.committed_id for outcome in outcomes if isinstance(outcome, Committed)), default=0)
        self._cursor = max(self._cursor, highest)
        self._heard_of(self._cursor)

    def _arrange(self, request: _Request, own: list[Event]) -> None:
        """Puts the own events of a request among those that came while it was under way."""
        if request.holds:
            # What stood before the request was sent has arrived by then. Since then, what has been broadcast is held.
            seen = {event.committed_id for event in request.held}
            new = {event.committed_id: event for event in own if event.committed_id > request.cursor}
            arrived = request.held + [event for number, event in new.items() if number not in seen]
            arrived.sort(key=_number_of)
        else:
            arrived = [event for event in own if event.committed_id > self._cursor]
        self._ready.extend(arrived)

    def _error(self, msg_id: str | int | None, error: words.ServerError) -> None:
        request = self._request
        if error.code == codes.HISTORY_CHANGED:
            self._change_history(error.details.epoch, error.details.server_last_committed_id, error.message)
        elif request is not None and msg_id == request.msg_id and error.code in _LATER:
            self.answers += 1
            self.hold_ups.refused(error.code, error.message)
            self._send_later(request)
            self.busy_ms = min(max(error.details.retry_after_ms, BUSY_MS_MIN), BUSY_MS_MAX)
            self._catch_up_if_there_is_room()
        elif request is not None and msg_id == request.msg_id and error.code == codes.BAD_REQUEST:
            self.answers += 1
            self._request = None
            self._ready.extend(request.held)
            self._divide(request, error.code, error.message)
            self._send_request()
        elif error.code == codes.FORBIDDEN and self._page is not None and msg_id == self._page:
            # To submit is another right.
            self.answers += 1
            self._page, self.phase, self.refused_reading = None, Phase.ASIDE, f"{error.code}: {error.message}"
            self._send_request()
        elif error.code == codes.BAD_REQUEST and self.phase is not Phase.CONNECTING and msg_id != self._page:
            pass  # about something that was sent twice on its way
        else:
            if request is not None and msg_id == request.msg_id and error.code == codes.RATE_LIMITED:
                # The next connection is let in, and says nothing of what waits.
                self.hold_ups.refused(error.code, error.message)
            raise ServerRefusedError(error.code, error.message, error.details.retry_after_ms)

    # --- frames out

    def _ask_page_if_there_is_room(self) -> None:
        if len(self._ready) < READY_EVENTS_MAX:
            self._ask_page()
        else:
            self.is_page_due = True

    def _catch_up_if_there_is_room(self) -> None:
        """Ends standing aside. Not while a request is under way: its answer would come with no place in the order."""
        if self.phase is not Phase.ASIDE or not self.wants_events or self.refused_reading is not None:
            return
        request = self._request
        if (request is None or not request.is_under_way) and len(self._ready) < READY_EVENTS_MAX:
            if request is not None:  # a busy server has sent it away
                self._queue.extendleft(reversed(request.entries))
                self._request = None
            self.phase = Phase.CATCHING_UP
            self._ask_page()

    def _ask_page(self) -> None:
        self.pages += 1
        self._page = self._next_id()
        self.is_page_due = False
        self.outgoing.append(words.sync(self.partitions, self._cursor, PAGE_EVENTS, self.epoch, self._page))

    def _send_request(self) -> None:
        if not self.is_submitting or self.busy_ms:
            return
        request = self._request
        if request is None and self._queue:
            request = self._request = self._next_request()
        elif request is None or request.is_under_way:
            return
        request.msg_id = self._next_id()
        request.is_under_way = True
        self.outgoing.append(words.submit(request.entries, request.msg_id))

    def _next_request(self) -> _Request:
        entries: list[Entry] = []
        size = 0
        while self._queue and len(entries) < self._request_events_max:
            size += ITEM_BYTES + len(self._queue[0].body) + sum(map(len, self._queue[0].partitions))
            if entries and size > REQUEST_BYTES_MAX:
                break
            entries.append(self._queue.popleft())
        return _Request("", entries, self._cursor, [], holds=len(entries) > 1 and self.phase is Phase.LIVE)

    # --- requests that come to nothing

    def _take_request(self) -> _Request | None:
        request, self._request = self._request, None
        return request

    def _send_later(self, request: _Request) -> None:
        """What is broadcast from now on waits for the answer (see above)."""
        request.is_under_way = False
        if not request.holds and self.phase is Phase.LIVE:
            request.holds, request.cursor = True, self._cursor

    def _divide(self, request: _Request, reason: str, message: str) -> None:
        """Something is wrong with one of them: fewer at a time, until the one at fault is alone, and is rejected."""
        if len(request.entries) == 1:
            self._settled.append(Settled(request.entries[0], Rejected(reason, (Fault("$", message),))))
            self.hold_ups.went_through()
        else:
            self._request_events_max = max(1, len(request.entries) // 2)
            self._requests_taken = 0
            self._queue.extendleft(reversed(request.entries))

    # --- other

    def _change_history(self, epoch: str, last_committed_id: int, message: str) -> None:
        self.history_change = HistoryChange(self.epoch, epoch, self.cursor, last_committed_id, message)
        self.lost()
        self.phase = Phase.HISTORY_CHANGED

    def _heard_of(self, number: int) -> None:
        self.last_committed_id = max(self.last_committed_id, number)

    def _next_id(self) -> str:
        self._number += 1
        return str(self._number)


def _number_of(event: Event) -> int:
    return event.committed_id


def _outcome(entry: Entry, result: words.Result) -> Committed | Rejected:
    if result.id != entry.id:
        raise ProtocolError(f"the result of {entry.id} is about {result.id}")
    if result.status == "committed" and result.committed_id > 0:
        return Committed(result.committed_id, result.status_updated_at)
    if result.status == "rejected":
        return Rejected(result.reason, result.errors)
    raise ProtocolError(f"{entry.id} was answered with the status {result.status!r}")
