"""JSON Schemas of the Chat API."""

from typing import Final

from oncelog.core.chat import CHAT_ID_CHARACTERS_MAX, CONTENT_TYPE_CHARACTERS_MAX
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.values import Role
from oncelog.server.json_schemas import (
    NO_NUL,
    TEXT_SCHEMA,
    Schema,
    integer_schema,
    object_schema,
    page_schema,
    positive_integer_schema,
    schema_ref,
    with_optional,
)
from oncelog.server.limits import ApiLimits
from oncelog.server.lookups import outcome_schema

_UUID4: Final = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
CHAT_ID: Final[Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": CHAT_ID_CHARACTERS_MAX,
    "pattern": "^(?!\\.{1,2}$)[^/\\u0000-\\u001f\\u007f-\\u009f]*$",
}
USER_ID: Final[Schema] = {
    "type": "string",
    "maxLength": NAME_CHARACTERS_MAX,
    "pattern": "^(user|client):[^\\u0000]+$",
}
_ROLE: Final[Schema] = {"enum": [role.value for role in Role]}
_TIME: Final[Schema] = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\\.[0-9]{3}Z$"}
CLIENT_MESSAGE_ID: Final[Schema] = {"type": "string", "pattern": _UUID4}
MESSAGE_ID: Final[Schema] = {"type": "string", "pattern": "^msg_[0-9a-f]{26}$"}


def build_schemas(limits: ApiLimits) -> Schema:
    """Return the schemas of requests and answers."""
    members = {"type": "array", "maxItems": limits.page_messages_max, "items": _member_schema()}
    mine = object_schema(
        chat_id=TEXT_SCHEMA, last_sequence=integer_schema(), last_acked_sequence=integer_schema(), role=_ROLE
    )
    chats = page_schema(chats={"type": "array", "maxItems": limits.page_messages_max, "items": mine})
    return {
        "NewChat": _new_chat_schema(limits),
        "Chat": page_schema(chat_id=TEXT_SCHEMA, last_sequence=integer_schema(), members=members),
        "Chats": chats,
        "Delivery": page_schema(chat_id=TEXT_SCHEMA, members=members),
        "NewMember": {
            "type": "object",
            "properties": {
                "role": {**_ROLE, "enum": [*_ROLE["enum"], None]},
                "only_if_member": {"type": ["boolean", "null"]},
            },
        },
        "Member": with_optional(
            object_schema(chat_id=TEXT_SCHEMA, user_id=TEXT_SCHEMA, present={"type": "boolean"}), role=_ROLE
        ),
        "NewMessage": _new_message_schema(limits),
        "Sent": with_optional(
            object_schema(
                client_message_id={"type": "string", "pattern": _UUID4, "description": "As it was sent."},
                chat_id=TEXT_SCHEMA,
                message_id=MESSAGE_ID,
                sequence=positive_integer_schema(),
                created_at=_TIME,
                duplicate={"type": "boolean"},
            ),
            content_mismatch={"const": True},
            erased={"const": True},
        ),
        "Message": _message_schema(),
        "MessageOutcome": outcome_schema(message=schema_ref("Message")),
        "Batch": with_optional(
            object_schema(
                chat_id=TEXT_SCHEMA,
                messages={"type": "array", "maxItems": limits.page_messages_max, "items": schema_ref("Message")},
                has_more={"type": "boolean"},
                next_sequence={**integer_schema("As `next_after`."), "deprecated": True},
                next_after=integer_schema("Read on after this."),
                last_sequence=integer_schema("The newest of the chat."),
            ),
            next_before=integer_schema("Read on before this."),
            cursor_ahead={"const": True, "description": "The cursor is beyond the chat's end."},
        ),
        "Acknowledgement": _acknowledgement_schema(),
        "Acknowledged": object_schema(chat_id=TEXT_SCHEMA, changed={"type": "boolean"}),
    }


def _member_schema() -> Schema:
    return object_schema(
        user_id=TEXT_SCHEMA, last_acked_sequence=integer_schema("All up to this was received."), role=_ROLE
    )


def _new_chat_schema(limits: ApiLimits) -> Schema:
    members = {"type": ["array", "null"], "maxItems": limits.request_members_max, "items": USER_ID}
    chat_id = {**CHAT_ID, "type": ["string", "null"], "description": "Without it the server makes one. In NFC."}
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
    return with_optional(schema, content_type=content_type)


def _message_schema() -> Schema:
    schema = object_schema(
        message_id=MESSAGE_ID,
        chat_id=TEXT_SCHEMA,
        sequence=positive_integer_schema(),
        sender_id=TEXT_SCHEMA,
        client_message_id={"type": "string", "pattern": _UUID4},
        content={"type": ["string", "null"], "description": "null if it was erased."},
        content_type={"type": ["string", "null"]},
        created_at=_TIME,
    )
    return with_optional(schema, erased={"const": True})


def _acknowledgement_schema() -> Schema:
    older = object_schema(last_acked_seq=integer_schema("The same under an older name."))
    return {
        "anyOf": [
            object_schema(last_acked_sequence=integer_schema("All up to this was received.")),
            {**older, "not": {"required": ["last_acked_sequence"]}},
        ]
    }
