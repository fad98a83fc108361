"""Listening sockets: every connection passes the limits before anything is done for it.

`loop.create_server` reports a connection after its TLS handshake only, and drops connections without a word when the
process has no file descriptor left. So sockets are accepted here.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from oncelog.doors.connections import Connection, ConnectionLimiter
from oncelog.doors.log_limiter import LogLimiter

BACKLOG: Final = 4096
"""Connections that the system keeps until they are accepted. The system may have a lower limit (`somaxconn`)."""
NO_FILES_PAUSE_S: Final = 0.1
"""Pause after `accept` failed for lack of a file descriptor. The system keeps the connections in its queue."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

AddressOf = Callable[[str | None], tuple[str, bool]]
"""Return the address that a peer is counted by, and whether it is a trusted proxy."""


async def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(_bound(family, kind, protocol, address))
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


class Listener:
    """Accepts connections on `sockets` until it is closed. `serve` makes the protocol of each."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        limiter: ConnectionLimiter,
        serve: Callable[[Connection], asyncio.Protocol],
        *,
        address_of: AddressOf,
        tls: ssl.SSLContext | None,
        log_limiter: LogLimiter,
        refused: dict[str, int],
    ) -> None:
        self.sockets = sockets
        self._limiter = limiter
        self._serve = serve
        self._address_of = address_of
        self._tls = tls
        self._accepts_per_turn = limiter.limits.accepts_per_turn(listeners=len(sockets), with_tls=tls is not None)
        self._log_limiter = log_limiter
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Accept connections from now on."""
        for one in self.sockets:
            self._loop.add_reader(one.fileno(), self._accept_some, one)

    def close(self) -> None:
        """Accept no more connections. Open connections stay."""
        for one in self.sockets:
            if one.fileno() >= 0:
                self._loop.remove_reader(one.fileno())
                one.close()
        for pause in self._pauses.values():
            pause.cancel()

    def _accept_some(self, listening: socket.socket) -> None:
        for _ in range(self._accepts_per_turn):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(listening, error)
                    return
                continue  # the client closed it before it was accepted
            self._start(accepted, peer)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        self._refused["open_files"] += 1
        self._log_limiter.warning(
            "a connection cannot be accepted: raise the limit of open files", error=error.strerror
        )
        self._loop.remove_reader(listening.fileno())
        self._pauses[listening] = self._loop.call_later(NO_FILES_PAUSE_S, self._continue, listening)

    def _continue(self, listening: socket.socket) -> None:
        del self._pauses[listening]
        self._loop.add_reader(listening.fileno(), self._accept_some, listening)

    def _start(self, accepted: socket.socket, peer: object) -> None:
        address, is_proxy = self._address_of(str(peer[0]) if isinstance(peer, tuple) else None)
        connection = self._limiter.accept(address, lambda: _shut(accepted), is_proxy=is_proxy)
        if connection is None:
            accepted.close()
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._open(accepted, connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        if connection.group is None:  # closed in favour of another one
            accepted.close()
            return
        options = {} if self._tls is None else {"ssl_handshake_timeout": self._limiter.limits.timeout_ms / 1000}
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._serve(connection), accepted, ssl=self._tls, **options
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            is_counted = connection.group is None  # the limiter closed it
            connection.close()
            accepted.close()
            if not is_counted:
                self._refused["tls_handshake"] += 1
                self._log_limiter.warning(
                    "a TLS handshake failed", address=connection.address, error=type(error).__name__
                )
        except BaseException:
            connection.close()
            accepted.close()
            raise


def _shut(accepted: socket.socket) -> None:
    """End a connection in its TLS handshake."""
    with suppress(OSError):  # it is gone
        accepted.shutdown(socket.SHUT_RDWR)
