"""Frames of a WebSocket as a server writes them (RFC 6455): whole, not masked, so that one is the same for all."""

from functools import lru_cache
from struct import Struct as Packing
from typing import Final

import orjson

_TEXT: Final = 0x81
_CLOSE: Final = 0x88
_REASON_BYTES_MAX: Final = 123
_LENGTH_16: Final = Packing("!BBH").pack
_LENGTH_64: Final = Packing("!BBQ").pack


class CloseCode:
    """Why a connection ends."""

    GOING_AWAY: Final = 1001
    POLICY: Final = 1008
    TOO_LARGE: Final = 1009
    SERVER_ERROR: Final = 1011


@lru_cache(maxsize=4096)
def json_text(text: str) -> str:
    """A name in JSON. Most are written again and again."""
    return orjson.dumps(text).decode()


def frame(message: bytes) -> bytes:
    """A text message as a frame (5.2)."""
    return frame_head(len(message)) + message


def frame_head(length: int) -> bytes:
    """What stands before a text of so many bytes."""
    if length < 126:
        return bytes((_TEXT, length))
    if length < 65_536:
        return _LENGTH_16(_TEXT, 126, length)
    return _LENGTH_64(_TEXT, 127, length)


def close_frame(code: int, reason: str) -> bytes:
    """The end of a connection (5.5.1)."""
    payload = code.to_bytes(2, "big") + reason.encode()[:_REASON_BYTES_MAX]
    return bytes((_CLOSE, len(payload))) + payload
