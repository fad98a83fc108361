"""What a connection speaks: a dialect reads its frames and writes what it is told, and decides nothing.

The Events API has two. They differ in the names of fields and in the form of a record; sessions, subscribers and the
hub are the same for both. The native one uses `codec` and `decode`; the other is in `insieme_dialect`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from oncelog.core.canonical import JsonValue
from oncelog.core.values import Receipt, Record
from oncelog.server.errors import ApiError, MalformedMessageError
from oncelog.server.events import codec
from oncelog.server.events.codec import ItemResult
from oncelog.server.events.decode import (
    Connect,
    Envelope,
    Submit,
    Sync,
    decode_connect,
    decode_fast,
    decode_message,
    decode_submit,
    decode_sync,
)
from oncelog.server.websocket_frames import encode_frame
from oncelog.storage.store import RecordView, RecordViewPage


class Dialect(Protocol):
    """One for a connection; several may share one."""

    @property
    def is_project_bound(self) -> bool:
        """Whether its readers follow one project: all that follow the same one are shown a record alike."""

    # --- what comes in

    def decode_message(self, data: bytes) -> Envelope:
        """A frame. Raises MalformedMessageError."""

    def decode(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Envelope:
        """Decode a frame of an authenticated client: a submission with its `msg_id`, or another message.

        Raises MalformedMessageError.
        """

    def decode_connect(self, payload: Mapping[str, JsonValue]) -> Connect:
        """Raises ApiError."""

    def bind(self, connect: Connect) -> "Dialect":
        """The dialect of the connection from now on."""

    def decode_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """Raises ApiError."""

    # --- what goes out: payloads, then frames

    def encode_connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:
        """The answer to `connect`."""

    def translate_error(self, error: ApiError) -> ApiError:
        """The error in its words."""

    def encode_results(self, ids: Sequence[str], results: Sequence[ItemResult], now_ms: int) -> bytes:
        """The answer to a submission."""

    def encode_events(self, views: Sequence[RecordView]) -> bytes:
        """Some events of a page, with commas between them. Called in threads."""

    def encode_page(self, sync: Sync, page: RecordViewPage, epoch: str) -> list[bytes]:
        """The answer to `sync`, in parts."""

    def encode_frame(self, kind: bytes, parts: Sequence[bytes], now_ms: int, msg_id: bytes = b"") -> bytes:
        """A message whose payload comes in parts, as a frame."""

    def encode_committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """The frame of an answer to a submission of one event that was committed."""

    def encode_broadcast(self, record: Record, now_ms: int) -> bytes | None:
        """The frame of a broadcast. None if the dialect cannot show such a record."""


class NativeDialect:
    """The native dialect: names with underscores, any partitions, an event with a `type` and whatever else."""

    is_project_bound: Final = False

    def __init__(self, *, shows_actor: bool = True) -> None:
        self.shows_actor = shows_actor

    def decode_message(self, data: bytes) -> Envelope:
        """As `Dialect` says."""
        return decode_message(data)

    def decode(self, data: bytes, actor: str, client: str, events_max: int) -> tuple[bytes, Submit] | Envelope:
        """As `Dialect` says."""
        decoded = decode_fast(data, actor, client, events_max)
        if decoded is not None:
            return decoded
        message = decode_message(data)
        if message.type != "submit_events":
            return message
        try:
            return message.msg_id, decode_submit(message.payload, actor, client, events_max)
        except ApiError as error:
            raise MalformedMessageError(error, message.msg_id) from None

    def decode_connect(self, payload: Mapping[str, JsonValue]) -> Connect:
        """As `Dialect` says."""
        return decode_connect(payload)

    def bind(self, connect: Connect) -> Dialect:  # noqa: ARG002 - there is nothing to be bound to
        """As `Dialect` says."""
        return self

    def decode_sync(self, payload: Mapping[str, JsonValue]) -> Sync:
        """As `Dialect` says."""
        return decode_sync(payload)

    def encode_connected(self, client_id: str, actor: str, last_committed_id: int, epoch: str) -> bytes:
        """As `Dialect` says."""
        return codec.encode_connected(client_id, actor if self.shows_actor else None, last_committed_id, epoch)

    def translate_error(self, error: ApiError) -> ApiError:
        """As `Dialect` says."""
        return error

    def encode_results(self, ids: Sequence[str], results: Sequence[ItemResult], now_ms: int) -> bytes:  # noqa: ARG002 - no time in it
        """As `Dialect` says."""
        return codec.encode_results(ids, results)

    def encode_events(self, views: Sequence[RecordView]) -> bytes:
        """As `Dialect` says."""
        return codec.encode_events(views, shows_actor=self.shows_actor)

    def encode_page(self, sync: Sync, page: RecordViewPage, epoch: str) -> list[bytes]:
        """As `Dialect` says. A client may be ahead of what has been delivered here."""
        return codec.encode_page_parts(
            sync.partitions,
            page.encoded,
            following=page.next,
            has_more=page.has_more,
            upto=max(page.upto, sync.since),
            epoch=epoch,
        )

    def encode_frame(self, kind: bytes, parts: Sequence[bytes], now_ms: int, msg_id: bytes = b"") -> bytes:
        """As `Dialect` says."""
        return codec.encode_frame_parts(kind, parts, now_ms, msg_id)

    def encode_committed(self, id_text: str, receipt: Receipt, now_ms: int, msg_id: bytes) -> bytes:
        """As `Dialect` says."""
        return codec.encode_committed_frame(id_text, receipt, now_ms, msg_id)

    def encode_broadcast(self, record: Record, now_ms: int) -> bytes:
        """As `Dialect` says."""
        return encode_frame(codec.encode_envelope(b"event_broadcast", self.encode_event(record), now_ms))

    def encode_event(self, record: Record) -> bytes:
        """An event as the stream of server-sent events has it."""
        return codec.encode_event(record, shows_actor=self.shows_actor)


NATIVE: Final = NativeDialect()
