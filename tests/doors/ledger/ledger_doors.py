"""Servers whose ledger door is tested, and ways to it: in this process, and in processes of their own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import grpc.aio

from cli.served import Served
from databases import log_at
from doors.ledger.wires import GRPC, GrpcWire, HttpWire, Ledger, Wire
from doors.serving import RUN_S, Serving, ShiftedClock, serving
from oncelog.core.values import Settings
from oncelog.engine.log import open_log
from oncelog.testing.clock import ManualClock

T = TypeVar("T")


def key(number: int) -> bytes:
    """An idempotency key."""
    return b"key-" + number.to_bytes(12, "big")


class Ways:
    """Wires to one server, each made once."""

    def __init__(self, kind: str, url: str, rpc_port: int) -> None:
        self.kind = kind
        self.url = url
        self.rpc_port = rpc_port
        self._wires: dict[tuple[str, str | None], Wire] = {}

    def wire(self, kind: str | None = None, credential: str | None = None) -> Any:
        chosen = kind or self.kind
        if (chosen, credential) not in self._wires:
            self._wires[chosen, credential] = self._made(chosen, credential)
        return self._wires[chosen, credential]

    def _made(self, kind: str, credential: str | None) -> Wire:
        if kind == GRPC:
            # A window that does not grow: what is not read waits at the server, as over a long line.
            options = [("grpc.http2.bdp_probe", 0)]
            return GrpcWire(grpc.aio.insecure_channel(f"127.0.0.1:{self.rpc_port}", options), credential)
        # Without a limit: many may ask at the same time.
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return HttpWire(session, self.url, credential)

    def ledger(
        self, organization: str = "acme", vault: str = "", client_id: str = "", credential: str | None = None
    ) -> Ledger:
        return Ledger(self.wire(credential=credential), organization, vault, client_id)

    async def close(self) -> None:
        for wire in self._wires.values():
            await wire.close()


# --- in this process ---------------------------------------------------------------------------------------


class Door(Ways):
    """A server in this process."""

    def __init__(self, served: Serving, kind: str) -> None:
        assert served.server.rpc is not None
        super().__init__(kind, served.url, served.server.rpc.port)
        self.served = served
        self.server = served.server
        self.log = served.server.log


@asynccontextmanager
async def opened(directory: Path, kind: str, **options: Any) -> AsyncIterator[Door]:
    """A server with a log in the directory; options are those of `serving`."""
    async with serving(directory, **options) as served:
        door = Door(served, kind)
        try:
            yield door
        finally:
            await door.close()


async def prepare(directory: Path, clock: ManualClock | ShiftedClock, **settings: int) -> None:
    """Makes the log that `opened` finds: in one lane, and with its eviction interval."""
    chosen = Settings(**{"lanes": 1, **settings})
    async with open_log(log_at(directory / "events.db"), settings=chosen, clock=clock):
        pass


class House:
    """A server that tests share, in a loop that goes on from test to test. Each has scopes of its own."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._runner = asyncio.Runner()
        self._directory = directory
        self._opened = opened(directory, kind)
        self.door = self.run(self._opened.__aenter__())
        self.name = ""

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(main, RUN_S))

    def ledger(self, client_id: str = "app", vault: str = "") -> Ledger:
        """A scope of the test that is running."""
        return self.door.ledger(self.name, vault, client_id)

    def wire(self) -> Any:
        return self.door.wire()

    def close(self) -> None:
        self.run(self._opened.__aexit__(None, None, None))
        self._runner.close()


# --- in processes of their own -----------------------------------------------------------------------------


class Gateway(Served):
    """`oncelog serve`, with gRPC at a port that stays the same too."""

    def __init__(self, directory: Path, arguments: tuple[str, ...] = ()) -> None:
        self._rpc_port = socket.socket()
        self._rpc_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._rpc_port.bind(("127.0.0.1", 0))
        self.rpc_port: int = self._rpc_port.getsockname()[1]
        ours = ("--development", "--quiet", "--set=grpc=true", f"--set=grpc_port={self.rpc_port}")
        super().__init__(directory, [*ours, *arguments])

    def ways(self, kind: str) -> Ways:
        return Ways(kind, self.url, self.rpc_port)

    def end(self) -> None:
        super().end()
        self._rpc_port.close()


@contextmanager
def gateways(directory: Path, count: int, *arguments: str) -> Iterator[list[Gateway]]:
    """So many servers on one log."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(Gateway(directory, arguments))
            stack.callback(found[-1].end)
        yield found
