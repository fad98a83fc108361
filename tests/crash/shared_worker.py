"""A process of test_processes.py: python shared_worker.py FILE SEAL_KEYS SEED DIE_AFTER ROUNDS

It starts when it reads the first input line. It submits the same writes as the other processes in a different order,
and follows the log from the beginning to the end. With DIE_AFTER, it kills itself after that number of answers, always
in the middle of its work.
"""

import asyncio
import os
import signal
import sys
import time
from random import Random

from crash.load import SUBMITTERS, WRITES, format_answer, members, write
from oncelog.core.values import Submission
from oncelog.engine.log import Log, open_log
from oncelog.storage.sqlite import SqliteStore

OUT = 1
AT_ONCE = 16


def count_events(rounds: int) -> int:
    """Return the number of records in lane 0 after all rounds."""
    return len(range(0, SUBMITTERS, 3)) * WRITES * rounds


def shuffle_writes(random: Random, rounds: int) -> list[list[Submission]]:
    """Return the writes of each submitter, shuffled except for clients with client sequences."""
    found = []
    for submitter in range(SUBMITTERS):
        own = [write(number, submitter, step) for number in range(rounds) for step in range(WRITES)]
        if not own[0].client_sequence:
            random.shuffle(own)
        found.append(own)
    random.shuffle(found)
    return found


async def submit_all(log: Log, random: Random, die_after: int, rounds: int) -> None:
    await asyncio.gather(*[log.submit(member) for member in members()])
    waiting = shuffle_writes(random, rounds)
    answers = 0

    async def work() -> None:
        nonlocal answers
        while waiting:
            for one in waiting.pop():
                os.write(OUT, format_answer(one.key, await log.submit(one)))
                answers += 1
                if answers == die_after:
                    os.kill(os.getpid(), signal.SIGKILL)

    began = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(AT_ONCE)])
    os.write(OUT, b"done %.3f\n" % (time.perf_counter() - began))


async def follow(log: Log, events: int) -> None:
    async with log.follow() as records:
        async for record in records:
            os.write(OUT, b"S %d %s\n" % (record.position, record.key.hex().encode()))
            if record.position == events:
                return


async def main(path: str, seal_keys: int, seed: int, die_after: int, rounds: int) -> None:
    async with Log(SqliteStore(path, seal_keys=seal_keys)) if seal_keys else open_log(path) as log:
        following = asyncio.create_task(follow(log, count_events(rounds)))
        await submit_all(log, Random(seed), die_after, rounds)
        await following
        os.write(OUT, b"end\n")


if __name__ == "__main__":
    os.write(OUT, b"ready\n")
    sys.stdin.readline()
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
