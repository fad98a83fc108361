"""Codec of the Chat API: messages, verdicts and errors as bytes.

A message is stored as bytes and served as bytes: its content is spliced into what is around it. One broadcast is one
frame, whatever the number of its readers.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import orjson

from oncelog import error_codes
from oncelog.core.chat import format_message_id, parse_chat_scope
from oncelog.core.values import Receipt, Record
from oncelog.server.errors import ApiError
from oncelog.server.problems import ProblemDialect
from oncelog.server.websocket_frames import encode_frame, encode_json_text
from oncelog.storage.store import MemberChange, Membership, StreamMember

_ERROR_CODES: Final = {
    error_codes.BAD_REQUEST: "INVALID_REQUEST",
    error_codes.SERVER_BUSY: "BUSY",
    error_codes.SERVER_ERROR: "UNAVAILABLE",
}
"""Names of common error codes in the Chat API. Other codes keep their name, in capitals."""
CLOSING_CODES: Final = frozenset({error_codes.AUTH_FAILED, error_codes.SLOW_CONSUMER})
"""After one of these errors the connection ends."""
_MISMATCH: Final = ',"content_mismatch":true'
_ERASED: Final = ',"erased":true'


def get_code(error: ApiError) -> str:
    """An error's code on this wire."""
    return _ERROR_CODES.get(error.code, error.code.upper())


# --- messages ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def format_time(time_ms: int) -> str:
    """A log time as ISO 8601 has it, in UTC with milliseconds (CH-10). All of a group commit have one."""
    seconds, ms = divmod(time_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"


def _format_uuid(key: bytes) -> str:
    digits = key.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _encode_members(record: Record) -> bytes:
    """The members of a message, without the braces (CH-10)."""
    content = b'"content":null,"content_type":null,"erased":true' if record.erased else record.body[1:-1]
    head = (
        f'"message_id":"{format_message_id(record.lane, record.position)}",'
        f'"chat_id":{encode_json_text(parse_chat_scope(record.scope))},'
        f'"sequence":{record.sequence},"sender_id":{encode_json_text(record.actor)},'
        f'"client_message_id":"{_format_uuid(record.key)}",'
    )
    return b'%b%b,"created_at":"%b"' % (head.encode(), content, format_time(record.log_time_ms).encode())


def encode_message(record: Record) -> bytes:
    """A message in a page."""
    return b"{%b}" % _encode_members(record)


def encode_message_frame(record: Record) -> bytes:
    """A message as all who follow its chat get it."""
    return encode_frame(b'{"type":"message",%b}' % _encode_members(record))


# --- answers ------------------------------------------------------------------------------------------


def encode_sent(
    client_message_id: str, chat_id: str, receipt: Receipt, *, duplicate: bool, mismatch: bool, erased: bool
) -> bytes:
    """What became of a message, without the braces. Its id is as it was sent: a UUID, which needs no escapes."""
    return (
        f'"client_message_id":"{client_message_id}","chat_id":{encode_json_text(chat_id)},'
        f'"message_id":"{format_message_id(receipt.lane, receipt.position)}","sequence":{receipt.sequence},'
        f'"created_at":"{format_time(receipt.log_time_ms)}","duplicate":{"true" if duplicate else "false"}'
        f"{_MISMATCH if mismatch else ''}{_ERASED if erased else ''}"
    ).encode()


def encode_batch(
    chat_id: str, records: Iterable[Record], *, has_more: bool, following: int, newest: int, is_ahead: bool
) -> bytes:
    """A page of messages, without the braces."""
    return b'"chat_id":%b,"messages":[%b],"has_more":%b,"next_sequence":%d,"last_sequence":%d%b' % (
        encode_json_text(chat_id).encode(),
        b",".join(map(encode_message, records)),
        b"true" if has_more else b"false",
        following,
        newest,
        b',"cursor_ahead":true' if is_ahead else b"",
    )


def encode_reply(kind: str, members: bytes, request_id: str | None) -> bytes:
    """An answer as a frame; with the id of the request, if that had one."""
    request_member = b"" if request_id is None else b'"request_id":%b,' % orjson.dumps(request_id)
    return encode_frame(b'{"type":"%b",%b%b}' % (kind.encode(), request_member, members))


def encode_connected(user_id: str, epoch: str, heartbeat_ms: int) -> bytes:
    """The answer to `connect`, without the braces."""
    return orjson.dumps({"user_id": user_id, "epoch": epoch, "heartbeat_ms": heartbeat_ms})[1:-1]


def to_error_members(error: ApiError) -> dict[str, Any]:
    """What an error says. `status` is HTTP's alone."""
    details = {name: value for name, value in error.details.items() if name != "status"}
    return {"code": get_code(error), "message": error.message, **details}


def encode_error_frame(error: ApiError, request_ids: Mapping[str, str] | None = None) -> bytes:
    """An error, and what it is about: the ids that were sent."""
    return encode_frame(orjson.dumps({"type": "error", **to_error_members(error), **(request_ids or {})}))


PROBLEM_DIALECT: Final = ProblemDialect(
    get_code, lambda error: {"error": to_error_members(error)}, {error_codes.SERVER_ERROR: 503}
)


# --- what others do -----------------------------------------------------------------------------------


def encode_delivery_frame(chat_id: str, user_id: str, sequence: int) -> bytes:
    """How far a member has received a chat."""
    return encode_frame(
        f'{{"type":"delivery","chat_id":{encode_json_text(chat_id)},"user_id":{encode_json_text(user_id)},'
        f'"last_acked_sequence":{sequence}}}'.encode()
    )


def encode_membership_frame(chat_id: str, change: MemberChange) -> bytes:
    """Return the frame that tells of a member that was added, removed or got another role.

    A returning member keeps its watermark.
    """
    frame = {"type": "membership", "chat_id": chat_id, "user_id": change.member, "present": change.present}
    if change.present:
        frame["last_acked_sequence"] = change.acknowledged
    if change.role is not None:
        frame["role"] = change.role.value
    return encode_frame(orjson.dumps(frame))


def encode_closing_frame(reason: str, reconnect_delay_ms: int) -> bytes:
    """Told before a planned close."""
    return encode_frame(
        orjson.dumps({"type": "connection_closing", "reason": reason, "reconnect_delay_ms": reconnect_delay_ms})
    )


# --- over HTTP -----------------------------------------------------------------------------------------


def to_members(members: Sequence[StreamMember]) -> list[dict[str, Any]]:
    """Members, the role of each, and how far it has received the chat."""
    return [
        {"user_id": member.name, "last_acked_sequence": member.acknowledged, "role": member.role.value}
        for member in members
    ]


def to_chats(memberships: Sequence[Membership]) -> list[dict[str, Any]]:
    """Chats as one of their members sees them."""
    return [
        {
            "chat_id": parse_chat_scope(membership.scope),
            "last_sequence": membership.newest,
            "last_acked_sequence": membership.acknowledged,
            "role": membership.role.value,
        }
        for membership in memberships
    ]
