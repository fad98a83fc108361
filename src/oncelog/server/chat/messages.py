"""Messages that the Chat API receives over WebSockets and HTTP, with their fields and decoders.

A repeated member is an error, because the client and the server might each use a different occurrence.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from oncelog.core.builders import parse_uuid
from oncelog.core.canonical import JsonValue, is_storable, nfc
from oncelog.core.chat import (
    CHAT_ID_CHARACTERS_MAX,
    CONTENT_TYPE_CHARACTERS_MAX,
    CONTENT_TYPE_DEFAULT,
    chat_scope,
    encode_message,
    is_message_key,
    parse_chat_scope,
)
from oncelog.core.identity import CONTROL_CHARACTER
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.core.values import Role
from oncelog.error_codes import INVALID_MESSAGE, MESSAGE_TOO_LARGE
from oncelog.errors import CanonicalError
from oncelog.server.errors import ApiError, MalformedMessageError, field_error, raise_first
from oncelog.server.limits import ApiLimits
from oncelog.server.messages import (
    NO_NUL,
    Field,
    Message,
    Schema,
    decode_array,
    decode_boolean,
    decode_integer,
    decode_number,
    decode_object,
    decode_text,
    get_text,
    integer_schema,
    new_decoder,
    parse_json,
)

REQUEST_ID_CHARACTERS_MAX: Final = 128
DEVICE_ID_CHARACTERS_MAX: Final = 128
_CONTENT_TYPE: Final = "[!-.0-~]+/[ -~]+"
_ECHOED_FIELDS: Final = ("request_id", "client_message_id", "chat_id")
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
ROLE: Final[Schema] = {"enum": [role.value for role in Role]}
UUID4: Final[Schema] = {
    "type": "string",
    "pattern": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$",
}


class Connect(Struct, frozen=True):
    """Authenticates a connection. The repr does not show the token."""

    token: str | None
    device_id: str
    is_live: bool
    """Whether the connection receives messages and membership changes live."""
    request_id: str | None = None

    def __repr__(self) -> str:
        return f"Connect({self.device_id!r})"


class _OfChat(Struct, frozen=True):
    """A message about one chat."""

    scope: str

    @property
    def chat_id(self) -> str:
        """Id of the chat."""
        return parse_chat_scope(self.scope)


class Send(_OfChat, frozen=True, gc=False):
    """Sends a chat message."""

    client_message_id: str
    """The id as the client sent it."""
    key: bytes
    body: bytes
    request_id: str | None = None
    traceparent: str = ""
    """Trace context of a message over a WebSocket. An invalid one is ignored."""


class SyncRequest(_OfChat, frozen=True):
    """Requests a page of messages."""

    after: int
    limit: int | None
    epoch: str | None
    request_id: str | None = None


class Ack(_OfChat, frozen=True, gc=False):
    """Acknowledges all messages of a chat up to a sequence."""

    sequence: int
    request_id: str | None = None


class Ping(Struct, frozen=True):
    """Checks that the server responds."""

    request_id: str | None = None


Frame = Connect | Send | SyncRequest | Ack | Ping


# --- values -------------------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def decode_chat_id(chat_id: str, path: str) -> str:
    """Return the stream of a chat. Raises ApiError for an invalid chat id. Cached, because ids repeat."""
    if not 1 <= len(chat_id) <= CHAT_ID_CHARACTERS_MAX:
        raise field_error(path, f"must have 1 to {CHAT_ID_CHARACTERS_MAX} characters, not {len(chat_id)}")
    is_plain = "/" not in chat_id and CONTROL_CHARACTER.search(chat_id) is None and is_storable(chat_id)
    raise_first(
        partial(field_error, path),
        (not is_plain, "must not contain a slash or control characters"),
        (chat_id in (".", ".."), "must not be . or .."),  # HTTP clients remove such segments from paths
        # Grants are compared in NFC, so two spellings of a name would be two chats covered by the same grant.
        (not chat_id.isascii() and nfc(chat_id) != chat_id, "must be in NFC"),
    )
    return chat_scope(chat_id)


def decode_user_id(value: JsonValue, path: str) -> str:
    """Return the actor of a member. Raises ApiError for an invalid user id."""
    user_id = decode_text(value, path)
    kind, _, name = user_id.partition(":")
    is_named = kind in ("user", "client") and name != ""
    is_valid = len(user_id) <= NAME_CHARACTERS_MAX and is_storable(user_id)
    raise_first(
        partial(field_error, path),
        (not is_named, "must be user:… (of a token) or client:… (of an API key)"),
        (not is_valid, f"must have at most {NAME_CHARACTERS_MAX} characters and must not contain U+0000"),
    )
    return user_id


def decode_message_key(client_message_id: str) -> bytes:
    """Return the key for a `client_message_id` in a path. Raises ApiError if the id is invalid."""
    try:
        key = parse_uuid(client_message_id)
    except CanonicalError:
        key = b""
    if not key or not is_message_key(key):
        raise field_error("message_id", "must be msg_ followed by 26 hexadecimal digits, or a version 4 UUID")
    return key


def _decode_chat(value: JsonValue, path: str) -> str:
    return decode_chat_id(decode_text(value, path), path)


def _decode_client_message_id(value: JsonValue, path: str) -> tuple[str, bytes]:
    """Return the id as it was sent, and the message key."""
    text = decode_text(value, path)
    key = parse_uuid(text, path)
    if not is_message_key(key):
        raise field_error(path, "must be a version 4 UUID")
    return text, key


def _new_text_decoder(characters_max: int, is_valid: Callable[[str], object], reason: str) -> Callable[[Any, str], Any]:
    return new_decoder(lambda value: type(value) is str and len(value) <= characters_max and is_valid(value), reason)


def _decode_role(value: JsonValue, path: str) -> Role:
    if value not in ROLE["enum"]:
        raise field_error(path, f"must be one of {', '.join(map(repr, ROLE['enum']))}, not {value!r:.100}")
    return Role(value)


# --- fields -------------------------------------------------------------------------------------------

_REQUEST_ID: Final = Message(
    lambda value: value,
    Field(
        name="request_id",
        decode=_new_text_decoder(
            REQUEST_ID_CHARACTERS_MAX,
            is_storable,
            f"must be a string of at most {REQUEST_ID_CHARACTERS_MAX} characters",
        ),
    ),
)
_CHAT: Final = Field(name="chat_id", decode=_decode_chat, is_required=True)
_CLIENT_MESSAGE_ID: Final = Field(
    name="client_message_id",
    decode=_decode_client_message_id,
    schema={**UUID4, "description": "A version 4 UUID that the sender chooses."},
    is_required=True,
)
_CONTENT_TYPE_FIELD: Final = Field(
    name="content_type",
    decode=_new_text_decoder(
        CONTENT_TYPE_CHARACTERS_MAX,
        re.compile(_CONTENT_TYPE).fullmatch,
        f"must be a media type of at most {CONTENT_TYPE_CHARACTERS_MAX} characters, like text/plain",
    ),
    schema={
        "type": "string",
        "maxLength": CONTENT_TYPE_CHARACTERS_MAX,
        "pattern": f"^{_CONTENT_TYPE}$",
        "description": "Default: text/plain.",
    },
    default=CONTENT_TYPE_DEFAULT,
)
_ACKED: Final = Field(
    name="last_acked_sequence",
    decode=decode_number,
    schema=integer_schema("The client has received all messages up to this sequence."),
    is_required=True,
    previous_name="last_acked_seq",
)
_CONNECT: Final = Message(
    Connect,
    Field(name="token", decode=decode_text),
    Field(
        name="device_id",
        decode=_new_text_decoder(
            DEVICE_ID_CHARACTERS_MAX,
            lambda text: not CONTROL_CHARACTER.search(text),
            f"must be a string of at most {DEVICE_ID_CHARACTERS_MAX} characters without control characters",
        ),
        default="",
        is_nullable=False,
    ),
    Field(name="live", decode=decode_boolean, default=True, is_nullable=False),
)


class ChatMessages:
    """The declarations of a server's messages, with its limits."""

    new_member: Final = Message(
        lambda *values: values,
        Field(name="role", decode=_decode_role, schema=ROLE),
        Field(name="only_if_member", decode=decode_boolean, schema={"type": "boolean"}, default=False),
    )
    """The role (None keeps the current one), and whether to refuse a user that is not a member instead of adding it."""
    acknowledgement: Final = Message(int, _ACKED)

    def __init__(self, limits: ApiLimits) -> None:
        self._bytes_max = limits.message_bytes_max
        self._members_max = limits.request_members_max
        content_schema = {"type": "string", "minLength": 1, "maxLength": self._bytes_max, "pattern": NO_NUL}
        content = Field(
            name="content",
            decode=self._decode_content,
            schema={**content_schema, "description": f"1 to {self._bytes_max} bytes of text."},
            is_required=True,
        )
        self.new_message: Message[Send] = Message(_build_send, _CLIENT_MESSAGE_ID, content, _CONTENT_TYPE_FIELD)
        self.new_chat: Message[tuple[str | None, list[str]]] = Message(
            lambda *values: values,
            Field(
                name="chat_id",
                decode=_decode_chat,
                schema={**CHAT_ID, "description": "Id of the chat, in NFC. Default: the server generates one."},
            ),
            Field(
                name="members",
                decode=self._decode_users,
                schema={"type": "array", "maxItems": self._members_max, "items": USER_ID},
                default=[],
            ),
        )
        """Stream and first members of a new chat."""
        self._frames: dict[str, Message[Any]] = {
            "connect": _CONNECT,
            "send_message": Message(_build_send, _CLIENT_MESSAGE_ID, content, _CONTENT_TYPE_FIELD, _CHAT),
            "sync_request": Message(
                SyncRequest,
                _CHAT,
                _ACKED,
                Field(name="limit", decode=decode_integer),
                Field(name="epoch", decode=decode_text),
            ),
            "ack": Message(Ack, _CHAT, _ACKED),
            "ping": Message(Ping),
        }

    def _decode_content(self, value: JsonValue, path: str) -> str:
        content = decode_text(value, path)
        raise_first(
            partial(field_error, path),
            (not content, "must not be empty"),
            (not is_storable(content), "must not contain lone surrogates or U+0000"),
        )
        size = len(content.encode())
        if size > self._bytes_max:
            message = f"{path}: must have at most {self._bytes_max} bytes, not {size}"
            raise ApiError(MESSAGE_TOO_LARGE, message, field=path, limit=self._bytes_max)
        return content

    def _decode_users(self, value: JsonValue, path: str) -> list[str]:
        users = decode_array(value, path)
        if len(users) > self._members_max:
            raise field_error(path, f"must have at most {self._members_max} entries, not {len(users)}")
        return [decode_user_id(user, f"{path}[{index}]") for index, user in enumerate(users)]

    def decode_new_message(self, body: bytes, _: object = None) -> Send:
        """Decode the body of an HTTP request that sends a message; the path contains the chat. Raises ApiError."""
        members = decode_object(parse_json(body), "$")
        with _refuse_invalid_message():
            return self.new_message.decode(members, "$", "")

    def decode_frame(self, data: bytes) -> Frame:
        """Decode a text frame. Raises MalformedMessageError."""
        request_ids: dict[str, str] = {}
        try:
            members = decode_object(parse_json(data), "$")
            for name in _ECHOED_FIELDS:
                value = members.get(name)
                if type(value) is str and len(value) <= CHAT_ID_CHARACTERS_MAX and value.isprintable():
                    request_ids[name] = value
            return self._decode_members(members)
        except ApiError as error:
            raise MalformedMessageError(error, request_ids) from None

    def _decode_members(self, members: Mapping[str, JsonValue]) -> Frame:
        request_id = _REQUEST_ID.decode(members)
        kind = get_text(members, "type", "$")
        message = self._frames.get(kind)
        if message is None:
            *others, last = self._frames
            raise field_error("$.type", f"must be {', '.join(others)} or {last}")
        is_send = kind == "send_message"
        if is_send:
            get_text(members, "chat_id", "$")  # checked first: without an id, the frame itself is malformed
        with _refuse_invalid_message() if is_send else nullcontext():
            frame: Frame = message.decode(members, "$", request_id)
        traceparent = members.get("traceparent")
        # W3C Trace Context: a receiver ignores a trace context that it cannot read.
        if type(traceparent) is str and isinstance(frame, Send):
            return replace(frame, traceparent=traceparent)
        return frame

    def decode_fast(self, data: bytes) -> Send | None:
        """Decode a plain message. Returns None for any other frame, which `decode_frame` must decode.

        A plain message has no escapes and no unknown or repeated members, which would change the number of colons. The
        result is the same as that of `decode_frame`. Most frames that a busy server receives are plain messages.
        """
        if b"\\" in data:
            return None
        try:
            found = _decode_fast_send(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        content, chat_id, request_id = found.content, found.chat_id, found.request_id
        colons = _FAST_COLONS + content.count(":") + chat_id.count(":")
        if request_id is not None:
            colons += 1 + request_id.count(":")
        if colons != data.count(b":") or len(content.encode()) > self._bytes_max:
            return None
        try:
            key = parse_uuid(found.client_message_id)
            scope = decode_chat_id(chat_id, "$.chat_id")
        except (CanonicalError, ApiError):
            return None
        if not is_message_key(key):
            return None
        return Send(scope, found.client_message_id, key, encode_message(content, CONTENT_TYPE_DEFAULT), request_id)


@contextmanager
def _refuse_invalid_message() -> Iterator[None]:
    """Translate all errors in a message to one code, except the error about its length (CH-3, CH-10)."""
    try:
        yield
    except ApiError as error:
        code = error.code if error.code == MESSAGE_TOO_LARGE else INVALID_MESSAGE
        raise ApiError(code, error.message, **error.details) from None


def _build_send(
    client_message_id: tuple[str, bytes], content: str, content_type: str, scope: str, request_id: str | None = None
) -> Send:
    return Send(scope, *client_message_id, encode_message(content, content_type), request_id)


class _FastSend(Struct, gc=False):
    type: Literal["send_message"]
    client_message_id: str
    chat_id: str
    content: Annotated[str, Meta(min_length=1)]
    request_id: Annotated[str, Meta(max_length=REQUEST_ID_CHARACTERS_MAX)] | None = None


_decode_fast_send: Final = msgspec.json.Decoder(_FastSend).decode
_FAST_COLONS: Final = 4
"""Number of colons in a plain message: one after each of the names type, client_message_id, chat_id and content."""
