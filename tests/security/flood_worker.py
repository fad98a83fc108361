"""Opens unauthenticated WebSockets with unfinished frames: `flood_worker.py PORT CONNECTIONS BYTES`.

Prints the number of connections that the server accepted, and keeps them open until it is killed.
"""

import resource
import socket
import sys
from contextlib import suppress

from scripts import print_line

UPGRADE = (
    b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
DECLARED_BYTES = 3 * 2**20


def main(port: int, count: int, size: int) -> None:
    """Open the connections one after the other."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    unfinished = b"\x81\xff" + DECLARED_BYTES.to_bytes(8, "big") + bytes(4) + b"x" * size
    opened, accepted = [], 0
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port))
        opened.append(one)
        with suppress(ConnectionError):
            one.sendall(UPGRADE)
            if b" 101 " in one.recv(4096):
                accepted += 1
                one.setblocking(False)
                with suppress(BlockingIOError):
                    one.send(unfinished)
    print_line(accepted)
    sys.stdin.read()


main(*map(int, sys.argv[1:]))
