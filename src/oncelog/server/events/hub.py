"""Fan-out of the Events API: delivers each record once, in order, and places replies among the broadcasts.

The hub is the only listener on lane 0. The lane's tailer passes on each record in the order of positions, and the hub
delivers it at once, without waiting for the verdict of the write. The hub encodes a broadcast once and puts the same
bytes into the send queues of all readers whose scope contains a partition of the record, except for the reader that
submitted the record.

A reply whose highest position is p follows the broadcasts of lower positions and precedes the broadcasts of higher
positions (EV-14): the hub puts the reply into the send queue when it reaches p. If the hub reaches p before the verdict
arrives, it reserves a place for the reply, and later broadcasts wait behind it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from oncelog.core.policy import EVENTS
from oncelog.core.values import Record, Submission
from oncelog.server.auth_gate import AuthGate
from oncelog.server.events.dialect import Dialect
from oncelog.server.events.native_dialect import NATIVE
from oncelog.server.reply_queue import Reply, ReplyQueue
from oncelog.server.send_queue import SendQueueOwner, WriteCoalescer


class EventReader(SendQueueOwner, Protocol):
    """The interface through which the hub uses a connection."""

    partitions: tuple[str, ...]
    replies: ReplyQueue
    dialect: Dialect

    def add_own(self, position: int) -> None:
        """Record the position of an event that this reader submitted, which is not broadcast to the reader."""

    def place(self, number: int, reply: "PendingReply") -> None:
        """Place the reply at a position. A reply that is already placed at a lower position moves."""

    def place_after_previous(self, number: int, reply: "PendingReply") -> None:
        """Place a reply directly behind the previous one, because the hub has already passed its position."""


class PendingReply(Reply):
    """The reply to a submission, from the arrival of the request until the reply is written."""

    __slots__ = ("expected_keys", "placed_at", "position", "reader")

    def __init__(self, reader: EventReader) -> None:
        Reply.__init__(self, reader.replies)
        self.reader = reader
        self.position = 0
        """The highest position in the reply, or 0 if it has none."""
        self.placed_at: int | None = None
        self.expected_keys: Sequence[tuple[bytes, bytes]] = ()
        """`to_reply_key` and fingerprint of each event whose verdict is outstanding."""


class EventsHub:
    """A server's events hub. All methods run on the event loop's thread."""

    def __init__(self, auth_gate: AuthGate, on_fail: Callable[[Exception], None], native: Dialect = NATIVE) -> None:
        self.position = 0
        """Position up to which all records have been delivered. The server sets it when the hub starts listening."""
        self._next_delivery: asyncio.Future[None] | None = None
        """Completed by the next delivery. None while no reader is waiting."""
        self._auth_gate = auth_gate
        self._on_fail = on_fail
        self._native = native
        self._live: dict[str, set[EventReader]] = {}
        self._live_in_project: dict[str, set[EventReader]] = {}
        """Readers with the `insieme` dialect, by the partition of their project."""
        self._pending_replies: dict[bytes, list[tuple[bytes, PendingReply]]] = {}
        self.coalescer = WriteCoalescer()

    # --- scopes

    def join(self, reader: EventReader) -> None:
        """Start delivering the records in the reader's partitions."""
        live = self._select_live(reader)
        for partition in reader.partitions:
            live.setdefault(partition, set()).add(reader)

    def leave(self, reader: EventReader) -> None:
        """Stop delivering to the reader."""
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
        """Register a reply by its events, before they are submitted."""
        reply.queue.append(reply)
        for key, fingerprint in reply.expected_keys:
            self._pending_replies.setdefault(key, []).append((fingerprint, reply))

    def settle_reply(self, reply: PendingReply) -> None:
        """Write a reply whose outcome (`frame`, `position`) is known, as soon as its position has been delivered.

        A position above `self.position` belongs to an event of the reply, so `deliver` will reach it.
        """
        if reply.position <= self.position:
            self._release_reply(reply)

    def _release_reply(self, reply: PendingReply) -> None:
        self._forget_reply(reply)
        reply.queue.mark_ready(reply)
        if reply.placed_at is None:
            reply.reader.place_after_previous(reply.position, reply)
        self.coalescer.schedule(reply.reader)

    def _forget_reply(self, reply: PendingReply) -> None:
        pending_replies = self._pending_replies
        for key, fingerprint in reply.expected_keys:
            replies = pending_replies.get(key)
            if replies is None:
                continue  # the hub has failed in the meantime
            if len(replies) > 1:
                replies.remove((fingerprint, reply))
            else:
                del pending_replies[key]
        reply.expected_keys = ()

    # --- delivery

    def deliver(self, records: Sequence[Record]) -> None:
        """See `RecordListener`."""
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
        """Wait until everything up to this position (and possibly more) has been delivered."""
        while self.position < position:
            if self._next_delivery is None:
                self._next_delivery = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next_delivery)

    def fail(self, error: Exception) -> None:
        """See `RecordListener`. The server closes all connections, because their deliveries would have gaps."""
        self._pending_replies.clear()
        self._on_fail(error)

    def close(self) -> None:
        """See `RecordListener`. The server closes the connections itself."""

    def _broadcast(self, record: Record, origins: list[tuple[bytes, PendingReply]] | None) -> None:
        readers = self._select_readers(record)
        in_project = self._live_in_project
        if not readers and not in_project:
            return
        submitters = (
            {reply.reader for fingerprint, reply in origins if fingerprint == record.fingerprint} if origins else ()
        )
        if readers:
            frame = self._native.encode_broadcast(record, self._auth_gate.clock.wall_ms())
            if frame is not None:
                self._enqueue(frame, readers, submitters)
        if in_project:
            for partition in record.partitions:
                followers = in_project.get(partition)
                if followers:
                    # All readers of a project receive the record in the same form.
                    frame = next(iter(followers)).dialect.encode_broadcast(record, self._auth_gate.clock.wall_ms())
                    if frame is not None:
                        self._enqueue(frame, followers, submitters)

    def _enqueue(self, frame: bytes, readers: Iterable[EventReader], submitters: Collection[EventReader]) -> None:
        self._auth_gate.counts.deliveries += self.coalescer.broadcast(frame, readers, submitters)

    def _select_readers(self, record: Record) -> Collection[EventReader]:
        if len(record.partitions) == 1:
            return self._live.get(record.partitions[0], ())
        return set().union(*(self._live.get(partition, ()) for partition in record.partitions))

    def _settle_own_record(self, record: Record, origins: list[tuple[bytes, PendingReply]]) -> None:
        """Place the replies to submissions of a record that the hub has reached.

        A submission of different content under the same id is rejected by its verdict.
        """
        for fingerprint, reply in list(origins):
            if fingerprint != record.fingerprint:
                continue
            reply.reader.add_own(record.position)
            if reply.frame is None:
                # The verdict has not arrived yet. If a later record also belongs to the reply, the reply moves to that
                # record's position.
                reply.reader.place(record.position, reply)
            elif reply.position <= record.position:
                reply.reader.place(record.position, reply)
                self._release_reply(reply)


def to_reply_key(item: Submission | Record) -> bytes:
    """Return the key under which the hub finds the reply to a record: the submission's scope and key.

    The submission's key has 16 bytes, so the concatenation is unambiguous.
    """
    return item.scope.encode() + item.key if item.scope else item.key


def is_event(record: Record) -> bool:
    """Return whether the Events API shows the record. Lane 0 may also contain records of other policies."""
    return record.policy == EVENTS.name
