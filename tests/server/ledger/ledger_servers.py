"""Servers for tests of the Ledger API, and connections to servers in this and other processes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from databases import log_at
from oncelog.core.values import Settings
from oncelog.engine.log import open_log
from oncelog.testing.clock import ManualClock
from server.auth import auth_material
from server.ledger.ledger_transports import GRPC, GrpcWire, HttpWire, Ledger, Wire
from server.running_server import Serving, ShiftedClock, serving
from server.shared_servers import pool_fixture


def key(number: int) -> bytes:
    """Return an idempotency key that is unique to the number."""
    return b"key-" + number.to_bytes(12, "big")


def token(sub: str = "ada", read: Sequence[str] = ("*",), write: Sequence[str] = ("*",), **claims: Any) -> str:
    """Return a valid token with these grants."""
    return auth_material.token(sub=sub, grants={"read": list(read), "write": list(write)}, **claims)


class Connections:
    """Connections to one server: a gRPC channel and an HTTP session that the wires of all credentials share."""

    def __init__(self, kind: str, url: str, rpc_port: int) -> None:
        self.kind = kind
        self.url = url
        self.rpc_port = rpc_port
        self._connections: dict[str, Any] = {}

    def wire(self, kind: str | None = None, credential: str | None = None) -> Any:
        """Return a client of the given protocol that sends the credential with every call."""
        chosen = kind or self.kind
        if chosen not in self._connections:
            self._connections[chosen] = self._connect(chosen)
        connection = self._connections[chosen]
        made: Wire = GrpcWire(connection, credential) if chosen == GRPC else HttpWire(connection, self.url, credential)
        return made

    def _connect(self, kind: str) -> Any:
        if kind == GRPC:
            # Without the bandwidth probe the window remains small, so unread data waits at the server.
            options = [("grpc.http2.bdp_probe", 0)]
            return grpc.aio.insecure_channel(f"127.0.0.1:{self.rpc_port}", options)
        # No connection limit, because tests send many requests at the same time.
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def ledger(
        self, organization: str = "acme", vault: str = "", client_id: str = "", credential: str | None = None
    ) -> Ledger:
        return Ledger(self.wire(credential=credential), organization, vault, client_id)

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()


class LedgerServer(Connections):
    """A server in this process and connections to it."""

    def __init__(self, served: Serving, kind: str) -> None:
        assert served.server.grpc_service is not None
        super().__init__(kind, served.url, served.server.grpc_service.port)
        self.served = served
        self.server = served.server
        self.log = served.server.log


@asynccontextmanager
async def run_server(directory: Path, kind: str, **options: Any) -> AsyncIterator[LedgerServer]:
    """Run a server on the log in the directory, with the options of `serving`."""
    async with serving(directory, **options) as served:
        server = LedgerServer(served, kind)
        try:
            yield server
        finally:
            await server.close()


def server_pool_with(**options: Any) -> Any:
    """Return a fixture for a pool of servers with these options."""
    return pool_fixture(lambda directory: run_server(directory, GRPC, **options))


async def prepare(directory: Path, clock: ManualClock | ShiftedClock, **settings: int) -> None:
    """Create a log for `run_server`, by default with one lane. `settings` may set the eviction interval."""
    chosen = Settings(**{"lanes": 1, **settings})
    async with open_log(log_at(directory / "events.db"), settings=chosen, clock=clock):
        pass


class SharedServer:
    """A running server that many tests share. Each test uses a separate organization."""

    def __init__(self, server: LedgerServer, name: str) -> None:
        self.server = server
        self.name = name

    def ledger(self, client_id: str = "app", vault: str = "") -> Ledger:
        """Return a client of the test's organization."""
        return self.server.ledger(self.name, vault, client_id)

    def ledger_as(self, credential: str | None, vault: str = "", suffix: str = "") -> Ledger:
        """Return a client that sends the credential. `suffix` is appended to the name of the test's organization."""
        return self.server.ledger(f"{self.name}{suffix}", vault, credential=credential)

    @property
    def scope(self) -> str:
        """The scope of the test's organization, as in grants."""
        return f"ledger/{self.name}"

    def wire(self) -> Any:
        return self.server.wire()
