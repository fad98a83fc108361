"""The words of the events door: what a verdict, a record and an error are on its wire, as bytes.

Records are stored as bytes and served as bytes: an event is spliced into its envelope and never parsed again. One
broadcast is one frame, whatever the number of its readers.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from oncelog.codes import AUTH_FAILED, RATE_LIMITED, SERVER_ERROR, VALIDATION_FAILED, VERSION_UNSUPPORTED
from oncelog.core.values import Committed, Reason, Receipt, Record, Refused, Replayed, Verdict
from oncelog.doors.faults import NOT_NOW, DoorError, not_now
from oncelog.doors.frames import frame_head, json_text
from oncelog.stores.protocol import Brief, brief_of

PRIOR_ITEM_FAILED: Final = "prior_item_failed"

CLOSING: Final = frozenset({AUTH_FAILED, VERSION_UNSUPPORTED, RATE_LIMITED, SERVER_ERROR})
"""After one of these errors the connection ends (EV-2)."""

_FIELD: Final = {
    "key": "id",
    "body": "event",
    "fingerprint": "event",
    "expected_position": "expected_committed_id",
}
"""The core's fields by their names here. Others have the same."""


class Rejected(Struct, frozen=True, gc=False):
    """An item that the door itself refuses, before the log is asked."""

    reason: str
    field: str
    message: str


Result = Verdict | Rejected


# --- records -----------------------------------------------------------------------------------------


def event_text(brief: Brief, *, shows_actor: bool = True) -> str:
    """An event as `sync`, broadcasts, pages and streams show it. An erased one has `null` for its event.

    One of a project that was submitted under a text (`projects`) shows the UUID that was made of it.
    """
    position, log_time_ms, actor, client, _, key, partitions, body = brief
    digits = key.hex()
    uuid = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    rest = f'"event":{body},"status_updated_at":{log_time_ms}' if body is not None else _erased(log_time_ms)
    writer = f'{json_text(client)},"actor":{json_text(actor)}' if shows_actor else json_text(client)
    return f'{{"id":"{uuid}","client_id":{writer},"partitions":{partitions},"committed_id":{position},{rest}}}'


def _erased(log_time_ms: int) -> str:
    return f'"event":null,"status_updated_at":{log_time_ms},"erased":true'


def event_json(record: Record, *, shows_actor: bool = True) -> bytes:
    """The same of a record."""
    return event_text(brief_of(record), shows_actor=shows_actor).encode()


# --- results -----------------------------------------------------------------------------------------


def request_error(verdicts: Iterable[Result]) -> DoorError | None:
    """The error in place of all results, if one of the items was not decided at all: all of it is to be sent again.

    A client takes `rejected` as final. To be told that for an event which only came at a bad moment would lose it.
    """
    for verdict in verdicts:
        if type(verdict) is Refused and verdict.reason in NOT_NOW:
            return not_now(verdict)
    return None


def reason_of(result: Result) -> str:
    """Why an item was rejected, in one word of this wire."""
    if isinstance(result, Rejected):
        return result.reason
    is_skipped = isinstance(result, Refused) and result.reason is Reason.NOT_PROCESSED
    return PRIOR_ITEM_FAILED if is_skipped else VALIDATION_FAILED


def result_json(id_text: str, verdict: Result) -> bytes:
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
    if isinstance(verdict, Rejected):
        reason, error = verdict.reason, {"field": _FIELD.get(verdict.field, verdict.field), "message": verdict.message}
    elif isinstance(verdict, Refused):
        reason = VALIDATION_FAILED
        error = {"field": _FIELD.get(verdict.field, verdict.field), "message": verdict.message}
        if verdict.reason is Reason.UNEXPECTED_POSITION:
            error["current_committed_id"] = verdict.current
    else:
        raise TypeError(f"an event was answered with {verdict!r}")
    return orjson.dumps({"id": id_text, "status": "rejected", "reason": reason, "errors": [error]})


def committed_frame(id_text: str, receipt: Receipt, timestamp_ms: int, msg_id: bytes) -> bytes:
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
    return frame_head(len(message)) + message


def results_json(ids: Sequence[str], verdicts: Sequence[Result]) -> bytes:
    """The payload of an answer to a submission: one result an item, in the order of the request (EV-8)."""
    return b'{"results":[%b]}' % b",".join(map(result_json, ids, verdicts))


def events_shown(briefs: Sequence[Brief], *, shows_actor: bool = True) -> bytes:
    """Some events of a page, with commas between them."""
    return ",".join([event_text(brief, shows_actor=shows_actor) for brief in briefs]).encode()


def page_parts(
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
    for one in shown:
        parts += (one, b",")
    if shown:
        parts.pop()
    return [*parts, tail]


def connected_json(client_id: str, actor: str | None, last_committed_id: int, epoch: str) -> bytes:
    """The payload of the answer to `connect`. Readers of its events see this client id and actor."""
    named = {"client_id": client_id} if actor is None else {"client_id": client_id, "actor": actor}
    return orjson.dumps({**named, "server_last_committed_id": last_committed_id, "epoch": epoch})


# --- envelopes and frames ------------------------------------------------------------------------------


def envelope(kind: bytes, payload: bytes, timestamp_ms: int, msg_id: bytes = b"") -> bytes:
    """A message. `msg_id` is that of the request in JSON, for a reply to one that had it."""
    return b"%b%b}" % (_head(kind, timestamp_ms, msg_id), payload)


def _head(kind: bytes, timestamp_ms: int, msg_id: bytes) -> bytes:
    return b'{"type":"%b","protocol_version":"1.0",%b"timestamp":%d,"payload":' % (
        kind,
        b'"msg_id":%b,' % msg_id if msg_id else b"",
        timestamp_ms,
    )


def frame_of_parts(kind: bytes, parts: Sequence[bytes], timestamp_ms: int, msg_id: bytes) -> bytes:
    """The frame of a message whose payload comes in parts."""
    return frame_after(_head(kind, timestamp_ms, msg_id), parts)


def frame_after(head: bytes, parts: Sequence[bytes]) -> bytes:
    """The same where the envelope up to its payload has been written."""
    return b"".join((frame_head(len(head) + sum(map(len, parts)) + 1), head, *parts, b"}"))
