"""Run a server until it is killed: python ledger_server_worker.py STORE GRPC_PORT. Prints its gRPC address."""

import asyncio
import sys

from oncelog.doors.server import Server
from oncelog.doors.settings import ServerSettings


async def main() -> None:
    settings = ServerSettings(store=sys.argv[1], port=0, grpc_port=int(sys.argv[2]), development=True)
    async with Server(settings) as server:
        assert server.rpc is not None
        sys.stdout.write(f"127.0.0.1:{server.rpc.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


asyncio.run(main())
