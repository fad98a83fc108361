"""A proxy for WebSockets that does to connections what networks do, by a seed.

    async with FaultyProxy("127.0.0.1", server_port, seed=7) as proxy:
        await work_of(clients_of(proxy.url))
        assert proxy.done[Incident.CUT_AT_ANSWER]  # faults did happen
        proxy.calm()
        ...  # and now everything must converge

It stands between clients and a server, and per frame, as often as `Faults` says, it

- cuts: the connection ends, with a RST or a FIN: before or in the middle of a frame or of the HTTP upgrade, after a
  whole one, or, of a client's frames, when the server's answer has come as far as the proxy. That answer is lost;
- stalls: from some byte on all that is sent in one direction, or in both, vanishes, while the connection stays open,
  until one end closes it or the time of the stall is over and the proxy cuts it;
- delays: a frame is held back, and those behind it with it;
- duplicates: a text frame is sent twice, in either direction;
- refuses: a connection is accepted and closed at once.

A stall takes all bytes from a point on and never a frame from the middle, because TCP does not either: bytes arrive in
order and without a gap, or no more of them arrive. Who loses one frame of many has a bug above TCP, and no client is
asked to bear that. For frames that come twice TCP is no reason, but clients that send again are, and relays between.

The head of the upgrade counts as a frame that is never duplicated. Not duplicated are control frames, parts of
messages, frames that an extension such as compression has marked, and frames beyond `DUPLICATED_BYTES_MAX`. The bytes
of a connection whose first request is no upgrade, or is not answered with 101, pass as they are.

What happens to a frame follows from the seed, the number of its connection (in the order of arrival, refused ones
too), its direction and its place among the frames there, and from nothing else. How the frames of several connections
interleave is up to the machine.

Times are real ones, and small; the defaults hold a frame back for at most 20 ms.
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
"""Where it listens: whom it serves is on this machine."""


class FaultyProxy:
    """Listens on a port of its own from `start` to `close`, or as an asynchronous context manager.

    Print it when a test fails: its seed repeats the run.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0, faults: Faults | None = None) -> None:
        self.target = (host, port)
        """Where new connections go. Change it when the server has moved; those that are open stay where they are."""
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
        """What all faults follow from."""
        return self._fault_state.seed

    @property
    def faults(self) -> Faults:
        """How often what happens. Set it at any time; it counts from the next frame of each direction on."""
        return self._fault_state.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._fault_state.faults = faults

    @property
    def done(self) -> Counter[str]:
        """What has happened so far, by `Incident`, and how often: `done[Incident.DUPLICATED]`, `done["duplicated"]`."""
        return self._fault_state.done

    @property
    def port(self) -> int:
        """Where it listens; the same until it is closed."""
        if self._server is None:
            raise RuntimeError("the proxy has no port before it is started, or after it was closed")
        return self._port

    @property
    def url(self) -> str:
        """For clients, without a path: `http://127.0.0.1:PORT`."""
        return f"http://{HOST}:{self.port}"

    @property
    def accepted_count(self) -> int:
        """How many connections have come, refused ones too. The last has this number."""
        return self._accepted

    @property
    def open_count(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    async def start(self) -> None:
        """Begins to listen."""
        if self._server is not None:
            raise RuntimeError("the proxy is started already")
        self._server = await asyncio.start_server(self._accept, HOST, 0, limit=CHUNK_BYTES)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening, cuts what is open, and returns when all of it has ended. Does nothing a second time."""
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
        """No fault happens from here on. Connections that have lost bytes already are cut; the others stay."""
        self._fault_state.faults = CALM
        for connection in list(self._connections):
            connection.calm()

    def cut_all(self) -> None:
        """Cuts every connection that is open, with a RST to both ends. It is not counted: you have done it."""
        for connection in list(self._connections):
            connection.cut(is_reset=True)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._accepted += 1
        if self._server is None:  # it came while the proxy was being closed
            close_writer(writer, is_reset=True)
        elif should_refuse(self.seed, self._accepted, self.faults):
            self.done[Incident.REFUSED] += 1
            close_writer(writer, is_reset=False)
        else:
            connection = ProxiedConnection(self._accepted, self._fault_state, reader, writer)
            self._connections.add(connection)
            connection.start(self.target)
            connection.task.add_done_callback(lambda _: self._connections.discard(connection))
