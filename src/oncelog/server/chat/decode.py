"""Decoders of the Chat API: values, or an error that names the wrong field.

Members that have no meaning are ignored (CO-20). One that is there twice is an error: nobody could say which is meant.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

import msgspec
from msgspec import Struct

from oncelog.core.builders import parse_uuid
from oncelog.core.canonical import INTEGER_MAX, JsonValue, is_storable, nfc
from oncelog.core.chat import (
    CHAT_ID_CHARACTERS_MAX,
    CONTENT_TYPE_CHARACTERS_MAX,
    CONTENT_TYPE_DEFAULT,
    chat_scope,
    encode_message,
    is_message_key,
)
from oncelog.core.identity import CONTROL_CHARACTER
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.values import Role
from oncelog.error_codes import INVALID_MESSAGE, MESSAGE_TOO_LARGE
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError, MalformedMessageError
from oncelog.server.json_fields import (
    bad_request,
    decode_integer,
    decode_object,
    get_required,
    get_text,
    get_token,
    parse_json,
    type_error,
)

REQUEST_ID_CHARACTERS_MAX: Final = 128
DEVICE_ID_CHARACTERS_MAX: Final = 128
_CONTENT_TYPE: Final = re.compile(r"[!-.0-~]+/[ -~]+", re.ASCII)
_ROLES: Final = [role.value for role in Role]
_ECHOED_FIELDS: Final = ("request_id", "client_message_id", "chat_id")
_SEQUENCE_TYPE: Final = "a whole number from 0 to 2^53−1"


class Connect(Struct, frozen=True):
    """Who a connection says it is."""

    token: str | None
    device_id: str
    is_live: bool
    """Whether it wants to be sent what happens in its chats."""
    request_id: str | None

    def __repr__(self) -> str:
        return f"Connect({self.device_id!r})"


class Send(Struct, frozen=True, gc=False):
    """A message that is to be sent."""

    client_message_id: str
    """As it was written."""
    chat_id: str
    scope: str
    key: bytes
    body: bytes
    request_id: str | None


class SyncRequest(Struct, frozen=True):
    """A page that is asked for."""

    chat_id: str
    scope: str
    after: int
    limit: int | None
    epoch: str | None
    request_id: str | None


class Ack(Struct, frozen=True, gc=False):
    """All up to a sequence has been received."""

    chat_id: str
    scope: str
    sequence: int
    request_id: str | None


class Ping(Struct, frozen=True):
    """Somebody wants to know whether we are there."""

    request_id: str | None


Frame = Connect | Send | SyncRequest | Ack | Ping


# --- frames -------------------------------------------------------------------------------------------


def decode_frame(data: bytes, bytes_max: int) -> Frame:
    """A text frame; `bytes_max` is the limit of a message's content. Raises MalformedMessageError."""
    request_ids: dict[str, str] = {}
    try:
        members = decode_object(parse_json(data), "$")
        for name in _ECHOED_FIELDS:
            value = members.get(name)
            if type(value) is str and len(value) <= CHAT_ID_CHARACTERS_MAX and value.isprintable():
                request_ids[name] = value
        return _decode_members(members, bytes_max)
    except ApiError as error:
        raise MalformedMessageError(error, request_ids) from None


def _decode_members(members: Mapping[str, JsonValue], bytes_max: int) -> Frame:
    request_id = _get_request_id(members)
    kind = get_text(members, "type", "$")
    match kind:
        case "connect":
            return _decode_connect(members, request_id)
        case "send_message":
            return decode_send(members, get_root_text(members, "chat_id"), bytes_max, request_id)
        case "sync_request":
            return _decode_sync_request(members, request_id)
        case "ack":
            chat_id = get_root_text(members, "chat_id")
            return Ack(chat_id, decode_chat_id(chat_id), get_acked_sequence(members), request_id)
        case "ping":
            return Ping(request_id)
    raise bad_request("$.type", "must be connect, send_message, sync_request, ack or ping")


def _get_request_id(members: Mapping[str, JsonValue]) -> str | None:
    value = members.get("request_id")
    if value is None:
        return None
    if type(value) is not str or len(value) > REQUEST_ID_CHARACTERS_MAX or not is_storable(value):
        raise bad_request("$.request_id", f"must be a string of at most {REQUEST_ID_CHARACTERS_MAX} characters")
    return value


def _decode_connect(members: Mapping[str, JsonValue], request_id: str | None) -> Connect:
    device_id = members.get("device_id", "")
    if type(device_id) is not str or len(device_id) > DEVICE_ID_CHARACTERS_MAX or CONTROL_CHARACTER.search(device_id):
        raise bad_request(
            "$.device_id", f"must be a string of at most {DEVICE_ID_CHARACTERS_MAX} characters, none of control"
        )
    is_live = members.get("live", True)
    if type(is_live) is not bool:
        raise type_error("$.live", is_live, "true or false")
    return Connect(get_token(members, "$"), device_id, is_live, request_id)


def _decode_sync_request(members: Mapping[str, JsonValue], request_id: str | None) -> SyncRequest:
    chat_id = get_root_text(members, "chat_id")
    limit = members.get("limit")
    epoch = members.get("epoch")
    if epoch is not None and type(epoch) is not str:
        raise type_error("$.epoch", epoch, "a string")
    return SyncRequest(
        chat_id,
        decode_chat_id(chat_id),
        get_acked_sequence(members),
        None if limit is None else decode_integer(limit, "$.limit", "a whole number"),
        epoch,
        request_id,
    )


def get_acked_sequence(members: Mapping[str, JsonValue]) -> int:
    """Up to where somebody has received a chat; the older name of it means the same. Raises ApiError."""
    name = "last_acked_seq" if "last_acked_sequence" not in members and "last_acked_seq" in members else _ACKED_FIELD
    number = decode_integer(get_required(members, name, "$"), f"$.{name}", _SEQUENCE_TYPE)
    if not 0 <= number <= INTEGER_MAX:
        raise bad_request(f"$.{name}", f"must be {_SEQUENCE_TYPE}, not {number}")
    return number


_ACKED_FIELD: Final = "last_acked_sequence"

# --- messages -----------------------------------------------------------------------------------------


def decode_send(members: Mapping[str, JsonValue], chat_id: str, bytes_max: int, request_id: str | None) -> Send:
    """A message. Raises ApiError: what is wrong with it is an invalid message, whatever it is (CH-3, CH-10)."""
    try:
        scope = decode_chat_id(chat_id)
        client_message_id = get_root_text(members, "client_message_id")
        try:
            key = parse_uuid(client_message_id, "$.client_message_id")
        except CanonicalError as error:
            raise bad_request(error.path, error.reason) from None
        if not is_message_key(key):
            raise bad_request("$.client_message_id", "must be a UUID of version 4")
        content = get_root_text(members, "content")
        content_type = members.get("content_type")
        if content_type is None:
            content_type = CONTENT_TYPE_DEFAULT
        elif not _is_content_type(content_type):
            characters_max = CONTENT_TYPE_CHARACTERS_MAX
            raise bad_request(
                "$.content_type", f"must be a media type of at most {characters_max} characters, like text/plain"
            )
        size = _check_content(content)
    except ApiError as error:
        raise ApiError(INVALID_MESSAGE, error.message, **error.details) from None
    if size > bytes_max:
        message = f"$.content: must have at most {bytes_max} bytes, not {size}"
        raise ApiError(MESSAGE_TOO_LARGE, message, field="$.content", limit=bytes_max)
    return Send(client_message_id, chat_id, scope, key, encode_message(content, content_type), request_id)


def _check_content(content: str) -> int:
    if not content:
        raise bad_request("$.content", "must not be empty")
    if not is_storable(content):
        raise bad_request("$.content", "must not have lone surrogates or U+0000")
    return len(content.encode())


def _is_content_type(value: JsonValue) -> bool:
    if type(value) is not str or len(value) > CONTENT_TYPE_CHARACTERS_MAX:
        return False
    return _CONTENT_TYPE.fullmatch(value) is not None


def get_root_text(members: Mapping[str, JsonValue], name: str) -> str:
    """A member that must be a string. Raises ApiError."""
    return get_text(members, name, "$")


@lru_cache(maxsize=8192)  # the same come again and again
def decode_chat_id(chat_id: str, path: str = "$.chat_id") -> str:
    """The stream of a chat. Raises ApiError for what no chat is called."""
    if not 1 <= len(chat_id) <= CHAT_ID_CHARACTERS_MAX:
        raise bad_request(path, f"must have 1 to {CHAT_ID_CHARACTERS_MAX} characters, not {len(chat_id)}")
    if "/" in chat_id or CONTROL_CHARACTER.search(chat_id) or not is_storable(chat_id):
        raise bad_request(path, "must have no slash and no control characters")
    if chat_id in (".", ".."):  # a client makes another address of a path with one of them in it
        raise bad_request(path, "must not be . or ..")
    if not chat_id.isascii() and nfc(chat_id) != chat_id:
        # Grants are compared in NFC: two spellings of a name would be two chats with the same rights.
        raise bad_request(path, "must be in NFC")
    return chat_scope(chat_id)


def decode_message_key(client_message_id: str) -> bytes:
    """Return the key of a message by its sender's id, in a path. Raises ApiError."""
    try:
        key = parse_uuid(client_message_id)
    except CanonicalError:
        key = b""
    if not key or not is_message_key(key):
        raise bad_request("message_id", "must be msg_ and 26 hexadecimal digits, or a UUID of version 4")
    return key


def decode_user_id(user_id: JsonValue, path: str) -> str:
    """Who is to be a member: an actor in full. Raises ApiError."""
    if type(user_id) is not str:
        raise type_error(path, user_id, "a string")
    kind, _, name = user_id.partition(":")
    if kind not in ("user", "client") or not name:
        raise bad_request(path, "must be user:… (of a token) or client:… (of an API key)")
    if len(user_id) > NAME_CHARACTERS_MAX or not is_storable(user_id):
        raise bad_request(path, f"must have at most {NAME_CHARACTERS_MAX} characters, and not U+0000")
    return user_id


def decode_role(value: JsonValue) -> Role | None:
    """Return the role that a member is to get; None if the request names none. Raises ApiError."""
    if value is None:
        return None
    if value not in _ROLES:
        raise bad_request("$.role", f"must be one of {', '.join(map(repr, _ROLES))}, not {value!r:.100}")
    return Role(value)


def decode_only_if_member(value: JsonValue) -> bool:
    """Return whether a user that is not a member is refused instead of added. Raises ApiError."""
    if value is not None and type(value) is not bool:
        raise type_error("$.only_if_member", value, "true or false")
    return value is True


# --- the quick way ------------------------------------------------------------------------------------


class _FastSend(Struct, gc=False):
    type: Literal["send_message"]
    client_message_id: str
    chat_id: str
    content: str
    content_type: str | None = None
    request_id: str | None = None


_decode_fast_send: Final = msgspec.json.Decoder(_FastSend).decode
_FAST_COLONS: Final = 4
"""Of the members type, client_message_id, chat_id and content."""


def decode_fast(data: bytes, bytes_max: int) -> Send | None:
    """A plain message, or None: then the long way is to be taken, which gives the same, or says what is wrong.

    It is plain if nothing in it is escaped: then a member that is unknown or there twice makes the number of colons
    another one. Most frames of a busy server are plain messages.
    """
    if b"\\" in data:
        return None
    try:
        found = _decode_fast_send(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    content, chat_id, request_id = found.content, found.chat_id, found.request_id
    colons = _FAST_COLONS + content.count(":") + chat_id.count(":")
    if found.content_type is not None:
        return None
    if request_id is not None:
        if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
            return None
        colons += 1 + request_id.count(":")
    if colons != data.count(b":") or not content or len(content.encode()) > bytes_max:
        return None
    try:
        key = parse_uuid(found.client_message_id)
        scope = decode_chat_id(chat_id)
    except (CanonicalError, ApiError):
        return None
    if not is_message_key(key):
        return None
    return Send(found.client_message_id, chat_id, scope, key, encode_message(content, CONTENT_TYPE_DEFAULT), request_id)
