"""Send messages until the process is killed: python chat_storm_worker.py URL FILE USER ROUND

Prints each message once it is on disk, and reads received messages concurrently.
"""

import asyncio
import sys
from itertools import count

from oncelog.client.chat import ChatClient, ChatLimits

_, URL, FILE, USER, ROUND = sys.argv
LIMITS = ChatLimits(pause_ms_min=1, pause_ms_max=20, gap_wait_ms=10)


async def read(client: ChatClient) -> None:
    last = 0
    async for message in client.messages("tea"):
        assert message.sequence == last + 1 or not last, (message.sequence, last)
        last = message.sequence


async def main() -> None:
    async with ChatClient(URL, path=FILE, token=USER, limits=LIMITS) as client:
        reading = asyncio.create_task(read(client))
        for number in count():
            if reading.done():
                reading.result()
            content = f"{USER}:{ROUND}:{number:04}"
            await client.send("tea", content)
            sys.stdout.write(f"{content}\n")
            sys.stdout.flush()
            await asyncio.sleep(0.002)


asyncio.run(main())
