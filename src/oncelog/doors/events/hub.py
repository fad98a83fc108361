"""Fan-out: every record reaches the sessions it concerns, in order, once, and each answer stands in its place.

The hub is the one listener on lane 0 (delivery is by position, never by verdict). It encodes a broadcast once and puts
the same bytes into the outbox of every session whose scope meets the record's partitions, but for those that submitted
it. A session's answer for position p enters its outbox when the hub comes to p: after the broadcasts of lower
numbers, before those of higher ones (EV-14). The place is taken even if the answer is not written yet; what comes
behind waits for it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from oncelog.core.policy import EVENTS
from oncelog.core.values import Record
from oncelog.doors.events import words
from oncelog.doors.metrics import Counts


class Answer:
    """An answer to a submission, from the moment it is asked for until it is written."""

    __slots__ = ("flights", "frame", "is_placed", "number", "session")

    def __init__(self, session: "Reader") -> None:
        self.session = session
        self.frame: bytes | None = None
        """None until the outcome is known."""
        self.is_placed = False
        self.number = 0
        """The highest that is in it; 0 for none."""
        self.flights: Sequence[tuple[bytes, bytes]] = ()
        """Key and fingerprint of each of its events that may be committed yet."""


class Reader(Protocol):
    """What the hub needs of a session."""

    partitions: tuple[str, ...]
    outbox: list[bytes | Answer]
    outbox_bytes: int
    is_dirty: bool

    def flush(self) -> None:
        """Writes what can be written."""

    def place_origin(self, position: int, answer: Answer) -> None:
        """The record at this position is the answer's own. Called for each of its records."""

    def place(self, answer: Answer) -> None:
        """The answer is known, and all up to its number has been delivered."""


class Hub:
    """One for a server. All of it happens on the event loop's thread."""

    def __init__(self, now_ms: Callable[[], int], counts: Counts, on_fail: Callable[[Exception], None]) -> None:
        self.position = 0
        """Everything up to here has been delivered."""
        self._counts = counts
        self._on_fail = on_fail
        self._now_ms = now_ms
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, set[Reader]] = {}
        self._flights: dict[bytes, list[tuple[bytes, Answer]]] = {}
        self._dirty: list[Reader] = []
        self._is_flush_due = False

    def start(self, position: int) -> None:
        """Records after this position will come."""
        self.position = position
        self._loop = asyncio.get_running_loop()

    # --- scopes

    def join(self, reader: Reader) -> None:
        """From now on the reader gets what is in its partitions."""
        for partition in reader.partitions:
            self._live.setdefault(partition, set()).add(reader)

    def leave(self, reader: Reader) -> None:
        """And from now on nothing."""
        for partition in reader.partitions:
            readers = self._live.get(partition)
            if readers is not None:
                readers.discard(reader)
                if not readers:
                    del self._live[partition]

    # --- answers

    def expect(self, answer: Answer) -> None:
        """Some of the answer's events may be committed from now on."""
        flights = self._flights
        for key, fingerprint in answer.flights:
            waiting = flights.get(key)
            if waiting is None:
                flights[key] = [(fingerprint, answer)]
            else:
                waiting.append((fingerprint, answer))

    def answered(self, answer: Answer) -> None:
        """The outcome is known (`frame`, `number`). It is written when its turn comes: at the latest with its number.

        A number that has not been delivered yet is that of one of the answer's own events, so it is waited for.
        """
        if answer.number <= self.position:
            self._forget(answer)
            if not answer.is_placed:
                answer.session.place(answer)
            self.flush_soon(answer.session)

    def _forget(self, answer: Answer) -> None:
        flights = self._flights
        for key, fingerprint in answer.flights:
            waiting = flights.get(key)
            if waiting is None:
                continue  # the hub has failed meanwhile
            if len(waiting) > 1:
                waiting.remove((fingerprint, answer))
            else:
                del flights[key]

    # --- delivery

    def deliver(self, records: Sequence[Record]) -> None:
        """As `Listener` says."""
        for record in records:
            self.position = record.position
            if record.policy != EVENTS.name:
                continue
            # A scope has ids of its own, and is none of ours.
            origins = None if record.scope else self._flights.get(record.key)
            self._broadcast(record, origins)
            if origins is not None:
                self._place_origins(record, origins)

    def fail(self, error: Exception) -> None:
        """As `Listener` says: nobody could be told the truth any more, so the server must let all of them go."""
        self._flights.clear()
        self._on_fail(error)

    def _broadcast(self, record: Record, origins: list[tuple[bytes, Answer]] | None) -> None:
        readers = self._concerned(record)
        if not readers:
            return
        submitters = (
            {answer.session for fingerprint, answer in origins if fingerprint == record.fingerprint} if origins else ()
        )
        frame = words.frame(words.envelope(b"event_broadcast", words.event_json(record), self._now_ms()))
        size = len(frame)
        dirty = self._dirty
        deliveries = 0
        for reader in readers:
            if reader in submitters:
                continue
            reader.outbox.append(frame)
            reader.outbox_bytes += size
            deliveries += 1
            if not reader.is_dirty:
                reader.is_dirty = True
                dirty.append(reader)
        self._counts.deliveries += deliveries
        self._flush_all_soon()

    def _concerned(self, record: Record) -> Iterable[Reader]:
        if len(record.partitions) == 1:
            return self._live.get(record.partitions[0], ())
        return set().union(*(self._live.get(partition, ()) for partition in record.partitions))

    def _place_origins(self, record: Record, origins: list[tuple[bytes, Answer]]) -> None:
        """Whoever submitted what has been committed gets its answer here. One who said something else is told so."""
        for fingerprint, answer in list(origins):
            if fingerprint == record.fingerprint:
                answer.session.place_origin(record.position, answer)
                if answer.frame is not None and answer.number <= record.position:
                    self._forget(answer)
                self.flush_soon(answer.session)

    # --- writing

    def flush_soon(self, reader: Reader) -> None:
        """What is in its outbox is written at the end of this turn of the loop, together with what comes till then."""
        if not reader.is_dirty:
            reader.is_dirty = True
            self._dirty.append(reader)
        self._flush_all_soon()

    def _flush_all_soon(self) -> None:
        if not self._is_flush_due and self._loop is not None:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_all)

    def _flush_all(self) -> None:
        self._is_flush_due = False
        dirty, self._dirty = self._dirty, []
        for reader in dirty:
            reader.is_dirty = False
            reader.flush()
