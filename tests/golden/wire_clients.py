"""Clients that expose every detail of an answer that a program can observe: header order, chunks, frames, codes."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deadlines import WAIT_S

WEBSOCKET_KEY: Final = "Z29sZGVuIGZpbGVzICEhIQ=="
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class ConnectionLostError(Exception):
    """The server closed the connection without a close frame."""


class Connection:
    """A TCP connection to the server, with a timeout on reads."""

    def __init__(self, port: int, receive_buffer_bytes: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(WAIT_S)
        if receive_buffer_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.connect(("127.0.0.1", port))
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._fill()
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    def read_until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._fill()
        found, _, self._buffer = self._buffer.partition(end)
        return found + end

    def _fill(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            raise ConnectionLostError
        self._buffer += data

    def close(self) -> None:
        self._socket.close()


# --- HTTP --------------------------------------------------------------------------------------------------


def request_bytes(to: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{to} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_head(connection: Connection) -> str:
    """Return the status line and headers of a response, without the empty line."""
    return connection.read_until(b"\r\n\r\n")[:-4].decode().replace("\r\n", "\n")


def read_body(connection: Connection, head: str, *, is_head: bool) -> bytes:
    """Return the body of a response with chunked encoding removed."""
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\n")[1:])}
    if is_head or head.split(" ")[1] in ("101", "204", "304"):
        return b""
    if headers.get("transfer-encoding") == "chunked":
        return b"".join(iter(lambda: read_chunk(connection), b""))
    return connection.read(int(headers["content-length"]))


def read_chunk(connection: Connection) -> bytes:
    """Return the next chunk, which is empty at the end of the body."""
    size = int(connection.read_until(b"\r\n"), 16)
    return connection.read(size + 2)[:-2]


class EventStream:
    """A stream of server-sent events."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._text = ""

    def next(self) -> str | None:
        """Return the lines of the next event or comment, or None at the end of the stream."""
        while "\n\n" not in self._text:
            chunk = read_chunk(self.connection)
            if not chunk:
                return None
            self._text += chunk.decode()
        found, _, self._text = self._text.partition("\n\n")
        return found


# --- WebSocket ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A frame from the server."""

    opcode: int
    data: bytes

    def __str__(self) -> str:
        if self.opcode == CLOSE:
            return f"close {int.from_bytes(self.data[:2], 'big')} {self.data[2:].decode()!r}"
        kind = {TEXT: "", BINARY: "binary ", PING: "ping ", PONG: "pong "}[self.opcode]
        return kind + (self.data.decode() if self.opcode == TEXT else self.data.hex())


UPGRADE: Final = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": WEBSOCKET_KEY,
}


def frame_bytes(data: bytes, opcode: int = TEXT) -> bytes:
    """Return a client frame. The mask is zero, which the protocol allows."""
    size = len(data)
    if size < 126:
        head = bytes([0x80 | opcode, 0x80 | size])
    elif size < 2**16:
        head = bytes([0x80 | opcode, 0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([0x80 | opcode, 0x80 | 127]) + size.to_bytes(8, "big")
    return head + bytes(4) + data


def read_frame(connection: Connection) -> Frame:
    """Return the next frame. The server does not fragment messages."""
    first, second = connection.read(2)
    assert first & 0x80, "fragmented message"
    size = second & 0x7F
    if size >= 126:
        size = int.from_bytes(connection.read(2 if size == 126 else 8), "big")
    return Frame(first & 0x0F, connection.read(size))


def read_message(connection: Connection) -> Frame:
    """Return the next frame other than a ping; answer pings."""
    while (frame := read_frame(connection)).opcode == PING:
        connection.send(frame_bytes(frame.data, PONG))
    return frame


def json_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
