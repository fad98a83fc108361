"""Write until the process is killed: python ledger_storm_worker.py ADDRESS FILE ROUND

Writes entities `ROUND:NUMBER`, several at a time, each on the condition that it does not exist. Prints the recovered
writes and each outcome.
"""

import asyncio
import sys
from itertools import count

from oncelog.client.ledger import LedgerClient, LedgerLimits, set_entity
from scripts import print_line

_, ADDRESS, FILE, ROUND = sys.argv
LIMITS = LedgerLimits(pause_ms_min=1, pause_ms_max=20)


async def main() -> None:
    client = LedgerClient(ADDRESS, path=FILE, organization="acme", client_id="billing-1", limits=LIMITS)
    async with client as ledger:
        numbers = count()

        async def write() -> None:
            for number in numbers:
                outcome = await ledger.write(set_entity(f"{ROUND}:{number:04}", b"1", must_not_exist=True))
                print_line(type(outcome).__name__, f"{ROUND}:{number:04}")

        async def recover() -> None:
            for one in await ledger.recovered():
                print_line(type(one.outcome).__name__, getattr(one.operations[0], "key", ""))

        await asyncio.gather(recover(), *(write() for _ in range(10)))


asyncio.run(main())
