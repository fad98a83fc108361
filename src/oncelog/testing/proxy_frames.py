"""Splits WebSocket byte streams into frames (RFC 6455), without I/O."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

REQUEST: Final = b"GET "
"""First bytes that a WebSocket client sends."""
ANSWER: Final = b"HTTP/1.1 101"
"""First bytes that a WebSocket server sends. Any other answer refuses the upgrade."""

HEAD_BYTES_MAX: Final = 65_536
"""Maximum size of a head. Longer heads are treated as plain bytes, so that they are not buffered."""

_HEAD_END: Final = b"\r\n\r\n"
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[ \t]*websocket[ \t]*\r\n", re.IGNORECASE)

_FIN: Final = 0x80
_RESERVED: Final = 0x70
_OPCODE: Final = 0x0F
_MASKED: Final = 0x80
_LENGTH: Final = 0x7F
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_MASK_BYTES: Final = 4

_CONTINUATION: Final = 0x0
_TEXT: Final = 0x1
_CONTROL: Final = 0x8
"""Bit that marks the opcodes of control frames."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a fault applies to: the head of the upgrade, or a frame."""

    size: int
    """Size in bytes; for a frame, including its header."""
    is_head: bool = False
    is_whole_text: bool = False
    """Whether the frame is a whole, plain text message, so that a duplicate is the same message again.

    It is False for control frames, parts of messages and extension frames (with a reserved bit): a duplicated
    compressed frame would change the state of the decompressor at the other end.
    """


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a unit. Without a unit, bytes of a connection that is not a WebSocket."""

    data: bytes
    unit: Unit | None = None
    offset: int = 0
    """Offset of the bytes in the unit."""

    @property
    def end(self) -> int:
        """Return the offset in the unit after these bytes."""
        return self.offset + len(self.data)


class _SplitterState(Enum):
    HEAD = "before the end of the head"
    FRAMES = "in frames"
    PLAIN = "no WebSocket"


class Splitter:
    """Splits one direction of a connection. The pieces, joined, are the bytes of that direction in order.

    Pass received bytes to `feed`, and call `finish` at the end. The splitter buffers at most a head or a frame header;
    frame content passes through as it arrives.
    """

    def __init__(self, opening: bytes) -> None:
        self._opening = opening
        self._state = _SplitterState.HEAD
        self._buffer = bytearray()
        self._unit: Unit | None = None
        self._offset = 0
        self._is_fragmented = False

    @property
    def is_plain(self) -> bool:
        """Return whether the connection is known not to be a WebSocket."""
        return self._state is _SplitterState.PLAIN

    def switch_to_plain(self) -> None:
        """Treat all bytes as plain, because the other direction is not a WebSocket."""
        self._state = _SplitterState.PLAIN

    def finish(self) -> list[Piece]:
        """Return the buffered bytes at the end of the stream."""
        self.switch_to_plain()
        return self.feed(b"")

    def feed(self, data: bytes) -> list[Piece]:
        """Return the pieces that are complete."""
        self._buffer += data
        pieces = []
        while piece := self._next_piece():
            pieces.append(piece)
        return pieces

    def _next_piece(self) -> Piece | None:
        if self._state is _SplitterState.HEAD:
            head = self._parse_head()
            if head is not None:
                return head
        if self._state is _SplitterState.HEAD or not self._buffer:
            return None
        if self._state is _SplitterState.PLAIN:
            return Piece(self._take_bytes(len(self._buffer)))
        if self._unit is None:
            self._unit = self._parse_frame()
            self._offset = 0
        return None if self._unit is None else self._take_piece(self._unit)

    def _parse_head(self) -> Piece | None:
        """Return the head once it is complete. Buffers bytes only while they can be the head of an upgrade."""
        begins_well = self._buffer.startswith(self._opening[: len(self._buffer)])
        end = self._buffer.find(_HEAD_END, 0, HEAD_BYTES_MAX)
        if begins_well and end < 0 and len(self._buffer) < HEAD_BYTES_MAX:
            return None
        size = end + len(_HEAD_END)
        if not begins_well or end < 0 or not _UPGRADE.search(self._buffer, 0, size):
            self._state = _SplitterState.PLAIN
            return None
        self._state = _SplitterState.FRAMES
        return Piece(self._take_bytes(size), Unit(size, is_head=True))

    def _parse_frame(self) -> Unit | None:
        """Return the frame that starts here, once its header is complete."""
        if len(self._buffer) < 2:
            return None
        first, second = self._buffer[0], self._buffer[1]
        length = second & _LENGTH
        header = 2 + {_LENGTH_16: 2, _LENGTH_64: 8}.get(length, 0)
        if len(self._buffer) < header:
            return None
        if header > 2:
            length = int.from_bytes(self._buffer[2:header], "big")
        if second & _MASKED:
            header += _MASK_BYTES  # the mask is treated as content
        opcode, is_final = first & _OPCODE, bool(first & _FIN)
        is_whole_text = opcode == _TEXT and is_final and not first & _RESERVED and not self._is_fragmented
        if not opcode & _CONTROL:  # control frames may come between the parts of a message
            self._is_fragmented = not is_final
        return Unit(header + length, is_whole_text=is_whole_text)

    def _take_piece(self, unit: Unit) -> Piece:
        offset = self._offset
        data = self._take_bytes(min(len(self._buffer), unit.size - offset))
        self._offset += len(data)
        if self._offset == unit.size:
            self._unit = None
        return Piece(data, unit, offset)

    def _take_bytes(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken
