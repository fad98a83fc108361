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

from asyncio import StreamReader, StreamWriter

from oncelog.testing.proxy_connection import ProxiedConnection
from oncelog.testing.proxy_faults import CALM, DUPLICATED_BYTES_MAX, Faults, Incident, should_refuse
from oncelog.testing.proxy_server import HOST, ProxyServer, close_writer

__all__ = ["CALM", "DUPLICATED_BYTES_MAX", "Faults", "FaultyProxy", "Incident"]


class FaultyProxy(ProxyServer[ProxiedConnection, Faults]):
    """Proxy that listens on a separate port from `start` to `close`. Also an asynchronous context manager.

    Print the proxy when a test fails: its seed reproduces the run.
    """

    def __init__(self, host: str, port: int, *, seed: int = 0, faults: Faults | None = None) -> None:
        super().__init__(seed, Faults() if faults is None else faults)
        self.target = (host, port)
        """Address for new connections. Change it when the server has moved; open connections are kept."""

    def __repr__(self) -> str:
        host, port = self.target
        return f"FaultyProxy({host!r}, {port}, seed={self.seed}, faults={self.faults})"

    @property
    def url(self) -> str:
        """Return the address for clients, without a path: `http://127.0.0.1:PORT`."""
        return f"http://{HOST}:{self.port}"

    def calm(self) -> None:
        """Stop all faults. Connections that have lost bytes are cut; the others are kept."""
        self.faults = CALM
        for connection in list(self._connections):
            connection.calm()

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.accepted_count += 1
        if self._server is None:  # the connection arrived while the proxy was closing
            close_writer(writer, is_reset=True)
        elif should_refuse(self.seed, self.accepted_count, self.faults):
            self.done[Incident.REFUSED] += 1
            close_writer(writer, is_reset=False)
        else:
            connection = ProxiedConnection(self.accepted_count, self, reader, writer)
            connection.start(self.target)
            self._add(connection)
