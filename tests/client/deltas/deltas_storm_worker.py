"""Edit rows until the process is killed: python deltas_storm_worker.py URL FILE CLIENT ROUND

Puts rows `CLIENT:ROUND:NUMBER`, and writes each name into a row that all clients share. Prints each name once it is on
disk.
"""

import asyncio
import sys
from itertools import count

from oncelog.client.deltas import DeltasClient, DeltasLimits

_, URL, FILE, CLIENT, ROUND = sys.argv
LIMITS = DeltasLimits(pause_ms_min=1, pause_ms_max=20)


async def main() -> None:
    async with DeltasClient(URL, "shop", path=FILE, client_id=CLIENT, limits=LIMITS) as client:
        for number in count():
            name = f"{CLIENT}:{ROUND}:{number:04}"
            await client.put("products", name, {"number": number})
            await client.put("products", "shared", {CLIENT.replace("-", "_"): name, "last": name})
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()


asyncio.run(main())
