"""Write entities, then kill this process: python ledger_client_worker.py ADDRESS FILE MOMENT COUNT

The worker writes the entities `entity:0` to COUNT - 1 concurrently, each on the condition that it does not exist. The
process kills itself when the last write is at MOMENT: `unsent` (saved, but not sent) or `unanswered` (the server has
answered, but the client has not processed the answer).
"""

import asyncio
import os
import signal
import sys

from oncelog.client.ledger import LedgerClient, set_entity
from oncelog.client.ledger.entries import WriteAnswer, WriteCall
from oncelog.client.ledger.transport import LedgerTransport

_, ADDRESS, FILE, MOMENT, COUNT = sys.argv
LAST = f"entity:{int(COUNT) - 1}"
write = LedgerTransport.write


async def kill_at_last_write(self: LedgerTransport, organization: str, vault: str, call: WriteCall) -> WriteAnswer:
    operation = call.entry.operations[0]
    is_last = getattr(operation, "key", "") == LAST
    if is_last and MOMENT == "unsent":
        os.kill(os.getpid(), signal.SIGKILL)
    answer = await write(self, organization, vault, call)
    if is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


async def main() -> None:
    async with LedgerClient(ADDRESS, path=FILE, organization="acme", client_id="billing-1") as ledger:
        names = [f"entity:{number}" for number in range(int(COUNT))]
        await asyncio.gather(*(ledger.write(set_entity(name, b"1", must_not_exist=True)) for name in names))


LedgerTransport.write = kill_at_last_write  # type: ignore[method-assign]
asyncio.run(main())
