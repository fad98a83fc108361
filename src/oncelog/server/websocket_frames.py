"""WebSocket frames of a server (RFC 6455): unfragmented and unmasked, so that all readers get the same bytes."""

from functools import lru_cache
from struct import Struct as Packing
from typing import Final

import orjson

_TEXT_FRAME: Final = 0x81
_CLOSE_FRAME: Final = 0x88
_REASON_BYTES_MAX: Final = 123
_pack_length_16: Final = Packing("!BBH").pack
_pack_length_64: Final = Packing("!BBQ").pack


@lru_cache(maxsize=4096)
def encode_json_text(text: str) -> str:
    """Encode a string as JSON. Cached, because most names are encoded repeatedly."""
    return orjson.dumps(text).decode()


def encode_frame(message: bytes) -> bytes:
    """Encode a text message as a frame (5.2)."""
    return encode_frame_header(len(message)) + message


def encode_frame_header(length: int) -> bytes:
    """Encode the header of a text frame with this payload length."""
    if length < 126:
        return bytes((_TEXT_FRAME, length))
    if length < 65_536:
        return _pack_length_16(_TEXT_FRAME, 126, length)
    return _pack_length_64(_TEXT_FRAME, 127, length)


def encode_close_frame(code: int, reason: str) -> bytes:
    """Encode a close frame (5.5.1)."""
    payload = code.to_bytes(2, "big") + reason.encode()[:_REASON_BYTES_MAX]
    return bytes((_CLOSE_FRAME, len(payload))) + payload
