"""A server that kills itself in the middle of a fan-out: python fan_out_worker.py STORE WRITTEN

It prints its URL. After it has written messages with the content `the end` to WRITTEN connections, it kills itself
before the next write.
"""

import asyncio
import os
import signal
import sys

from oncelog.server.app import Server
from oncelog.server.settings import ServerSettings
from oncelog.server.websocket import WebSocketSessionTransport


async def main(store: str, written: int) -> None:
    async with Server(ServerSettings(store=store, port=0, grpc=False, development=True)) as server:
        write = WebSocketSessionTransport.write
        count = 0

        def write_or_exit(self: WebSocketSessionTransport, data: bytes) -> None:
            nonlocal count
            if b'"type":"message"' in data and b"the end" in data:
                if count == written:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
            write(self, data)

        WebSocketSessionTransport.write = write_or_exit  # type: ignore[method-assign]
        os.write(1, f"{server.urls[0]}\n".encode())
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
