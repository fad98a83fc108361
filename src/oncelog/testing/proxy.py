"""A WebSocket proxy that injects network faults, determined by a seed.

    async with FaultyProxy("127.0.0.1", server_port, seed=7) as proxy:
        await work_of(clients_of(proxy.url))
        assert proxy.done[Incident.CUT_AT_ANSWER]  # the fault did happen
        proxy.calm()
        ...  # and now all clients must converge

The proxy runs between clients and a server. For each frame, at the rates of `Faults`, it injects these faults:

- Cut: the connection is closed with a RST or a FIN. This happens before or inside a frame or the HTTP upgrade, after a
  whole frame, or, for a client's frame, when the server's answer has reached the proxy. That answer is lost.
- Stall: all further bytes in one or both directions are lost, but the connection remains open until one end closes it
  or the proxy cuts it at the end of the stall.
- Delay: a frame and the frames after it are held back.
- Duplicate: a text frame is sent twice, in either direction.
- Refusal: a connection is accepted and immediately closed.

A stall drops all bytes after some point, never a single frame, because TCP delivers bytes in order and without gaps.
Losing one frame would be a bug above TCP, which clients need not handle. TCP does not duplicate frames either, but
retrying clients and relays do.

The head of the upgrade is treated as a frame that is never duplicated. Control frames, parts of messages, frames with
extension bits (such as compression), and frames above `DUPLICATED_BYTES_MAX` are not duplicated either. If the first
request of a connection is not an upgrade, or is not answered with 101, its bytes pass unchanged.

The fault of a frame depends only on the seed, the number of its connection (in order of arrival, including refused
ones), its direction, and its place among the frames in that direction. How the frames of several connections interleave
depends on the machine.

Times are real but short: the defaults delay a frame by at most 20 ms.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import Counter
from types import TracebackType
from typing import Final, Self

from oncelog.testing.proxy_connection import CHUNK_BYTES, ProxiedConnection, close_writer
from oncelog.testing.proxy_faults import CALM, DUPLICATED_BYTES_MAX, Faults, FaultState, Incident, should_refuse

__all__ = ["CALM", "DUPLICATED_BYTES_MAX", "Faults", "FaultyProxy", "Incident"]

HOST: Final = "127.0.0.1"
"""Address of the proxy, for clients on the same machine."""


class FaultyProxy:
    """Proxy that listens on a separate port from `start` to `close`. Also an asynchronous context manager.

    Print the proxy when a test fails: its seed reproduces the run.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0, faults: Faults | None = None) -> None:
        self.target = (host, port)
        """Address for new connections. Change it when the server has moved; open connections are kept."""
        self._fault_state = FaultState(seed, Faults() if faults is None else faults)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._accepted = 0
        self._connections: set[ProxiedConnection] = set()

    def __repr__(self) -> str:
        host, port = self.target
        return f"FaultyProxy({host!r}, {port}, seed={self.seed}, faults={self.faults})"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def seed(self) -> int:
        """Return the seed that determines all faults."""
        return self._fault_state.seed

    @property
    def faults(self) -> Faults:
        """Fault rates. A change takes effect at the next frame in each direction."""
        return self._fault_state.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._fault_state.faults = faults

    @property
    def done(self) -> Counter[str]:
        """Return the number of faults so far, by `Incident`: `done[Incident.DUPLICATED]`, `done["duplicated"]`."""
        return self._fault_state.done

    @property
    def port(self) -> int:
        """Return the proxy's port, which does not change until the proxy is closed."""
        if self._server is None:
            raise RuntimeError("the proxy has a port only while it is open")
        return self._port

    @property
    def url(self) -> str:
        """Return the address for clients, without a path: `http://127.0.0.1:PORT`."""
        return f"http://{HOST}:{self.port}"

    @property
    def accepted_count(self) -> int:
        """Return the number of connections so far, including refused ones. The last connection has this number."""
        return self._accepted

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
        tasks = [connection.task for connection in self._connections]
        self.cut_all()
        if tasks:
            await asyncio.wait(tasks)
        await server.wait_closed()

    def calm(self) -> None:
        """Stop all faults. Connections that have lost bytes are cut; the others are kept."""
        self._fault_state.faults = CALM
        for connection in list(self._connections):
            connection.calm()

    def cut_all(self) -> None:
        """Reset all open connections at both ends. These cuts are not counted."""
        for connection in list(self._connections):
            connection.cut(is_reset=True)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._accepted += 1
        if self._server is None:  # the connection arrived while the proxy was closing
            close_writer(writer, is_reset=True)
        elif should_refuse(self.seed, self._accepted, self.faults):
            self.done[Incident.REFUSED] += 1
            close_writer(writer, is_reset=False)
        else:
            connection = ProxiedConnection(self._accepted, self._fault_state, reader, writer)
            self._connections.add(connection)
            connection.start(self.target)
            connection.task.add_done_callback(lambda _: self._connections.discard(connection))
