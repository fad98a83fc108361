"""Codec of the Events API for clients (docs/reference/events.md)."""

from collections.abc import Sequence
from typing import Final

import msgspec
import orjson
from msgspec import Raw, Struct

from oncelog.client.events.values import Event, Fault, Number, OutboxEntry
from oncelog.error_codes import PROTOCOL_VERSION


class Envelope(Struct, frozen=True, gc=False):
    """What the server sends."""

    type: str
    payload: Raw
    msg_id: str | int | None = None


class Connected(Struct, frozen=True):
    """The server lets us in."""

    server_last_committed_id: Number
    epoch: str
    client_id: str = ""
    """The client id that readers of our events see. The server may have put the actor before ours."""
    actor: str = ""
    """Empty if the server does not show it."""


class SyncPage(Struct, frozen=True):
    """A `sync_response`."""

    events: list[Event]
    next_since_committed_id: Number
    has_more: bool
    sync_to_committed_id: Number


class SubmitResult(Struct, frozen=True, gc=False):
    """Of one submission."""

    id: str
    status: str
    committed_id: Number = 0
    status_updated_at: Number = 0
    erased: bool = False
    reason: str = ""
    errors: tuple[Fault, ...] = ()


class SubmitResults(Struct, frozen=True):
    """Of one request."""

    results: list[SubmitResult]


class Details(Struct, frozen=True):
    """Of an error, as far as a client can do something about it."""

    retry_after_ms: Number = 0
    epoch: str = ""
    server_last_committed_id: Number = 0


class ServerError(Struct, frozen=True):
    """An `error`."""

    code: str
    message: str
    details: Details = Details()


decode_envelope: Final = msgspec.json.Decoder(Envelope).decode
decode_connected: Final = msgspec.json.Decoder(Connected).decode
decode_page: Final = msgspec.json.Decoder(SyncPage).decode
decode_event: Final = msgspec.json.Decoder(Event).decode
decode_results: Final = msgspec.json.Decoder(SubmitResults).decode
decode_error: Final = msgspec.json.Decoder(ServerError).decode


def encode_message(kind: str, payload: bytes, msg_id: str) -> bytes:
    """A message to the server."""
    head = f'{{"type":"{kind}","protocol_version":"{PROTOCOL_VERSION}","msg_id":"{msg_id}","payload":'
    return b"%b%b}" % (head.encode(), payload)


def encode_connect(token: str | None, client_id: str, msg_id: str) -> bytes:
    """Who we are."""
    return encode_message("connect", orjson.dumps({"token": token, "client_id": client_id}), msg_id)


def encode_sync(partitions: Sequence[str], since: int, limit: int, epoch: str, msg_id: str) -> bytes:
    """A page that we ask for."""
    payload = {"partitions": partitions, "since_committed_id": since, "limit": limit}
    if epoch:
        payload["epoch"] = epoch
    return encode_message("sync", orjson.dumps(payload), msg_id)


def encode_submit(entries: Sequence[OutboxEntry], msg_id: str) -> bytes:
    """A request. The events are spliced into it as they lie in the outbox."""
    return encode_message("submit_events", b'{"events":[%b]}' % b",".join(map(_encode_item, entries)), msg_id)


def to_own_event(entry: OutboxEntry, result: SubmitResult, client_id: str, actor: str) -> Event:
    """An own event that was committed, as all others get it."""
    return Event(
        id=entry.id,
        client_id=client_id,
        partitions=entry.partitions,
        committed_id=result.committed_id,
        event=None if result.erased else msgspec.json.decode(entry.body),
        status_updated_at=result.status_updated_at,
        erased=result.erased,
        actor=actor,
    )


def _encode_item(entry: OutboxEntry) -> bytes:
    expected = entry.expected_committed_id
    return b'{"id":"%b","partitions":%b,"event":%b%b}' % (
        entry.id.encode(),
        orjson.dumps(entry.partitions),
        entry.body,
        b"" if expected is None else b',"expected_committed_id":%d' % expected,
    )
