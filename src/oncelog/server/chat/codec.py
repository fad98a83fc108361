"""Codec of the Chat API: encodes messages, verdicts and errors as bytes.

The stored content of a message is already encoded, and the encoder splices it into the answer. All readers of a
broadcast share one frame.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import orjson
from msgspec import Struct

from oncelog import error_codes
from oncelog.core.builders import format_uuid
from oncelog.core.chat import format_message_id, parse_chat_scope
from oncelog.core.values import Committed, Record, Replayed
from oncelog.server.api_service import outcome_schema, page_members
from oncelog.server.chat.messages import ROLE, UUID4, ChatMessages, Send
from oncelog.server.errors import ApiError
from oncelog.server.limits import ApiLimits
from oncelog.server.messages import (
    POSITIVE_INTEGER,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    page_schema,
    schema_ref,
    with_optional,
)
from oncelog.server.problems import ProblemDialect
from oncelog.server.websocket_frames import encode_frame, encode_json_text
from oncelog.storage.store import MemberChange, MemberPage, MembershipPage

_ERROR_CODES: Final = {
    error_codes.BAD_REQUEST: "INVALID_REQUEST",
    error_codes.SERVER_BUSY: "BUSY",
    error_codes.SERVER_ERROR: "UNAVAILABLE",
}
"""Chat API names of common error codes. Other codes keep their name, in capitals."""
CLOSING_CODES: Final = frozenset({error_codes.AUTH_FAILED, error_codes.SLOW_CONSUMER})
"""Error codes after which the server closes the connection."""


def get_code(error: ApiError) -> str:
    """Return the Chat API's code for an error."""
    return _ERROR_CODES.get(error.code, error.code.upper())


# --- messages ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def format_time(time_ms: int) -> str:
    """Format a log time in ISO 8601, in UTC with milliseconds (CH-10). Cached, because the messages in a commit share
    it."""
    seconds, ms = divmod(time_ms, 1000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"


def _encode_members(record: Record) -> bytes:
    """Encode the JSON members of a message, without the braces (CH-10)."""
    content = b'"content":null,"content_type":null,"erased":true' if record.erased else record.body[1:-1]
    head = (
        f'"message_id":"{format_message_id(record.lane, record.position)}",'
        f'"chat_id":{encode_json_text(parse_chat_scope(record.scope))},'
        f'"sequence":{record.sequence},"sender_id":{encode_json_text(record.actor)},'
        f'"client_message_id":"{format_uuid(record.key)}",'
    )
    trace = b"" if record.trace is None else b',"traceparent":"%b"' % record.trace.traceparent.encode()
    return b'%b%b,"created_at":"%b"%b' % (head.encode(), content, format_time(record.log_time_ms).encode(), trace)


def encode_message(record: Record) -> bytes:
    """Encode a message as part of a page."""
    return b"{%b}" % _encode_members(record)


def encode_message_frame(record: Record) -> bytes:
    """Encode a message as a broadcast frame."""
    return encode_frame(b'{"type":"message",%b}' % _encode_members(record))


# --- answers ------------------------------------------------------------------------------------------


class MessagePage(Struct, frozen=True):
    """A page of a chat's messages."""

    records: list[Record]
    has_more: bool
    following: int
    """Sequence after which the next page begins."""
    newest: int
    is_ahead: bool = False
    """Whether the cursor is beyond the end of the chat."""
    beginning: int = 1
    """Sequence before which the previous page ends."""


def encode_sent(send: Send, verdict: Committed | Replayed) -> bytes:
    """Encode the answer to `send_message`, without the braces. The id is a UUID, which needs no escapes."""
    receipt = verdict.receipt
    assert receipt is not None  # noqa: S101 - the record of a known key has a receipt
    is_known = isinstance(verdict, Replayed)
    mismatch = ',"content_mismatch":true' if isinstance(verdict, Replayed) and verdict.mismatch else ""
    erased = ',"erased":true' if isinstance(verdict, Replayed) and verdict.erased else ""
    return (
        f'"client_message_id":"{send.client_message_id}","chat_id":{encode_json_text(send.chat_id)},'
        f'"message_id":"{format_message_id(receipt.lane, receipt.position)}","sequence":{receipt.sequence},'
        f'"created_at":"{format_time(receipt.log_time_ms)}","duplicate":{"true" if is_known else "false"}'
        f"{mismatch}{erased}"
    ).encode()


def encode_batch(scope: str, page: MessagePage) -> bytes:
    """Encode a page of messages, without the braces."""
    return b'"chat_id":%b,"messages":[%b],"has_more":%b,"next_sequence":%d,"last_sequence":%d%b' % (
        encode_json_text(parse_chat_scope(scope)).encode(),
        b",".join(map(encode_message, page.records)),
        b"true" if page.has_more else b"false",
        page.following,
        page.newest,
        b',"cursor_ahead":true' if page.is_ahead else b"",
    )


def encode_reply(kind: str, members: bytes, request_id: str | None) -> bytes:
    """Encode an answer as a frame, with the id of the request if it has one."""
    request_member = b"" if request_id is None else b'"request_id":%b,' % orjson.dumps(request_id)
    return encode_frame(b'{"type":"%b",%b%b}' % (kind.encode(), request_member, members))


def encode_connected(user_id: str, epoch: str, heartbeat_ms: int) -> bytes:
    """Encode the answer to `connect`, without the braces."""
    return orjson.dumps({"user_id": user_id, "epoch": epoch, "heartbeat_ms": heartbeat_ms})[1:-1]


def to_error_members(error: ApiError) -> dict[str, Any]:
    """Return the JSON members of an error, without the `status` detail, which is for HTTP only."""
    details = {name: value for name, value in error.details.items() if name != "status"}
    return {"code": get_code(error), "message": error.message, **details}


def encode_error_frame(error: ApiError, request_ids: Mapping[str, str] | None = None) -> bytes:
    """Encode an error as a frame that repeats the ids of the request."""
    return encode_frame(orjson.dumps({"type": "error", **to_error_members(error), **(request_ids or {})}))


PROBLEM_DIALECT: Final = ProblemDialect(
    get_code, lambda error: {"error": to_error_members(error)}, {error_codes.SERVER_ERROR: 503}
)


# --- notifications ------------------------------------------------------------------------------------


def encode_delivery_frame(chat_id: str, user_id: str, sequence: int) -> bytes:
    """Encode a member's watermark, the sequence up to which the member has received the chat."""
    return encode_frame(
        f'{{"type":"delivery","chat_id":{encode_json_text(chat_id)},"user_id":{encode_json_text(user_id)},'
        f'"last_acked_sequence":{sequence}}}'.encode()
    )


def encode_membership_frame(chat_id: str, change: MemberChange) -> bytes:
    """Encode a membership change: an addition, a removal or a new role. A returning member keeps its watermark."""
    frame = {"type": "membership", "chat_id": chat_id, "user_id": change.member, "present": change.present}
    if change.present:
        frame["last_acked_sequence"] = change.acknowledged
    if change.role is not None:
        frame["role"] = change.role.value
    return encode_frame(orjson.dumps(frame))


def encode_closing_frame(reason: str, reconnect_delay_ms: int) -> bytes:
    """Encode the frame that precedes a planned close."""
    return encode_frame(
        orjson.dumps({"type": "connection_closing", "reason": reason, "reconnect_delay_ms": reconnect_delay_ms})
    )


# --- over HTTP -----------------------------------------------------------------------------------------


Members = dict[str, Any]
"""A JSON object in an answer."""


def to_chat(scope: str, newest: int, page: MemberPage) -> Members:
    """Return a chat with one page of its members, with their roles and watermarks."""
    return {
        "chat_id": parse_chat_scope(scope),
        "last_sequence": newest,
        "members": [
            {"user_id": member.name, "last_acked_sequence": member.acknowledged, "role": member.role.value}
            for member in page.members
        ],
        **page_members(page.members[-1].name if page.has_more else ""),
    }


def to_chats(page: MembershipPage, may_read: Callable[[str], bool]) -> Members:
    """Return a page of a member's chats, without chats that the member may not read."""
    return {
        "chats": [
            {
                "chat_id": parse_chat_scope(membership.scope),
                "last_sequence": membership.newest,
                "last_acked_sequence": membership.acknowledged,
                "role": membership.role.value,
            }
            for membership in page.memberships
            if may_read(membership.scope)
        ],
        **page_members(parse_chat_scope(page.memberships[-1].scope) if page.has_more else ""),
    }


# --- JSON schemas of the OpenAPI document ------------------------------------------------------------

_TIME: Final[Schema] = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\\.[0-9]{3}Z$"}
MESSAGE_ID: Final[Schema] = {"type": "string", "pattern": "^msg_[0-9a-f]{26}$"}


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    messages = ChatMessages(limits)
    older_acknowledgement = object_schema(last_acked_seq=integer_schema("Older name of `last_acked_sequence`."))
    member = object_schema(
        user_id=TEXT_SCHEMA,
        last_acked_sequence=integer_schema("The member has received all messages up to this sequence."),
        role=ROLE,
    )
    members = {"type": "array", "maxItems": limits.page_messages_max, "items": member}
    mine = object_schema(
        chat_id=TEXT_SCHEMA, last_sequence=integer_schema(), last_acked_sequence=integer_schema(), role=ROLE
    )
    chats = page_schema(chats={"type": "array", "maxItems": limits.page_messages_max, "items": mine})
    return {
        "NewChat": messages.new_chat.to_schema(),
        "Chat": page_schema(chat_id=TEXT_SCHEMA, last_sequence=integer_schema(), members=members),
        "Chats": chats,
        "Delivery": page_schema(chat_id=TEXT_SCHEMA, members=members),
        "NewMember": messages.new_member.to_schema(),
        "Member": with_optional(
            object_schema(chat_id=TEXT_SCHEMA, user_id=TEXT_SCHEMA, present={"type": "boolean"}), role=ROLE
        ),
        "NewMessage": messages.new_message.to_schema(),
        "Sent": with_optional(
            object_schema(
                client_message_id={**UUID4, "description": "The id as the client sent it."},
                chat_id=TEXT_SCHEMA,
                message_id=MESSAGE_ID,
                sequence=POSITIVE_INTEGER,
                created_at=_TIME,
                duplicate={"type": "boolean"},
            ),
            content_mismatch={"const": True},
            erased={"const": True},
        ),
        "Message": with_optional(
            object_schema(
                message_id=MESSAGE_ID,
                chat_id=TEXT_SCHEMA,
                sequence=POSITIVE_INTEGER,
                sender_id=TEXT_SCHEMA,
                client_message_id=UUID4,
                content={"type": ["string", "null"], "description": "null after an erasure."},
                content_type={"type": ["string", "null"]},
                created_at=_TIME,
            ),
            erased={"const": True},
            traceparent={**TEXT_SCHEMA, "description": "Trace context of the request that sent the message."},
        ),
        "MessageOutcome": outcome_schema(message=schema_ref("Message")),
        "Batch": with_optional(
            object_schema(
                chat_id=TEXT_SCHEMA,
                messages={"type": "array", "maxItems": limits.page_messages_max, "items": schema_ref("Message")},
                has_more={"type": "boolean"},
                next_sequence={**integer_schema("The same value as `next_after`."), "deprecated": True},
                next_after=integer_schema("`after` of the next page."),
                last_sequence=integer_schema("Sequence of the newest message of the chat."),
            ),
            next_before=integer_schema("`before` of the next page."),
            cursor_ahead={"const": True, "description": "The cursor is beyond the end of the chat."},
        ),
        "Acknowledgement": {
            "anyOf": [
                ChatMessages.acknowledgement.to_schema(),
                {**older_acknowledgement, "not": {"required": ["last_acked_sequence"]}},
            ]
        },
        "Acknowledged": object_schema(chat_id=TEXT_SCHEMA, changed={"type": "boolean"}),
    }
