"""Submit without a server until the process is killed: python submit_worker.py FILE

Prints the id of each submission after `submit` returns.
"""

import asyncio
import sys

from oncelog.client import Client


async def main() -> None:
    async with Client("http://127.0.0.1:9", path=sys.argv[1], partitions=["a"]) as client:
        number = 0
        while True:
            pending = await asyncio.gather(*(client.submit({"type": "t", "number": number + one}) for one in range(5)))
            number += 5
            sys.stdout.write("".join(f"{one.id}\n" for one in pending))
            sys.stdout.flush()


asyncio.run(main())
