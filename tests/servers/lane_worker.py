"""Write or follow a lane: python lane_worker.py ADDRESS write NAME COUNT | follow NAME COUNT FILE

The worker starts when it reads the first input line. A follower writes all received positions to FILE, in order.
"""

import asyncio
import sys
from array import array
from pathlib import Path

from oncelog.core.policy import EVENTS
from oncelog.core.values import Committed, Submission
from oncelog.engine.limits import Limits
from oncelog.engine.log import Log, open_log
from scripts import print_line

BATCH = 1000
LIMITS = Limits(cache_entries_max=0, subscription_records_max=5_000)


def batch_of(name: str, start: int) -> list[Submission]:
    keys = [name.encode().ljust(8, b"-") + number.to_bytes(8, "big") for number in range(start, start + BATCH)]
    return [Submission(policy=EVENTS, scope="", key=key, fingerprint=key, body=key) for key in keys]


async def write(log: Log, name: str, count: int) -> None:
    for start in range(0, count, BATCH):
        verdicts = await log.submit_many(batch_of(name, start))
        assert all(isinstance(verdict, Committed) for verdict in verdicts)


async def follow(log: Log, count: int) -> "array[int]":
    seen = array("Q")
    async with log.follow() as records:
        async for record in records:
            seen.append(record.position)
            if len(seen) == count:
                break
    return seen


async def main(address: str, kind: str, name: str, count: int) -> "array[int] | None":
    async with open_log(address, limits=LIMITS) as log:
        print_line("ready")
        await asyncio.to_thread(sys.stdin.readline)
        return await (write(log, name, count) if kind == "write" else follow(log, count))


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
    if found is not None:
        Path(sys.argv[5]).write_bytes(found.tobytes())
    print_line("end")
