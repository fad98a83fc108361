"""Codec of the Events API: verdicts, records and errors as bytes.

Records are stored as bytes and served as bytes: an event is spliced into its envelope and never parsed again. One
broadcast is one frame, whatever the number of its readers.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from oncelog.core.values import Committed, Reason, Receipt, Record, Refused, Replayed, Verdict
from oncelog.error_codes import AUTH_FAILED, RATE_LIMITED, SERVER_ERROR, VALIDATION_FAILED, VERSION_UNSUPPORTED
from oncelog.server.errors import RETRYABLE_CODES, ApiError, retryable_error
from oncelog.server.websocket_frames import encode_frame_header, encode_json_text
from oncelog.storage.store import RecordView, to_record_view

PRIOR_ITEM_FAILED: Final = "prior_item_failed"

CLOSING_CODES: Final = frozenset({AUTH_FAILED, VERSION_UNSUPPORTED, RATE_LIMITED, SERVER_ERROR})
"""After one of these errors the connection ends (EV-2)."""

_FIELD_NAMES: Final = {
    "key": "id",
    "body": "event",
    "fingerprint": "event",
    "expected_position": "expected_committed_id",
}
"""The core's fields by their names here. Others have the same."""


class RejectedItem(Struct, frozen=True, gc=False):
    """An item that the API refuses before it submits anything to the log."""

    reason: str
    field: str
    message: str


ItemResult = Verdict | RejectedItem


# --- records -----------------------------------------------------------------------------------------


def encode_event_text(view: RecordView, *, shows_actor: bool = True) -> str:
    """An event as `sync`, broadcasts, pages and streams show it. An erased one has `null` for its event.

    One of a project that was submitted under a text (`projects`) shows the UUID that was made of it.
    """
    position, log_time_ms, actor, client, _, key, partitions, body = view
    digits = key.hex()
    uuid = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    rest = f'"event":{body},"status_updated_at":{log_time_ms}' if body is not None else _encode_erased(log_time_ms)
    writer = (
        f'{encode_json_text(client)},"actor":{encode_json_text(actor)}' if shows_actor else encode_json_text(client)
    )
    return f'{{"id":"{uuid}","client_id":{writer},"partitions":{partitions},"committed_id":{position},{rest}}}'


def _encode_erased(log_time_ms: int) -> str:
    return f'"event":null,"status_updated_at":{log_time_ms},"erased":true'


def encode_event(record: Record, *, shows_actor: bool = True) -> bytes:
    """The same of a record."""
    return encode_event_text(to_record_view(record), shows_actor=shows_actor).encode()


# --- results -----------------------------------------------------------------------------------------


def find_request_error(verdicts: Iterable[ItemResult]) -> ApiError | None:
    """The error in place of all results, if one of the items was not decided at all: all of it is to be sent again.

    A client takes `rejected` as final. To be told that for an event which only came at a bad moment would lose it.
    """
    for verdict in verdicts:
        if type(verdict) is Refused and verdict.reason in RETRYABLE_CODES:
            return retryable_error(verdict)
    return None


def get_reason(result: ItemResult) -> str:
    """Why an item was rejected, in one word of this wire."""
    if isinstance(result, RejectedItem):
        return result.reason
    is_skipped = isinstance(result, Refused) and result.reason is Reason.NOT_PROCESSED
    return PRIOR_ITEM_FAILED if is_skipped else VALIDATION_FAILED


def encode_result(id_text: str, verdict: ItemResult) -> bytes:
    """What became of one item. The id is as it was sent (EV-9); it is known to be a UUID, so it needs no escapes."""
    # All known events have a receipt: they are remembered for ever.
    if isinstance(verdict, Committed | Replayed) and (receipt := verdict.receipt) is not None:
        return b'{"id":"%b","status":"committed","committed_id":%d,"status_updated_at":%d%b}' % (
            id_text.encode(),
            receipt.position,
            receipt.log_time_ms,
            b',"erased":true' if isinstance(verdict, Replayed) and verdict.erased else b"",
        )
    error: dict[str, Any]
    if isinstance(verdict, RejectedItem):
        reason, error = (
            verdict.reason,
            {"field": _FIELD_NAMES.get(verdict.field, verdict.field), "message": verdict.message},
        )
    elif isinstance(verdict, Refused):
        reason = VALIDATION_FAILED
        error = {"field": _FIELD_NAMES.get(verdict.field, verdict.field), "message": verdict.message}
        if verdict.reason is Reason.UNEXPECTED_POSITION:
            error["current_committed_id"] = verdict.current
    else:
        raise TypeError(f"an event was answered with {verdict!r}")
    return orjson.dumps({"id": id_text, "status": "rejected", "reason": reason, "errors": [error]})


def encode_committed_frame(id_text: str, receipt: Receipt, timestamp_ms: int, msg_id: bytes) -> bytes:
    """The whole answer to a request of one event that was committed: what most answers of a busy server are."""
    message = (
        b'{"type":"submit_events_result","protocol_version":"1.0",%b"timestamp":%d,"payload":{"results":['
        b'{"id":"%b","status":"committed","committed_id":%d,"status_updated_at":%d}]}}'
    ) % (
        b'"msg_id":%b,' % msg_id if msg_id else b"",
        timestamp_ms,
        id_text.encode(),
        receipt.position,
        receipt.log_time_ms,
    )
    return encode_frame_header(len(message)) + message


def encode_results(ids: Sequence[str], verdicts: Sequence[ItemResult]) -> bytes:
    """The payload of an answer to a submission: one result an item, in the order of the request (EV-8)."""
    return b'{"results":[%b]}' % b",".join(map(encode_result, ids, verdicts))


def encode_events(views: Sequence[RecordView], *, shows_actor: bool = True) -> bytes:
    """Some events of a page, with commas between them."""
    return ",".join([encode_event_text(view, shows_actor=shows_actor) for view in views]).encode()


def encode_page_parts(
    partitions: tuple[str, ...], shown: Sequence[bytes], *, following: int, has_more: bool, upto: int, epoch: str
) -> list[bytes]:
    """The payload of an answer to `sync`, and what a page is over HTTP, in parts: it is large, and is copied once."""
    tail = b'],"next_since_committed_id":%d,"has_more":%b,"sync_to_committed_id":%d,"epoch":"%b"}' % (
        following,
        b"true" if has_more else b"false",
        upto,
        epoch.encode(),
    )
    parts = [b'{"partitions":%b,"events":[' % orjson.dumps(partitions)]
    for text in shown:
        parts += (text, b",")
    if shown:
        parts.pop()
    return [*parts, tail]


def encode_connected(client_id: str, actor: str | None, last_committed_id: int, epoch: str) -> bytes:
    """The payload of the answer to `connect`. Readers of its events see this client id and actor."""
    named = {"client_id": client_id} if actor is None else {"client_id": client_id, "actor": actor}
    return orjson.dumps({**named, "server_last_committed_id": last_committed_id, "epoch": epoch})


# --- envelopes and frames ------------------------------------------------------------------------------


def encode_envelope(kind: bytes, payload: bytes, timestamp_ms: int, msg_id: bytes = b"") -> bytes:
    """A message. `msg_id` is that of the request in JSON, for a reply to one that had it."""
    return b"%b%b}" % (_encode_head(kind, timestamp_ms, msg_id), payload)


def _encode_head(kind: bytes, timestamp_ms: int, msg_id: bytes) -> bytes:
    return b'{"type":"%b","protocol_version":"1.0",%b"timestamp":%d,"payload":' % (
        kind,
        b'"msg_id":%b,' % msg_id if msg_id else b"",
        timestamp_ms,
    )


def encode_frame_parts(kind: bytes, parts: Sequence[bytes], timestamp_ms: int, msg_id: bytes) -> bytes:
    """The frame of a message whose payload comes in parts."""
    return join_frame(_encode_head(kind, timestamp_ms, msg_id), parts)


def join_frame(head: bytes, parts: Sequence[bytes]) -> bytes:
    """The same where the envelope up to its payload has been written."""
    return b"".join((encode_frame_header(len(head) + sum(map(len, parts)) + 1), head, *parts, b"}"))
