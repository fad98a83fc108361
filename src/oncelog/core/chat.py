"""Chat messages: their scopes, ids, bodies and submissions."""

import re
from hashlib import sha256
from typing import Final

import orjson

from oncelog.core.identity import frame
from oncelog.core.policy import CHAT
from oncelog.core.values import Rate, Receipt, Submission, decode_place, encode_place

CHAT_PREFIX: Final = "chat/"
CHAT_ID_CHARACTERS_MAX: Final = 128
CONTENT_TYPE_DEFAULT: Final = "text/plain"
CONTENT_TYPE_CHARACTERS_MAX: Final = 128
_MESSAGE_ID: Final = re.compile("msg_[0-9a-f]{26}")


def chat_scope(chat_id: str) -> str:
    """Return a chat's stream name, which is also its name in grants."""
    return CHAT_PREFIX + chat_id


def parse_chat_scope(scope: str) -> str:
    """Return the chat id in a stream name."""
    return scope.removeprefix(CHAT_PREFIX)


def is_message_key(key: bytes) -> bool:
    """Return whether 16 bytes are a UUID of version 4 (CH-3)."""
    return key[6] >> 4 == 4 and key[8] >> 6 == 2


def format_message_id(lane: int, position: int) -> str:
    """Return the id of a message. The id encodes the record's lane and position and is not stored."""
    return f"msg_{encode_place(lane, position):026x}"


def parse_message_id(text: str) -> tuple[int, int] | None:
    """Return the lane and position that a message id encodes, or None for an invalid id."""
    if _MESSAGE_ID.fullmatch(text) is None:
        return None
    return decode_place(int(text.removeprefix("msg_"), 16))


def encode_message(content: str, content_type: str) -> bytes:
    """Encode a message as its stored body. The result is canonical, because orjson escapes strings as RFC 8785 does."""
    return b'{"content":%b,"content_type":%b}' % (orjson.dumps(content), orjson.dumps(content_type))


def message_fingerprint(sender: str, body: bytes) -> bytes:
    """Return the fingerprint of a message, which depends on sender, content and content type (CH-4)."""
    return sha256(frame(b"sender", sender.encode()) + body).digest()


def message(
    scope: str,
    key: bytes,
    body: bytes,
    *,
    sender: str,
    rate: Rate | None = None,
    stream_rate: Rate | None = None,
) -> Submission[Receipt]:
    """Build a message under the policy CHAT."""
    return Submission(
        policy=CHAT,
        scope=scope,
        key=key,
        fingerprint=message_fingerprint(sender, body),
        body=body,
        actor=sender,
        rate=rate,
        stream_rate=stream_rate,
    )
