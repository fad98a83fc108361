"""Listening sockets with connection limits that apply before the TLS handshake.

`loop.create_server` reports a connection only after the TLS handshake, and silently drops connections when the process
runs out of file descriptors. The listener therefore accepts sockets itself.
"""

import asyncio
import errno
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from oncelog.background_tasks import BackgroundTasks
from oncelog.server import logger
from oncelog.server.connection_limiter import Connection, ConnectionLimiter

NO_FILES_PAUSE_S: Final = 0.1
"""Pause after `accept` fails for lack of file descriptors. Meanwhile new connections wait in the kernel's queue."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

RESERVED_FILES: Final = 200
"""File descriptors reserved for everything else: the log, its database connections, listening sockets, key files."""
GRPC_SHARE: Final = 10
"""When file descriptors are scarce, gRPC gets at least one tenth of them."""

AddressLookup = Callable[[str | None], tuple[str, bool]]
"""Returns the address under which connections of a peer are counted, and whether the peer is a trusted proxy."""


def raise_open_files_limit(connections_max: int, grpc_connections_max: int) -> tuple[int, int]:
    """Raise the soft open-file limit as far as needed and allowed. Warn if it remains too low for the HTTP connections.

    Returns how many HTTP and how many gRPC connections fit. Both fit at the same time, so neither kind can use up the
    file descriptors of the other.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections_max, grpc_connections_max
    needed = connections_max + grpc_connections_max + RESERVED_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    available = max(2, soft - RESERVED_FILES)
    grpc_available = min(grpc_connections_max, max(1, available // GRPC_SHARE, available - connections_max))
    http_available = min(connections_max, available - grpc_available)
    if http_available < connections_max:
        logger.warning(
            "the open-file limit (RLIMIT_NOFILE, ulimit -n) is too low for limits.connections_max: raise it, or lower "
            "limits.connections_max",
            extra={"limit": soft, "needed": needed},
        )
    return http_available, grpc_available


class Listener:
    """Accepts connections on `sockets` until it is closed. `new_protocol` creates the protocol of each connection."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        limiter: ConnectionLimiter,
        new_protocol: Callable[[Connection], asyncio.Protocol],
        *,
        find_address: AddressLookup,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sockets = sockets
        self._limiter = limiter
        self._new_protocol = new_protocol
        self._find_address = find_address
        self._tls = tls
        self._accepts_per_turn = limiter.limits.accepts_per_turn(listeners=len(sockets), with_tls=tls is not None)
        self._loop = asyncio.get_running_loop()
        self._handshakes = BackgroundTasks()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Start accepting connections."""
        for server_socket in self.sockets:
            self._loop.add_reader(server_socket.fileno(), self._accept_batch, server_socket)

    def close(self) -> None:
        """Stop accepting connections. Existing connections remain open."""
        for server_socket in self.sockets:
            if server_socket.fileno() >= 0:
                self._loop.remove_reader(server_socket.fileno())
                server_socket.close()
        for pause in self._pauses.values():
            pause.cancel()

    def _accept_batch(self, server_socket: socket.socket) -> None:
        for _ in range(self._accepts_per_turn):
            try:
                accepted, peer = server_socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(server_socket, error)
                    return
                continue  # the client closed the connection before it was accepted
            self._start_connection(accepted, peer)

    def _pause(self, server_socket: socket.socket, error: OSError) -> None:
        self._limiter.counts.connections_refused["open_files"] += 1
        self._limiter.log_limiter.warn("cannot accept a connection: raise the open-file limit", error=error.strerror)
        self._loop.remove_reader(server_socket.fileno())
        self._pauses[server_socket] = self._loop.call_later(NO_FILES_PAUSE_S, self._resume, server_socket)

    def _resume(self, server_socket: socket.socket) -> None:
        del self._pauses[server_socket]
        self._loop.add_reader(server_socket.fileno(), self._accept_batch, server_socket)

    def _start_connection(self, accepted: socket.socket, peer: object) -> None:
        address, is_proxy = self._find_address(str(peer[0]) if isinstance(peer, tuple) else None)
        connection = self._limiter.accept(address, lambda: _shut_down(accepted), is_proxy=is_proxy)
        if connection is None:
            accepted.close()
            return
        accepted.setblocking(False)
        self._handshakes.start(self._open_connection(accepted, connection))

    async def _open_connection(self, accepted: socket.socket, connection: Connection) -> None:
        if connection.counted_address is None:  # the limiter closed it to make room for a newer one
            accepted.close()
            return
        options = {} if self._tls is None else {"ssl_handshake_timeout": self._limiter.limits.timeout_ms / 1000}
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._new_protocol(connection), accepted, ssl=self._tls, **options
            )
        except BaseException as error:
            is_counted = connection.counted_address is None  # the limiter closed it
            connection.close()
            accepted.close()
            if not isinstance(error, OSError):  # ssl.SSLError and TimeoutError are OSErrors
                raise
            if not is_counted:
                self._limiter.counts.connections_refused["tls_handshake"] += 1
                self._limiter.log_limiter.warn(
                    "a TLS handshake failed", address=connection.address, error=type(error).__name__
                )


def _shut_down(accepted: socket.socket) -> None:
    """Shut down a connection that is still in its TLS handshake."""
    with suppress(OSError):  # the connection is already closed
        accepted.shutdown(socket.SHUT_RDWR)
