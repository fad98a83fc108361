"""Fan-out: every record reaches the readers it concerns, in order, once, and each answer stands in its place.

The hub is the one listener on lane 0 (delivery is by position, never by verdict). It encodes a broadcast once and puts
the same bytes into the outbox of every reader whose scope meets the record's partitions, but for those that submitted
it. An answer whose highest number is p stands after the broadcasts of lower numbers and before those of higher ones
(EV-14): it enters its reader's outbox when the hub comes to p. If the hub is there before the verdict is told, a place
is kept for it; what comes behind waits.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from oncelog.core.policy import EVENTS
from oncelog.core.values import Record, Submission
from oncelog.doors.events.dialect import FIRST, Dialect
from oncelog.doors.metrics import Counts
from oncelog.doors.outbox import Flusher, Outbox
from oncelog.doors.replies import Reply, ReplyQueue


class Reader(Protocol):
    """One connection, as far as the hub is concerned."""

    partitions: tuple[str, ...]
    outbox: Outbox
    replies: ReplyQueue
    dialect: Dialect

    def own(self, position: int) -> None:
        """The record at this position is one that it submitted: it is not broadcast to it."""

    def place(self, number: int, answer: "Flight") -> None:
        """The answer stands at this number; if it stood at a lower one it moves."""

    def enter(self, number: int, answer: "Flight") -> None:
        """The answer is known after the hub has passed its number: it stands behind the reply before it."""

    def abort(self) -> None:
        """Something is wrong with this one alone."""


class Flight(Reply):
    """An answer to a submission, from the moment it is asked for until it is written."""

    __slots__ = ("number", "placed_at", "reader", "waits_for")

    def __init__(self, reader: Reader) -> None:
        Reply.__init__(self, reader.replies)
        self.reader = reader
        self.number = 0
        """The highest that is in it; 0 for none."""
        self.placed_at: int | None = None
        self.waits_for: Sequence[tuple[bytes, bytes]] = ()
        """`flight_key` and fingerprint of each of its events that may be committed yet."""


class Hub:
    """One for a server. All of it happens on the event loop's thread."""

    def __init__(
        self, now_ms: Callable[[], int], counts: Counts, on_fail: Callable[[Exception], None], first: Dialect = FIRST
    ) -> None:
        self.position = 0
        self._awaited: list[tuple[int, int, asyncio.Future[None]]] = []
        """Positions that readers wait for, the lowest first."""
        self._order = itertools.count()
        """Everything up to here has been delivered."""
        self._counts = counts
        self._on_fail = on_fail
        self._first = first
        self._now_ms = now_ms
        self._live: dict[str, set[Reader]] = {}
        self._live_in_project: dict[str, set[Reader]] = {}
        """Those of the second dialect, by the partition of their project."""
        self._flights: dict[bytes, list[tuple[bytes, Flight]]] = {}
        self._flusher = Flusher()

    def start(self, position: int) -> None:
        """Records after this position will come."""
        self.position = position

    # --- scopes

    def join(self, reader: Reader) -> None:
        """From now on the reader gets what is in its partitions."""
        live = self._live_with(reader)
        for partition in reader.partitions:
            live.setdefault(partition, set()).add(reader)

    def leave(self, reader: Reader) -> None:
        """And from now on nothing."""
        live = self._live_with(reader)
        for partition in reader.partitions:
            readers = live.get(partition)
            if readers is not None:
                readers.discard(reader)
                if not readers:
                    del live[partition]

    def _live_with(self, reader: Reader) -> dict[str, set[Reader]]:
        return self._live_in_project if reader.dialect.is_of_project else self._live

    # --- answers

    def expect(self, flight: Flight) -> None:
        """Some of its events may be committed from now on."""
        flight.queue.append(flight)
        flights = self._flights
        for key, fingerprint in flight.waits_for:
            waiting = flights.get(key)
            if waiting is None:
                flights[key] = [(fingerprint, flight)]
            else:
                waiting.append((fingerprint, flight))

    def answered(self, flight: Flight) -> None:
        """The outcome is known (`frame`, `number`). It is written when all up to its number has been delivered.

        A number that has not been delivered yet is that of one of its own events, so `deliver` will come to it.
        """
        if flight.number <= self.position:
            self._due(flight)

    def _due(self, flight: Flight) -> None:
        self._forget(flight)
        flight.queue.settle(flight)
        if flight.placed_at is None:
            flight.reader.enter(flight.number, flight)
        self.flush_soon(flight.reader)

    def _forget(self, flight: Flight) -> None:
        flights = self._flights
        for key, fingerprint in flight.waits_for:
            waiting = flights.get(key)
            if waiting is None:
                continue  # the hub has failed meanwhile
            if len(waiting) > 1:
                waiting.remove((fingerprint, flight))
            else:
                del flights[key]
        flight.waits_for = ()

    # --- delivery

    def deliver(self, records: Sequence[Record]) -> None:
        """As `Listener` says."""
        for record in records:
            self.position = record.position
            if not is_event(record):
                continue
            origins = self._flights.get(flight_key(record))
            self._broadcast(record, origins)
            if origins is not None:
                self._reach(record, origins)
        while self._awaited and self._awaited[0][0] <= self.position:
            _, _, reached = heapq.heappop(self._awaited)
            if not reached.done():
                reached.set_result(None)

    async def reached(self, position: int) -> None:
        """Returns when everything up to the position has been delivered, and maybe more."""
        if position > self.position:
            reached = asyncio.get_running_loop().create_future()
            heapq.heappush(self._awaited, (position, next(self._order), reached))
            await reached

    def fail(self, error: Exception) -> None:
        """As `Listener` says: nobody could be told the truth any more, so the server must let all of them go."""
        self._flights.clear()
        self._on_fail(error)

    def close(self) -> None:
        """As `Listener` says: those who are connected have been told by the server."""

    def _broadcast(self, record: Record, origins: list[tuple[bytes, Flight]] | None) -> None:
        readers = self._concerned(record)
        in_project = self._live_in_project
        if not readers and not in_project:
            return
        submitters = (
            {flight.reader for fingerprint, flight in origins if fingerprint == record.fingerprint} if origins else ()
        )
        if readers:
            frame = self._first.broadcast(record, self._now_ms())
            if frame is not None:
                self._put(frame, readers, submitters)
        if in_project:
            for partition in record.partitions:
                followers = in_project.get(partition)
                if followers:
                    # All of them are of one project, and are shown it alike.
                    frame = next(iter(followers)).dialect.broadcast(record, self._now_ms())
                    if frame is not None:
                        self._put(frame, followers, submitters)

    def _put(self, frame: bytes, readers: Iterable[Reader], submitters: Collection[Reader]) -> None:
        self._counts.deliveries += self._flusher.put(frame, readers, submitters)

    def _concerned(self, record: Record) -> Collection[Reader]:
        if len(record.partitions) == 1:
            return self._live.get(record.partitions[0], ())
        return set().union(*(self._live.get(partition, ()) for partition in record.partitions))

    def _reach(self, record: Record, origins: list[tuple[bytes, Flight]]) -> None:
        """The hub comes to a record that is in flight. Who said something else under its id is told so elsewhere."""
        for fingerprint, flight in list(origins):
            if fingerprint != record.fingerprint:
                continue
            flight.reader.own(record.position)
            if flight.frame is None:
                # The verdict is still to come. If a later record is its own too, the place moves there.
                flight.reader.place(record.position, flight)
            elif flight.number <= record.position:
                flight.reader.place(record.position, flight)
                self._due(flight)

    # --- writing

    def flush_soon(self, reader: Reader) -> None:
        """What is in its outbox is written at the end of this turn of the loop, together with what comes till then."""
        self._flusher.soon(reader)


def flight_key(item: Submission | Record) -> bytes:
    """By what a submission and its record find each other. The ids of a scope are its own.

    A key has 16 bytes, so whatever stands before it is a scope and can be taken for nothing else.
    """
    return item.scope.encode() + item.key if item.scope else item.key


def is_event(record: Record) -> bool:
    """Whether the door shows it: lane 0 can hold records of an application's own policies too."""
    return record.policy == EVENTS.name
