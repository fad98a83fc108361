"""Run a server until it is killed: python chat_server_worker.py STORE PORT. Prints its URL."""

import asyncio
import sys

from oncelog.doors.server import Server
from oncelog.doors.settings import ServerSettings


async def main() -> None:
    _, store, port = sys.argv
    settings = ServerSettings(store=store, port=int(port), grpc_port=0, development=True)
    async with Server(settings) as server:
        sys.stdout.write(f"{server.urls[0]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


asyncio.run(main())
