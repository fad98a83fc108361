"""The part of the description that speaks of chats."""

from collections.abc import Sequence
from typing import Any, Final

from oncelog import error_codes
from oncelog.core.chat import CHAT_ID_CHARACTERS_MAX, CONTENT_TYPE_CHARACTERS_MAX
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.values import Role
from oncelog.server.limits import ApiLimits
from oncelog.server.openapi.parts import (
    JSON,
    NO_NUL,
    QUOTA_PROPERTIES,
    TEXT_SCHEMA,
    Schema,
    error_response,
    integer_schema,
    json_response,
    object_schema,
    operation,
    parameter,
    positive_integer_schema,
    schema_ref,
    schema_response,
)

_ERROR_SCHEMA: Final = "ChatError"
_READ_ERRORS: Final = (400, 401, 429, 503)
_WRITE_ERRORS: Final = (400, 401, 408, 413, 415, 429, 503)
_ERROR_CODES: Final = (
    error_codes.NOT_A_MEMBER,
    error_codes.NOT_AN_OWNER,
    error_codes.LAST_OWNER,
    error_codes.INVALID_MESSAGE,
    error_codes.MESSAGE_TOO_LARGE,
    error_codes.INVALID_ACK,
    error_codes.AUTH_FAILED,
    error_codes.FORBIDDEN,
    error_codes.HISTORY_CHANGED,
    error_codes.RATE_LIMITED,
    error_codes.READ_ONLY,
    error_codes.QUOTA_EXCEEDED,
    error_codes.SERVER_STOPPING,
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


def build_paths(limits: ApiLimits) -> Schema:
    """The paths of the chat door."""
    chat = "/v1/chats/{chat_id}"
    member = [
        _chat_parameter(),
        _path_parameter("user_id", {**_USER_ID, "description": "Who: `user:…`, or `client:…` of an API key."}),
    ]
    return {
        "/v1/chat": {"get": _websocket_operation()},
        "/v1/chats": {"post": _create_operation(limits), "get": _chats_operation(limits)},
        chat: {"get": _members_operation("getChat", "Chat", "Read a chat and its members", limits)},
        f"{chat}/members/{{user_id}}": {
            "put": {**_add_member_operation(limits), "parameters": member},
            "delete": {**_remove_member_operation(), "parameters": member},
        },
        f"{chat}/messages": {"get": _history_operation(limits), "post": _send_operation(limits)},
        f"{chat}/delivery": {
            "get": _members_operation("getDelivery", "Delivery", "Read how far each member is", limits)
        },
        f"{chat}/ack": {"post": _ack_operation(limits)},
    }


def _websocket_operation() -> Schema:
    about = (
        "A WebSocket (docs/chat.md): the first frame says who has come, then messages are sent, synced, acknowledged "
        "and delivered live. A plain request gets 426."
    )
    upgrade = json_response("It is no WebSocket.", schema_ref(_ERROR_SCHEMA))
    return {
        "operationId": "connectChat",
        "tags": ["chat"],
        "summary": "Chat over a WebSocket",
        "description": about,
        "responses": {
            "101": {"description": "A WebSocket."},
            "426": upgrade,
            **{str(status): error_response(status, _ERROR_SCHEMA) for status in (403, 500, 503)},
        },
    }


def _create_operation(limits: ApiLimits) -> Schema:
    about = (
        "The caller becomes its first member and its owner. The owners of an existing chat can add members with this; "
        "other callers get 403. If two callers create it at once, one of them does."
    )
    told = schema_response("Chat", "It was there, and has these members too.")
    described = _chat_operation("createChat", "Make a chat", about, told, (*_WRITE_ERRORS, 507))
    described["responses"]["201"] = schema_response("Chat", "It was made.")
    return {**described, "requestBody": _request_body("NewChat", limits)}


def _chats_operation(limits: ApiLimits) -> Schema:
    after = {"anyOf": [_CHAT_ID, {"type": "string", "maxLength": 0}], "description": "`next_after` of the page before."}
    described = _chat_operation(
        "listChats", "List one's chats", "By their ids.", schema_response("Chats", "A page."), _READ_ERRORS
    )
    return {**described, "parameters": [parameter("after", after), _limit_parameter(limits)]}


def _members_operation(name: str, schema: str, summary: str, limits: ApiLimits) -> Schema:
    after = {"anyOf": [_USER_ID, {"type": "string", "maxLength": 0}], "description": "`next_after` of the page before."}
    described = _chat_operation(
        name, summary, "Members by their ids, in pages.", schema_response(schema, "A page."), _READ_ERRORS
    )
    return {**described, "parameters": [_chat_parameter(), parameter("after", after), _limit_parameter(limits)]}


def _add_member_operation(limits: ApiLimits) -> Schema:
    about = (
        "For owners. Without a body, or without `role`, a new member is added as a plain member, and the role of an "
        "existing member stays. The last owner cannot become a plain member: 409. With `only_if_member` a user that is "
        "not a member is refused with 403 instead of added. A repeated request changes nothing."
    )
    told = schema_response("Member", "Done.")
    described = _chat_operation("addMember", "Add a member, or set its role", about, told, (*_WRITE_ERRORS, 507))
    described["responses"]["409"] = error_response(409, _ERROR_SCHEMA)
    return {**described, "requestBody": {**_request_body("NewMember", limits), "required": False}}


def _remove_member_operation() -> Schema:
    about = (
        "For owners; every member may remove itself. When the last owner leaves, the member that joined first becomes "
        "an owner. A repeated request changes nothing."
    )
    return _chat_operation(
        "removeMember", "Remove a member, or oneself", about, schema_response("Member", "Done."), _READ_ERRORS
    )


def _history_operation(limits: ApiLimits) -> Schema:
    about = (
        "Without `after` and `before` the newest messages. Messages of a page are in ascending order. Forwards go on "
        "with `after` = `next_sequence`, backwards with `before` = `next_before`, while `has_more`."
    )
    after = integer_schema("Messages behind this sequence.")
    before = integer_schema("Messages right before this sequence. Not beside `after`.")
    epoch = {**TEXT_SCHEMA, "description": "That of the history which the cursor is of. Another one gets 409."}
    described = _chat_operation(
        "getMessages", "Read messages", about, schema_response("Batch", "A page."), (*_READ_ERRORS, 409)
    )
    queries = [parameter(name, schema) for name, schema in (("after", after), ("before", before), ("epoch", epoch))]
    return {**described, "parameters": [_chat_parameter(), *queries, _limit_parameter(limits)]}


def _send_operation(limits: ApiLimits) -> Schema:
    about = (
        "After any failure send it again under its id: what is known gets the answer that it had, and nothing is "
        "written. Another content, content type or sender under the same id is told (`content_mismatch`)."
    )
    told = schema_response("Sent", "It is known, and this is its answer.")
    described = _chat_operation("sendMessage", "Send a message", about, told, (*_WRITE_ERRORS, 507))
    described["responses"]["201"] = schema_response("Sent", "It is in the chat, durably.")
    return {**described, "parameters": [_chat_parameter()], "requestBody": _request_body("NewMessage", limits)}


def _ack_operation(limits: ApiLimits) -> Schema:
    about = "Says that all up to a sequence was received. It never moves back; beyond the chat's end it gets 409."
    told = schema_response("Acknowledged", "It is kept.")
    described = _chat_operation("acknowledge", "Acknowledge messages", about, told, (*_WRITE_ERRORS, 409))
    return {**described, "parameters": [_chat_parameter()], "requestBody": _request_body("Acknowledgement", limits)}


def _chat_operation(name: str, summary: str, description: str, response: Schema, errors: Sequence[int]) -> Schema:
    return operation(name, summary, description, response, errors, tag="chat", error_schema=_ERROR_SCHEMA)


def _request_body(schema: str, limits: ApiLimits) -> Schema:
    about = f"At most {limits.frame_bytes_max} bytes."
    return {"required": True, "description": about, "content": {JSON: {"schema": schema_ref(schema)}}}


def _chat_parameter() -> Schema:
    return _path_parameter("chat_id", {**_CHAT_ID, "description": "Which chat. In NFC."})


def _path_parameter(name: str, schema: Schema) -> Schema:
    return {**parameter(name, dict(schema)), "in": "path", "required": True}


def _limit_parameter(limits: ApiLimits) -> Schema:
    schema = {
        **integer_schema(),
        "default": min(limits.page_messages_default, limits.page_messages_max),
        "description": f"How many at most. 0 is taken as 1, more than {limits.page_messages_max} as that.",
    }
    return parameter("limit", schema)


# --- schemas -----------------------------------------------------------------------------------------------


def build_schemas(limits: ApiLimits) -> Schema:
    """What is sent and answered there."""
    members = {"type": "array", "maxItems": limits.page_messages_max, "items": _member_schema()}
    mine = object_schema(
        chat_id=TEXT_SCHEMA, last_sequence=integer_schema(), last_acked_sequence=integer_schema(), role=_ROLE
    )
    chats = object_schema(chats={"type": "array", "maxItems": limits.page_messages_max, "items": mine})
    return {
        "NewChat": _new_chat_schema(limits),
        "Chat": _with_optional(
            object_schema(chat_id=TEXT_SCHEMA, last_sequence=integer_schema(), members=members), next_after=TEXT_SCHEMA
        ),
        "Chats": _with_optional(chats, next_after=TEXT_SCHEMA),
        "Delivery": _with_optional(object_schema(chat_id=TEXT_SCHEMA, members=members), next_after=TEXT_SCHEMA),
        "NewMember": {
            "type": "object",
            "properties": {
                "role": {**_ROLE, "enum": [*_ROLE["enum"], None]},
                "only_if_member": {"type": ["boolean", "null"]},
            },
        },
        "Member": _with_optional(
            object_schema(chat_id=TEXT_SCHEMA, user_id=TEXT_SCHEMA, present={"type": "boolean"}), role=_ROLE
        ),
        "NewMessage": _new_message_schema(limits),
        "Sent": _with_optional(
            object_schema(
                client_message_id={"type": "string", "pattern": _UUID4, "description": "As it was sent."},
                chat_id=TEXT_SCHEMA,
                message_id=_MESSAGE_ID,
                sequence=positive_integer_schema(),
                created_at=_TIME,
                duplicate={"type": "boolean"},
            ),
            content_mismatch={"const": True},
            erased={"const": True},
        ),
        "Message": _message_schema(),
        "Batch": _with_optional(
            object_schema(
                chat_id=TEXT_SCHEMA,
                messages={"type": "array", "maxItems": limits.page_messages_max, "items": schema_ref("Message")},
                has_more={"type": "boolean"},
                next_sequence=integer_schema("Read on after this."),
                last_sequence=integer_schema("The newest of the chat."),
            ),
            next_before=integer_schema("Read on before this."),
            cursor_ahead={"const": True, "description": "The cursor is beyond the chat's end."},
        ),
        "Acknowledgement": _acknowledgement_schema(),
        "Acknowledged": object_schema(chat_id=TEXT_SCHEMA, changed={"type": "boolean"}),
        _ERROR_SCHEMA: object_schema(error=_error_schema()),
    }


def _with_optional(schema: Schema, **more: Schema) -> Schema:
    """The same with members that are not always there."""
    return {**schema, "properties": {**schema["properties"], **more}}


def _member_schema() -> Schema:
    return object_schema(
        user_id=TEXT_SCHEMA, last_acked_sequence=integer_schema("All up to this was received."), role=_ROLE
    )


def _new_chat_schema(limits: ApiLimits) -> Schema:
    members = {"type": ["array", "null"], "maxItems": limits.request_members_max, "items": _USER_ID}
    chat_id = {**_CHAT_ID, "type": ["string", "null"], "description": "Without it the server makes one. In NFC."}
    return {"type": "object", "properties": {"chat_id": chat_id, "members": members}}


def _new_message_schema(limits: ApiLimits) -> Schema:
    content = {"type": "string", "minLength": 1, "maxLength": limits.message_bytes_max, "pattern": NO_NUL}
    content_type = {
        "type": ["string", "null"],
        "maxLength": CONTENT_TYPE_CHARACTERS_MAX,
        "pattern": "^[!-.0-~]+/[ -~]+$",
        "description": "text/plain if it is not said.",
    }
    schema = object_schema(
        client_message_id={"type": "string", "pattern": _UUID4, "description": "A UUID of version 4, the sender's."},
        content={**content, "description": f"1 to {limits.message_bytes_max} bytes of text."},
    )
    return _with_optional(schema, content_type=content_type)


def _message_schema() -> Schema:
    schema = object_schema(
        message_id=_MESSAGE_ID,
        chat_id=TEXT_SCHEMA,
        sequence=positive_integer_schema(),
        sender_id=TEXT_SCHEMA,
        client_message_id={"type": "string", "pattern": _UUID4},
        content={"type": ["string", "null"], "description": "null if it was erased."},
        content_type={"type": ["string", "null"]},
        created_at=_TIME,
    )
    return _with_optional(schema, erased={"const": True})


def _acknowledgement_schema() -> Schema:
    older = object_schema(last_acked_seq=integer_schema("The same under an older name."))
    return {
        "anyOf": [
            object_schema(last_acked_sequence=integer_schema("All up to this was received.")),
            {**older, "not": {"required": ["last_acked_sequence"]}},
        ]
    }


def _error_schema() -> Schema:
    more: dict[str, Any] = {
        "field": {**TEXT_SCHEMA, "description": "What is wrong."},
        **QUOTA_PROPERTIES,
        "limit": integer_schema("What it may be at most."),
        "last_sequence": integer_schema("The newest of the chat."),
        "epoch": {**TEXT_SCHEMA, "description": "The log's, where the reader's is another."},
        "retry_after_ms": integer_schema("When to try again."),
    }
    schema = object_schema(code={"enum": [code.upper() for code in _ERROR_CODES]}, message=TEXT_SCHEMA)
    return {**_with_optional(schema, **more), "additionalProperties": False}
