"""Open unauthenticated connections that never finish: `flood_worker.py PORT CONNECTIONS BYTES SHAPE PROTOCOL`.

PROTOCOL is `plain` or `tls`. SHAPE is the part that remains unfinished after BYTES: the first frame of a WebSocket
(`frame`), the head of an HTTP request (`head`), a TLS handshake (`hello`), a TLS record after an unfinished frame
(`record`), or responses that the client does not read (`unread`). On the gRPC port: metadata (`metadata`), or the
message of a ledger call (`call`) or a health call (`health`).
The worker prints the number of connections on which it sent all data, and keeps them open until it is killed.
"""

import resource
import socket
import ssl
import sys
from contextlib import suppress
from typing import Final

from scripts import print_line
from security.http2_frames import OPENING, unfinished_call

UPGRADE: Final = (
    b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
DECLARED_BYTES: Final = 3 * 2**20
HEADER_BYTES: Final = 8000
HELLO_BYTES: Final = 131_000
"""OpenSSL refuses a ClientHello above this length as soon as it has read the length."""
RECORD_BYTES: Final = 16_000
BLOCKING_BYTES_MAX: Final = 200_000
"""The server stops reading before this limit. Sending more in blocking mode would therefore hang until the server
disconnects.
"""
GRPC_SHAPES: Final = ("metadata", "call", "health")
UNREAD_BYTES: Final = 4096
"""Kernel receive buffer for responses that the client does not read."""
TIMEOUT_S: Final = 60


def unfinished(shape: str, size: int) -> bytes:
    """Return incomplete input, which a server buffers while it waits for the remaining bytes."""
    if shape in GRPC_SHAPES:
        return unfinished_call(shape, size)
    if shape == "head":
        lines = [b"X-%d: %b\r\n" % (number, b"a" * HEADER_BYTES) for number in range(size // HEADER_BYTES + 1)]
        return (b"GET / HTTP/1.1\r\n" + b"".join(lines))[:size]
    if shape == "unread":
        request = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        return request * (size // len(request))
    if shape == "hello":
        hello = b"\x01" + HELLO_BYTES.to_bytes(3, "big") + b"\x03\x03" + bytes(size)
        parts = [hello[at : at + RECORD_BYTES] for at in range(0, size, RECORD_BYTES)]
        return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)
    return b"\x81\xff" + DECLARED_BYTES.to_bytes(8, "big") + bytes(4) + b"x" * size


def send(connection: socket.socket, shape: str, data: bytes) -> None:
    """Send all data. Raises OSError if the server refuses it."""
    if shape in ("frame", "record"):
        connection.sendall(UPGRADE)
        if b" 101 " not in connection.recv(4096):
            raise ConnectionError("no WebSocket")
    if shape in GRPC_SHAPES:
        connection.sendall(OPENING)
        if not connection.recv(4096):
            raise ConnectionError("no HTTP/2")
    if len(data) > BLOCKING_BYTES_MAX:
        connection.setblocking(False)
    connection.sendall(data)
    if shape == "record":  # Below TLS, send a record without its last byte.
        with socket.socket(fileno=connection.detach()) as raw:
            raw.sendall(b"\x17\x03\x03" + RECORD_BYTES.to_bytes(2, "big") + bytes(RECORD_BYTES - 1))
            _kept.append(raw.dup())


_kept: Final[list[socket.socket]] = []


def main(port: int, count: int, size: int, shape: str, protocol: str) -> None:
    """Open the connections one by one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shape in GRPC_SHAPES:
        context.set_alpn_protocols(["h2"])
    data, sent = unfinished(shape, size), 0
    for _ in range(count):
        connection = socket.socket()
        if shape == "unread":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
        connection.settimeout(TIMEOUT_S)
        connection.connect(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            if protocol == "tls" and shape != "hello":
                connection = context.wrap_socket(connection)
            send(connection, shape, data)
            sent += 1
        _kept.append(connection)
    print_line(sent)
    sys.stdin.read()


if __name__ == "__main__":
    main(*(int(one) for one in sys.argv[1:4]), *sys.argv[4:])  # type: ignore[arg-type]  # text and numbers
