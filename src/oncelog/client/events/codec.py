"""Client-side codec of the Events API (docs/reference/events.md)."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import orjson
from msgspec import Raw, Struct

from oncelog.client.events.values import Event, Fault, OutboxEntry
from oncelog.client.runtime.values import Number
from oncelog.error_codes import PROTOCOL_VERSION
from oncelog.errors import ProtocolError


class Envelope(Struct, frozen=True, gc=False):
    """Any message from the server."""

    type: str
    payload: Raw
    msg_id: str | int | None = None


class Connected(Struct, frozen=True):
    """Payload of `connected`: the server has admitted the client."""

    server_last_committed_id: Number
    epoch: str
    client_id: str = ""
    """Client id that readers see in this client's events. The server may prefix it with the actor."""
    actor: str = ""
    """Empty if the server does not reveal it."""


class SyncPage(Struct, frozen=True):
    """Payload of `sync_response`."""

    events: list[Event]
    next_since_committed_id: Number
    has_more: bool
    sync_to_committed_id: Number


class SubmitResult(Struct, frozen=True, gc=False):
    """Result of one submission."""

    id: str
    status: str
    committed_id: Number = 0
    status_updated_at: Number = 0
    erased: bool = False
    reason: str = ""
    errors: tuple[Fault, ...] = ()


class SubmitResults(Struct, frozen=True):
    """Payload of `submit_events_result`."""

    results: list[SubmitResult]


class Details(Struct, frozen=True):
    """Error details that a client can act on."""

    retry_after_ms: Number = 0
    epoch: str = ""
    server_last_committed_id: Number = 0


class ServerError(Struct, frozen=True):
    """Payload of `error`."""

    code: str
    message: str
    details: Details = Details()


ServerMessage = Event | SubmitResults | SyncPage | Connected | ServerError
decode_envelope: Final = msgspec.json.Decoder(Envelope).decode
decode_connected: Final = msgspec.json.Decoder(Connected).decode
decode_results: Final = msgspec.json.Decoder(SubmitResults).decode
decode_error: Final = msgspec.json.Decoder(ServerError).decode
_PAYLOAD_DECODERS: Final[dict[str, Callable[[Raw], ServerMessage]]] = {
    "event_broadcast": msgspec.json.Decoder(Event).decode,
    "submit_events_result": decode_results,
    "sync_response": msgspec.json.Decoder(SyncPage).decode,
    "connected": decode_connected,
    "error": decode_error,
}


def decode_message(data: str | bytes) -> tuple[ServerMessage | None, str | int | None]:
    """Decode a message into its payload and the id of the request that it answers. Raises ProtocolError.

    Returns None as the payload of a message of an unknown type. The client can ignore such messages, because newer
    servers also send all necessary data in the known types.
    """
    try:
        envelope = decode_envelope(data)
        decode = _PAYLOAD_DECODERS.get(envelope.type)
        return (None if decode is None else decode(envelope.payload)), envelope.msg_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message from the server: {error}") from error


def encode_message(kind: str, payload: bytes, msg_id: str) -> bytes:
    """Encode a message to the server."""
    head = f'{{"type":"{kind}","protocol_version":"{PROTOCOL_VERSION}","msg_id":"{msg_id}","payload":'
    return b"%b%b}" % (head.encode(), payload)


def encode_connect(token: str | None, client_id: str | None, msg_id: str) -> bytes:
    """Encode `connect`, the first message of a connection. Without `client_id`, the server uses the credential's."""
    payload = {"token": token} if client_id is None else {"token": token, "client_id": client_id}
    return encode_message("connect", orjson.dumps(payload), msg_id)


def encode_sync(partitions: Sequence[str], since: int, limit: int, epoch: str, msg_id: str) -> bytes:
    """Encode the request for a page of events."""
    payload = {"partitions": partitions, "since_committed_id": since, "limit": limit}
    if epoch:
        payload["epoch"] = epoch
    return encode_message("sync", orjson.dumps(payload), msg_id)


def encode_submit(entries: Sequence[OutboxEntry], msg_id: str) -> bytes:
    """Encode a request with submissions. Their bodies are the bytes stored in the outbox."""
    return encode_message("submit_events", b'{"events":[%b]}' % b",".join(map(_encode_item, entries)), msg_id)


def to_own_event(entry: OutboxEntry, result: SubmitResult, client_id: str, actor: str) -> Event:
    """Build the event that other clients receive for a committed submission of this client."""
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
