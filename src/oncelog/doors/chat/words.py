"""The words of the chat door: what a message, a verdict and an error are on its wire, as bytes.

A message is stored as bytes and served as bytes: its content is spliced into what is around it. One broadcast is one
frame, whatever the number of its readers.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import orjson
from aiohttp import web

from oncelog import codes
from oncelog.core.chat import chat_of, message_id
from oncelog.core.values import Receipt, Record
from oncelog.doors.faults import DoorError
from oncelog.doors.frames import frame, json_text
from oncelog.doors.requests import JSON
from oncelog.doors.requests import STATUS as STATUS_OF_ALL
from oncelog.stores.protocol import MemberChange, Membership, StreamMember

STATUS: Final = {
    **STATUS_OF_ALL,
    codes.NOT_A_MEMBER: 403,
    codes.NOT_AN_OWNER: 403,
    codes.LAST_OWNER: 409,
    codes.INVALID_MESSAGE: 400,
    codes.MESSAGE_TOO_LARGE: 413,
    codes.INVALID_ACK: 409,
    codes.SERVER_STOPPING: 503,
    codes.SERVER_ERROR: 503,
}
"""The one table from this door's errors to HTTP's."""
_CODES: Final = {
    codes.BAD_REQUEST: "INVALID_REQUEST",
    codes.SERVER_BUSY: "BUSY",
    codes.SERVER_ERROR: "UNAVAILABLE",
}
"""What the errors of all doors are called here. The others are called the same, in capitals."""
CLOSING: Final = frozenset({codes.AUTH_FAILED, codes.SLOW_CONSUMER})
"""After one of these errors the connection ends."""
_MISMATCH: Final = ',"content_mismatch":true'
_ERASED: Final = ',"erased":true'


def code_of(error: DoorError) -> str:
    """An error's code on this wire."""
    return _CODES.get(error.code, error.code.upper())


# --- messages ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def time_text(time_ms: int) -> str:
    """A log time as ISO 8601 has it, in UTC with milliseconds (CH-10). All of a group commit have one."""
    seconds, ms = divmod(time_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"


def _uuid(key: bytes) -> str:
    digits = key.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _members(record: Record) -> bytes:
    """The members of a message, without the braces (CH-10)."""
    said = b'"content":null,"content_type":null,"erased":true' if record.erased else record.body[1:-1]
    head = (
        f'"message_id":"{message_id(record.lane, record.position)}","chat_id":{json_text(chat_of(record.scope))},'
        f'"sequence":{record.sequence},"sender_id":{json_text(record.actor)},"client_message_id":"{_uuid(record.key)}",'
    )
    return b'%b%b,"created_at":"%b"' % (head.encode(), said, time_text(record.log_time_ms).encode())


def message_json(record: Record) -> bytes:
    """A message in a page."""
    return b"{%b}" % _members(record)


def message_frame(record: Record) -> bytes:
    """A message as all who follow its chat get it."""
    return frame(b'{"type":"message",%b}' % _members(record))


# --- answers ------------------------------------------------------------------------------------------


def sent_json(
    client_message_id: str, chat_id: str, receipt: Receipt, *, duplicate: bool, mismatch: bool, erased: bool
) -> bytes:
    """What became of a message, without the braces. Its id is as it was sent: a UUID, which needs no escapes."""
    return (
        f'"client_message_id":"{client_message_id}","chat_id":{json_text(chat_id)},'
        f'"message_id":"{message_id(receipt.lane, receipt.position)}","sequence":{receipt.sequence},'
        f'"created_at":"{time_text(receipt.log_time_ms)}","duplicate":{"true" if duplicate else "false"}'
        f"{_MISMATCH if mismatch else ''}{_ERASED if erased else ''}"
    ).encode()


def batch_json(
    chat_id: str, records: Iterable[Record], *, has_more: bool, following: int, newest: int, is_ahead: bool
) -> bytes:
    """A page of messages, without the braces."""
    return b'"chat_id":%b,"messages":[%b],"has_more":%b,"next_sequence":%d,"last_sequence":%d%b' % (
        json_text(chat_id).encode(),
        b",".join(map(message_json, records)),
        b"true" if has_more else b"false",
        following,
        newest,
        b',"cursor_ahead":true' if is_ahead else b"",
    )


def reply(kind: str, members: bytes, request_id: str | None) -> bytes:
    """An answer as a frame; with the id of the request, if that had one."""
    asked = b"" if request_id is None else b'"request_id":%b,' % orjson.dumps(request_id)
    return frame(b'{"type":"%b",%b%b}' % (kind.encode(), asked, members))


def connected_json(user_id: str, epoch: str, heartbeat_ms: int) -> bytes:
    """The answer to `connect`, without the braces."""
    return orjson.dumps({"user_id": user_id, "epoch": epoch, "heartbeat_ms": heartbeat_ms})[1:-1]


def error_members(error: DoorError) -> dict[str, Any]:
    """What an error says. `status` is HTTP's alone."""
    details = {name: value for name, value in error.details.items() if name != "status"}
    return {"code": code_of(error), "message": error.message, **details}


def error_frame(error: DoorError, about: Mapping[str, str] | None = None) -> bytes:
    """An error, and what it is about: the ids that were sent."""
    return frame(orjson.dumps({"type": "error", **error_members(error), **(about or {})}))


def error_response(error: DoorError, headers: Mapping[str, str] | None = None) -> web.Response:
    """The same as HTTP has it."""
    headers = dict(headers or {})
    retry_after_ms = error.details.get("retry_after_ms")
    if retry_after_ms is not None:
        headers["Retry-After"] = str(-(-retry_after_ms // 1000))
    if error.code == codes.AUTH_FAILED:
        headers["WWW-Authenticate"] = "Bearer"
    body = orjson.dumps({"error": error_members(error)})
    status = error.details.get("status", STATUS[error.code])
    response = web.Response(body=body, status=status, content_type=JSON, headers=headers)
    if error.details.get("field") == "body":
        response.force_close()  # as in `requests`: what is left of it was not read
    return response


# --- what others do -----------------------------------------------------------------------------------


def delivery_frame(chat_id: str, user_id: str, sequence: int) -> bytes:
    """How far a member has received a chat."""
    return frame(
        f'{{"type":"delivery","chat_id":{json_text(chat_id)},"user_id":{json_text(user_id)},'
        f'"last_acked_sequence":{sequence}}}'.encode()
    )


def membership_frame(chat_id: str, change: MemberChange) -> bytes:
    """Return the frame that tells of a member that was added, removed or got another role.

    A returning member keeps its watermark.
    """
    told = {"type": "membership", "chat_id": chat_id, "user_id": change.member, "present": change.present}
    if change.present:
        told["last_acked_sequence"] = change.acknowledged
    if change.role is not None:
        told["role"] = change.role.value
    return frame(orjson.dumps(told))


def closing_frame(reason: str, reconnect_delay_ms: int) -> bytes:
    """Told before a planned close."""
    return frame(
        orjson.dumps({"type": "connection_closing", "reason": reason, "reconnect_delay_ms": reconnect_delay_ms})
    )


# --- over HTTP -----------------------------------------------------------------------------------------


def members_of(members: Sequence[StreamMember]) -> list[dict[str, Any]]:
    """Members, the role of each, and how far it has received the chat."""
    return [{"user_id": one.name, "last_acked_sequence": one.acknowledged, "role": one.role.value} for one in members]


def chats_of(memberships: Sequence[Membership]) -> list[dict[str, Any]]:
    """Chats as one of their members sees them."""
    return [
        {
            "chat_id": chat_of(one.scope),
            "last_sequence": one.newest,
            "last_acked_sequence": one.acknowledged,
            "role": one.role.value,
        }
        for one in memberships
    ]
