"""A server that stops in the middle of its first commit: python withheld_worker.py STORE before|after

It says where it listens, and then when it is there: before the commit is made, or after it, when nobody has been told.
There it stays until it is killed.
"""

import asyncio
import os
import sys
from typing import Any

from oncelog.doors.server import Server
from oncelog.doors.settings import ServerSettings


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(store: str, moment: str) -> None:
    settings = ServerSettings(store=store, port=0, grpc_port=0, development=True)
    async with Server(settings) as server:
        kept: Any = server.log._store
        commit = kept.commit

        async def withheld(*given: Any, **named: Any) -> None:
            if moment == "after":
                await commit(*given, **named)
            say("there")
            await asyncio.Event().wait()

        kept.commit = withheld
        assert server.rpc is not None
        say(server.urls[0], server.rpc.port)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
