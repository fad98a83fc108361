"""Run a server until it is killed: python deltas_server_worker.py STORE PORT SCHEMAS. Prints its URL."""

import asyncio
import sys

from oncelog.doors.server import Server
from oncelog.doors.settings import ServerSettings


async def main() -> None:
    _, store, port, schemas = sys.argv
    settings = ServerSettings(
        store=store, port=int(port), grpc_port=0, development=True, deltas_schemas=schemas or None
    )
    async with Server(settings) as server:
        sys.stdout.write(f"{server.urls[0]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


asyncio.run(main())
