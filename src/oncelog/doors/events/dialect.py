"""What a connection speaks: a dialect reads its frames and writes what it is told, and decides nothing.

The door has two. They differ in their words and in what a record looks like; sessions, subscribers and the hub are the
same for both. The first one's words are in `words` and `reading`, the second one is `camel`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from oncelog.core.canonical import JsonValue
from oncelog.core.values import Receipt, Record
from oncelog.doors.events import words
from oncelog.doors.events.reading import (
    BadMessageError,
    Connect,
    Message,
    Submit,
    Sync,
    read_connect,
    read_message,
    read_quickly,
    read_submit,
    read_sync,
)
from oncelog.doors.events.words import Result
from oncelog.doors.faults import DoorError
from oncelog.doors.frames import frame
from oncelog.stores.protocol import Brief, BriefPage


class Dialect(Protocol):
    """One for a connection; several may share one."""

    @property
    def is_of_project(self) -> bool:
        """Whether its readers follow one project: all that follow the same one are shown a record alike."""

    # --- what comes in

    def read_message(self, data: bytes) -> Message:
        """A frame. Raises BadMessageError."""

    def read(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Message:
        """A frame of who is known: the id and the items of a submission, or a message. Raises BadMessageError."""

    def read_connect(self, payload: Mapping[str, JsonValue]) -> Connect:
        """Raises DoorError."""

    def bound(self, connect: Connect) -> "Dialect":
        """The dialect of the connection from now on."""

    def read_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """Raises DoorError."""

    # --- what goes out: payloads, then frames

    def connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:
        """The answer to `connect`."""

    def error(self, error: DoorError) -> DoorError:
        """The error in its words."""

    def results(self, ids: Sequence[str], results: Sequence[Result], now_ms: int) -> bytes:
        """The answer to a submission."""

    def shown(self, briefs: Sequence[Brief]) -> bytes:
        """Some events of a page, with commas between them. Called in threads."""

    def page(self, sync: Sync, page: BriefPage, epoch: str) -> list[bytes]:
        """The answer to `sync`, in parts."""

    def frame(self, kind: bytes, parts: Sequence[bytes], now_ms: int, msg_id: bytes = b"") -> bytes:
        """A message whose payload comes in parts, as a frame."""

    def committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """The frame of an answer to a submission of one event that was committed."""

    def broadcast(self, record: Record, now_ms: int) -> bytes | None:
        """The frame of a broadcast. None if the dialect cannot show such a record."""


class FirstDialect:
    """The door's own: names with underscores, any partitions, an event with a `type` and whatever else."""

    is_of_project: Final = False

    def __init__(self, *, shows_actor: bool = True) -> None:
        self._shows_actor = shows_actor

    def read_message(self, data: bytes) -> Message:
        """As `Dialect` says."""
        return read_message(data)

    def read(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Message:
        """As `Dialect` says."""
        quick = read_quickly(data, actor, client, events_max)
        if quick is not None:
            return quick
        message = read_message(data)
        if message.type != "submit_events":
            return message
        try:
            return message.msg_id, read_submit(message.payload, actor, client, events_max)
        except DoorError as error:
            raise BadMessageError(error, message.msg_id) from None

    def read_connect(self, payload: Mapping[str, JsonValue]) -> Connect:
        """As `Dialect` says."""
        return read_connect(payload)

    def bound(self, connect: Connect) -> Dialect:  # noqa: ARG002 - there is nothing to be bound to
        """As `Dialect` says."""
        return self

    def read_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """As `Dialect` says."""
        return read_sync(payload)

    def connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:
        """As `Dialect` says."""
        return words.connected_json(client_id, actor if self._shows_actor else None, last_committed_id, epoch)

    def error(self, error: DoorError) -> DoorError:
        """As `Dialect` says."""
        return error

    def results(self, ids: Sequence[str], results: Sequence[Result], now_ms: int) -> bytes:  # noqa: ARG002 - no time in it
        """As `Dialect` says."""
        return words.results_json(ids, results)

    def shown(self, briefs: Sequence[Brief]) -> bytes:
        """As `Dialect` says."""
        return words.events_shown(briefs, shows_actor=self._shows_actor)

    def page(self, sync: Sync, page: BriefPage, epoch: str) -> list[bytes]:
        """As `Dialect` says. A client may be ahead of what has been delivered here."""
        return words.page_parts(
            sync.partitions,
            page.shown,
            following=page.next,
            has_more=page.has_more,
            upto=max(page.upto, sync.since),
            epoch=epoch,
        )

    def frame(self, kind: bytes, parts: Sequence[bytes], now_ms: int, msg_id: bytes = b"") -> bytes:
        """As `Dialect` says."""
        return words.frame_of_parts(kind, parts, now_ms, msg_id)

    def committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """As `Dialect` says."""
        return words.committed_frame(id_text, receipt, now_ms, msg_id)

    def broadcast(self, record: Record, now_ms: int) -> bytes:
        """As `Dialect` says."""
        return frame(words.envelope(b"event_broadcast", self.event(record), now_ms))

    def event(self, record: Record) -> bytes:
        """An event as the stream of server-sent events has it."""
        return words.event_json(record, shows_actor=self._shows_actor)


FIRST: Final = FirstDialect()
