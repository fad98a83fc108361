"""TCP links that can be cut. Bytes wait until the link is mended, as retransmitted packets would."""

import asyncio
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from oncelog.testing.cluster.layout import HOST

_CHUNK_BYTES: Final = 65_536

T = TypeVar("T")


class TcpLink:
    """Forwards connections from its own port to a target port."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._connected = asyncio.Event()
        self._connected.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.port = 0

    async def start(self) -> None:
        """Start listening."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Stop forwarding in both directions, including for new connections. Neither end is notified."""
        self._connected.clear()

    def mend(self) -> None:
        """Forward the waiting bytes."""
        self._connected.set()

    async def close(self) -> None:
        """Close all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio has created a task
        self._tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            await self._forward(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def _forward(self, reader: StreamReader, writer: StreamWriter) -> None:
        await self._connected.wait()
        target_reader, target_writer = await asyncio.open_connection(HOST, self._target)
        copy_tasks = [
            asyncio.create_task(self._copy(reader, target_writer)),
            asyncio.create_task(self._copy(target_reader, writer)),
        ]
        try:
            await asyncio.wait(copy_tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy_task in copy_tasks:
                copy_task.cancel()
            target_writer.close()

    async def _copy(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._connected.wait()
                writer.write(data)
                await writer.drain()
            await self._connected.wait()  # forward the end of the stream only once the link is mended


class TcpLinks:
    """TCP links that run in a separate thread.

    Links are named after nodes, and all links of a node are cut together.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()
        self._links: dict[str, list[TcpLink]] = {}

    def add(self, name: str, target: int) -> int:
        """Add a link to a port and return its port."""

        async def open_link() -> TcpLink:
            link = TcpLink(target)
            await link.start()
            return link

        link = self._run(open_link())
        self._links.setdefault(name, []).append(link)
        return link.port

    def cut(self, name: str) -> None:
        """Cut all links with a name."""
        for link in self._links[name]:
            self._loop.call_soon_threadsafe(link.cut)

    def mend(self, name: str) -> None:
        """Mend all links with a name."""
        for link in self._links[name]:
            self._loop.call_soon_threadsafe(link.mend)

    def close(self) -> None:
        """Close all links and the thread."""
        for link in (link for links in self._links.values() for link in links):
            self._run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
