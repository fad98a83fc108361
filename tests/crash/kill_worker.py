"""The processes that test_kill.py kills: for every line FILE, ROUND and SEAL_KEYS it forks one, and waits for its end.

Each writes a line for every answer, at the moment it has it, and for every record that a follower saw. They are forked
because most of the life of a new process would be spent on imports.
"""

import asyncio
import os
import sys

from crash.load import SUBMITTERS, WRITES, line_of, members, write
from oncelog.engine.log import Log, open_log
from oncelog.stores.sqlite import SqliteStore

OUT = 1


async def submitter(log: Log, round_number: int, number: int) -> None:
    for step in range(WRITES):
        one = write(round_number, number, step)
        os.write(OUT, line_of(one.key, await log.submit(one)))
    lost = write(round_number, number, WRITES - 2)  # its client has lost this answer
    os.write(OUT, line_of(lost.key, await log.submit(lost)))


async def follower(log: Log) -> None:
    async with log.follow() as records:
        async for record in records:
            os.write(OUT, b"S %d %s\n" % (record.position, record.key.hex().encode()))


async def work(path: str, round_number: int, seal_keys: int) -> None:
    async with Log(SqliteStore(path, seal_keys=seal_keys)) if seal_keys else open_log(path) as log:
        following = asyncio.create_task(follower(log))
        await asyncio.gather(*[log.submit(member) for member in members()])
        await asyncio.gather(*[submitter(log, round_number, number) for number in range(SUBMITTERS)])
        await following  # until it is killed


def main() -> None:
    for line in sys.stdin:
        path, round_number, seal_keys = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            asyncio.run(work(path, int(round_number), int(seal_keys)))
            os._exit(0)
        os.write(OUT, b"process %d\n" % child)
        os.waitpid(child, 0)
        os.write(OUT, b"dead\n")


if __name__ == "__main__":
    main()
