"""A server that hangs at its first commit: python hanging_commit_worker.py STORE before|after

It prints its URL and gRPC port, and prints "there" once it hangs: before the commit, or after the commit and before the
answer. It then waits to be killed.
"""

import asyncio
import sys
from typing import Any

from oncelog.server.app import Server
from oncelog.server.settings import ServerSettings
from scripts import print_line


async def main(store: str, moment: str) -> None:
    settings = ServerSettings(store=store, port=0, grpc_port=0, development=True)
    async with Server(settings) as server:
        kept: Any = server.log._store
        commit = kept.commit

        async def hang(*given: Any, **named: Any) -> None:
            if moment == "after":
                await commit(*given, **named)
            print_line("there")
            await asyncio.Event().wait()

        kept.commit = hang
        assert server.grpc_service is not None
        print_line(server.urls[0], server.grpc_service.port)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
