"""The common part of the proxies: a port on this machine, the open connections, and the counted faults."""

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections import Counter
from contextlib import suppress
from typing import Final, Generic, Protocol, Self, TypeVar

HOST: Final = "127.0.0.1"
"""Address of the proxies, for clients on the same machine."""
CHUNK_BYTES: Final = 65_536
"""Maximum bytes per read. A stream buffers twice as much before its sender must wait."""
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER value with a zero timeout: unsent bytes are dropped and the other end gets a RST."""


class Link(Protocol):
    """A connection through a proxy. `task` finishes with the connection."""

    task: asyncio.Task[None]

    def cut(self, *, is_reset: bool = True) -> None:
        """Close the connection immediately, with a RST or a FIN at both ends."""


LinkType = TypeVar("LinkType", bound=Link)
Faults = TypeVar("Faults")


class ProxyServer(ABC, Generic[LinkType, Faults]):
    """Proxy that listens on a separate port from `start` to `close`. Also an asynchronous context manager."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        """Determines all faults."""
        self.faults = faults
        """Fault rates. A change takes effect at the next message in each direction."""
        self.done: Counter[str] = Counter()
        """Number of faults so far, by incident."""
        self.accepted_count = 0
        """Number of connections so far, including refused ones. The last connection has this number."""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: set[LinkType] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def port(self) -> int:
        """Return the proxy's port, which does not change until the proxy is closed."""
        if self._server is None:
            raise RuntimeError("the proxy has a port only while it is open")
        return self._port

    @property
    def open_count(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    async def start(self) -> None:
        """Start listening."""
        if self._server is not None:
            raise RuntimeError("the proxy has already been started")
        self._server = await asyncio.start_server(self._accept, HOST, 0, limit=CHUNK_BYTES)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, cut the open connections, and wait until they are closed.

        Does nothing if the proxy is closed.
        """
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [link.task for link in self._connections]
        self.cut_all()
        if tasks:
            await asyncio.wait(tasks)
        await server.wait_closed()

    def cut_all(self) -> None:
        """Reset all open connections at both ends. These cuts are not counted."""
        for link in list(self._connections):
            link.cut()

    @abstractmethod
    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Refuse a new connection, or forward it and pass it to `_add`."""

    def _add(self, link: LinkType) -> None:
        """Keep an open connection until its task is done."""
        self._connections.add(link)
        link.task.add_done_callback(lambda _: self._connections.discard(link))


def close_writer(writer: StreamWriter, *, is_reset: bool) -> None:
    """Close a connection immediately, with a RST or a FIN. Buffered bytes are not sent."""
    if writer.transport.is_closing():
        return
    with suppress(OSError):  # the other end has closed
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            writer.write_eof()  # closing alone would send a RST if received bytes were unread
    writer.transport.abort()
