"""Fan-out: every record reaches the readers it concerns, in order, once, and each answer stands in its place.

The hub is the one listener on lane 0: delivery is by position, never by verdict. It encodes a broadcast once and puts
the same bytes into the send queue of every reader whose scope meets the record's partitions, apart from the reader that
submitted it. An answer whose highest number is p stands after the broadcasts of lower numbers and before those of
higher ones (EV-14): the hub puts it into the send queue when it reaches p. If the hub gets there before the verdict, it
keeps the place of the answer, and later broadcasts wait.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from oncelog.core.policy import EVENTS
from oncelog.core.values import Record, Submission
from oncelog.server.events.dialect import Dialect
from oncelog.server.events.native_dialect import NATIVE
from oncelog.server.metrics import Counts
from oncelog.server.reply_queue import Reply, ReplyQueue
from oncelog.server.send_queue import SendQueueOwner, WriteCoalescer


class EventReader(SendQueueOwner, Protocol):
    """One connection, as far as the hub is concerned."""

    partitions: tuple[str, ...]
    replies: ReplyQueue
    dialect: Dialect

    def add_own(self, position: int) -> None:
        """The record at this position is one that it submitted: it is not broadcast to it."""

    def place(self, number: int, reply: "PendingReply") -> None:
        """The answer stands at this number; if it stood at a lower one it moves."""

    def place_after_previous(self, number: int, reply: "PendingReply") -> None:
        """The answer is known after the hub has passed its number: it stands behind the reply before it."""


class PendingReply(Reply):
    """An answer to a submission, from the moment it is asked for until it is written."""

    __slots__ = ("expected_keys", "placed_at", "position", "reader")

    def __init__(self, reader: EventReader) -> None:
        Reply.__init__(self, reader.replies)
        self.reader = reader
        self.position = 0
        """Position up to which every record has been delivered."""
        """The highest that is in it; 0 for none."""
        self.placed_at: int | None = None
        self.expected_keys: Sequence[tuple[bytes, bytes]] = ()
        """`to_reply_key` and fingerprint of each of its events that may be committed yet."""


class EventsHub:
    """One for a server. All of it happens on the event loop's thread."""

    def __init__(
        self, now_ms: Callable[[], int], counts: Counts, on_fail: Callable[[Exception], None], native: Dialect = NATIVE
    ) -> None:
        self.position = 0
        """Position up to which every record has been delivered."""
        self._next_delivery: asyncio.Future[None] | None = None
        """Done after the next records. None while no reader waits for them."""
        self._counts = counts
        self._on_fail = on_fail
        self._native = native
        self._now_ms = now_ms
        self._live: dict[str, set[EventReader]] = {}
        self._live_in_project: dict[str, set[EventReader]] = {}
        """Those of the second dialect, by the partition of their project."""
        self._pending_replies: dict[bytes, list[tuple[bytes, PendingReply]]] = {}
        self._coalescer = WriteCoalescer()

    def start(self, position: int) -> None:
        """Records after this position will come."""
        self.position = position

    # --- scopes

    def join(self, reader: EventReader) -> None:
        """From now on the reader gets what is in its partitions."""
        live = self._select_live(reader)
        for partition in reader.partitions:
            live.setdefault(partition, set()).add(reader)

    def leave(self, reader: EventReader) -> None:
        """And from now on nothing."""
        live = self._select_live(reader)
        for partition in reader.partitions:
            readers = live.get(partition)
            if readers is not None:
                readers.discard(reader)
                if not readers:
                    del live[partition]

    def _select_live(self, reader: EventReader) -> dict[str, set[EventReader]]:
        return self._live_in_project if reader.dialect.is_project_bound else self._live

    # --- answers

    def expect_reply(self, reply: PendingReply) -> None:
        """Some of its events may be committed from now on."""
        reply.queue.append(reply)
        pending_replies = self._pending_replies
        for key, fingerprint in reply.expected_keys:
            replies = pending_replies.get(key)
            if replies is None:
                pending_replies[key] = [(fingerprint, reply)]
            else:
                replies.append((fingerprint, reply))

    def settle_reply(self, reply: PendingReply) -> None:
        """The outcome is known (`frame`, `number`). It is written when all up to its number has been delivered.

        A number that has not been delivered yet is that of one of its own events, so `deliver` will come to it.
        """
        if reply.position <= self.position:
            self._release_reply(reply)

    def _release_reply(self, reply: PendingReply) -> None:
        self._forget_reply(reply)
        reply.queue.mark_ready(reply)
        if reply.placed_at is None:
            reply.reader.place_after_previous(reply.position, reply)
        self.schedule_flush(reply.reader)

    def _forget_reply(self, reply: PendingReply) -> None:
        pending_replies = self._pending_replies
        for key, fingerprint in reply.expected_keys:
            replies = pending_replies.get(key)
            if replies is None:
                continue  # the hub has failed meanwhile
            if len(replies) > 1:
                replies.remove((fingerprint, reply))
            else:
                del pending_replies[key]
        reply.expected_keys = ()

    # --- delivery

    def deliver(self, records: Sequence[Record]) -> None:
        """As `Listener` says."""
        for record in records:
            self.position = record.position
            if not is_event(record):
                continue
            origins = self._pending_replies.get(to_reply_key(record))
            self._broadcast(record, origins)
            if origins is not None:
                self._settle_own_record(record, origins)
        if self._next_delivery is not None:
            self._next_delivery.set_result(None)
            self._next_delivery = None

    async def wait_for_position(self, position: int) -> None:
        """Return when everything up to the position has been delivered, and maybe more."""
        while self.position < position:
            if self._next_delivery is None:
                self._next_delivery = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next_delivery)

    def fail(self, error: Exception) -> None:
        """As `Listener` says: nobody could be told the truth any more, so the server must let all of them go."""
        self._pending_replies.clear()
        self._on_fail(error)

    def close(self) -> None:
        """As `Listener` says: those who are connected have been told by the server."""

    def _broadcast(self, record: Record, origins: list[tuple[bytes, PendingReply]] | None) -> None:
        readers = self._select_readers(record)
        in_project = self._live_in_project
        if not readers and not in_project:
            return
        submitters = (
            {reply.reader for fingerprint, reply in origins if fingerprint == record.fingerprint} if origins else ()
        )
        if readers:
            frame = self._native.encode_broadcast(record, self._now_ms())
            if frame is not None:
                self._enqueue(frame, readers, submitters)
        if in_project:
            for partition in record.partitions:
                followers = in_project.get(partition)
                if followers:
                    # All of them are of one project, and are shown it alike.
                    frame = next(iter(followers)).dialect.encode_broadcast(record, self._now_ms())
                    if frame is not None:
                        self._enqueue(frame, followers, submitters)

    def _enqueue(self, frame: bytes, readers: Iterable[EventReader], submitters: Collection[EventReader]) -> None:
        self._counts.deliveries += self._coalescer.broadcast(frame, readers, submitters)

    def _select_readers(self, record: Record) -> Collection[EventReader]:
        if len(record.partitions) == 1:
            return self._live.get(record.partitions[0], ())
        return set().union(*(self._live.get(partition, ()) for partition in record.partitions))

    def _settle_own_record(self, record: Record, origins: list[tuple[bytes, PendingReply]]) -> None:
        """The hub comes to a record that is in flight. Who said something else under its id is told so elsewhere."""
        for fingerprint, reply in list(origins):
            if fingerprint != record.fingerprint:
                continue
            reply.reader.add_own(record.position)
            if reply.frame is None:
                # The verdict is still to come. If a later record is its own too, the place moves there.
                reply.reader.place(record.position, reply)
            elif reply.position <= record.position:
                reply.reader.place(record.position, reply)
                self._release_reply(reply)

    # --- writing

    def schedule_flush(self, reader: EventReader) -> None:
        """Write the send queue at the end of this turn of the loop, together with what is added until then."""
        self._coalescer.schedule(reader)


def to_reply_key(item: Submission | Record) -> bytes:
    """By what a submission and its record find each other. The ids of a scope are its own.

    A key has 16 bytes, so whatever stands before it is a scope and can be taken for nothing else.
    """
    return item.scope.encode() + item.key if item.scope else item.key


def is_event(record: Record) -> bool:
    """Whether the Events API shows it: lane 0 can hold records of an application's own policies too."""
    return record.policy == EVENTS.name
