"""Edit rows, then kill this process: python deltas_client_worker.py URL FILE MOMENT COUNT

The worker puts the rows `0` to COUNT - 1. It kills itself when its first push reaches MOMENT: `unsent` (all edits are
on disk, but not sent) or `unanswered` (the gateway has answered, but the client has not processed the answer).
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from oncelog.client.deltas import DeltasClient
from oncelog.client.deltas.codec import OutboxEntry, PushReply
from oncelog.client.deltas.transport import DeltasTransport

_, URL, FILE, MOMENT, COUNT = sys.argv
push = DeltasTransport.push
edited = asyncio.Event()


async def kill_before_push(self: DeltasTransport, entries: Sequence[OutboxEntry]) -> PushReply:
    await edited.wait()
    if MOMENT == "unanswered":
        await push(self, entries)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


async def main() -> None:
    async with DeltasClient(URL, "shop", path=FILE, client_id="till-1") as client:
        for number in range(int(COUNT)):
            await client.put("products", f"{number:04}", {"number": number})
        edited.set()
        await asyncio.Event().wait()


DeltasTransport.push = kill_before_push  # type: ignore[method-assign]
asyncio.run(main())
