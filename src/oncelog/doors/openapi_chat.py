"""The part of the description that speaks of chats."""

from collections.abc import Sequence
from typing import Any, Final

from oncelog import codes
from oncelog.core.chat import CHAT_ID_CHARACTERS_MAX, CONTENT_TYPE_CHARACTERS_MAX
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.values import Role
from oncelog.doors.limits import DoorLimits
from oncelog.doors.openapi_parts import (
    JSON,
    NO_NUL,
    QUOTA,
    TEXT,
    Schema,
    answer,
    error,
    json_answer,
    number,
    object_of,
    operation,
    parameter,
    ref,
    whole,
)

_ERROR: Final = "ChatError"
_READ: Final = (400, 401, 429, 503)
_WRITTEN: Final = (400, 401, 408, 413, 415, 429, 503)
_CODES: Final = (
    codes.NOT_A_MEMBER,
    codes.NOT_AN_OWNER,
    codes.LAST_OWNER,
    codes.INVALID_MESSAGE,
    codes.MESSAGE_TOO_LARGE,
    codes.INVALID_ACK,
    codes.AUTH_FAILED,
    codes.FORBIDDEN,
    codes.HISTORY_CHANGED,
    codes.RATE_LIMITED,
    codes.READ_ONLY,
    codes.QUOTA_EXCEEDED,
    codes.SERVER_STOPPING,
    "INVALID_REQUEST",
    "BUSY",
    "UNAVAILABLE",
)
_UUID4: Final = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_CHAT_ID: Final[Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": CHAT_ID_CHARACTERS_MAX,
    "pattern": "^(?!\\.{1,2}$)[^/\\u0000-\\u001f\\u007f-\\u009f]*$",
}
_USER_ID: Final[Schema] = {
    "type": "string",
    "maxLength": NAME_CHARACTERS_MAX,
    "pattern": "^(user|client):[^\\u0000]+$",
}
_ROLE: Final[Schema] = {"enum": [role.value for role in Role]}
_TIME: Final[Schema] = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\\.[0-9]{3}Z$"}
_MESSAGE_ID: Final[Schema] = {"type": "string", "pattern": "^msg_[0-9a-f]{26}$"}


def paths(limits: DoorLimits) -> Schema:
    """The paths of the chat door."""
    chat = "/v1/chats/{chat_id}"
    member = [_chat(), _in_path("user_id", {**_USER_ID, "description": "Who: `user:…`, or `client:…` of an API key."})]
    return {
        "/v1/chat": {"get": _socket()},
        "/v1/chats": {"post": _create(limits), "get": _chats(limits)},
        chat: {"get": _members("getChat", "Chat", "Read a chat and its members", limits)},
        f"{chat}/members/{{user_id}}": {
            "put": {**_add_member(limits), "parameters": member},
            "delete": {**_remove_member(), "parameters": member},
        },
        f"{chat}/messages": {"get": _history(limits), "post": _send(limits)},
        f"{chat}/delivery": {"get": _members("getDelivery", "Delivery", "Read how far each member is", limits)},
        f"{chat}/ack": {"post": _ack(limits)},
    }


def _socket() -> Schema:
    about = (
        "A WebSocket (docs/chat.md): the first frame says who has come, then messages are sent, synced, acknowledged "
        "and delivered live. A plain request gets 426."
    )
    upgrade = json_answer("It is no WebSocket.", ref(_ERROR))
    return {
        "operationId": "connectChat",
        "tags": ["chat"],
        "summary": "Chat over a WebSocket",
        "description": about,
        "responses": {
            "101": {"description": "A WebSocket."},
            "426": upgrade,
            **{str(status): error(status, _ERROR) for status in (403, 500, 503)},
        },
    }


def _create(limits: DoorLimits) -> Schema:
    about = (
        "The caller becomes its first member and its owner. The owners of an existing chat can add members with this; "
        "other callers get 403. If two callers create it at once, one of them does."
    )
    told = answer("Chat", "It was there, and has these members too.")
    described = _described("createChat", "Make a chat", about, told, (*_WRITTEN, 507))
    described["responses"]["201"] = answer("Chat", "It was made.")
    return {**described, "requestBody": _body("NewChat", limits)}


def _chats(limits: DoorLimits) -> Schema:
    after = {"anyOf": [_CHAT_ID, {"type": "string", "maxLength": 0}], "description": "`next_after` of the page before."}
    described = _described("listChats", "List one's chats", "By their ids.", answer("Chats", "A page."), _READ)
    return {**described, "parameters": [parameter("after", after), _limit(limits)]}


def _members(name: str, schema: str, summary: str, limits: DoorLimits) -> Schema:
    after = {"anyOf": [_USER_ID, {"type": "string", "maxLength": 0}], "description": "`next_after` of the page before."}
    described = _described(name, summary, "Members by their ids, in pages.", answer(schema, "A page."), _READ)
    return {**described, "parameters": [_chat(), parameter("after", after), _limit(limits)]}


def _add_member(limits: DoorLimits) -> Schema:
    about = (
        "For owners. Without a body, or without `role`, a new member is added as a plain member, and the role of an "
        "existing member stays. The last owner cannot become a plain member: 409. With `only_if_member` a user that is "
        "not a member is refused with 403 instead of added. A repeated request changes nothing."
    )
    told = answer("Member", "Done.")
    described = _described("addMember", "Add a member, or set its role", about, told, (*_WRITTEN, 507))
    described["responses"]["409"] = error(409, _ERROR)
    return {**described, "requestBody": {**_body("NewMember", limits), "required": False}}


def _remove_member() -> Schema:
    about = (
        "For owners; every member may remove itself. When the last owner leaves, the member that joined first becomes "
        "an owner. A repeated request changes nothing."
    )
    return _described("removeMember", "Remove a member, or oneself", about, answer("Member", "Done."), _READ)


def _history(limits: DoorLimits) -> Schema:
    about = (
        "Without `after` and `before` the newest messages. Messages of a page are in ascending order. Forwards go on "
        "with `after` = `next_sequence`, backwards with `before` = `next_before`, while `has_more`."
    )
    after = whole("Messages behind this sequence.")
    before = whole("Messages right before this sequence. Not beside `after`.")
    epoch = {**TEXT, "description": "That of the history which the cursor is of. Another one gets 409."}
    described = _described("getMessages", "Read messages", about, answer("Batch", "A page."), (*_READ, 409))
    queries = [parameter(name, schema) for name, schema in (("after", after), ("before", before), ("epoch", epoch))]
    return {**described, "parameters": [_chat(), *queries, _limit(limits)]}


def _send(limits: DoorLimits) -> Schema:
    about = (
        "After any failure send it again under its id: what is known gets the answer that it had, and nothing is "
        "written. Another content, content type or sender under the same id is told (`content_mismatch`)."
    )
    told = answer("Sent", "It is known, and this is its answer.")
    described = _described("sendMessage", "Send a message", about, told, (*_WRITTEN, 507))
    described["responses"]["201"] = answer("Sent", "It is in the chat, durably.")
    return {**described, "parameters": [_chat()], "requestBody": _body("NewMessage", limits)}


def _ack(limits: DoorLimits) -> Schema:
    about = "Says that all up to a sequence was received. It never moves back; beyond the chat's end it gets 409."
    told = answer("Acknowledged", "It is kept.")
    described = _described("acknowledge", "Acknowledge messages", about, told, (*_WRITTEN, 409))
    return {**described, "parameters": [_chat()], "requestBody": _body("Acknowledgement", limits)}


def _described(name: str, summary: str, about: str, told: Schema, errors: Sequence[int]) -> Schema:
    return operation(name, summary, about, told, errors, tag="chat", fault=_ERROR)


def _body(schema: str, limits: DoorLimits) -> Schema:
    about = f"At most {limits.frame_bytes_max} bytes."
    return {"required": True, "description": about, "content": {JSON: {"schema": ref(schema)}}}


def _chat() -> Schema:
    return _in_path("chat_id", {**_CHAT_ID, "description": "Which chat. In NFC."})


def _in_path(name: str, schema: Schema) -> Schema:
    return {**parameter(name, dict(schema)), "in": "path", "required": True}


def _limit(limits: DoorLimits) -> Schema:
    schema = {
        **whole(),
        "default": min(limits.page_messages_default, limits.page_messages_max),
        "description": f"How many at most. 0 is taken as 1, more than {limits.page_messages_max} as that.",
    }
    return parameter("limit", schema)


# --- schemas -----------------------------------------------------------------------------------------------


def schemas(limits: DoorLimits) -> Schema:
    """What is sent and answered there."""
    members = {"type": "array", "maxItems": limits.page_messages_max, "items": _member()}
    mine = object_of(chat_id=TEXT, last_sequence=whole(), last_acked_sequence=whole(), role=_ROLE)
    chats = object_of(chats={"type": "array", "maxItems": limits.page_messages_max, "items": mine})
    return {
        "NewChat": _new_chat(limits),
        "Chat": _and(object_of(chat_id=TEXT, last_sequence=whole(), members=members), next_after=TEXT),
        "Chats": _and(chats, next_after=TEXT),
        "Delivery": _and(object_of(chat_id=TEXT, members=members), next_after=TEXT),
        "NewMember": {
            "type": "object",
            "properties": {
                "role": {**_ROLE, "enum": [*_ROLE["enum"], None]},
                "only_if_member": {"type": ["boolean", "null"]},
            },
        },
        "Member": _and(object_of(chat_id=TEXT, user_id=TEXT, present={"type": "boolean"}), role=_ROLE),
        "NewMessage": _new_message(limits),
        "Sent": _and(
            object_of(
                client_message_id={"type": "string", "pattern": _UUID4, "description": "As it was sent."},
                chat_id=TEXT,
                message_id=_MESSAGE_ID,
                sequence=number(),
                created_at=_TIME,
                duplicate={"type": "boolean"},
            ),
            content_mismatch={"const": True},
            erased={"const": True},
        ),
        "Message": _message(),
        "Batch": _and(
            object_of(
                chat_id=TEXT,
                messages={"type": "array", "maxItems": limits.page_messages_max, "items": ref("Message")},
                has_more={"type": "boolean"},
                next_sequence=whole("Read on after this."),
                last_sequence=whole("The newest of the chat."),
            ),
            next_before=whole("Read on before this."),
            cursor_ahead={"const": True, "description": "The cursor is beyond the chat's end."},
        ),
        "Acknowledgement": _acknowledgement(),
        "Acknowledged": object_of(chat_id=TEXT, changed={"type": "boolean"}),
        _ERROR: object_of(error=_error()),
    }


def _and(schema: Schema, **more: Schema) -> Schema:
    """The same with members that are not always there."""
    return {**schema, "properties": {**schema["properties"], **more}}


def _member() -> Schema:
    return object_of(user_id=TEXT, last_acked_sequence=whole("All up to this was received."), role=_ROLE)


def _new_chat(limits: DoorLimits) -> Schema:
    members = {"type": ["array", "null"], "maxItems": limits.request_members_max, "items": _USER_ID}
    chat_id = {**_CHAT_ID, "type": ["string", "null"], "description": "Without it the server makes one. In NFC."}
    return {"type": "object", "properties": {"chat_id": chat_id, "members": members}}


def _new_message(limits: DoorLimits) -> Schema:
    content = {"type": "string", "minLength": 1, "maxLength": limits.message_bytes_max, "pattern": NO_NUL}
    content_type = {
        "type": ["string", "null"],
        "maxLength": CONTENT_TYPE_CHARACTERS_MAX,
        "pattern": "^[!-.0-~]+/[ -~]+$",
        "description": "text/plain if it is not said.",
    }
    schema = object_of(
        client_message_id={"type": "string", "pattern": _UUID4, "description": "A UUID of version 4, the sender's."},
        content={**content, "description": f"1 to {limits.message_bytes_max} bytes of text."},
    )
    return _and(schema, content_type=content_type)


def _message() -> Schema:
    schema = object_of(
        message_id=_MESSAGE_ID,
        chat_id=TEXT,
        sequence=number(),
        sender_id=TEXT,
        client_message_id={"type": "string", "pattern": _UUID4},
        content={"type": ["string", "null"], "description": "null if it was erased."},
        content_type={"type": ["string", "null"]},
        created_at=_TIME,
    )
    return _and(schema, erased={"const": True})


def _acknowledgement() -> Schema:
    older = object_of(last_acked_seq=whole("The same under an older name."))
    return {
        "anyOf": [
            object_of(last_acked_sequence=whole("All up to this was received.")),
            {**older, "not": {"required": ["last_acked_sequence"]}},
        ]
    }


def _error() -> Schema:
    more: dict[str, Any] = {
        "field": {**TEXT, "description": "What is wrong."},
        **QUOTA,
        "limit": whole("What it may be at most."),
        "last_sequence": whole("The newest of the chat."),
        "epoch": {**TEXT, "description": "The log's, where the reader's is another."},
        "retry_after_ms": whole("When to try again."),
    }
    schema = object_of(code={"enum": [code.upper() for code in _CODES]}, message=TEXT)
    return {**_and(schema, **more), "additionalProperties": False}
